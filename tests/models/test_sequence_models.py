"""What makes each sequence model itself: masks, positions, recurrences and gates, each against a plain calculation."""
from __future__ import annotations

import math
from typing import Any, List, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import bert, data, gnmt, layers, m6, moe, t5, zoo

pytestmark = pytest.mark.slow


def _logits(module: Any, config: Any, batches: List[Any]) -> List[np.ndarray]:
    """Logits of one model for several batches."""
    with tf.Graph().as_default(), tf.Session() as session:
        model = module.build(module.inputs(config), config)
        session.run(tf.global_variables_initializer())
        return [session.run(model.logits, dict(zip(model.inputs, batch))) for batch in batches]


@pytest.mark.parametrize("name", ["gpt2", "moe-top1"])
def test_language_model_sees_no_later_token(name: str) -> None:
    entry = zoo.SMALL[name]
    config = entry.config("float64")
    batch = data.language_model_examples(4, config.seq)
    changed = batch._replace(tokens=np.where(np.arange(config.seq) >= 9, 8, batch.tokens))
    first, second = _logits(entry.module, config, [batch, changed])
    np.testing.assert_allclose(first[:, :9], second[:, :9], rtol=1e-9)
    assert not np.allclose(first[:, 9:], second[:, 9:], rtol=1e-9)


@pytest.mark.parametrize("name", ["t5", "m6", "gnmt"])
def test_seq2seq_decoder_sees_the_source_but_no_later_target_and_no_padding(name: str) -> None:
    entry = zoo.SMALL[name]
    config = entry.config("float64")
    batch = next(data.batches(entry.examples(config), 4))
    length = config.target // 2
    later = batch._replace(target=np.where(np.arange(config.target) >= length, 8, batch.target))
    padded = batch._replace(source=np.where(batch.source_mask > 0, batch.source, 9))
    source = batch._replace(source=np.where(np.arange(config.source) < 3, 9, batch.source))
    whole, cut, other_padding, other_source = _logits(entry.module, config, [batch, later, padded, source])
    np.testing.assert_allclose(whole[:, :length], cut[:, :length], rtol=1e-10)
    assert not np.allclose(whole[:, length:], cut[:, length:])
    np.testing.assert_allclose(whole, other_padding, rtol=1e-10)
    assert not np.allclose(whole[:, :length], other_source[:, :length], rtol=1e-10)


def test_bert_sees_both_sides_and_reads_the_masked_positions() -> None:
    config = zoo.SMALL["bert"].config("float64")
    batch = data.masked_lm_examples(4, config.seq, config.predictions)._replace(positions=np.full([4, 2], 7, np.int32))
    for changed_column in (1, 15):
        tokens = batch.tokens.copy()
        tokens[:, changed_column] = 9
        first, second = _logits(bert, config, [batch, batch._replace(tokens=tokens)])
        np.testing.assert_array_equal(first[:, 0], first[:, 1])
        assert not np.allclose(first, second, rtol=1e-9)


def test_bert_padding_is_not_attended(graph: tf.Graph) -> None:
    config = bert.BertConfig.tiny()
    x = tf.placeholder(tf.float32, [None, config.seq, config.hidden])
    mask = np.tile((np.arange(config.seq) < 10).astype(np.float32), [2, 1])
    y = bert.encoder_layer(x, config, layers.padding_bias(tf.constant(mask)))
    value = np.random.RandomState(0).randn(2, config.seq, config.hidden)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        first = session.run(y, {x: value})
        second = session.run(y, {x: np.where(mask[..., None] > 0, value, 5.0)})
    np.testing.assert_allclose(first[:, :10], second[:, :10], rtol=1e-5, atol=1e-6)


# -- T5 ----------------------------------------------------------------------------------------------------------------


