"""The elements of a clone's rows: found by the number of the row to which each belongs (:mod:`whale_tf.ir.batch_axis.grouping`).

::

    rows [n] ──> mask: start <= row < end ──> positions [k] ──┬──> gather from rows, minus start
                                                              └──> gather from whatever else has one row for each element

So the elements may be in any order.  The start and the end are those of the clone's examples.
"""

from __future__ import annotations

from typing import Callable, Dict, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import NodeDef, tf
from whale_tf._typing_compat import Protocol
from whale_tf.emit.checks import check_equal
from whale_tf.emit.context import Clone, Context
from whale_tf.emit.shares import BatchShares, Number
from whale_tf.graph_editor.function_copy import append_inputs
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import Slice
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import batch_of, rows_each
from whale_tf.ir.traits import traits

_MISFIT = ", but the examples to which the rows belong are {1}"
_FIX = "give each example its row, for example with num_segments or tf.nn.safe_embedding_lookup_sparse"


class Numbers(Protocol):
    """What :class:`Elements` asks of the converter of a graph or function (:mod:`whale_tf.emit.convert`)."""

    context: Context
    nodes: Nodes
    division: BatchShares
    whole_value: Callable[[int, int, Clone], str]

    def rows(self, op: Op, task_graph: int, clone: Clone, of_all: bool, scope: str, batch: str) -> Tuple[Number, Number, Number]:
        ...

    def is_of_all(self, tensor: int, conversion: Slice, op: Op) -> bool:
        ...

    def rows_told(self, batch: str, task_graph: int, clone: Clone, op: Op) -> Sequence[str]:
        ...

    def rank(self, tensor: int) -> int:
        ...

    def scalar(self, value: Number) -> str:
        ...

    def times(self, value: Number, factor: Number, scope: str) -> Number:
        ...

    def plus(self, a: Number, b: Number, scope: str) -> Number:
        ...


