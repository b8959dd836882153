"""A simulated step as events, and their export for Chrome's and Perfetto's viewers; and what traces of real steps say."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from whale_tf.errors import PlanError
from whale_tf.simulator.program import LANES
from whale_tf.simulator.result import Simulation


class TraceEvent(NamedTuple):
    """One task on one device.

    Attributes:
        kind: ``forward``, ``backward``, ``recompute``, ``update``, or a collective's name.
        lane: a place in :data:`whale_tf.simulator.program.LANES`.
        micro_batch: -1 if it belongs to none.
        start_s, duration_s: from the start of the step.
    """

    name: str
    kind: str
    device: int
    stage: int
    lane: int
    micro_batch: int
    start_s: float
    duration_s: float


class Trace(NamedTuple):
    """A step.  ``memory``: for each device (times, bytes), as a step function."""

    events: Tuple[TraceEvent, ...]
    memory: Mapping[int, Tuple[Sequence[float], Sequence[float]]]

    @property
    def devices(self) -> List[int]:
        return sorted({event.device for event in self.events})

    @property
    def end_s(self) -> float:
        return max((event.start_s + event.duration_s for event in self.events), default=0.0)


def trace_of(result: Simulation) -> Trace:
    """The trace of a simulation, on the simulated devices.

    Raises:
        PlanError: the plan runs out of memory, so there is no such step.
    """
    if result.oom:
        raise PlanError("no trace of an infeasible plan: " + result.bottleneck())
    graph, instructions = result.graph, result.program.instructions
    stage_of = result.program.stage_of()
    events = []
    for task, lane in enumerate(graph.lane):
        if lane < 0:
            continue
        instruction = instructions[graph.instruction[task]]
        start_s = result.times.start[task]
        for device in (graph.devices[slot] for slot in graph.slots[task]):
            events.append(TraceEvent(instruction.name, instruction.label, device, stage_of[device], lane, graph.micro_batch[task],
                                     start_s, result.times.end[task] - start_s))
    memory = {device: (curve.time_s.tolist(), curve.bytes.tolist()) for device, curve in zip(graph.devices, result.memory)}
    return Trace(tuple(events), memory)


# Names that TensorFlow's graph optimizer gives to the ops with which it replaces others.
_REPLACED = re.compile(r"ArithmeticOptimizer/[A-Za-z0-9]+_(?=[^/]+$)")


def op_name(node_name: str) -> str:
    """The op that an executed node stands for: ``mul`` for ``ArithmeticOptimizer/ReplaceMulWithSquare_mul``."""
    return _REPLACED.sub("", node_name.split(":")[0])


def executed_s(node: Any) -> float:
    """Seconds of the kernel in a ``NodeExecStats``; from nanoseconds if it has them."""
    if node.op_end_rel_nanos:
        return float(max(0, node.op_end_rel_nanos - node.op_start_rel_nanos) * 1e-9)
    return float(max(0, node.op_end_rel_micros - node.op_start_rel_micros) * 1e-6)


def to_chrome(trace: Trace) -> Dict[str, Any]:
    """Chrome's trace format: a process for each device, a thread for each queue, and memory as a counter."""
    process_of = {device: number for number, device in enumerate(trace.devices)}
    rows: List[Dict[str, Any]] = []
    for device, process in process_of.items():
        rows.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"predicted: device {device}"}})
        rows += [{"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": text}}
                 for lane, text in enumerate(LANES)]
    for event in trace.events:
        rows.append({
            "ph": "X", "name": event.name, "cat": event.kind, "pid": process_of[event.device], "tid": event.lane,
            "ts": event.start_s * 1e6, "dur": event.duration_s * 1e6,
            "args": {"stage": event.stage, "micro_batch": event.micro_batch}})
    for device, (times, level) in trace.memory.items():
        rows += [{"ph": "C", "name": "memory", "pid": process_of[device], "ts": time_s * 1e6, "args": {"bytes": size}}
                 for time_s, size in zip(times, level) if device in process_of]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome(path: str, trace: Trace) -> None:
    """Write a file that chrome://tracing and ui.perfetto.dev can open."""
    with open(path, "w", encoding="utf8") as handle:
        json.dump(to_chrome(trace), handle)
