"""Early backward scheduling (DAPPLE section III-B and V-C; later also called 1F1B).

A stage starts ``warmup`` forward micro-batches (K_i), then does strictly one backward and one forward in turn, so the
activations of a micro-batch are freed before those of the next one are made::

    2 stages, 5 micro-batches, warmup (2, 1)

    stage 0   F0 F1 B0 F2 B1 F3 B2 F4 B3 B4      at most 2 micro-batches alive
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4      at most 1
"""

from __future__ import annotations

from typing import Iterator

from whale_tf.schedule.step import Step, backward, forward


def backward_first(num_micro_batch: int, warmup: int) -> Iterator[Step]:
    """The order of one stage: at most ``warmup`` micro-batches are ever alive, whatever ``num_micro_batch`` is."""
    depth = min(warmup, num_micro_batch)
    for micro_batch in range(depth):
        yield forward(micro_batch)
    for micro_batch in range(num_micro_batch):
        yield backward(micro_batch)
        if micro_batch + depth < num_micro_batch:
            yield forward(micro_batch + depth)
