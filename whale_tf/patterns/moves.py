"""Recipes for a change of spread: the messages between devices, and the sums they compute.

For a tensor of ``S`` bytes on ``n`` devices, the split executor does the following::

    from \\ to     once               everywhere                shard
    once          -                  0 sends all of it         0 sends each its part
    shard         all send to 0      all send to all           each sends each what its part holds
    partial       terms to 0, added  the same, then 0 sends    each gets its part of every term, and adds

One recipe has one price.  Patterns are chosen by its bytes (Whale section 3.2.2; ring collectives move as many), and Rhino's
search minimises its seconds::

    bytes         once           everywhere      shard
    once          0              (n-1) S         (n-1)/n S
    shard         (n-1)/n S      (n-1) S         (n-1)/n S   (another dimension: all-to-all; the same: 0)
    partial       (n-1) S        2 (n-1) S       (n-1) S
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Sequence, Tuple

from whale_tf.patterns.spread import EACH, EVERYWHERE, ONCE, Range, Spread, Tile, everywhere, partial, shard

MANY = 64  # devices; with more of them, parts are assumed to be equal
FIRST = 0  # the device that holds tensors of which there is one copy
Message = Tuple[int, int, float]  # sender, receiver, part of the tensor


class Step(NamedTuple):
    """Messages that are sent at once, and the sums that follow.

    Attributes:
        devices: number of devices.
        listed: the messages one by one.
        to_each: if nothing is listed, the part that every device sends to every other device.
        added: (device, size of one term as a part of the tensor) for each sum; a sum has one term per device.
    """

    devices: int
    listed: Tuple[Message, ...] = ()
    to_each: float = 0.0
    added: Tuple[Tuple[int, float], ...] = ()

    @property
    def messages(self) -> Iterable[Message]:
        if not self.to_each:
            return self.listed
        devices = range(self.devices)
        return ((j, i, self.to_each) for j in devices for i in devices if i != j)

    @property
    def parts(self) -> float:
        """The total size of all messages, as a part of the tensor."""
        return self.to_each * self.devices * (self.devices - 1) + sum(part for _, _, part in self.listed)


Recipe = Tuple[Step, ...]


@functools.lru_cache(maxsize=4096)
def moves(have: Spread, need: Spread, count: int) -> Optional[Recipe]:
    """The recipe that changes a tensor's spread on ``count`` devices; None if there is none (nothing becomes terms of a sum)."""
    if have == need or have.kind == EACH:
        return ()
    if need.is_partial or need.kind == EACH:
        return None
    if have.kind == EVERYWHERE:
        return ()
    devices = range(count)
    if have.is_partial:
        if need.is_shard:
            return (_among(count, need, lambda j, i: share(need, i), tuple((i, share(need, i)) for i in devices)),)
        added = _step(count, [(j, FIRST, 1.0) for j in devices], ((FIRST, 1.0),))
        return (added,) if need.kind == ONCE else (added, _from_first(count))
    if have.kind == ONCE:
        return (_from_first(count) if not need.is_shard else _step(count, [(FIRST, i, share(need, i)) for i in devices]),)
    if need.is_shard and have.dim != need.dim:
        return (_among(count, need, lambda j, i: share(have, j) * share(need, i)),)
    if need.is_shard:
        return (_step(count, [(j, i, share(have, j) * _overlap(have, need, j, i)) for j in devices for i in devices]),)
    if need.kind == ONCE:
        return (_step(count, [(j, FIRST, share(have, j)) for j in devices]),)
    return (_among(count, have, lambda j, i: share(have, j)),)


def all_sum(count: int) -> Recipe:
    """From one term on each device to the sum on every device, through the first one, as for gradients of model replicas."""
    return _step(count, [(j, FIRST, 1.0) for j in range(count)], ((FIRST, 1.0),)), _from_first(count)


def exchange(count: int) -> Recipe:
    """The exchange inside an op: half of the bytes that change devices go to the first device, and half go back."""
    part = 0.5 / max(count - 1, 1)
    return (_step(count, [way for j in range(1, count) for way in ((j, FIRST, part), (FIRST, j, part))]),)


