"""Random stacks of layers under random ``wh.split`` and ``wh.replicate``, as hypothesis strategies."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import hypothesis.strategies as st
import tensorflow.compat.v1 as tf

from tests.numeric.cases import Case, Inputs, rng
from tests.numeric.script import Arrays, Script, Setting, Stages, dense, weight
from tests.numeric.split import OPTIMIZERS, Split

STEPS = 3
TOKENS, WIDTH, HEADS, VOCAB, CLASSES = 2, 12, 3, 7, 5
MAX_DEVICES = 6


class Model(NamedTuple):
    """A script, its plan and its data; ``cuts``: the blocks that begin the further stages."""

    blocks: Tuple[str, ...]
    loss: str
    optimizer: str
    size: int
    setting: Setting
    split: Split
    cuts: Tuple[int, ...]


Block = Callable[[tf.Tensor, str], tf.Tensor]  # `[B, TOKENS, WIDTH]` and a name -> the same shape


def _rows(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1, WIDTH])


def _back(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1, TOKENS, WIDTH])


def _attention(x: tf.Tensor, name: str) -> tf.Tensor:
    rows = _rows(x)
    q, k, v = [tf.transpose(tf.reshape(dense(rows, WIDTH, name + part), [-1, TOKENS, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
               for part in "qkv"]
    mixed = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.5), v)
    return _back(dense(tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, WIDTH]), WIDTH, name + "o"))


def _normalise(x: tf.Tensor, name: str) -> tf.Tensor:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    scaled = centred * tf.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + 0.1)
    return scaled * weight(name + "gain", [WIDTH], "float64", 1.0) + weight(name + "shift", [WIDTH], "float64", 0.1)


def _einsum(x: tf.Tensor, name: str) -> tf.Tensor:
    hidden = tf.tanh(tf.einsum("btd,dhk->bthk", x, weight(name + "in", [WIDTH, HEADS, 4], "float64")))
    return tf.einsum("bthk,hkd->btd", hidden, weight(name + "out", [HEADS, 4, WIDTH], "float64"))


def _gated(x: tf.Tensor, name: str) -> tf.Tensor:
    """A softmax over the layer's units, which may be divided, and a maximum over them."""
    gates = tf.nn.softmax(dense(_rows(x), WIDTH, name))
    return x * _back(gates / tf.reduce_max(gates, -1, keepdims=True))


def _pieces(x: tf.Tensor, name: str) -> tf.Tensor:
    left, right = tf.split(dense(_rows(x), 2 * WIDTH, name), 2, 1)
    return _back(tf.concat([(left * tf.sigmoid(right))[:, :5], right[:, 5:]], 1))


BLOCKS: Dict[str, Block] = {
    "dense": lambda x, name: _back(tf.tanh(dense(_rows(x), WIDTH, name))),
    "wide": lambda x, name: _back(dense(tf.nn.relu(dense(_rows(x), 2 * WIDTH, name)), WIDTH, name + "narrow")),
    "residual": lambda x, name: x + _back(dense(_rows(x), WIDTH, name)),
    "tied": lambda x, name: _back(tf.tanh(dense(_rows(x), WIDTH, "tied"))),
    "attention": lambda x, name: x + _attention(x, name),
    "normalise": _normalise,
    "einsum": _einsum,
    "gated": _gated,
    "pieces": _pieces,
    "transposed": lambda x, name: _back(tf.transpose(tf.matmul(
        weight(name, [WIDTH, WIDTH], "float64"), _rows(x), transpose_b=True))),
    "plain": lambda x, name: tf.sin(x) * 1.5,
}


def _labels(inputs: Inputs) -> tf.Tensor:
    return inputs["label"][:, 0]


def _logits(x: tf.Tensor) -> tf.Tensor:
    return dense(tf.reduce_mean(x, 1), CLASSES, "logits")


LOSSES: Dict[str, Callable[[tf.Tensor, Inputs], tf.Tensor]] = {
    "sparse": lambda y, inputs: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=_labels(inputs), logits=y)),
    "dense": lambda y, inputs: tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(
        labels=tf.one_hot(_labels(inputs), CLASSES, dtype=tf.float64), logits=y)),
    "square": lambda y, inputs: 0.01 * tf.reduce_sum(tf.square(y)),  # small enough that no model diverges: a sum of examples
    "log": lambda y, inputs: -tf.reduce_mean(tf.nn.log_softmax(y)[:, 1]),
    "with_l2": lambda y, inputs: LOSSES["sparse"](y, inputs) + 0.01 * tf.add_n(
        [tf.nn.l2_loss(v) for v in tf.trainable_variables()]),
}


