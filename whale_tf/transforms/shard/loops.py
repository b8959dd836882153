"""Loops whose bodies are divided: their functions with parts as parameters, and a product for each device.

::

    before   While(x, w)        body(x, w)        y = MatMul(x, w)                                                   -> y, w
    after    While(x, w0, w1)   body(x, w0, w1)   y = Concat(MatMul(x, w0) on device 0, MatMul(x, w1) on device 1)   -> y, w0, w1

The first part has the place of the whole, and the others follow all other operands.  Nodes of a body have the number of their
device as an attribute, because each model replica has devices of its own (:func:`whale_tf.emit.bodies.place_body`).
"""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import FunctionDef, NodeDef, tf
from whale_tf.graph_editor.function_copy import FunctionCopy, data_inputs
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.stage import Stage
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.extents import static_ints
from whale_tf.ir.graph import SHARD_ATTR, Op, OpGraph, Shape
from whale_tf.ir.traits import SHAPE_ONLY
from whale_tf.patterns.spread import EVERYWHERE, Spread, once
from whale_tf.patterns.strategy import Sizes, Strategy


class DividedLoop(NamedTuple):
    """Attributes:
    shapes: of the loop's results, with those of all parts.
    kept: result that was a list of a weight -> the weight's place among the operands.
    """

    shapes: Sequence[Shape]
    kept: Mapping[int, int]


def divide_loop(edit: StagedEdit, node: NodeDef, op: Op, strategy: Strategy) -> DividedLoop:
    """Makes a loop's node, whose operands are parts already, call functions that take parts."""
    bodies = op.body or {}
    elements = {one.attrs["index"]: _element(bodies["body"], one) for one in bodies["body"].ops
                if one.type == "_Arg" and strategy.needs[one.attrs["index"]].is_divided}
    view = Sizes(bodies["body"])
    whole = {index: (tf.as_dtype(bodies["body"].tensors[tensor].dtype), view.shape(tensor)) for index, tensor in elements.items()}
    body = _Body(edit, node.attr["body"].func.name, bodies["body"], strategy, whole)
    condition = _Function(edit, node.attr["cond"].func.name, bodies["cond"], strategy, whole)
    for attribute, function in (("body", body.divided()), ("cond", condition.finished())):
        node.attr[attribute].func.name = edit.add_function(function)
    node.attr["T"].list.type[:] = [argument.type for argument in body.copy.definition.signature.input_arg]
    node.attr["output_shapes"].list.ClearField("shape")
    node.attr["output_shapes"].list.shape.extend(map(_proto, body.shapes_of_arguments))
    node.attr["_lower_using_switch_merge"].b = True  # a body that runs on several devices
    return DividedLoop(body.shapes_of_arguments, body.kept)


def _element(graph: OpGraph, parameter: Op) -> int:
    """What is divided of a parameter: its value, or the element that the body takes from a list."""
    tensor = parameter.outputs[0]
    return _user(graph, tensor).outputs[1] if graph.tensors[tensor].dtype == "variant" else tensor


class _Function:
    """A copy of a loop's body or condition that takes parts.

    Args:
        whole: parameter that comes in parts -> type and shape of the whole.

    Attributes:
        parts: parameter that comes in parts -> their names.
        shapes_of_arguments: with those of the parts.
    """

    def __init__(self, edit: StagedEdit, name: str, graph: OpGraph, strategy: Strategy,
                 whole: Mapping[int, Tuple[tf.DType, Shape]]) -> None:
        self._edit, self._name, self.graph = edit, name, graph
        self.copy = FunctionCopy(edit.graph, edit.function(name))
        self.view = Sizes(graph)
        self._shapes: Dict[str, Sequence[Shape]] = {}  # of the results of nodes
        self.spreads = {index: strategy.needs[index] for index in sorted(whole)}
        self.arguments = {op.attrs["index"]: op.outputs[0] for op in graph.ops if op.type == "_Arg"}
        self.shapes_of_arguments = [self.view.shape(self.arguments[index]) for index in sorted(self.arguments)]
        self.parts: Dict[int, List[str]] = {}
        for index, spread in self.spreads.items():
            (dtype, shape), argument = whole[index], self.copy.definition.signature.input_arg[index]
            argument.CopyFrom(type(argument)(name=argument.name, type=dtype.as_datatype_enum))
            self.copy.definition.arg_attr.pop(index, None)
            first, *rest = spread.shapes(shape or ())
            self.parts[index] = [argument.name, *(self.copy.parameter(argument.name, dtype) for _ in rest)]
            self.shapes_of_arguments[index] = first
            self.shapes_of_arguments.extend(rest)

    def finished(self) -> FunctionDef:
        """The copy under a name of its own, with all shapes that are known: of a copy TensorFlow knows none."""
        definition = self.copy.definition
        definition.attr["_input_shapes"].list.shape.extend(map(_proto, self.shapes_of_arguments))
        for node in definition.node_def:
            op = self.graph.find(node.name)
            shapes = self._shapes.get(node.name) or ([self.view.shape(t) for t in op.outputs] if op is not None else ())
            node.attr["_output_shapes"].list.shape.extend(map(_proto, shapes))
        return self.copy.finish(free_name(f"{self._name}_divided", self._edit.has_function))


