"""Functional control flow in clones: each clone calls copies of the loop's or branches' functions with its own numbers.

::

    original     y = While(x, body=body_7)              body_7(i, x)            { ... Reshape(x, [48, 4]) ... }
    clones       y = While(x, body=body_7_whale)        body_7_whale(i, x)      { ... Reshape(x, [24, 4]) ... }

Constants that depend on a clone's size are written into the copy, which all clones of that size share.  Numbers that are known
only at run time (a clone's weight, size or start) become further parameters::

    clones       y = While(x, w, body=body_7_whale)     body_7_whale(i, x, w)   { ... Mul(x, w) ... }
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.emit.context import Clone, Context
from whale_tf.emit.convert import Converter, takes_some
from whale_tf.emit.shares import Number, Shares
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.control_flow import call_functions, function_names
from whale_tf.graph_editor.edges import canonical_edge
from whale_tf.graph_editor.function_copy import FunctionCopy, append_inputs
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import BatchAxis, Offset, Slice
from whale_tf.ir.graph import SHARD_ATTR, Op, inner_ops
from whale_tf.ir.layout import PLAIN, REFERENCE, Base, batch_of
from whale_tf.ir.traits import WHILES
from whale_tf.patterns.sources import is_seeded
from whale_tf.transforms.attributes import open_shapes, own_numbers

TensorOf = Callable[[Clone], str]  # the name of a clone's tensor
RUN_TIME = "$"  # begins the name of a number that is known only at run time; no tensor has such a name


class _Numbers(NamedTuple):
    """Numbers in which the functions that clones call differ.

    Attributes:
        of_batches: size, total and start of the part of each batch; None: known only at run time, or irrelevant.
        seed: None: irrelevant.
    """

    of_batches: Tuple[Tuple[Optional[int], ...], ...]
    seed: Optional[str]


class _Calls(NamedTuple):
    """What clones of a functional op call.

    Attributes:
        functions: attribute (``body``, ``branches[0]``) -> name of the function.
        run_time: numbers that all these functions take as further parameters.
    """

    functions: Dict[str, str]
    run_time: Tuple[str, ...]


class Bodies:
    """Stages the functions that clones call; clones with the same numbers share them."""

    def __init__(self, context: Context, converter: Converter) -> None:
        self._context = context
        self._converter = converter
        self._calls: Dict[Tuple[int, int, _Numbers], _Calls] = {}
        self._concerns: Dict[int, Tuple[bool, bool]] = {}

    def localise(self, op: Op, clone: Clone) -> None:
        """Makes a clone of ``op`` call functions that fit its part of the mini-batch.

        Raises:
            UnsupportedOpError: a function does something that clones cannot do separately.
        """
        node = self._context.edit.node(f"{self._context.scope(clone)}/{op.name}")
        self.localise_in(op, node, clone, lambda number, dtype, of: canonical_edge(of(clone)))

    def localise_in(self, op: Op, node: NodeDef, clone: Clone, argument: Callable[[str, tf.DType, TensorOf], str]) -> None:
        """The same for a copy of ``op`` anywhere.

        Args:
            argument: (number, dtype, the tensor that holds it for a clone) -> what the copy reads for a number that is known
                only at run time.
        """
        calls = self._calls_of(op, node, self._context.region.batch, op, clone)
        _call(node, op, calls, [
            argument(number, _dtype(number), functools.partial(self._at_run_time, number, op)) for number in calls.run_time])

    def _calls_of(self, op: Op, node: NodeDef, axis: BatchAxis, outermost: Op, clone: Clone) -> _Calls:
        key = (id(axis), op.id, self._numbers(op, axis, outermost, clone))
        if key not in self._calls:
            self._calls[key] = self._stage(op, node, axis, outermost, clone)
        return self._calls[key]

    def _stage(self, op: Op, node: NodeDef, axis: BatchAxis, outermost: Op, clone: Clone) -> _Calls:
        bodies = {
            attribute: (name, axis.bodies[op.id, attribute])
            for attribute, name in sorted(function_names(node).items())
            if (op.id, attribute) in axis.bodies
        }
        copies = {key: self._edited(name, body, outermost, clone) for key, (name, body) in bodies.items()}
        run_time = tuple(dict.fromkeys(number for copy in copies.values() for number in _run_time_numbers(copy)))
        functions = {}
        for attribute, copy in copies.items():
            if not run_time and not copy.is_changed:
                continue
            for index, number in enumerate(run_time):
                parameter = copy.parameter(f"whale_number_{index}", _dtype(number))
                copy.replace({number: parameter})
                if op.type in WHILES and attribute == "body":
                    copy.return_also(parameter, _dtype(number))
            name = free_name(f"{bodies[attribute][0]}_whale", self._context.edit.has_function)
            functions[attribute] = self._context.edit.add_function(copy.finish(name))
        return _Calls(functions, run_time)

    def _edited(self, name: str, axis: BatchAxis, outermost: Op, clone: Clone) -> FunctionCopy:
        """A copy of a function, with the conversions, constants, shapes and seeds of a clone."""
        self._check(axis, outermost)
        copy = FunctionCopy(self._context.tf_graph, self._context.edit.function(name))
        context = BodyContext(self._context, axis, self._context.task_graph_of(outermost))
        converter = _BodyConverter(context, Nodes(copy), self._converter, outermost)
        for index, position in sorted(set(axis.localise) | set(axis.conversions)):
            _convert(copy, converter, axis.graph.ops[index], position, clone)
        for index in {index for index, _ in axis.attributes}:
            open_shapes(copy.node(axis.graph.ops[index].name), axis.graph.ops[index], axis)
        for index in axis.own_seed:
            op = axis.graph.ops[index]
            own_numbers(Nodes(copy), copy.node(op.name), op, axis.graph, self._context.seed(clone), "")
        for index in axis.shared:
            if not is_seeded(axis.graph.ops[index]):
                raise UnsupportedOpError(
                    f"op {axis.graph.ops[index].name!r} ({axis.graph.ops[index].type}) in a body of {outermost.name!r} draws "
                    f"random numbers that must be the same on all devices; give it a seed, or draw them before "
                    f"{outermost.name!r} and pass them in"
                )
        for index in sorted({index for index, _ in axis.bodies}):
            inner = axis.graph.ops[index]
            calls = self._calls_of(inner, copy.node(inner.name), axis, outermost, clone)
            _call(copy.node(inner.name), inner, calls, calls.run_time)
        return copy

    def _check(self, axis: BatchAxis, outermost: Op) -> None:
        """Refuses means over a static batch size if there are several mini-batches: a mean's gradient divides by the size of one
        model replica's mini-batch, and in a body this divisor cannot be identified."""
        if self._converter.division.mini_batches > 1 and self._converter.division.batch is not None:
            for op in axis.graph.ops:
                if op.type == "Mean" and op.outputs[0] in axis.layouts and axis.layout(op.outputs[0]).is_partial:
                    raise UnsupportedOpError(
                        f"op {op.name!r} in a body of {outermost.name!r} takes a mean over the batch, whose size is static, but "
                        f"model replicas or processes take mini-batches of their own; take the mean outside of "
                        f"{outermost.name!r}, leave the batch size open (drop_remainder=False), or set io.nested_batch to "
                        "'divide'"
                    )

    # ------------------------------------------------------------------------------------------------------ numbers
    def _numbers(self, op: Op, axis: BatchAxis, outermost: Op, clone: Clone) -> _Numbers:
        bodies = [body for (index, _), body in axis.bodies.items() if index == op.id]
        starts, seeds = zip(*[self._concern(body) for body in bodies])
        found = []
        for batch in self._context.region.batch.batches:
            share, position = self._converter.share_of_op(outermost, self._context.task_graph_of(outermost), clone, batch)
            start = _static(share.starts[position]) if any(starts) else None
            found.append((_static(share.sizes[position]), _static(share.total), start))
        return _Numbers(tuple(found), self._context.seed(clone) if any(seeds) else None)

    def _concern(self, axis: BatchAxis) -> Tuple[bool, bool]:
        """Whether a body depends on where in the batch a clone's examples are, and on which clone it is."""
        if id(axis) not in self._concerns:
            inner = [self._concern(body) for body in axis.bodies.values()]
            placed = any(isinstance(c, (Slice, Offset)) for steps in axis.conversions.values() for c in steps)
            self._concerns[id(axis)] = (
                placed or any(start for start, _ in inner),
                bool(axis.own_seed) or any(seed for _, seed in inner),
            )
        return self._concerns[id(axis)]

    def _at_run_time(self, number: str, op: Op, clone: Clone) -> str:
        """The tensor that holds a run-time number of a clone."""
        kind, _, of = number[len(RUN_TIME) :].partition(":")[0].partition("@")
        task_graph, batches = self._context.task_graph_of(op), list(self._context.region.batch.batches)
        if kind == "weight":
            base = tuple((batches[int(index)], int(count)) for index, count in (each.split("*") for each in of.split("+")))
            return str(self._converter.weight(op.outputs + op.inputs, task_graph, clone, _dtype(number), base))
        share, position = self._converter.share_of_op(op, task_graph, clone, batches[int(of)])
        if kind == "size":
            return str(share.sizes[position])
        if kind == "start":
            return str(share.starts[position])
        return str(self._converter.totals(op, task_graph, batches[int(of)])[int(kind[len("total") :])])


