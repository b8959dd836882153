"""The load that a communication puts on each link, and how concurrent communications share links.

Every algorithm for a collective has a start-up latency and *loads*: the bytes that each named link of the cluster carries
per byte of the collective.  Alone, it takes ``latency + max over links (bytes on the link / bandwidth)``: the alpha-beta
model with the bandwidth of the slowest link, summed over parallel channels (Proteus section VII).  Concurrent
communications share every link fairly (Proteus section VI-C); :func:`fair_share` is that rule for one link.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Link
from whale_tf.cluster.topology import connected
from whale_tf.errors import ClusterError, ConfigError, did_you_mean
from whale_tf.simulator.transformation import ALL_GATHER, ALL_TO_ALL, HOST_COPY, REDUCE_SCATTER, SEND_RECV, Group

Loads = Tuple[Tuple[int, float], ...]  # (link number, bytes on it per byte of the collective)

ALGORITHMS = ("ring", "tree", "hierarchical")
FLAT = ("ring", "tree")  # what Horovod and TensorFlow get from NCCL unless told otherwise


class Algorithm(NamedTuple):
    """One way to run a collective over one group: ``seconds = latency_s + size * seconds_per_byte``."""

    name: str
    latency_s: float
    seconds_per_byte: float
    loads: Loads


class Protocol(NamedTuple):
    """How a ring or tree sends.

    Attributes:
        start_s: per collective, before the first hop.
        hop: time per hop, relative to the link's latency.
        bandwidth: share of a link's bandwidth that carries data.
    """

    name: str
    start_s: float = 0.0
    hop: float = 1.0
    bandwidth: float = 1.0


SIMPLE = Protocol("")


class Network:
    """Loads and costs of communications on one cluster; it remembers every group that it has seen.

    Args:
        correction: kind of collective -> its measured bandwidth term, relative to the modelled one (1: the model is exact);
            ``whale calibrate`` writes these.
        algorithms: which of :data:`ALGORITHMS` an all-reduce may use (for a gather or reduce-scatter: whether it may use the
            hierarchical one besides the ring); the fastest for the size is taken, as in NCCL.
        protocols: of rings and trees; the fastest is taken here too.
        near_adapters: whether only the device's slot and the adapter limit a collective over several nodes.  NCCL sends from the
            device next to the adapter, or stages in the host's memory, so neither PCIe's uplinks nor the link between sockets
            limits it (12.2 of an adapter's 12.5 GB/s were measured in this way: NVIDIA/nccl-tests issue 29).  False: the whole
            path, as in NCCL's own model, which Proteus follows.
    """

    def __init__(self, cluster: Cluster, correction: Optional[Mapping[str, float]] = None, algorithms: Sequence[str] = ALGORITHMS,
                 protocols: Sequence[Protocol] = (SIMPLE,), near_adapters: bool = False) -> None:
        for name in algorithms:
            if name not in ALGORITHMS:
                raise ConfigError("collective algorithm is {!r}, expected one of {}.{}".format(
                    name, ", ".join(ALGORITHMS), did_you_mean(name, ALGORITHMS)))
        self.cluster = cluster
        self.correction = dict(correction or {})
        self.algorithms = tuple(algorithms)
        self.protocols = tuple(protocols)
        self.near_adapters = near_adapters
        self.link_names: List[str] = []
        self.bandwidths: List[float] = []  # [link number] bytes per second
        self._numbers: Dict[str, int] = {}
        self._known: Dict[Tuple[str, Group], Tuple[Algorithm, ...]] = {}
        self._paths: Dict[Tuple[int, int], Tuple[int, ...]] = {}
        self.colours: Dict[Hashable, Any] = {}  # what programs of one shape share (see collapse.py)

    def algorithms_of(self, kind: str, group: Group) -> Tuple[Algorithm, ...]:
        """All ways to run a collective of this kind over this group."""
        key = (kind, group)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = tuple(self._build(kind, group))
        return found

    def best(self, kind: str, group: Group, size_bytes: float) -> Algorithm:
        """The fastest algorithm for ``size_bytes``."""
        return min(self.algorithms_of(kind, group), key=lambda a: a.latency_s + size_bytes * a.seconds_per_byte)

    def path(self, a: int, b: int) -> Tuple[int, ...]:
        """Numbers of the links from device ``a`` to ``b``."""
        key = (a, b)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = tuple(self._number(name) for name in self.cluster.path(a, b))
        return found

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.link_names)
            self.link_names.append(name)
            self.bandwidths.append(self.cluster.resource(name).bandwidth_bytes_per_s)
        return self._numbers[name]

    # ---- algorithms --------------------------------------------------------------------------------------------------

    def _build(self, kind: str, group: Group) -> List[Algorithm]:
        if kind == HOST_COPY:
            link = host_link(self.cluster, group.devices[0])
            return [Algorithm("copy", link.latency_s, 1.0 / link.bandwidth_bytes_per_s, ())]
        if kind == SEND_RECV:
            return [self._send_recv(group)]
        if kind == ALL_TO_ALL:
            return [self._all_to_all(group)]
        count = len(group.devices)
        step = self._latency(group.devices)
        if kind in (ALL_GATHER, REDUCE_SCATTER):
            loads = self._scaled(self._ring(group.devices), (count - 1) / count)
            more = self._hierarchical(kind, group, 1) if "hierarchical" in self.algorithms else []
            return [*self._flat(kind, "ring", (count - 1) * step, loads), *more]
        found = []
        for name in self.algorithms:
            if name == "ring":
                loads = self._scaled(self._ring(group.devices), 2.0 * (count - 1) / count)
                found += self._flat(kind, name, 2 * (count - 1) * step, loads)
            elif name == "tree":
                # reduce up and broadcast down a binary tree; two complementary trees keep every link busy in both directions
                loads = self._scaled(self._ring(group.devices), 2.0)
                found += self._flat(kind, name, 2 * math.ceil(math.log(count, 2)) * step, loads)
            else:
                found += self._hierarchical(kind, group, 2)
        if not found:
            raise ConfigError("no collective algorithm is allowed; add 'ring' to algorithms")
        return found

    def _flat(self, kind: str, name: str, hops_s: float, loads: Mapping[int, float]) -> List[Algorithm]:
        """A ring or tree whose hops take ``hops_s``, under each protocol."""
        return [self._algorithm(kind, f"{name}, {one.name}" if one.name else name, one.start_s + one.hop * hops_s,
                                self._scaled(loads, 1.0 / one.bandwidth)) for one in self.protocols]

    def _algorithm(self, kind: str, name: str, latency_s: float, loads: Mapping[int, float]) -> Algorithm:
        worst = max((load / self.bandwidths[link] for link, load in loads.items()), default=0.0)
        return Algorithm(name, latency_s, worst * self.correction.get(kind, 1.0), tuple(sorted(loads.items())))

    def _latency(self, devices: Sequence[int]) -> float:
        """Latency of one step of a ring over the group: the slowest hop between neighbours."""
        nodes = self._by_node(devices)
        hops: List[Tuple[int, int]] = []
        for members in nodes:
            lanes = self._lanes(members) if len(members) > 1 else {}
            hops += list(lanes) or list(zip(members, members[1:]))
            if not lanes and len(nodes) == 1:
                hops.append((members[-1], members[0]))
        if len(nodes) > 1:
            hops += [(here[-1], there[0]) for here, there in zip(nodes, nodes[1:] + nodes[:1])]
        return max(self.cluster.link(a, b).latency_s for a, b in hops)

    def _by_node(self, devices: Iterable[int]) -> List[List[int]]:
        nodes: Dict[int, List[int]] = {}
        for device in sorted(devices):
            nodes.setdefault(self.cluster.devices[device].node, []).append(device)
        return [nodes[node] for node in sorted(nodes)]

    def _ring(self, devices: Sequence[int]) -> Dict[int, float]:
        """Loads if every member passes one byte to the next, inside nodes and between them."""
        nodes = self._by_node(devices)
        loads: Dict[int, float] = {}
        for members in nodes:
            if len(members) > 1:
                self._add(loads, self._inside(members, closed=len(nodes) == 1))
        if len(nodes) > 1:
            for here, there in zip(nodes, nodes[1:] + nodes[:1]):
                self._add(loads, self._between(here, there))
        return loads

    def _inside(self, members: List[int], closed: bool) -> Dict[int, float]:
        """Loads of one byte from each member to the next within a node.

        If there are direct NVLink lanes, a member spreads its byte over all its lanes into the group (NCCL runs several rings);
        otherwise the byte takes the path to the next member.
        """
        lanes = self._lanes(members)
        loads: Dict[int, float] = {}
        if lanes:
            for a in members:
                out = {link for (x, _), path in lanes.items() if x == a for link in path[:1]}
                total = sum(self.bandwidths[link] for link in out)
                for link in out:
                    loads[link] = self.bandwidths[link] / total
            return loads
        ends = members[1:] + members[:1] if closed else members[1:]
        for a, b in zip(members, ends):
            self._add(loads, dict.fromkeys(self.path(a, b), 1.0))
        return loads

    def _lanes(self, members: List[int]) -> Dict[Tuple[int, int], Tuple[int, ...]]:
        """Direct NVLink paths between members, if they connect all of them; else none."""
        lanes = {(a, b): self.path(a, b) for a in members for b in members if a != b and self.cluster.link(a, b).name == "nvlink"}
        return lanes if connected(members, lanes) else {}

    def _between(self, here: List[int], there: List[int]) -> Dict[int, float]:
        """Loads of one byte from a node to the next, over as many adapters as the members at both ends use."""
        channels: Dict[Tuple[str, ...], Tuple[int, int]] = {}
        for number, a in enumerate(reversed(here)):
            b = there[number % len(there)]
            nics = tuple(name for name in self.cluster.path(a, b) if "nic" in name)
            channels.setdefault(nics, (a, b))
        loads: Dict[int, float] = {}
        for a, b in channels.values():
            path = self.path(a, b)
            if self.near_adapters:
                path = tuple(link for link in path if not is_shared_by_sockets(self.link_names[link]))
            self._add(loads, dict.fromkeys(path, 1.0 / len(channels)))
        return loads

    def _hierarchical(self, kind: str, group: Group, passes: int) -> List[Algorithm]:
        """An all-reduce makes two passes: a reduce-scatter inside the nodes, an all-reduce of the parts between nodes, and an
        all-gather inside.  A reduce-scatter or all-gather is one half of that."""
        nodes = self._by_node(group.devices)
        size = len(nodes[0])
        if len(nodes) < 2 or size < 2 or any(len(members) != size for members in nodes):
            return []
        loads: Dict[int, float] = {}
        for members in nodes:
            self._add(loads, self._scaled(self._inside(members, closed=True), passes * (size - 1) / size))
        across = passes * (len(nodes) - 1) / len(nodes)
        for here, there in zip(nodes, nodes[1:] + nodes[:1]):
            for a, b in zip(here, there):
                self._add(loads, dict.fromkeys(self.path(a, b), across / size))
        between_s = (len(nodes) - 1) * self._latency([members[0] for members in nodes])
        latency = passes * ((size - 1) * max(map(self._latency, nodes)) + between_s)
        return [self._algorithm(kind, "hierarchical", latency, loads)]

    def _all_to_all(self, group: Group) -> Algorithm:
        """Every member sends one ``1 / n`` part of its byte to each other member."""
        count = len(group.devices)
        loads: Dict[int, float] = {}
        nodes = self._by_node(group.devices)
        for number, members in enumerate(nodes):
            for a in members:
                for b in members:
                    if a != b:
                        self._add(loads, dict.fromkeys(self.path(a, b), 1.0 / count))
                if len(nodes) > 1:  # whatever the other end is, bytes leave and enter a node on the same path
                    away = nodes[1 - number if number < 2 else 0][0]
                    share = (count - len(members)) / count
                    ends = [link for path in (self.path(a, away), self.path(away, a)) for link in path]
                    mine = f"node{self.cluster.devices[a].node}/"
                    own = [link for link in ends if self.link_names[link].startswith(mine)]
                    self._add(loads, dict.fromkeys(own, share))
        return self._algorithm(ALL_TO_ALL, "pairwise", (count - 1) * self._latency(group.devices), loads)

    def _send_recv(self, group: Group) -> Algorithm:
        """The pairs have fractions of the whole tensor, so loads are per byte of the whole tensor."""
        loads: Dict[int, float] = {}
        for sender, receiver, fraction in group.pairs:
            self._add(loads, dict.fromkeys(self.path(sender, receiver), fraction))
        latency = max(self.cluster.link(sender, receiver).latency_s for sender, receiver, _ in group.pairs)
        return self._algorithm(SEND_RECV, "direct", latency, loads)

    @staticmethod
    def _add(loads: Dict[int, float], more: Mapping[int, float]) -> None:
        for link, load in more.items():
            loads[link] = loads.get(link, 0.0) + load

    @staticmethod
    def _scaled(loads: Mapping[int, float], factor: float) -> Dict[int, float]:
        return {link: load * factor for link, load in loads.items()}


def is_shared_by_sockets(link: str) -> bool:
    """Whether a link of a node connects its sockets with each other or with PCIe switches."""
    return "/qpi/" in link or "/pcie-switch" in link


def host_link(cluster: Cluster, device: int) -> Link:
    """The link between a device's memory and its host's.

    Raises:
        ClusterError: the cluster's description has no link to the host.
    """
    links = cluster.description.nodes[cluster.devices[device].node].links
    if links.pcie is not None:
        return links.pcie.link("pcie")
    if links.local is not None:
        return links.local.link("local")
    raise ClusterError(
        f"cluster {cluster.name!r} has no link between device {device} and its host, which offloading needs; add "
        '"pcie": {"bandwidth_gbytes_per_s": 12} to its node\'s links')


def fair_share(bandwidth: float, demands: Sequence[Tuple[float, int]]) -> float:
    """The largest rate that any communication gets on a link, by water filling.

    ``demands``: (bytes per second that a communication would take alone, number of such communications).  Those below the
    level get what they want, and the others get the level each.  The link is never overloaded, and never idle while a
    communication waits.  Returns infinity if everything fits.
    """
    if sum([demand * number for demand, number in demands]) <= bandwidth:
        return float("inf")
    left, count = bandwidth, sum(number for _, number in demands)
    for demand, number in sorted(demands):
        if demand * count <= left * (1.0 + 1e-12):
            left -= demand * number
            count -= number
        else:
            return left / count
    return float("inf")
