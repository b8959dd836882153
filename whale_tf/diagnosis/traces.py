"""The measured and the simulated step as timelines for Chrome's and Perfetto's viewers."""

from __future__ import annotations

from typing import Dict, List, Optional

from whale_tf.diagnosis.played import Played
from whale_tf.diagnosis.record import COLLECTIVES, HOST, SEND, Record
from whale_tf.program import BACKWARD, CLONED, FORWARD, UPDATE
from whale_tf.simulator.instructions import COMPUTATION, FEATURE, GRADIENT
from whale_tf.simulator.trace import Trace, TraceEvent

KINDS = {BACKWARD: BACKWARD, UPDATE: UPDATE}
ADDED = "added"  # sums of gradients, parts of mini-batches
MESSAGES = ("Recv", SEND, "Dequeue", "MEMCPY")


def traces_of(record: Record) -> List[Trace]:
    """The traced step of each process above the simulated step of all."""
    return [measured_of(record), simulated_of(record)]


def measured_of(record: Record) -> Trace:
    """The traced step of each process, each from 0 on."""
    ops = {op.name: op for op in record.step.ops}
    events: List[TraceEvent] = []
    for process in record.processes:
        for ran in process.timeline:
            lane = _lane(ran.type)
            op = ops.get(ran.name) if lane == COMPUTATION else None
            micro_batch = ran.micro_batch
            if op is not None and op.step in CLONED and record.plan.num_micro_batch == 1:
                micro_batch = 0  # ops that are not divided keep their names
            events.append(TraceEvent(ran.name, _kind(op.step if op is not None else None, lane), ran.device,
                                     op.task_graph if op is not None else 0, lane, micro_batch, ran.start_s, ran.seconds))
    return Trace("measured", tuple(events), {})


def simulated_of(record: Record) -> Trace:
    """The simulated step of all processes, with the measured times of its ops."""
    played = Played(record)
    times = played.times()
    events = [TraceEvent(task.name, _kind(task.op.step if task.op is not None else None, task.lane), task.device,
                         task.task_graph, task.lane, task.micro_batch, start, end - start)
              for task, start, end in zip(played.tasks, times.start, times.end) if task.lane >= 0]
    return Trace("simulated", tuple(events), {}, times.makespan)


def row_names(record: Record, trace: Trace, with_stages: bool = True) -> Dict[int, str]:
    """Device -> the name of its row in pictures: its number, and the TaskGraphs that run there, if there are several and
    ``with_stages``."""
    stages: Dict[int, List[str]] = {}
    for number, task in enumerate(record.plan.task_graphs):
        for device in {device for row in task.devices for device in row}:
            stages.setdefault(device, []).append(str(number))

    def name(device: int) -> str:
        own = stages.get(device, [])
        if device == HOST or len(record.plan.task_graphs) < 2 or not own or not with_stages:
            return "host" if device == HOST else f"device {device}"
        return f"stage{'s' * (len(own) > 1)} {', '.join(own)}, device {device}"

    return {device: name(device) for device in trace.devices}


def _lane(op_type: str) -> int:
    if op_type.startswith(COLLECTIVES):
        return GRADIENT
    return FEATURE if any(mark in op_type for mark in MESSAGES) else COMPUTATION


def _kind(step: Optional[str], lane: int) -> str:
    """What a timeline calls an op of a step; None: one that whale_tf added."""
    if lane != COMPUTATION:
        return "send_recv"
    return ADDED if step is None else KINDS.get(step, FORWARD)
