"""Time of one op on one device: by a calibration, else by the roofline of the hardware table.

``seconds = max(flops / peak flops, bytes moved / memory bandwidth) + launch``, with the attainable fractions of both peaks
(:data:`EFFICIENCY`), or with the times that a calibration measured for as many FLOPs and bytes.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

from whale_tf.cluster.devices import Device
from whale_tf.errors import PlanError
from whale_tf.simulator.calibration import ARITHMETIC, MEMORY, Calibration
from whale_tf.simulator.laws import Kernels
from whale_tf.simulator.model_graph import KINDS, ModelGraph, ModelTensor


class Efficiency(NamedTuple):
    """Fractions of the peaks that kernels reach, and the time to start one."""

    compute: float
    memory: float
    launch_s: float


# What large float32 matrix products and streaming kernels reach with cuBLAS and cuDNN (70 to 90%); a calibration replaces it.
EFFICIENCY = Efficiency(0.8, 0.8, 5e-6)


# The overlap factor (Proteus section VI-C): by how much computation and gradient communication slow each other down
# while they overlap.  Proteus measures it for each machine and model, but prints no values; on CPUs both compete for the same
# cores.
DEFAULT_GAMMA = {"GPU": 0.15, "CPU": 0.5}


class OpPart(NamedTuple):
    """The part of an op that one device does.

    Attributes:
        op: number in ``model.ops``.
        flops, size_bytes: of this part.
        fraction: its share of the whole op's work.
        share: its share of the op's backward (several backward ops come from one forward op).
    """

    op: int
    flops: float
    size_bytes: float
    fraction: float
    backward: bool = False
    share: float = 1.0


class OpEstimator:
    """Costs of a model's ops on the devices of a cluster.

    Args:
        calibration: takes precedence over the laws and the roofline on devices of its type.
        kernels: times of TensorFlow's kernels on GPUs, by the laws; None: every op is one kernel that reaches
            :data:`EFFICIENCY`, as fused kernels written by hand do.
    """

    def __init__(self, model: ModelGraph, calibration: Optional[Calibration] = None, kernels: Optional[Kernels] = None) -> None:
        self.model, self.calibration, self.kernels = model, calibration, kernels
        self._rates: Dict[Tuple[str, bool], Tuple[float, float]] = {}
        for op in model.ops:
            if op.kind not in KINDS:
                raise PlanError(
                    f"op {op.name!r} is of kind {op.kind!r}, which has no cost; known kinds: {', '.join(sorted(KINDS))}")

    def seconds(self, part: OpPart, device: Device) -> float:
        """Time of a part of an op on a device."""
        is_calibrated = self.calibration is not None and self.calibration.device == device.type
        if self.kernels is not None and device.kind == "GPU" and not is_calibrated:
            return self.kernels.seconds(part.op, part.flops, part.size_bytes, part.fraction, part.backward, device)
        return self.roofline(device, part.flops, part.size_bytes, KINDS[self.model.ops[part.op].kind].compute_bound)

    def kernels_of(self, number: int, backward: bool, device: Device) -> float:
        """The kernels that an op starts, in the backward pass for each of its gradients."""
        return self.kernels.kernels(number, backward, device) if self.kernels is not None and device.kind == "GPU" else 1.0

    def update_kernels(self) -> float:
        """The kernels that the update of a variable starts."""
        return self.kernels.update_kernels() if self.kernels is not None else 1.0

    def update_passes(self) -> float:
        """Tensors of a variable's size that its update reads and writes."""
        return self.kernels.update_passes() if self.kernels is not None else self.model.optimizer.passes

    def update_seconds(self, device: Device, moved: float) -> float:
        """Time of a variable's update, which reads and writes ``moved`` bytes."""
        if self.kernels is None or device.kind != "GPU":
            return self.roofline(device, 0.0, moved)
        return self.kernels.update_seconds(device, moved)

    def returned_bytes(self, parameter: ModelTensor) -> float:
        """Bytes of a parameter's gradient that are in memory besides its sum over micro-batches: a function that XLA compiled
        returns all gradients of a micro-batch at once, under mixed precision in 16 bits."""
        if self.kernels is None or not self.kernels.xla:
            return 0.0
        return parameter.gradient_bytes * (min(1.0, 2 / parameter.itemsize) if self.kernels.half else 1.0)

    def early_bytes(self) -> float:
        """Bytes per parameter of results of its update that are in memory for the whole step."""
        return 0.0 if self.kernels is None else self.model.optimizer.early_bytes

    def roofline(self, device: Device, flops: float, size_bytes: float, matrix: bool = False) -> float:
        """``matrix``: whether it runs on the matrix units (the precision's own peak); everything else runs in float32."""
        known = self.calibration
        if known is not None and known.device == device.type:
            arithmetic_s = known.seconds(flops, ARITHMETIC) if matrix else 0.0
            return max(arithmetic_s, known.seconds(size_bytes, MEMORY)) + known.launch_s
        key = (device.type, matrix)
        if key not in self._rates:
            precision = self.model.precision if matrix else "fp32"
            self._rates[key] = (1.0 / (device.peak_flops_per_s[precision] * EFFICIENCY.compute),
                                1.0 / (device.memory_bandwidth_bytes_per_s * EFFICIENCY.memory))
        per_flop, per_byte = self._rates[key]
        return max(flops * per_flop, size_bytes * per_byte) + EFFICIENCY.launch_s

    def fewer(self, number: int, device: Device) -> float:
        """How many times fewer multiplications an op takes on a device than its definition has (Winograd's convolutions)."""
        return 1.0 if self.kernels is None or device.kind != "GPU" else self.kernels.fewer(number, device)

    def sum_bytes(self, parameter: ModelTensor) -> float:
        """Bytes read and written to add a parameter's gradient to the sum over micro-batches.

        Two tensors are read and one is written.  Under mixed precision, XLA fuses the addition with the cast of the gradient,
        which is read in 16 bits.
        """
        gradient = parameter.gradient_bytes
        is_cast = self.kernels is not None and self.kernels.xla and self.kernels.half
        read = gradient * min(1.0, 2 / parameter.itemsize) if is_cast else gradient
        return read + 2 * gradient
