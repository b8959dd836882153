"""(d) Schedules: a pipeline of two stages over two processes, each on a core of its own with one thread, beside one process.

    python -m benchmarks.pipeline [MICRO_BATCHES ...]

Logical devices of one process teach nothing about schedules: they share its threads, so a stage that waits lends its core to the
other one, and a pipeline runs faster than its bound. Each process here has one thread for an op, two for ops (a server needs
them), and one core. With M micro-batches in 2 equal stages, and gradients of weights that take as long as those of activations
and as the forward pass, a step can be so many times as fast as on one core:

    backward_first   2 M / (M + 1)         1.33, 1.60, 1.78 for M of 2, 4, 8
    zero_bubble_h1   6 M / (3 M + 1)       1.71, 1.85, 1.92, and so for zero_bubble_h2, whose stages wait less for messages
    interleaved      4 M / (2 M + 1)       1.60, 1.78, 1.88, with two of four TaskGraphs on each device

A micro-batch has as many examples whatever M is. All processes stay, and measure in turn, so that a slow minute hits all alike;
those whose turn it is not wait.

The predicted speed-up is the simulator's, from each Plan, the op times of the local script with one micro-batch on one core, and
what `whale calibrate` measures of this machine. It also knows the messages and the stages' unequal work; the bound does not.
"""
from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from rich.console import Console

from benchmarks.accuracy import calibrated, medians, op_seconds, traced
from benchmarks.measure import Result, Spec, Workers, answer, ask, main, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, Workload, encoder, head_loss, variables

PROCESSES = 2
EXAMPLES = 8  # of a micro-batch
MICRO_BATCHES = (2, 4, 8)
STEPS = 6
ROUNDS = 5


class System(NamedTuple):
    """``task_graphs`` of equal parts of the model, over ``processes``; ``bound``: of the speed-up, by micro-batches."""

    name: str
    schedule: str = "backward_first"
    processes: int = PROCESSES
    task_graphs: int = 2

    def bound(self, micro_batches: int) -> float:
        bubbles = {"zero_bubble_h1": 1 / 3, "zero_bubble_h2": 1 / 3, "interleaved": self.processes / self.task_graphs}
        bubble = bubbles.get(self.schedule, 1.0)
        return self.processes * micro_batches / (micro_batches + (self.processes - 1) * bubble)


ONE = System("one process", processes=1, task_graphs=1)
SYSTEMS = (ONE, System("backward_first"), System("zero_bubble_h1", "zero_bubble_h1"),
           System("zero_bubble_h2", "zero_bubble_h2"), System("interleaved", "interleaved", task_graphs=4))


def worker(spec: Spec) -> Optional[Result]:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    tf.disable_eager_execution()
    if "system" not in spec:
        return profile()
    system, micro_batches = System(*spec["system"]), spec["micro_batches"]
    wh.init({"num_micro_batch": micro_batches, "pipeline.schedule": system.schedule, "emit": "call", "io.slicing": False},
            cluster=f"{system.processes}xcpu:1")
    value, train_op = build(EXAMPLES * micro_batches, [wh.replicate] * system.task_graphs)
    plan = wh.parallelize()
    if rank == 0:
        for path, one in zip(files(spec["folder"], system), (plan, wh.step_graph())):
            with open(path, "w") as handle:
                handle.write(one.to_json())
    session = tf.Session(config=session_config(1, inter=2, intra=1))
    session.run(tf.global_variables_initializer())
    answer({"time": lambda: step_times(lambda: session.run([value, train_op])[0], STEPS, warmup=2)})
    return None


def profile() -> Result:
    """Seconds of each op of the local script with one micro-batch, on one thread, with each op's share of what the executor does
    between them; and the bytes that each needs while it runs."""
    import tensorflow.compat.v1 as tf

    from whale_tf.simulator.trace import kernel_memory

    fetches = build(EXAMPLES, [lambda count: contextlib.nullcontext()])
    session = tf.Session(config=session_config(1, inter=1, intra=1))
    session.run(tf.global_variables_initializer())
    step_s = step_times(lambda: session.run(fetches)[0], STEPS)["wall_s"]
    traces = [traced(session, fetches, {}) for _ in range(STEPS)]
    seconds = medians([op_seconds(trace) for trace in traces])
    factor = step_s / sum(seconds.values())
    return {"seconds": {name: factor * value for name, value in seconds.items()},
            "memory": kernel_memory(traces[0])}


