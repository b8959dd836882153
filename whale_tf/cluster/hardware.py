"""The built-in hardware table: capabilities of devices and links, each figure with its source.

Memory is the nominal capacity (GB on a GPU's label are GiB).  Rates are dense peaks at boost clock.  If a chip has no
units for a precision, the figure is float32's, the path used instead.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Mapping, Optional, Tuple

from whale_tf.cluster.devices import Link
from whale_tf.errors import ClusterError, did_you_mean

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class DeviceType:
    """One row of the table.  ``fabric`` names the row of :data:`FABRICS` that usually connects such devices."""

    name: str
    kind: str
    memory_bytes: int
    fp64: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    memory_bandwidth_bytes_per_s: float
    fabric: str
    source: str

    @property
    def peak_flops_per_s(self) -> Dict[str, float]:
        return {"fp64": self.fp64, "fp32": self.fp32, "tf32": self.tf32, "fp16": self.fp16, "bf16": self.bf16}


@dataclass(frozen=True)
class Fabric:
    """The usual connections between devices inside one node.

    ``nvlink`` is one NVLink lane (each device has ``lanes`` of them) and ``switched`` distinguishes NVSwitch from the
    direct cube mesh of 8 Volta GPUs (a Pascal server's mesh is modelled as one port of its four lanes).  ``pcie`` is a
    device's slot, ``uplink`` connects a PCIe switch to its CPU socket, ``socket_link`` connects the two sockets.
    """

    pcie: Optional[Link]
    uplink: Optional[Link] = None
    socket_link: Optional[Link] = None
    nvlink: Optional[Link] = None
    lanes: int = 0
    switched: bool = False
    local: Optional[Link] = None


def _gpu(name: str, memory_gib: float, tera_flops: Tuple[float, float, float, float, float], gigabytes_per_s: float,
         fabric: str, source: str) -> DeviceType:
    """``tera_flops`` in the order fp64, fp32, tf32, fp16, bf16."""
    fp64, fp32, tf32, fp16, bf16 = (rate * TERA for rate in tera_flops)
    return DeviceType(name, "GPU", int(memory_gib * GIB), fp64, fp32, tf32, fp16, bf16, gigabytes_per_s * GIGA, fabric,
                      source)


DEVICE_TYPES: Mapping[str, DeviceType] = {row.name: row for row in (
    _gpu("P100-16GB", 16, (4.7, 9.3, 9.3, 18.7, 9.3), 732, "pcie3",
         "NVIDIA Tesla P100 datasheet, PCIe 16 GB; no tensor cores"),
    _gpu("P100-SXM2-16GB", 16, (5.3, 10.6, 10.6, 21.2, 10.6), 732, "nvlink1",
         "NVIDIA Tesla P100 datasheet, SXM2; no tensor cores"),
    _gpu("V100-16GB", 16, (7.8, 15.7, 15.7, 125.0, 15.7), 900, "nvlink2",
         "NVIDIA V100 datasheet, SXM2; fp16: tensor cores; no TF32 or bfloat16"),
    _gpu("V100-32GB", 32, (7.8, 15.7, 15.7, 125.0, 15.7), 900, "nvlink2",
         "NVIDIA V100 datasheet, SXM2; fp16: tensor cores; no TF32 or bfloat16"),
    _gpu("V100S-PCIE-32GB", 32, (8.2, 16.4, 16.4, 130.0, 16.4), 1134, "pcie3",
         "NVIDIA V100 datasheet, V100S PCIe"),
    _gpu("T4", 16, (8.1 / 32, 8.1, 8.1, 65.0, 8.1), 300, "pcie3",
         "NVIDIA T4 datasheet; fp64 is 1/32 of fp32 (Turing whitepaper); no TF32 or bfloat16"),
    _gpu("A10", 24, (31.2 / 64, 31.2, 62.5, 125.0, 125.0), 600, "pcie4",
         "NVIDIA A10 datasheet, dense; fp64 is 1/64 of fp32 (GA102 whitepaper)"),
    _gpu("A100-40GB", 40, (9.7, 19.5, 156.0, 312.0, 312.0), 1555, "nvlink3",
         "NVIDIA A100 datasheet, 40 GB SXM, dense"),
    _gpu("A100-80GB", 80, (9.7, 19.5, 156.0, 312.0, 312.0), 2039, "nvlink3",
         "NVIDIA A100 datasheet, 80 GB SXM, dense"),
    _gpu("H100-80GB", 80, (34.0, 67.0, 494.5, 989.5, 989.5), 3350, "nvlink4",
         "NVIDIA H100 datasheet, SXM5; the sheet gives sparse rates, half of them is dense"),
    _gpu("H200-141GB", 141, (34.0, 67.0, 494.5, 989.5, 989.5), 4800, "nvlink4",
         "NVIDIA H200 datasheet, SXM; the sheet gives sparse rates, half of them is dense"),
    _gpu("L40S", 48, (91.6 / 64, 91.6, 183.0, 362.05, 362.05), 864, "pcie4",
         "NVIDIA L40S datasheet, dense; fp64 is 1/64 of fp32 (Ada whitepaper)"),
    _gpu("TitanXp", 12, (12.15 / 32, 12.15, 12.15, 12.15, 12.15), 547.7, "pcie3",
         "NVIDIA TITAN Xp specification: 3840 cores x 2 x 1.582 GHz; fp64 is 1/32 of fp32 and native fp16 1/64, so "
         "float16 tensors are computed in float32 (Pascal tuning guide)"),
    DeviceType("CPU", "CPU", 16 * GIB, 40 * GIGA, 80 * GIGA, 80 * GIGA, 80 * GIGA, 80 * GIGA, 10 * GIGA, "cpu",
               "one x86 server core at 2.5 GHz with two 256-bit FMA units: 2.5e9 x 2 x 8 x 2 (Intel 64 optimization "
               "manual); memory and its bandwidth: a core's share of a common server; calibrate for exact work"),
)}

ALIASES: Mapping[str, str] = {
    "P100": "P100-16GB", "V100": "V100-32GB", "V100S": "V100S-PCIE-32GB", "V100-SXM2-16GB": "V100-16GB",
    "V100-SXM2-32GB": "V100-32GB", "T4-16GB": "T4", "A10-24GB": "A10", "A100": "A100-80GB", "H100": "H100-80GB",
    "H200": "H200-141GB", "L40S-48GB": "L40S", "TITANXP-12GB": "TitanXp", "TITAN-XP": "TitanXp"}

# Bandwidths: NCCL's own measured constants per lane or bus (github.com/NVIDIA/nccl, src/graph/topo.h: SM60/70/80/90
# NVLINK_BW, PCI_BW, SKL_QPI_BW, AMD_ZEN12_BW, AMD_ZEN34_BW; the uplink through an Intel root complex is
# PCI_BW / INTEL_P2P_OVERHEAD).  Latencies: src/graph/tuning.cc, hwLat, ring, protocol Simple.
NVLINK_LATENCY_S = 3.4e-6
PCIE_LATENCY_S = 5.7e-6
NIC_LATENCY_S = 9.6e-6
LOCAL_LATENCY_S = 1e-5  # one send/receive pair between two devices of one process

# Bytes that updates on the host of a GPU server move per second, for all its devices together: two sockets with six channels of
# DDR4-2666 have 256 GB/s (Intel Xeon Scalable, first generation), of which streaming reaches some 80%.
HOST_BYTES_PER_S = 200 * GIGA


def _nvlink(gigabytes_per_s: float) -> Link:
    return Link(gigabytes_per_s * GIGA, NVLINK_LATENCY_S, "nvlink")


def _pcie(gigabytes_per_s: float) -> Link:
    return Link(gigabytes_per_s * GIGA, PCIE_LATENCY_S, "pcie")


def _socket_link(gigabytes_per_s: float) -> Link:
    return Link(gigabytes_per_s * GIGA, PCIE_LATENCY_S, "qpi")


FABRICS: Mapping[str, Fabric] = {
    "cpu": Fabric(None, local=Link(5 * GIGA, LOCAL_LATENCY_S, "local")),
    "pcie3": Fabric(_pcie(12), _pcie(10), _socket_link(10)),
    "pcie4": Fabric(_pcie(24), _pcie(24), _socket_link(16)),
    "nvlink1": Fabric(_pcie(12), _pcie(10), _socket_link(10), _nvlink(18), lanes=4, switched=True),
    "nvlink2": Fabric(_pcie(12), _pcie(10), _socket_link(10), _nvlink(20), lanes=6),
    "nvlink3": Fabric(_pcie(24), _pcie(24), _socket_link(16), _nvlink(20), lanes=12, switched=True),
    "nvlink4": Fabric(_pcie(48), _pcie(48), _socket_link(24), _nvlink(20.6), lanes=18, switched=True),
}

# Lanes between the GPUs of an 8 x V100 server, the hybrid cube mesh (NVIDIA DGX-1 with Tesla V100 whitepaper;
# `nvidia-smi topo -m` prints it as NV1 and NV2).
CUBE_MESH: Tuple[Tuple[int, int, int], ...] = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2), (2, 6, 1), (3, 7, 1),
    (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2))

DEFAULT_GPU_NIC_GBITS_PER_S = 50.0  # Whale section 5: "Nodes are connected by 50Gb/s ethernet"
DEFAULT_CPU_NIC_GBITS_PER_S = 10.0


def device_type(name: str, own: Optional[Mapping[str, DeviceType]] = None) -> DeviceType:
    """The row called ``name`` (aliases and any case accepted).  ``own`` holds the types defined by a description.

    Raises:
        ClusterError: unknown name; the nearest known name is suggested.
    """
    known = dict(DEVICE_TYPES, **(own or {}))
    by_lower = {key.lower(): row for key, row in known.items()}
    by_lower.update({key.lower(): known[row] for key, row in ALIASES.items() if key.lower() not in by_lower})
    row = by_lower.get(name.lower())
    if row is None:
        candidates = list(known) + list(ALIASES)
        hint = did_you_mean(name, candidates) or did_you_mean(name.upper(), candidates)
        raise ClusterError(
            "unknown device type {!r}; known types: {}.{} To use another type, add it to the description: "
            '"device_types": {{"{}": {{"memory_gib": ..., "fp32": ..., "memory_bandwidth_bytes_per_s": ...}}}}'.format(
                name, ", ".join(sorted(known)), hint, name))
    return row