def _bucket(distance: int, config: t5.T5Config, bidirectional: bool) -> int:
    """Bucket of one distance (query minus key), following the description in the paper's section 2.1."""
    buckets, first = config.buckets, 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    if distance < buckets // 2:
        return first + distance
    share = math.log(distance / (buckets // 2)) / math.log(config.max_distance / (buckets // 2))
    return first + min(buckets - 1, buckets // 2 + int(share * (buckets - buckets // 2)))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_relative_position_buckets(bidirectional: bool) -> None:
    for config in (t5.T5Config.tiny(), t5.T5Config.large()):
        got = t5.relative_buckets(40, 30, config, bidirectional)
        expected = [[_bucket(i - j, config, bidirectional) for j in range(30)] for i in range(40)]
        np.testing.assert_array_equal(got, expected)


# -- mixture of experts ------------------------------------------------------------------------------------------------


def _route(gates: np.ndarray, config: moe.MoeConfig) -> np.ndarray:
    """Combine weights `[B, S, E, C]` by plain loops: first choices take slots before second ones, in token order."""
    batch, seq, experts = gates.shape
    combine = np.zeros([batch, seq, experts, config.capacity])
    for b in range(batch):
        order = np.argsort(-gates[b], axis=-1)[:, :config.top_k]
        taken = np.zeros(experts, int)
        for choice in range(config.top_k):
            for s in range(seq):
                expert = order[s, choice]
                weight = gates[b, s, expert]
                if config.top_k == 2:
                    weight /= gates[b, s, order[s]].sum()
                if taken[expert] < config.capacity:
                    combine[b, s, expert, taken[expert]] = weight
                taken[expert] += 1
    return combine


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("top_k", [1, 2])
def test_moe_routes_tokens_and_applies_experts(graph: tf.Graph, top_k: int, batch_size: Optional[int]) -> None:
    config = moe.MoeConfig(experts=3, top_k=top_k, capacity_factor=0.75, dtype="float64")
    value = np.random.RandomState(0).randn(3, config.seq, config.hidden)
    x = tf.placeholder(tf.float64, [batch_size, config.seq, config.hidden])
    gating = moe.gating_dispatch(x, config)
    y = moe.experts(gating.combine, gating.dispatched, config)
    kernels = tf.trainable_variables()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        combine, dispatched, auxiliary = session.run(gating, {x: value})
        output, (gate, kernel_in, kernel_out) = session.run([y, kernels], {x: value})
    logits = value @ gate
    gates = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = _route(gates, config)
    assert (expected.sum(axis=(2, 3)) < 0.999).any(), "the capacity should bind in this case"
    np.testing.assert_allclose(combine, expected, rtol=1e-10)
    np.testing.assert_allclose(dispatched, np.einsum("bsec,bsh->ebch", (expected > 0).astype(float), value), rtol=1e-10)
    share = np.eye(3)[gates.argmax(axis=-1)].mean(axis=1)
    np.testing.assert_allclose(auxiliary, 3.0 * (share * gates.mean(axis=1)).sum(axis=-1).mean(), rtol=1e-10)
    each = np.maximum(np.einsum("bsh,ehf->besf", value, kernel_in), 0.0) @ kernel_out  # every expert on every token
    np.testing.assert_allclose(output, np.einsum("bsec,besh->bsh", expected, each), rtol=1e-9, atol=1e-12)


# -- GNMT --------------------------------------------------------------------------------------------------------------


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _step(gates: np.ndarray, cell: np.ndarray) -> tuple:
    enter, forget, update, leave = np.split(gates, 4, axis=-1)
    cell = _sigmoid(forget + 1.0) * cell + _sigmoid(enter) * np.tanh(update)
    return _sigmoid(leave) * np.tanh(cell), cell


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("reverse", [False, True])
def test_lstm_stands_still_at_padding(graph: tf.Graph, reverse: bool, batch_size: Optional[int]) -> None:
    config = gnmt.GnmtConfig(hidden=4, dtype="float64")
    value = np.random.RandomState(0).randn(3, 6, 5)
    lengths = [6, 4, 1]
    x = tf.placeholder(tf.float64, [batch_size, 6, 5])
    mask = tf.placeholder(tf.float64, [batch_size, 6])
    y = gnmt.lstm(x, mask, config, "lstm", reverse)
    assert y.shape.as_list() == [batch_size, 6, 4]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        feed = {x: value, mask: (np.arange(6) < np.array(lengths)[:, None]).astype(float)}
        got, weights = session.run([y, {v.op.name: v for v in tf.trainable_variables()}], feed)
    kernel, recurrent = weights["lstm/input/kernel"], weights["lstm/recurrent"]
    for b, length in enumerate(lengths):
        output = cell = np.zeros(4)
        for t in reversed(range(length)) if reverse else range(length):
            output, cell = _step(value[b, t] @ kernel + output @ recurrent, cell)
            np.testing.assert_allclose(got[b, t], output, rtol=1e-9)


def test_gnmt_attention_layer(graph: tf.Graph) -> None:
    config = gnmt.GnmtConfig(hidden=4, dtype="float64")
    rng = np.random.RandomState(0)
    target, memory = rng.randn(2, 5, 4), rng.randn(2, 3, 4)
    mask = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    outputs, contexts = gnmt.decoder_attention_layer(tf.constant(target), tf.constant(memory), tf.constant(mask),
                                                     config)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        got, got_contexts, weights = session.run(
            [outputs, contexts, {v.op.name.split("/", 1)[1]: v for v in tf.trainable_variables()}])
    output = cell = np.zeros([2, 4])
    for t in range(5):
        energy = np.tanh(memory @ weights["keys/kernel"] + (output @ weights["query"])[:, None])
        scores = np.where(mask > 0, np.exp(energy @ weights["score"]), 0.0)
        context = ((scores / scores.sum(axis=1, keepdims=True))[..., None] * memory).sum(axis=1)
        gates = target[:, t] @ weights["input/kernel"] + np.concatenate([output, context], 1) @ weights["recurrent"]
        output, cell = _step(gates, cell)
        np.testing.assert_allclose(got_contexts[:, t], context, rtol=1e-9)
        np.testing.assert_allclose(got[:, t], output, rtol=1e-9)


# -- M6 ----------------------------------------------------------------------------------------------------------------


def test_m6_answer_depends_on_the_image() -> None:
    config = m6.M6Config.tiny()
    batch = next(data.batches(data.digit_captions(config.source, config.target), 4))
    first, second = _logits(m6, config, [batch, batch._replace(images=batch.images[::-1])])
    assert not np.allclose(first, second, atol=1e-5)
