"""What recomputation saves and costs: peak memory of a step, by RunMetadata, and CPU time, beside the same step without.

    python -m benchmarks.recompute

An encoder of 12 layers on one device, and of 8 in a pipeline of two stages with four micro-batches. ``auto`` has a device with
room for half of what ``full`` saves.
"""
from __future__ import annotations

import json
import time
from typing import Any, Dict

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, table
from benchmarks.memory import peaks, random_feed

SETTINGS: Dict[str, Dict[str, Any]] = {
    "one device, 12 layers": {"layers": 12, "stages": 1, "micro_batches": 1},
    "two stages, 8 layers": {"layers": 8, "stages": 2, "micro_batches": 4},
}
BATCH, STEPS, ROUNDS = 32, 6, 3


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import bert

    tf.disable_eager_execution()
    stages = spec["stages"]
    wh.init({"num_micro_batch": spec["micro_batches"], "recompute": spec["recompute"]}, cluster=_cluster(spec))
    config = bert.BertConfig(layers=spec["layers"], hidden=64, heads=4, ffn=256, seq=64, predictions=8)
    inputs = bert.inputs(config, BATCH)
    x = words = None
    for stage in range(stages):
        with wh.replicate(1):
            if stage == 0:
                x, words = bert.embed(inputs.tokens, config, inputs.segments)
            for layer in range(spec["layers"] * stage // stages, spec["layers"] * (stage + 1) // stages):
                x = bert.encoder_layer(x, config, name=f"layer_{layer}")
            if stage == stages - 1:
                loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, words, config), inputs)
    update = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
    feed = random_feed(inputs)
    metadata = tf.RunMetadata()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        losses = [float(session.run([loss, update], feed)[0]) for _ in range(3)]
        start = time.process_time()
        for _ in range(STEPS):
            session.run(update, feed)
        seconds = (time.process_time() - start) / STEPS
        session.run(update, feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    held = sum(3 * v.shape.num_elements() * v.dtype.base_dtype.size for v in tf.trainable_variables())
    return {"peak": max(peaks(metadata, stages)), "seconds": seconds, "loss": losses[-1], "held": held}


def _cluster(spec: Spec) -> str:
    kind = {"kind": "CPU", "memory_bytes": int(spec.get("memory", 1 << 34)), "fp32": 3e10, "memory_bandwidth_bytes_per_s": 1e10}
    return json.dumps({"device_types": {"Core": kind}, "nodes": [{"devices": [f"Core:{spec['stages']}"], "links": "default"}]})


def report(console: Console) -> None:
    rows = []
    for title, setting in SETTINGS.items():
        none, full = rounds(__file__, [dict(setting, recompute=mode) for mode in ("none", "full")], ROUNDS)
        middle = (none["peak"] + full["peak"]) / 2 + none["held"] / setting["stages"]
        auto = rounds(__file__, [dict(setting, recompute="auto", memory=middle)], ROUNDS)[0]
        for mode, found in (("none", none), ("full", full), ("auto", auto)):
            rows.append([title, mode, f"{found['peak'] / 1e6:.1f}", f"{found['peak'] / none['peak']:.2f}",
                         f"{1e3 * found['seconds']:.0f}", f"{found['seconds'] / none['seconds']:.2f}", f"{found['loss']:.6f}"])
    console.print(table("memory and CPU time of a step", [
        "step", "recompute", "peak MB", "ratio", "CPU ms", "ratio", "loss"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