class _Body(_Function):
    """A body with parts of ops."""

    def __init__(self, edit: StagedEdit, name: str, graph: OpGraph, strategy: Strategy,
                 whole: Mapping[int, Tuple[tf.DType, Shape]]) -> None:
        super().__init__(edit, name, graph, strategy, whole)
        self._inner: Dict[int, Strategy] = dict(strategy.inner)
        self._results = {op.attrs["index"]: op.inputs[0] for op in graph.ops if op.type == "_Retval"}
        self._types = {index: dtype for index, (dtype, _) in whole.items()}
        self._pops = {_user(graph, self.arguments[index]).id: index for index in whole
                      if graph.tensors[self.arguments[index]].dtype == "variant"}
        self._pushes = {graph.producer(graph.origin(self._results[index])).id: index
                        for index, give in enumerate(strategy.gives) if give.is_divided and index not in whole}
        self.kept = {index: int(graph.producer(graph.origin(graph.ops[push].inputs[1])).attrs["index"])
                     for push, index in self._pushes.items()}
        self._count = max(len(parts) for parts in self.parts.values())
        self._nodes = Nodes(_Tagged(self))
        self._table: Dict[int, Tuple[Spread, List[str]]] = {}
        self._made: Dict[Tuple[int, Spread], List[str]] = {}
        self._gone: Dict[str, List[str]] = {}  # node -> those that do its work

    def divided(self) -> FunctionDef:
        copy = self.copy
        for index, spread in self.spreads.items():
            self._table[self.arguments[index]] = spread, self.parts[index]
        for op in self.graph.ops:
            if op.type in ("_Arg", "_Retval"):
                continue
            if op.id in self._pushes:  # the list stays empty: the loop of the gradient takes the parts
                self._pass_on(op, 0, op.inputs[0])
            elif op.id in self._pops:
                self._pass_on(op, 1, op.inputs[0])
            elif op.id in self._inner:
                self._divide(op, self._inner[op.id])
            elif op.type == "Identity" and op.inputs[0] in self._table:
                self._pass_on(op, 0, op.inputs[0])
            else:
                for position, tensor in enumerate(op.inputs):
                    if op.type in SHAPE_ONLY and self._table.get(tensor, (once,))[0].is_divided:
                        self._answer(op, position)
                    elif tensor in self._table:
                        copy.set_operand(op.name, position, self._whole(tensor))
        lists = set(self._pops.values())
        for index, tensor in self._results.items():
            if index not in self.spreads:
                copy.set_result(index, self._whole(tensor))
                continue
            names = self.parts[index] if index in lists else self._parts(tensor, self.spreads[index])
            copy.set_result(index, names[0])
            output, dtype = copy.definition.signature.output_arg[index], self._types[index]
            output.CopyFrom(type(output)(name=output.name, type=dtype.as_datatype_enum))
        for index in self.spreads:
            names = self.parts[index] if index in lists else self._parts(self._results[index], self.spreads[index])
            for own, name in zip(self.parts[index][1:], names[1:]):
                copy.return_also(name, self._types[index], own + "_result")
        self._remove()
        return self.finished()

    def _pass_on(self, op: Op, result: int, tensor: int) -> None:
        """Lets what stands for a tensor stand for an op's result."""
        self._table[op.outputs[result]] = self._table.get(tensor) or (once, [self._edge(tensor)])
        self._gone[op.name] = []

    def _answer(self, op: Op, position: int) -> None:
        """Lets an op that asks for shapes look at a part, and a constant stand for the shape of the whole, if it is known."""
        result, tensor = op.outputs[min(position, len(op.outputs) - 1)], op.inputs[position]
        shape = static_ints(self.view.value(result))
        if shape is None:
            self.copy.set_operand(op.name, position, self._whole(tensor))
            return
        self.copy.set_operand(op.name, position, self._table[tensor][1][0])
        self._table[result] = once, [self._nodes.const(shape, f"{op.name}/whole{position}", self._dtype(result), "0")]

    def _divide(self, op: Op, strategy: Strategy) -> None:
        original, names = self.copy.node(op.name), []
        operands = [self._parts(tensor, need) for tensor, need in zip(op.inputs, strategy.needs)]
        for i in range(self._count):
            inputs = [own[i] for own in operands]
            for local in strategy.localise:
                inputs[local.position] = self._localised(op, local.position, strategy, i)
            node = type(original)()
            node.CopyFrom(original)
            node.name = free_name(f"{op.name}/part{i}", lambda name: name in self._names())
            waits = [edge[1:] for edge in original.input[len(data_inputs(original)):]]
            node = self.copy.insert(node, inputs, [new for wait in waits for new in self._gone.get(wait, [wait])])
            node.attr[SHARD_ATTR].i = i
            names.append(node.name)
            self._shapes[node.name] = [
                give.shapes(self.view.shape(t) or ())[i] if give.is_divided else self.view.shape(t)
                for t, give in zip(op.outputs, strategy.gives)]
        self._gone[op.name] = names
        for index, (tensor, give) in enumerate(zip(op.outputs, strategy.gives)):
            self._table[tensor] = give, [self.copy.edge(self.copy.node(name), index) for name in names]

    def _localised(self, op: Op, position: int, strategy: Strategy, i: int) -> str:
        """A constant shape with the sizes of a part."""
        value = static_ints(self.view.value(op.inputs[position]))
        assert value is not None, "a loop's strategies need constant shapes"
        sizes = np.array(value, np.int64)
        for local in strategy.localise:
            if local.position == position:
                sizes[local.element] = local.sizes[i]
        return self._nodes.const(sizes, f"{op.name}/part{i}/shape{position}", self._dtype(op.inputs[position]), str(i))

    # -- values -------------------------------------------------------------------------------------------------------
    def _edge(self, tensor: int) -> str:
        op = self.graph.producer(tensor)
        return op.name if op.type == "_Arg" else self.copy.edge(self.copy.node(op.name), self.graph.tensors[tensor].index)

    def _whole(self, tensor: int) -> str:
        return self._parts(tensor, once)[0]

    def _parts(self, tensor: int, need: Spread) -> List[str]:
        have, names = self._table.get(tensor, (once, []))
        if have == need and names:
            return names
        if (tensor, need) not in self._made:
            self._made[tensor, need] = self._converted(tensor, have, names or [self._edge(tensor)], need)
        return self._made[tensor, need]

    def _converted(self, tensor: int, have: Spread, names: List[str], need: Spread) -> List[str]:
        nodes, dtype = self._nodes, self._dtype(tensor)
        shape, scope = self.view.shape(tensor), f"whale_parts/{self.graph.tensor_name(tensor).replace(':', '_')}"
        if have != once:
            whole = (nodes.add_n(names, f"{scope}/sum", dtype, "0") if have.is_partial
                     else nodes.concat(names, have.dim, f"{scope}/concat", dtype, "0"))
            self._note(whole, [shape])
            names = [whole]
            self._made[tensor, once] = names
        if need.is_shard:
            parts = nodes.split(names[0], need.sizes, self._count, need.dim, f"{scope}/dim{need.dim}", dtype, "0")
            self._note(parts[0], need.shapes(shape or ()))
            return parts
        return names * (self._count if need.kind == EVERYWHERE else 1)

    def _note(self, edge: str, shapes: Sequence[Shape]) -> None:
        self._shapes[edge.partition(":")[0]] = shapes

    def note_constant(self, edge: str) -> None:
        node = self.copy.node(edge.partition(":")[0])
        self._shapes[node.name] = [tuple(dim.size for dim in node.attr["value"].tensor.tensor_shape.dim)]

    def _dtype(self, tensor: int) -> tf.DType:
        return tf.as_dtype(self.graph.tensors[tensor].dtype)

    def _names(self) -> List[str]:
        return [node.name for node in self.copy.definition.node_def]

    def _remove(self) -> None:
        """Takes out the nodes whose work others do; who waits for one of them waits for these."""
        definition = self.copy.definition
        kept = [node for node in definition.node_def if node.name not in self._gone]
        for node in kept:
            waits = [edge[1:] for edge in node.input if edge[0] == "^"]
            if any(wait in self._gone for wait in waits):
                data = data_inputs(node)
                del node.input[:]
                node.input.extend([*data, *("^" + new for wait in waits for new in self._gone.get(wait, [wait]))])
        copies = [type(node).FromString(node.SerializeToString()) for node in kept]
        del definition.node_def[:]
        definition.node_def.extend(copies)
        for name, node in list(definition.control_ret.items()):
            if node in self._gone:
                del definition.control_ret[name]
        outputs = [name for name in definition.signature.control_output if name in definition.control_ret]
        definition.signature.control_output[:] = outputs


class _Tagged(Stage):
    """Stages nodes of a body, tagged with the number of their device."""

    def __init__(self, body: _Body) -> None:
        super().__init__(body.copy.graph)
        self._body = body

    def add(self, op_type: str, name: str, inputs: Sequence[str] = (), *, device: str = "",
            control_inputs: Sequence[str] = (), attrs: Optional[Mapping[str, Any]] = None) -> str:
        copy = self._body.copy
        edge = copy.add(op_type, name, inputs, control_inputs=control_inputs, attrs=attrs)
        copy.node(edge.partition(":")[0]).attr[SHARD_ATTR].i = int(device or 0)
        return edge

    def const(self, value: Any, name: str, *, dtype: Any = None, device: str = "", control_inputs: Sequence[str] = ()) -> str:
        edge = super().const(value, name, dtype=dtype, device=device, control_inputs=control_inputs)
        self._body.note_constant(edge)
        return edge

    def output(self, name: str, index: int) -> str:
        return self._body.copy.output(name, index)


def _user(graph: OpGraph, tensor: int) -> Op:
    """The op that takes a tensor, through Identity ops."""
    (user, _), = graph.uses(tensor)
    return user


def _proto(shape: Shape) -> Any:
    return tf.TensorShape(shape).as_proto()
