"""One step of a pipeline stage: the forward or the backward pass of one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from whale_tf.program import BACKWARD, FORWARD


class Step(NamedTuple):
    """``kind`` is ``forward`` or ``backward``; ``micro_batch`` counts from 0."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


def forward(micro_batch: int) -> Step:
    return Step(FORWARD, micro_batch)


def backward(micro_batch: int) -> Step:
    return Step(BACKWARD, micro_batch)
