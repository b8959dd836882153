"""A change of spread as a recipe: what the devices send each other, and what they add up.

For a tensor of ``S`` bytes on ``n`` devices, as the split executor does it::

    from \\ to     once               everywhere                shard
    once          -                  0 sends all of it         0 sends each its part
    shard         all send to 0      all send to all           each sends each what lies in its part
    partial       terms to 0, added  the same, then 0 sends    each gets its part of every term, and adds

One recipe has one price.  Its bytes are what patterns are chosen by (Whale section 3.2.2; ring collectives move as many), its
seconds what Rhino's search minimises::

    bytes         once           everywhere      shard
    once          0              (n-1) S         (n-1)/n S
    shard         (n-1)/n S      (n-1) S         (n-1)/n S   (another dimension: all-to-all; the same: 0)
    partial       (n-1) S        2 (n-1) S       (n-1) S
"""

from __future__ import annotations

import functools
from typing import Callable, Iterable, NamedTuple, Optional, Sequence, Tuple

from whale_tf.patterns.spread import EACH, EVERYWHERE, ONCE, Spread, everywhere, partial, shard

MANY = 64  # devices; the parts of more of them are taken to be equal
FIRST = 0  # the device that has what is there once
Message = Tuple[int, int, float]  # sender, receiver, part of the tensor


class Step(NamedTuple):
    """Messages, all at once, and what is added up then.

    Attributes:
        devices: how many.
        listed: the messages one by one; ``to_each``: or the part that every device sends every other one.
        added: (device, part of the tensor that one term is) of what is added up from as many terms.
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
        """What all messages are together, of the tensor."""
        return self.to_each * self.devices * (self.devices - 1) + sum(part for _, _, part in self.listed)


Recipe = Tuple[Step, ...]


@functools.lru_cache(maxsize=4096)
def moves(have: Spread, need: Spread, count: int) -> Optional[Recipe]:
    """How a tensor on ``count`` devices gets from one spread to another; None: it cannot (nothing becomes terms of a sum)."""
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
    """One term on each device to the sum on every device, by way of the first: what becomes of a gradient of model replicas."""
    return _step(count, [(j, FIRST, 1.0) for j in range(count)], ((FIRST, 1.0),)), _from_first(count)


def exchange(count: int) -> Recipe:
    """Inside an op: the bytes that change devices go half to the first one, half back."""
    part = 0.5 / max(count - 1, 1)
    return (_step(count, [way for j in range(1, count) for way in ((j, FIRST, part), (FIRST, j, part))]),)


def recipe_bytes(recipe: Optional[Recipe], size: float) -> float:
    """Bytes that change devices for a tensor of ``size`` bytes; infinite without a recipe."""
    if recipe is None:
        return float("inf")
    return size * sum(step.parts for step in recipe)


def moved_bytes(have: Spread, need: Spread, size: float, count: int) -> float:
    """Bytes that change devices when a tensor of ``size`` bytes goes from one spread to another, of which parts are taken to be
    equal: then a whole tensor and shards are brought into any third spread for the same bytes, which the search rests on."""
    if have == need:
        return 0.0
    return recipe_bytes(moves(_equal(have, 0, count), _equal(need, 1, count), count), size)


def gradient_bytes(have: Spread, need: Spread, size: float, count: int) -> float:
    """Bytes that the gradient of a tensor moves on its way back through ``have -> need``.

    The gradient of a term of a sum is the whole gradient, on every device; what every device read whole comes back as the
    terms of a sum.
    """
    back = partial if need.kind == EVERYWHERE else everywhere if need.is_partial else need
    target = everywhere if have.is_partial else have
    return 0.0 if have == need else moved_bytes(back, target, size, count)


def share(spread: Spread, device: int) -> float:
    """A device's part of a tensor; what is whole or a term of a sum is whole."""
    return spread.sizes[device] / sum(spread.sizes) if spread.is_shard else 1.0


def largest_share(spread: Spread) -> float:
    """The largest part that a device holds; what is each device's own has no part."""
    if spread.kind == EACH:
        return 0.0
    return max(spread.sizes) / sum(spread.sizes) if spread.is_shard else 1.0


def _equal(spread: Spread, dim: int, count: int) -> Spread:
    return shard(dim, (1,) * count) if spread.is_shard else spread


def _step(count: int, messages: Sequence[Message], added: Tuple[Tuple[int, float], ...] = ()) -> Step:
    return Step(count, tuple(message for message in messages if message[0] != message[1] and message[2] > 0.0), 0.0, added)


def _among(count: int, parts: Spread, part: Callable[[int, int], float], added: Tuple[Tuple[int, float], ...] = ()) -> Step:
    """Every device sends to every other one: as much to each where parts are equal, or so many that it makes no difference."""
    if len(set(parts.sizes)) == 1 or count > MANY:
        return Step(count, (), part(0, min(1, count - 1)), added)
    return _step(count, [(j, i, part(j, i)) for j in range(count) for i in range(count)], added)


def _from_first(count: int) -> Step:
    return _step(count, [(FIRST, i, 1.0) for i in range(count)])


def _overlap(have: Spread, need: Spread, source: int, target: int) -> float:
    """Part of shard ``source`` that lies in shard ``target`` of another division of the same dimension."""
    here, there = float(sum(have.sizes)), float(sum(need.sizes))
    begin = max(have.starts[source] / here, need.starts[target] / there)
    end = min((have.starts[source] + have.sizes[source]) / here, (need.starts[target] + need.sizes[target]) / there)
    return max(0.0, end - begin) * here / max(have.sizes[source], 1)
