"""Detection of this machine's devices: nvidia-smi, TensorFlow's device list, or one CPU device."""
from __future__ import annotations

import functools
import os
import re
import subprocess
import warnings
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from whale_tf.cluster import hardware
from whale_tf.cluster.defaults import default_cluster
from whale_tf.cluster.description import ClusterDescription, DeviceTypeDescription
from whale_tf.documents import read
from whale_tf.errors import ClusterError

# Marketing names contain the type and the memory: "Tesla V100-SXM2-32GB", "NVIDIA A100 80GB PCIe", "NVIDIA TITAN Xp".
_FAMILIES = ("P100", "V100S", "V100", "T4", "A100", "A10", "H100", "H200", "L40S", "TITAN XP")
ASSUMED = "nvidia-smi; rates of the T4"  # source of the rates of a GPU that is not in the table


class Gpu(NamedTuple):
    """One GPU as the machine reports it."""

    name: str
    memory_bytes: int


def read_nvidia_smi(text: str, visible: Optional[str] = None) -> List[Gpu]:
    """The GPUs in the output of ``nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits``.

    ``visible`` is CUDA_VISIBLE_DEVICES: numbers or UUIDs, in the order in which the process sees them; CUDA stops at
    the first entry that is not a GPU.

    Raises:
        ClusterError: it does not say how much memory a GPU has.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") >= 3]
    gpus = [(row[0], row[1], Gpu(row[2], _memory(*row[2:4]))) for row in rows]
    if visible is None:
        return [gpu for _, _, gpu in gpus]
    chosen: List[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        matches = [gpu for index, uuid, gpu in gpus if entry and (entry == index or uuid.startswith(entry))]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return chosen


def _memory(name: str, mebibytes: str) -> int:
    try:
        return int(float(mebibytes)) << 20
    except ValueError:  # of GPUs that share the memory of the host
        raise ClusterError(f"nvidia-smi says that GPU {name!r} has {mebibytes!r} MiB of memory, expected a number; describe the "
                           "devices in a cluster file (docs/cluster.md), and set WHALE_CLUSTER to its path") from None


def local_gpus(environ: Mapping[str, str]) -> List[Gpu]:
    """This machine's GPUs; an absent or failing nvidia-smi means none."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True,
                              timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return read_nvidia_smi(done.stdout, environ.get("CUDA_VISIBLE_DEVICES"))


def table_name(gpu: Gpu) -> Optional[str]:
    """A GPU's name in the hardware table; None if it is not in the table."""
    upper = gpu.name.upper()
    words = re.split(r"[\s-]+", upper)
    for family in _FAMILIES:
        if not (family in words or (" " in family and family in upper)):
            continue
        rows = [row for row in hardware.DEVICE_TYPES.values() if row.name.upper().split("-")[0] == family.replace(" ", "")]
        form = [row for row in rows if ("SXM" in row.name) == ("SXM" in upper)]
        if family == "P100" and form:
            rows = form
        return min(rows, key=lambda row: abs(row.memory_bytes - gpu.memory_bytes)).name
    return None


@functools.lru_cache(maxsize=None)
def local_gpu() -> Optional[Gpu]:
    """This machine's first GPU; None if it has none.  Cached."""
    return next(iter(local_gpus(os.environ)), None)


def own_types(gpus: Iterable[Gpu]) -> Dict[str, DeviceTypeDescription]:
    """Types for GPUs missing from the table: the memory they report and, with a warning, the rates of the T4; only
    heterogeneous clusters and predictions depend on the rates."""
    types: Dict[str, DeviceTypeDescription] = {}
    for gpu in gpus:
        if table_name(gpu) is None and gpu.name not in types:
            warnings.warn(
                f"GPU {gpu.name!r} is not in the hardware table; it is assumed to be as fast as a T4. Measure it with "
                '`whale profile --device`, or give "device_types" in the cluster description.',
                stacklevel=2)
            types[gpu.name] = read(DeviceTypeDescription, {
                "base": "T4", "memory_bytes": gpu.memory_bytes, "source": ASSUMED})
    return types


def describe_gpus(gpus: Sequence[Gpu], name: str = "local") -> ClusterDescription:
    """One node with these GPUs."""
    return default_cluster([[table_name(gpu) or gpu.name for gpu in gpus]], name, own_types(gpus))


def from_tensorflow(devices: Iterable[Any]) -> ClusterDescription:
    """A node from TensorFlow's ``device_lib.list_local_devices()`` (objects with ``device_type``, ``memory_limit`` and
    ``physical_device_desc``): its GPUs if any, else one CPU device per CPU entry."""
    gpus: List[Gpu] = []
    cpus = 0
    for device in devices:
        if device.device_type == "GPU":
            match = re.search(r"name: ([^,]+)", device.physical_device_desc)
            gpus.append(Gpu(match.group(1) if match else "GPU", int(device.memory_limit)))
        elif device.device_type == "CPU":
            cpus += 1
    if gpus:
        return describe_gpus(gpus)
    if not cpus:
        raise ClusterError("TensorFlow's device list names no CPU and no GPU")
    return default_cluster([["CPU"] * cpus], "local")


def detect(environ: Mapping[str, str]) -> ClusterDescription:
    """This machine's GPUs, else one CPU device."""
    gpus = local_gpus(environ)
    return describe_gpus(gpus) if gpus else default_cluster([["CPU"]], "local")
