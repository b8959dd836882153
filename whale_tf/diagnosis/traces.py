"""The measured and the simulated step as timelines for Chrome's and Perfetto's viewers."""

from __future__ import annotations

from typing import List, Optional

from whale_tf.diagnosis.played import Played
from whale_tf.diagnosis.record import Record
from whale_tf.program import BACKWARD, FORWARD, UPDATE
from whale_tf.simulator.instructions import COMPUTATION, FEATURE
from whale_tf.simulator.trace import Trace, TraceEvent

KINDS = {BACKWARD: BACKWARD, UPDATE: UPDATE}
ADDED = "added"  # sums of gradients, parts of mini-batches
RECEIVE = ("Recv", "Dequeue", "Collective", "Nccl")


def traces_of(record: Record) -> List[Trace]:
    """The traced step of each process above the simulated step of all."""
    steps = {op.name: op.step for op in record.step.ops}
    events: List[TraceEvent] = []
    for process in record.processes:
        for ran in process.timeline:
            lane = FEATURE if any(mark in ran.type for mark in RECEIVE) else COMPUTATION
            kind = _kind(steps.get(ran.name), lane)
            events.append(TraceEvent(ran.name, kind, ran.device, 0, lane, -1, ran.start_s, ran.seconds))
    played = Played(record)
    times = played.times()
    simulated = [TraceEvent(task.name, _kind(task.op.step if task.op is not None else None, task.lane), task.device,
                            task.task_graph, task.lane, -1, start, end - start)
                 for task, start, end in zip(played.tasks, times.start, times.end) if task.lane >= 0]
    return [Trace("measured", tuple(events), {}), Trace("simulated", tuple(simulated), {}, times.makespan)]


def _kind(step: Optional[str], lane: int) -> str:
    """What a timeline calls an op of a step; None: one that whale_tf added."""
    if lane != COMPUTATION:
        return "send_recv"
    return ADDED if step is None else KINDS.get(step, FORWARD)
