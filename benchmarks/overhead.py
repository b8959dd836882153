"""(b) What whale_tf costs where there is nothing to do: one device and one micro-batch, beside the local script.

    python -m benchmarks.overhead
"""
from __future__ import annotations

import contextlib

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, loss, variables

SYSTEMS = ("local", "whale_tf")
STEPS = {"mlp": 60, "encoder": 15}
ROUNDS = 5


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    annotated = spec["system"] == "whale_tf"
    if annotated:
        wh.init(cluster="cpu:1")
    workload = WORKLOADS[spec["model"]]()
    inputs = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(workload.data(workload.batch, 0)).repeat()).get_next()
    with wh.replicate(1) if annotated else contextlib.nullcontext():
        value = loss(workload, variables(workload), *inputs)
    train_op = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value)
    with tf.Session(config=session_config()) as session:
        session.run(tf.global_variables_initializer())
        return step_times(lambda: session.run([value, train_op])[0], STEPS[spec["model"]])


def report(console: Console) -> None:
    rows = []
    for model in WORKLOADS:
        local, ours = rounds(__file__, [{"system": system, "model": model} for system in SYSTEMS], ROUNDS)
        rows.append([model] + [f"{1e3 * r[key]:.2f}" for key in ("cpu_s", "wall_s") for r in (local, ours)]
                    + [f"{ours[key] / local[key]:.3f}" for key in ("cpu_s", "wall_s")])
    console.print(table("one device, one micro-batch: ms per step", [
        "model", "local CPU", "whale_tf CPU", "local wall", "whale_tf wall", "CPU ratio", "wall ratio"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
