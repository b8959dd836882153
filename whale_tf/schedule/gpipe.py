"""GPipe's order: all forwards, then all backwards (DAPPLE section III-A, Fig. 3a).

The backwards run from the last micro-batch to the first, as in GPipe's own figure, so the last stage can start with the
micro-batch whose activations it has just computed::

    2 stages, 3 micro-batches

    stage 0   F0 F1 F2 B2 B1 B0      all micro-batches alive at the turn
    stage 1   F0 F1 F2 B2 B1 B0
"""

from __future__ import annotations

from typing import Iterator

from whale_tf.schedule.step import Step, backward, forward


def gpipe(num_micro_batch: int, warmup: int) -> Iterator[Step]:
    """The order of one stage.  ``warmup`` has no effect here: every micro-batch's forward comes before any backward."""
    del warmup  # one signature for every schedule
    for micro_batch in range(num_micro_batch):
        yield forward(micro_batch)
    for micro_batch in reversed(range(num_micro_batch)):
        yield backward(micro_batch)
