"""Custom training loops: what a tf.function returns and writes equals what it does without whale_tf."""
from __future__ import annotations

import contextlib
import re
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import WAYS, Scope, Way, batches, check

PIPELINE = WAYS["pipeline 2, 4 micro-batches"]
NESTED = WAYS["pipeline 2 nested 2, 2 micro-batches"]


def variable(*shape: int, seed: int = 1, trainable: bool = True) -> tf.Variable:
    return tf.Variable(0.3 * np.random.RandomState(seed).randn(*shape), trainable=trainable)


def perceptron() -> List[tf.Variable]:
    return [variable(6, 8), variable(8, seed=2), variable(8, 3, seed=3), variable(3, seed=4)]


def logits_of(weights: Sequence[tf.Variable], stages: Sequence[Scope], x: tf.Tensor) -> tf.Tensor:
    with stages[0]():
        hidden = tf.tanh(tf.matmul(x, weights[0]) + weights[1])
    with stages[1]():
        return tf.matmul(hidden, weights[2]) + weights[3]


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


# -- steps: build(stages) -> the step, and all variables ----------------------------------------------------------------
def momentum(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    weights = perceptron()
    velocities = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Dict[str, Any]:
        with tf.GradientTape() as tape:
            logits = logits_of(weights, stages, x)
            loss = cross_entropy(y, logits)
        for w, v, grad in zip(weights, velocities, tape.gradient(loss, weights)):
            v.assign(0.9 * v + grad)
            w.assign_sub(0.1 * v)
        return {"loss": loss, "more": [logits, tf.argmax(logits, 1)], "examples": tf.shape(x)[0]}

    return step, weights + velocities


def pulling(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """The function takes its mini-batch itself, as ``fit`` of Keras 2 does, from an iterator that has no other."""
    weights = perceptron()

    @tf.function
    def train(iterator: Any) -> Dict[str, Any]:
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            logits = logits_of(weights, stages, x)
            loss = cross_entropy(y, logits)
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return {"loss": loss, "logits": logits, "examples": tf.shape(x)[0]}

    return lambda *batch: train(iter(tf.data.Dataset.from_tensors(batch))), weights


def keras_adam(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """An optimizer that makes its variables in the first trace; a metric that counts over all steps."""
    weights = perceptron()
    adam = tf.keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    seen = tf.Variable(np.zeros([], np.int64), trainable=False)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = logits_of(weights, stages, x)
            loss = cross_entropy(y, logits)
        adam.apply_gradients(zip(tape.gradient(loss, weights), weights))
        seen.assign_add(tf.math.count_nonzero(tf.equal(tf.argmax(logits, 1), y)))
        return loss

    adam.build(weights)
    return step, weights + [seen] + list(adam.variables)


def sparse(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    table, out = variable(20, 4), variable(24, 3, seed=2)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        tokens = tf.cast(tf.abs(3 * x), tf.int32) % 20
        with tf.GradientTape() as tape:
            with stages[0]():
                rows = tf.reshape(tf.nn.embedding_lookup(table, tokens), [-1, 24])
            with stages[1]():
                loss = cross_entropy(y, tf.matmul(rows, out))
        by_table, by_out = tape.gradient(loss, [table, out])
        table.scatter_sub(tf.IndexedSlices(0.1 * by_table.values, by_table.indices))
        out.assign_sub(0.1 * by_out)
        return loss

    return step, [table, out]


def kernels(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Kernels get the handles of an optimizer's variables, which the function never reads, as from Keras' legacy optimizers."""
    weights = [variable(20, 8), variable(48, 3, seed=2)]
    slots = [tf.Variable(0.1 + 0.0 * w, trainable=False) for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        tokens = tf.cast(tf.abs(3 * x), tf.int32) % 20
        with tf.GradientTape() as tape:
            with stages[0]():
                rows = tf.tanh(tf.reshape(tf.nn.embedding_lookup(weights[0], tokens), [-1, 48]))
            with stages[1]():
                loss = cross_entropy(y, tf.matmul(rows, weights[1]))
        by_rows, grad = tape.gradient(loss, weights)
        numbers, places = tf.unique(by_rows.indices)
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=weights[0].handle, accum=slots[0].handle, lr=tf.constant(0.1, tf.float64), epsilon=tf.constant(1e-3, tf.float64),
            grad=tf.math.unsorted_segment_sum(by_rows.values, places, tf.size(numbers)), indices=numbers)
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=weights[1].handle, accum=slots[1].handle, lr=tf.constant(0.1, tf.float64), grad=grad,
            momentum=tf.constant(0.9, tf.float64))
        return loss

    return step, weights + slots


def control_flow(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A loop and a condition in the model, written as AutoGraph reads them."""
    weights = perceptron() + [variable(8, 8, seed=5)]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                hidden = tf.tanh(tf.matmul(x, weights[0]) + weights[1])
                for _ in tf.range(3):
                    hidden = tf.tanh(tf.matmul(hidden, weights[4]))
            with stages[1]():
                logits = tf.matmul(hidden, weights[2]) + weights[3]
                if tf.reduce_sum(weights[3]) > 100.0:
                    logits = 2.0 * logits
                else:
                    logits = 3.0 * logits
                loss = cross_entropy(y, logits)
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    return step, weights


def penalty(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A gradient by the inputs, inside of the loss: nested tapes."""
    weights = perceptron()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = cross_entropy(y, logits_of(weights, stages, x))
                total = loss * tf.cast(tf.shape(x)[0], tf.float64)
            slope = tf.reduce_mean(tf.reduce_sum(inner.gradient(total, x) ** 2, 1))
            whole = loss + 0.5 * slope
        for w, grad in zip(weights, outer.gradient(whole, weights)):
            w.assign_sub(0.1 * grad)
        return loss, slope

    return step, weights


def two_players(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Two losses by one persistent tape, each with variables of its own."""
    one, two = [variable(6, 3)], [variable(3, 1, seed=2)]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            with stages[0]():
                made = tf.tanh(tf.matmul(x, one[0]))
            with stages[1]():
                judged = tf.sigmoid(tf.matmul(made, two[0]))
                first, second = tf.reduce_mean(judged), tf.reduce_mean((1.0 - judged) ** 2)
        for variables, loss in ((one, first), (two, second)):
            for w, grad in zip(variables, tape.gradient(loss, variables)):
                w.assign_sub(0.1 * grad)
        return first, second

    return step, one + two


def called(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """The model is a tf.function of its own, whose gradient takes a constant from it, and so is what steps many times."""
    weights = perceptron()

    @tf.function
    def hidden_of(x: tf.Tensor) -> tf.Tensor:
        by_column = tf.transpose(tf.tanh(tf.matmul(x, weights[0]) + weights[1]), [1, 0])
        return tf.transpose(2.0 * by_column, [1, 0])

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                hidden = hidden_of(x)
            with stages[1]():
                loss = cross_entropy(y, tf.matmul(hidden, weights[2]) + weights[3])
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    @tf.function
    def steps(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = tf.zeros([], tf.float64)
        for _ in tf.range(3):
            loss = step(x, y)
        return loss

    return steps, weights


def by_tf_gradients(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    weights = perceptron()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = cross_entropy(y, logits_of(weights, stages, x))
        for w, grad in zip(weights, tf.gradients(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    return step, weights


def asserting(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Side effects in the model: an assertion, a custom gradient, a check of numbers."""
    weights = perceptron()

    @tf.custom_gradient
    def halved(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda dy: 0.5 * dy

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tape.stop_recording():
                tf.debugging.assert_less(tf.abs(x), tf.constant(100.0, tf.float64))
            logits = halved(logits_of(weights, stages, x))
            tf.debugging.assert_all_finite(logits, "not finite")
            loss = cross_entropy(y, logits)
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    return step, weights


def adversaries(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Updates after each other: the judge's twice, then the maker's against the judge as it is by then."""
    maker, judge = [variable(6, 6)], [variable(6, 8, seed=2), variable(8, 1, seed=3)]

    def made(x: tf.Tensor) -> tf.Tensor:
        with stages[0]():
            return tf.tanh(tf.matmul(x, maker[0]))

    def judged(x: tf.Tensor) -> tf.Tensor:
        with stages[1]():
            return tf.matmul(tf.tanh(tf.matmul(x, judge[0])), judge[1])

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> List[tf.Tensor]:
        losses = []
        for variables in (judge, judge, maker):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((judged(made(x)) - (1.0 if variables is maker else 0.0)) ** 2)
                if variables is judge:
                    loss += tf.reduce_mean((judged(x) - 1.0) ** 2)
            for w, grad in zip(variables, tape.gradient(loss, variables)):
                w.assign_sub(0.1 * grad)
            losses.append(loss)
        return losses

    return step, maker + judge


def unrolled(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Several steps of one model in one trace, an embedding's among them."""
    table, out = variable(20, 4), variable(24, 3, seed=2)
    adam = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    adam.build([table, out])

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = tf.zeros([], tf.float64)
        for _ in range(3):
            with tf.GradientTape() as tape:
                with stages[0]():
                    rows = tf.reshape(tf.nn.embedding_lookup(table, tf.cast(tf.abs(3 * x), tf.int32) % 20), [-1, 24])
                with stages[1]():
                    loss = cross_entropy(y, tf.matmul(rows, out))
            adam.apply_gradients(zip(tape.gradient(loss, [table, out]), [table, out]))
        return loss

    return step, [table, out]


def ranked(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """What needs all examples beside single ones, for a mini-batch of a size that is not known; positions leave the clones."""
    w = variable(6, 3)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
    def step(x: tf.Tensor, y: tf.Tensor) -> List[tf.Tensor]:
        with tf.GradientTape() as tape:
            with stages[0]():
                z = tf.tanh(tf.matmul(x, w))
            with stages[1]():
                joined = tf.concat([z, tf.sort(z, axis=0), z], 1)
                places = tf.range(tf.shape(z)[0])
            loss = tf.reduce_mean(joined ** 2 * tf.cast(places[:, tf.newaxis], tf.float64)) + cross_entropy(y, z)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return [loss, places, tf.equal(places % 3, tf.cast(y, tf.int32))]

    return step, [w]


def sorted_series(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A loop's states, stacked, whose gradient comes from what needs all examples, of which the loop knows no number."""
    w, out = variable(2, 2), variable(2, 3, seed=2)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                state, states = tf.zeros_like(x[:, :2]), tf.TensorArray(tf.float64, 3)
                for t in tf.range(3):
                    state = tf.tanh(tf.matmul(state, w) + x[:, 2 * t:2 * t + 2])
                    states = states.write(t, state)
                stacked = states.stack()
                stacked.set_shape([3, None, 2])
            with stages[1]():
                logits = tf.matmul(tf.reduce_sum(tf.sort(stacked, axis=1), 0), out)
            loss = cross_entropy(tf.sort(y), logits)
        for v, grad in zip([w, out], tape.gradient(loss, [w, out])):
            v.assign_sub(0.1 * grad)
        return loss

    return step, [w, out]


def until_settled(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A loop over a variable that ends when no example changes any more, and one that ends with the longest example."""
    inner, w, out = variable(4, 4, seed=2), variable(6, 4), variable(4, 3, seed=3)
    inner.assign(0.3 * inner)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> List[tf.Tensor]:
        with tf.GradientTape() as tape:
            with stages[0]():
                h = tf.matmul(x, w)
                z, change, count = tf.zeros_like(h), tf.constant(1.0, tf.float64), 0
                while change > 1e-2 and count < 20:
                    following = tf.tanh(tf.matmul(z, inner) + h)
                    z, change, count = following, tf.reduce_max(tf.abs(following - z)), count + 1
            with stages[1]():
                i, longest = tf.constant(0, tf.int64), tf.reduce_max(y)
                while i < longest:
                    z = tf.where((i < y)[:, tf.newaxis], tf.sin(z + 1.0), z)
                    i += 1
                loss = cross_entropy(y, tf.matmul(z, out))
        for v, grad in zip([inner, w, out], tape.gradient(loss, [inner, w, out])):
            v.assign_sub(0.1 * grad)
        return [loss, count, change]

    return step, [inner, w, out]


def watched(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A loss of means over all examples, which metrics watch: one adds them up, another their mean."""
    w, out = variable(6, 4), variable(4, 3, seed=3)
    each, total = [tf.Variable(tf.zeros(shape, tf.float64), trainable=False) for shape in ([4], [])]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                z = tf.sigmoid(tf.matmul(x, w))
                means = tf.reduce_mean(z, 0)
                each.assign(each + means)
                total.assign_add(tf.reduce_mean(means))
                sparsity = tf.reduce_sum(tf.math.log(0.1 / means))
            with stages[1]():
                loss = cross_entropy(y, tf.matmul(z, out)) - 0.1 * sparsity
        for v, grad in zip([w, out], tape.gradient(loss, [w, out])):
            v.assign_sub(0.1 * grad)
        return loss

    return step, [w, out, each, total]


def in_python(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A loss in Python, whose gradient has no shape that TensorFlow knows."""
    weights = perceptron()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            operands = tf.one_hot(y, 3, dtype=tf.float64), logits_of(weights, stages, x)
            loss = tf.ensure_shape(tf.py_function(lambda wanted, logits: tf.reduce_mean(
                tf.nn.softmax_cross_entropy_with_logits(wanted, logits)), operands, tf.float64), [])
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    return step, weights


THREE = {"nested": NESTED, "data parallel": WAYS["data parallel 2"], "pipeline": PIPELINE}
STEPS = [momentum, keras_adam, pulling, sparse, control_flow, penalty, two_players, called, by_tf_gradients, asserting,
         adversaries, unrolled, ranked, sorted_series, until_settled, watched, in_python]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_momentum_in_every_way(way: str) -> None:
    check(momentum, WAYS[way], batches())


@pytest.mark.slow
@pytest.mark.parametrize("build, way", [  # each in two ways, in turn
    pytest.param(build, way, marks=[pytest.mark.full] if number % 3 == place else [], id=f"{build.__name__}-{name}")
    for number, build in enumerate(STEPS[1:]) for place, (name, way) in enumerate(THREE.items())])
@pytest.mark.filterwarnings("error::whale_tf.InexactWarning")
def test_steps_of_many_kinds(build: Any, way: Way) -> None:
    check(build, way, batches())


@pytest.mark.slow
def test_gradient_of_a_call_stands_with_the_call() -> None:
    """Its values stay on the call's device, which those of loops that keep lists must."""
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    steps, _ = called([lambda: wh.replicate(1)] * 2)
    steps(*[tf.constant(part) for part in batches()[0]])
    program = wh.current_program("step")
    assert program is not None
    bodies = [program.body(task_graph, "backward") for task_graph in range(2)]
    types = [[program.graph.ops[op].type for op in body.ops] for body in bodies if body is not None]
    assert [each.count("PartitionedCall") for each in types] == [1, 0]


@pytest.mark.slow
def test_condition_that_runs_once_after_all() -> None:
    """Its branches were divided before it turned out that the gradient of one needs all examples."""
    def build(scopes: Sequence[Scope]) -> Any:
        w = tf.Variable(np.arange(6.0).reshape(6, 1) / 7)

        @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
        def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.matmul(x, w))
                count = tf.reduce_sum(tf.cast(labels, tf.float64))
                loss = tf.square(tf.cond(count > 0.0, lambda: total / count, lambda: 0.0 * total))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    check(build, WAYS["data parallel 2"], batches())


@pytest.mark.slow
def test_list_with_as_many_elements_as_the_largest_of_all_labels() -> None:
    """The labels are sorted, so those of the first part are small."""
    def build(scopes: Sequence[Scope]) -> Any:
        w = tf.Variable(np.arange(18.0).reshape(6, 3) / 19)

        @tf.function
        def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                state, count = tf.matmul(x, w), tf.reduce_max(labels)
                states = tf.TensorArray(tf.float64, size=count)

                def body(t: tf.Tensor, state: tf.Tensor, states: Any) -> Any:
                    state = tf.where(t < labels[:, None], tf.tanh(state), state)
                    return t + 1, state, states.write(t, state)

                states = tf.while_loop(lambda t, *_: t < count, body, [0, state, states])[2]
                loss = tf.reduce_mean(tf.square(states.stack()))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    check(build, WAYS["data parallel 2"], [(x, np.sort(labels).astype("int32") + 1) for x, labels in batches()])


@pytest.mark.slow
def test_sampled_classes_are_no_examples() -> None:
    """Fewer of them than words, whose number is a multiple: an example could be two words."""
    said: List[str] = []

    def build(scopes: Sequence[Scope]) -> Any:
        words, classes = variable(20, 6), variable(20, 6, seed=2)

        @tf.function
        def step(word: tf.Tensor, label: tf.Tensor, sampled: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                expected = tf.fill([tf.shape(word)[0], 1], np.float64(0.3)), tf.fill([4], np.float64(0.2))
                loss = tf.reduce_mean(tf.nn.sampled_softmax_loss(
                    classes, tf.zeros([20], tf.float64), label[:, None], tf.gather(words, word), 4, 20,
                    sampled_values=(sampled, *expected)))
            for w, gradient in zip((words, classes), tape.gradient(loss, (words, classes))):
                w.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return loss

        def call(*batch: tf.Tensor) -> tf.Tensor:
            loss = step(*batch)
            with contextlib.suppress(wh.WhaleError):  # wh.init was not called
                said.append(wh.explain())
            return loss

        return call, [words, classes]

    rng = np.random.RandomState(0)
    check(build, WAYS["data parallel 2"], [[rng.randint(0, 20, size) for size in (8, 8, 4)] for _ in range(2)])
    assert "Divided over 2 devices: 100% of the floating-point" in said[0]


def test_calls_that_all_run_where_their_variable_is() -> None:
    """A function that asks whether its variable has a value takes the handle, and so runs on one device."""
    wh.init(cluster="cpu:2")
    kernel, last = variable(6, 8), variable(8, 2, seed=2)

    @tf.function
    def layer(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, kernel) * tf.cast(tf.raw_ops.VarIsInitializedOp(resource=kernel.handle), tf.float64)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(layer(x), last) ** 2)
        for one, gradient in zip((kernel, last), tape.gradient(loss, (kernel, last))):
            one.assign_sub(0.1 * gradient)

    step(tf.constant(batches()[0][0]))
    calls = [op for op in step.get_concrete_function(tf.constant(batches()[0][0])).graph.get_operations()
             if op.type == "StatefulPartitionedCall" and "_r" in op.name]
    assert {op.device[-5:] for op in calls} == {"CPU:0"}
    share = re.search(r"Divided over 2 devices: ([\d.]+)% of the floating-point", wh.explain())
    assert share is not None and 50 < float(share.group(1)) < 90  # it makes one of the three products with the larger variable
