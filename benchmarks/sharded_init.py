"""What it costs to make, save and restore a divided variable without ever holding it whole.

    python -m benchmarks.sharded_init

A classifier's kernel of 164 MB under ``wh.split`` on logical CPU devices, divided by columns or by rows, with ``init: exact`` and
``sharded``.  Times are medians without a trace; peaks are the allocations of one traced run of the initializer, added up over
time, on the device that holds most, in copies of the kernel.  Each line has a process of its own.
"""
from __future__ import annotations

import os
import tempfile
from typing import Any, Callable, Dict, List

from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, step_times, table
from benchmarks.memory import peaks

WIDTH, CLASSES = 2048, 20000
FULL = 4 * WIDTH * CLASSES


def worker(spec: Spec) -> Result:
    """CPU and wall seconds of each run, and the initializer's peak."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init({"init": spec["init"], "patterns.force": {"classes": spec["pattern"]}}, cluster="cpu:{}".format(spec["devices"]))
    tf.set_random_seed(1)
    x, label = tf.placeholder("float32", [4, WIDTH]), tf.placeholder("int32", [4])
    with wh.split(spec["devices"]), tf.variable_scope("classes", use_resource=True):
        logits = tf.matmul(x, tf.get_variable("kernel", [WIDTH, CLASSES]))
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    initialise = tf.global_variables_initializer()
    saver = tf.train.Saver()
    metadata = tf.RunMetadata()
    with tempfile.TemporaryDirectory() as directory, tf.Session() as session:
        path = os.path.join(directory, "model")
        runs: Dict[str, Callable[[], Any]] = {
            "initialise": lambda: session.run(initialise), "save": lambda: saver.save(session, path),
            "restore": lambda: saver.restore(session, path)}
        found: Result = {}
        for name, run in runs.items():
            found[name] = step_times(_timed(run), 5, 1)
        session.run(initialise, None, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    found["peak"] = max(peaks(metadata, spec["devices"])) / FULL
    return found


def _timed(run: Callable[[], Any]) -> Callable[[], float]:
    def step() -> float:
        run()
        return 0.0

    return step


def report(console: Console) -> None:
    rows: List[List[str]] = []
    for devices in (2, 4):
        for init, pattern in (("exact", "column"), ("sharded", "column"), ("exact", "row"), ("sharded", "row")):
            found = ask(__file__, {"init": init, "pattern": pattern, "devices": devices})
            rows.append([init, pattern, str(devices)] + ["{:.2f} ({:.2f})".format(found[name]["wall_s"], found[name]["cpu_s"])
                                                         for name in ("initialise", "save", "restore")]
                        + ["{:.2f}".format(found["peak"])])
    console.print(table(f"a kernel of {FULL / 1e6:.0f} MB; wall (CPU) seconds", [
        "init", "pattern", "devices", "initialise", "save", "restore", "peak of initialise, copies"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
