"""The V schedule without bubbles (ZB-V of "Zero Bubble Pipeline Parallelism", Qi et al. 2023, and of "Pipeline Parallelism with
Controllable Memory", 2024): two TaskGraphs per device, down the pipeline and back.

Device ``i`` of S runs TaskGraph ``i`` and TaskGraph ``2 S - 1 - i``, so the loss is on the same device as the inputs.  In a plain
row of stages, the first devices wait longest for their first gradient; here the gradients begin there::

    2 devices, 4 TaskGraphs, 4 micro-batches; F1' is the forward pass of the device's second TaskGraph

    device 0 (TaskGraphs 0, 3)   F0 F1 F2 F0' B0' W0' F1' B1' B0 W0 B1 W1 F3 F2' B2' W1' W2' F3' B3' B2 W2 B3 W3 W3'
    device 1 (TaskGraphs 1, 2)   .  F0 F0' F1 F1' B0' B0 W0 B1' B1 W1 F2 F2' W0' W1' F3 F3' B2' B2 B3' B3 W2 W3 W2' W3'

Until W, a device holds ``2 S`` micro-batches of its TaskGraphs.  This is the memory of 1F1B, because each TaskGraph is half a
stage.  One of these places is reserved for the second TaskGraph, whose forward pass lets the oldest micro-batch end.  In units of
half a stage's F, B or W, all equally long, a step takes ``6 M + S - 1`` (the last device begins ``S - 1`` late).  With at least S
micro-batches, some combinations of S and M take up to ``S - 2`` more.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from whale_tf.program import WEIGHT
from whale_tf.schedule.greedy import Done, greedy
from whale_tf.schedule.step import BACKWARD, FORWARD, Step


def zero_bubble_v(positions: Sequence[int], num_micro_batch: int, warmups: Sequence[int]) -> List[List[Step]]:
    """The order of every device.  ``warmups`` has no effect here."""
    count = len(positions)

    def rank(step: Step, done: Done) -> Optional[Tuple[int, ...]]:
        mine = step.task_graph, count - 1 - step.task_graph
        held = sum(done[FORWARD, one] - done[WEIGHT, one] for one in mine)
        is_second = mine[0] > mine[1]
        if step.kind == FORWARD:
            return None if held >= count - (not is_second) else (0, not is_second)
        return (1, not is_second) if step.kind == BACKWARD else (2, is_second)

    return greedy(positions, num_micro_batch, rank, splits=True)
