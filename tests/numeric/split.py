"""Models and plans for ``wh.split``: what the matrix of ``test_matrix`` does for ``wh.replicate``."""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

import whale_tf as wh
from models.optimizers import Adafactor, Lamb
from tests.numeric.cases import Case, Inputs, cross_entropy, layer, minimised, register, rng
from tests.numeric.equality import Outcome, run_script
from tests.numeric.script import Arrays, Script, Setting, Stages, dense, weight
from tests.numeric.unequal import described

CLASSES, WIDTH, HEADS, TOKENS, VOCAB = 10, 12, 4, 3, 11


class Split(NamedTuple):
    """``counts``: devices of each stage, negative for ``wh.split``; ``total``: of the cluster; ``unequal``: see ``described``."""

    counts: Tuple[int, ...]
    total: int
    config: Tuple[Tuple[str, Any], ...] = ()
    unequal: Tuple[Tuple[float, float], ...] = ()

    @property
    def scopes(self) -> Sequence[Callable[[], Any]]:
        return [functools.partial(wh.split, -n) if n < 0 else functools.partial(wh.replicate, n) for n in self.counts]


class Ran(NamedTuple):
    """What a parallel run gave."""

    outcome: Outcome
    plan: Any
    explained: str


def run_split(case: Case, setting: Setting, split: Split, plan: Optional[Any] = None, model_replicas: int = 1) -> Ran:
    cluster = described(split.unequal) if split.unequal else f"cpu:{split.total}"
    wh.init(dict(split.config, **(case.config or {})), cluster=cluster, plan=plan)
    try:
        outcome = run_script(case, setting, Stages(split.scopes), model_replicas, 1)
        return Ran(outcome, wh.current_plan(), wh.explain())
    finally:
        wh.shutdown()


OPTIMIZERS: Dict[str, Callable[[], tf.train.Optimizer]] = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9, use_nesterov=True),
    "adam": lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-4),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adafactor": lambda: Adafactor(0.1, epsilon1=1e-8),  # what is zero but for rounding must not be scaled up
    "lamb": lambda: Lamb(0.02, epsilon=1e-4),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5, epsilon=1e-3),
}


# -- models ------------------------------------------------------------------------------------------------------------


def _vectors(count: int, dtype: str) -> Arrays:
    r = rng("split")
    classes = r.rand(count, CLASSES)
    return {"x": r.randn(count, WIDTH).astype(dtype), "label": r.randint(0, CLASSES, count).astype("int32"),
            "soft": (classes / classes.sum(1, keepdims=True)).astype(dtype)}


def _classifier(optimizer: Callable[[], tf.train.Optimizer], dense_labels: bool) -> Callable[..., Script]:
    """Features and a softmax over ten classes (the paper's Example 2)."""
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        logits = stages.run([layer("features", WIDTH), layer("classes", CLASSES, tf.identity)], inputs["x"])
        if dense_labels:
            loss = tf.nn.softmax_cross_entropy_with_logits_v2(labels=inputs["soft"], logits=logits)
        else:
            loss = cross_entropy(inputs, logits)
        return minimised(optimizer(), tf.reduce_mean(loss), {"logits": logits})

    return build


def _sequences(count: int, dtype: str) -> Arrays:
    r = rng("split_sequences")
    return {"tokens": r.randint(0, VOCAB, [count, TOKENS]).astype("int64"),
            "label": r.randint(0, VOCAB, [count, TOKENS]).astype("int64")}


