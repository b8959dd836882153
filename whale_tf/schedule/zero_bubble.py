"""ZB-H1 and ZB-H2: gradients of weights are separate, and computed when a stage would wait ("Zero Bubble Pipeline Parallelism",
Qi et al. 2023).

Nobody waits for gradients of weights (W), so a stage sends the gradients of its activations (B) first, and computes W when it
has nothing to send.  A stage starts as many forward passes ahead of B as ``warmup`` allows.  Until W it holds as many
micro-batches as the first stage does::

    ZB-H1: 2 stages, 4 micro-batches, warmup (2, 1)

    stage 0   F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3      at most 2 micro-batches held
    stage 1   .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3      at most 2

    ZB-H2: the same with warmup (3, 1)

    stage 0   F0 F1 F2 B0 W0 F3 B1 B2 W1 W2 B3 W3         at most 3 micro-batches held
    stage 1   .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3      at most 3

ZB-H1 has the warm-up and the memory of 1F1B (``S - i``), ZB-H2 starts ``2 (S - i) - 1`` micro-batches and holds ``2 S - 1``.
If F, B and W take equally long, stage 0 of ZB-H1 waits for ``S - 1`` of them, where 1F1B waits for ``3 (S - 1)``.  With
``2 S - 1`` micro-batches or more, no stage of ZB-H2 waits between its first and its last step.  A step ends with the last stage,
which begins ``S - 1`` late, so both schedules take ``3 M + S - 1``.  ZB-H2 has more work while messages are in transit.  It
would gain the rest only if steps overlapped, and those of one ``Session.run`` do not.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from whale_tf.program import WEIGHT
from whale_tf.schedule.greedy import Done, greedy
from whale_tf.schedule.step import BACKWARD, FORWARD, Step


def zero_bubble(positions: Sequence[int], num_micro_batch: int, warmups: Sequence[int]) -> List[List[Step]]:
    """The order of every stage.  Stage ``i`` has at most ``warmups[i]`` micro-batches before B, and ``warmups[0]`` before W."""

    def rank(step: Step, done: Done) -> Optional[Tuple[int, ...]]:
        stage = step.task_graph
        forwards, backwards, weights = (done[kind, stage] for kind in (FORWARD, BACKWARD, WEIGHT))
        if step.kind == FORWARD and (forwards - backwards >= warmups[stage] or forwards - weights >= warmups[0]):
            return None
        return ((FORWARD, BACKWARD, WEIGHT).index(step.kind),)

    return greedy(positions, num_micro_batch, rank, splits=True)
