"""Strategy transformation: from one config of a tensor to another, by collectives (Proteus section V-B).

On the same devices, both configs are converted to a common mesh and compared axis by axis::

    before      after       communication along that mesh axis
    same        same        none
    replicated  sharded     none (every device keeps its part)
    partial     replicated  all-reduce
    partial     sharded     reduce-scatter
    sharded     replicated  all-gather
    sharded     sharded'    all-to-all

In all other cases (other devices, meshes without a common refinement, parts that change places) tensors are sent point to
point: every receiver takes each piece that it needs from one of the devices that have it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import networkx as nx

from whale_tf.simulator.configs import PARTIAL, REPLICATED, TensorAxis, TensorConfig, coordinates, fractions

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
SEND_RECV = "send_recv"
HOST_COPY = "host_copy"

Pair = Tuple[int, int, float]  # sender, receiver, fraction of the whole tensor


class Group(NamedTuple):
    """Devices that communicate with each other; ``pairs`` only for ``send_recv``."""

    devices: Tuple[int, ...]
    pairs: Tuple[Pair, ...] = ()


class Communication(NamedTuple):
    """One communication step of a transformation.

    ``fraction`` of the whole tensor is the size of the collective on each member: what each member puts into an all-reduce,
    reduce-scatter or all-to-all, or gets from an all-gather.  ``result`` is the tensor's config afterwards.
    """

    kind: str
    groups: Tuple[Group, ...]
    fraction: float
    result: TensorConfig


@lru_cache(maxsize=None)
def transformation(before: TensorConfig, after: TensorConfig) -> Tuple[Communication, ...]:
    """The communication that turns ``before`` into ``after``; empty if none is needed."""
    if before == after:
        return ()
    if before.devices == after.devices:
        common = _common_mesh(before.axes, after.axes)
        for order in ORDERS:
            steps = _along_axes(before.devices, common[0], common[1], order) if common is not None else None
            if steps is not None:
                return tuple(steps[:-1]) + tuple(step._replace(result=after) for step in steps[-1:])
    if before.is_partial:
        summed = before.summed()
        return transformation(before, summed) + transformation(summed, after)
    step = _point_to_point(before, after)
    return (step,) if step.groups else ()


Axes = Tuple[TensorAxis, ...]


def _common_mesh(before: Axes, after: Axes) -> Optional[Tuple[Axes, Axes]]:
    """Both meshes split to the same degrees, or None; an axis with unequal slices cannot be split."""
    left, right = list(before[::-1]), list(after[::-1])
    a: List[TensorAxis] = []
    b: List[TensorAxis] = []
    while left and right:
        x, y = left.pop(), right.pop()
        if x.slices != y.slices and x.degree == y.degree and x.what == y.what and x.what >= 0:
            return None
        if x.degree != y.degree:
            small = min(x.degree, y.degree)
            big = x if x.degree > y.degree else y
            if big.degree % small or big.slices is not None:
                return None
            rest = TensorAxis(big.degree // small, big.what)
            (left if big is x else right).append(rest)
            x = x if x.degree == small else TensorAxis(small, x.what)
            y = y if y.degree == small else TensorAxis(small, y.what)
        a.append(x)
        b.append(y)
    return tuple(a), tuple(b)


def _nested(before: Axes, after: Axes) -> bool:
    """Whether, on every axis of the tensor, the mesh axes that cut it before are the first of those that cut it after, or vice
    versa: cuts are removed or added inside those that stay.  Otherwise parts move to other devices."""
    for what in {axis.what for axis in before + after if axis.what >= 0}:
        old = [i for i, axis in enumerate(before) if axis.what == what]
        new = [i for i, axis in enumerate(after) if axis.what == what]
        if old[: len(new)] != new[: len(old)]:
            return False
    return True


_MATCHES: Dict[str, Callable[[int, int], bool]] = {
    REDUCE_SCATTER: lambda x, y: x == PARTIAL and y >= 0,
    ALL_REDUCE: lambda x, y: x == PARTIAL and y == REPLICATED,
    ALL_TO_ALL: lambda x, y: x >= 0 and y >= 0 and x != y,
    ALL_GATHER: lambda x, y: x >= 0 and y == REPLICATED,
}

# Steps that make tensors smaller come first; if an all-to-all would remove an outer cut, the inner ones are gathered first.
ORDERS = ((REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, ALL_GATHER), (REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER, ALL_TO_ALL))


def _along_axes(devices: Tuple[int, ...], before: Axes, after: Axes, order: Sequence[str]) -> Optional[List[Communication]]:
    """Slices, which are free, then collectives in ``order``; None if some step would have to move parts to other devices."""
    now = list(before)
    for i, (x, y) in enumerate(zip(before, after)):
        if x.what == REPLICATED and y.what >= 0:
            now[i] = y
    if not _nested(before, tuple(now)):
        return None
    steps: List[Communication] = []
    for kind in order:
        chosen = [i for i, (x, y) in enumerate(zip(now, after)) if _MATCHES[kind](x.what, y.what)]
        if not chosen:
            continue
        earlier = tuple(now)
        for i in chosen:
            now[i] = after[i]
        if not _nested(earlier, tuple(now)):
            return None
        result = TensorConfig(devices, tuple(now))
        size = max(fractions(result if kind == ALL_GATHER else TensorConfig(devices, earlier)))
        degrees = tuple(axis.degree for axis in now)
        steps.append(Communication(kind, axis_groups(devices, degrees, tuple(chosen)), size, result))
    return steps


@lru_cache(maxsize=None)
def axis_groups(devices: Tuple[int, ...], degrees: Tuple[int, ...], along: Tuple[int, ...]) -> Tuple[Group, ...]:
    """Groups of devices that differ only in their coordinates ``along`` these mesh axes."""
    groups: Dict[Tuple[int, ...], List[int]] = {}
    for device, point in zip(devices, coordinates(degrees)):
        key = tuple(c for i, c in enumerate(point) if i not in along)
        groups.setdefault(key, []).append(device)
    return tuple(Group(tuple(members)) for members in groups.values())


@lru_cache(maxsize=None)
def host_copy(config: TensorConfig) -> Communication:
    """A copy from the host's memory to every device's, in one config."""
    groups = tuple(Group((device,)) for device in config.devices)
    return Communication(HOST_COPY, groups, max(fractions(config)), config)


Box = Tuple[Tuple[float, float], ...]


def _boxes(config: TensorConfig, rank: int) -> Dict[Box, List[int]]:
    """The parts of a tensor as boxes in the unit cube, with the devices that have each."""
    boxes: Dict[Box, List[int]] = {}
    for device, point in zip(config.devices, coordinates(tuple(axis.degree for axis in config.axes))):
        intervals = [(0.0, 1.0)] * rank
        for axis, index in zip(config.axes, point):
            if axis.what >= 0:
                low, high = intervals[axis.what]
                parts = axis.slices or (1,) * axis.degree
                total = float(sum(parts))
                start, stop = sum(parts[:index]) / total, sum(parts[: index + 1]) / total
                intervals[axis.what] = (low + (high - low) * start, low + (high - low) * stop)
        boxes.setdefault(tuple(intervals), []).append(device)
    return boxes


def _point_to_point(before: TensorConfig, after: TensorConfig) -> Communication:
    """Every receiver takes each overlapping piece from one device that has it; replicated receivers spread over these devices."""
    rank = 1 + max((axis.what for axis in before.axes + after.axes), default=0)
    sources = _boxes(before, max(rank, 1))
    pairs: List[Pair] = []
    for box, receivers in _boxes(after, max(rank, 1)).items():
        pieces = [(_overlap(box, other), holders) for other, holders in sources.items()]
        for size, holders in pieces:
            if size <= 1e-12:
                continue
            for number, receiver in enumerate(receivers):
                if receiver not in holders:
                    pairs.append((holders[number * len(holders) // len(receivers)], receiver, size))
    return Communication(SEND_RECV, connected(pairs), max(fractions(after)), after)


def _overlap(a: Box, b: Box) -> float:
    size = 1.0
    for (low_a, high_a), (low_b, high_b) in zip(a, b):
        size *= max(0.0, min(high_a, high_b) - max(low_a, low_b))
    return size


def connected(pairs: Sequence[Pair]) -> Tuple[Group, ...]:
    """Groups of the pairs that are connected by common devices."""
    parts = nx.connected_components(nx.Graph([pair[:2] for pair in pairs]))
    group_of = {device: group for group, part in enumerate(parts) for device in part}
    members: Dict[int, List[Pair]] = {}
    for pair in pairs:
        members.setdefault(group_of[pair[0]], []).append(pair)
    return tuple(
        Group(tuple(sorted({device for pair in group for device in pair[:2]})), tuple(group)) for group in members.values())
