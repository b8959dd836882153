"""Finds the least recomputation with which a plan fits as it is played, whatever its stages are made of."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.recompute import Choice, RecomputableParts

TRIES = 4  # times that a stage's room is made smaller by what a plan did not fit by


class Row(NamedTuple):
    """A unit of recomputation: a stage or a TaskGraph, in parts, with the ``devices`` of all of its replicas."""

    devices: Tuple[int, ...]
    parts: RecomputableParts


def fitting(plain: Candidate, rows: Sequence[Row], again: Callable[[Sequence[Choice]], Candidate],
            cluster: Cluster) -> Candidate:
    """A plan that does not fit, with the least recomputation that makes it fit; if nothing does, with as little kept as possible.

    Args:
        plain: the plan in simulation, with everything kept.
        rows: its stages; several may share devices.
        again: plays the plan with a choice for each row.
    """
    least = again([row.parts.smallest() for row in rows])
    if not least.fits:
        return least
    room = [room_of(plain, row, rows, cluster) for row in rows]
    for _ in range(TRIES):
        choice = [row.parts.fastest(size) for row, size in zip(rows, room)]
        chosen = [one for one in choice if one is not None]
        if len(chosen) < len(rows):
            return least
        tried = again(chosen)
        if tried.fits:
            return min(least, tried, key=lambda one: one.latency_s)
        room = [size - max(0.0, _over(tried, row, cluster)) for row, size in zip(rows, room)]
    return least


def room_of(plain: Candidate, row: Row, rows: Sequence[Row], cluster: Cluster) -> float:
    """The memory for a row's activations: its share of the devices' room, among all rows on the same devices."""
    here = sum(one.parts.memory_without for one in rows if one.devices == row.devices)
    rest = max(plain.peak_memory_bytes[device] for device in row.devices) - here
    room = min(cluster.devices[device].usable_bytes for device in row.devices) - max(0.0, rest)
    return room * row.parts.memory_without / here if here else room


def _over(tried: Candidate, row: Row, cluster: Cluster) -> float:
    return max(tried.peak_memory_bytes[device] - cluster.devices[device].usable_bytes for device in row.devices)
