"""GNMT (LSTMs in while loops, attention) in parallel equals the local script."""
from __future__ import annotations

import contextlib
from typing import Any, Optional, Sequence

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models import gnmt
from tests.graph_editor.graphs import control_flow
from tests.numeric.script import rng

CONFIG = gnmt.GnmtConfig(encoder_layers=2, decoder_layers=2, hidden=4, vocab=20, source=5, target=4, dtype="float64")
BATCH, STEPS = 8, 3


def train(version: int, static: bool, counts: Optional[Sequence[int]] = None, micro_batches: int = 1) -> np.ndarray:
    """Losses, logits and variables of a few steps; ``counts``: replicas of one stage or of encoder and decoder."""
    if counts:
        wh.init({"num_micro_batch": micro_batches}, cluster="cpu:2")
    try:
        graph = tf.Graph()
        with graph.as_default(), control_flow(version), tf.variable_scope("", use_resource=True):
            batch = gnmt.inputs(CONFIG, BATCH if static else None)
            loss, logits = build(batch, counts)
            update = tf.train.AdamOptimizer(1e-3, epsilon=1e-6).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                found = []
                for step in range(STEPS):
                    found += session.run([loss, logits, update], examples(batch, step))[:2]
                found += session.run(tf.global_variables())
        return np.concatenate([np.ravel(value) for value in found])
    finally:
        wh.shutdown()


def build(batch: Any, counts: Optional[Sequence[int]]) -> Any:
    whole = wh.replicate(counts[0]) if counts and len(counts) == 1 else contextlib.nullcontext()
    with whole:
        with wh.replicate(counts[0]) if counts and len(counts) > 1 else contextlib.nullcontext():
            memory = gnmt.embed(batch.source, CONFIG, "source_tokens")
            for i in range(CONFIG.encoder_layers):
                memory = gnmt.encoder_layer(memory, batch.source_mask, CONFIG, i)
        with wh.replicate(counts[1]) if counts and len(counts) > 1 else contextlib.nullcontext():
            tokens = gnmt.embed(batch.target, CONFIG, "target_tokens")
            x, contexts = gnmt.decoder_attention_layer(tokens, memory, batch.source_mask, CONFIG)
            for i in range(1, CONFIG.decoder_layers):
                x = gnmt.decoder_layer(x, contexts, CONFIG, i)
            logits = gnmt.softmax(x, CONFIG)
            return gnmt.layers.weighted_cross_entropy(logits, batch.labels, batch.weights), logits


def examples(batch: Any, step: int) -> Any:
    r = rng(f"gnmt {step}")
    return {getattr(batch, name): r.randint(0, CONFIG.vocab, [BATCH, length]) if name in ("source", "target", "labels")
            else (r.rand(BATCH, length) > 0.2).astype("float64")
            for name, length in (("source", CONFIG.source), ("source_mask", CONFIG.source), ("target", CONFIG.target),
                                 ("labels", CONFIG.target), ("weights", CONFIG.target))}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("version,static", [(1, False), (2, True), pytest.param(1, True, marks=pytest.mark.full),
                                            pytest.param(2, False, marks=pytest.mark.full)])
def test_replicas_and_pipelines_equal_the_local_script(version: int, static: bool) -> None:
    expected = train(version, static)
    for counts, micro_batches in (((2,), 1), ((1, 1), 4)):
        found = train(version, static, counts, micro_batches)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
