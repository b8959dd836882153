"""``wh.split`` in tf.functions: steps equal the local ones, and the user's variables stay whole for everybody else."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import Scope, Way, batches, check, clear_keras
from tests.functions.test_training_steps import (
    cross_entropy,
    keras_adam,
    kernels,
    logits_of,
    momentum,
    perceptron,
    sparse,
    variable,
)

keras = tf.keras
layers = keras.layers
HEAD = Way((1, 2), 3, {}, split=(1,))
WHOLE = Way((2,), 2, {}, split=(0,))
HYBRID = Way((2, 2), 2, {}, split=(1,))  # Whale's example 2: features replicated, the head split, on the same devices


def update(weights: Sequence[tf.Variable], slots: Sequence[tf.Variable], grads: Sequence[tf.Tensor]) -> None:
    for w, v, grad in zip(weights, slots, grads):
        v.assign(0.9 * v + grad)
        w.assign_sub(0.1 * v)


def attention(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Multi-head attention written with einsum."""
    weights = [variable(6, 2, 4, seed=seed) for seed in range(3)] + [variable(2, 4, 6, seed=4), variable(6, 3, seed=5)]
    slots = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        x = tf.stack([x, tf.sin(x), tf.cos(x)], 1)
        with tf.GradientTape() as tape:
            with stages[0]():
                query, key, value = [tf.einsum("bsd,dhk->bhsk", x, w) for w in weights[:3]]
                weighted = tf.einsum("bhst,bhtk->bhsk", tf.nn.softmax(tf.einsum("bhsk,bhtk->bhst", query, key)), value)
                out = tf.einsum("bhsk,hkd->bsd", weighted, weights[3])
            with stages[1]():
                loss = cross_entropy(y, tf.matmul(tf.reduce_mean(x + out, 1), weights[4]))
        update(weights, slots, tape.gradient(loss, weights))
        return loss

    return step, weights + slots


def experts(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A mixture of four experts, each of which sees all examples.  Their weights are made in a block of their own."""
    with contextlib.nullcontext() if stages[1] is contextlib.nullcontext else wh.split(2):
        inner, outer = variable(4, 6, 8, seed=2), variable(4, 8, 6, seed=3)
    gate, out = variable(6, 4), variable(6, 3, seed=4)
    weights = [gate, inner, outer, out]
    slots = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                gates = tf.nn.softmax(tf.matmul(x, gate))
            with stages[1]():
                hidden = tf.nn.relu(tf.einsum("bd,edf->ebf", x, inner))
                mixed = tf.einsum("be,ebf,efd->bd", gates, hidden, outer)
                loss = cross_entropy(y, tf.matmul(mixed, out))
        update(weights, slots, tape.gradient(loss, weights))
        return loss

    return step, weights + slots


def tokens(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Sequences of a length that the step does not know, and a head over the flat tokens, whose losses go back to the examples'
    devices."""
    table, out = variable(7, 6), variable(6, 10, seed=3)
    slots = [tf.Variable(tf.zeros_like(w), trainable=False) for w in (table, out)]

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                h = tf.tanh(tf.gather(table, x))
            with stages[1]():
                logits = tf.einsum("bsd,dv->bsv", h, out)
            flat = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(x, [-1]), logits=tf.reshape(logits, [-1, 10]))
            loss = tf.reduce_mean(tf.reshape(flat, tf.shape(x)) * tf.cast(x > 0, tf.float64))
        update([table, out], slots, [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, [table, out])])
        return loss

    return step, [table, out] + slots


