"""One trace format for predicted and measured steps: events, and their export for Chrome's and Perfetto's viewers.

A simulation and a real run's ``RunMetadata`` give the same events, so that they can be written to one file and viewed side by
side, or drawn in the same pictures.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import PlanError, seconds_text
from whale_tf.simulator.instructions import LANES
from whale_tf.simulator.result import Simulation
from whale_tf.simulator.step_graph import KernelMemory


class TraceEvent(NamedTuple):
    """One task on one device.

    Attributes:
        kind: ``forward``, ``backward``, ``recompute``, ``update``, or a collective's name.
        lane: a place in :data:`whale_tf.simulator.instructions.LANES`.
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
    """A step.

    Attributes:
        memory: for each device (times, bytes), as a step function.
        step_s: seconds of the step, which can end after the last task: devices also wait for the host and for each other.
        about: the model, cluster and step time in words, for pictures.
    """

    name: str
    events: Tuple[TraceEvent, ...]
    memory: Mapping[int, Tuple[Sequence[float], Sequence[float]]]
    step_s: float = 0.0
    about: str = ""

    @property
    def devices(self) -> List[int]:
        return sorted({event.device for event in self.events})

    @property
    def end_s(self) -> float:
        return max([self.step_s, *(event.start_s + event.duration_s for event in self.events)])


def trace_of(result: Simulation, name: str = "predicted", devices: Optional[Sequence[int]] = None) -> Trace:
    """The trace of a simulation, on the simulated devices (or some of them).

    Raises:
        PlanError: the plan runs out of memory, so there is no such step.
    """
    if result.oom:
        raise PlanError("no trace of an infeasible plan: " + result.bottleneck())
    graph, instructions = result.graph, result.program.instructions
    stage_of = result.program.stage_of()
    wanted = set(graph.devices if devices is None else devices)
    events = []
    for task, lane in enumerate(graph.lane):
        if lane < 0:
            continue
        instruction = instructions[graph.instruction[task]]
        start_s = result.times.start[task]
        for slot in graph.slots[task]:
            device = graph.devices[slot]
            if device in wanted:
                events.append(TraceEvent(instruction.name, instruction.label, device, stage_of.get(device, 0), lane,
                                         graph.micro_batch[task], start_s, result.times.end[task] - start_s))
    memory = {device: (curve.time_s.tolist(), curve.bytes.tolist())
              for device, curve in zip(graph.devices, result.memory) if device in wanted}
    subject = result.subject
    about = f"{subject.model} on {result.cluster.name}, {subject.samples:,} examples a step: {seconds_text(result.step_time_s)}"
    return Trace(name, tuple(events), memory, result.step_time_s, f"{about}, {name}")


def trace_of_run_metadata(run_metadata: Any, name: str = "measured", devices: Optional[Mapping[str, int]] = None) -> Trace:
    """The trace of a real step, from the ``tf.compat.v1.RunMetadata`` of a run with ``trace_level=FULL_TRACE``.

    Args:
        devices: device string -> number; None: in sorted order, without the rows of hosts and streams.

    Raises:
        PlanError: the metadata has no step statistics.
    """
    steps = [(_device_of(row.device, node), node) for row in run_metadata.step_stats.dev_stats for node in row.node_stats]
    steps = [(device, node) for device, node in steps if device]
    if not steps:
        raise PlanError(
            "the RunMetadata has no step_stats; run with "
            "options=tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)"
        )
    numbers = dict(devices or {device: number for number, device in enumerate(sorted({device for device, _ in steps}))})
    began = min(node.all_start_micros for _, node in steps)
    events: List[TraceEvent] = []
    changes: Dict[int, List[Tuple[float, float]]] = {}
    for where, node in steps:
        if where not in numbers:
            continue
        device = numbers[where]
        offset_s, seconds = executed_s(node)
        start_s = (node.all_start_micros - began) * 1e-6 + offset_s
        kind, lane = _kind_of(node.node_name, node.timeline_label)
        events.append(TraceEvent(node.node_name, kind, device, device, lane, -1, start_s, seconds))
        for memory in node.memory:
            for record in memory.allocation_records:
                changes.setdefault(device, []).append(((record.alloc_micros - began) * 1e-6, float(record.alloc_bytes)))
    return Trace(name, tuple(events), {device: _staircase(values) for device, values in changes.items()})


