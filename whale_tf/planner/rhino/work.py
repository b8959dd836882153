"""What an op computes and moves through memory, from shapes alone: a roofline estimate for comparing strategies."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import numpy as np

from whale_tf.cluster.devices import Device
from whale_tf.ir.graph import Op, Shape
from whale_tf.ir.rules.matmul import parse_equation
from whale_tf.ir.traits import CONTRACTIONS, CONVOLUTIONS, Cost, traits
from whale_tf.patterns.strategy import NOMINAL_SIZE

PRECISIONS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

class Work(NamedTuple):
    """``flops`` of the whole op; ``bytes`` of its operands and results together, if all are whole."""

    flops: float
    bytes: float

    def seconds(self, device: Device, dtype: str) -> float:
        rate = device.peak_flops_per_s[PRECISIONS.get(dtype, "fp32")]
        return max(self.flops / rate, self.bytes / device.memory_bandwidth_bytes_per_s)


def elements(shape: Shape) -> float:
    """Number of elements; a dimension of unknown size counts as ``NOMINAL_SIZE``, a shape of unknown rank as one element."""
    total = 1.0
    for size in shape or ():
        total *= NOMINAL_SIZE if size is None else size
    return total


def item_bytes(dtype: str) -> int:
    """Bytes of one element (4 for a resource: what it refers to is a float, or it is not looked at)."""
    name = dtype.replace("_ref", "")
    if name == "bfloat16":
        return 2
    try:
        return int(np.dtype(name).itemsize) or 1
    except TypeError:
        return 4


def flops(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> float:
    """Floating-point operations of an op: twice the multiplications of a contraction or convolution, else one per element of
    the largest operand or result."""
    if traits(op.type).cost in (Cost.FREE, Cost.LOOK_UP):
        return 0.0
    if op.type == "Einsum":
        labels, _ = parse_equation(str(op.attrs.get("equation", "")), [len(shape or ()) for shape in operands])
        sizes = {label: size or NOMINAL_SIZE for names, shape in zip(labels, operands) for label, size in zip(names, shape or ())
                 if size != 1}
        return 2.0 * float(np.prod([float(size) for size in sizes.values()]))
    if op.type in CONTRACTIONS:
        turned = op.attrs.get("transpose_a") or op.attrs.get("adj_x")
        first = operands[0] or (1, 1)
        return 2.0 * elements(results[0]) * float(first[-2 if turned else -1] or NOMINAL_SIZE)
    if op.type in CONVOLUTIONS:
        return _convolution(op, operands, results)
    return max([elements(shape) for shape in list(operands) + list(results)] or [0.0])


def _convolution(op: Op, operands: Sequence[Shape], results: Sequence[Shape]) -> float:
    image: Optional[Shape]
    if op.type.endswith(("BackpropInput", "BackpropInputV2")):
        kernel, image = operands[1], operands[2]
    elif op.type.endswith(("BackpropFilter", "BackpropFilterV2")):
        kernel, image = results[0], operands[2]
    else:
        kernel, image = operands[1], results[0]
    outputs = (kernel or (1,))[-2:] if op.type.startswith("Depthwise") else (kernel or (1,))[-1:]
    return 2.0 * elements(image) * elements(kernel) / elements(tuple(outputs))