def place_body(context: Context, node: NodeDef, op: Op, device: Callable[[int], str]) -> None:
    """Places the nodes of a loop's body whose products ``wh.split`` divides.

    Args:
        device: the device of each part.
    """
    for name in sorted(function_names(node).values()) if is_divided_inside(op) else ():
        copy = FunctionCopy(context.tf_graph, context.edit.function(name))
        for inner in copy.definition.node_def:
            if SHARD_ATTR in inner.attr:
                inner.device = device(inner.attr[SHARD_ATTR].i)
                del inner.attr[SHARD_ATTR]
        if copy.is_changed:
            placed = context.edit.add_function(copy.finish(free_name(f"{name}_placed", context.edit.has_function)))
            call_functions(node, {name: placed})


def is_divided_inside(op: Op) -> bool:
    """Whether ops of the functions that an op calls are on several devices."""
    return any(SHARD_ATTR in inner.attrs for inner in inner_ops(op))


def _convert(copy: FunctionCopy, converter: Converter, op: Op, position: int, clone: Clone) -> None:
    """Replaces one operand of a function's op, or one of the function's results."""
    axis, task_graph = converter.context.region.batch, converter.context.task_graph_of(op)
    name = copy.result(op.attrs["index"]) if op.type == "_Retval" else copy.operand(op.name, position)
    if (op.id, position) in axis.localise:
        name = converter.localised(op, position, clone, name)
    else:
        for conversion in axis.conversions[op.id, position]:
            name = converter.convert(name, op.inputs[position], conversion, task_graph, clone, op)
    if op.type == "_Retval":
        copy.set_result(op.attrs["index"], name)
    else:
        copy.set_operand(op.name, position, name)


