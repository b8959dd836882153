"""The cluster description: the JSON format (docs/cluster.md), validated."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from whale_tf.cluster import hardware
from whale_tf.cluster.devices import PRECISIONS, Link

BANDWIDTH_UNITS: Mapping[str, float] = {
    "bandwidth_bytes_per_s": 1.0, "bandwidth_gbytes_per_s": 1e9, "bandwidth_gbits_per_s": 1e9 / 8}
LATENCY_UNITS: Mapping[str, float] = {"latency_s": 1.0, "latency_us": 1e-6}
MEMORY_UNITS: Mapping[str, float] = {"memory_bytes": 1.0, "memory_gib": float(1 << 30)}


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, at any depth."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        return {key: _frozen(value) for key, value in values.items()} if isinstance(values, dict) else values


def _one_unit(values: Dict[str, Any], units: Mapping[str, float], default: Optional[float] = None) -> None:
    """Replaces the spelling that was used by the canonical one (the first of ``units``), in place."""
    given = [unit for unit in units if unit in values]
    canonical = next(iter(units))
    if len(given) > 1:
        raise ValueError("{} say the same thing; keep one".format(" and ".join(given)))
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


class LinkDescription(_Part):
    """``{"bandwidth_gbits_per_s": 50, "latency_us": 10}``; bandwidth in one of three units, latency optional."""

    bandwidth_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    latency_s: float = Field(ge=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _units(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        _one_unit(values, BANDWIDTH_UNITS)
        _one_unit(values, LATENCY_UNITS, cls.default_latency_s())
        return values

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.PCIE_LATENCY_S

    def link(self, name: str) -> Link:
        return Link(self.bandwidth_bytes_per_s, self.latency_s, name)


class LocalDescription(LinkDescription):
    """Copies between devices of one process, through main memory; all of a node's CPU devices share it."""

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.LOCAL_LATENCY_S


class NvlinkDescription(LinkDescription):
    """With ``lanes`` (``[[device, device, count], ...]``): a direct mesh, bandwidth of one lane.  Without: every device
    has one port of this bandwidth into a switch (NVSwitch)."""

    lanes: Optional[Tuple[Tuple[int, int, int], ...]] = None

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.NVLINK_LATENCY_S

    @field_validator("lanes")
    @classmethod
    def _legal_lanes(cls, lanes: Optional[Tuple[Tuple[int, int, int], ...]]) -> Any:
        for a, b, count in lanes or ():
            if a == b or min(a, b) < 0 or count < 1:
                raise ValueError(f"lane {[a, b, count]} is not [device, other device, count of at least 1]")
        return lanes


class PcieDescription(LinkDescription):
    """``switches``: local device numbers under each PCIe switch; ``sockets``: switch numbers under each CPU socket.
    Devices under no switch sit at socket 0.  ``uplink``: switch to socket (default: as a device's own link)."""

    switches: Tuple[Tuple[int, ...], ...] = ()
    sockets: Tuple[Tuple[int, ...], ...] = ()
    uplink: Optional[LinkDescription] = None
    socket_link: Optional[LinkDescription] = None

    @model_validator(mode="after")
    def _consistent(self) -> PcieDescription:
        below = [device for switch in self.switches for device in switch]
        if len(below) != len(set(below)):
            raise ValueError(f"a device is under two switches: {[list(row) for row in self.switches]}")
        numbers = sorted(switch for socket in self.sockets for switch in socket)
        if self.sockets and numbers != list(range(len(self.switches))):
            raise ValueError(f"sockets name switches {numbers}, expected each of 0..{len(self.switches) - 1} once")
        if len(self.sockets) > 1 and self.socket_link is None:
            raise ValueError(f'{len(self.sockets)} sockets need "socket_link": {{"bandwidth_gbytes_per_s": ...}}')
        return self


class NicDescription(LinkDescription):
    """The node's network adapters: ``count`` of them, this bandwidth each; devices are dealt to them in order."""

    count: int = Field(1, ge=1)

    @classmethod
    def default_latency_s(cls) -> float:
        return hardware.NIC_LATENCY_S


