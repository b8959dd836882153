"""Conversions of operands inside a clone, as the batch axis analysis asks for them: slices, weights, sums over all clones."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.communicators import Communicator, Member
from whale_tf.emit.context import Clone, Context, Copy
from whale_tf.emit.division import Division, Number, Shares
from whale_tf.emit.inputs import Inputs
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import CONCAT, SAME, Conversion, Offset, Reduce, Scale, Slice, Whole
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import Layout

Coefficient = Union[int, Tuple[int, ...]]  # of an Offset
Piece = Tuple[Clone, str]  # a clone, and the name of its value


class Converter:
    """Stages conversions; each is staged once and shared."""

    def __init__(self, context: Context, nodes: Nodes, division: Division, inputs: Inputs, communicator: Communicator) -> None:
        self.context, self.nodes, self.division, self.inputs = context, nodes, division, inputs
        self.communicator = communicator
        self._converted: Dict[Tuple, str] = {}
        self._before: Dict[Tuple, Number] = {}
        self._rows: Dict[Tuple[str, int], str] = {}

    def convert(self, name: str, tensor: int, conversion: Conversion, task_graph: int, place: Clone, op: Op) -> str:
        key = (name, conversion, task_graph, place)
        if key not in self._converted:
            scope = f"{self.context.scope(place)}/{type(conversion).__name__.lower()}_{self.context.flat(tensor)}"
            if isinstance(conversion, Scale):
                done = self.scale(name, tensor, conversion.power, task_graph, place, scope, self.source_of_op(op))
            elif isinstance(conversion, Slice):
                done = self._slice(name, tensor, conversion, task_graph, place, scope, op)
            elif isinstance(conversion, Whole):
                done = self._whole_extent(tensor, conversion, task_graph, place, scope, op)
            elif isinstance(conversion, Offset):
                done = self.offset(name, tensor, conversion, task_graph, place, scope, op)
            else:
                done = self.reduced(tensor, conversion)
            self._converted[key] = done
        return self._converted[key]

    def scale(self, name: str, tensor: int, power: int, task_graph: int, place: Clone, scope: str, source: Optional[int] = None,
              device: str = "") -> str:
        """``w^power`` times a tensor, by default on the clone's device."""
        if power == 0:
            return name
        dtype, device = self.context.dtype(tensor), device or self.context.device(task_graph, place)
        weight = self.weight(tensor, task_graph, place, dtype, source)
        if not isinstance(weight, str):
            if weight == 1.0:
                return name
            factor = self.nodes.const(weight**power, scope + "/weight", dtype, device)
        else:
            factor = weight
            if power != 1:
                exponent = self.nodes.const(power, scope + "/power", dtype, device)
                factor = self.nodes.binary("Pow", weight, exponent, scope + "/weight_power", dtype, device)
        # if the tensor is in a frame or branch, the constant waits for it
        return self.nodes.binary("Mul", name, factor, scope + "/scaled", dtype, device)

    def _slice(self, name: str, tensor: int, conversion: Slice, task_graph: int, place: Clone, scope: str, op: Op) -> str:
        """This clone's rows of a tensor that was computed for the whole mini-batch, or for the mini-batches of all model replicas
        and processes."""
        start, size, total = self.rows(op, task_graph, place, self.is_of_all(tensor, conversion, op), scope)
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        shape: Optional[Tuple] = self.context.graph.tensors[tensor].shape
        parts, before = [], 0
        for index, block in enumerate(conversion.blocks):
            where = f"{scope}/block{index}"
            begin = self.times(start, block, where + "/start")
            if before:
                begin = self.plus(begin, self.times(total, before, where + "/offset"), where)
            rows = self.times(size, block, where + "/size_of")
            if shape is None:  # a parameter of a function may have none
                end = self.plus(begin, rows, where + "/end")
                parts.append(self.nodes.slice_to(name, conversion.dim, begin, end, where, dtype, device))
            else:
                parts.append(self.nodes.slice_dim(name, conversion.dim, len(shape), begin, rows, where, dtype, device))
            before += block
        return self.nodes.concat(parts, conversion.dim, scope, dtype, device)

    def offset(self, name: str, tensor: int, conversion: Offset, task_graph: int, place: Clone, scope: str, op: Op) -> str:
        """Positions within the clone's examples, converted to positions within the mini-batch, or within the examples of all
        mini-batches if these are put together.  Other values, whose coefficient is zero, stay as they are."""
        if not np.any(conversion.coefficient):
            return name
        start, _, _ = self.rows(op, task_graph, place, self.division.is_together, scope)
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        if not isinstance(start, str):
            shift = self.nodes.const(np.array(conversion.coefficient) * start, scope + "/shift", dtype, device)
        else:
            begin = self.nodes.cast(start, scope + "/start", tf.int32, dtype, device)
            coefficient = self.nodes.const(conversion.coefficient, scope + "/coefficient", dtype, device)
            shift = self.nodes.binary("Mul", coefficient, begin, scope + "/shift", dtype, device)
        return self.nodes.binary("Add", name, shift, scope, dtype, device)

    def _whole_extent(self, tensor: int, conversion: Whole, task_graph: int, place: Clone, scope: str, op: Op) -> str:
        """A clone's extent, converted to the whole batch's: ``c0 + c1 B``."""
        totals = self.totals(op, task_graph)
        batch = totals[0]
        for index, total in enumerate(totals[1:]):
            batch = self.plus(batch, total, f"{scope}/{index}")
        return self._affine(tensor, conversion.components, batch, task_graph, place, scope)

    def extent(self, tensor: int, task_graph: int, place: Clone, scope: str) -> str:
        """An extent that another TaskGraph computed for its own share, converted to this clone's: ``c0 + c1 b_i``."""
        components = self.context.region.batch.affine(tensor)
        if components is None:
            raise UnsupportedOpError(
                f"{self.context.graph.tensor_name(tensor)!r} goes to a TaskGraph with other replicas, and whale_tf does not know "
                "how it follows from the batch size; use equal replica counts, or static shapes"
            )
        return self._affine(tensor, components, self.size(tensor, task_graph, place), task_graph, place, scope)

    def _affine(self, tensor: int, components: Sequence[Tuple[int, int]], size: Number, task_graph: int, place: Clone,
                scope: str) -> str:
        """``c0 + c1 size`` for each component, in the shape of ``tensor``."""
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        shape = self.context.graph.tensors[tensor].shape or ()
        constant = np.array([c0 for c0, _ in components]).reshape(shape)
        slope = np.array([c1 for _, c1 in components]).reshape(shape)
        if not isinstance(size, str):
            return self.nodes.const(constant + slope * size, scope, dtype, device)
        size = self.nodes.cast(size, scope + "/cast", tf.int32, dtype, device)
        factor = self.nodes.const(slope, scope + "/slope", dtype, device)
        grown = self.nodes.binary("Mul", factor, size, scope + "/grown", dtype, device)
        constant_name = self.nodes.const(constant, scope + "/constant", dtype, device)
        return self.nodes.binary("Add", grown, constant_name, scope, dtype, device)

    def reduced(self, tensor: int, conversion: Reduce) -> str:
        """The whole batch's value of a tensor: the weighted sum (or max, ...) over all clones of its TaskGraph, or the examples
        of all of them."""
        context = self.context
        producer = context.graph.producer(tensor)
        home, layout = context.home(producer), context.region.batch.layout(tensor)
        scope = context.name("reduce_" + conversion.kind, context.flat(tensor))
        key = (tensor, conversion)
        if key not in self._converted:
            dtype, device = context.dtype(tensor), context.device(home, Copy(0, 0), producer.shard)
            clones = context.clones(home)[: 1 if conversion.kind == SAME else None]
            pieces = [(clone, context.tensor_in(tensor, clone)) for clone in clones]
            pieces = self.comparable(tensor, home, pieces, conversion.power, conversion.offset, scope)
            terms = [name for _, name in pieces]
            if conversion.kind == CONCAT:
                self._converted[key] = self.examples(tensor, layout, home, pieces, scope, device)
            elif conversion.kind == SAME:
                self._converted[key] = terms[0]
            else:
                here = Member(self.combine(conversion.kind, terms, scope, dtype, device), device)
                self._converted[key] = self.communicator.across(here, conversion.kind, scope + "/processes", dtype)
        return self._converted[key]

    def comparable(self, tensor: int, home: int, pieces: Sequence[Piece], power: int, offset: Coefficient,
                   scope: str) -> List[Piece]:
        """The clones' values of a tensor, times ``w^power``, with positions that count from the mini-batch's first example."""
        producer, found = self.context.graph.producer(tensor), []
        for i, (clone, name) in enumerate(pieces):
            name = self.offset(name, tensor, Offset(offset), home, clone, f"{scope}/offset{i}", producer)
            found.append((clone, self.scale(name, tensor, power, home, clone, f"{scope}/{i}")))
        return found

    def examples(self, tensor: int, layout: Layout, home: int, pieces: Sequence[Piece], scope: str, device: str,
                 equal: bool = False) -> str:
        """All clones' values of a sharded tensor, including those of other processes, in the order of the examples: block by
        block, each from all processes.

        Args:
            equal: whether all processes are known to have as many.
        """
        if self.communicator.processes == 1 or layout.blocks is None or len(layout.blocks) == 1:
            here = Member(self.concatenated(tensor, layout, home, pieces, scope, device), device)
            return self.gathered(here, tensor, layout.dim, scope + "/processes", equal)
        dtype, blocks = self.context.dtype(tensor), []
        for index in range(len(layout.blocks)):
            where = f"{scope}/block{index}"
            names = [self.block(tensor, layout, index, home, clone, name, f"{where}_{number}")
                     for number, (clone, name) in enumerate(pieces)]
            here = Member(self.nodes.concat(names, layout.dim, where, dtype, device), device)
            blocks.append(self.gathered(here, tensor, layout.dim, where + "/processes", equal))
        return self.nodes.concat(blocks, layout.dim, scope, dtype, device)

    def gathered(self, here: Member, tensor: int, dim: int, scope: str, equal: bool = False,
                 lengths: Optional[str] = None) -> str:
        """Rows of all processes along ``dim``; see :meth:`Communicator.gather_across`."""
        if self.communicator.processes == 1:
            return here.value
        rank, dtype, device = self.rank(tensor), self.context.dtype(tensor), here.device
        if dim == 0:
            return self.communicator.gather_across(here, rank, scope, dtype, equal, lengths)
        others = [axis for axis in range(rank) if axis != dim]
        first = Member(self._transposed(here.value, [dim, *others], scope + "/first", dtype, device), device)
        rows = self.communicator.gather_across(first, rank, scope + "/rows", dtype, equal, lengths)
        back = [0 if axis == dim else 1 + others.index(axis) for axis in range(rank)]
        return self._transposed(rows, back, scope, dtype, device)

    def _transposed(self, name: str, axes: Sequence[int], scope: str, dtype: tf.DType, device: str) -> str:
        order = self.nodes.const(axes, scope + "/axes", tf.int32, device)
        return self.nodes.add("Transpose", scope, [name, order], device, T=dtype, Tperm=tf.int32)

    def input_of_all(self, source: int, task_graph: int) -> str:
        """A batch input with the examples of all mini-batches, in order."""
        key = ("input of all", source)
        if key not in self._converted:
            scope, device = self.context.name("input_of_all", self.context.flat(source)), self.context.host
            layout, dtype = self.context.region.batch.layout(source), self.context.dtype(source)
            here, blocks, rows = self.inputs.concatenated(source), layout.blocks or (1,), []
            total, before = self.division.shares(source, task_graph, 0).total, 0
            for index, block in enumerate(blocks if self.communicator.processes > 1 else ()):
                where, part = f"{scope}/block{index}", here
                if len(blocks) > 1:  # so there is one mini-batch in each process
                    part = self.nodes.slice_dim(
                        here, layout.dim, self.rank(source), self.times(total, before, where + "/start"),
                        self.times(total, block, where + "/size_of"), where, dtype, device)
                rows.append(self.gathered(Member(part, device), source, layout.dim, where + "/processes"))
                before += block
            self._converted[key] = self.nodes.concat(rows, layout.dim, scope, dtype, device) if rows else here
        return self._converted[key]

    def concatenated(self, tensor: int, layout: Layout, home: int, pieces: Sequence[Piece], scope: str, device: str) -> str:
        """Clones' values of a sharded tensor, in the order of the examples."""
        names = [name for _, name in pieces]
        if layout.blocks is not None and len(layout.blocks) > 1 and len(pieces) > 1:  # each block from all clones
            names = [self.block(tensor, layout, index, home, clone, name, f"{scope}/block{index}_{number}")
                     for index in range(len(layout.blocks)) for number, (clone, name) in enumerate(pieces)]
        return self.nodes.concat(names, layout.dim, scope, self.context.dtype(tensor), device)

    def combine(self, kind: str, terms: Sequence[str], scope: str, dtype: tf.DType, device: str) -> str:
        """``sum``, ``max``, ``min``, ``prod``, ``any`` or ``all`` of tensors of the same shape."""
        if kind == "sum":
            return self.nodes.add_n(terms, scope, dtype, device)
        op_type = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "any": "LogicalOr", "all": "LogicalAnd"}[kind]
        total = terms[0]
        for index, term in enumerate(terms[1:]):
            where = f"{scope}/{index}"
            if dtype == tf.bool:
                total = self.nodes.add(op_type, where, [total, term], device)
            else:
                total = self.nodes.binary(op_type, total, term, where, dtype, device)
        return total

    def localised(self, op: Op, position: int, place: Clone) -> str:
        """A shape operand that contains the static batch size, rewritten for this clone's examples."""
        home = self.context.home(op)
        share, index = self.share_of_op(op, home, place)
        size = share.sizes[index]
        scope = f"{self.context.scope(place)}/local_{op.name}_{position}"
        dtype, device = self.context.dtype(op.inputs[position]), self.context.device(home, place)
        components = self.context.region.batch.localise[(op.id, position)].components
        value = self.context.graph.producer(op.inputs[position]).value
        if isinstance(size, str) or (value is None and None in components):
            raise self._built_for(op, position)
        old = [None] * len(components) if value is None else np.asarray(value).reshape(-1).tolist()
        new = [c[0] + c[1] * size if c is not None else kept for c, kept in zip(components, old)]
        shape = self.context.graph.tensors[op.inputs[position]].shape
        return self.nodes.const(np.reshape(np.array(new), shape), scope, dtype, device)

    def _built_for(self, op: Op, position: int) -> UnsupportedOpError:
        """The model has a static batch size, and the data lack it."""
        graph, components = self.context.graph, self.context.region.batch.localise[(op.id, position)].components
        value, source = graph.producer(op.inputs[position]).value, graph.tensor_name(self.source_of_op(op))
        held = [] if value is None else np.asarray(value).reshape(-1).tolist()
        sizes = {(number - each[0]) // each[1] for number, each in zip(held, components) if each is not None and each[1]}
        size = min(sizes) if len(sizes) == 1 else "one size"
        batch = size if isinstance(size, int) else "n"
        return UnsupportedOpError(
            f"the model is built for mini-batches of {size} examples (op {op.name!r} reads a constant that contains the batch "
            f"size), but the data leave the batch size of {source!r} open; give it to the data: "
            f"dataset.batch({batch}, drop_remainder=True), or a placeholder of shape [{batch}, ...]; or let the model take its "
            "sizes from tf.shape")

    def of_this_process(self, name: str, tensor: int, power: int, scope: str, device: str) -> str:
        """A weighted sum over this process's clones, converted to the value of its own mini-batches: times
        ``(B / B_here)^power``."""
        if power == 0 or self.communicator.processes == 1:
            return name
        context, dtype = self.context, self.context.dtype(tensor)
        source, home = context.region.batch.source_of[tensor], context.home(context.graph.producer(tensor))
        ratio = self.division.of_this_process(source, home, dtype)
        for index in range(abs(power)):
            factor = ratio if isinstance(ratio, str) else self.nodes.const(ratio, scope + "/ratio", dtype, device)
            where = f"{scope}/own{index}"
            name = self.nodes.binary("Mul" if power > 0 else "RealDiv", name, factor, where, dtype, device)
        return name

    def rows_of_each_process(self, tensor: int, layout: Layout) -> Optional[str]:
        """How many rows of a sharded tensor each process has, int32 `[processes]`; None: it does not follow from the examples."""
        source = self.context.region.batch.source_of.get(tensor)
        if source is None or not layout.blocks or self.communicator.processes == 1:
            return None
        home, rows = self.context.home(self.context.graph.producer(tensor)), sum(layout.blocks)
        each = self.division.of_each_process(source, home)
        if rows == 1:
            return each
        if (each, rows) not in self._rows:
            scope = self.context.name("division", f"{self.context.flat(source)}_t{home}_rows{rows}")
            factor = self.nodes.const(rows, scope + "/factor", tf.int32, self.context.host)
            self._rows[each, rows] = self.nodes.binary("Mul", each, factor, scope, tf.int32, self.context.host)
        return self._rows[each, rows]

    def times_mini_batches(self, name: str, tensor: int, home: int, place: Clone) -> str:
        dtype, device = self.context.dtype(tensor), self.context.device(home, place)
        key = (name, "mini-batches", home, place)
        if key not in self._converted:
            scope = f"{self.context.scope(place)}/times_mini_batches_{self.context.flat(tensor)}"
            count = self.nodes.const(self.division.mini_batches, scope + "/count", dtype, device)
            self._converted[key] = self.nodes.binary("Mul", name, count, scope, dtype, device)
        return self._converted[key]

    def weight(self, tensor: int, task_graph: int, place: Clone, dtype: tf.DType,
               source: Optional[int] = None) -> Union[float, str]:
        """``w_i``, from an input that the tensor (or the op that reads it: ``source``) depends on anyway."""
        if source is None:
            source = self.context.region.batch.source_of[tensor]
        return self.division.weight(source, task_graph, place, dtype)

    def share_of_op(self, op: Op, task_graph: int, place: Clone) -> Tuple[Shares, int]:
        """The shares of the mini-batch that determine an op's operands or results, and the clone's position in them."""
        source = self.source_of_op(op)
        return self.division.shares(source, task_graph, place.g), self.division.position(task_graph, place)

    def rows(self, op: Op, task_graph: int, place: Clone, of_all: bool, scope: str) -> Tuple[Number, Number, Number]:
        """A clone's first example, its number of examples, and the number of examples of all clones: in the clone's mini-batch,
        or (``of_all``) in the concatenated mini-batches of all model replicas and processes."""
        share, position = self.share_of_op(op, task_graph, place)
        start, total = share.starts[position], share.total
        if of_all and self.division.mini_batches > 1:
            start = self.plus(self.before(op, task_graph, place), start, scope + "/among_all")
            total = 0
            for index, each in enumerate(self.totals(op, task_graph)):
                total = self.plus(each, total, f"{scope}/all{index}")
        return start, share.sizes[position], total

    def before(self, op: Op, task_graph: int, place: Clone) -> Number:
        """How many examples the mini-batches before a clone's own have, including those of other processes."""
        source = self.source_of_op(op)
        key = ("before", source, task_graph, place.g)
        if key not in self._before:
            scope = self.context.name("division", f"{self.context.flat(source)}_before{place.g}")
            count = self.division.before_this_process(source, task_graph)
            for g in range(place.g if self.division.own else 0):
                count = self.plus(count, self.division.shares(source, task_graph, g).total, f"{scope}/{g}")
            self._before[key] = count
        return self._before[key]

    def is_of_all(self, tensor: int, conversion: Slice, op: Op) -> bool:
        """Whether a tensor that is cut into rows has the rows of all mini-batches.  Results of a section do, and so do values
        combined over all clones with as many rows as there are examples.  A constant has the rows of one mini-batch."""
        shape = self.context.graph.tensors[tensor].shape
        return self.context.graph.tensors[tensor].op in self.context.region.sections or (
            self.division.is_together and shape is not None and shape[conversion.dim] is None)

    def totals(self, op: Op, task_graph: int) -> List[Number]:
        """The number of examples of each model replica's mini-batch, or of the one that they share, and of the mini-batches of
        other processes."""
        source = self.source_of_op(op)
        here = [self.division.shares(source, task_graph, g).total for g in range(self.division.mini_batches_here)]
        elsewhere = self.division.elsewhere(source, task_graph)
        return here + ([] if elsewhere == 0 else [elsewhere])

    def source_of_op(self, op: Op) -> int:
        known = self.context.region.batch.source_of
        return next((known[t] for t in op.outputs + op.inputs if t in known), next(iter(self.inputs.sources)))

    def size(self, tensor: int, task_graph: int, place: Clone) -> Number:
        """How many examples a clone works on, from an input that the tensor depends on."""
        share = self.division.shares(self.context.region.batch.source_of[tensor], task_graph, place.g)
        return share.sizes[self.division.position(task_graph, place)]

    def start(self, tensor: int, task_graph: int, place: Clone) -> Number:
        """The first of them."""
        share = self.division.shares(self.context.region.batch.source_of[tensor], task_graph, place.g)
        return share.starts[self.division.position(task_graph, place)]

    def scalar(self, value: Number) -> str:
        """A number as the name of an int32 scalar."""
        if isinstance(value, str):
            return value
        return self.nodes.const(value, self.context.name("number", str(value)), tf.int32, self.context.host)

    def rows_each(self, rows: int, name: str, tensor: int, dim: int, examples: Number, scope: str, device: str) -> Number:
        """Rows of each example; if the analysis does not know them (-1), measured on a value with ``examples`` examples."""
        if rows != -1:
            return rows
        shape = self.nodes.shape(name, scope + "/shape", self.context.dtype(tensor), device)
        all_rows = self.nodes.slice_dim(shape, 0, 1, dim, 1, scope + "/rows", tf.int32, device)
        count = self.nodes.scalar(all_rows, scope + "/row_count", tf.int32, device)
        return self.nodes.binary("FloorDiv", count, self.scalar(examples), scope + "/rows_each", tf.int32, device)

    def times(self, value: Number, factor: Number, scope: str) -> Number:
        return self._arithmetic("Mul", value, factor, scope + "/times")

    def plus(self, a: Number, b: Number, scope: str) -> Number:
        return self._arithmetic("Add", a, b, scope + "/plus")

    def minus(self, a: Number, b: Number, scope: str) -> Number:
        return self._arithmetic("Sub", a, b, scope + "/minus")

    def _arithmetic(self, op_type: str, a: Number, b: Number, scope: str) -> Number:
        if not isinstance(a, str) and not isinstance(b, str):
            return a * b if op_type == "Mul" else a + b if op_type == "Add" else a - b
        if op_type == "Mul" and b == 1:
            return a
        host = self.context.host
        first, second = (x if isinstance(x, str) else self.nodes.const(x, scope + "/const", tf.int32, host) for x in (a, b))
        return self.nodes.binary(op_type, first, second, scope, tf.int32, host)

    def rank(self, tensor: int) -> int:
        shape: Optional[Tuple] = self.context.graph.tensors[tensor].shape
        if shape is None:
            raise UnsupportedOpError(
                f"tensor {self.context.graph.tensor_name(tensor)!r} has to be divided over clones, but its rank is not known; "
                "set its shape with tf.ensure_shape"
            )
        return len(shape)

    def block(self, tensor: int, layout: Layout, index: int, task_graph: int, clone: Clone, name: str, scope: str) -> str:
        """Block ``index`` of a clone's value of a sharded tensor."""
        assert layout.blocks is not None
        if len(layout.blocks) == 1:
            return name
        size, device = self.size(tensor, task_graph, clone), self.context.device(task_graph, clone, self.context.shard_of(tensor))
        begin = self.times(size, sum(layout.blocks[:index]), scope + "/from")
        rows = self.times(size, layout.blocks[index], scope + "/size_of")
        return self.nodes.slice_dim(name, layout.dim, self.rank(tensor), begin, rows, scope, self.context.dtype(tensor), device)
