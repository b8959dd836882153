"""Recipes for the transfer of a tensor from one TaskGraph's replicas to another's (lowered in ``passes/lowering``).

Both TaskGraphs divide the same micro-batch, each at its own cuts.  A consumer reads from the producers whose parts overlap its
own, and cuts off the examples that it does not need (DAPPLE section V-B1, Fig. 9)::

    2 -> 1  concat        1 -> 2  split         2 -> 3  split-concat      2 -> 2  one-to-one

    p0 ─┐                     ┌─> c0            p0 ─┬─> c0                p0 ──> c0
        ├─> c0            p0 ─┤                     └─> c1                p1 ──> c1
    p1 ─┘                     └─> c1            p1 ─┬─> c1
                                                    └─> c2
"""
from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Optional, Sequence, Tuple

Cuts = Tuple[Fraction, ...]  # where the replicas' parts of a micro-batch begin and end: 0 = c_0 < c_1 < ... < c_n = 1


class Crossing(NamedTuple):
    """The parts that one consumer reads.

    Attributes:
        producers: replicas whose parts overlap the consumer's, in order.
        covers: whether together they are exactly the consumer's part, so that nothing is cut off.
    """

    producers: Tuple[int, ...]
    covers: bool


def cuts(count: int, slices: Optional[Sequence[int]] = None) -> Cuts:
    """Cuts of ``count`` replicas with parts in proportion to ``slices`` (equal ones by default)."""
    sizes = list(slices or [1] * count)
    total, running, result = sum(sizes), 0, [Fraction(0)]
    for size in sizes:
        running += size
        result.append(Fraction(running, total))
    return tuple(result)


def crossing(producer: Cuts, consumer: Cuts, replica: int) -> Crossing:
    """The parts that replica ``replica`` of the consumer reads.

    Examples are not divided: a cut is rounded down to a whole number of examples.  That keeps the order of cuts, so parts that do
    not overlap here never overlap in examples.
    """
    low, high = consumer[replica], consumer[replica + 1]
    producers = tuple(r for r in range(len(producer) - 1) if producer[r] < high and producer[r + 1] > low)
    return Crossing(producers, producer[producers[0]] == low and producer[producers[-1] + 1] == high)


def pattern(producer: Cuts, consumer: Cuts) -> str:
    """DAPPLE's name for the bridge: ``one-to-one``, ``split``, ``concat`` or ``split-concat``."""
    if producer == consumer:
        return "one-to-one"
    crossings = [crossing(producer, consumer, replica) for replica in range(len(consumer) - 1)]
    if all(len(each.producers) == 1 for each in crossings):
        return "split"
    return "concat" if all(each.covers for each in crossings) else "split-concat"
