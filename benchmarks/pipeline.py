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
"""
from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from typing import Any, Dict, List, NamedTuple, Optional

from rich.console import Console

from benchmarks.measure import Result, Spec, Workers, answer, main, session_config, step_times, table
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

    system, micro_batches = System(*spec["system"]), spec["micro_batches"]
    rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    tf.disable_eager_execution()
    wh.init({"num_micro_batch": micro_batches, "pipeline.schedule": system.schedule, "emit": "call", "io.slicing": False},
            cluster=f"{system.processes}xcpu:1")
    workload = encoder(batch=EXAMPLES * micro_batches)
    x, labels = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(workload.data(workload.batch, 0)).repeat()).get_next()
    value = _annotated(workload, x, labels, system.task_graphs)
    train_op = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value)
    session = tf.Session(config=session_config(1, inter=2, intra=1))
    session.run(tf.global_variables_initializer())
    answer({"time": lambda: step_times(lambda: session.run([value, train_op])[0], STEPS, warmup=2)})
    return None


def _annotated(workload: Workload, x: Any, labels: Any, task_graphs: int) -> Any:
    import whale_tf as wh

    parameters = variables(workload)
    parts = len(workload.stages) // task_graphs
    for number in range(task_graphs):
        with wh.replicate(1):
            for apply in workload.stages[number * parts:(number + 1) * parts]:
                x = apply(x, parameters)
            if number == task_graphs - 1:
                return head_loss(x, labels)


def report(console: Console) -> None:
    rows = []
    for micro_batches in [int(word) for word in sys.argv[1:]] or MICRO_BATCHES:
        found: Dict[str, List[Result]] = {system.name: [] for system in SYSTEMS}
        with contextlib.ExitStack() as stack:
            started = {system.name: stack.enter_context(Workers(
                __file__, {"system": tuple(system), "micro_batches": micro_batches}, system.processes, driven=True))
                for system in SYSTEMS}
            for _ in range(ROUNDS):
                for name, workers in started.items():
                    found[name].append(workers.ask("time"))
        seconds = {name: statistics.median(one["wall_s"] for one in results) for name, results in found.items()}
        least = {name: min(one["wall_s"] for one in results) for name, results in found.items()}
        for system in SYSTEMS:
            differs = abs(found[system.name][0]["loss"] - found[ONE.name][0]["loss"]) / found[ONE.name][0]["loss"]
            rows.append([f"{micro_batches}, {system.name}", f"{1e3 * seconds[system.name]:.0f}",
                         f"{1e3 * least[system.name]:.0f}",
                         f"{seconds[ONE.name] / seconds[system.name]:.2f}", f"{system.bound(micro_batches):.2f}",
                         f"{seconds['backward_first'] / seconds[system.name]:.2f}", f"{differs:.1e}"])
    console.print(table(f"encoder, 2 processes on a core each: ms a step, median and least of {ROUNDS} rounds", [
        "micro-batches", "ms", "least", "speed-up", "bound", "over 1F1B", "loss differs by"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
