"""`wh.split` over two processes, beside the same layers divided by hand with TensorFlow's collectives, and one process.

    python -m benchmarks.split_processes [MODEL...]

Each process has a core and one thread within an op, and reads the same mini-batch.  By hand, as in Megatron-LM: the first of two
products gets a part of its columns, the second one of its rows; an all-reduce adds up the results, and another one the gradients
of the first product's input.  All else is computed in both processes.  Of ``fused`` queries, keys and values, a part by hand has
the columns of whole heads, which are not side by side in the undivided parameter.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
from typing import Any, Callable, Dict, List, Mapping

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, Workers, answer, main, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, Workload, _norm, encoder, head_loss, initial, loss, mlp, variables

PROCESSES = 2
SETTLE = 120  # steps, after which TensorFlow's executor knows which ops are short
STEPS = {"mlp": 40, "encoder": 10, "encoder, fused": 10}
ROUNDS = 3
HEADS, SEQUENCE, VOCABULARY = 4, 64, 1000
MODELS: Mapping[str, Callable[[], Workload]] = {
    "mlp": mlp, "encoder": functools.partial(encoder, fused=False), "encoder, fused": encoder}


def local(name: str, rank: int) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    workload = MODELS[name]()
    return _run(loss(workload, variables(workload), *_batch(workload)), "")


def session(name: str, rank: int) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init({"io.slicing": False}, cluster=f"{PROCESSES}xcpu:1")
    workload = MODELS[name]()
    with wh.split(PROCESSES):
        value = loss(workload, variables(workload), *_batch(workload))
    return _run(value, "")


def function(name: str, rank: int) -> Callable[[], Any]:
    import tensorflow as tf

    import whale_tf as wh

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    wh.init({"io.slicing": False}, cluster=f"{PROCESSES}xcpu:1")
    workload = MODELS[name]()
    parameters = {key: tf.Variable(initial(key, shape), name=key) for key, shape in workload.shapes.items()}
    trained, batch = list(parameters.values()), tuple(map(tf.constant, workload.data(workload.batch, 0)))

    @tf.function
    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape, wh.split(PROCESSES):
            value = loss(workload, parameters, x, labels)
        for variable, gradient in zip(trained, tape.gradient(value, trained)):
            variable.assign_sub(LEARNING_RATE * gradient)
        return value

    return lambda: step(*batch).numpy()


def by_hand(name: str, rank: int) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    config = session_config(1, inter=2, intra=1)
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    server = tf.train.Server(cluster, "worker", rank, config=config)
    workload = MODELS[name]()
    with tf.device(f"/job:worker/task:{rank}/device:CPU:0"):
        division = _Division(workload, rank)
        value = division.perceptron(*_batch(workload)) if name == "mlp" else division.encoder(*_batch(workload))
    return _run(value, server.target)


SYSTEMS: Dict[str, Callable[[str, int], Callable[[], Any]]] = {
    "one process": local, "whale_tf, Session": session, "whale_tf, tf.function": function, "by hand": by_hand}


class _Division:
    """A model's layers in one of the processes."""

    def __init__(self, workload: Workload, rank: int) -> None:
        import tensorflow.compat.v1 as tf

        self._workload, self._rank, self._instance = workload, rank, 0
        tf.RegisterGradient("CollectiveReduce")(lambda op, gradient: None)

    def _sum(self, value: Any, merge: str = "Add") -> Any:
        from tensorflow.python.ops import collective_ops

        self._instance += 1
        return collective_ops.all_reduce(value, PROCESSES, 1, self._instance, merge, "Id", (0,))

    def _summed(self, value: Any) -> Any:
        """The sum over the processes, whose gradient all of them have."""
        import tensorflow.compat.v1 as tf

        return tf.custom_gradient(lambda one: (self._sum(one), lambda gradient: gradient))(value)

    def _shared(self, value: Any) -> Any:
        """A value that all processes have, whose gradient is summed."""
        import tensorflow.compat.v1 as tf

        return tf.custom_gradient(lambda one: (tf.identity(one), self._sum))(value)

    def _parameter(self, name: str, axis: Any = None, blocks: int = 1) -> Any:
        """A parameter, or this process's part of it along an axis that consists of so many equal blocks."""
        import tensorflow.compat.v1 as tf

        value = initial(name, self._workload.shapes[name])
        if axis is not None:
            parts = [np.split(block, PROCESSES, axis)[self._rank] for block in np.split(value, blocks, axis)]
            value = np.concatenate(parts, axis)
        return tf.get_variable(name, initializer=np.ascontiguousarray(value), use_resource=True)

    def perceptron(self, x: Any, labels: Any) -> Any:
        import tensorflow.compat.v1 as tf

        for layer in range(0, 4, 2):
            inner = tf.matmul(self._shared(x) if layer else x, self._parameter(f"kernel_{layer}", 1))
            inner = tf.nn.relu(inner + self._parameter(f"bias_{layer}", 0))
            x = self._summed(tf.matmul(inner, self._parameter(f"kernel_{layer + 1}", 0)))
            x = tf.nn.relu(x + self._parameter(f"bias_{layer + 1}"))
        return head_loss(tf.matmul(x, self._parameter("head")), labels)

    def encoder(self, tokens: Any, labels: Any) -> Any:
        import tensorflow.compat.v1 as tf

        part = VOCABULARY // PROCESSES
        first, hidden = self._rank * part, self._workload.shapes["head"][0]
        x = self._summed(tf.matmul(tf.one_hot(tf.reshape(tokens, [-1]) - first, part), self._parameter("tokens", 0)))
        x = tf.reshape(tf.reshape(x, [-1, SEQUENCE, hidden]) + self._parameter("positions"), [-1, hidden])
        layer = 0
        while f"up_{layer}" in self._workload.shapes:
            context = self._attention(self._shared(_norm(x, self._parameter(f"gain_a{layer}"))), layer, hidden)
            x = x + self._summed(tf.matmul(context, self._parameter(f"out_{layer}", 0)))
            inner = self._shared(_norm(x, self._parameter(f"gain_f{layer}")))
            inner = tf.nn.relu(tf.matmul(inner, self._parameter(f"up_{layer}", 1)))
            x = x + self._summed(tf.matmul(inner, self._parameter(f"down_{layer}", 0)))
            layer += 1
        logits = tf.matmul(self._shared(x), self._parameter("head", 1))
        logits -= tf.stop_gradient(self._sum(tf.reduce_max(tf.stop_gradient(logits), 1, keepdims=True), "Max"))
        total = self._summed(tf.reduce_sum(tf.exp(logits), 1))
        own = tf.one_hot(tf.reshape(labels, [-1]) - first, part)
        return tf.reduce_mean(tf.log(total) - self._summed(tf.reduce_sum(logits * own, 1)))

    def _attention(self, x: Any, layer: int, hidden: int) -> Any:
        import tensorflow.compat.v1 as tf

        heads, size = HEADS // PROCESSES, hidden // HEADS
        if f"qkv_{layer}" in self._workload.shapes:
            qkv = tf.reshape(tf.matmul(x, self._parameter(f"qkv_{layer}", 1, 3)), [-1, SEQUENCE, 3, heads, size])
            query, key, value = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]), 3)
        else:
            query, key, value = (tf.transpose(tf.reshape(tf.matmul(x, self._parameter(f"{name}_{layer}", 1)),
                                                         [-1, SEQUENCE, heads, size]), [0, 2, 1, 3]) for name in "qkv")
        weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * size ** -0.5)
        return tf.reshape(tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3]), [-1, hidden // PROCESSES])


def _batch(workload: Workload) -> Any:
    import tensorflow.compat.v1 as tf

    dataset = tf.data.Dataset.from_tensors(workload.data(workload.batch, 0)).repeat()
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def _run(value: Any, target: str) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    update = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value)
    session = tf.Session(target, config=session_config(1, inter=2, intra=1))
    session.run([tf.global_variables_initializer(), tf.tables_initializer()])
    return lambda: session.run([value, update])[0]


