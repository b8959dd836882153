"""The usual links of a node, for short forms and ``"links": "default"``."""
from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional, Sequence

from whale_tf.cluster import hardware
from whale_tf.cluster.description import (
    ClusterDescription,
    DeviceTypeDescription,
    LinksDescription,
    NicDescription,
    NodeDescription,
)
from whale_tf.cluster.devices import Link
from whale_tf.documents import read


def gbits(bandwidth_gbits_per_s: float, count: int = 1, latency_s: float = hardware.NIC_LATENCY_S) -> NicDescription:
    """Adapters of a node by their nominal rate, e.g. ``gbits(100)`` for one of 100 Gbit/s."""
    return read(NicDescription, {"bandwidth_gbits_per_s": bandwidth_gbits_per_s, "count": count, "latency_s": latency_s})


def _plain(link: Link) -> Dict[str, Any]:
    return {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}


def default_links(rows: Sequence[hardware.DeviceType]) -> LinksDescription:
    """The usual links of a node with these devices: its devices' fabric, two GPUs per PCIe switch, half of the
    switches on each of two sockets (nodes of up to two GPUs: one socket)."""
    gpus = [number for number, row in enumerate(rows) if row.kind == "GPU"]
    parts: Dict[str, Any] = {}
    if len(gpus) < len(rows):
        parts["local"] = _plain(hardware.FABRICS["cpu"].local)  # type: ignore[arg-type]  # the table has it
    if gpus:
        fabrics = [hardware.FABRICS[rows[number].fabric] for number in gpus]
        slowest = min(fabrics, key=lambda fabric: fabric.pcie.bandwidth_bytes_per_s)  # type: ignore[union-attr]
        parts["pcie"] = _default_pcie(gpus, slowest)
        if all(fabric.nvlink is not None for fabric in fabrics) and len(gpus) > 1:
            parts["nvlink"] = _default_nvlink(gpus, min(fabrics, key=lambda f: f.lanes))
    return read(LinksDescription, parts)


def _default_pcie(gpus: Sequence[int], fabric: hardware.Fabric) -> Dict[str, Any]:
    switches = [list(gpus[start:start + 2]) for start in range(0, len(gpus), 2)]
    half = math.ceil(len(switches) / 2)
    sockets = [list(range(half)), list(range(half, len(switches)))] if len(switches) > 1 else [[0]]
    parts = dict(_plain(fabric.pcie), switches=switches, sockets=sockets)  # type: ignore[arg-type]
    parts["uplink"] = _plain(fabric.uplink)  # type: ignore[arg-type]
    parts["socket_link"] = _plain(fabric.socket_link)  # type: ignore[arg-type]
    return parts


def _default_nvlink(gpus: Sequence[int], fabric: hardware.Fabric) -> Dict[str, Any]:
    lane = fabric.nvlink
    assert lane is not None
    if fabric.switched or len(gpus) > 8:
        return {"bandwidth_bytes_per_s": lane.bandwidth_bytes_per_s * fabric.lanes, "latency_s": lane.latency_s}
    lanes = [[gpus[a], gpus[b], count] for a, b, count in hardware.CUBE_MESH if max(a, b) < len(gpus)]
    return dict(_plain(lane), lanes=lanes)


def node(types: Sequence[str], nic: Optional[NicDescription] = None, links: Optional[LinksDescription] = None,
         own: Optional[Mapping[str, hardware.DeviceType]] = None) -> NodeDescription:
    """A node of these device types with its usual links (or the given ones)."""
    rows = [hardware.device_type(name, own) for name in types]
    return NodeDescription(devices=tuple(row.name for row in rows), nic=nic,
                           links=default_links(rows) if links is None else links)


def default_nic(types: Sequence[str], own: Optional[Mapping[str, hardware.DeviceType]] = None) -> NicDescription:
    """The adapter that short forms assume: 50 Gbit/s for GPU nodes (Whale section 5), 10 Gbit/s for CPU nodes."""
    gpu = any(hardware.device_type(name, own).kind == "GPU" for name in types)
    return gbits(hardware.DEFAULT_GPU_NIC_GBITS_PER_S if gpu else hardware.DEFAULT_CPU_NIC_GBITS_PER_S)


def default_cluster(types_of_nodes: Sequence[Sequence[str]], name: str,
                    device_types: Optional[Mapping[str, DeviceTypeDescription]] = None) -> ClusterDescription:
    """Nodes of these types with their usual links and, if there are several nodes, their usual adapter."""
    several = len(types_of_nodes) > 1
    own = {key: body.row(key) for key, body in (device_types or {}).items()}
    nodes = tuple(node(types, default_nic(types, own) if several else None, own=own) for types in types_of_nodes)
    return ClusterDescription(name=name, nodes=nodes, device_types=dict(device_types or {}))
