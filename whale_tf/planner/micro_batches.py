"""The numbers of micro-batches that searches for pipelines try."""
from __future__ import annotations

from typing import List, Optional

MOST_PER_STAGE = 8  # micro-batches per stage; with more, the bubble is below 1 / 8 of the step


def micro_batch_counts(global_batch: int, model_replicas: int, stages: int, devices: int = 1, given: Optional[int] = None,
                       multiple: int = 1) -> List[int]:
    """The numbers that leave every device of a stage whole examples; empty if model replicas do not divide the mini-batch.

    Args:
        devices: number of devices among which a stage divides a micro-batch.
        given: the only number to try.
        multiple: every number is a multiple of this one.
    """
    share = global_batch // model_replicas
    if share * model_replicas != global_batch:
        return []
    counts = range(1, min(share, MOST_PER_STAGE * stages) + 1) if given is None else [given]
    return [count for count in counts if share % count == 0 and share // count >= devices and count % multiple == 0]
