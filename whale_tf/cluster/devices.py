"""Devices and links, the components of a cluster."""
from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Optional

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16")


# The memory of a GPU that a training step cannot use.  First, the driver and the CUDA context: of a V100's 16 GiB TensorFlow 1
# reports 15.35 as free ("totalMemory: 15.77GiB freeMemory: 15.36GiB").  Second, the share of the rest that TensorFlow leaves to
# the system (tensorflow/core/common_runtime/gpu/gpu_device.cc, MinSystemMemory: 5% in TensorFlow 1.15, 0.5 to 1.8 GiB in later
# versions).
CONTEXT_BYTES = int(0.65 * (1 << 30))
SYSTEM_SHARE = 0.05


class Link(NamedTuple):
    """One direction of a connection.  ``bandwidth_bytes_per_s`` is that of a large message without contention;
    ``latency_s`` is the time of an empty message; ``name`` is the kind: ``nvlink``, ``pcie``, ``qpi``, ``nic``, ``local``
    (copies inside one process), ``self`` (no copy)."""

    bandwidth_bytes_per_s: float
    latency_s: float
    name: str

    def seconds(self, size_bytes: float) -> float:
        """Time of one message of ``size_bytes`` (alpha-beta model)."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Device:
    """One device of a cluster.

    Attributes:
        index: number in ``Cluster.devices``; dense.
        node: number of the node (host).
        local_index: number among its node's devices.
        type: name in the hardware table, or of a type that the cluster description defines.
        memory_bytes: device memory.
        peak_flops_per_s: floating-point operations per second for each precision in :data:`PRECISIONS`.  For a precision
            without hardware units, the rate of the path used instead (float32 arithmetic).
        memory_bandwidth_bytes_per_s: bandwidth of the device's own memory.
        kind: TensorFlow's device kind, ``"CPU"`` or ``"GPU"``.
        number: number among all devices of this kind in the cluster; ``None`` means ``index``.
        local_number: number among the devices of this kind in its node; ``None`` means ``local_index``.
        limit_bytes: the most bytes that a step may use, if limited.
    """

    index: int
    node: int
    local_index: int
    type: str
    memory_bytes: int
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    kind: str = "GPU"
    number: Optional[int] = None
    local_number: Optional[int] = None
    limit_bytes: Optional[float] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops_per_s", MappingProxyType(dict(self.peak_flops_per_s)))
        object.__setattr__(self, "number", self.index if self.number is None else self.number)
        object.__setattr__(self, "local_number", self.local_index if self.local_number is None else self.local_number)

    @property
    def usable_bytes(self) -> float:
        """The memory that a training step can use: the limit of both planners and simulator."""
        free = float(self.memory_bytes)
        if self.kind == "GPU":
            free = max(0.0, (self.memory_bytes - CONTEXT_BYTES) * (1.0 - SYSTEM_SHARE))
        return free if self.limit_bytes is None else min(free, self.limit_bytes)

    def __getstate__(self) -> Dict[str, Any]:
        return dict(self.__dict__, peak_flops_per_s=dict(self.peak_flops_per_s))  # a mapping proxy cannot be pickled

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state, peak_flops_per_s=MappingProxyType(state["peak_flops_per_s"]))

    def tf_name(self, job: str = "localhost", task: int = 0) -> str:
        """TensorFlow's name of this device.

        Under ``localhost``, one process drives the whole cluster, so devices are numbered over all nodes.  Under any
        other job, a task is a node, so they are numbered within the node:
        ``/job:localhost/replica:0/task:0/device:CPU:3``, ``/job:worker/replica:0/task:1/device:CPU:1``.
        """
        number = self.number if job == "localhost" else self.local_number
        return f"/job:{job}/replica:0/task:{task}/device:{self.kind}:{number}"
