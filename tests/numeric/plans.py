"""The plans of the equality matrix: how many devices each stage asks for, of how many."""
from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple


class Shape(NamedTuple):
    """``wh.replicate(counts[i])`` around stage i, on ``devices`` logical CPU devices, ``each`` of the stages on a device."""

    counts: Tuple[int, ...]
    devices: int
    each: int = 1

    @property
    def model_replicas(self) -> int:
        """Degree of nested data parallelism."""
        return self.devices * self.each // sum(self.counts)


class Parallel(NamedTuple):
    """A shape with its micro-batches and schedule; one TaskGraph with micro-batches is gradient accumulation.

    ``cuts`` are those of ``script.Stages``; ``extra`` is more of the configuration.
    """

    shape: Shape
    micro_batches: int = 1
    schedule: str = "backward_first"
    cuts: Tuple[int, ...] = ()
    extra: Tuple[Tuple[str, Any], ...] = ()

    def config(self) -> Dict[str, Any]:
        return dict({"num_micro_batch": self.micro_batches, "pipeline.schedule": self.schedule}, **dict(self.extra))


SHAPES: Dict[str, Shape] = {
    "one": Shape((1,), 1),
    "replicate2": Shape((2,), 2),
    "replicate4": Shape((4,), 4),
    "pipeline2": Shape((1, 1), 2),
    "pipeline4": Shape((1, 1, 1, 1), 4),
    "nested2x2": Shape((1, 1), 4),
    "counts1:3": Shape((1, 3), 4),
    "counts3:1": Shape((3, 1), 4),
    "counts2:3": Shape((2, 3), 5),
    "counts3:2": Shape((3, 2), 5),
    "counts2:1:1": Shape((2, 1, 1), 4),
    "folded2x2": Shape((1, 1, 1, 1), 4, 2),
}
HOMES: Dict[str, Dict[str, str]] = {  # of variables; what is divided over replicas needs some
    "v1": {"zero": "v1"}, "v2": {"zero": "v2"}, "v3": {"zero": "v3"}, "states": {"offload": "states"},
    "v0": {"offload": "v0"}, "v2_states": {"zero": "v2", "offload": "states"}}
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = ("backward_first", "gpipe", "zero_bubble_h1", "zero_bubble_h2")
FOLDED = ("interleaved", "zero_bubble_v")  # several TaskGraphs a device


def fits(row: Dict[str, Any]) -> bool:
    """Some schedules put several TaskGraphs on a device, and others do not."""
    return "shape" not in row or "schedule" not in row or (SHAPES[row["shape"]].each > 1) == (row["schedule"] in FOLDED)
