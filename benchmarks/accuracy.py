"""Predicted against measured: step times and peak memory of real plans on this machine's logical CPU devices.

    python -m benchmarks.accuracy

First the machine is calibrated and every model's ops are timed by themselves, at batch sizes that no plan has.  Then every plan
is made by whale_tf's own main path, run, and predicted from the Plan, the op times and the calibration alone.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.measure import ROOT, Result, Spec, ask, main, session_config, table
from benchmarks.workloads import LEARNING_RATE, Workload, convnet, encoder, head_loss, mlp, variables

THREADS = 2  # ops that run at once; one thread each
PROFILED = (3, 12, 48, 192)  # examples of the traced local steps; no plan has clones of these sizes
TRACES = 15
STEPS, SECONDS = 50, 1.5  # at least so many steps, and for at least so long
MODELS: Dict[str, Callable[[], Workload]] = {
    "mlp": lambda: mlp(width=512),
    "encoder": lambda: encoder(layers=4, hidden=64, seq=32, vocab=200),
    "convnet": lambda: convnet(image=32),
}
PICTURE = os.path.join(ROOT, "benchmarks", "accuracy.png")
BATCH = {"mlp": 256, "encoder": 64, "convnet": 64}


class Case(NamedTuple):
    """One plan: ``stages`` of (annotation, devices; None: all), of equal numbers of the workload's four parts."""

    model: str
    stages: Tuple[Tuple[str, Any], ...]
    devices: int
    micro_batches: int = 1
    schedule: str = "backward_first"
    processes: int = 1

    @property
    def cluster(self) -> str:
        """Each process is described as a node."""
        return "cpu:{}".format(self.devices) if self.processes == 1 else "{}xcpu:{}".format(
            self.processes, self.devices // self.processes)  # fmt: skip

    @property
    def threads(self) -> int:
        """Of each process: there is one for each core in all."""
        return THREADS // self.processes

    @property
    def title(self) -> str:
        parts = " + ".join("{} {}".format(kind, count or "all") for kind, count in self.stages)
        schedule = "" if self.micro_batches == 1 else ", {} x {}".format(self.micro_batches, self.schedule)
        processes = "" if self.processes == 1 else " of {} processes".format(self.processes)
        return "{} on {}{}{}".format(parts, self.devices, processes, schedule)


R1, R2 = ("replicate", 1), ("replicate", 2)
PLANS: Tuple[Tuple[Any, ...], ...] = (
    ((R2,), 2), ((("replicate", 4),), 4), ((R1,), 1, 4), ((R1, R1), 2, 2), ((R1, R1), 2, 8), ((R1, R1), 2, 8, "gpipe"),
    ((R1,) * 4, 4, 4), ((R1, R1), 4, 4), ((R1, R2), 3, 4), ((R2, ("split", 2)), 2),
    ((("replicate", None),), 2, 1, "backward_first", 2))  # fmt: skip
CASES = tuple(Case(model, *plan) for model in MODELS for plan in PLANS)


# -- in the process that measures --------------------------------------------------------------------------------------


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    if spec["what"] == "profile":
        return profile(spec["model"], spec["batch"])
    return run(Case(spec["model"], tuple(map(tuple, spec["stages"])), *spec["rest"]), spec["folder"])


class Script(NamedTuple):
    loss: Any
    update: Any
    feed: Dict[Any, np.ndarray]


def build(model: str, batch: int, scopes: Sequence[Callable[[], Any]]) -> Script:
    """The workload's four parts, dealt to ``scopes`` in equal numbers."""
    import tensorflow.compat.v1 as tf

    workload = MODELS[model]()
    values = workload.data(batch, 0)
    x, labels = [tf.placeholder(value.dtype, value.shape, name) for value, name in zip(values, ("x", "labels"))]
    parameters, hidden = variables(workload), x
    parts = len(workload.stages) // len(scopes)
    for number, scope in enumerate(scopes):
        with scope():
            for apply in workload.stages[number * parts:(number + 1) * parts]:
                hidden = apply(hidden, parameters)
            if number == len(scopes) - 1:
                loss = head_loss(hidden, labels)
    update = tf.train.MomentumOptimizer(LEARNING_RATE, 0.9).minimize(loss)
    return Script(loss, update, dict(zip((x, labels), values)))


def traced(session: Any, script: Script) -> Any:
    import tensorflow.compat.v1 as tf

    metadata = tf.RunMetadata()
    session.run([script.loss, script.update], script.feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    return metadata


def profile(model: str, batch: int) -> Result:
    """Seconds of every op of the local script, the least of several traced steps; ops run one at a time.

    What a step takes beside its kernels (the executor's work for each op, tensors being freed) is in no op's traced time: it is
    the CPU time of steps without a trace, less that of a run without ops, and every op gets an equal share.
    """
    import contextlib

    import tensorflow.compat.v1 as tf

    from whale_tf.simulator.trace import op_name

    script = build(model, batch, [contextlib.nullcontext])
    fed = tf.shape(next(iter(script.feed)))
    seconds: Dict[str, float] = {}
    scratch: Dict[str, float] = {}
    with tf.Session(config=session_config(1, inter=1, intra=1)) as session:
        session.run(tf.global_variables_initializer())
        whole_s, empty_s = (least_cpu(lambda fetches=fetches: session.run(fetches, script.feed))
                            for fetches in ([script.loss, script.update], fed))  # fmt: skip
        for _ in range(TRACES):
            metadata = traced(session, script)
            for name, value in op_seconds(metadata).items():
                seconds[name] = min(value, seconds.get(name, value))
        for node in (node for device in metadata.step_stats.dev_stats for node in device.node_stats):
            scratch[op_name(node.node_name)] = float(node.memory_stats.temp_memory_size)
    share = max(0.0, whole_s - empty_s - sum(seconds.values())) / len(seconds)
    return {"seconds": {name: value + share for name, value in seconds.items()}, "scratch": scratch}


def least_cpu(step: Callable[[], Any]) -> float:
    """CPU seconds of all threads, of the cheapest of several calls."""
    took = []
    for _ in range(STEPS):
        start = time.process_time()
        step()
        took.append(time.process_time() - start)
    return min(took[3:])


def op_seconds(metadata: Any) -> Dict[str, float]:
    """Seconds of every op of a traced step."""
    from whale_tf.simulator import trace_of_run_metadata
    from whale_tf.simulator.trace import op_name

    found: Dict[str, float] = {}
    for event in trace_of_run_metadata(metadata).events:
        name = op_name(event.name)
        found[name] = found.get(name, 0.0) + event.duration_s
    return found


def run(case: Case, folder: str) -> Result:
    """The plan, its step graph, and what a step took."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    wh.init({"num_micro_batch": case.micro_batches, "pipeline.schedule": case.schedule}, cluster=case.cluster)
    scopes = [lambda kind=kind, count=count: getattr(wh, kind)(count) for kind, count in case.stages]
    script = build(case.model, BATCH[case.model], scopes)
    plan = wh.parallelize()
    for name, value in (("plan.json", plan), ("step.json", wh.step_graph(case.model))):
        with open(os.path.join(folder, name), "w") as handle:
            handle.write(value.to_json())
    here = case.devices // case.processes
    with tf.Session(config=session_config(here, inter=case.threads, intra=1)) as session:
        session.run(tf.global_variables_initializer())
        seconds = SECONDS if case.processes == 1 else 0.0  # processes that train together all make the same number of steps
        least = least_step(lambda: session.run([script.loss, script.update], script.feed), seconds)
        traces = [traced(session, script) for _ in range(TRACES)]
    best = min(traces, key=_span)
    work_s: Dict[str, float] = {}
    for trace in traces:
        for name, value in op_seconds(trace).items():
            work_s[name] = min(value, work_s.get(name, value))
    with open(os.path.join(folder, "trace.pb"), "wb") as handle:
        handle.write(best.SerializeToString())
    return {"least_s": least, "traced_s": _span(best),
            "work_s": sum(work_s.values()),
            "memory": [_peaks(trace, here) for trace in traces]}


def least_step(step: Callable[[], Any], seconds: float) -> float:
    """Seconds of the fastest step: what else the machine does only ever adds."""
    took: List[float] = []
    while len(took) < STEPS + 3 or sum(took) < seconds:
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return min(took[3:])


def _span(metadata: Any) -> float:
    nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    return max(n.all_start_micros + n.all_end_rel_micros for n in nodes) * 1e-6 - min(n.all_start_micros for n in nodes) * 1e-6


def _peaks(metadata: Any, devices: int) -> List[float]:
    """Most that a traced step holds at a time on each device; its variables are not of it."""
    events: List[List[Tuple[int, int]]] = [[] for _ in range(devices)]
    for device in metadata.step_stats.dev_stats:
        number = device.device.rsplit(":", 1)[1]
        for node in device.node_stats if number.isdigit() else ():
            for memory in node.memory:
                events[int(number)] += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
    return [float(max(np.cumsum([change for _, change in sorted(rows)]), default=0)) for rows in events]


# -- in the process that asks ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Seconds of a step and bytes of the fullest device of one case; ``work``: predicted and measured seconds of all ops."""

    case: Case
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    work: Tuple[float, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1.0

    @property
    def work_error(self) -> str:
        """A collective's measured time is mostly waiting, so there is none of several processes."""
        return "{:+.1%}".format(self.work[0] / self.work[1] - 1.0) if self.case.processes == 1 else "-"


def predict(case: Case, folder: str, calibration: Any, profiles: Dict[int, Result]) -> Any:
    """The simulation of what :func:`run` left in ``folder``."""
    from whale_tf.cluster import Cluster
    from whale_tf.plan import Plan
    from whale_tf.simulator import Options, Simulator, StepGraph

    step = StepGraph.parse(os.path.join(folder, "step.json"))
    for batch, found in profiles.items():
        step = step.measured(batch, found["seconds"], found["scratch"])
    plan = Plan.parse(os.path.join(folder, "plan.json"))
    calibration = calibration.model_copy(update={"cores": case.threads})
    return Simulator(Cluster.parse(case.cluster), Options(calibration=calibration)).run_step(plan, step)


def measured(case: Case, folder: str) -> Result:
    rest = [case.devices, case.micro_batches, case.schedule, case.processes]
    return ask(__file__, {"what": "run", "model": case.model, "stages": case.stages, "folder": folder, "rest": rest},
               case.processes)  # fmt: skip


def row_of(case: Case, folder: str, result: Result, calibration: Any, profiles: Dict[int, Result]) -> Row:
    from whale_tf.simulator.program import COMPUTATION

    found = predict(case, folder, calibration, profiles)
    held = [found.program.static_bytes[device].get("parameters", 0.0) for device in found.graph.devices]
    fullest = [max(peak + size for peak, size in zip(peaks, held)) for peaks in result["memory"]]
    seconds = sum(value for value, lane in zip(found.graph.seconds, found.graph.lane) if lane == COMPUTATION)
    return Row(case, found.step_time_s, result["least_s"], max(curve.peak_bytes for curve in found.memory),
               float(np.median(fullest)), (seconds, result["work_s"]))  # fmt: skip


def report(console: Console) -> None:
    from whale_tf.simulator import Calibration

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "calibration.json")
        subprocess.run([sys.executable, "-m", "whale_tf.cli", "calibrate", "-o", path, "--inter-op", str(THREADS)], cwd=ROOT,
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        calibration = Calibration.parse(path)
        profiles = {model: {batch: ask(__file__, {"what": "profile", "model": model, "batch": batch})
                            for batch in PROFILED} for model in MODELS}  # fmt: skip
        rows = [row_of(case, folder, measured(case, folder), calibration, profiles[case.model]) for case in CASES]
    show(console, rows)
    scatter(rows, PICTURE)


def show(console: Console, rows: Sequence[Row]) -> None:
    cells = []
    for row in rows:
        times = ["{:.2f}".format(value * 1e3) for value in (row.predicted_s, row.measured_s)]
        sizes = ["{:.2f}".format(value / 1e6) for value in (row.predicted_bytes, row.measured_bytes)]
        cells.append([row.case.model, row.case.title] + times + ["{:+.1%}".format(row.error)] + sizes
                     + ["{:+.1%}".format(row.memory_error), row.work_error])  # fmt: skip
    console.print(table("steps of {} plans".format(len(rows)), [
        "model", "plan", "predicted ms", "measured ms", "error", "predicted MB", "measured MB", "error", "all ops"], cells))
    errors = [abs(row.error) for row in rows]
    rank = spearmanr([row.predicted_s for row in rows], [row.measured_s for row in rows])[0]
    console.print("step time: mean error {:.1%}, largest {:.1%}, Spearman {:.3f}".format(np.mean(errors), max(errors), rank))
    memory = [abs(row.memory_error) for row in rows]
    console.print("memory: mean error {:.1%}, largest {:.1%}".format(np.mean(memory), max(memory)))


def scatter(rows: Sequence[Row], path: str) -> None:
    """Predicted over measured step times, with the 15% band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot(111)
    ends = np.array([0.8 * min(row.measured_s for row in rows), 1.25 * max(row.measured_s for row in rows)]) * 1e3
    axes.plot(ends, ends, color="0.5", linewidth=1)
    axes.fill_between(ends, 0.85 * ends, 1.15 * ends, color="0.9")
    for model, marker in zip(MODELS, "os^"):
        points = [(row.measured_s * 1e3, row.predicted_s * 1e3) for row in rows if row.case.model == model]
        axes.scatter(*zip(*points), marker=marker, label=model)
    axes.set(xscale="log", yscale="log", xlabel="measured ms per step", ylabel="predicted ms per step")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(__file__, worker, report)
