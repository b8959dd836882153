"""Predicted against measured: step times and peak memory of real plans on this machine's logical CPU devices.

    python -m benchmarks.accuracy [DIRECTORY]

First the machine is calibrated.  Then, for each model, the local script (its ops timed by themselves, at batch sizes that no
plan has, in runs of several steps) and all plans, as whale_tf's own main path makes them, take turns: a slow minute of the
machine hits all alike, and medians count, of the steps in which both cores shared a cache where there are enough of them.  All
are started several times, and the median of the starts counts.  A plan is predicted from the Plan, the op times and the
calibration alone.  ``DIRECTORY`` keeps what was measured.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.measure import ROOT, Result, Spec, Workers, answer, main, session_config, step_seconds, table, wall_seconds
from benchmarks.workloads import LEARNING_RATE, Workload, convnet, encoder, head_loss, mlp, variables

THREADS = 2  # ops that run at once; one thread each
# Examples of the traced local steps; no plan has clones of these sizes.  Kernels change with the size (the product with a
# transposed matrix takes 73 us for 12 rows and 191 for 16), so that neighbours are at most four times as large
PROFILED = (3, 12, 24, 48, 96, 192)
STARTS = 3  # of every script: a process may be slower than another one of the same script, as long as it runs
ROUNDS = 4  # turns of every script, each time
BURSTS, PROFILED_RUNS, TRACES = 3, 8, 3  # of each turn
PLAN_TRACES, FIRST_TRACES = 9, 3  # of a plan, at the end; the first ones take new pages, and do not count
# TensorFlow takes every op for long at first: its estimate of an op's time is 1e8 cycles, and each run replaces a tenth of it, so
# that after 90 runs, 7,600 of the 8,000 cycles that make an op long are still left of that.  Until then ops run in another order,
# and the MLP's pipelines hold 1 MB less (of 8.7) than from the 110th step on
SETTLED = 130  # runs
ENOUGH = 12  # steps in which both cores shared a cache
CHAIN = 8  # steps at most in a run of the local script
# glibc's malloc keeps what is freed, whole heaps of threads, too: some steps would give memory back and take it again, up to
# 2,134 pages in one
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TOP_PAD_": str(1 << 28)}
UPDATES = re.compile(r" = Resource\w*Apply\w*\(")
STEP_SCOPE = re.compile("chain[0-9]+/step[0-9]+/")
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
        per_process = self.devices // self.processes
        return f"cpu:{self.devices}" if self.processes == 1 else f"{self.processes}xcpu:{per_process}"

    @property
    def threads(self) -> int:
        """Of each process: there is one for each core in all."""
        return THREADS // self.processes

    @property
    def title(self) -> str:
        parts = " + ".join("{} {}".format(kind, count or "all") for kind, count in self.stages)
        schedule = "" if self.micro_batches == 1 else f", {self.micro_batches} x {self.schedule}"
        processes = "" if self.processes == 1 else f" of {self.processes} processes"
        return f"{parts} on {self.devices}{processes}{schedule}"


R1, R2 = ("replicate", 1), ("replicate", 2)
PLANS: Tuple[Tuple[Any, ...], ...] = (
    ((R2,), 2), ((("replicate", 4),), 4), ((R1,), 1, 4), ((R1, R1), 2, 2), ((R1, R1), 2, 8), ((R1, R1), 2, 8, "gpipe"),
    ((R1,) * 4, 4, 4), ((R1, R1), 4, 4), ((R1, R2), 3, 4), ((R2, ("split", 2)), 2),
    ((("replicate", None),), 2, 1, "backward_first", 2))  # fmt: skip
CASES = tuple(Case(model, *plan) for model in MODELS for plan in PLANS)


# -- in the process that measures --------------------------------------------------------------------------------------


def worker(spec: Spec) -> None:
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
    workload = MODELS[model]()
    x, labels, feed = inputs(workload, batch)
    loss = loss_of(workload, variables(workload), x, labels, scopes)
    return Script(loss, optimizer().minimize(loss), feed)


def inputs(workload: Workload, batch: int) -> Tuple[Any, Any, Dict[Any, np.ndarray]]:
    """Placeholders for a mini-batch and its labels, and what to feed."""
    import tensorflow.compat.v1 as tf

    values = workload.data(batch, 0)
    x, labels = [tf.placeholder(value.dtype, value.shape, name) for value, name in zip(values, ("x", "labels"))]
    return x, labels, dict(zip((x, labels), values))


def loss_of(workload: Workload, parameters: Any, x: Any, labels: Any, scopes: Sequence[Callable[[], Any]]) -> Any:
    parts = len(workload.stages) // len(scopes)
    for number, scope in enumerate(scopes):
        with scope():
            for apply in workload.stages[number * parts:(number + 1) * parts]:
                x = apply(x, parameters)
            if number == len(scopes) - 1:
                return head_loss(x, labels)


def optimizer() -> Any:
    import tensorflow.compat.v1 as tf

    return tf.train.MomentumOptimizer(LEARNING_RATE, 0.9)


def traced(session: Any, fetches: Any, feed: Dict[Any, np.ndarray]) -> Any:
    import tensorflow.compat.v1 as tf

    metadata = tf.RunMetadata()
    session.run(fetches, feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    return metadata


class Chains:
    """Chains of steps of the local script, each chain with variables and a thread of its own: ``count`` beside each other in one
    run, as clones on so many devices are, and in each ``steps`` after each other, as micro-batches are.  Runs of one small
    step would be faster than that: all that it touches stays in the cache until the next run."""

    def __init__(self, model: str, batch: int, steps: int, count: int) -> None:
        import tensorflow.compat.v1 as tf

        self.fetches: List[Any] = []
        self.feed: Dict[Any, np.ndarray] = {}
        with tf.Graph().as_default():
            for chain in range(count):
                self._add(MODELS[model](), batch, steps, chain)
            self.fed = tf.shape(next(iter(self.feed)))
            config = session_config(1, inter=count, intra=1)
            config.use_per_session_threads = True
            self.session = tf.Session(config=config)
            self.session.run(tf.global_variables_initializer())
        for _ in range(SETTLED if count > 1 else 0):  # on one thread, all ops are in one order
            self.run()

    def _add(self, workload: Workload, batch: int, steps: int, chain: int) -> None:
        """The first chain's first step has the names of the local script."""
        import tensorflow.compat.v1 as tf

        nowhere = contextlib.nullcontext()
        x, labels, feed = inputs(workload, batch)
        with tf.variable_scope(f"chain{chain}") if chain else nowhere:
            parameters = variables(workload)
        update_with, before = optimizer(), []
        for step in range(steps):
            scope = tf.name_scope(f"chain{chain}/step{step}/") if chain or step else nowhere
            with scope, tf.control_dependencies(before):
                loss = loss_of(workload, parameters, tf.identity(x) if step else x, labels, [contextlib.nullcontext])
                update = update_with.minimize(loss)
            before = [loss, update]
        self.fetches += before
        self.feed.update(feed)

    def run(self) -> None:
        self.session.run(self.fetches, self.feed)

    def run_s(self) -> float:
        return self._median_s(self.fetches)

    def empty_s(self) -> float:
        """Seconds of a run with the same inputs and without steps."""
        return self._median_s(self.fed)

    def _median_s(self, fetches: Any) -> float:
        return statistics.median(wall_seconds(lambda: self.session.run(fetches, self.feed), PROFILED_RUNS, warmup=2))


