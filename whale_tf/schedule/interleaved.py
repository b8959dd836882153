"""Interleaved 1F1B: several TaskGraphs a device (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", section 2.2).

Device ``i`` of S runs TaskGraphs ``i``, ``S + i``, ``2 S + i`` and so on, V of them, each for S micro-batches before the next.
Filling the pipeline takes S of these smaller steps, so a device waits ``(S - 1) / V`` of a whole stage's F and B::

    2 devices, 4 TaskGraphs, 4 micro-batches; F1' is the forward pass of the device's second TaskGraph

    device 0 (TaskGraphs 0, 2)   F0 F1 F0' F1' F2 . B0' F3 B1' F2' B0 F3' B1 . B2' . B3' B2 B3
    device 1 (TaskGraphs 1, 3)   .  F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3

Device ``i`` starts ``2 (S - i - 1) + (V - 1) S + 1`` forward steps before its first backward one, and holds at most that many.
With two TaskGraphs on the first of many devices this is 1.5 times what 1F1B holds.  The last round of S micro-batches may be
smaller; then devices wait longer (in the paper S divides the number of micro-batches).
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from whale_tf.schedule.greedy import Done, greedy
from whale_tf.schedule.step import BACKWARD, FORWARD, Step


def interleaved(positions: Sequence[int], num_micro_batch: int, warmups: Sequence[int]) -> List[List[Step]]:
    """The order of every device.  ``warmups`` has no effect here."""
    devices = max(positions) + 1

    def turn(kind: str, task_graph: int, done: Done) -> Tuple[int, int]:
        """Rounds of as many micro-batches as there are devices, in each round TaskGraph by TaskGraph."""
        return done[kind, task_graph] // devices, task_graph if kind == FORWARD else -task_graph

    def rank(step: Step, done: Done) -> Optional[Tuple[int, ...]]:
        position = positions[step.task_graph]
        mine = range(position, len(positions), devices)
        own = turn(step.kind, step.task_graph, done)
        if own > min(turn(step.kind, one, done) for one in mine if done[step.kind, one] < num_micro_batch):
            return None
        if step.kind != FORWARD:
            return (1,)
        held = sum(done[FORWARD, one] - done[BACKWARD, one] for one in mine)
        return None if held > 2 * (devices - position - 1) + len(positions) - devices else (0,)

    return greedy(positions, num_micro_batch, rank, splits=False)