def _call(node: NodeDef, op: Op, calls: _Calls, inputs: Sequence[str]) -> None:
    """Makes a functional op call other functions, with further inputs."""
    for attribute, function in calls.functions.items():
        name, _, index = attribute.partition("[")
        if index:
            node.attr[name].list.func[int(index[:-1])].name = function
        else:
            node.attr[name].func.name = function
    if not inputs:
        return
    append_inputs(node, inputs)
    types = node.attr["T" if op.type in WHILES else "Tin"].list.type
    types.extend(_dtype(number).as_datatype_enum for number in calls.run_time)
    if op.type in WHILES and node.attr["output_shapes"].list.shape:
        node.attr["output_shapes"].list.shape.extend(tf.TensorShape([]).as_proto() for _ in inputs)


def _run_time_numbers(copy: FunctionCopy) -> List[str]:
    return [edge for node in copy.definition.node_def for edge in node.input if edge.startswith(RUN_TIME)]


def _dtype(number: str) -> tf.DType:
    return tf.as_dtype(number.partition(":")[2])


def _static(number: Number) -> Optional[int]:
    return None if isinstance(number, str) else number


class BodyContext(Context):
    """The rewrite as seen from inside a function: the function's graph and analysis, and its caller's device."""

    def __init__(self, outer: Context, axis: BatchAxis, task_graph: int) -> None:
        region = outer.region._replace(graph=axis.graph, batch=axis)
        super().__init__(outer.tf_graph, (), axis.graph, region, outer.plan, outer.devices, outer.edit, outer.processes)
        self.host = ""
        self._task_graph = task_graph

    def task_graph_of(self, op: Op) -> int:
        return self._task_graph

    def device(self, task_graph: int, at: Tuple[int, ...], shard: int = 0) -> str:
        return ""

    def scope(self, at: Tuple[int, ...]) -> str:
        return self.name("clone")