@functools.lru_cache(maxsize=4096)
def _moved_part(have: Spread, need: Spread, count: int) -> float:
    """The bytes that :func:`moved_bytes` counts for each byte of the tensor; infinite without a recipe."""
    if have.is_tiles or need.is_tiles:
        return _moved_tiles(have, need, count)
    recipe = moves(_equal(have, 0, count), _equal(need, 1, count), count)
    return float("inf") if recipe is None else sum(step.parts for step in recipe)


def _moved_tiles(have: Spread, need: Spread, count: int) -> float:
    """As :func:`_moved_part`, where one of both is in tiles: each device of the first model replica gets what it has not."""
    if need.is_partial or need.kind == EACH:
        return float("inf")
    if have.kind == EVERYWHERE:
        return 0.0
    wanted = [Tile(i) for i in range(count)] if need.kind == EVERYWHERE else need.parts
    sizes: Dict[int, int] = {}  # of the tensor's dimensions
    for one in (one for part in (*have.parts, *wanted) for one in part.ranges):
        sizes[one.dim] = max(sizes.get(one.dim, 0), one.start + one.size)

    def fraction(part: Optional[Sequence[Range]]) -> float:
        found = 0.0 if part is None else 1.0
        for one in part or ():
            found *= one.size / sizes[one.dim]
        return found

    if have.is_partial:
        return sum((count - 1) * fraction(part.ranges) for part in wanted)
    held = [part for part in have.parts if part.replica == 0]
    return sum(fraction(part.ranges) - sum(fraction(part.common(own)) for own in held if own.device == part.device)
               for part in wanted)


def moved_bytes(have: Spread, need: Spread, size: float, count: int) -> float:
    """Bytes that change devices when a tensor of ``size`` bytes goes from one spread to another.  Parts are assumed to be equal.
    Then a whole tensor and shards can be brought into any third spread for the same bytes, on which the search relies."""
    if have == need:
        return 0.0
    part = _moved_part(have, need, count)
    return part if part == float("inf") else size * part


def gradient_bytes(have: Spread, need: Spread, size: float, count: int) -> float:
    """Bytes that the gradient of a tensor moves on its way back through ``have -> need``.

    The gradient of a term of a sum is the whole gradient, on every device.  The gradient of a tensor that every device read whole
    comes back as the terms of a sum.
    """
    back = partial if need.kind == EVERYWHERE else everywhere if need.is_partial else need
    target = everywhere if have.is_partial else have
    return 0.0 if have == need else moved_bytes(back, target, size, count)


def share(spread: Spread, device: int) -> float:
    """A device's part of a tensor; 1 if the tensor is whole or a term of a sum."""
    return spread.sizes[device] / sum(spread.sizes) if spread.is_shard else 1.0


def largest_share(spread: Spread) -> float:
    """The largest part that a device holds; tensors that belong to each device have no part."""
    if spread.kind == EACH:
        return 0.0
    return max(spread.sizes) / sum(spread.sizes) if spread.is_shard else 1.0


def _equal(spread: Spread, dim: int, count: int) -> Spread:
    return shard(dim, (1,) * count) if spread.is_shard else spread


def _step(count: int, messages: Sequence[Message], added: Tuple[Tuple[int, float], ...] = ()) -> Step:
    return Step(count, tuple(message for message in messages if message[0] != message[1] and message[2] > 0.0), 0.0, added)


def _among(count: int, parts: Spread, part: Callable[[int, int], float], added: Tuple[Tuple[int, float], ...] = ()) -> Step:
    """Every device sends to every other one, the same amount if parts are equal or there are too many devices to matter."""
    if len(set(parts.sizes)) == 1 or count > MANY:
        return Step(count, (), part(0, min(1, count - 1)), added)
    return _step(count, [(j, i, part(j, i)) for j in range(count) for i in range(count)], added)


def _from_first(count: int) -> Step:
    return _step(count, [(FIRST, i, 1.0) for i in range(count)])


def _overlap(have: Spread, need: Spread, source: int, target: int) -> float:
    """The part of shard ``source`` that overlaps shard ``target`` of another division of the same dimension."""
    here, there = float(sum(have.sizes)), float(sum(need.sizes))
    begin = max(have.starts[source] / here, need.starts[target] / there)
    end = min((have.starts[source] + have.sizes[source]) / here, (need.starts[target] + need.sizes[target]) / there)
    return max(0.0, end - begin) * here / max(have.sizes[source], 1)