def worker(spec: Spec) -> None:
    """One of the processes; each has a core of its own."""
    rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    step, model = SYSTEMS[spec["system"]](spec["model"], rank), spec["model"]
    answer({"settle": lambda: {"losses": [float(step()) for _ in range(SETTLE)][:3]},
            "steps": lambda: step_times(step, STEPS[model], warmup=2)})


def report(console: Console) -> None:
    for model in sys.argv[1:] or MODELS:
        found: Dict[str, List[Result]] = {name: [] for name in SYSTEMS}
        losses: Dict[str, List[float]] = {}
        started: Dict[str, Workers] = {}
        try:
            for name in SYSTEMS:
                started[name] = Workers(__file__, {"system": name, "model": model}, 1 if name == "one process" else PROCESSES)
                losses[name] = started[name].ask("settle")["losses"]
            for _ in range(ROUNDS):
                for name, results in found.items():
                    results.append(started[name].ask("steps"))
        finally:
            for workers in started.values():
                workers.__exit__()
        rows, medians = [], {name: {key: statistics.median(result[key] for result in results) for key in ("wall_s", "cpu_s")}
                             for name, results in found.items()}
        for name, took in medians.items():
            rows.append([name, f"{1e3 * took['wall_s']:.1f}", f"{1e3 * took['cpu_s']:.1f}",
                         *(f"{took[key] / medians['by hand'][key]:.2f}" for key in ("wall_s", "cpu_s")),
                         f"{medians['one process']['wall_s'] / took['wall_s']:.2f}", f"{losses[name][-1]:.6f}"])
        console.print(table(f"{model}: a step, the same mini-batch in {PROCESSES} processes", [
            "system", "ms", "CPU ms", "to by hand", "by CPU time", "speed-up", "third loss"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
