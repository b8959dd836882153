"""Time of a change of layout between the devices of one mesh dimension: ring collectives, alpha-beta model.

For a tensor of ``S`` bytes on ``n`` devices whose ring has latency ``a`` and bandwidth ``b`` (Thakur et al. 2005, "Optimization
of collective communication operations in MPICH", section 4)::

    from \\ to      whole                          shard (another dimension)
    whole          0                              0 (each cuts its own)
    shard          all-gather                     all-to-all                    (the same dimension: 0)
                   (n-1) (a + S / (n b))          (n-1) (a + S / (n^2 b))
    terms of a     all-reduce                     reduce-scatter
    sum            2 (n-1) (a + S / (n b))        (n-1) (a + S / (n b))

Nothing becomes terms of a sum again: every device would have to know whose turn it is.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from whale_tf.cluster.devices import Link
from whale_tf.patterns.spread import EACH, ONCE, Spread, everywhere
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE

PICOSECONDS = 1e12


class Ring(NamedTuple):
    """The devices of one mesh dimension: how many, and the slowest link between neighbours."""

    devices: int
    link: Link

    def seconds(self, steps: int, size_bytes: float) -> float:
        """``steps`` messages of ``size_bytes`` one after the other, all devices at once."""
        return steps * self.link.seconds(size_bytes)

    def exchange_seconds(self, size_bytes: float) -> float:
        """Recipes inside an op (a softmax over shards): ``size_bytes`` change devices, in an all-reduce."""
        return self.seconds(2 * (self.devices - 1), size_bytes / (2 * (self.devices - 1) * self.devices))


@functools.lru_cache(maxsize=None)
def layout_of(spread: Spread) -> Spread:
    """A spread as the search sees it: computed once is whole everywhere, and shards count by their proportions, so that the
    shards of a tensor fit those of its reshaped or cut self."""
    if spread.kind == ONCE:
        return everywhere
    if not spread.is_shard:
        return spread
    divisor = functools.reduce(math.gcd, spread.sizes)
    return spread._replace(sizes=tuple(size // divisor for size in spread.sizes))


def conversion(have: Spread, need: Spread, size_bytes: float, ring: Ring) -> int:
    """Picoseconds of a tensor's way from one layout to another (see the module)."""
    count, others = ring.devices, ring.devices - 1
    if have == need or have in (everywhere,) and not need.is_partial or have.kind == EACH:
        return 0
    if need.is_partial or need.kind == EACH:
        return IMPOSSIBLE
    if have.is_partial:
        seconds = ring.seconds(others if need.is_shard else 2 * others, size_bytes / count)
    elif need.is_shard:
        seconds = ring.seconds(others, size_bytes / count / count)
    else:
        seconds = ring.seconds(others, size_bytes / count)
    return int(round(seconds * PICOSECONDS))
