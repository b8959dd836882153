"""Draws a Program: a row for each device, a box for each call, in the order in which they run.

Times are nominal, as in the papers' drawings of schedules: a forward body takes one unit and a backward body two (or one, and
the gradients of weights another one, if these are apart).  Everything else takes a fraction.  For times in seconds simulate the
plan (``whale simulate``).  The number in a box is its micro-batch.
"""

from __future__ import annotations

import heapq
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import PlanError
from whale_tf.program import (
    ACCUMULATE,
    ALL,
    BACKWARD,
    BRIDGE,
    BROADCAST,
    CLONED,
    DIVIDE,
    EARLY,
    FORWARD,
    GATHER,
    MERGE,
    ONCE,
    SECTION,
    SYNCHRONISE,
    UPDATE,
    WEIGHT,
    WHOLE,
    Program,
)
from whale_tf.viz.timeline import COLOURS, FEATURE_COLOUR, GRADIENT_COLOUR, IDLE_COLOUR, Figure, Patch, new_figure, save

HOST = -1
LENGTHS = {EARLY: 1.0, SECTION: 0.5, FORWARD: 1.0, BACKWARD: 2.0, WEIGHT: 1.0, ONCE: 0.2, UPDATE: 0.4, SYNCHRONISE: 0.5}
RECIPE_LENGTH = 0.25
COLOUR_OF = {
    EARLY: COLOURS["recompute"], SECTION: COLOURS["update"], FORWARD: COLOURS["forward"], BACKWARD: COLOURS["backward"],
    WEIGHT: COLOURS["weight"],
    UPDATE: COLOURS["update"], ONCE: IDLE_COLOUR, DIVIDE: FEATURE_COLOUR, BRIDGE: FEATURE_COLOUR, WHOLE: FEATURE_COLOUR,
    ACCUMULATE: GRADIENT_COLOUR, SYNCHRONISE: GRADIENT_COLOUR, MERGE: GRADIENT_COLOUR, BROADCAST: GRADIENT_COLOUR,
    GATHER: FEATURE_COLOUR,
}


class Box(NamedTuple):
    """A call on one device, in nominal units of time."""

    call: int
    device: int
    start: float
    end: float


def boxes(program: Program) -> List[Box]:
    """Every call on its devices, as early as its inputs allow.  A device runs one call at a time.

    Calls that wait for each other (TaskGraphs that need each other's results back and forth) start when the other calls on their
    device have ended.
    """
    waits = [{source for value in call.takes for source in value.calls}.union(call.after) for call in program.calls]
    left = [len(each) for each in waits]
    readers: List[List[int]] = [[] for _ in program.calls]
    for number, each in enumerate(waits):
        for source in each:
            readers[source].append(number)
    ready: List[Tuple[float, int]] = [(0.0, number) for number, count in enumerate(left) if not count]
    ends = [0.0] * len(program.calls)
    free: Dict[int, float] = {}
    found: List[Box] = []
    waiting = set(range(len(program.calls)))
    while waiting:
        earliest, number = heapq.heappop(ready) if ready else (max(ends), min(waiting))
        devices = program.calls[number].devices or (HOST,)
        start = max([earliest] + [free.get(device, 0.0) for device in devices])
        if ready and start > max(ready[0][0], earliest):  # another call may begin before this one
            heapq.heappush(ready, (start, number))
            continue
        waiting.discard(number)
        body = program.bodies[program.calls[number].body]
        is_part = body.step == BACKWARD and program.body(body.task_graph, WEIGHT) is not None
        length = LENGTHS.get(WEIGHT if is_part else body.step, RECIPE_LENGTH)
        ends[number] = start + length + LENGTHS[FORWARD] * body.with_forward
        found += [Box(number, device, start, ends[number]) for device in devices]
        free.update(dict.fromkeys(devices, ends[number]))
        for reader in readers[number]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, (max(ends[source] for source in waits[reader]), reader))
    return found


def program_figure(program: Program, devices: Sequence[str] = ()) -> Figure:
    """The figure of a Program.

    Args:
        devices: names of the cluster's devices.  By default their numbers are shown.
    """
    found = boxes(program)
    rows = sorted({box.device for box in found})
    figure, axes = new_figure(max(9.0, 1.5 + 0.55 * max(box.end for box in found)), 1.4 + 0.45 * len(rows))
    for box in found:
        call = program.calls[box.call]
        axes.barh(rows.index(box.device), box.end - box.start, left=box.start, height=0.8, edgecolor="white",
                  color=COLOUR_OF[program.step_of(call)])
        if call.clone.m != ALL and program.step_of(call) in CLONED:
            axes.text((box.start + box.end) / 2, rows.index(box.device), str(call.clone.m), ha="center", va="center")
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(["host" if row == HOST else devices[row] if devices else f"device {row}" for row in rows])
    axes.invert_yaxis()
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    steps = [step for step in COLOUR_OF if any(program.step_of(call) == step for call in program.calls)]
    axes.legend(handles=[Patch(color=COLOUR_OF[step], label=step) for step in steps], loc="upper center", frameon=False,
                bbox_to_anchor=(0.5, -0.02), ncol=len(steps), fontsize=8, handlelength=1.2, columnspacing=1.2)
    figure.tight_layout()
    return figure


def draw_program(path: str, program: Optional[Program] = None) -> None:
    """Draw a step's calls, one row per device, into a ``.png`` or ``.svg`` file.  The times are nominal.

    Args:
        program: the default is the Program of the graph rewritten last.

    Raises:
        PlanError: no graph has been rewritten yet.
        WhaleError: no Program is given, and ``wh.init`` was not called.
        MissingPackageError: matplotlib is not installed (``whale_tf[viz]``).
    """
    from whale_tf.api import current_program  # TensorFlow takes seconds to load, and a given Program does not need it

    program = program or current_program()
    if program is None:
        raise PlanError("no graph has been rewritten yet: call wh.parallelize() before wh.draw_program()")
    save(program_figure(program), path)
