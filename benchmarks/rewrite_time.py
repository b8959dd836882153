"""(a) How long the rewrite takes, per op it adds, beside tf.import_graph_def of as many ops; and that it is linear.

    python -m benchmarks.rewrite_time

CPU seconds of wh.parallelize(), which is record, plan and rewrite together, on a BERT-style encoder's training graph.
"""
from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, table

BATCH = 32
PLANS = {"4 replicas": {"counts": [4], "micro_batches": 1}, "4 stages x 8": {"counts": [1] * 4, "micro_batches": 8},
         "split over 4": {"counts": [-4], "micro_batches": 1}}
LAYERS = (12, 24, 48)
ROUNDS = 3


def build(layers: int, counts: Any) -> None:
    """Training graph of an encoder; ``counts[i]`` devices for stage i (negative: split), or no annotation at all."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import bert

    config = bert.BertConfig(layers=layers, hidden=32, heads=4, ffn=64, seq=16)
    inputs = bert.inputs(config, BATCH)
    stages = counts or [None]
    x = table_ = None
    for number, count in enumerate(stages):
        with contextlib.nullcontext() if not count else wh.replicate(count) if count > 0 else wh.split(-count):
            if number == 0:
                x, table_ = bert.embed(inputs.tokens, config, inputs.segments)
            for i in range(layers * number // len(stages), layers * (number + 1) // len(stages)):
                x = bert.encoder_layer(x, config, name=f"layer_{i}")
            if number == len(stages) - 1:
                loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, table_, config), inputs)
    tf.train.AdamOptimizer(1e-3, epsilon=1e-6).minimize(loss)


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    graph = tf.get_default_graph()
    if spec["system"] == "whale_tf":
        wh.init({"num_micro_batch": spec["micro_batches"], "emit": "inline"}, cluster="cpu:4")
        build(spec["layers"], spec["counts"])
        before = len(graph.get_operations())
        start = time.process_time()
        wh.parallelize()
        seconds = time.process_time() - start
    else:
        build(spec["layers"], None)
        before, graph_def = len(graph.get_operations()), graph.as_graph_def()
        start = time.process_time()
        while len(graph.get_operations()) - before < spec["ops"]:
            tf.import_graph_def(graph_def, name="copy")
        seconds = time.process_time() - start
    return {"seconds": seconds, "local_ops": before, "ops": len(graph.get_operations()) - before}


def report(console: Console) -> None:
    rows = []
    for name, plan in PLANS.items():
        for layers in LAYERS:
            ours = rounds(__file__, [dict(plan, system="whale_tf", layers=layers)], ROUNDS)[0]
            imports = rounds(__file__, [{"system": "import", "layers": layers, "ops": ours["ops"]}], ROUNDS)[0]
            ours_us, import_us = (1e6 * r["seconds"] / r["ops"] for r in (ours, imports))
            rows.append([name, str(layers), "{:.0f}".format(ours["local_ops"]), "{:.0f}".format(ours["ops"]),
                         "{:.2f}".format(ours["seconds"]), f"{ours_us:.0f}", f"{import_us:.0f}",
                         f"{ours_us / import_us:.2f}"])
    console.print(table("CPU time of the rewrite", [
        "plan", "layers", "local ops", "added ops", "seconds", "us per added op", "us per imported op", "ratio"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
