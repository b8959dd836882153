"""The models of tests/functions under plans whose model replicas span processes: each process compares what it has with the local
script.

``python -m tests.multiprocess.train_functions DEVICES PLAN...``, in a job of several processes: DEVICES of each; a plan is
``name of the model / loop / name of the plan``, in which ``*`` stands for all.  At the end a mini-batch is too small;
there are mini-batches of several sizes; a late process reads between steps; one process sends wrong numbers, which the comparison
with the local step must notice; and processes read different data, which they must notice.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import traceback
from typing import Any, Callable, ContextManager, Iterator, List, Sequence, Tuple

import whale_tf as wh

TASK = json.loads(os.environ["TF_CONFIG"])
WORKERS, RANK = len(TASK["cluster"]["worker"]), TASK["task"]["index"]
DEVICES = int(sys.argv[1])
CLUSTER = f"{WORKERS}xcpu:{DEVICES}"

wh.init({"io.slicing": False, "offload": "states"}, cluster=CLUSTER)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.functions.equality import Way  # noqa: E402
from tests.functions.models import CASES  # noqa: E402
from tests.functions.test_matrix import LOOPS, check  # noqa: E402
from whale_tf.communicators.pairs import CrossingValue, Pairs  # noqa: E402

PLANS = {
    "pipeline": Way((WORKERS * DEVICES // 2,) * 2, 0, {"num_micro_batch": 2}),
    "gpipe": Way((1, 1), 0, {"num_micro_batch": 4, "pipeline.schedule": "gpipe"}),
    "nested": Way((1, 1), 0, {"num_micro_batch": 2}),
    "at their stages": Way((1, 1), 0, {"num_micro_batch": 2, "variables": "stage"}),
    "unequal": Way((1, WORKERS * DEVICES - 1), 0, {"num_micro_batch": 2}),
    "recompute": Way((1, WORKERS * DEVICES - 1), 0, {"num_micro_batch": 2, "recompute": "full"}),
    "called": Way((1, 1), 0, {"num_micro_batch": 2, "emit": "call"}),
    "data parallel": Way((1,), 0, {"num_micro_batch": 2}),
    "one stage": Way((WORKERS * DEVICES,), 0, {}),
    "zero bubble": Way((WORKERS * DEVICES // 2,) * 2, 0, {"num_micro_batch": 4, "pipeline.schedule": "zero_bubble_h1"}),
    "split after replicas": Way((WORKERS * DEVICES // 2, -(WORKERS * DEVICES // 2)), 0, {}),
    "auto_parallel": Way((), 0, {"auto_parallel": True}),
    "two TaskGraphs": Way((), 0, {"num_task_graph": 2, "num_micro_batch": 2}),
    "rhino": Way((), 0, {"auto.auto_parallel": "rhino"}),
    "zero v1": Way((WORKERS * DEVICES,), 0, {"zero": "v1"}),
    "zero v2": Way((WORKERS * DEVICES,), 0, {"zero": "v2", "num_micro_batch": 2}),
    "zero v3": Way((WORKERS * DEVICES,), 0, {"zero": "v3", "num_micro_batch": 2}),
    "offload": Way((1, WORKERS * DEVICES - 1), 0, {"offload": "states", "num_micro_batch": 2}),
    "offload v0": Way((1, 1), 0, {"offload": "v0", "num_micro_batch": 2}),
    "offload and zero": Way((WORKERS * DEVICES,), 0, {"offload": "states", "zero": "v2", "num_micro_batch": 2}),
    "offload and split": Way((-WORKERS * DEVICES,), 0, {"offload": "states"}),
    "split replicas": Way((-2,), 0, {}),
    "split": Way((-WORKERS * DEVICES,), 0, {}),
}


def rows(patterns: List[str]) -> List[Tuple[str, str, str]]:
    found = []
    for pattern in patterns:
        model, loop, plan = pattern.split("/")
        matching = [row for row in itertools.product(CASES, LOOPS, PLANS)
                    if all(given in (name, "*") for given, name in zip((model, loop, plan), row))]
        if not matching:
            raise SystemExit(f"no row matches {pattern!r}")
        found += matching
    return list(dict.fromkeys(found))


def main() -> int:
    tf.constant(0)  # starts this process's server, which has a device for the host's memory
    wh.shutdown()
    wrong = 0
    for model, loop, plan in rows(sys.argv[2:]):
        way = PLANS[plan]
        fits = 0 < sum(map(abs, way.counts)) <= DEVICES  # each process has model replicas of its own, and takes other examples
        way = way._replace(devices=WORKERS * DEVICES, cluster=CLUSTER, share=(WORKERS, RANK) if fits else (1, 0))
        way.config["io.slicing"] = False
        try:
            check(model, loop, way)
        except Exception as error:  # the other rows are of interest, too
            wrong += 1
            print(f"{model}/{loop}/{plan}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            if "TRACE" in os.environ:
                traceback.print_exc()
        else:
            print(f"{model}/{loop}/{plan}: equal", flush=True)
    wrong += not refuses_few_examples()  # the job goes on
    wrong += not all(takes_any_size(*counts) for counts in [(1, 1), (WORKERS * DEVICES,)])
    wrong += not measures_looked_up_rows()
    wrong += not reads_what_the_last_step_has_left()
    wrong += not notices_wrong_numbers()
    wrong += not notices_different_data()
    wrong += not refuses_ragged_mini_batches()
    print("finished" if not wrong else f"{wrong} failed", flush=True)
    return int(wrong > 0)


def takes_any_size(*counts: int) -> bool:
    """Whether steps with mini-batches of several sizes, also after the end of the data, and a result with their rows are those of
    the local script."""
    sizes = 16, 11, 13
    local = trained([], *sizes)
    wh.init({"io.slicing": False, "num_micro_batch": 2}, cluster=CLUSTER)
    try:
        found = trained(counts, *sizes)
        return len(found) == len(local) and all(np.allclose(one, other, 1e-11, 1e-13) for one, other in zip(found, local))
    finally:
        wh.shutdown()


def trained(counts: Sequence[int], *sizes: int) -> List[np.ndarray]:
    """Losses, results with rows and variables of steps with mini-batches of these sizes."""
    weights = [tf.Variable(np.linspace(-1, 1, 9).reshape(3, 3)), tf.Variable(np.linspace(1, 2, 9).reshape(3, 3))]
    rows = tf.TensorSpec([None, 3], tf.float64)

    @tf.function(input_signature=[rows])
    def step(x: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape, contextlib.ExitStack() as scopes:
            for number, weight in enumerate(weights):
                if number < len(counts):
                    scopes.close()
                    scopes.enter_context(wh.replicate(counts[number]))
                x = tf.tanh(tf.matmul(x, weight))
            loss = tf.reduce_mean(tf.square(x))
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(.1 * gradient)
        return loss, x

    @tf.function
    def take(elements: Iterator[tf.Tensor]) -> Tuple[tf.Tensor, tf.Tensor]:
        return step(next(elements))

    found: List[np.ndarray] = []
    examples = [np.cos(np.arange(3. * size)).reshape(size, 3) for size in sizes]
    for x in examples:
        found += [one.numpy() for one in step(x)]
    for _ in range(2 if len(sizes) > 1 else 0):
        elements = iter(tf.data.Dataset.from_generator(lambda: examples, output_signature=rows))
        with contextlib.suppress(tf.errors.OutOfRangeError):  # in a call of the step
            while True:
                found += [one.numpy() for one in take(elements)]
    return found + [weight.numpy() for weight in weights]


def measures_looked_up_rows() -> bool:
    """Whether a loss of sampled rows is the local one: it slices looked-up rows, and the look-up is divided, but stays in the
    graph."""
    rng = np.random.RandomState(7)
    values = [rng.randn(20, 6), np.zeros(20), rng.randn(20, 6)]
    batches = [tf.constant(rng.randint(0, 20, [2, 8])) for _ in range(3)]

    def losses(count: int) -> List[float]:
        table, bias, inputs = variables = [tf.Variable(value) for value in values]

        @tf.function(input_signature=[tf.TensorSpec([2, None], tf.int64)])
        def step(ids: tf.Tensor) -> tf.Tensor:
            rates = tf.fill([tf.shape(ids)[1], 1], tf.constant(.2, tf.float64))
            sampled = tf.constant([1, 3, 5, 7], tf.int64), rates, tf.fill([4], tf.constant(.2, tf.float64))
            with tf.GradientTape() as tape, wh.split(count) if count else contextlib.ExitStack():
                rows = tf.nn.embedding_lookup(inputs, ids[0])
                loss = tf.reduce_mean(tf.nn.nce_loss(table, bias, ids[1][:, None], rows, 4, 20, sampled_values=sampled))
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                variable.assign_sub(.1 * tf.convert_to_tensor(gradient))
            return loss

        return [float(step(ids)) for ids in batches]

    local = losses(0)
    wh.init({"io.slicing": False}, cluster=CLUSTER)
    try:
        return np.allclose(losses(WORKERS * DEVICES), local, 1e-11, 1e-13)
    finally:
        wh.shutdown()


def reads_what_the_last_step_has_left() -> bool:
    """Whether a weight that the forward pass shrinks has the local values between steps, also where a late process reads it while
    its owner begins the next step; and one that the script writes between steps."""
    examples = tf.constant(np.cos(np.arange(12.)).reshape(4, 3))

    def seen(scope: Callable[[], ContextManager[Any]]) -> List[np.ndarray]:
        first, second = weights = [tf.Variable(np.linspace(-1, 1, 9).reshape(3, 3)) for _ in range(2)]

        @tf.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                with scope():
                    first.assign(first * .9)
                    hidden = tf.tanh(tf.matmul(x, first))
                with scope():
                    loss = tf.reduce_mean(tf.square(tf.matmul(hidden, second)))
            for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(.1 * gradient)

        found = []
        for _ in range(3):
            step(examples)
            time.sleep(.1 * (RANK > 0))
            found += [first.numpy(), second.numpy()]
            for weight in weights:
                weight.assign(tf.clip_by_value(weight, -.5, .5))
        return found

    local = seen(contextlib.ExitStack)
    wh.init({"io.slicing": False}, cluster=CLUSTER)
    try:
        return np.allclose(seen(lambda: wh.replicate(1)), local, 1e-11, 1e-13)
    finally:
        wh.shutdown()


def notices_wrong_numbers() -> bool:
    """Whether all processes say that the first step is not the local one if process 1 sends twice what it should."""
    original = Pairs.cross

    def twice(self: Pairs, value: CrossingValue, sender: int, receiver: int, waits: Sequence[str] = ()) -> str:
        if sender == RANK == 1 and value.dtype == tf.float64:
            double = self._nodes.binary("Add", value.edge, value.edge, value.scope + "/twice", value.dtype, self._device)
            value = value._replace(edge=double)
        return original(self, value, sender, receiver, waits)

    Pairs.cross = twice  # type: ignore[method-assign]
    wh.init({"io.slicing": False, "num_micro_batch": 2, "verify": "first_step"}, cluster=CLUSTER)
    try:
        trained((1, WORKERS * DEVICES - 1), 16)
    except wh.MismatchError as error:
        return "is not the local one" in str(error) and "in the call" in str(error)
    finally:
        Pairs.cross = original  # type: ignore[method-assign]
        wh.shutdown()
    return False


def notices_different_data() -> bool:
    wh.init({"io.slicing": False}, cluster=CLUSTER)
    variable = tf.Variable(tf.ones([3, WORKERS * DEVICES], tf.float64))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape, wh.split(WORKERS * DEVICES):
            loss = tf.reduce_mean(tf.square(tf.matmul(x, variable)))
        variable.assign_sub(tape.gradient(loss, variable))

    x = tf.range(12, dtype=tf.float64)
    try:
        step(tf.reshape(x + RANK, [4, 3]))
    except wh.InputError as error:
        return "'x" in str(error) and "another first example in process 1" in str(error)
    finally:
        wh.shutdown()
    return False


def refuses_ragged_mini_batches() -> bool:
    """Whether processes with mini-batches of their own, which number the rows of these, say so before anything runs."""
    wh.init({"io.slicing": False}, cluster=CLUSTER)
    scale = tf.Variable(tf.ones([], tf.float64))

    @tf.function
    def step(x: tf.RaggedTensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape, wh.replicate(1):
            loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * scale, 1) - y))
        scale.assign_sub(tape.gradient(loss, scale))

    try:
        step(tf.RaggedTensor.from_row_lengths(tf.range(20, dtype=tf.float64), [2, 3] * 4), tf.ones([8], tf.float64))
    except wh.PlanError as error:
        return "is part of a sparse or ragged tensor" in str(error)
    finally:
        wh.shutdown()
    return False


def refuses_few_examples() -> bool:
    """Whether this process, like all others, refuses a mini-batch that is too small."""
    wh.init({"io.slicing": False, "num_micro_batch": 2}, cluster=CLUSTER)
    try:
        trained((1, 1), 1)
    except wh.InputError as error:
        return "does not divide" in str(error)
    finally:
        wh.shutdown()
    return False


if __name__ == "__main__":
    sys.exit(main())
