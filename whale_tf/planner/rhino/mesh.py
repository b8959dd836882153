"""Device meshes: the devices as a grid.  Each dimension divides the result of the dimensions before it (Rhino section 4).

A change of layout along a dimension costs the time of its recipe (:mod:`whale_tf.patterns.moves`) on the cluster's links, with
all groups of the dimension at once.  Rhino uses prices of ring collectives instead, but the executor sends the recipe's
messages.
"""

from __future__ import annotations

import functools
import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.patterns.moves import MANY, Recipe, Step, all_sum, exchange, moves
from whale_tf.patterns.spread import Spread
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE
from whale_tf.profiler.op_cost import OpCost
from whale_tf.profiler.op_time import op_seconds
from whale_tf.simulator.network import Network
from whale_tf.simulator.transformation import ALL_TO_ALL, SEND_RECV, Group

Mesh = Tuple[int, ...]
PICOSECONDS = 1e12


class Price(NamedTuple):
    """The time of a recipe: ``fixed_s + size * per_byte_s``."""

    fixed_s: float
    per_byte_s: float

    def picoseconds(self, size: float) -> int:
        return int(round((self.fixed_s + size * self.per_byte_s) * PICOSECONDS)) if size else 0


class Axis:
    """One dimension of a mesh: groups of ``count`` devices that do the same at the same time.

    Attributes:
        slowest: the slowest of all devices.
        first: the slowest of the first devices in the groups, which compute tensors of which there is one copy.
    """

    def __init__(self, network: Network, groups: Sequence[Sequence[int]]) -> None:
        self.network, self.groups, self.count = network, groups, len(groups[0])
        devices = network.cluster.devices
        self.first = _slowest([devices[group[0]] for group in groups])
        self.slowest = _slowest([devices[i] for group in groups for i in group])
        self._prices: Dict[Tuple[Spread, Spread], Optional[Price]] = {}

    def conversion(self, have: Spread, need: Spread, size: float) -> int:
        """Picoseconds to bring a tensor from one layout into another."""
        key = (have, need)
        if key not in self._prices:
            recipe = moves(have, need, self.count)
            self._prices[key] = None if recipe is None else self._price(recipe)
        price = self._prices[key]
        return IMPOSSIBLE if price is None else price.picoseconds(size)

    def exchange(self, size: float) -> int:
        """Picoseconds of the messages in an op's own recipe."""
        return self._price(exchange(self.count)).picoseconds(size)

    def sum(self, size: float) -> int:
        """Picoseconds of a sum over the devices of each group."""
        return self._price(all_sum(self.count)).picoseconds(size)

    def _price(self, recipe: Recipe) -> Price:
        fixed = per_byte = 0.0
        for step in recipe:
            if step.parts:
                latency, rate = self._messages(step)
                fixed, per_byte = fixed + latency, per_byte + rate
            if step.added:
                launch = op_seconds(OpCost(0.0, 1.0), self.slowest, "float32")
                rate = op_seconds(OpCost(0.0, 2.0), self.slowest, "float32") - launch
                fixed += launch - rate
                per_byte += rate * max(part for _, part in step.added) * (self.count + 1)
        return Price(fixed, per_byte)

    def _messages(self, step: Step) -> Tuple[float, float]:
        """(latency, seconds a byte): messages of all groups share the links."""
        loads: Dict[int, float] = {}
        latency = 0.0
        for group in self.groups:
            if step.to_each and self.count > MANY:
                (found,), scale = self.network.algorithms_of(ALL_TO_ALL, Group(tuple(sorted(group)))), step.to_each * self.count
            else:
                pairs = tuple((group[j], group[i], part) for j, i, part in step.messages)
                ends = tuple(sorted({end for pair in pairs for end in pair[:2]}))
                (found,), scale = self.network.algorithms_of(SEND_RECV, Group(ends, pairs)), 1.0
            latency = max(latency, found.latency_s)
            for link, load in found.loads:
                loads[link] = loads.get(link, 0.0) + scale * load
        return latency, max((load / self.network.bandwidths[link] for link, load in loads.items()), default=0.0)


def _slowest(devices: Sequence[Device]) -> Device:
    return min(devices, key=lambda device: device.peak_flops_per_s["fp32"])


@functools.lru_cache(maxsize=None)
def layout_of(spread: Spread) -> Spread:
    """A spread as the search sees it.  Shards are given by their proportions, so that the shards of a tensor fit those of the
    reshaped or cut tensor."""
    if not spread.is_shard:
        return spread
    divisor = functools.reduce(math.gcd, spread.sizes)
    return spread._replace(sizes=tuple(size // divisor for size in spread.sizes))


def meshes(devices: int, dimensions: int = 2) -> List[Mesh]:
    """Every grid of that many devices with at most ``dimensions`` dimensions: 4 devices are (4,) and (2, 2).

    The order counts: devices that are next to each other are neighbours in the last dimension.
    """
    found: List[Mesh] = [(devices,)]
    if dimensions > 1:
        for first in range(2, devices // 2 + 1):
            if devices % first == 0:
                found += [(first,) + rest for rest in meshes(devices // first, dimensions - 1)]
    return found


def axes(cluster: Cluster, mesh: Mesh) -> List[Axis]:
    """The dimensions of a mesh."""
    network, total = Network(cluster), len(cluster)
    found, inner = [], total
    for size in mesh:
        inner //= size
        found.append(Axis(network, [[start + block + step * inner for step in range(size)]
                                    for block in range(0, total, inner * size) for start in range(inner)]))
    return found
