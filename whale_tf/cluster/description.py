"""The cluster description: the JSON format (docs/cluster.md), validated."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from whale_tf.cluster import hardware
from whale_tf.cluster.devices import PRECISIONS, Link
from whale_tf.documents import Record, expectations, field

BANDWIDTH_UNITS: Mapping[str, float] = {
    "bandwidth_bytes_per_s": 1.0, "bandwidth_gbytes_per_s": 1e9, "bandwidth_gbits_per_s": 1e9 / 8}
LATENCY_UNITS: Mapping[str, float] = {"latency_s": 1.0, "latency_us": 1e-6}
MEMORY_UNITS: Mapping[str, float] = {"memory_bytes": 1.0, "memory_gib": float(1 << 30)}


def _one_unit(values: Dict[str, Any], units: Mapping[str, float], default: Optional[float] = None) -> None:
    """Converts the given unit to the canonical one (the first of ``units``), in place."""
    given = [unit for unit in units if unit in values]
    canonical = next(iter(units))
    if len(given) > 1:
        raise ValueError("{} mean the same; keep one".format(" and ".join(given)))
    if not given:
        if default is None:
            raise ValueError("needs one of {}".format(", ".join(units)))
        values[canonical] = default
        return
    value = values.pop(given[0])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{given[0]} is {value!r}, expected a number")
    if value < 0:
        raise ValueError(f"{given[0]} is {value!r}, expected a positive number")
    values[canonical] = value * units[given[0]]


@dataclass(frozen=True)
class LinkDescription(Record):
    """``{"bandwidth_gbits_per_s": 50, "latency_us": 10}``; bandwidth in one of three units, latency optional."""

    bandwidth_bytes_per_s: float = field(above=0, finite=True)
    latency_s: float = field(at_least=0, finite=True)

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        _one_unit(values, BANDWIDTH_UNITS)
        _one_unit(values, LATENCY_UNITS, cls.default_latency_s())
        return values

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.PCIE_LATENCY_S

    def link(self, name: str) -> Link:
        return Link(self.bandwidth_bytes_per_s, self.latency_s, name)


@dataclass(frozen=True)
class LocalDescription(LinkDescription):
    """Copies between devices of one process through main memory, shared by all of a node's CPU devices."""

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.LOCAL_LATENCY_S


@dataclass(frozen=True)
class NvlinkDescription(LinkDescription):
    """With ``lanes`` (``[[device, device, count], ...]``): a direct mesh, bandwidth per lane.  Without: every device
    has one port of this bandwidth into a switch (NVSwitch)."""

    lanes: Optional[Tuple[Tuple[int, int, int], ...]] = None

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.NVLINK_LATENCY_S

    def check(self) -> None:
        for a, b, count in self.lanes or ():
            if a == b or min(a, b) < 0 or count < 1:
                raise ValueError(f"lane {[a, b, count]} is not [device, other device, count of at least 1]")


@dataclass(frozen=True)
class PcieDescription(LinkDescription):
    """``switches``: local device numbers under each PCIe switch; ``sockets``: switch numbers under each CPU socket.
    Devices under no switch are on socket 0.  ``uplink``: switch to socket (default: same as a device's link)."""

    switches: Tuple[Tuple[int, ...], ...] = ()
    sockets: Tuple[Tuple[int, ...], ...] = ()
    uplink: Optional[LinkDescription] = None
    socket_link: Optional[LinkDescription] = None

    def check(self) -> None:
        below = [device for switch in self.switches for device in switch]
        if len(below) != len(set(below)):
            raise ValueError(f"a device is under two switches: {[list(row) for row in self.switches]}")
        numbers = sorted(switch for socket in self.sockets for switch in socket)
        if self.sockets and numbers != list(range(len(self.switches))):
            raise ValueError(f"sockets name switches {numbers}, expected each of 0..{len(self.switches) - 1} once")
        if len(self.sockets) > 1 and self.socket_link is None:
            raise ValueError(f'{len(self.sockets)} sockets need "socket_link": {{"bandwidth_gbytes_per_s": ...}}')