class _BodyConverter(Converter):
    """Conversions inside a function: a number of the clone is a constant, or stands for a later parameter."""

    def __init__(self, context: Context, nodes: Nodes, outer: Converter, outermost: Op) -> None:
        super().__init__(context, nodes, outer.division, outer.inputs, outer.communicator)
        self._outer = outer
        self._outermost = outermost

    def weight(self, tensors: Sequence[int], task_graph: int, clone: Clone, dtype: tf.DType,
               base: Base = PLAIN) -> Union[float, str]:
        outer = self._outermost.outputs + self._outermost.inputs
        weight = self._outer.weight(outer, task_graph, clone, dtype, base)
        of = "+".join(f"{self._index(batch)}*{count}" for batch, count in base)
        return f"{RUN_TIME}weight@{of}:{dtype.name}" if isinstance(weight, str) else weight

    def share_of_op(self, op: Op, task_graph: int, clone: Clone, batch: str = REFERENCE) -> Tuple[Shares, int]:
        share, position = self._outer.share_of_op(self._outermost, task_graph, clone, batch)
        of = self._index(batch)
        return Shares(
            _number("total0", of, share.total),
            tuple(_number("size", of, size) for size in share.sizes),
            tuple(_number("start", of, start) for start in share.starts),
        ), position

    def input_of(self, op: Op) -> str:
        return self._outer.input_of(self._outermost)

    def _index(self, batch: str) -> int:
        return list(self._outer.context.region.batch.batches).index(batch)

    def rows(self, op: Op, task_graph: int, clone: Clone, of_all: bool, scope: str,
             batch: str = REFERENCE) -> Tuple[Number, Number, Number]:
        if self.division.is_together:
            raise UnsupportedOpError(
                f"op {op.name!r} in a body of {self._outermost.name!r} counts the examples before its own, but the loss combines "
                "the mini-batches of model replicas or processes; set io.nested_batch to 'divide', or start one process that "
                "sees all devices")
        return super().rows(op, task_graph, clone, False, scope, batch)

    def is_of_all(self, tensor: int, conversion: Slice, op: Op) -> bool:
        return False

    def compared(self, name: str, tensor: int, conversion: Slice, task_graph: int, clone: Clone,
                 op: Op) -> Optional[Sequence[str]]:
        if takes_some(op):
            return ()
        totals = {batch: self.share_of_op(op, task_graph, clone, batch)[0].total for batch in map(batch_of, conversion.blocks)}
        return () if self.is_static(tensor, conversion, totals) else None

    def totals(self, op: Op, task_graph: int, batch: str = REFERENCE) -> List[Number]:
        totals = self._outer.totals(self._outermost, task_graph, batch)
        return [_number(f"total{g}", self._index(batch), total) for g, total in enumerate(totals)]


def _number(kind: str, batch: int, value: Number) -> Number:
    """A number that is known now, or what stands for it: its kind, and the index of the batch whose examples it counts."""
    return f"{RUN_TIME}{kind}@{batch}:int32" if isinstance(value, str) else value
