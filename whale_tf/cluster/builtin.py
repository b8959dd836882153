"""Named clusters: the papers' testbeds, and families of any size.

``NAME`` has the size used in the paper; ``NAME:N`` has N devices in all (whole nodes, or a part of one node).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster.defaults import gbits, node
from whale_tf.cluster.description import ClusterDescription, LinksDescription, NicDescription, NodeDescription, part_of_node
from whale_tf.cluster.reading import MAX_DEVICES, at_most
from whale_tf.documents import read
from whale_tf.errors import ClusterError

ROCE_LATENCY_S = 5e-6  # RDMA network, including a switch hop


class Builtin(NamedTuple):
    """``nodes(n)`` returns the first n nodes in the paper's order; ``size`` is the paper's number of nodes."""

    nodes: Callable[[int], Sequence[NodeDescription]]
    size: int
    source: str


def _uniform(type_name: str, per_node: int, nic: Optional[NicDescription],
             links: Optional[LinksDescription] = None) -> Callable[[int], Sequence[NodeDescription]]:
    return lambda count: [node([type_name] * per_node, nic, links)] * count


def _fixed(*nodes: NodeDescription) -> Callable[[int], Sequence[NodeDescription]]:
    return lambda count: nodes[:count]


def _ports(gbits_per_s: float) -> LinksDescription:
    """The same rate between every pair in a node, as in AMP's bandwidth matrices."""
    return read(LinksDescription, {"pcie": {"bandwidth_gbits_per_s": gbits_per_s}} if gbits_per_s <= 100 else {
        "nvlink": {"bandwidth_gbits_per_s": gbits_per_s}, "pcie": {"bandwidth_gbytes_per_s": 12}})


def _old_pcie_links(count: int) -> LinksDescription:
    """PCIe 3 with two GPUs per switch and a Broadwell-era link between the sockets (NCCL: BDW_QPI_BW 6 GB/s)."""
    links = node(["TitanXp"] * count).links
    assert links.pcie is not None and links.pcie.socket_link is not None
    slow = replace(links.pcie.socket_link, bandwidth_bytes_per_s=6e9)
    return replace(links, pcie=replace(links.pcie, socket_link=slow))


_G4DN = node(["T4"] * 4, gbits(50), _ports(50))
_P3 = node(["V100-16GB"] * 4, gbits(10), _ports(170))

BUILTIN: Mapping[str, Builtin] = {
    "hc1": Builtin(_uniform("TitanXp", 8, None, _old_pcie_links(8)), 1, "Proteus Table III: 1 node, 8 TitanXp, PCIe"),
    "hc2": Builtin(_uniform("V100-32GB", 8, gbits(100, latency_s=ROCE_LATENCY_S)), 4,
                   "Proteus Table III: 4 nodes, 8 V100, NVLink, 100 Gbps (memory not stated, 32 GB assumed)"),
    "hc3": Builtin(_uniform("A100-40GB", 8, gbits(200, latency_s=ROCE_LATENCY_S)), 2,
                   "Proteus Table III: 2 nodes, 8 A100, NVLink, 200 Gbps (memory not stated, 40 GB assumed)"),
    "dapple-a": Builtin(_uniform("V100-16GB", 8, gbits(25)), 2,
                        "DAPPLE Table III, config A: 8 V100 (16 GB), NVLink, 25 Gbps"),
    "dapple-b": Builtin(_uniform("V100-16GB", 1, gbits(25)), 16,
                        "DAPPLE Table III, config B: 1 V100 (16 GB), 25 Gbps"),
    "dapple-c": Builtin(_uniform("V100-16GB", 1, gbits(10)), 16,
                        "DAPPLE Table III, config C: 1 V100 (16 GB), 10 Gbps"),
    "amp-homogeneous": Builtin(_fixed(*[_G4DN] * 4), 4,
                               "AMP section 4.3: 4 g4dn.12xlarge, 4 T4 each, 50 Gbps PCIe, 50 Gbps between nodes"),
    "amp-het": Builtin(_fixed(_P3, _P3, _P3, _G4DN), 4,
                       "AMP section 4.3: 3 p3.8xlarge (4 V100, 170 Gbps NVLink, 10 Gbps) and 1 g4dn.12xlarge"),
    "amp-p3": Builtin(_fixed(*[_P3] * 4), 4, "AMP section 4.3, heterogeneous model: 4 p3.8xlarge"),
    "rhino-m8": Builtin(_uniform("V100-32GB", 8, gbits(100, latency_s=ROCE_LATENCY_S)), 2,
                        "Rhino section 7.1: 8 V100-SXM2-32GB, NVLink2, 100G RoCE; 2 nodes"),
    "rhino-s1": Builtin(_uniform("V100S-PCIE-32GB", 1, gbits(100, latency_s=ROCE_LATENCY_S)), 8,
                        "Rhino section 7.1: 1 V100S-PCIE-32GB, 100G RoCE"),
    "whale-v100": Builtin(_uniform("V100-32GB", 8, gbits(50)), 4, "Whale section 5: 8 V100 (32 GB), 50 Gb/s Ethernet"),
    "whale-8v100-8p100": Builtin(_fixed(node(["V100-32GB"] * 8, gbits(50)), node(["P100-16GB"] * 8, gbits(50))), 2,
                                 "Whale section 5.2, data parallelism (Fig. 17)"),
    "whale-4v100-4p100": Builtin(_fixed(node(["V100-32GB"] * 4, gbits(50)), node(["P100-16GB"] * 4, gbits(50))), 2,
                                 "Whale section 5.2, pipeline parallelism (Fig. 18)"),
    "a100": Builtin(_uniform("A100-80GB", 8, gbits(200, count=8, latency_s=ROCE_LATENCY_S)), 1,
                    "NVIDIA DGX A100: 8 A100, NVSwitch, 8 adapters of 200 Gbit/s"),
    "h100": Builtin(_uniform("H100-80GB", 8, gbits(400, count=8, latency_s=ROCE_LATENCY_S)), 1,
                    "NVIDIA DGX H100: 8 H100, NVSwitch, 8 adapters of 400 Gbit/s"),
}


def builtin_cluster(text: str) -> Optional[ClusterDescription]:
    """The description named by ``"dapple-a"`` or ``"a100:1024"``; None if ``text`` is not a built-in name.

    Raises:
        ClusterError: the built-in cluster is not available in this size.
    """
    name, colon, size_text = text.strip().lower().partition(":")
    row = BUILTIN.get(name)
    if row is None or not (size_text.isdecimal() or not colon):
        return None
    if not colon:
        return ClusterDescription(name=name, nodes=tuple(row.nodes(row.size)))
    size = int(size_text[:20])  # longer numbers exceed the limit anyway
    at_most(size, MAX_DEVICES, f"the number of devices in {text!r}")
    return ClusterDescription(name=text.strip().lower(), nodes=_sized(name, row, size))


def _sized(name: str, row: Builtin, size: int) -> Tuple[NodeDescription, ...]:
    """The first nodes with ``size`` devices in all."""
    per_node = len(row.nodes(1)[0].devices)
    if 0 < size < per_node:
        return (part_of_node(row.nodes(1)[0], range(size)),)
    whole, rest = divmod(size, per_node)
    nodes = tuple(row.nodes(whole))
    if size < 1 or rest or len(nodes) != whole:
        raise ClusterError(f"cluster {name!r} has nodes of {per_node} devices, so it cannot have {size} devices in all; use e.g. "
                           f"'{name}:{max(1, len(nodes)) * per_node}'")
    return nodes
