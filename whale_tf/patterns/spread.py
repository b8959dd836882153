"""The spread of a ``split`` TaskGraph's tensor over the TaskGraph's devices.

::

    once        one whole copy, on the first device; others read it from there
    everywhere  every device has it whole (an op may need this; nothing is kept this way)
    shard       device ``i`` has ``sizes[i]`` of dimension ``dim``, in order
    tiles       parts along one or more dimensions, each on the device that its tile names; only variables and what is computed
                from them element by element lie so
    partial     the devices' values are terms of a sum
    each        every device has a different value that only its own ops read (a kernel's reserve space)

A replicated tensor (Whale: ShardingInfo all zeros) is one copy, which is computed once and read by the other devices.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from whale_tf.ir.parts import even_sizes

ONCE, EVERYWHERE, SHARD, TILES, PARTIAL, EACH = "once", "everywhere", "shard", "tiles", "partial", "each"


class Range(NamedTuple):
    """Elements ``start`` to ``start + size`` of dimension ``dim``."""

    dim: int
    start: int
    size: int


class Tile(NamedTuple):
    """A part of a tensor: its ranges (other dimensions are whole), the device among those of a model replica that computes with
    it, and the model replica that keeps it, of a variable."""

    device: int
    ranges: Tuple[Range, ...] = ()
    replica: int = 0

    def common(self, other: Tile) -> Optional[Tuple[Range, ...]]:
        """The ranges of the elements that are in both; None: there are none."""
        own, found = {one.dim: one for one in self.ranges}, []
        for dim in sorted({*own, *(one.dim for one in other.ranges)}):
            both = [one for one in (own.get(dim), other.along(dim)) if one is not None]
            start, end = max(one.start for one in both), min(one.start + one.size for one in both)
            if end <= start:
                return None
            found.append(Range(dim, start, end - start))
        return tuple(found)

    def along(self, dim: int) -> Optional[Range]:
        return next((one for one in self.ranges if one.dim == dim), None)

    def inside(self, ranges: Sequence[Range]) -> Tuple[Range, ...]:
        """Ranges of the whole as ranges of this part, without those that are all of it."""
        found = []
        for one in ranges:
            own = self.along(one.dim)
            if own is None or one.size != own.size:
                found.append(one if own is None else one._replace(start=one.start - own.start))
        return tuple(found)


T = TypeVar("T")


def assembled(pieces: Sequence[Tuple[Tuple[Range, ...], T]], concat: Callable[[List[T], int], T]) -> T:
    """The value that consists of pieces which form a grid.

    Args:
        pieces: their ranges, all along the same dimensions, and values.
        concat: joins values along a dimension.
    """
    for dim in [one.dim for one in reversed(pieces[0][0])]:
        rows: Dict[Tuple[Range, ...], List[Tuple[int, T]]] = {}
        for ranges, value in pieces:
            start = next(one.start for one in ranges if one.dim == dim)
            rows.setdefault(tuple(one for one in ranges if one.dim != dim), []).append((start, value))
        pieces = [(rest, concat([value for _, value in sorted(row, key=lambda one: one[0])], dim)) for rest, row in rows.items()]
    (_, whole), = pieces
    return whole


class Spread(NamedTuple):
    """Where the parts of a tensor are.

    Attributes:
        kind: ``once``: one whole copy, on the first device; ``everywhere``: every device has it whole; ``shard``: device ``i``
            has ``sizes[i]`` of dimension ``dim``; ``tiles``: parts along one or more dimensions; ``partial``: the devices' values
            are terms of a sum; ``each``: every device has a value of its own.
        dim: of ``shard``, the divided dimension.
        sizes: of ``shard``, the elements of each device, in order.
        tiles: of ``tiles``, the parts with their devices.
    """

    kind: str
    dim: int = -1
    sizes: Tuple[int, ...] = ()
    tiles: Tuple[Tile, ...] = ()

    @property
    def is_shard(self) -> bool:
        return self.kind == SHARD

    @property
    def is_tiles(self) -> bool:
        return self.kind == TILES

    @property
    def is_divided(self) -> bool:
        """Whether each device has some of the elements."""
        return self.kind in (SHARD, TILES)

    @property
    def parts(self) -> Tuple[Tile, ...]:
        """The parts of a tensor that is divided, or is on one device."""
        if self.is_shard:
            return tuple(Tile(i, (Range(self.dim, start, size),)) for i, (start, size) in enumerate(zip(self.starts, self.sizes)))
        return self.tiles or (Tile(0),)

    @property
    def is_partial(self) -> bool:
        return self.kind == PARTIAL

    @property
    def starts(self) -> Tuple[int, ...]:
        """Where each device's part begins."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    def shapes(self, whole: Sequence[Any]) -> List[Tuple[Any, ...]]:
        """The shapes of the parts of a tensor of this shape."""
        sizes = [{one.dim: one.size for one in part.ranges} for part in self.parts]
        return [tuple(own.get(dim, size) for dim, size in enumerate(whole)) for own in sizes]

    def whole_of(self, parts: Sequence[T], concat: Callable[[List[T], int], T]) -> T:
        """The whole of a divided tensor; ``concat`` joins values along a dimension."""
        return assembled([(part.ranges, value) for part, value in zip(self.parts, parts)], concat)

    def __str__(self) -> str:
        if not self.is_divided:
            return self.kind
        dims = ", ".join(f"dim {dim}: {'+'.join(map(str, sizes))}" for dim, sizes in _cuts(self.parts).items())
        return f"{self.kind}({dims})"


once = Spread(ONCE)
everywhere = Spread(EVERYWHERE)
partial = Spread(PARTIAL)
each = Spread(EACH)


def shard(dim: int, sizes: Tuple[int, ...]) -> Spread:
    return Spread(SHARD, dim, sizes)


def tiles(shape: Sequence[int], counts: Dict[int, int], place: Callable[[Dict[int, int]], Tuple[int, int]]) -> Spread:
    """A grid of tiles, of sizes that differ by one at most.

    Args:
        counts: dimension -> number of parts along it.
        place: position of a tile along each of these dimensions -> its device and its model replica.
    """
    ranges = []
    for dim, count in counts.items():
        sizes = even_sizes(shape[dim], count)
        ranges.append([Range(dim, sum(sizes[:i]), size) for i, size in enumerate(sizes)])
    found = []
    for positions in itertools.product(*(range(count) for count in counts.values())):
        device, replica = place(dict(zip(counts, positions)))
        found.append(Tile(device, tuple(own[i] for own, i in zip(ranges, positions)), replica))
    return Spread(TILES, tiles=tuple(found))


def _cuts(parts: Sequence[Tile]) -> Dict[int, List[int]]:
    """Dimension -> the sizes of the parts along it."""
    found: Dict[int, Dict[int, int]] = {}
    for part in parts:
        for one in part.ranges:
            found.setdefault(one.dim, {})[one.start] = one.size
    return {dim: [sizes[start] for start in sorted(sizes)] for dim, sizes in sorted(found.items())}