# Names that TensorFlow's graph optimizer gives to the ops with which it replaces others.
_REPLACED = re.compile(r"ArithmeticOptimizer/[A-Za-z0-9]+_(?=[^/]+$)")


def op_name(node_name: str) -> str:
    """The op that an executed node stands for: ``mul`` for ``ArithmeticOptimizer/ReplaceMulWithSquare_mul``."""
    return _REPLACED.sub("", node_name.split(":")[0])


def kernel_memory(run_metadata: Any) -> Dict[str, KernelMemory]:
    """What the kernel of every op took in a run with ``trace_level=FULL_TRACE``."""
    found = {}
    for node in (node for device in run_metadata.step_stats.dev_stats for node in device.node_stats):
        results = [0.0] * max([output.slot + 1 for output in node.output], default=0)
        for output in node.output:
            results[output.slot] = float(output.tensor_description.allocation_description.requested_bytes)
        found[op_name(node.node_name)] = KernelMemory(float(node.memory_stats.temp_memory_size), tuple(results))
    return found


def executed_s(node: Any) -> Tuple[float, float]:
    """Seconds (from the node's start to its kernel's, of its kernel) in a ``NodeExecStats``; from nanoseconds if it has them."""
    if node.op_end_rel_nanos:
        begin, end, unit = node.op_start_rel_nanos, node.op_end_rel_nanos, 1e-9
    else:
        begin, end, unit = node.op_start_rel_micros, node.op_end_rel_micros, 1e-6
    return begin * unit, max(0, end - begin) * unit


def _device_of(row: str, node: Any) -> str:
    """The device to which an executed op belongs; "" for a second record of the same op.

    TensorFlow 1.15 lists sends and receives only under ``/host:CPU``, with their device in the label.
    """
    if "/device:" in row and "stream" not in row:
        return row
    if row.startswith("/host:") and node.node_name.endswith((":_Send", ":_Recv")):
        found = re.search(r"device=([^,]+)", node.timeline_label)
        return found.group(1) if found else ""
    return ""


def _kind_of(node_name: str, label: str) -> Tuple[str, int]:
    """The kind and lane of an executed op, by its name and its ``type(inputs)`` label."""
    text = (node_name + " " + label).lower()
    for mark, kind, lane in (
        ("collectivereduce", "all_reduce", 2),
        ("nccl", "all_reduce", 2),
        ("collectivegather", "all_gather", 2),
        ("collectivebcast", "broadcast", 2),
        ("_send", "send_recv", 1),
        ("_recv", "send_recv", 1),
    ):
        if mark in text:
            return kind, lane
    if "gradients" in text:
        return "backward", 0
    if any(mark in text for mark in ("apply", "assign")):
        return "update", 0
    return "forward", 0


def _staircase(changes: List[Tuple[float, float]]) -> Tuple[List[float], List[float]]:
    times, level, total = [0.0], [0.0], 0.0
    for time_s, size in sorted(changes):
        total += size
        times.append(time_s)
        level.append(total)
    return times, level


def to_chrome(traces: Iterable[Trace]) -> Dict[str, Any]:
    """Chrome's trace format: a process for each trace and device, a thread for each queue, and memory as a counter."""
    rows: List[Dict[str, Any]] = []
    processes = itertools.count()
    for trace in traces:
        process_of = dict(zip(trace.devices, processes))
        for device, process in process_of.items():
            about = {"ph": "M", "pid": process}
            rows.append({**about, "name": "process_name", "args": {"name": f"{trace.name}: device {device}"}})
            rows += [{**about, "name": "thread_name", "tid": lane, "args": {"name": text}} for lane, text in enumerate(LANES)]
        rows += [{"ph": "X", "name": event.name, "cat": event.kind, "pid": process_of[event.device], "tid": event.lane,
                  "ts": event.start_s * 1e6, "dur": event.duration_s * 1e6,
                  "args": {"stage": event.stage, "micro_batch": event.micro_batch}} for event in trace.events]
        rows += [{"ph": "C", "name": "memory", "pid": process_of[device], "ts": time_s * 1e6, "args": {"bytes": size}}
                 for device, (times, level) in trace.memory.items() if device in process_of for time_s, size in zip(times, level)]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome(path: str, traces: Iterable[Trace]) -> None:
    """Write a file that chrome://tracing and ui.perfetto.dev can open."""
    with open(path, "w", encoding="utf8") as handle:
        json.dump(to_chrome(traces), handle)
