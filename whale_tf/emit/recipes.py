"""Stages recipes: an op, or a few, for each primitive to which they are lowered (:mod:`whale_tf.passes.lowering`).

What is added, put together or sent where, and in which order, is decided there.  Here are the ops, and the arithmetic with
numbers of examples that are known only when the step runs.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.communicators import CollectiveCommunicator, Communicator, Member, ProcessCommunicator, pack, unpack
from whale_tf.emit.checks import check_equal
from whale_tf.emit.collected import Collected
from whale_tf.emit.context import Context, Copy
from whale_tf.emit.convert import Converter, of_inputs
from whale_tf.emit.shares import Number
from whale_tf.emit.sizes_outside import check_size
from whale_tf.emit.waits import Waits
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.variables import assign, read
from whale_tf.ir.batch_axis import Offset, Reduce
from whale_tf.ir.layout import batch_of, is_grouped, rows_each
from whale_tf.ir.traits import VARIABLES
from whale_tf.passes.lowering import Lowering, Primitive, in_order, primitive
from whale_tf.program import ACCUMULATE, ALL, MERGE, SYNCHRONISE, Clone


class Recipes:
    """The values that recipes make; each is staged once.

    Attributes:
        lowering: what the recipes are made of.
    """

    def __init__(self, context: Context, converter: Converter, communicator: Communicator, lowering: Lowering) -> None:
        self._context, self._converter, self._communicator, self.lowering = context, converter, communicator, lowering
        self._nodes: Nodes = converter.nodes
        self._waits = Waits(context, converter.nodes)
        self._names: Dict[Primitive, str] = {}
        self._results: Dict[Primitive, List[str]] = {}  # of primitives with several
        self._whole: Dict[int, str] = {}
        self._everywhere: Dict[Tuple[int, int, Copy], str] = {}
        self._staged: Dict[str, Callable[[Primitive, List[str], str, str], str]] = {
            primitive.VALUE: self._value, primitive.PART: self._part, primitive.EXTENT_OF: self._extent,
            primitive.SCALE: self._scale, primitive.SCALE_PROCESS: self._scale_process, primitive.SHARE: self._share,
            primitive.SHIFT: self._shift, primitive.LESS_SURPLUS: self._less_surplus, primitive.BLOCK: self._block,
            primitive.CUT: self._cut, primitive.CONCAT: self._concat, primitive.ADD: self._add,
            **dict.fromkeys(primitive.ADDITIONS[1:], self._reduce), primitive.PACK: self._pack, primitive.UNPACK: self._unpack,
            primitive.ALL_REDUCE: self._all_reduce, primitive.ALL_GATHER: self._all_gather, primitive.TAKE: self._take,
            primitive.OP: self._op}
        self._staged_behind: Dict[str, Callable[[Primitive, List[str], str, str, List[str]], str]] = {
            primitive.IDENTITY: self._identity, primitive.READ: self._read, primitive.ASSIGN: self._assign,
            primitive.TOKEN: self._token, primitive.BROADCAST: self._broadcast}

    def beside(self, context: Context) -> Recipes:
        """The values of the tensors that are exported under the names of another context."""
        return Recipes(context, self._converter, self._communicator, self.lowering)

    def stage(self) -> None:
        """Stages what the program's calls add up, synchronise and merge."""
        program = self._context.program
        for call in program.calls:
            body = program.bodies[call.body]
            if body.step == ACCUMULATE and body.home is None:
                for tensor in body.inputs:
                    self.of(self.lowering.running(tensor, call.clone))
            elif body.step == SYNCHRONISE:
                for tensor in body.inputs:
                    for copy in self._context.copies(body.task_graph):
                        self.for_update(tensor, body.task_graph, copy)
            elif body.step == MERGE:
                for tensor in body.inputs:
                    self.whole(tensor)

    def of(self, value: Primitive, instead: Mapping[Primitive, str] = {}, waits: Sequence[str] = ()) -> str:  # noqa: B006
        """Name of the tensor that a primitive makes.

        Args:
            instead: other names, for this value alone, of primitives that are staged already.
            waits: further ops for which the op of ``value`` waits; of a broadcast, in a process that receives it.
        """
        for each in in_order([value], self._names):
            operands = [instead.get(operand) or self._names[operand] for operand in each.operands]
            device = self._context.host if each.device == primitive.HOST else self._context.devices[each.device]
            scope = self._context.scoped(each.scope, each.tensor)
            if each.kind in self._staged:
                self._names[each] = self._staged[each.kind](each, operands, scope, device)
            else:
                before = [instead.get(wait) or self._op_of(wait) for wait in each.waits if wait.kind != primitive.OP]
                before += self._waits.behind([wait.detail for wait in each.waits if wait.kind == primitive.OP], scope, device)
                self._names[each] = self._staged_behind[each.kind](
                    each, operands, scope, device, before + list(waits) * (each is value))
        return self._names[value]

    # ------------------------------------------------------------------------------------------------ merged values
    def whole(self, tensor: int) -> str:
        """What the local script would have computed from this process's mini-batches."""
        if self._context.is_in_place:
            return self._context.graph.tensor_name(tensor)
        if tensor not in self._whole:
            self._whole[tensor] = self.of(self.lowering.whole(tensor))
        return self._whole[tensor]

    def part(self, tensor: int) -> str:
        """What this process contributes to the sum of a partial tensor over all processes."""
        return self.of(self.lowering.part(tensor))

    def of_all_processes(self, tensor: int) -> str:
        """What the local script would have computed from the mini-batches of all processes.  Every run of it waits for the other
        processes."""
        if self._communicator.processes == 1:
            return self.whole(tensor)
        return self._for_copy(tensor, self._context.task_graph_of(self._context.graph.producer(tensor)), Copy(0, 0),
                              self.lowering.of_all_processes(tensor))

    def for_update(self, tensor: int, task_graph: int, copy: Copy) -> str:
        """The merged value that the update of a TaskGraph's copy reads."""
        if self.lowering.is_synchronised(tensor, task_graph):
            return self._for_copy(tensor, task_graph, copy, self.lowering.synchronised(tensor, task_graph, copy))
        return self.of_all_processes(tensor)

    def _for_copy(self, tensor: int, task_graph: int, copy: Copy, value: Primitive) -> str:
        name = self._everywhere[tensor, task_graph, copy] = self.of(value)
        return name

    @property
    def is_larger(self) -> bool:
        """Whether merged values have more rows than the graph's static shapes say, because model replicas or processes take their
        own mini-batches."""
        return self._converter.division.mini_batches > 1 and self._converter.division.batch is not None

    def check_size(self, index: int) -> None:
        """Refuses an op outside of the clones that a static batch size makes wrong; see :func:`check_size`."""
        if self._converter.division.mini_batches_here > 1:  # each of several processes merges its own
            check_size(self._context, self._converter.inputs, index)

    def inputs_of_all(self, tensor: int) -> Optional[str]:
        """All mini-batches of a batch input of which model replicas or micro-batches have their own; None: it has one."""
        inputs = self._converter.inputs
        return inputs.concatenated(tensor) if inputs.has_own(tensor) else None

    def staged(self) -> Dict[str, Tuple[int, bool]]:
        """Name of a merged value -> its tensor, and whether it covers the mini-batches of all processes."""
        found = {name: (tensor, False) for tensor, name in self._whole.items()}
        found.update((name, (tensor, True)) for (tensor, _, _), name in self._everywhere.items())
        return found

    def combined(self, tensor: int, how: Reduce) -> str:
        """The whole batch's value of a tensor, which every clone reads."""
        return self.of(self.lowering.combined(tensor, how))

    def collected(self, tensor: int, collection: str, is_together: bool) -> str:
        """The value of a tensor in one of EPL's collections; see :meth:`Collected.value`."""
        return Collected(self._context, self._converter, self._communicator).value(tensor, collection, is_together)

    # ---------------------------------------------------------------------------------------------------- operands
    def _value(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._context.tensor_in(each.tensor, _place(each.clone))

    def _op(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._context.graph.ops[each.detail].name

    def _part(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._converter.inputs.part(each.tensor, each.task_graph, each.clone)

    def _extent(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._converter.extent(each.tensor, each.task_graph, each.clone, scope)

    # ----------------------------------------------------------------------------------------------------- weights
    def _scale(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._converter.scale(operands[0], each.tensor, each.detail, each.task_graph, each.clone, scope, device=device)

    def _scale_process(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._converter.of_this_process(operands[0], each.tensor, each.detail, scope, device)

    def _share(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        context, dtype = self._context, self._context.dtype(each.tensor)
        peers = [each.clone._replace(r=r) for r in range(context.plan.task_graphs[each.task_graph].replica_count)]
        weights = [self._converter.weight([each.tensor], each.task_graph, peer, dtype) for peer in peers]
        own, host = weights[each.clone.r], context.host
        numbers = [weight for weight in weights if not isinstance(weight, str)]
        if len(numbers) == len(weights):
            share = self._nodes.const(own / sum(numbers), scope + "/fraction", dtype, host)  # type: ignore[operator]
        else:
            total = self._nodes.add_n([str(weight) for weight in weights], scope + "/weights", dtype, host)
            share = self._nodes.binary("RealDiv", str(own), total, scope + "/fraction", dtype, host)
        return self._nodes.binary("Mul", operands[0], share, scope + "/share", dtype, device)

    def _shift(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        producer = self._context.graph.producer(each.tensor)
        return self._converter.offset(operands[0], each.tensor, Offset(each.detail), each.task_graph, each.clone, scope, producer,
                                      device)

    def _less_surplus(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        """A sum of extents ``c0 + c1 b_i`` minus a number of ``c0``; one of them supplies what is not known here."""
        context, nodes = self._context, self._nodes
        dtype, (total, one), count = context.dtype(each.tensor), operands, each.detail
        parts = context.region.batch.surplus(each.tensor)
        if parts is None:
            raise UnsupportedOpError(
                f"{context.graph.tensor_name(each.tensor)!r} depends on the batch size in a way that prevents merging the "
                "clones' values; compute it outside the model")
        shape = context.static_shape(each.tensor)
        constant = np.array([0 if part is None else part for part in parts]).reshape(shape)
        surplus = nodes.const(constant * count, scope + "/surplus", dtype, device)
        if None in parts:
            equal = np.array([count * (part is None) for part in parts]).reshape(shape)
            name = nodes.const(equal, scope + "/equal", dtype, device)
            more = nodes.binary("Mul", name, one, scope + "/of_one", dtype, device)
            surplus = nodes.binary("Add", surplus, more, scope + "/more", dtype, device)
        return nodes.binary("Sub", total, surplus, scope, dtype, device)

    # -------------------------------------------------------------------------------------------------------- rows
    def _block(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        """One block of a clone's rows."""
        converter, layout = self._converter, self._context.region.batch.layout(each.tensor)
        blocks = layout.blocks or ()

        def examples(batch: str) -> Number:
            return converter.size(each.tensor, each.task_graph, each.clone, batch)

        begin = converter.rows_before(blocks[:each.detail], examples, scope)
        block = blocks[each.detail]
        rows = converter.times(examples(batch_of(block)), rows_each(block), scope + "/size_of")
        return self._nodes.slice_dim(operands[0], layout.dim, converter.rank(each.tensor), begin, rows, scope,
                                     self._context.dtype(each.tensor), device)

    def _cut(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        """A clone's rows, out of those of other clones, which begin where the first of these does."""
        converter, tensor, (index, pieces, producer) = self._converter, each.tensor, each.detail
        layout = self._context.region.batch.layout(tensor)
        assert layout.blocks is not None
        block = layout.blocks[index]
        batch = batch_of(block)
        begin = converter.minus(converter.start(tensor, each.task_graph, each.clone, batch),
                                converter.start(tensor, producer, pieces[0], batch), scope)
        size = converter.size(tensor, each.task_graph, each.clone, batch)
        examples = converter.size(tensor, producer, pieces[0], batch)
        for number, piece in enumerate(pieces[1:]):
            examples = converter.plus(examples, converter.size(tensor, producer, piece, batch), f"{scope}/examples{number}")
        rows = converter.rows_each(rows_each(block), operands[0], tensor, layout.dim, examples, scope, device)
        begin = converter.times(begin, rows, scope + "/begin_of")
        size = converter.times(size, rows, scope + "/size_of")
        return self._nodes.slice_dim(operands[0], layout.dim, converter.rank(tensor), begin, size, scope + "/slice",
                                     self._context.dtype(tensor), device)

    def _concat(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        layout = self._context.region.batch.layout(each.tensor)
        checks = self._joined(each, scope)
        return self._nodes.concat(operands, layout.dim, scope, self._context.dtype(each.tensor), device, checks)

    def _joined(self, each: Primitive, scope: str) -> List[str]:
        """Ops that fail at run time if the clones' values together do not have the rows of their examples."""
        context, converter, nodes, tensor = self._context, self._converter, self._nodes, each.tensor
        graph, host, dtype, shard = context.graph, context.host, context.dtype(tensor), context.shard_of(tensor)
        layout, shape = context.region.batch.layout(tensor), graph.tensors[tensor].shape
        if (len(each.detail) < 2 or not layout.blocks or is_grouped(layout.blocks) or -1 in map(rows_each, layout.blocks)
                or converter.division.batch is not None or (shape is not None and shape[layout.dim] is not None)
                or converter.in_frame(tensor)):
            return []
        found, expected = [], []
        for number, piece in enumerate(each.detail):
            where = f"{scope}/joined{number}"
            device = context.device(each.task_graph, piece.clone, shard)
            shape_there = nodes.shape(self._names[piece], where + "/shape", dtype, device)
            rows = nodes.slice_dim(shape_there, 0, 1, layout.dim, 1, where + "/rows", tf.int32, host)
            found.append(nodes.scalar(rows, where + "/found", tf.int32, host))
            for block in layout.blocks:
                there = converter.size(tensor, each.task_graph, piece.clone, batch_of(block))
                expected.append(converter.scalar(converter.times(there, rows_each(block), where + "/expected")))
        sums = [nodes.add_n(terms, f"{scope}/joined/{what}", tf.int32, host)
                for terms, what in ((found, "found"), (expected, "expected"))]
        message = (f"the parts of {graph.tensor_name(tensor)!r} have {{0}} rows together along dimension {layout.dim}, but their "
                   f"examples have {{1}}{of_inputs(context, layout.blocks)}; verify: \"first_step\" shows the first tensor "
                   "that differs from the local script")
        return [check_equal(nodes, sums[0], sums[1], message, scope + "/joined", host)]

    # -------------------------------------------------------------------------------------------------------- sums
    def _add(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._nodes.binary("Add", operands[0], operands[1], scope, self._context.dtype(each.tensor), device)

    def _reduce(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        dtype = self._context.dtype(each.tensor)
        if each.kind == primitive.SUM:
            return self._nodes.add_n(operands, scope, dtype, device)
        op_type = {primitive.MAX: "Maximum", primitive.MIN: "Minimum", primitive.PROD: "Mul", primitive.ANY: "LogicalOr",
                   primitive.ALL_OF: "LogicalAnd"}[each.kind]
        total = operands[0]
        for index, term in enumerate(operands[1:]):
            where = f"{scope}/{index}"
            if dtype == tf.bool:
                total = self._nodes.add(op_type, where, [total, term], device)
            else:
                total = self._nodes.binary(op_type, total, term, where, dtype, device)
        return total

    def _identity(self, each: Primitive, operands: List[str], scope: str, device: str, waits: List[str]) -> str:
        return self._nodes.identity(operands[0], scope, self._dtype(each.tensor), device, waits)

    def _op_of(self, each: Primitive) -> str:
        if each.kind == primitive.VALUE:
            return self._context.op_in(self._context.graph.producer(each.tensor), _place(each.clone))
        return self._names[each].partition(":")[0]

    # --------------------------------------------------------------------------------- between devices and processes
    def _pack(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        scopes = [self._context.scoped(each.scope, operand.tensor) for operand in each.operands]
        return pack(self._nodes, operands, scopes, self._dtype(each.tensor), device)

    def _unpack(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        total, = each.operands
        if total not in self._results:
            tensors = primitive.contents(total)
            scopes = [self._context.scoped(each.scope, tensor) for tensor in tensors]
            self._results[total] = unpack(self._nodes, operands[0], scopes, list(map(self._shape, tensors)),
                                          self._dtype(each.tensor), device)
        return self._results[total][each.detail]

    def _all_reduce(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        how, dtype = each.detail, self._context.dtype(each.tensor)
        if not how.devices:
            return self._communicator.across(Member(operands[0], device), how.kind, scope, dtype, how.fp16)
        assert isinstance(self._communicator, CollectiveCommunicator)
        members = [Member(value, self._context.devices[number]) for value, number in zip(operands, how.devices)]
        self._results[each] = self._communicator.all_reduce(members, scope, dtype)
        return self._results[each][0]

    def _take(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        return self._results[each.operands[0]][each.detail]

    def _all_gather(self, each: Primitive, operands: List[str], scope: str, device: str) -> str:
        layout, (is_equal, is_counted) = self._context.region.batch.layout(each.tensor), each.detail
        lengths = self._converter.rows_of_each_process(each.tensor, layout) if is_counted else None
        return self._converter.gathered(Member(operands[0], device), each.tensor, layout.dim, scope, is_equal, lengths)

    # ------------------------------------------------------------------------------------------------- of variables
    def _read(self, each: Primitive, operands: List[str], scope: str, device: str, waits: List[str]) -> str:
        op = self._context.graph.producer(each.tensor)
        return read(self._nodes, op.type == "VarHandleOp", op.name, scope, self._dtype(each.tensor), device, waits)

    def _assign(self, each: Primitive, operands: List[str], scope: str, device: str, waits: List[str]) -> str:
        op = self._context.graph.producer(each.tensor)
        return assign(self._nodes, op.type == "VarHandleOp", op.name, operands[0], scope, self._dtype(each.tensor), device, waits)

    def _token(self, each: Primitive, operands: List[str], scope: str, device: str, waits: List[str]) -> str:
        nothing = operands[0] if operands else self._nodes.const(0, scope + "/nothing", tf.int32, device)
        return self._nodes.identity(nothing, scope, tf.int32, device, waits)

    def _broadcast(self, each: Primitive, operands: List[str], scope: str, device: str, waits: List[str]) -> str:
        assert isinstance(self._communicator, ProcessCommunicator)
        root, tensors = each.detail
        shape = [sum(int(np.prod(self._shape(tensor))) for tensor in tensors)] if len(tensors) > 1 else [
            size for tensor in tensors for size in self._shape(tensor)]
        dtype = self._dtype(each.tensor) if tensors else tf.int32
        return self._communicator.broadcast(Member(operands[0] if operands else "", device), shape, scope, dtype, root, waits)

    def _dtype(self, tensor: int) -> tf.DType:
        """The type of a tensor's value; for a variable's handle, of the variable's."""
        op = self._context.graph.producer(tensor)
        return tf.as_dtype(op.attrs["dtype"]).base_dtype if op.type in VARIABLES else self._context.dtype(tensor)

    def _shape(self, tensor: int) -> Tuple[int, ...]:
        """The static shape of a tensor's value; for a variable's handle, of the variable's."""
        op = self._context.graph.producer(tensor)
        return tuple(op.attrs["shape"]) if op.type in VARIABLES else self._context.static_shape(tensor)


def _place(clone: Clone) -> Union[Clone, Copy]:
    """Where a value is: in a clone or, if it belongs to no micro-batch, in a copy; what belongs to all is in the first one."""
    return clone if clone.m != ALL else Copy(max(0, clone.g), max(0, clone.r))
