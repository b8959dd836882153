"""Paths between devices: every physical link is a named resource, and a path is the list of resources it uses.

Links are full duplex, so each direction is a separate resource.  A node with two GPUs per PCIe switch::

    node0/device0 --pcie-out-> switch0 --up-> socket0 --qpi/0>1-> socket1 --down-> switch2 --pcie-in-> device4
                                                 |
                                                 +--nic0/out-> (network) --node1/nic0/in-> ...

NVLink is either a mesh (``node0/nvlink/0>3``, the lanes from device 0 to device 3) or a port of each device into a
switch (``node0/device0/nvlink-out``, ``node0/device3/nvlink-in``).
"""
from __future__ import annotations

from typing import Container, Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster.description import NodeDescription, PcieDescription
from whale_tf.cluster.devices import Link
from whale_tf.errors import ClusterError

SELF = Link(float("inf"), 0.0, "self")


class Resource(NamedTuple):
    """One direction of one physical link of a node; ``name`` is relative to the node."""

    name: str
    link: Link


Path = Tuple[Resource, ...]


def slowest(path: Sequence[Resource]) -> Link:
    """The path as one link: its smallest bandwidth and its largest latency (messages are cut through, not stored at each
    hop)."""
    if not path:
        return SELF
    narrow = min(path, key=lambda resource: resource.link.bandwidth_bytes_per_s).link
    return Link(narrow.bandwidth_bytes_per_s, max(resource.link.latency_s for resource in path), narrow.name)


class NodeTopology:
    """Paths inside one node and from its devices to its network adapters.  One instance serves all equal nodes."""

    def __init__(self, node: NodeDescription, kinds: Sequence[str]) -> None:
        """``kinds``: ``"CPU"`` or ``"GPU"`` per device."""
        self.node = node
        self.kinds = tuple(kinds)
        size = len(node.devices)
        self._lanes = self._lane_links()
        self.paths: Dict[Tuple[int, int], Path] = {}
        for a in range(size):
            for b in range(size):
                if a != b:
                    self.paths[a, b] = self._path(a, b)
        self.links: Dict[Tuple[int, int], Link] = {pair: slowest(path) for pair, path in self.paths.items()}
        self.out = tuple(self._to_nic(device, out=True) for device in range(size))
        self.into = tuple(self._to_nic(device, out=False) for device in range(size))
        self.out_links = tuple(slowest(path) for path in self.out)
        self.into_links = tuple(slowest(path) for path in self.into)

    def nic_of(self, device: int) -> int:
        """The adapter used by device number ``device``: devices of each kind are assigned to the adapters in order."""
        assert self.node.nic is not None
        alike = [number for number, kind in enumerate(self.kinds) if kind == self.kinds[device]]
        return alike.index(device) * self.node.nic.count // len(alike)

    def group_link(self, group: Sequence[int]) -> Link:
        """The link of a ring over ``group`` (local numbers, at least two).

        On an NVLink mesh, each member can use all its lanes to other members at once (NCCL builds several rings), so the
        member with the fewest lanes is the bottleneck; otherwise it is the slowest pair of ring neighbours.
        """
        members = sorted(group)
        if self._lanes and connected(members, self._lanes):
            ports = [sum(self._lanes[a, b].bandwidth_bytes_per_s for b in members if (a, b) in self._lanes) for a in members]
            assert self.node.links.nvlink is not None
            return Link(min(ports), self.node.links.nvlink.latency_s, "nvlink")
        pairs = list(zip(members, members[1:] + members[:1]))
        usable = [self._without_lanes(a, b) if self._lanes else self.paths[a, b] for a, b in pairs]
        return slowest([resource for path in usable for resource in path])

    def resources(self) -> Dict[str, Link]:
        """All resources of the node by name."""
        every = list(self.paths.values()) + list(self.out) + list(self.into)
        return {resource.name: resource.link for path in every for resource in path}

    # ---- construction ----------------------------------------------------------------------------------------------

    def _lane_links(self) -> Dict[Tuple[int, int], Link]:
        nvlink = self.node.links.nvlink
        lanes: Dict[Tuple[int, int], Link] = {}
        for a, b, count in (nvlink.lanes or ()) if nvlink is not None else ():
            assert nvlink is not None
            link = Link(nvlink.bandwidth_bytes_per_s * count, nvlink.latency_s, "nvlink")
            lanes[a, b] = lanes[b, a] = link
        return lanes

    def _path(self, a: int, b: int) -> Path:
        nvlink = self.node.links.nvlink
        if (a, b) in self._lanes:
            return (Resource(f"nvlink/{a}>{b}", self._lanes[a, b]),)
        if nvlink is not None and nvlink.lanes is None and self._is_gpu(a) and self._is_gpu(b):
            port = nvlink.link("nvlink")
            return (Resource(f"device{a}/nvlink-out", port), Resource(f"device{b}/nvlink-in", port))
        return self._without_lanes(a, b)

    def _without_lanes(self, a: int, b: int) -> Path:
        links = self.node.links
        if links.local is not None and (links.pcie is None or not (self._is_gpu(a) or self._is_gpu(b))):
            return (Resource("local", links.local.link("local")),)
        if links.pcie is not None:
            return _pcie_path(links.pcie, a, b)
        raise ClusterError(
            "no link between devices {} and {} of a node with {}; add lanes between them, or "
            '"pcie": {{"bandwidth_gbytes_per_s": 12}}, or "links": "default"'.format(
                a, b, ", ".join(self.node.devices)))

    def _is_gpu(self, device: int) -> bool:
        return self.kinds[device] == "GPU"

    def _to_nic(self, device: int, out: bool) -> Path:
        if self.node.nic is None:
            return ()
        nic = Resource("nic{}/{}".format(self.nic_of(device), "out" if out else "in"), self.node.nic.link("nic"))
        if self.node.links.pcie is None or not self._is_gpu(device):
            return (nic,)
        inside = _pcie_to_nic(self.node.links.pcie, device, self._nic_socket(device), out)
        return inside + (nic,) if out else (nic,) + inside

    def _nic_socket(self, device: int) -> int:
        """A single adapter is on socket 0; several are on the sockets of the devices they serve."""
        assert self.node.nic is not None and self.node.links.pcie is not None
        return 0 if self.node.nic.count == 1 else _place(self.node.links.pcie, device)[1]