def files(folder: str, system: System) -> Tuple[str, str]:
    """Where a system leaves its Plan and its step graph."""
    plan, step = (os.path.join(folder, f"{system.name}.{kind}.json") for kind in ("plan", "step"))
    return plan, step


def build(batch: int, scopes: List[Any]) -> Tuple[Any, Any]:
    """Loss and update of the workload, its four parts dealt to ``scopes`` in equal numbers."""
    import tensorflow.compat.v1 as tf

    workload = encoder(batch=batch)
    x, labels = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(workload.data(workload.batch, 0)).repeat()).get_next()
    value = _annotated(workload, x, labels, scopes)
    return value, tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value)


def _annotated(workload: Workload, x: Any, labels: Any, scopes: List[Any]) -> Any:
    parameters = variables(workload)
    parts = len(workload.stages) // len(scopes)
    for number, scope in enumerate(scopes):
        with scope(1):
            for apply in workload.stages[number * parts:(number + 1) * parts]:
                x = apply(x, parameters)
            if number == len(scopes) - 1:
                return head_loss(x, labels)


def predicted_s(folder: str, system: System, calibration: Any, profiled: Result, cluster: Any = None) -> float:
    """Seconds of a step of the plan that ``system`` has left in ``folder``.

    Args:
        cluster: on which; None: one device in each process.
    """
    from whale_tf.cluster import Cluster
    from whale_tf.plan import Plan
    from whale_tf.simulator import Options, Simulator, StepGraph
    from whale_tf.simulator.step_graph import KernelMemory

    plan, step = files(folder, system)
    memory = {name: KernelMemory(*one) for name, one in profiled["memory"].items()}
    graph = StepGraph.parse(step).measured(EXAMPLES, profiled["seconds"], memory)
    options = Options(calibration=replace(calibration, cores=1))
    simulator = Simulator(cluster or Cluster.parse(f"{system.processes}xcpu:1"), options)
    return simulator.run_step(Plan.parse(plan), graph).step_time_s


def report(console: Console) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        calibration, profiled = calibrated(os.path.join(folder, "calibration.json"), inter_op=1), ask(__file__, {})
        for micro_batches in [int(word) for word in sys.argv[1:]] or MICRO_BATCHES:
            found = measure(micro_batches, folder)
            seconds = {name: statistics.median(one["wall_s"] for one in results) for name, results in found.items()}
            predicted = {system.name: predicted_s(folder, system, calibration, profiled) for system in SYSTEMS}
            loss = found[ONE.name][0]["loss"]
            for system in SYSTEMS:
                name = system.name
                times = [f"{1e3 * value:.0f}" for value in (
                    seconds[name], min(one["wall_s"] for one in found[name]), predicted[name])]  # fmt: skip
                ratios = [f"{one[ONE.name] / one[name]:.2f}" for one in (seconds, predicted)]
                over = [f"{one['backward_first'] / one[name]:.2f}" for one in (seconds, predicted)]
                rows.append([f"{micro_batches}, {name}", *times, *ratios, f"{system.bound(micro_batches):.2f}", *over,
                             f"{abs(found[name][0]['loss'] - loss) / loss:.0e}"])
    console.print(table(f"encoder, 2 processes on a core each: ms a step, {ROUNDS} rounds; speed-ups over one process, 1F1B", [
        "micro-batches", "median", "least", "predicted", "speed-up", "predicted", "bound", "over 1F1B", "predicted", "loss off"],
        rows))  # fmt: skip


def measure(micro_batches: int, folder: str) -> Dict[str, List[Result]]:
    """The rounds of every system; each leaves its plan in ``folder``."""
    found: Dict[str, List[Result]] = {system.name: [] for system in SYSTEMS}
    with contextlib.ExitStack() as stack:
        started = {system.name: stack.enter_context(Workers(
            __file__, {"system": tuple(system), "micro_batches": micro_batches, "folder": folder}, system.processes))
            for system in SYSTEMS}  # fmt: skip
        for _ in range(ROUNDS):
            for name, workers in started.items():
                found[name].append(workers.ask("time"))
    return found


if __name__ == "__main__":
    main(__file__, worker, report)
