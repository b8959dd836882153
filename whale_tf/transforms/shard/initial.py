"""Initial values made in parts: constants are cut, and random numbers are drawn from the middle of their stream.

TensorFlow's kernels make the numbers of a seeded random op from a Philox generator [Salmon et al. 2011] with key ``seed`` and
counter ``(0, seed2)``.  Every ``group`` elements take the next counter (for truncated normals, which reject numbers, the next
``64 group``).  So element ``j`` of the local script's tensor is the first one from a generator whose counter begins
``j // group`` later, and a part draws only its own rows::

    before   RandomUniform ──> Assign(v)       after   state + 1000 ──> StatefulUniform ──> Assign(v/1)   on its device

A part along another dimension than the first is not a contiguous run of the stream.  It is drawn block by block, in whole rows,
of which it keeps its columns; each block waits until the previous one is no longer needed.  So a device draws all numbers, but
never holds them all.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import AttrValue, tf
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op
from whale_tf.ir.parts import even_sizes
from whale_tf.ir.traits import traits
from whale_tf.patterns.spread import Spread

BLOCKS = 16  # in which a part is drawn that is not a contiguous run of the stream
_RESERVED = 64  # counters that a truncated normal reserves for each element
_PHILOX = 1  # TensorFlow's number of the algorithm


class Block(NamedTuple):
    """A run of ``rows`` times ``width`` elements, starting at element ``begin`` of the flat tensor."""

    begin: int
    rows: int
    width: int


def blocks(shape: Sequence[int], spread: Spread, i: int) -> List[Block]:
    """What device ``i`` draws: rows of its own width, or of the full width if there are more than :data:`BLOCKS` rows.

    A row is all elements with the same indices before dimension ``spread.dim``.
    """
    rows, inner = _product(shape[:spread.dim]), _product(shape[spread.dim + 1:])
    full, own = shape[spread.dim] * inner, spread.sizes[i] * inner
    if rows <= BLOCKS:
        return [Block(row * full + spread.starts[i] * inner, 1, own) for row in range(rows)]
    sizes = even_sizes(rows, BLOCKS)
    return [Block(sum(sizes[:k]) * full, size, full) for k, size in enumerate(sizes)]


def _product(sizes: Sequence[int]) -> int:
    return int(np.prod(sizes, dtype=np.int64))


class Stream:
    """The numbers of one random op, starting at any element, on one device.

    Args:
        operands: names of the op's operands.
        dtype: type of its numbers.
        device: number of the device within its TaskGraph.
    """

    def __init__(self, nodes: Nodes, op: Op, operands: Sequence[str], dtype: tf.DType, scope: str, device: str) -> None:
        self._nodes, self._op, self._operands, self._dtype, self._scope, self._device = nodes, op, operands, dtype, scope, device
        self._group = 16 // max(dtype.size, 4)
        self._counters = self._group * _RESERVED if "Truncated" in op.type else 1
        self._state = "" if not traits(op.type).stateful_op else nodes.add(
            "VarHandleOp", scope + "/state", [], device, dtype=tf.int64, shape=[3], container="", shared_name=scope + "/state")

    def part(self, shape: Sequence[int], spread: Spread, i: int) -> str:
        """Device ``i``'s part of a tensor of the given shape."""
        nodes, device, dtype = self._nodes, self._device, self._dtype
        inner = _product(shape[spread.dim + 1:])
        pieces: List[str] = []
        for k, block in enumerate(blocks(shape, spread, i)):
            scope = f"{self._scope}/block{k}"
            piece = self._draw(block.begin, block.rows * block.width, scope, pieces[-1:])
            if block.width != spread.sizes[i] * inner:
                rows = self._reshape(piece, [block.rows, shape[spread.dim], inner], scope + "/rows")
                piece = nodes.slice_dim(rows, 1, 3, spread.starts[i], spread.sizes[i], scope + "/own", dtype, device)
            pieces.append(self._reshape(piece, [block.rows, spread.sizes[i] * inner], scope + "/own_rows"))
        joined = nodes.concat(pieces, 0, self._scope + "/joined", dtype, device)
        return self._reshape(joined, spread.shapes(shape)[i], self._scope + "/part")

    def _draw(self, begin: int, count: int, scope: str, after: Sequence[str]) -> str:
        """Elements ``[begin, begin + count)`` of the flat tensor."""
        nodes, device = self._nodes, self._device
        groups, extra = divmod(begin, self._group)
        shape = nodes.const([extra + count], scope + "/shape", tf.int64, device)
        drawn = (self._stateful if self._state else self._stateless)(groups * self._counters, shape, scope, after)
        return nodes.slice_dim(drawn, 0, 1, extra, -1, scope + "/run", self._dtype, device) if extra else drawn

    def _stateful(self, skip: int, shape: str, scope: str, after: Sequence[str]) -> str:
        nodes, device, attrs = self._nodes, self._device, self._op.attrs
        state = np.array([skip, attrs["seed2"], attrs["seed"]], np.int64)  # low and high half of the counter, key
        value = nodes.const(state, scope + "/state", tf.int64, device)
        assign = nodes.add("AssignVariableOp", scope + "/begin", [self._state, value], device, after, dtype=tf.int64)
        algorithm = nodes.const(_PHILOX, scope + "/algorithm", tf.int64, device)
        return nodes.add(traits(self._op.type).stateful_op, scope + "/draw", [self._state, algorithm, shape], device, [assign],
                         dtype=self._dtype, shape_dtype=tf.int64)

    def _stateless(self, skip: int, shape: str, scope: str, after: Sequence[str]) -> str:
        nodes, device = self._nodes, self._device
        _, key, counter, algorithm = self._operands
        counts = nodes.const(np.array([skip, 0], np.uint64), scope + "/skip", tf.uint64, device)
        low = nodes.binary("AddV2", counter, counts, scope + "/low", tf.uint64, device)
        wrapped = nodes.cast(nodes.binary("Less", low, counts, scope + "/wrapped", tf.uint64, device), scope + "/ones", tf.bool,
                             tf.uint64, device)
        carry = nodes.add("ReverseV2", scope + "/carry", [wrapped, nodes.const([0], scope + "/axis", tf.int32, device)], device,
                          T=tf.uint64, Tidx=tf.int32)
        advanced = nodes.binary("AddV2", low, carry, scope + "/counter", tf.uint64, device)
        return nodes.add(self._op.type, scope + "/draw", [shape, key, advanced, algorithm], device, after, dtype=self._dtype,
                         Tshape=tf.int64)

    def _reshape(self, x: str, shape: Sequence[int], name: str) -> str:
        to = self._nodes.const(shape, name + "/shape", tf.int64, self._device)
        return self._nodes.add("Reshape", name, [x, to], self._device, T=self._dtype, Tshape=tf.int64)


def cut(nodes: Nodes, value: AttrValue, spread: Spread, i: int, scope: str) -> str:
    """Device ``i``'s part of a constant.

    Args:
        value: its TensorProto; one that repeats a number stays compact.
    """
    dtype, sizes = tf.as_dtype(value.dtype), spread.shapes([dim.size for dim in value.tensor_shape.dim])[i]
    if not value.tensor_content and _stored(value) == 1:
        alone = type(value)()
        alone.CopyFrom(value)
        del alone.tensor_shape.dim[:]
        number = nodes.const(tf.make_ndarray(alone), scope + "/value", dtype, str(i))
        dims = nodes.const(sizes, scope + "/dims", tf.int64, str(i))
        return nodes.add("Fill", scope + "/fill", [dims, number], str(i), T=dtype, index_type=tf.int64)
    own: Tuple = (slice(None),) * spread.dim + (slice(spread.starts[i], spread.starts[i] + spread.sizes[i]),)
    return nodes.const(tf.make_ndarray(value)[own], scope + "/value", dtype, str(i))


def _stored(value: AttrValue) -> int:
    """How many numbers a TensorProto lists; the last one is repeated for all that follow."""
    return sum(len(items) for field, items in value.ListFields() if field.name.endswith("_val"))
