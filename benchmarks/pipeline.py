"""(d) A pipeline of two stages with eight micro-batches on two cores, beside the same micro-batches on one.

    python -m benchmarks.pipeline

The pipeline has two worker threads for ops and one within each op, one device the same with one: each stage has one
core. With M micro-batches and S equal stages a pipeline can be S M / (M + S - 1) times as fast: 1.78 for 2 and 8.
"""
from __future__ import annotations

from typing import Any, Callable, Dict

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, Workload, encoder, head_loss, mlp, variables

STAGES = 2
MICRO_BATCHES = 8
STEPS = 8
ROUNDS = 3
WORKLOADS: Dict[str, Callable[[], Workload]] = {"mlp": lambda: mlp(layers=8, batch=512),
                                                "encoder": lambda: encoder(batch=64)}


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    stages = spec["stages"]
    wh.init({"num_micro_batch": MICRO_BATCHES, "pipeline.schedule": spec["schedule"]}, cluster=f"cpu:{stages}")
    workload = WORKLOADS[spec["model"]]()
    x, labels = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(workload.data(workload.batch, 0)).repeat()).get_next()
    value = _annotated(workload, x, labels, stages)
    train_op = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value)
    with tf.Session(config=session_config(stages, inter=stages, intra=1)) as session:
        session.run(tf.global_variables_initializer())
        return step_times(lambda: session.run([value, train_op])[0], STEPS)


def _annotated(workload: Workload, x: Any, labels: Any, stages: int) -> Any:
    import whale_tf as wh

    parameters = variables(workload)
    parts = len(workload.stages) // stages
    for number in range(stages):
        with wh.replicate(1):
            for apply in workload.stages[number * parts:(number + 1) * parts]:
                x = apply(x, parameters)
            if number == stages - 1:
                return head_loss(x, labels)


def report(console: Console) -> None:
    bound = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)
    rows = []
    for model in WORKLOADS:
        specs = [{"model": model, "stages": 1, "schedule": "backward_first"}]
        specs += [{"model": model, "stages": STAGES, "schedule": name} for name in ("backward_first", "gpipe")]
        one, ours, gpipe = rounds(__file__, specs, ROUNDS)
        rows.append([model] + ["{:.0f}".format(1e3 * r["wall_s"]) for r in (one, ours, gpipe)]
                    + ["{:.2f}".format(one["wall_s"] / r["wall_s"]) for r in (ours, gpipe)]
                    + [f"{bound:.2f}", "{:.1e}".format(abs(ours["loss"] - one["loss"]) / one["loss"])])
    console.print(table(f"{STAGES} stages x {MICRO_BATCHES} micro-batches, two cores: ms per step", [
        "model", "one device", "backward_first", "gpipe", "speed-up", "speed-up (gpipe)", "bound", "loss differs by"],
        rows))


if __name__ == "__main__":
    main(__file__, worker, report)
