"""Device sets: how many devices of each server a stage takes, and the three placement policies (DAPPLE section IV-B).

Devices of a server are taken in order, so two counts per server describe a set: ``used`` before it, and ``taken`` by it.
Servers of one class (same devices, same links) may be exchanged: states are kept in a canonical order, with falling used counts
within a class.  Policies for two servers of six devices, with two of the first one used, and a stage of four::

    fresh first    ##......  ####....      an unused machine
    append first   ######..  ........      the rest of used machines
    scatter first  ######..  ........      the same here: evenly over used machines (over all if none is used)
"""
from __future__ import annotations

import functools
from typing import Dict, Iterator, List, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.planner.stage_costs import Transfer, links_of

Counts = Tuple[int, ...]

# Larger clusters, and those with more used-count states (two unequal nodes of 8 have 81), are searched over fewer device sets.
MAX_DEVICES_OF_ALL_SETS, MAX_STATES_OF_ALL_SETS = 16, 72
UNITS = 16  # number of units in a large cluster; its stages are multiples of one unit


class Servers:
    """A cluster as counts per server.

    Attributes:
        cluster: the cluster.
        sizes: devices of each server.
        classes: number of the class of each server; servers of a class are interchangeable.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sizes: Counts = tuple(len(node) for node in cluster.nodes)
        self.classes = _classes(cluster)
        self._links = links_of(cluster)
        self._sets: Dict[Counts, List[Counts]] = {}
        self._behind: Dict[Tuple[Counts, Counts], Tuple[Counts, Counts]] = {}
        self._matched: Dict[Tuple[Counts, Counts, Counts], Counts] = {}
        self._messages: Dict[Tuple[Counts, Counts, Counts], Transfer] = {}
        self._members = {name: [k for k, other in enumerate(self.classes) if other == name] for name in set(self.classes)}

    @property
    def num_devices(self) -> int:
        return sum(self.sizes)

    def none(self) -> Counts:
        return (0,) * len(self.sizes)

    def free(self, used: Counts) -> Counts:
        return tuple(size - count for size, count in zip(self.sizes, used))

    def devices(self, used: Counts, taken: Counts) -> Tuple[int, ...]:
        """Numbers of the taken devices."""
        return tuple(device for node, start, count in zip(self.cluster.nodes, used, taken)
                     for device in node[start:start + count])

    def message(self, used: Counts, taken: Counts, receivers: Counts) -> Transfer:
        """From the devices ``taken`` after those ``used`` to the next ones on each server."""
        key = (used, taken, receivers)
        if key not in self._messages:
            behind = tuple(a + b for a, b in zip(used, taken))
            self._messages[key] = self._links.message(self.devices(used, taken), self.devices(behind, receivers))
        return self._messages[key]

    def behind(self, used: Counts, taken: Counts) -> Tuple[Counts, Counts]:
        """Canonical used counts after a stage, and ``taken`` in their order of servers."""
        key = (used, taken)
        if key not in self._behind:
            order = self.canonical_order(used, taken)
            self._behind[key] = (tuple(used[k] + taken[k] for k in order), tuple(taken[k] for k in order))
        return self._behind[key]

    def canonical_order(self, used: Counts, taken: Counts) -> Counts:
        """Old server number of each place after a stage was taken: within a class by used counts then taken counts, falling."""
        order = list(range(len(self.sizes)))
        for members in self._members.values():
            ranked = sorted(members, key=lambda k: (-(used[k] + taken[k]), -taken[k], k))
            for place, server in zip(members, ranked):
                order[place] = server
        return tuple(order)

    def matched(self, used: Counts, taken: Counts, before: Counts) -> Counts:
        """``taken`` with interchangeable servers (same class, same used count) exchanged so that the servers that had most of the
        stage ``before`` get most, which is the order with the fewest transfers between servers."""
        key = (used, taken, before)
        if key not in self._matched:
            result = list(taken)
            for group in self._ties(used):
                givers = sorted(group, key=lambda k: (-before[k], k))
                for server, count in zip(givers, sorted((taken[k] for k in group), reverse=True)):
                    result[server] = count
            self._matched[key] = tuple(result)
        return self._matched[key]

    def _ties(self, used: Counts) -> List[List[int]]:
        groups: Dict[Tuple[int, int], List[int]] = {}
        for server, name in enumerate(self.classes):
            groups.setdefault((name, used[server]), []).append(server)
        return list(groups.values())

    def sets(self, used: Counts) -> List[Counts]:
        """The sets of free devices to try for a stage, small ones first: all of them, or those of :meth:`round_sets` if the
        cluster is large."""
        if used not in self._sets:
            is_small = self.num_devices <= MAX_DEVICES_OF_ALL_SETS and self.count_states() <= MAX_STATES_OF_ALL_SETS
            found = self.all_sets(used) if is_small else self.round_sets(used)
            self._sets[used] = sorted(found, key=lambda taken: (sum(taken), taken))
        return self._sets[used]

    def all_sets(self, used: Counts) -> Iterator[Counts]:
        """Every non-empty set of free devices, interchangeable servers in falling order only."""
        ties = {server: group[position - 1] if position else None
                for group in self._ties(used) for position, server in enumerate(group)}
        free = self.free(used)

        def extend(counts: List[int]) -> Iterator[Counts]:
            server = len(counts)
            if server == len(free):
                if any(counts):
                    yield tuple(counts)
                return
            previous = ties[server]
            most = free[server] if previous is None else min(free[server], counts[previous])
            for count in range(most + 1):
                yield from extend(counts + [count])

        return extend([])

    def round_sets(self, used: Counts) -> Iterator[Counts]:
        """Fewer sets, for large clusters: round numbers of devices and all remaining ones, appended; whole servers also fresh;
        and evenly scattered ones if all servers are equally used."""
        rest, level = sum(self.free(used)), len(set(used)) == 1 and len(set(self.sizes)) == 1
        for count in [count for count in self._round_numbers() if count < rest] + [rest]:
            sets = [append_first(self.sizes, used, count)]
            if count % max(self.sizes) == 0:
                sets.append(fresh_first(self.sizes, used, count))
            if level and count % len(self.sizes) == 0:
                sets.append(scatter_first(self.sizes, used, count))
            yield from sorted(set(sets), reverse=True)

    def _round_numbers(self) -> List[int]:
        """2^a and 3 x 2^a units, of which the cluster has about :data:`UNITS`."""
        unit = max(1, self.num_devices // UNITS)
        return sorted({factor * unit << power for factor in (1, 3) for power in range(UNITS.bit_length())})

    def count_states(self) -> int:
        """Number of canonical used-counts: multisets of one count per server in every class."""
        total = 1
        for members in self._members.values():
            for k in range(len(members)):
                total = total * (self.sizes[members[0]] + 1 + k) // (k + 1)
        return total


@functools.lru_cache(maxsize=8)
def servers_of(cluster: Cluster) -> Servers:
    """All searches on one cluster share its device sets."""
    return Servers(cluster)


def fresh_first(sizes: Counts, used: Counts, count: int) -> Counts:
    """Unused servers in order, then the free devices of used ones."""
    order = sorted(range(len(sizes)), key=lambda k: (used[k] > 0, k))
    return _fill(sizes, used, count, order)


def append_first(sizes: Counts, used: Counts, count: int) -> Counts:
    """The free devices of used servers in order, then unused ones."""
    order = sorted(range(len(sizes)), key=lambda k: (used[k] == 0, k))
    return _fill(sizes, used, count, order)


def scatter_first(sizes: Counts, used: Counts, count: int) -> Counts:
    """Evenly over the used servers (over all when none is used), then evenly over the others."""
    taken = [0] * len(sizes)
    started = [k for k in range(len(sizes)) if used[k] > 0]
    for group in (started, [k for k in range(len(sizes)) if used[k] == 0]):
        while count:
            open_servers = [k for k in group if used[k] + taken[k] < sizes[k]]
            if not open_servers:
                break
            for server in open_servers[:count]:
                taken[server] += 1
            count -= min(count, len(open_servers))
    return tuple(taken)


def _fill(sizes: Counts, used: Counts, count: int, order: Sequence[int]) -> Counts:
    taken = [0] * len(sizes)
    for server in order:
        taken[server] = min(count, sizes[server] - used[server])
        count -= taken[server]
    return tuple(taken)


def _classes(cluster: Cluster) -> Tuple[int, ...]:
    """Equal node descriptions are interchangeable: what a node looks like to others depends on its own links only."""
    seen: Dict[object, int] = {}
    return tuple(seen.setdefault(node, len(seen)) for node in cluster.description.nodes)