def rows_of_moments(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Keras 2.11 to 2.15 add the rows of a sparse gradient to the moments, and then all moments to the table."""
    table, out = variable(6, 4), variable(4, 3, seed=2)
    moments = tf.Variable(tf.zeros_like(table), trainable=False)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with stages[0]():
                h = tf.gather(table, tf.range(6), name="positions") * x[:, :, None]
                loss = cross_entropy(y, tf.matmul(tf.reduce_sum(h, 1), out))
        sparse_grad, grad = tape.gradient(loss, [table, out])
        moments.assign(0.9 * moments)
        moments.scatter_add(tf.IndexedSlices(-0.1 * sparse_grad.values, sparse_grad.indices))
        table.assign_add(moments)
        out.assign_sub(0.1 * grad)
        return loss

    return step, [table, out, moments]


def recurrent(stages: Sequence[Scope], counts: bool = False) -> Tuple[Callable, Sequence]:
    """A loop with products and convolutions.  One of its weights is not divided, because its product takes another value that
    follows from it; one is frozen.  ``counts``: it writes a variable."""
    weights = [variable(6, 6, seed=1), variable(6, 6, seed=2), variable(6, 6, seed=3), variable(2, 2, 1, 5, seed=4),
               variable(2, 2, 5, 1, seed=5), variable(6, 3, seed=6)]
    frozen, count = tf.Variable(variable(6, 6, seed=7), trainable=False), tf.Variable(0.0, trainable=False)
    slots = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, h: tf.Tensor) -> Any:
            if counts:
                count.assign_add(1.0)
            image = tf.nn.conv2d(tf.reshape(h, [-1, 3, 2, 1]), weights[3], 1, "SAME")
            image = tf.reshape(tf.nn.conv2d(image, weights[4], 1, "SAME"), [-1, 6])
            mixed = tf.matmul(h, weights[1]) + tf.matmul(tf.matmul(h, frozen), tf.tanh(weights[2])) + image
            return i + 1, tf.tanh(tf.matmul(x * tf.cast(i + 1, x.dtype), weights[0]) + mixed)

        with tf.GradientTape() as tape:
            with stages[0]():
                _, h = tf.while_loop(lambda i, h: i < 3, body, [0, tf.zeros_like(x)])
            with stages[1]():
                loss = cross_entropy(y, tf.matmul(h, weights[5]))
        update(weights, slots, tape.gradient(loss, weights))
        return loss

    return step, [*weights, *slots, frozen, count]


def memory_bank(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """A frozen table that a product takes, whose rows the step looks up and replaces by its handle."""
    weight, bank = variable(6, 4, seed=1), tf.Variable(variable(16, 4, seed=2), trainable=False)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape, stages[0]():
            h = tf.matmul(x, weight)
            loss = cross_entropy(y, tf.matmul(h, bank, transpose_b=True))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        old, first = tf.gather(bank, y), tf.gather_nd(bank, [[0], [1]])
        bank.assign(tf.tensor_scatter_nd_add(bank, y[:, None], 0.1 * (h - old)))
        return loss, first

    return step, [weight, bank]


BUILDS: Dict[str, Any] = {"momentum": momentum, "keras_adam": keras_adam, "sparse": sparse, "attention": attention,
                          "experts": experts, "kernels": kernels, "recurrent": recurrent, "memory_bank": memory_bank,
                          "counting": functools.partial(recurrent, counts=True), "rows_of_moments": rows_of_moments}


@pytest.mark.slow
@pytest.mark.parametrize("build, way", [
    pytest.param("momentum", HEAD, marks=pytest.mark.full), ("momentum", HYBRID), ("keras_adam", WHOLE),
    ("sparse", Way((2, 1), 3, {}, split=(0,))), ("attention", Way((2, 1), 3, {"num_micro_batch": 2}, split=(0,))),
    ("experts", HYBRID), ("kernels", WHOLE), ("counting", WHOLE), ("memory_bank", WHOLE),
    ("recurrent", Way((2, 1), 3, {"num_micro_batch": 2}, split=(0,))),
    ("rows_of_moments", Way((2,), 2, {"patterns.force": {"positions": "embedding"}}, split=(0,))),
    pytest.param("momentum", Way((2,), 4, {"num_micro_batch": 2}, split=(0,)), marks=pytest.mark.full)])
def test_steps(build: str, way: Way) -> None:
    outcome = check(BUILDS[build], way, batches((16, 16, 12)), 1e-11)
    assert outcome.plan is not None and outcome.plan.shards
    assert ("loop" in outcome.plan.shards.values()) == (build in ("recurrent", "counting"))


def held(variables: Sequence[tf.Variable]) -> List[int]:
    """Elements that the resources of variables hold, read past everybody."""
    handles = [variable.__dict__["_handle"] for variable in variables]
    return [int(tf.size(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64))) for handle in handles]


def train_with(weights: List[tf.Variable], scope: Scope) -> Callable[[], tf.Tensor]:
    x, y = [tf.constant(part) for part in batches()[0]]

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, logits_of(weights, [scope, scope], x))
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    return step


def test_variables_under_split_that_only_replicas_use() -> None:
    wh.init(cluster="cpu:2")
    with wh.split(2):
        weights = perceptron()
    with pytest.raises(wh.AnnotationError, match=r"only variables.* under wh.replicate\(2\).*Put the ops that use them under"):
        train_with(weights, functools.partial(wh.replicate, 2))()


@pytest.mark.slow
def test_rows_of_an_unknown_number_per_example() -> None:
    rng = np.random.RandomState(0)
    check(tokens, HYBRID, [(rng.randint(0, 7, shape),) for shape in ((8, 5), (6, 3), (8, 4))], 1e-11)


@pytest.mark.slow
def test_users_variables_stay_whole_for_everybody_else(tmp_path: Any) -> None:
    def script(scope: Scope) -> List[np.ndarray]:
        weights = perceptron()
        step = train_with(weights, scope)
        forward = tf.function(lambda: tf.reduce_sum(weights[0]) * tf.reduce_sum(weights[2]))
        steps = tf.function(lambda: [step() for _ in range(2)])
        seen = [forward()]
        seen.append(step())
        if scope is not contextlib.nullcontext:
            assert held(weights[:1]) == [0]  # no device has a whole one
        seen.append(forward())
        seen += [step(), weights[0].numpy(), tf.convert_to_tensor(weights[2]), weights[0][:2] + 1.0]
        weights[0].assign(0.5 * weights[0])
        seen += [step(), step(), *steps()]
        weights[2].assign_add(tf.ones_like(weights[2]))
        saved = tf.train.Checkpoint(weights=weights)
        path = saved.write(str(tmp_path / "checkpoint"))
        seen.append(step())
        saved.restore(path)
        with tf.GradientTape() as tape:  # looks at handles before the function runs
            tape.watch(weights[0])
            seen += [step(), step()]
        wh.shutdown()
        seen += [forward(), step(), weights[0].numpy(), step(), *steps()]
        return [np.array(one) for one in seen + weights]

    local = script(contextlib.nullcontext)
    wh.init(cluster="cpu:2")
    parallel = script(lambda: wh.split(2))
    for one, other in zip(local, parallel):
        np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_functions_that_cannot_agree_on_a_variable() -> None:
    wh.init(cluster="cpu:4")
    weights = perceptron()
    two, four = train_with(weights, lambda: wh.split(2, name="two")), train_with(weights, lambda: wh.split(4, name="four"))
    two(), four(), two()  # one after the other
    with pytest.raises(wh.PlanError, match="calls functions that divide variable .* differently"):
        tf.function(lambda: two() + four())()
    with pytest.raises(wh.PlanError, match="reads or writes variable .* and calls a function that divides it"):
        tf.function(lambda: two() + tf.reduce_sum(weights[0]))()
    wh.shutdown()
    with pytest.raises(wh.PlanError, match="traced after wh.shutdown"):
        tf.function(lambda: two())()


def test_variable_that_is_an_argument() -> None:
    wh.init(cluster="cpu:2")
    weights = perceptron()

    @tf.function
    def step(w: tf.Variable) -> None:
        x, y = batches()[0]
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, logits_of([w, *weights[1:]], [lambda: wh.split(2), contextlib.nullcontext], tf.constant(x)))
        w.assign_sub(tape.gradient(loss, w))

    with pytest.raises(wh.PlanError, match="gets as its argument .'w:0'.; let the function use the variable itself"):
        step(weights[0])


# -- Keras -------------------------------------------------------------------------------------------------------------
class Decoder(layers.Layer):
    """A language model of one block: queries in groups that share keys and values, a gated layer, the embedding as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(24, 16)
        self.query, self.key, self.value = [layers.EinsumDense("btd,dnh->btnh", (6, count, 4)) for count in (8, 4, 4)]
        self.joined = layers.EinsumDense("btnh,nhd->btd", (6, 16))
        self.gate, self.wide, self.narrow = [layers.Dense(units, use_bias=False) for units in (32, 32, 16)]
        self.gains = [self.add_weight(name=f"gain_{i}", shape=(16,), initializer="ones") for i in range(3)]

    def scaled(self, x: tf.Tensor, i: int) -> tf.Tensor:
        return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6) * (self.gains[i] + 1.0)

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        x = self.words(tokens) * 4.0
        y = self.scaled(x, 0)
        query, key, value = self.query(y), tf.repeat(self.key(y), 2, axis=2), tf.repeat(self.value(y), 2, axis=2)
        scores = tf.nn.softmax(tf.einsum("bqnh,bknh->bnqk", query, key))
        x += self.joined(tf.einsum("bnqk,bknh->bqnh", scores, value))
        y = self.scaled(x, 1)
        x += self.narrow(tf.nn.gelu(self.gate(y)) * self.wide(y))
        return tf.matmul(self.scaled(x, 2), self.words.embeddings, transpose_b=True)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.full), 4])
def test_kernels_of_a_decoder(devices: int, float64: None) -> None:
    tokens = np.random.RandomState(0).randint(0, 24, (12, 7))
    found = []
    for scope in (contextlib.nullcontext, lambda: wh.split(devices)):
        clear_keras()
        keras.utils.set_random_seed(0)
        if found:
            wh.init(cluster=f"cpu:{devices}")
        inputs = keras.Input((6,), dtype="int32")
        with scope():
            outputs = Decoder()(inputs)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=4, shuffle=False, verbose=0).history["loss"]
        if found:
            kernels = [getattr(one, "_value", one) for one in model.trainable_variables if len(one.shape) > 1]
            assert held(kernels) == [0] * 8
        found.append([np.array(losses)] + [one.numpy() for one in model.trainable_variables])
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-10)
