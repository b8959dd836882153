"""The spread of a ``split`` TaskGraph's tensor over the TaskGraph's devices.

::

    once        one whole copy, on the first device; others read it from there
    everywhere  every device has it whole (an op may need this; nothing is kept this way)
    shard       device ``i`` has ``sizes[i]`` of dimension ``dim``, in order
    partial     the devices' values are terms of a sum
    each        every device has a different value that only its own ops read (a kernel's reserve space)

A replicated tensor (Whale: ShardingInfo all zeros) is one copy, which is computed once and read by the other devices.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence, Tuple

ONCE, EVERYWHERE, SHARD, PARTIAL, EACH = "once", "everywhere", "shard", "partial", "each"


class Spread(NamedTuple):
    """See the module's docstring.  Only ``shard`` has ``dim`` and ``sizes``."""

    kind: str
    dim: int = -1
    sizes: Tuple[int, ...] = ()

    @property
    def is_shard(self) -> bool:
        return self.kind == SHARD

    @property
    def is_partial(self) -> bool:
        return self.kind == PARTIAL

    @property
    def starts(self) -> Tuple[int, ...]:
        """Where each device's part begins."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    def shapes(self, whole: Sequence[Any]) -> List[Tuple[Any, ...]]:
        """The shapes of the parts of a tensor of this shape."""
        return [(*whole[:self.dim], size, *whole[self.dim + 1:]) for size in self.sizes] if self.is_shard else [tuple(whole)]

    def __str__(self) -> str:
        return "{}(dim {}: {})".format(self.kind, self.dim, "+".join(map(str, self.sizes))) if self.is_shard else self.kind


once = Spread(ONCE)
everywhere = Spread(EVERYWHERE)
partial = Spread(PARTIAL)
each = Spread(EACH)


def shard(dim: int, sizes: Tuple[int, ...]) -> Spread:
    return Spread(SHARD, dim, sizes)