def _place(pcie: PcieDescription, device: int) -> Tuple[Optional[int], int]:
    """The (switch, socket) of a device."""
    for number, members in enumerate(pcie.switches):
        if device in members:
            for socket, switches in enumerate(pcie.sockets):
                if number in switches:
                    return number, socket
            return number, 0
    return None, 0


def _half(pcie: PcieDescription, device: int, out: bool) -> List[Resource]:
    """The path from a device to its socket, or back."""
    switch, _ = _place(pcie, device)
    steps = [Resource("device{}/pcie-{}".format(device, "out" if out else "in"), pcie.link("pcie"))]
    if switch is not None:
        uplink = (pcie.uplink or pcie).link("pcie")
        steps.append(Resource("pcie-switch{}/{}".format(switch, "up" if out else "down"), uplink))
    return steps if out else steps[::-1]


def _between_sockets(pcie: PcieDescription, a: int, b: int) -> List[Resource]:
    if a == b:
        return []
    assert pcie.socket_link is not None
    return [Resource(f"qpi/{a}>{b}", pcie.socket_link.link("qpi"))]


def _pcie_path(pcie: PcieDescription, a: int, b: int) -> Path:
    switch_a, socket_a = _place(pcie, a)
    switch_b, socket_b = _place(pcie, b)
    out, into = _half(pcie, a, out=True), _half(pcie, b, out=False)
    if switch_a is not None and switch_a == switch_b:
        return (out[0], into[-1])  # stays within the switch, does not reach the socket
    return tuple(out + _between_sockets(pcie, socket_a, socket_b) + into)


def _pcie_to_nic(pcie: PcieDescription, device: int, nic_socket: int, out: bool) -> Path:
    socket = _place(pcie, device)[1]
    if out:
        return tuple(_half(pcie, device, out=True) + _between_sockets(pcie, socket, nic_socket))
    return tuple(_between_sockets(pcie, nic_socket, socket) + _half(pcie, device, out=False))


def connected(members: Sequence[int], lanes: Container[Tuple[int, int]]) -> bool:
    """Whether the lanes between ``members`` connect them all."""
    reached, frontier = {members[0]}, [members[0]]
    while frontier:
        a = frontier.pop()
        new = [b for b in members if b not in reached and (a, b) in lanes]
        reached.update(new)
        frontier += new
    return len(reached) == len(members)