@dataclass(frozen=True)
class NicDescription(LinkDescription):
    """The node's network adapters: ``count`` of them, with this bandwidth each; devices are assigned to them in order."""

    count: int = field(1, at_least=1)

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.NIC_LATENCY_S


@dataclass(frozen=True)
class LinksDescription(Record):
    """The links between devices of one node.  A pair uses NVLink if available, else PCIe, else ``local``."""

    local: Optional[LocalDescription] = None
    nvlink: Optional[NvlinkDescription] = None
    pcie: Optional[PcieDescription] = None


@dataclass(frozen=True)
class DeviceTypeDescription(Record):
    """A user-defined device type, or a measured calibration of a known one (``base``: its name)."""

    kind: str = field("GPU", among=("CPU", "GPU"))
    memory_bytes: int = field(above=0)
    fp64: float = field(above=0, finite=True)
    fp32: float = field(above=0, finite=True)
    tf32: float = field(above=0, finite=True)
    fp16: float = field(above=0, finite=True)
    bf16: float = field(above=0, finite=True)
    memory_bandwidth_bytes_per_s: float = field(above=0, finite=True)
    fabric: str = field("pcie3", among=tuple(hardware.FABRICS))
    source: str = "cluster description"

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        base = values.pop("base", None)
        if base is not None:
            if not isinstance(base, str):
                raise ValueError(f"base is {base!r}, expected the name of a device type")
            row = hardware.device_type(base)
            known = {name: getattr(row, name) for name in expectations(cls) if name != "source"}
            if "memory_gib" in values:
                known.pop("memory_bytes")
            values = dict(known, **values)
        elif "fp32" in values:
            values = dict(dict.fromkeys(PRECISIONS, values["fp32"]), **values)
        _one_unit(values, MEMORY_UNITS)
        values["memory_bytes"] = int(values["memory_bytes"])
        return values

    def row(self, name: str) -> hardware.DeviceType:
        return hardware.DeviceType(name=name, **vars(self))


@dataclass(frozen=True)
class NodeDescription(Record):
    """One node: device types in order (``"V100-32GB"`` repeated), links and adapters."""

    devices: Tuple[str, ...] = field(not_empty=True)
    links: LinksDescription = LinksDescription()
    nic: Optional[NicDescription] = None

    def check(self) -> None:
        numbers: List[int] = []
        if self.links.nvlink is not None:
            numbers += [device for a, b, _ in self.links.nvlink.lanes or () for device in (a, b)]
        if self.links.pcie is not None:
            numbers += [device for switch in self.links.pcie.switches for device in switch]
        wrong = sorted({number for number in numbers if not 0 <= number < len(self.devices)})
        if wrong:
            raise ValueError(f"links name device {wrong[0]}, but the node has devices 0..{len(self.devices) - 1}")


@dataclass(frozen=True)
class ClusterDescription(Record):
    """The whole file."""

    name: str = "cluster"
    nodes: Tuple[NodeDescription, ...] = field(not_empty=True)
    device_types: Dict[str, DeviceTypeDescription] = field(factory=dict)

    def types(self) -> Dict[str, hardware.DeviceType]:
        return {name: body.row(name) for name, body in self.device_types.items()}


def part_of_node(node: NodeDescription, kept: Sequence[int]) -> NodeDescription:
    """The node with only the devices ``kept``; links are renumbered."""
    new = {old: number for number, old in enumerate(kept)}
    links = node.links
    if links.pcie is not None:
        switches = tuple(tuple(new[device] for device in row if device in new) for row in links.pcie.switches)
        links = replace(links, pcie=replace(links.pcie, switches=switches))
    if links.nvlink is not None and links.nvlink.lanes is not None:
        lanes = tuple((new[a], new[b], count) for a, b, count in links.nvlink.lanes if a in new and b in new)
        links = replace(links, nvlink=replace(links.nvlink, lanes=lanes))
    return replace(node, devices=tuple(node.devices[old] for old in kept), links=links)