def attention(x: tf.Tensor) -> tf.Tensor:
    """`[B, TOKENS, WIDTH]`: queries, keys and values in one product, heads side by side, a residual."""
    rows = tf.reshape(x, [-1, WIDTH])
    parts = [tf.transpose(tf.reshape(dense(rows, WIDTH, name), [-1, TOKENS, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
             for name in ("query", "key", "value")]
    scores = tf.nn.softmax(tf.matmul(parts[0], parts[1], transpose_b=True) * (WIDTH // HEADS) ** -0.5)
    mixed = tf.reshape(tf.transpose(tf.matmul(scores, parts[2]), [0, 2, 1, 3]), [-1, WIDTH])
    return x + tf.reshape(dense(mixed, WIDTH, "output"), [-1, TOKENS, WIDTH])


def feed_forward(x: tf.Tensor) -> tf.Tensor:
    """Megatron's pair: wide, activation, narrow."""
    hidden = tf.nn.relu(dense(tf.reshape(x, [-1, WIDTH]), 4 * WIDTH, "wide"))
    return tf.reshape(dense(hidden, WIDTH, "narrow"), [-1, TOKENS, WIDTH])


def normalised(x: tf.Tensor) -> tf.Tensor:
    dtype = x.dtype.base_dtype.name
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    scaled = centred * tf.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + 1e-3)
    return scaled * weight("gain", [WIDTH], dtype, 1.0) + weight("shift", [WIDTH], dtype, 0.1)


def _transformer(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    table = {}

    def embed(tokens: tf.Tensor) -> tf.Tensor:
        table["words"] = weight("words", [VOCAB, WIDTH], dtype, 0.5)
        return tf.nn.embedding_lookup(table["words"], tokens)

    def head(x: tf.Tensor) -> tf.Tensor:
        return dense(tf.reshape(normalised(x), [-1, WIDTH]), VOCAB, "head")

    logits = stages.run([embed, attention, feed_forward, head], inputs["tokens"])
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.reshape(inputs["label"], [-1]), logits=logits))
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-4)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
    return Script([[optimizer.apply_gradients(zip(clipped, variables))]], {"loss": loss, "norm": norm}, {"logits": logits})


def _experts(optimizer: Callable[[], tf.train.Optimizer]) -> Callable[..., Script]:
    """A mixture of four experts with soft gates: every label of the einsums but the batch's can be divided."""
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        def mix(x: tf.Tensor) -> tf.Tensor:
            gates = tf.nn.softmax(dense(x, 4, "gates"))
            routed = tf.einsum("be,bd->ebd", gates, x)
            hidden = tf.nn.relu(tf.einsum("ebd,edh->ebh", routed, weight("up", [4, WIDTH, 6], dtype)))
            return tf.einsum("ebh,ehd->bd", hidden, weight("down", [4, 6, WIDTH], dtype))

        logits = stages.run([mix, layer("classes", CLASSES, tf.identity)], inputs["x"])
        return minimised(optimizer(), tf.reduce_mean(cross_entropy(inputs, logits)), {"logits": logits})

    return build


def _masked(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """A layer for rows that the data choose."""
    def head(x: tf.Tensor) -> tf.Tensor:
        chosen = tf.boolean_mask(tf.nn.relu(dense(x, 2 * WIDTH, "wide")), inputs["soft"][:, 0] > 0.1)
        return tf.reduce_sum(tf.square(dense(chosen, 6, "narrow")), -1)

    rows = stages.run([layer("features", WIDTH), head], inputs["x"])
    return minimised(OPTIMIZERS["adam"](), tf.reduce_mean(rows), {})


def _known_shapes(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """Ops with the result's shape as an attribute between Megatron's pair of layers, in the batch's sum beside it."""
    def head(x: tf.Tensor) -> tf.Tensor:
        hidden = tf.ensure_shape(tf.nn.relu(dense(x, 4 * WIDTH, "wide")), [None, 4 * WIDTH])
        hidden = tf.raw_ops.AccumulateNV2(inputs=[hidden, tf.stop_gradient(tf.tanh(hidden))], shape=hidden.shape)
        return dense(hidden, WIDTH, "narrow")

    outputs = stages.run([layer("features", WIDTH), head], inputs["x"])
    return minimised(OPTIMIZERS["adam"](), tf.reduce_mean(tf.square(outputs)), {})


def _between(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """Whatever may stand between a kernel and its product, and a table of which only a row is added to activations."""
    def head(x: tf.Tensor) -> tf.Tensor:
        x += weight("positions", [6, WIDTH], dtype)[1:2]
        joint = weight("joint", [3, WIDTH, HEADS, WIDTH // HEADS], dtype)
        query, key, value = [tf.matmul(x, tf.reshape(joint[i], [WIDTH, WIDTH])) for i in range(3)]
        rows = tf.split(tf.identity(weight("rows", [WIDTH, 2 * WIDTH], dtype)), 2, axis=1)
        gated = tf.matmul(query * key + value, rows[0]) * tf.tanh(tf.matmul(x, rows[1]))
        turned = tf.transpose(tf.squeeze(weight("turned", [2 * WIDTH, 1, WIDTH], dtype), 1), [1, 0])
        wide = tf.matmul(gated, tf.cast(tf.cast(turned, "float64"), dtype) * 0.5)
        stacked = tf.reshape(weight("stacked", [HEADS, 2, WIDTH // HEADS, WIDTH], dtype), [-1, WIDTH])
        return tf.matmul(tf.nn.relu(wide), tf.reshape(tf.expand_dims(stacked, 0), [2 * WIDTH, WIDTH]))

    logits = stages.run([layer("features", WIDTH), head], inputs["x"])
    return minimised(OPTIMIZERS["adam"](), tf.reduce_mean(tf.square(logits)), {"logits": logits})


def _look_up(optimizer: Callable[[], tf.train.Optimizer]) -> Callable[..., Script]:
    """A table with sparse gradients, and repeated rows in a batch."""
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        def embed(tokens: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.nn.embedding_lookup(weight("words", [VOCAB, WIDTH], dtype, 0.5), tokens), [-1, WIDTH])

        logits = stages.run([embed, layer("head", VOCAB, tf.identity)], inputs["tokens"])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(inputs["label"], [-1]), logits=logits)
        return minimised(optimizer(), tf.reduce_mean(loss), {})

    return build


register({
    "transformer": Case(_sequences, _transformer),
    "masked": Case(_vectors, _masked),
    "between": Case(_vectors, _between),
    "known_shapes": Case(_vectors, _known_shapes),
    **{"experts_" + name: Case(_vectors, _experts(OPTIMIZERS[name])) for name in ("adam", "adafactor", "lamb")},
    "dense_labels": Case(_vectors, _classifier(OPTIMIZERS["sgd"], True)),
    **{"classifier_" + name: Case(_vectors, _classifier(make, False)) for name, make in OPTIMIZERS.items()},
    **{"look_up_" + name: Case(_sequences, _look_up(make)) for name, make in OPTIMIZERS.items()},
})
