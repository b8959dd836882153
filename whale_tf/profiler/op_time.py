"""Seconds of one op on one device, by the formula of :func:`whale_tf.profiler.layer_time.layer_seconds`.

A layer's time is the sum of its ops' times, so a plan of layers and a plan of ops get the same score.
"""

from __future__ import annotations

from whale_tf.cluster import Device
from whale_tf.profiler.model_profile import LayerProfile
from whale_tf.profiler.op_cost import OpCost

LAUNCH_S = 5e-6  # per op: TensorFlow's executor and a kernel launch; a rough figure, replaced by measured times
UTILIZATION = LayerProfile.utilization
PRECISIONS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def op_seconds(cost: OpCost, device: Device, dtype: str, parameter_bytes: float = 0.0) -> float:
    """A contraction takes its FLOPs at a share of the peak rate, plus reading its parameters; any other op takes the time to
    move its bytes.  Both add the launch of a kernel.

    Args:
        cost: cost of the part of the op that the device runs.
        parameter_bytes: bytes of variables it reads and of variables' gradients it computes.
    """
    if not cost.flops and not cost.bytes:
        return 0.0
    moved, seconds = cost.bytes, LAUNCH_S
    if cost.is_contraction:
        moved = parameter_bytes
        seconds += cost.flops / (device.peak_flops_per_s[PRECISIONS.get(dtype, "fp32")] * UTILIZATION)
    return seconds + moved / device.memory_bandwidth_bytes_per_s
