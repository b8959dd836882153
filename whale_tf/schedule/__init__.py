"""The orders in which the devices of a pipeline run its micro-batches: pure generators, wired elsewhere.

    backward_first   1F1B: backward passes as early as possible         bubble 3 (S - 1)      at most S - i micro-batches
    gpipe            all forward passes first                           bubble 3 (S - 1)      all micro-batches
    zero_bubble_h1   weights' gradients where a stage would wait        bubble S - 1          S micro-batches
    zero_bubble_h2   and more forward passes ahead                      bubble 0              2 S - 1 micro-batches
    zero_bubble_v    and two TaskGraphs a device, down and back         bubble 0              S micro-batches
    interleaved      V TaskGraphs a device, in turn                     bubble 3 (S - 1) / V  more than S micro-batches

for S stages.  Bubbles are in units of a forward pass, if gradients of activations and gradients of weights take as long each.

>>> orders("backward_first", 4, warmups=(2, 1))[0]
F0 F1 B0 F2 B1 F3 B2 B3
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Dict, Hashable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.program import WEIGHT
from whale_tf.schedule.backward_first import backward_first
from whale_tf.schedule.gpipe import gpipe
from whale_tf.schedule.interleaved import interleaved
from whale_tf.schedule.step import BACKWARD, FORWARD, Step, text
from whale_tf.schedule.warmup import POLICY_B_RATIO, auto_policy, check_warmups, warmup_depths
from whale_tf.schedule.zero_bubble import zero_bubble
from whale_tf.schedule.zero_bubble_v import zero_bubble_v

__all__ = [
    "BACKWARD",
    "FORWARD",
    "POLICY_B_RATIO",
    "SCHEDULES",
    "WEIGHT",
    "Schedule",
    "Step",
    "auto_policy",
    "check_warmups",
    "in_flight",
    "orders",
    "positions_of",
    "schedule_of",
    "text",
    "warmup_depths",
]

Order = Tuple[Step, ...]


def _each(one: Callable[[int, int], Iterator[Step]]) -> Callable[[Sequence[int], int, Sequence[int]], List[List[Step]]]:
    """The orders of all stages, for a schedule in which each stage's order follows from its own warm-up."""
    return lambda positions, num_micro_batch, warmups: [
        [step._replace(task_graph=stage) for step in one(num_micro_batch, warmup)] for stage, warmup in enumerate(warmups)]


class Schedule(NamedTuple):
    """The properties of a schedule.

    Attributes:
        order: (position of every TaskGraph, micro-batches, warm-ups) -> the order of every position.
        policy: warm-up policy; None means that of the configuration (see :func:`warmup_depths`).
        splits: whether gradients of weights are separate steps.
        folding: (TaskGraphs, TaskGraphs per device) -> their positions; None means one TaskGraph per device.
    """

    order: Callable[[Sequence[int], int, Sequence[int]], List[List[Step]]]
    policy: Optional[str] = None
    splits: bool = False
    folding: Optional[Callable[[int, int], Tuple[int, ...]]] = None


SCHEDULES: Dict[str, Schedule] = {
    "backward_first": Schedule(_each(backward_first)),
    "gpipe": Schedule(_each(gpipe)),
    "interleaved": Schedule(interleaved, folding=lambda count, each: tuple(t % (count // each) for t in range(count))),
    "zero_bubble_h1": Schedule(zero_bubble, "PA", True),
    "zero_bubble_h2": Schedule(zero_bubble, "PB", True),
    "zero_bubble_v": Schedule(zero_bubble_v, None, True, lambda count, each: tuple(min(t, count - 1 - t) for t in range(count))),
}


def schedule_of(name: str) -> Schedule:
    """The schedule with the given name.

    Raises:
        PlanError: there is no schedule of this name.
    """
    if name not in SCHEDULES:
        raise PlanError(
            "schedule is {!r}, expected one of {}.{}".format(name, ", ".join(sorted(SCHEDULES)), did_you_mean(name, SCHEDULES)))
    return SCHEDULES[name]


def orders(name: str, num_micro_batch: int, warmups: Sequence[int],
           positions: Optional[Sequence[int]] = None) -> Tuple[Order, ...]:
    """The order of steps at each position.

    Args:
        name: a key of :data:`SCHEDULES`.
        warmups: for each TaskGraph, the number of forward micro-batches started before the first backward one.
            :func:`check_warmups` says which depths go together.
        positions: of each TaskGraph, numbered from 0 in order of first appearance; None means that each has its own.

    Raises:
        PlanError: the schedule is unknown, a number is out of range, or TaskGraphs have other positions than the schedule uses.
    """
    folded, positions = schedule_of(name).folding, tuple(range(len(warmups)) if positions is None else positions)
    if num_micro_batch < 1 or not warmups or min(warmups) < 1:
        raise PlanError(f"num_micro_batch is {num_micro_batch} and warmups are {tuple(warmups)}, expected at least 1 each")
    if folded is not None:
        wanted = folded(len(positions), max(1, len(positions) // (max(positions) + 1)))
        if positions != wanted:
            raise PlanError(f"schedule {name!r} runs TaskGraphs on devices (by their first TaskGraphs) {wanted}, but they are on "
                            f"{positions}; use another schedule, or change the plan's devices")
    return _orders(name, num_micro_batch, tuple(warmups), positions)


def positions_of(devices: Sequence[Hashable]) -> Tuple[int, ...]:
    """The position of each TaskGraph in the pipeline.  TaskGraphs on the same devices have the same position."""
    first: Dict[Hashable, int] = {}
    return tuple(first.setdefault(row, len(first)) for row in devices)


@lru_cache(maxsize=256)
def _orders(name: str, num_micro_batch: int, warmups: Tuple[int, ...], positions: Tuple[int, ...]) -> Tuple[Order, ...]:
    return tuple(map(tuple, SCHEDULES[name].order(positions, num_micro_batch, warmups)))


def in_flight(orders_of_positions: Sequence[Sequence[Step]], count: int) -> Tuple[int, ...]:
    """For each of ``count`` TaskGraphs, the largest number of micro-batches between a forward step and the step that frees it."""
    most, now = [0] * count, [0] * count
    for order in orders_of_positions:
        last = WEIGHT if any(step.kind == WEIGHT for step in order) else BACKWARD
        for step in order:
            now[step.task_graph] += (step.kind == FORWARD) - (step.kind == last)
            most[step.task_graph] = max(most[step.task_graph], now[step.task_graph])
    return tuple(most)