def profile(model: str, batch: int) -> None:
    """Answers with seconds of every op of the local script while ops run one at a time, and of runs of one chain and of two."""
    from whale_tf.simulator.trace import kernel_memory

    steps = max(1, min(CHAIN, BATCH[model] // batch))
    one, two = (Chains(model, batch, steps, count) for count in (1, 2))

    def turn() -> Result:
        run_s, empty_s, both_empty_s = one.run_s(), one.empty_s(), two.empty_s()
        both_s = [((value - both_empty_s) / steps, shared) for value, shared in step_seconds(two.run, BURSTS)]
        traces = [traced(one.session, one.fetches, one.feed) for _ in range(TRACES)]
        return {"step_s": (run_s - empty_s) / steps, "both_s": both_s, "empty_s": empty_s,
                "seconds": [{name: value / steps for name, value in op_seconds(trace).items()} for trace in traces],
                "memory": kernel_memory(traces[0])}

    answer({"turn": turn})


def op_seconds(metadata: Any) -> Dict[str, float]:
    """Seconds of every op of a traced run, in all steps of it."""
    from whale_tf.simulator import trace_of_run_metadata
    from whale_tf.simulator.trace import op_name

    found: Dict[str, float] = {}
    for event in trace_of_run_metadata(metadata).events:
        name = STEP_SCOPE.sub("", op_name(event.name))
        found[name] = found.get(name, 0.0) + event.duration_s
    return found


def run(case: Case, folder: str) -> None:
    """Leaves the plan and its step graph, and answers with what a step took and held."""
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
        for _ in range(SETTLED):
            session.run([script.loss, script.update], script.feed)

        def turn() -> Result:
            return {"step_s": step_seconds(lambda: session.run([script.loss, script.update], script.feed), BURSTS)}

        def trace() -> Result:
            fetches = [script.loss, script.update]
            traces = [traced(session, fetches, script.feed) for _ in range(FIRST_TRACES + PLAN_TRACES)][FIRST_TRACES:]
            with open(os.path.join(folder, "trace.pb"), "wb") as handle:
                handle.write(sorted(traces, key=_span)[PLAN_TRACES // 2].SerializeToString())
            return {"seconds": [op_seconds(one) for one in traces], "memory": [_peaks(one, here) for one in traces]}

        answer({"turn": turn, "trace": trace})


def _span(metadata: Any) -> float:
    nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    return max(n.all_start_micros + n.all_end_rel_micros for n in nodes) * 1e-6 - min(n.all_start_micros for n in nodes) * 1e-6


def _peaks(metadata: Any, devices: int) -> List[float]:
    """Most that a traced step holds at a time on each device; its variables are not of it, nor is the new value of one that an
    update makes because another op still reads the old one: the old one's end is in no trace."""
    events: List[List[Tuple[int, int]]] = [[] for _ in range(devices)]
    for device in metadata.step_stats.dev_stats:
        number = device.device.rsplit(":", 1)[1]
        for node in (one for one in device.node_stats if number.isdigit() and not UPDATES.search(one.timeline_label)):
            for memory in node.memory:
                events[int(number)] += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
    return [float(max(np.cumsum([change for _, change in sorted(rows)]), default=0)) for rows in events]


# -- in the process that asks ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Seconds of a step and bytes of the fullest device of one case (measured: medians of steps; ``most_bytes``: of the fullest
    traced one); ``work``: predicted and measured seconds of all ops; ``shared``: whether all steps that count, its own and those
    of the local script on two threads, are of cores that shared a cache."""

    case: Case
    shared: bool
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    most_bytes: float
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
        return f"{self.work[0] / self.work[1] - 1.0:+.1%}" if self.case.processes == 1 else "-"


def predict(case: Case, folder: str, calibration: Any, profiles: Dict[int, Result]) -> Any:
    """The simulation of what :func:`run` left in ``folder``."""
    from whale_tf.cluster import Cluster
    from whale_tf.plan import Plan
    from whale_tf.simulator import Options, Simulator, StepGraph
    from whale_tf.simulator.calibration import COMMUNICATION
    from whale_tf.simulator.step_graph import KernelMemory

    # Proteus profiles gamma by machine and model; of small batches it would mostly be that of the updates
    factor = max(1.0, statistics.mean(profiles[batch]["slow_down"] for batch in sorted(profiles)[-3:]))
    step = StepGraph.parse(os.path.join(folder, "step.json"))
    for batch, found in profiles.items():
        beside = factor if case.processes > 1 else 1.0  # the other process' ops, which are of a node of their own
        memory = {name: KernelMemory(*one) for name, one in found["memory"].items()}
        step = step.measured(batch, {name: beside * value for name, value in found["seconds"].items()}, memory)
    plan = Plan.parse(os.path.join(folder, "plan.json"))
    run_s = np.interp(BATCH[case.model], list(profiles), [found["run_s"] for found in profiles.values()])  # with its inputs
    slow_down = {pair: value if COMMUNICATION in pair else factor for pair, value in calibration.slow_down.items()}
    calibration = replace(calibration, cores=case.threads, step_s=float(run_s), slow_down=slow_down)
    return Simulator(Cluster.parse(case.cluster), Options(calibration=calibration)).run_step(plan, step)


class Measured(NamedTuple):
    """Of one case: seconds of a step (``shared``: of those in which both cores shared a cache), of all its ops, and bytes of each
    device's peak in each trace; beside what it left."""

    folder: str
    step_s: float
    shared: bool
    work_s: float
    memory: List[List[float]]


def measure(model: str, folder: str) -> Tuple[Dict[int, Result], List[Measured]]:
    """The model's op times by batch size, and its cases."""
    cases = [case for case in CASES if case.model == model]
    starts = [_started(model, cases, folder) for _ in range(STARTS)]
    profiles = {}
    for batch in PROFILED:
        found = [start[0][batch] for start in starts]
        middle = {key: statistics.median(one[key] for one in found) for key in ("run_s", "slow_down")}
        profiles[batch] = dict(middle, seconds=medians([one["seconds"] for one in found]), memory=found[0]["memory"],
                               shared=all(one["shared"] for one in found))  # fmt: skip
    return profiles, [
        Measured(same[-1].folder, statistics.median(one.step_s for one in same), all(one.shared for one in same),
                 statistics.median(one.work_s for one in same), [peaks for one in same for peaks in one.memory])
        for same in zip(*(start[1] for start in starts))]  # fmt: skip


def _started(model: str, cases: Sequence[Case], folder: str) -> Tuple[Dict[int, Result], List[Measured]]:
    """All take turns, so that slow seconds of the machine hit all alike."""
    folders = [tempfile.mkdtemp(dir=folder) for _ in cases]
    with contextlib.ExitStack() as stack:
        scripts = [stack.enter_context(Workers(__file__, {"what": "profile", "model": model, "batch": batch}, 1, KEPT))
                   for batch in PROFILED]  # fmt: skip
        plans = []
        for case, where in zip(cases, folders):
            rest = [case.devices, case.micro_batches, case.schedule, case.processes]
            spec = {"what": "run", "model": model, "stages": case.stages, "folder": where, "rest": rest}
            plans.append(stack.enter_context(Workers(__file__, spec, case.processes, KEPT)))
            plans[-1].ask("turn")  # ready before the next one starts
        turns = [[one.ask("turn") for one in scripts + plans] for _ in range(1 + ROUNDS)][1:]  # the first one is slower
        traces = [one.ask("trace") for one in plans]
    profiles = {batch: profiled([turn[number] for turn in turns]) for number, batch in enumerate(PROFILED)}
    found: List[Measured] = []
    for number, (where, trace) in enumerate(zip(folders, traces)):
        step_s, shared = median_of([turn[len(PROFILED) + number]["step_s"] for turn in turns])
        found.append(Measured(where, step_s, shared, sum(medians(trace["seconds"]).values()), trace["memory"]))
    return profiles, found


def profiled(turns: Sequence[Result]) -> Result:
    """What a step takes beside its kernels (the executor's work, tensors being freed) is in no op's traced time: every op gets a
    share of it in proportion.  What tracing costs is in all of them: where that is more, every op loses the same."""
    seconds = medians([trace for turn in turns for trace in turn["seconds"]])
    step_s, empty_s = (statistics.median(turn[key] for turn in turns) for key in ("step_s", "empty_s"))
    both_s, shared = median_of([turn["both_s"] for turn in turns])
    traced_s = sum(seconds.values())
    factor, less_s = max(1.0, step_s / traced_s), max(0.0, traced_s - step_s) / len(seconds)
    return {"seconds": {name: max(0.0, factor * value - less_s) for name, value in seconds.items()},
            "memory": turns[0]["memory"], "run_s": empty_s, "slow_down": both_s / step_s, "shared": shared}


def median_of(turns: Sequence[Sequence[Tuple[float, bool]]]) -> Tuple[float, bool]:
    """Seconds of a step in which both cores shared a cache, or of any if these are too few; and which of both."""
    steps = [step for turn in turns for step in turn]
    shared = [seconds for seconds, is_shared in steps if is_shared]
    is_enough = len(shared) >= ENOUGH
    return statistics.median(shared if is_enough else [seconds for seconds, _ in steps]), is_enough


def medians(tables: Sequence[Dict[str, float]]) -> Dict[str, float]:
    """Of every op."""
    found: Dict[str, List[float]] = {}
    for table_ in tables:
        for name, value in table_.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def row_of(case: Case, result: Measured, calibration: Any, profiles: Dict[int, Result]) -> Row:
    from whale_tf.simulator.instructions import COMPUTATION

    found = predict(case, result.folder, calibration, profiles)
    held = [found.program.static_bytes[device].get("parameters", 0.0) for device in found.graph.devices]
    fullest = sorted(max(peak + size for peak, size in zip(peaks, held)) for peaks in result.memory)
    seconds = sum(value for value, lane in zip(found.graph.seconds, found.graph.lane) if lane == COMPUTATION)
    shared = result.shared and all(profile["shared"] for profile in profiles.values())
    return Row(case, shared, found.step_time_s, result.step_s, max(curve.peak_bytes for curve in found.memory),
               statistics.median(fullest), fullest[-1], (seconds, result.work_s))  # fmt: skip


def report(console: Console) -> None:
    with contextlib.ExitStack() as stack:
        folder = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(tempfile.TemporaryDirectory())
        os.makedirs(folder, exist_ok=True)
        rows = measured_rows(folder)
    show(console, rows)
    scatter(rows, PICTURE)


def measured_rows(folder: str) -> List[Row]:
    """Everything measured into ``folder``, and predicted."""
    calibration, rows = calibrated(os.path.join(folder, "calibration.json"), THREADS), []
    for model in MODELS:
        profiles, results = measure(model, folder)
        with open(os.path.join(folder, model + ".json"), "w") as handle:
            json.dump([profiles, results], handle)
        cases = [case for case in CASES if case.model == model]
        rows += [row_of(case, result, calibration, profiles) for case, result in zip(cases, results)]
    return rows


def calibrated(path: str, inter_op: int) -> Any:
    """This machine, as `whale calibrate` measures it; ``inter_op``: threads that run ops."""
    from whale_tf.simulator import Calibration

    subprocess.run([sys.executable, "-m", "whale_tf.cli", "calibrate", "-o", path, "--inter-op", str(inter_op)], cwd=ROOT,
                   env=dict(os.environ, **KEPT), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return Calibration.parse(path)


def show(console: Console, rows: Sequence[Row]) -> None:
    cells = []
    for row in rows:
        times = [f"{value * 1e3:.2f}" for value in (row.predicted_s, row.measured_s)]
        sizes = [f"{value / 1e6:.2f}" for value in (row.predicted_bytes, row.measured_bytes)]
        cells.append([row.case.model, row.case.title] + times + [f"{row.error:+.1%}"] + sizes
                     + [f"{row.memory_error:+.1%}", row.work_error])  # fmt: skip
    console.print(table(f"steps of {len(rows)} plans", [
        "model", "plan", "predicted ms", "measured ms", "error", "predicted MB", "measured MB", "error", "all ops"], cells))
    errors = [abs(row.error) for row in rows]
    rank = spearmanr([row.predicted_s for row in rows], [row.measured_s for row in rows])[0]
    console.print(f"step time: mean error {np.mean(errors):.1%}, largest {max(errors):.1%}, Spearman {rank:.3f}")
    apart = sum(not row.shared for row in rows)
    if apart:
        console.print(f"of {apart} plans, or of the local script, too few steps are of cores that shared a cache: "
                      f"there all steps "
                      "count")
    memory = [abs(row.memory_error) for row in rows]
    console.print(f"memory: mean error {np.mean(memory):.1%}, largest {max(memory):.1%}")
    fullest = max(rows, key=lambda row: row.most_bytes / row.measured_bytes)
    console.print(f"a plan's fullest traced step holds up to {fullest.most_bytes / fullest.measured_bytes - 1.0:.0%} "
                  f"more than its median one ({fullest.case.model} {fullest.case.title})")


def scatter(rows: Sequence[Row], path: str) -> None:
    """Predicted over measured step times, with the 15% band."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(5, 5), constrained_layout=True)
    axes = figure.add_subplot(111)
    ends = np.array([0.8 * min(row.measured_s for row in rows), 1.25 * max(row.measured_s for row in rows)]) * 1e3
    axes.plot(ends, ends, color="0.5", linewidth=1)
    axes.fill_between(ends, 0.85 * ends, 1.15 * ends, color="0.9")
    for model, marker in zip(MODELS, "os^"):
        points = [(row.measured_s * 1e3, row.predicted_s * 1e3) for row in rows if row.case.model == model]
        axes.scatter(*zip(*points), marker=marker, label=model)
    axes.set(xscale="log", yscale="log", xlabel="measured ms per step", ylabel="predicted ms per step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(__file__, worker, report)