def _examples(count: int, dtype: str) -> Arrays:
    r = rng("generated_split")
    return {"tokens": r.randint(0, VOCAB, [count, TOKENS]).astype("int32"),
            "label": r.randint(0, CLASSES, [count, TOKENS]).astype("int32")}


def case_of(model: Model) -> Case:
    """The model as a case for the equality harness."""
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        def block(index: int, kind: str) -> Callable[[tf.Tensor], tf.Tensor]:
            return lambda x: BLOCKS[kind](x, f"b{index}")

        blocks: List[Callable] = [lambda tokens: tf.nn.embedding_lookup(weight("words", [VOCAB, WIDTH], dtype, 0.5), tokens)]
        blocks += [block(i, kind) for i, kind in enumerate(model.blocks)] + [_logits]
        stages.cuts = model.cuts if len(stages.scopes) > 1 else ()
        y = stages.run(blocks, inputs["tokens"])
        loss = LOSSES[model.loss](y, inputs)
        optimizer = OPTIMIZERS[model.optimizer]()
        gradients = optimizer.compute_gradients(loss)
        with tf.control_dependencies([loss]):  # as in cases.sum_with_l2
            update = optimizer.apply_gradients(gradients)
        return Script([[update]], {"loss": loss}, {"y": y})

    return Case(_examples, build, sizes=(model.size,) * STEPS)


@st.composite
def models(draw: Any) -> Model:
    """Models with 1 to 5 blocks between an embedding and a classifier, in 1 to 3 stages on at most 6 devices."""
    blocks = tuple(draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=5)))
    num_cuts = draw(st.sampled_from([0, 0, 1, 2]))
    cuts = tuple(sorted(draw(st.sets(st.integers(1, len(blocks) + 1), min_size=min(num_cuts, len(blocks) + 1),
                                     max_size=num_cuts))))
    counts: List[int] = []
    for index in range(len(cuts) + 1):
        first = 0 if index == 0 else cuts[index - 1]
        last = cuts[index] if index < len(cuts) else len(blocks) + 2
        kinds = [("embed",) + blocks + ("logits",)][0][first:last]
        can_split = any(kind not in ("plain", "normalise") for kind in kinds)
        count = draw(st.sampled_from([2, 2, 3, 4] if not cuts else [1, 2]))
        counts.append(-count if can_split and count > 1 and draw(st.sampled_from([True, True, False])) else count)
    nested = draw(st.sampled_from([1, 1, 2])) if sum(map(abs, counts)) <= MAX_DEVICES // 2 else 1
    micro_batches = draw(st.sampled_from([1, 1, 2, 3]))
    force = draw(st.sampled_from(_forces(blocks)))
    config: Dict[str, Any] = {"num_micro_batch": micro_batches, "variables": draw(st.sampled_from(["auto", "mirrored"])),
                              "init": draw(st.sampled_from(["exact", "sharded"])),
                              "emit": draw(st.sampled_from(["inline", "call"]))}
    if force is not None and counts[-1] < 0:
        config["patterns.force"] = force
    needed = sum(map(abs, counts))
    if micro_batches == 1 and len({abs(count) for count in counts}) == 1 and draw(st.booleans()):
        config["cluster.colocate_split_and_replicate"], needed = True, abs(counts[0])
    setting = Setting(resource=draw(st.booleans()), static_batch=draw(st.booleans()),
                      runner=draw(st.sampled_from(["session", "callable"])))
    if config["emit"] == "call" and not setting.resource:  # results only: tests/emit/test_calls.py shows why
        setting = setting._replace(outputs=False)
    size = micro_batches * nested * 12
    return Model(blocks, draw(st.sampled_from(sorted(LOSSES))), draw(st.sampled_from(sorted(OPTIMIZERS))), size, setting,
                 Split(tuple(counts), needed * nested, tuple(config.items())), cuts)


def _forces(blocks: Tuple[str, ...]) -> List[Optional[Dict[str, str]]]:
    return [None, None, {"logits": "column"}, {"logits": "row"}, {"logits": "batch"}]