class LinksDescription(_Part):
    """The ways between devices of one node.  A pair uses NVLink where it has it, else PCIe, else ``local``."""

    local: Optional[LocalDescription] = None
    nvlink: Optional[NvlinkDescription] = None
    pcie: Optional[PcieDescription] = None


class DeviceTypeDescription(_Part):
    """A device type of the user's own, or a measured calibration of a known one (``base``: its name)."""

    kind: str = "GPU"
    memory_bytes: int = Field(gt=0)
    fp64: float = Field(gt=0, allow_inf_nan=False)
    fp32: float = Field(gt=0, allow_inf_nan=False)
    tf32: float = Field(gt=0, allow_inf_nan=False)
    fp16: float = Field(gt=0, allow_inf_nan=False)
    bf16: float = Field(gt=0, allow_inf_nan=False)
    memory_bandwidth_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    fabric: str = "pcie3"
    source: str = "cluster description"

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        base = values.pop("base", None)
        if base is not None:
            row = hardware.device_type(base)
            known = {name: getattr(row, name) for name in cls.model_fields if name != "source"}
            if "memory_gib" in values:
                known.pop("memory_bytes")
            values = dict(known, **values)
        elif "fp32" in values:
            values = dict(dict.fromkeys(PRECISIONS, values["fp32"]), **values)
        _one_unit(values, MEMORY_UNITS)
        values["memory_bytes"] = int(values["memory_bytes"])
        return values

    @model_validator(mode="after")
    def _known_names(self) -> DeviceTypeDescription:
        if self.kind not in ("CPU", "GPU"):
            raise ValueError(f"kind is {self.kind!r}, expected 'CPU' or 'GPU'")
        if self.fabric not in hardware.FABRICS:
            raise ValueError("fabric is {!r}, expected one of {}".format(
                self.fabric, ", ".join(sorted(hardware.FABRICS))))
        return self

    def row(self, name: str) -> hardware.DeviceType:
        return hardware.DeviceType(name=name, **self.model_dump())


class NodeDescription(_Part):
    """One node: device types in order (``"V100-32GB"`` repeated), links and adapters."""

    devices: Tuple[str, ...] = Field(min_length=1)
    links: LinksDescription = LinksDescription()
    nic: Optional[NicDescription] = None

    @model_validator(mode="after")
    def _numbers_in_range(self) -> NodeDescription:
        numbers: List[int] = []
        if self.links.nvlink is not None:
            numbers += [device for a, b, _ in self.links.nvlink.lanes or () for device in (a, b)]
        if self.links.pcie is not None:
            numbers += [device for switch in self.links.pcie.switches for device in switch]
        wrong = sorted({number for number in numbers if not 0 <= number < len(self.devices)})
        if wrong:
            raise ValueError(f"links name device {wrong[0]}, but the node has devices 0..{len(self.devices) - 1}")
        return self


class ClusterDescription(_Part):
    """The whole file."""

    name: str = "cluster"
    nodes: Tuple[NodeDescription, ...] = Field(min_length=1)
    device_types: Dict[str, DeviceTypeDescription] = {}

    def types(self) -> Dict[str, hardware.DeviceType]:
        return {name: body.row(name) for name, body in self.device_types.items()}


def part_of_node(node: NodeDescription, kept: Sequence[int]) -> NodeDescription:
    """The node with only the devices ``kept``; links renumbered."""
    new = {old: number for number, old in enumerate(kept)}
    links = node.links
    if links.pcie is not None:
        switches = tuple(tuple(new[device] for device in row if device in new) for row in links.pcie.switches)
        links = links.model_copy(update={"pcie": links.pcie.model_copy(update={"switches": switches})})
    if links.nvlink is not None and links.nvlink.lanes is not None:
        lanes = tuple((new[a], new[b], count) for a, b, count in links.nvlink.lanes if a in new and b in new)
        links = links.model_copy(update={"nvlink": links.nvlink.model_copy(update={"lanes": lanes})})
    return node.model_copy(update={"devices": tuple(node.devices[old] for old in kept), "links": links})
