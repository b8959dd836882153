"""Loss curves of an encoder on text in float32, bfloat16 and float16: 200 steps on one device and under a plan.

    python -m benchmarks.mixed_precision

A masked language model of two layers reads Python's own source text. The plan is a pipeline of two stages with two micro-batches.
What noise is, another run of float32 says, which starts from other initial values.
"""
from __future__ import annotations

import statistics
from typing import Any, Dict, List

from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, table

STEPS, WINDOW, BATCH = 200, 20, 16
RUNS: Dict[str, Dict[str, Any]] = {
    "float32": {"amp": "none"}, "float32, other initial values": {"amp": "none", "seed": 1}, "bfloat16": {"amp": "bfloat16"},
    "float16": {"amp": "float16"}}
STAGES = {"one device": 1, "two stages": 2}


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import bert, data

    tf.disable_eager_execution()
    stages = spec["stages"]
    wh.init({"num_micro_batch": stages, "amp": spec["amp"]}, cluster=f"cpu:{stages}")
    config = bert.BertConfig(layers=2, hidden=64, heads=4, ffn=256, seq=32, predictions=6, seed=spec.get("seed", 0))
    inputs = bert.inputs(config, BATCH)
    with wh.replicate(1):
        x, words = bert.embed(inputs.tokens, config, inputs.segments)
        x = bert.encoder_layer(x, config, name="layer_0")
    with wh.replicate(1):
        x = bert.encoder_layer(x, config, name="layer_1")
        loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, words, config), inputs)
    update = tf.train.AdamOptimizer(1e-3).minimize(loss)
    examples = data.masked_lm_examples(1024, config.seq, config.predictions, config.vocab)
    losses: List[float] = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for batch in data.batches(examples, BATCH):
            losses.append(float(session.run([loss, update], dict(zip(inputs, batch)))[0]))
            if len(losses) == STEPS:
                break
    return {"losses": losses}


def report(console: Console) -> None:
    windows = [0, 3, 6, STEPS // WINDOW - 1]
    rows = []
    for title, stages in STAGES.items():
        reference: List[float] = []
        for name, run in RUNS.items():
            losses = ask(__file__, dict(run, stages=stages))["losses"]
            reference = reference or losses
            means = [statistics.mean(losses[WINDOW * w:WINDOW * (w + 1)]) for w in windows]
            apart = statistics.mean(losses[-WINDOW:]) - statistics.mean(reference[-WINDOW:])
            most = max(abs(a - b) for a, b in zip(losses, reference))
            rows.append([title, name, *(f"{mean:.4f}" for mean in means), f"{apart:+.4f}", f"{most:.4f}"])
    console.print(table("mean loss of 20 steps", [
        "plan", "precision", *(f"{WINDOW * w + 1}-{WINDOW * (w + 1)}" for w in windows), "last - float32", "largest of a step"],
        rows))


if __name__ == "__main__":
    main(__file__, worker, report)
