"""How a tensor of a ``split`` TaskGraph lies over the TaskGraph's devices.

::

    once        one whole copy, on the first device; others read it from there
    everywhere  every device has it whole (what an op may need; nothing is kept this way)
    shard       device ``i`` has ``sizes[i]`` of dimension ``dim``, in order
    partial     the devices' values add up
    each        every device has something of its own that only its own ops read (a kernel's reserve space)

A tensor is replicated (Whale: ShardingInfo all zeros) as one copy that is computed once: the other devices read it.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

ONCE, EVERYWHERE, SHARD, PARTIAL, EACH = "once", "everywhere", "shard", "partial", "each"


class Spread(NamedTuple):
    """See the module's docstring; ``dim`` and ``sizes`` are of ``shard`` only."""

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

    def __str__(self) -> str:
        return "{}(dim {}: {})".format(self.kind, self.dim, "+".join(map(str, self.sizes))) if self.is_shard else self.kind


once = Spread(ONCE)
everywhere = Spread(EVERYWHERE)
partial = Spread(PARTIAL)
each = Spread(EACH)


def shard(dim: int, sizes: Tuple[int, ...]) -> Spread:
    return Spread(SHARD, dim, sizes)
