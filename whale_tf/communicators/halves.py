"""Sums over processes that are sent as float16, scaled so that no sum overflows.

With ``W`` processes and ``m`` the largest magnitude of any element, ``s = LIMIT / (W m)`` keeps every partial sum below the
largest float16 (65504).  Each element is rounded to 11 bits once per process and once per addition::

    ring      g ──> max ──(max over processes)──> s        gather    g ──> max ──> s ──┐
              g s ──> float16 ──(sum)──> float32 / s                 g s ──> float16 ──┴─(gather)──> sum of float32 / s

TensorFlow 1.15's collectives do not support float16 on CPU.  There, the halves are gathered as int32, with one scale per
process, and added up by the receiver.  That sends ``2 (W-1) n`` bytes instead of a float32 ring's ``8 (W-1)/W n``, so it
pays off for up to three processes.
"""

from __future__ import annotations

from typing import Any, Callable, List

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.communicators.base import Member
from whale_tf.graph_editor.nodes import Nodes

LIMIT = 32768.0
SMALLEST = 1e-30  # scales stay finite in float32
GATHER_UP_TO = 3

Across = Callable[[Member, str], str]  # value, name -> combined over all processes


def sum_by_ring(nodes: Nodes, member: Member, processes: int, name: str, largest: Across, total: Across) -> str:
    """The sum of float32 vectors `[n]`.

    Args:
        largest, total: maximum of float32 scalars and sum of float16 vectors over all processes.
    """
    half = _Halves(nodes, member.device, name)
    scale = half.scale(largest(Member(half.magnitude(member.value), member.device), name + "/largest"), LIMIT / processes)
    whole = total(Member(half.compressed(member.value, scale), member.device), name + "/total")
    return nodes.binary("RealDiv", half.cast(whole, "whole", tf.float16, tf.float32), scale, name, tf.float32, member.device)


def sum_by_gather(nodes: Nodes, member: Member, processes: int, name: str, gather: Across) -> str:
    """The sum of float32 vectors `[n]`.

    Args:
        gather: concatenates the int32 vectors of all processes.
    """
    device, half = member.device, _Halves(nodes, member.device, name)
    i32 = tf.int32
    count = half.op("Size", "count", [member.value], T=tf.float32, out_type=i32)
    odd = half.op("FloorMod", "odd", [count, half.const(2)], T=i32)
    after = half.op("Pack", "after", [half.const(0), odd], T=i32, N=2, axis=0)
    paddings = half.op("ExpandDims", "paddings", [after, half.const(0)], T=i32, Tdim=i32)  # two halves form an int32
    even = half.op("Pad", "even", [member.value, paddings], T=tf.float32, Tpaddings=i32)
    scale = half.scale(half.magnitude(member.value), LIMIT)
    pairs = half.op("Reshape", "pairs", [half.compressed(even, scale), half.const([-1, 2])], T=tf.float16, Tshape=i32)
    packed = half.op("Bitcast", "packed", [pairs], T=tf.float16, type=i32)
    bits = half.op("ExpandDims", "bits", [half.op("Bitcast", "scale_bits", [scale], T=tf.float32, type=i32), half.const(0)],
                   T=i32, Tdim=i32)
    message = nodes.concat([bits, packed], 0, name + "/message", i32, device)
    rows = half.op("Reshape", "rows", [gather(Member(message, device), name + "/rows_of_all"), half.const([processes, -1])],
                   T=i32, Tshape=i32)
    scales = half.op("Bitcast", "scales", [nodes.slice_dim(rows, 1, 2, 0, 1, name + "/first", i32, device)], T=i32,
                     type=tf.float32)
    payload = half.op("Bitcast", "payload", [nodes.slice_dim(rows, 1, 2, 1, -1, name + "/rest", i32, device)], T=i32,
                      type=tf.float16)
    flat = half.op("Reshape", "flat", [payload, half.const([processes, -1])], T=tf.float16, Tshape=i32)
    scaled = half.cast(flat, "scaled_of_all", tf.float16, tf.float32)
    each = nodes.binary("RealDiv", scaled, scales, name + "/unscaled", tf.float32, device)
    total = half.op("Sum", "sum", [each, half.const([0])], T=tf.float32, Tidx=i32, keep_dims=False)
    size = half.op("ExpandDims", "size", [count, half.const(0)], T=i32, Tdim=i32)
    return nodes.add("Slice", name, [total, half.const([0]), size], device, T=tf.float32, Index=i32)


class _Halves:
    """Ops on one device under one name."""

    def __init__(self, nodes: Nodes, device: str, name: str) -> None:
        self._nodes, self._device, self._name = nodes, device, name

    def op(self, op_type: str, what: str, inputs: List[str], **attrs: Any) -> str:
        return self._nodes.add(op_type, f"{self._name}/{what}", inputs, self._device, **attrs)

    def const(self, value: Any, dtype: tf.DType = tf.int32) -> str:
        kind = "scalar" if np.ndim(value) == 0 else "vector"
        words = [kind] + [str(each).replace("-", "minus_") for each in np.ravel(value)]
        return self._nodes.const(value, "{}/{}".format(self._name, "_".join(words)), dtype, self._device)

    def cast(self, value: str, what: str, source: tf.DType, target: tf.DType) -> str:
        return self._nodes.cast(value, f"{self._name}/{what}", source, target, self._device)

    def magnitude(self, value: str) -> str:
        sizes = self.op("Abs", "sizes", [value], T=tf.float32)
        return self.op("Max", "magnitude", [sizes, self.const([0])], T=tf.float32, Tidx=tf.int32, keep_dims=False)

    def scale(self, magnitude: str, limit: float) -> str:
        """The factor that scales the largest magnitude to ``limit``; zero for infinity, which makes the sum NaN."""
        least = self.op("Maximum", "least", [magnitude, self.const(SMALLEST, tf.float32)], T=tf.float32)
        return self.op("RealDiv", "scale", [self.const(limit, tf.float32), least], T=tf.float32)

    def compressed(self, value: str, scale: str) -> str:
        scaled = self._nodes.binary("Mul", value, scale, self._name + "/scaled", tf.float32, self._device)
        return self.cast(scaled, "halves", tf.float32, tf.float16)