class Elements:
    """Stages what finds elements, once for each clone.

    Args:
        converter: of the graph or function in which this is staged.
    """

    def __init__(self, converter: Numbers) -> None:
        self._converter, self._context, self._nodes = converter, converter.context, converter.nodes
        self._found: Dict[Tuple[str, int, Clone], Tuple[str, str, str]] = {}
        self._totals: Dict[Tuple[str, int, Clone], str] = {}
        self._told: Dict[Tuple[str, int, int], Sequence[str]] = {}

    def of(self, name: str, tensor: int, conversion: Slice, task_graph: int, clone: Clone, scope: str, op: Op) -> str:
        """The rows of a tensor that belong to this clone's elements.  One op fails if the tensor does not have one for each
        element."""
        nodes, dtype, device = self._nodes, self._context.dtype(tensor), self._context.device(task_graph, clone)
        (block,) = conversion.blocks
        positions, _, total = self.positions(batch_of(block), task_graph, clone, op)
        count = nodes.expand_dims(total, 0, scope + "/count", tf.int32, device)
        (checked,) = nodes.split(name, count, 1, conversion.dim, scope + "/all", dtype, device)
        axis = nodes.const(conversion.dim, scope + "/axis", tf.int32, device)
        return nodes.add("GatherV2", scope, [checked, positions, axis], device, Tparams=dtype, Tindices=tf.int64, Taxis=tf.int32,
                         batch_dims=0)

    def positions(self, batch: str, task_graph: int, clone: Clone, op: Op) -> Tuple[str, str, str]:
        """Where the elements of this clone's rows are among all: int64 `[k]`; and how many it has, and there are in all."""
        key = (batch, task_graph, clone)
        if key not in self._found:
            nodes, device = self._nodes, self._context.device(task_graph, clone)
            ids = self._context.region.batch.grouped[batch].ids
            dtype, scope = self._context.dtype(ids), f"{self._context.scope(clone)}/elements_{self._context.flat(ids)}"
            start, rows, _ = self._rows(batch, task_graph, clone, op, scope)
            numbers = self._row_numbers(ids, task_graph, clone, scope, device)
            end = self._converter.plus(start, rows, scope + "/end")
            low, high = (nodes.cast(self._converter.scalar(number), f"{scope}/{what}", tf.int32, dtype, device)
                         for number, what in ((start, "low"), (end, "high")))
            behind = nodes.add("GreaterEqual", scope + "/behind", [numbers, low], device, T=dtype)
            before = nodes.add("Less", scope + "/before", [numbers, high], device, T=dtype)
            mask = nodes.add("LogicalAnd", scope + "/mask", [behind, before], device)
            checks = self._converter.rows_told(batch, task_graph, clone, op)
            found = nodes.add("Where", scope + "/where", [mask], device, checks, T=tf.bool)
            flat = nodes.const([-1], scope + "/flat", tf.int32, device)
            positions = nodes.add("Reshape", scope + "/positions", [found, flat], device, T=tf.int64, Tshape=tf.int32)
            own = nodes.add("Size", scope + "/own", [positions], device, T=tf.int64, out_type=tf.int32)
            self._found[key] = positions, own, self.total(batch, task_graph, clone)
        return self._found[key]

    def total(self, batch: str, task_graph: int, clone: Clone) -> str:
        """How many elements all rows have."""
        key = (batch, task_graph, clone)
        if key not in self._totals:
            ids, context, host = self._context.region.batch.grouped[batch].ids, self._context, self._context.host
            scope = f"{context.scope(clone)}/elements_{context.flat(ids)}/all"
            numbers = self._row_numbers(ids, task_graph, clone, scope, host)
            self._totals[key] = self._nodes.add("Size", scope, [numbers], host, T=context.dtype(ids), out_type=tf.int32)
        return self._totals[key]

    def rows_told(self, batch: str, task_graph: int, clone: Clone, op: Op) -> Sequence[str]:
        """Ops that fail at run time if elements are in more or fewer rows than the examples have."""
        key = (batch, task_graph, self._converter.division.mini_batch(clone))
        if key not in self._told:
            grouped = self._context.region.batch.grouped[batch]
            scope = self._context.name("guard", f"rows_{self._context.flat(grouped.ids)}")
            expected = self._converter.scalar(self._rows(batch, task_graph, clone, op, scope)[2])
            numbers = self._row_numbers(grouped.ids, task_graph, clone, scope, self._context.host)
            found = [(self._outside(grouped.ids, numbers, expected, scope), self._nodes.const(
                0, scope + "/none", tf.int32, self._context.host), grouped.ids, "has {0} elements in rows that no example has")]
            for index, tensor in enumerate(grouped.said):
                said = self._said(tensor, task_graph, clone, f"{scope}/{index}")
                found.append((said, expected, tensor, "says that there are {0} rows" + _MISFIT))
            if not grouped.said:
                last = self._last_row(grouped.ids, numbers, scope)
                found.append((last, expected, grouped.ids, "has elements in the first {0} rows only" + _MISFIT))
            self._told[key] = [check_equal(self._nodes, one, other, f"{self._context.graph.tensor_name(tensor)!r} {what}; {_FIX}",
                                           f"{scope}/check{index}", self._context.host)
                               for index, (one, other, tensor, what) in enumerate(found)]
        return self._told[key]

    def _outside(self, ids: int, numbers: str, expected: str, scope: str) -> str:
        """How many elements are in rows before the first or behind the last."""
        nodes, host, dtype = self._nodes, self._context.host, self._context.dtype(ids)
        first = nodes.const(0, scope + "/zero", dtype, host)
        end = nodes.cast(expected, scope + "/end", tf.int32, dtype, host)
        early = nodes.add("Less", scope + "/early", [numbers, first], host, T=dtype)
        late = nodes.add("GreaterEqual", scope + "/late", [numbers, end], host, T=dtype)
        either = nodes.add("LogicalOr", scope + "/either", [early, late], host)
        axes = nodes.const([0], scope + "/axes", tf.int32, host)
        counted = nodes.cast(either, scope + "/counted", tf.bool, tf.int32, host)
        return nodes.add("Sum", scope + "/outside", [counted, axes], host, T=tf.int32, Tidx=tf.int32, keep_dims=False)

    def _rows(self, batch: str, task_graph: int, clone: Clone, op: Op, scope: str) -> Tuple[Number, Number, Number]:
        """The first of a clone's rows, their number, and the number of all rows."""
        grouped, converter = self._context.region.batch.grouped[batch], self._converter
        of_all = converter.is_of_all(grouped.ids, Slice(0), op)
        found = converter.rows(op, task_graph, clone, of_all, scope, batch_of(grouped.step))
        start, rows, total = (converter.times(number, rows_each(grouped.step), f"{scope}/{index}")
                              for index, number in enumerate(found))
        return start, rows, total

    def _row_numbers(self, ids: int, task_graph: int, clone: Clone, scope: str, device: str) -> str:
        """The row of each element of all rows."""
        nodes, dtype = self._nodes, self._context.dtype(ids)
        name = self._converter.whole_value(ids, task_graph, clone)
        if self._converter.rank(ids) == 1:
            return name
        first = nodes.slice_dim(name, 1, 2, 0, 1, scope + "/first", dtype, device)
        flat = nodes.const([-1], scope + "/flat", tf.int32, device)
        return nodes.add("Reshape", scope + "/rows", [first, flat], device, T=dtype, Tshape=tf.int32)

    def _last_row(self, ids: int, numbers: str, scope: str) -> str:
        """The number of rows up to the last one that has an element."""
        nodes, host, dtype = self._nodes, self._context.host, self._context.dtype(ids)
        axes, one = nodes.const([0], scope + "/axes", tf.int32, host), nodes.const(1, scope + "/one", tf.int32, host)
        last = nodes.add("Max", scope + "/last", [numbers, axes], host, T=dtype, Tidx=tf.int32, keep_dims=False)
        return nodes.binary("Add", nodes.cast(last, scope + "/row", dtype, tf.int32, host), one, scope + "/found", tf.int32, host)

    def _said(self, tensor: int, task_graph: int, clone: Clone, scope: str) -> str:
        """The first element of a tensor that all clones have, as an int32 scalar."""
        nodes, host, dtype = self._nodes, self._context.host, self._context.dtype(tensor)
        value = self._converter.whole_value(tensor, task_graph, clone)
        if self._converter.rank(tensor) == 1:
            first = nodes.slice_dim(value, 0, 1, 0, 1, scope + "/first", dtype, host)
            value = nodes.scalar(first, scope + "/scalar", dtype, host)
        return nodes.cast(value, scope + "/said", dtype, tf.int32, host)

    def tell(self, op: Op, node: NodeDef, clone: Clone, edge: Callable[[str], str]) -> None:
        """Makes a clone of an op that adds up elements by rows know how many rows there are.

        A sum over sorted ids has as many rows as its last id says, but a clone's last example may have no element.  It becomes
        the op that is told.  A gradient's kernel returns memory as it was if there is no element at all (TensorFlow 1.15 to
        2.21), so there is one more, in a row of zeros behind the clone's own.

        Args:
            edge: name of a tensor -> what a node reads.
        """
        step, context, nodes = self._context.region.batch.counted_rows[op.id], self._context, self._nodes
        task_graph = context.task_graph_of(op)
        device, scope = context.device(task_graph, clone), f"{context.scope(clone)}/rows_{op.name}"
        _, size, _ = self._converter.rows(op, task_graph, clone, False, scope, batch_of(step))
        rows = self._converter.scalar(self._converter.times(size, rows_each(step), scope))
        if not traits(op.type).fails_empty:
            node.op = "UnsortedSegmentSum" if node.op == "SegmentSum" else f"{node.op}WithNumSegments"
            node.attr["Tnumsegments"].type = tf.int32.as_datatype_enum
            append_inputs(node, [edge(rows)])
            return
        dtypes = [context.dtype(tensor) for tensor in op.inputs]
        widths = nodes.const([[0, 1]] + [[0, 0]] * (self._converter.rank(op.inputs[0]) - 1), scope + "/widths", tf.int32, device)
        padded = nodes.add("Pad", scope + "/gradient", [node.input[0], widths], device, T=dtypes[0], Tpaddings=tf.int32)
        zero = nodes.const(np.zeros([1]), scope + "/first", dtypes[1], device)
        index = nodes.concat([node.input[1], zero], 0, scope + "/indices", dtypes[1], device)
        behind = nodes.expand_dims(rows, 0, scope + "/behind", tf.int32, device)
        number = nodes.cast(behind, scope + "/row", tf.int32, dtypes[2], device)
        ids = nodes.concat([node.input[2], number], 0, scope + "/ids", dtypes[2], device)
        for position, name in enumerate((padded, index, ids)):
            node.input[position] = edge(name)
