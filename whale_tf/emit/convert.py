"""Conversions of operands inside a clone, as the batch axis analysis asks for them: slices, weights, sums over all clones."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.communicators import Communicator, Member
from whale_tf.emit.checks import check_equal
from whale_tf.emit.context import Clone, Context
from whale_tf.emit.elements import Elements
from whale_tf.emit.inputs import Inputs
from whale_tf.emit.shares import BatchShares, Number, Shares
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import Conversion, Offset, Reduce, Scale, Slice, Whole, columns
from whale_tf.ir.extents import Size, SizeLike
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import (
    PLAIN,
    REFERENCE,
    Base,
    Block,
    Exponent,
    Layout,
    Rows,
    batch_of,
    exponents_of,
    is_grouped,
    is_grouped_batch,
    is_measured,
    rows_each,
)
from whale_tf.ir.traits import Gives, traits
from whale_tf.ir.units import frame_of_outputs, frames


class Converter:
    """Stages conversions; each is staged once and shared.

    Attributes:
        combined: the whole batch's value of a tensor (:class:`whale_tf.emit.operands.Operands` sets it).
        whole_value: (tensor, TaskGraph, clone) -> a tensor that all clones have whole, as the clone reads it (so does this).
    """

    combined: Callable[[int, Reduce], str]
    whole_value: Callable[[int, int, Clone], str]

    def __init__(self, context: Context, nodes: Nodes, division: BatchShares, inputs: Inputs, communicator: Communicator) -> None:
        self.context, self.nodes, self.division, self.inputs = context, nodes, division, inputs
        self.communicator = communicator
        self._converted: Dict[Tuple, str] = {}
        self._before: Dict[Tuple, Number] = {}
        self._rows: Dict[Tuple[str, int], str] = {}
        self._elements = Elements(self)
        self._compared: Dict[Tuple, Tuple[str, ...]] = {}
        self._tables: Dict[str, List[str]] = {}  # batch -> checks that it has the rows of a tensor of static size
        self._frames: Optional[Dict[int, Tuple[str, ...]]] = None

    def convert(self, name: str, tensor: int, conversion: Conversion, task_graph: int, clone: Clone, op: Op) -> str:
        key = (name, conversion, task_graph, clone)
        if key not in self._converted:
            scope = f"{self.context.scope(clone)}/{type(conversion).__name__.lower()}_{self.context.flat(tensor)}"
            if isinstance(conversion, Scale):
                done = self.scale(name, tensor, conversion.power, task_graph, clone, scope, op)
            elif isinstance(conversion, Slice):
                done = self._slice(name, tensor, conversion, task_graph, clone, scope, op)
            elif isinstance(conversion, Whole):
                done = self._whole_extent(tensor, conversion, task_graph, clone, scope, op)
            elif isinstance(conversion, Offset):
                done = self.offset(name, tensor, conversion, task_graph, clone, scope, op)
            else:
                done = self.combined(tensor, conversion)
            self._converted[key] = done
        return self._converted[key]

    def scale(self, name: str, tensor: int, power: Exponent, task_graph: int, clone: Clone, scope: str, op: Optional[Op] = None,
              device: str = "") -> str:
        """``w^power`` times a tensor, by default on the clone's device.  The weights are computed from inputs on which the
        tensor, or the op that reads it, depends anyway."""
        dtype, device = self.context.dtype(tensor), device or self.context.device(task_graph, clone)
        for number, (base, exponent) in enumerate(sorted(exponents_of(power).items())):
            where = f"{scope}/{number}" if number else scope
            weight = self.weight([tensor] if op is None else op.outputs + op.inputs, task_graph, clone, dtype, base)
            if weight == 1.0:
                continue
            if not isinstance(weight, str):
                factor = self.nodes.const(weight**exponent, where + "/weight", dtype, device)
            elif exponent == 1:
                factor = weight
            else:
                factor = self.nodes.binary("Pow", weight, self.nodes.const(exponent, where + "/power", dtype, device),
                                           where + "/weight_power", dtype, device)
            # if the tensor is in a frame or branch, the constant waits for it
            name = self.nodes.binary("Mul", name, factor, where + "/scaled", dtype, device)
        return name

    def _slice(self, name: str, tensor: int, conversion: Slice, task_graph: int, clone: Clone, scope: str, op: Op) -> str:
        """This clone's rows of a tensor that was computed for the whole mini-batch, or for the mini-batches of all model replicas
        and processes."""
        if is_grouped(conversion.blocks):
            return self._elements.of(name, tensor, conversion, task_graph, clone, scope, op)
        of_all, dtype, device = (self.is_of_all(tensor, conversion, op), self.context.dtype(tensor),
                                 self.context.device(task_graph, clone))
        shape: Optional[Tuple] = self.context.graph.tensors[tensor].shape
        parts: List[str] = []
        before: Dict[str, int] = {}  # batch -> rows for each of its examples in front of a block
        found = {batch: self.rows(op, task_graph, clone, of_all, scope + _suffix(batch), batch)
                 for batch in dict.fromkeys(map(batch_of, conversion.blocks))}
        checks = self.compared(name, tensor, conversion, task_graph, clone, op)
        spans: List[Tuple[Number, Number]] = []
        for index, block in enumerate(conversion.blocks):
            where, batch, each = f"{scope}/block{index}", batch_of(block), rows_each(block)
            start, size, _ = found[batch]
            begin = self.times(start, each, where + "/start")
            for other, count in before.items():
                more = self.times(found[other][2], count, where + _suffix(other) + "/offset")
                begin = self.plus(begin, more, where + _suffix(other))
            rows = self.times(size, each, where + "/size_of")
            before[batch] = before.get(batch, 0) + each
            if checks is None:
                spans.append((begin, rows))
            elif shape is None:  # a parameter of a function may have none
                end = self.plus(begin, rows, where + "/end")
                parts.append(self.nodes.slice_to(name, conversion.dim, begin, end, where, dtype, device, checks))
            else:
                parts.append(self.nodes.slice_dim(name, conversion.dim, len(shape), begin, rows, where, dtype, device, checks))
        if checks is None:
            end = self._rows_of_all(conversion, {batch: total for batch, (_, _, total) in found.items()}, scope + "/rows")
            parts = self._cut_out(name, conversion.dim, spans, end, scope + "/cut", dtype, device)
        return self.nodes.concat(parts, conversion.dim, scope, dtype, device)

    def rows_told(self, batch: str, task_graph: int, clone: Clone, op: Op) -> Sequence[str]:
        """Ops that fail at run time if elements are in more or fewer rows than the examples have."""
        return self._elements.rows_told(batch, task_graph, clone, op)

    def tell_rows(self, op: Op, node: NodeDef, clone: Clone, edge: Callable[[str], str]) -> None:
        """Makes a clone of an op that adds up elements by rows know how many rows there are; see :class:`Elements`."""
        self._elements.tell(op, node, clone, edge)

    def _cut_out(self, name: str, dim: int, spans: Sequence[Tuple[Number, Number]], end: Number, scope: str, dtype: tf.DType,
                 device: str) -> List[str]:
        """Slices ``(begin, size)`` of a tensor, by an op that fails if it does not have ``end`` rows."""
        lengths: List[Number] = []
        last: Number = 0
        for index, (begin, rows) in enumerate(spans):
            where = f"{scope}/{index}"
            lengths += [self.minus(begin, last, where + "/gap"), rows]
            last = self.plus(begin, rows, where + "/end")
        lengths.append(self.minus(end, last, scope + "/rest"))
        names = [each if isinstance(each, str) else self.nodes.const(each, f"{scope}/length{index}", tf.int32, device)
                 for index, each in enumerate(lengths)]
        sizes = self.nodes.add("Pack", scope + "/lengths", names, device, T=tf.int32, N=len(names), axis=0)
        return self.nodes.split(name, sizes, len(names), dim, scope, dtype, device)[1::2]

    def _rows_of_all(self, conversion: Slice, totals: Mapping[str, Number], scope: str) -> Number:
        """How many rows a tensor has that is cut into the rows of clones.

        Args:
            totals: batch -> its examples.
        """
        rows: Number = 0
        for index, block in enumerate(conversion.blocks):
            more = self.times(totals[batch_of(block)], rows_each(block), f"{scope}/{index}")
            rows = more if index == 0 else self.plus(rows, more, f"{scope}/{index}")
        return rows

    def compared(self, name: str, tensor: int, conversion: Slice, task_graph: int, clone: Clone,
                 op: Op) -> Optional[Sequence[str]]:
        """Ops that fail at run time if a whole tensor does not have the rows that the clones take of it; one for each tensor and
        mini-batch.  None: this cannot be said before it is cut."""
        if takes_some(op):
            return ()
        of_all = self.is_of_all(tensor, conversion, op)
        batches = list(dict.fromkeys(map(batch_of, conversion.blocks)))
        producer, region = self.context.graph.producer(tensor).id, self.context.region
        is_once = producer not in region.batch_level or producer in region.sections  # so it is the same in all clones
        sources = tuple(self.source_of_op(op, batch) for batch in batches)
        key = (tensor if is_once else name, conversion, of_all, sources, self.division.mini_batch(clone))
        if key not in self._compared:
            scope = self.context.name("guard", self.context.flat(tensor))
            totals = {batch: self.rows(op, task_graph, clone, of_all, scope + _suffix(batch), batch)[2] for batch in batches}
            device = self.context.device(task_graph, clone)
            self._compared[key] = self._compare(name, tensor, conversion, totals, device, scope)
        return self._compared[key]

    def _compare(self, name: str, tensor: int, conversion: Slice, totals: Mapping[str, Number], device: str,
                 scope: str) -> Tuple[str, ...]:
        graph, dtype, host = self.context.graph, self.context.dtype(tensor), self.context.host
        if self.is_static(tensor, conversion, totals):
            return ()
        expected = self.scalar(self._rows_of_all(conversion, totals, scope + "/expected"))
        if self.has_static_rows(tensor, conversion):
            found = self.scalar(self.context.static_shape(tensor)[conversion.dim])
        else:
            shape = self.nodes.shape(name, scope + "/shape", dtype, device)
            rows = self.nodes.slice_dim(shape, 0, 1, conversion.dim, 1, scope + "/rows", tf.int32, host)
            found = self.nodes.scalar(rows, scope + "/found", tf.int32, host)
        message = (f"{graph.tensor_name(tensor)!r} has {{0}} rows along dimension {conversion.dim}, but the examples to which "
                   f"they belong have {{1}}{of_inputs(self.context, conversion.blocks)}; give each example its row, or declare "
                   "with wh.batch_axis(tensor, None) that the rows of an input are not examples")
        check = check_equal(self.nodes, found, expected, message, scope, host)
        if self.has_static_rows(tensor, conversion):
            for batch in totals:
                self._tables.setdefault(batch, []).append(check)
        return (check,)

    def is_static(self, tensor: int, conversion: Slice, totals: Mapping[str, Number]) -> bool:
        """Whether a whole tensor and the examples that it is cut into have sizes that are known now."""
        return self.has_static_rows(tensor, conversion) and not any(isinstance(each, str) for each in totals.values())

    def has_static_rows(self, tensor: int, conversion: Slice) -> bool:
        shape = self.context.graph.tensors[tensor].shape
        return shape is not None and shape[conversion.dim] is not None

    def offset(self, name: str, tensor: int, conversion: Offset, task_graph: int, clone: Clone, scope: str, op: Op,
               device: str = "") -> str:
        """Positions within the clone's examples, converted to positions within the mini-batch, or within the examples of all
        mini-batches if these are put together.  Other values, whose coefficient is zero, stay as they are."""
        steps = columns(conversion.coefficient, 1)
        dtype, device = self.context.dtype(tensor), device or self.context.device(task_graph, clone)
        for batch in dict.fromkeys(batch_of(step) for step in steps if step):
            where = scope + _suffix(batch)
            each = [rows_each(step) if batch_of(step) == batch else 0 for step in steps]
            coefficient = each[0] if isinstance(conversion.coefficient, (int, Rows)) else each
            start, _, _ = self.rows(op, task_graph, clone, self.division.is_together, where, batch)
            if not isinstance(start, str):
                shift = self.nodes.const(np.array(coefficient) * start, where + "/shift", dtype, device)
            else:
                begin = self.nodes.cast(start, where + "/start", tf.int32, dtype, device)
                shift = self.nodes.binary("Mul", self.nodes.const(coefficient, where + "/coefficient", dtype, device), begin,
                                          where + "/shift", dtype, device)
            name = self.nodes.binary("Add", name, shift, where, dtype, device)
        return name

    def _whole_extent(self, tensor: int, conversion: Whole, task_graph: int, clone: Clone, scope: str, op: Op) -> str:
        """A clone's extent, converted to the whole batch's.  It waits for the checks of tables with a row for each example: an op
        that compares both extents would fail with a message that says less."""
        def number_of(batch: str) -> Number:
            if is_grouped_batch(batch):
                return self._elements.total(batch, task_graph, clone)
            total: Number
            total, *more = self.totals(op, task_graph, batch)
            for index, each in enumerate(more):
                total = self.plus(total, each, f"{scope}{_suffix(batch)}/{index}")
            return total

        sizes = self._sizes(tensor, conversion.components, number_of, task_graph, clone, scope)
        batches = {batch for size in conversion.components if isinstance(size, Size) for batch in size.counts or {}}
        checks = [check for batch in sorted(batches) for check in self._tables.get(batch, ())]
        if not checks:
            return sizes
        return self.nodes.identity(sizes, scope + "/checked", self.context.dtype(tensor), self.context.device(task_graph, clone),
                                   list(dict.fromkeys(checks)))

    def extent(self, tensor: int, task_graph: int, clone: Clone, scope: str) -> str:
        """An extent that another TaskGraph computed for its own share, converted to this clone's."""
        sizes = self.context.region.batch.counted(tensor)
        assert sizes is not None, "no bridge is lowered for others"
        return self._sizes(tensor, sizes, lambda batch: self.size(tensor, task_graph, clone, batch), task_graph, clone, scope)

    def _sizes(self, tensor: int, sizes: Sequence[SizeLike], number_of: Callable[[str], Number], task_graph: int, clone: Clone,
               scope: str) -> str:
        """Sizes in the shape of ``tensor``; ``number_of``: batch -> how many examples its symbol stands for."""
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, clone)
        shape = self.context.graph.tensors[tensor].shape or ()
        constant = np.array([size.constant if isinstance(size, Size) else int(size) for size in sizes]).reshape(shape)
        counts = [size.counts or {} if isinstance(size, Size) else {} for size in sizes]
        found = ""
        for batch in sorted({batch for each in counts for batch in each}):
            where, number = scope + _suffix(batch), number_of(batch)
            slope = np.array([each.get(batch, 0) for each in counts]).reshape(shape)
            if not isinstance(number, str):
                constant = constant + slope * number
                continue
            number = self.nodes.cast(number, where + "/cast", tf.int32, dtype, device)
            factor = self.nodes.const(slope, where + "/slope", dtype, device)
            grown = self.nodes.binary("Mul", factor, number, where + "/grown", dtype, device)
            found = self.nodes.binary("Add", found, grown, where + "/sum", dtype, device) if found else grown
        if not found:
            return self.nodes.const(constant, scope, dtype, device)
        constant_name = self.nodes.const(constant, scope + "/constant", dtype, device)
        return self.nodes.binary("Add", found, constant_name, scope, dtype, device)

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
            before: Number = 0
            for index, block in enumerate(blocks if self.communicator.processes > 1 else ()):
                where, part = f"{scope}/block{index}", here
                if len(blocks) > 1:  # so there is one mini-batch in each process
                    of_batch = self.context.region.batch.source_of([source], batch_of(block))
                    total = self.division.shares(of_batch, task_graph, 0).total
                    length = self.times(total, rows_each(block), where + "/size_of")
                    part = self.nodes.slice_dim(here, layout.dim, self.rank(source), before, length, where, dtype, device)
                    before = self.plus(before, length, where + "/end")
                rows.append(self.gathered(Member(part, device), source, layout.dim, where + "/processes"))
            self._converted[key] = self.nodes.concat(rows, layout.dim, scope, dtype, device) if rows else here
        return self._converted[key]

    def in_frame(self, tensor: int) -> bool:
        """Whether a tensor is inside a loop of version 1, where sizes of the whole step cannot be read."""
        if self._frames is None:
            self._frames = frames(self.context.graph)
        return bool(frame_of_outputs(self.context.graph.producer(tensor), self._frames))

    def localised(self, op: Op, position: int, clone: Clone, name: str) -> str:
        """A shape operand that contains the static batch size, rewritten for this clone's examples.

        Args:
            name: the operand, of which a section may have computed sizes; its other elements are kept.
        """
        task_graph = self.context.task_graph_of(op)
        if self.context.region.batch.localise[(op.id, position)].of_section:
            return self._part_of_sizes(op, position, clone, name)
        share, index = self.share_of_op(op, task_graph, clone)
        size = share.sizes[index]
        scope = f"{self.context.scope(clone)}/local_{op.name}_{position}"
        dtype, device = self.context.dtype(op.inputs[position]), self.context.device(task_graph, clone)
        components = self.context.region.batch.localise[(op.id, position)].components
        value = self.context.graph.producer(op.inputs[position]).value
        if isinstance(size, str) or (value is None and None in components):
            raise self._built_for(op, position)
        old = [None] * len(components) if value is None else np.asarray(value).reshape(-1).tolist()
        new = [(each.at(size) if isinstance(each, Size) else each) if each is not None else kept
               for each, kept in zip(components, old)]
        shape = self.context.graph.tensors[op.inputs[position]].shape
        return self.nodes.const(np.reshape(np.array(new), shape), scope, dtype, device)

    def _part_of_sizes(self, op: Op, position: int, clone: Clone, name: str) -> str:
        tensor, task_graph = op.inputs[position], self.context.task_graph_of(op)
        scope = f"{self.context.scope(clone)}/local_{op.name}_{position}"
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, clone)
        components = self.context.region.batch.localise[(op.id, position)].components
        sizes = self._sizes(tensor, [0 if each is None else each for each in components],
                            lambda batch: self.rows(op, task_graph, clone, False, scope + "/of", batch)[1],
                            task_graph, clone, scope)
        if None not in components:
            return sizes
        kept = np.array([int(each is None) for each in components])  # a scalar has one component, which is a size
        mask = self.nodes.const(kept, scope + "/kept", dtype, device)
        others = self.nodes.binary("Mul", name, mask, scope + "/others", dtype, device)
        return self.nodes.binary("Add", sizes, others, scope + "/part", dtype, device)

    def _built_for(self, op: Op, position: int) -> UnsupportedOpError:
        """The model has a static batch size, and the data lack it."""
        graph, components = self.context.graph, self.context.region.batch.localise[(op.id, position)].components
        value, source = graph.producer(op.inputs[position]).value, self.input_of(op)
        held = [] if value is None else np.asarray(value).reshape(-1).tolist()
        counted = [(number - each.constant, (each.counts or {}).get(REFERENCE)) for number, each in zip(held, components)
                   if isinstance(each, Size)]
        sizes = {number // count for number, count in counted if count}
        size = min(sizes) if len(sizes) == 1 else "one size"
        batch = size if isinstance(size, int) else "n"
        return UnsupportedOpError(
            f"the model is built for mini-batches of {size} examples (op {op.name!r} reads a constant that contains the batch "
            f"size), but the data leave the batch size of {source!r} open; give it to the data: "
            f"dataset.batch({batch}, drop_remainder=True), a placeholder of shape [{batch}, ...], or, for tensors that several "
            f"processes give a tf.function, its input_signature=[tf.TensorSpec([{batch}, ...])]; or let the model take its sizes "
            "from tf.shape")

    def of_this_process(self, name: str, tensor: int, power: Exponent, scope: str, device: str) -> str:
        """A weighted sum over this process's clones, converted to the value of its own mini-batches: times
        ``(B / B_here)^power``."""
        context, dtype = self.context, self.context.dtype(tensor)
        task_graph, number = context.task_graph_of(context.graph.producer(tensor)), 0
        for base, exponent in sorted(exponents_of(power).items()) if self.communicator.processes > 1 else ():
            ratio = self.division.of_this_process(self.counted(base, [tensor]), task_graph, dtype)
            for _ in range(abs(exponent)):
                factor = ratio if isinstance(ratio, str) else self.nodes.const(ratio, scope + "/ratio", dtype, device)
                where, number = f"{scope}/own{number}", number + 1
                name = self.nodes.binary("Mul" if exponent > 0 else "RealDiv", name, factor, where, dtype, device)
        return name

    def counted(self, base: Base, tensors: Sequence[int]) -> Tuple[Tuple[int, int], ...]:
        """Inputs whose examples a weight counts, and how often; if possible inputs on which one of the tensors depends."""
        return tuple((self.context.region.batch.source_of(tensors, batch), count) for batch, count in base)

    def rows_of_each_process(self, tensor: int, layout: Layout) -> Optional[str]:
        """How many rows of a sharded tensor each process has, int32 `[processes]`; None: it does not follow from the examples."""
        batch = self.context.region.batch
        batches = {batch_of(block) for block in layout.blocks or ()}
        if (is_grouped(layout.blocks) or is_measured(layout.blocks) or not batch.follows(tensor) or len(batches) != 1
                or self.communicator.processes == 1):
            return None
        source = batch.source_of([tensor], batches.pop())
        task_graph = self.context.task_graph_of(self.context.graph.producer(tensor))
        rows = sum(map(rows_each, layout.blocks or ()))
        each = self.division.of_each_process(source, task_graph)
        if rows == 1:
            return each
        if (each, rows) not in self._rows:
            scope = self.context.name("division", f"{self.context.flat(source)}_t{task_graph}_rows{rows}")
            factor = self.nodes.const(rows, scope + "/factor", tf.int32, self.context.host)
            self._rows[each, rows] = self.nodes.binary("Mul", each, factor, scope, tf.int32, self.context.host)
        return self._rows[each, rows]

    def times_mini_batches(self, name: str, tensor: int, task_graph: int, clone: Clone) -> str:
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, clone)
        key = (name, "mini-batches", task_graph, clone)
        if key not in self._converted:
            scope = f"{self.context.scope(clone)}/times_mini_batches_{self.context.flat(tensor)}"
            count = self.nodes.const(self.division.mini_batches, scope + "/count", dtype, device)
            self._converted[key] = self.nodes.binary("Mul", name, count, scope, dtype, device)
        return self._converted[key]

    def weight(self, tensors: Sequence[int], task_graph: int, clone: Clone, dtype: tf.DType,
               base: Base = PLAIN) -> Union[float, str]:
        """``w_i``, if possible from inputs on which one of the tensors depends anyway."""
        return self.division.weight(self.counted(base, tensors), task_graph, clone, dtype)

    def share_of_op(self, op: Op, task_graph: int, clone: Clone, batch: str = REFERENCE) -> Tuple[Shares, int]:
        """The shares of the mini-batch that determine an op's operands or results, and the clone's position in them."""
        source = self.source_of_op(op, batch)
        share = self.division.shares(source, task_graph, self.division.mini_batch(clone))
        return share, self.division.position(task_graph, clone)

    def rows(self, op: Op, task_graph: int, clone: Clone, of_all: bool, scope: str,
             batch: str = REFERENCE) -> Tuple[Number, Number, Number]:
        """A clone's first example, its number of examples, and the number of examples of all clones: in the clone's mini-batch,
        or (``of_all``) in the concatenated mini-batches of all model replicas and processes."""
        if is_grouped_batch(batch):
            _, own, of_rows = self._elements.positions(batch, task_graph, clone, op)
            return 0, own, of_rows
        share, position = self.share_of_op(op, task_graph, clone, batch)
        start, total = share.starts[position], share.total
        if of_all and self.division.mini_batches > 1:
            start = self.plus(self.before(op, task_graph, clone, batch), start, scope + "/among_all")
            total = 0
            for index, each in enumerate(self.totals(op, task_graph, batch)):
                total = self.plus(each, total, f"{scope}/all{index}")
        return start, share.sizes[position], total

    def before(self, op: Op, task_graph: int, clone: Clone, batch: str = REFERENCE) -> Number:
        """How many examples the mini-batches before a clone's own have, including those of other processes."""
        source = self.source_of_op(op, batch)
        own = self.division.mini_batch(clone)
        key = ("before", source, task_graph, own)
        if key not in self._before:
            scope = self.context.name("division", f"{self.context.flat(source)}_before{own}")
            count = self.division.before_this_process(source, task_graph)
            for number in range(own):
                count = self.plus(count, self.division.shares(source, task_graph, number).total, f"{scope}/{number}")
            self._before[key] = count
        return self._before[key]

    def is_of_all(self, tensor: int, conversion: Slice, op: Op) -> bool:
        """Whether a tensor that is cut into rows has the rows of all mini-batches.  Results of a section do, and so do values
        combined over all clones with as many rows as there are examples.  A constant has the rows of one mini-batch."""
        shape = self.context.graph.tensors[tensor].shape
        return self.context.graph.tensors[tensor].op in self.context.region.sections or (
            self.division.is_together and shape is not None and shape[conversion.dim] is None)

    def totals(self, op: Op, task_graph: int, batch: str = REFERENCE) -> List[Number]:
        """The number of examples of each mini-batch, and of those of other processes together."""
        source = self.source_of_op(op, batch)
        here = [self.division.shares(source, task_graph, g).total for g in range(self.division.mini_batches_here)]
        elsewhere = self.division.elsewhere(source, task_graph)
        return here + ([] if elsewhere == 0 else [elsewhere])

    def source_of_op(self, op: Op, batch: str = REFERENCE) -> int:
        return self.context.region.batch.source_of(op.outputs + op.inputs, batch)

    def input_of(self, op: Op) -> str:
        """Name of an input with an op's examples, for messages."""
        return self.context.graph.tensor_name(self.source_of_op(op))

    def size(self, tensor: int, task_graph: int, clone: Clone, batch: str = REFERENCE) -> Number:
        """How many examples of a batch a clone works on, if possible from an input that the tensor depends on."""
        if is_grouped_batch(batch):
            return self._elements.positions(batch, task_graph, clone, self.context.graph.producer(tensor))[1]
        source = self.context.region.batch.source_of([tensor], batch)
        share = self.division.shares(source, task_graph, self.division.mini_batch(clone))
        return share.sizes[self.division.position(task_graph, clone)]

    def start(self, tensor: int, task_graph: int, clone: Clone, batch: str = REFERENCE) -> Number:
        """The first of them."""
        source = self.context.region.batch.source_of([tensor], batch)
        share = self.division.shares(source, task_graph, self.division.mini_batch(clone))
        return share.starts[self.division.position(task_graph, clone)]

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

    def rows_before(self, blocks: Sequence[Block], examples: Callable[[str], Number], scope: str) -> Number:
        """The number of rows in blocks.

        Args:
            examples: batch -> how many examples it has.
        """
        before: Dict[str, int] = {}
        for block in blocks:
            before[batch_of(block)] = before.get(batch_of(block), 0) + rows_each(block)
        rows: Number = 0
        for other, count in before.items():
            where = f"{scope}{_suffix(other)}/from"
            more = self.times(examples(other), count, where)
            rows = self.plus(more, rows, where) if rows != 0 else more
        return rows


def takes_some(op: Op) -> bool:
    """Whether an op that cuts a whole tensor itself may read one with further rows behind those of the clones."""
    return traits(op.type).gives is Gives.ELEMENTS


def of_inputs(context: Context, blocks: Iterable[Block]) -> str:
    """Names of the inputs that have the examples of some blocks, as part of a sentence."""
    batches = context.region.batch.batches
    found = [batches[batch][0] for batch in dict.fromkeys(map(batch_of, blocks)) if batches.get(batch)]
    names = [repr(context.graph.tensor_name(source)) for source in found]
    return f" (rows of {' and '.join(names)})" if names else ""


def _suffix(batch: str) -> str:
    """Part of a scope's name for numbers of another batch than the first."""
    return "" if batch == REFERENCE else "/" + batch.replace(":", "_").replace("/", "_").replace(" ", "_")
