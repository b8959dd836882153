"""Common ops, staged as nodes with all their attributes.

Attributes are explicit because inputs may be staged after their consumers.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.stage import Stage


class Nodes:
    """Stages single nodes; every method returns the name of the new tensor (or op)."""

    def __init__(self, edit: Stage) -> None:
        self.edit = edit
        self._consts: Dict[Any, str] = {}
        self._vectors: Dict[Any, str] = {}

    def add(self, op_type: str, name: str, inputs: Sequence[str], device: str, control: Sequence[str] = (), **attrs: Any) -> str:
        return self.edit.add(op_type, name, inputs, device=device, control_inputs=control, attrs=attrs)

    def const(self, value: Any, name: str, dtype: Any, device: str) -> str:
        """A constant; equal small constants on one device are staged once."""
        array = np.asarray(value, tf.as_dtype(dtype).as_numpy_dtype)
        key = (array.dtype.str, array.shape, str(value) if array.dtype == object else array.tobytes(), device)
        if key not in self._consts:
            self._consts[key] = self.edit.const(array, name, device=device)
        return self._consts[key]

    def identity(self, x: str, name: str, dtype: Any, device: str, control: Sequence[str] = ()) -> str:
        return self.add("Identity", name, [x], device, control, T=dtype)

    def no_op(self, name: str, device: str, control: Sequence[str]) -> str:
        return self.add("NoOp", name, [], device, control)

    def cast(self, x: str, name: str, source: Any, target: Any, device: str) -> str:
        return self.add("Cast", name, [x], device, SrcT=source, DstT=target)

    def binary(self, op_type: str, a: str, b: str, name: str, dtype: Any, device: str) -> str:
        """``Add``, ``Sub``, ``Mul``, ``RealDiv``, ``FloorDiv``."""
        return self.add(op_type, name, [a, b], device, T=dtype)

    def add_n(self, values: Sequence[str], name: str, dtype: Any, device: str) -> str:
        if len(values) == 1:
            return self.identity(values[0], name, dtype, device)
        return self.add("AddN", name, values, device, T=dtype, N=len(values))

    def concat(self, values: Sequence[str], dim: int, name: str, dtype: Any, device: str, control: Sequence[str] = ()) -> str:
        if len(values) == 1:
            return values[0]
        axis = self.const(dim, name + "/axis", tf.int32, device)
        return self.add("ConcatV2", name, list(values) + [axis], device, control, T=dtype, Tidx=tf.int32, N=len(values))

    def split(self, x: str, sizes: Any, count: int, dim: int, name: str, dtype: Any, device: str,
              control: Sequence[str] = ()) -> List[str]:
        """``sizes``: a list of ints, or the name of an int32 vector."""
        axis = self.const(dim, name + "/axis", tf.int32, device)
        if not isinstance(sizes, str):
            if len(set(sizes)) == 1:
                op = self.add("Split", name, [axis, x], device, control, T=dtype, num_split=count)
                return [self.edit.output(op, i) for i in range(count)]
            sizes = self.const(sizes, name + "/sizes", tf.int32, device)
        op = self.add("SplitV", name, [x, sizes, axis], device, control, T=dtype, Tlen=tf.int32, num_split=count)
        return [self.edit.output(op, i) for i in range(count)]

    def slice_dim(self, x: str, dim: int, rank: int, begin: Any, size: Any, name: str, dtype: Any, device: str,
                  control: Sequence[str] = ()) -> str:
        """``x[..., begin:begin + size, ...]`` along ``dim``; ``begin`` and ``size`` are ints or names of int32 scalars."""
        begins = self._vector(dim, rank, begin, 0, name + "/begin", device)
        sizes = self._vector(dim, rank, size, -1, name + "/size", device)
        return self.add("Slice", name, [x, begins, sizes], device, control, T=dtype, Index=tf.int32)

    def slice_ranges(self, x: str, ranges: Mapping[int, Tuple[int, int]], rank: int, name: str, dtype: Any, device: str) -> str:
        """The elements of ``x`` within ranges.

        Args:
            ranges: dimension -> begin and size; other dimensions are taken whole.
        """
        if len(ranges) == 1:
            (dim, (begin, size)), = ranges.items()
            return self.slice_dim(x, dim, rank, begin, size, name, dtype, device)
        begins, sizes = ([ranges.get(dim, (0, -1))[which] for dim in range(rank)] for which in (0, 1))
        inputs = [x, self.const(begins, name + "/begin", tf.int32, device), self.const(sizes, name + "/size", tf.int32, device)]
        return self.add("Slice", name, inputs, device, T=dtype, Index=tf.int32)

    def slice_to(self, x: str, dim: int, begin: Any, end: Any, name: str, dtype: Any, device: str,
                 control: Sequence[str] = ()) -> str:
        """``x[..., begin:end, ...]`` along ``dim`` of a tensor of any rank; ``begin`` and ``end`` are ints or names of int32
        scalars."""
        begins, ends, strides = (self._vector(dim, dim + 1, value, fill, f"{name}/{what}", device) for what, value, fill in (
            ("begin", begin, 0), ("end", end, 0), ("strides", 1, 1)))
        before = (1 << dim) - 1  # dimensions that are taken whole, as are all behind ``dim``
        return self.add("StridedSlice", name, [x, begins, ends, strides], device, control, T=dtype, Index=tf.int32,
                        begin_mask=before, end_mask=before, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)

    def shape(self, x: str, name: str, dtype: Any, device: str) -> str:
        """The shape of ``x``, int32."""
        return self.add("Shape", name, [x], device, T=dtype, out_type=tf.int32)

    def scalar(self, x: str, name: str, dtype: Any, device: str) -> str:
        """The only element of ``x``."""
        none = self.const(np.zeros([0]), name + "/scalar", tf.int32, device)
        return self.add("Reshape", name, [x, none], device, T=dtype, Tshape=tf.int32)

    def expand_dims(self, x: str, axis: int, name: str, dtype: Any, device: str) -> str:
        return self.add("ExpandDims", name, [x, self.const(axis, name + "/axis", tf.int32, device)], device, T=dtype,
                        Tdim=tf.int32)

    def _vector(self, dim: int, rank: int, value: Any, fill: int, name: str, device: str) -> str:
        """An int32 vector of length ``rank`` that is ``value`` at ``dim`` and ``fill`` elsewhere."""
        if not isinstance(value, str):
            key = (dim, rank, value, fill, device)
            if key not in self._vectors:
                self._vectors[key] = self.const([value if i == dim else fill for i in range(rank)], name, tf.int32, device)
            return self._vectors[key]
        other = self.const(fill, name + "/fill", tf.int32, device)
        return self.add("Pack", name, [value if i == dim else other for i in range(rank)], device, T=tf.int32, N=rank, axis=0)
