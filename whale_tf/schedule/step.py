"""One step of a pipeline stage: a pass of one micro-batch through one TaskGraph."""

from __future__ import annotations

from typing import Iterable, NamedTuple

from whale_tf.program import BACKWARD, FORWARD


class Step(NamedTuple):
    """``kind`` is ``forward``, ``backward`` or, if it is a separate step, ``weight``; ``micro_batch`` counts from 0."""

    kind: str
    micro_batch: int
    task_graph: int = 0

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


def forward(micro_batch: int, task_graph: int = 0) -> Step:
    return Step(FORWARD, micro_batch, task_graph)


def backward(micro_batch: int, task_graph: int = 0) -> Step:
    return Step(BACKWARD, micro_batch, task_graph)


def text(order: Iterable[Step]) -> str:
    """An order as the pictures show it: ``F0'`` is the forward pass of a device's second TaskGraph."""
    steps = list(order)
    place = {task_graph: number for number, task_graph in enumerate(sorted({step.task_graph for step in steps}))}
    return " ".join(str(step) + "'" * place[step.task_graph] for step in steps)
