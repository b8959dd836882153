"""The pass ``pass_values``: loops, conditions and calls take the values of variables that they only read, not their handles.

::

    before   w ──────────────────────────> While(w, x)    body(w, x)  y = MatMul(x, ReadVariableOp(w))   -> w, y
    after    w ──> ReadVariableOp ──> v ──> While(v, x)    body(v, x)  y = MatMul(x, Identity(v))         -> v, y

The same holds for version 1 loops, in which handles and values arrive through ``Enter``::

    before   w ──────────────────────────> Enter ──> ReadVariableOp ──> MatMul
    after    w ──> ReadVariableOp ──> v ──> Enter ──> Identity ──> MatMul

An op that takes a handle runs where the variable is.  One that takes values runs on any device, in any process: a recurrent
layer on the device of its replica.  Gradients are as before, since they belong to the value that the body read.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Iterator, Sequence, Set, Tuple

from whale_tf._tf_compat import FunctionDef, NodeDef, op_def, tf
from whale_tf.capture.annotations import FORWARD_ATTR
from whale_tf.capture.recording import Recording, renamed, renamed_call
from whale_tf.capture.variables import Variable, passed_on
from whale_tf.graph_editor.control_flow import call_functions, function_names
from whale_tf.graph_editor.edges import tensor_name
from whale_tf.graph_editor.function_copy import FunctionCopy, data_inputs
from whale_tf.graph_editor.names import free_name, names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import Op, OpGraph, Phase, Shape
from whale_tf.ir.traits import CALLS, CONDITIONALS, ENTERS, SWITCHES, WHILES, VariableUse, first_argument, traits
from whale_tf.ir.walk import reached
from whale_tf.transforms.replacing import move_waits, stage_of_value, tag_like

_FUNCTIONAL = WHILES | CONDITIONALS | CALLS
_PASS_ON = WHILES | CALLS | {"Identity"}  # an Identity of a handle, which the gradient of a loop in a function has
_IN_LOOPS = ENTERS | SWITCHES  # of version 1
_TAKERS = _FUNCTIONAL | ENTERS
_REGION = (Phase.FORWARD, Phase.BACKWARD)

Positions = Dict[int, Variable]  # input of an op that is to be a variable's value


def pass_values(step: Recording) -> Recording:
    """The step in which functional ops of the forward and backward pass take values; the same step if none takes a handle that
    it only reads."""
    found: Dict[int, Positions] = {}
    for op in step.graph.ops:
        if op.type in _TAKERS and op.phase in _REGION and _loop_around(step.graph, op).issubset(found) and not (
                op.type in CONDITIONALS and _asks_whether_initialized(step.graph, op)):
            positions = _only_read(step, op)
            if positions:
                found[op.id] = positions
    return _Passer(step, found).run() if found else step


def _only_read(step: Recording, op: Op) -> Positions:
    """The op's inputs that are handles of variables that it only reads."""
    variables = step.phases.variables
    found = {}
    for position, tensor in enumerate(op.inputs):
        variable = variables.alias_of.get(tensor)
        if variable is not None and variables[variable].is_resource and variable not in variables.written_by.get(op.id, ()) \
                and _is_only_read(step.graph, op, position):
            found[position] = variables[variable]
    return found


def _loop_around(graph: OpGraph, op: Op) -> Set[int]:
    """The op by which the handle that enters a version 1 loop has entered the loop around it."""
    before = op
    while before.type in _IN_LOOPS:
        before = graph.producer(before.inputs[0])
        if before.type in ENTERS:
            return {before.id}
    return set()


def _asks_whether_initialized(graph: OpGraph, op: Op) -> bool:
    """Whether a condition depends on which variables have values: those of a branch that is not taken may have none."""
    asked = reached([graph.producer(op.inputs[0]).id], lambda index: [
        graph.tensors[tensor].op for tensor in graph.ops[index].inputs if graph.tensors[tensor].dtype == "bool"])
    return any(traits(graph.ops[index].type).state is VariableUse.IS_INITIALIZED for index in asked)


def _is_only_read(graph: OpGraph, op: Op, position: int, callers: Tuple[OpGraph, ...] = ()) -> bool:
    """Whether the functions that an op calls, or the loop that it enters, only read what is behind a handle that it takes.

    Args:
        callers: the functions in which the op is; a recursive one keeps its handles.
    """
    if op.type in _IN_LOOPS:
        return all(_reads(graph.ops[user], at) or _is_only_read(graph, graph.ops[user], at, callers)
                   for tensor in op.outputs for user, at in graph.consumers(tensor))
    return bool(op.body) and all(
        body not in callers and _reads_argument(op, body, _argument(op, position), callers)
        for body in (op.body or {}).values())


def _reads_argument(caller: Op, body: OpGraph, index: int, callers: Tuple[OpGraph, ...]) -> bool:
    for op, position in _uses(body, index):
        if op.type == "_Retval":
            if caller.type not in CALLS and not (caller.type in WHILES and op.attrs["index"] == index):
                return False
        elif op.type in _FUNCTIONAL:
            if not _is_only_read(body, op, position, (*callers, body)):
                return False
        elif not (op.type == "Identity" or _reads(op, position)):
            return False
    return True


def _reads(op: Op, position: int) -> bool:
    """Whether an op takes a handle for what can be done to a value."""
    return bool(traits(op.type).of_value) and position == 0


def _uses(body: OpGraph, index: int) -> Iterator[Tuple[Op, int]]:
    """(op, input position) of the uses of a function's parameter, which loops and calls inside pass on as their results."""
    aliases = [next(op for op in body.ops if op.type == "_Arg" and op.attrs["index"] == index).outputs[0]]
    for alias in aliases:  # grows
        for user, position in body.consumers(alias):
            op = body.ops[user]
            aliases += [tensor for tensor in _handles(body, op, position) if tensor not in aliases]
            yield op, position


def _handles(graph: OpGraph, op: Op, position: int) -> Sequence[int]:
    """Results of a functional op that are the handle that it takes."""
    return passed_on(graph, op, position) if op.type in _PASS_ON else ()


def _argument(op: Op, position: int) -> int:
    """The parameter of an op's functions that stands for an input."""
    return position - first_argument(op.type)


class _Passer:
    """Stages the reads, the ops that take values and the functions that these call, then moves the edges.

    Attributes:
        shapes: shapes of new tensors, by name.
    """

    def __init__(self, step: Recording, found: Dict[int, Positions]) -> None:
        self._step, self._graph, self._found = step, step.graph, found
        self._edit = StagedEdit.after(step.definitions)
        self._functions: Dict[Tuple[str, FrozenSet[Tuple]], str] = {}
        self._successors: Dict[str, str] = {}
        self._replaced: Dict[str, str] = {}
        self._before: Dict[str, str] = {}  # new op -> the one in front of which it is
        self.shapes: Dict[str, Shape] = {}

    def run(self) -> Recording:
        graph, edit, step = self._graph, self._edit, self._step
        taken = names_taken(edit.graph)
        for op in map(graph.ops.__getitem__, self._found):  # producers first
            self._successors[op.name] = free_name(f"{op.name}/of_values", lambda name: name in taken or name in edit)
            if op.type in ENTERS:
                self._enter(op, self._found[op.id][0])
            else:
                self._stage(op, self._found[op.id])
        for op in graph.ops:
            for position, tensor in enumerate(op.inputs) if op.name not in self._successors else ():
                if graph.tensor_name(tensor) in self._replaced:
                    edit.move_input(op.name, position, self._now(tensor))
        move_waits(graph, edit, self._successors)
        for name in self._before:  # what new ops read, or wait for, may have been replaced after they were staged
            node = edit.node(name)
            for position, edge in enumerate(data_inputs(node)):
                edit.move_input(name, position, self._replaced.get(tensor_name(edge), edge))
            waits = [edge[1:] for edge in node.input if edge[1:] in self._successors and edge[0] == "^"]
            edit.move_waits(name, waits, [self._successors[wait] for wait in waits])
        calls = [renamed_call(call, *(renamed(names, self._replaced) for names in (call.ys, call.xs, call.grads)))
                 for call in step.annotations.gradient_calls]
        instead = {name: (new,) for name, new in self._successors.items()}  # a function runs all its stateful ops
        return step.after(edit, calls, self._successors, self.shapes, {**step.replaced, **self._replaced, **instead},
                          before_ops=self._before)

    def _stage(self, op: Op, positions: Positions) -> None:
        graph, edit, definition = self._graph, self._edit, self._step.definitions.node(op.name)
        name, inputs = self._successors[op.name], []
        waits = [graph.ops[wait].name for wait in op.control_inputs]
        for position, tensor in enumerate(op.inputs):
            now = self._now(tensor)
            is_value = graph.producer(tensor).type in _IN_LOOPS and now != graph.tensor_name(tensor)
            inputs.append(self._read(op, positions[position], now) if position in positions and not is_value else now)
        node = edit.copy(definition, name, inputs, device=op.device, control_inputs=waits)
        self._before[name] = op.name
        if op.forward >= 0:
            forward = graph.ops[op.forward].name
            node.attr[FORWARD_ATTR].s = self._successors.get(forward, forward).encode()
        self._take_values(node, graph, op, positions)
        handles = {output: position for position in positions for output in _handles(graph, op, position)}
        for index, output in enumerate(op.outputs):
            source = handles.get(output)
            self.shapes[f"{name}:{index}"] = graph.tensors[output].shape if source is None else positions[source].shape
            self._replaced[graph.tensor_name(output)] = f"{name}:{index}" if source is None else self._now(op.inputs[source])

    def _enter(self, op: Op, variable: Variable) -> None:
        """Stages what enters a loop and takes a value there."""
        graph, edit, entered = self._graph, self._edit, self._now(op.inputs[0])
        is_outermost = graph.producer(op.inputs[0]).name not in self._successors
        source = self._read(op, variable, entered) if is_outermost else entered
        attrs = {name: op.attrs[name] for name in ("frame_name", "is_constant", "parallel_iterations")}
        name = edit.add("Enter", self._successors[op.name], [source], device=op.device, attrs=attrs)
        self._like(op, name, variable.shape)
        self._take_in_loop(op, name, variable)

    def _take_in_loop(self, op: Op, name: str, variable: Variable) -> None:
        """Makes readers take the results of a new ``Enter`` or ``Switch``, instead of those of ``op``."""
        graph = self._graph
        self._successors[op.name] = name
        for index, tensor in enumerate(op.outputs):
            self._replaced[graph.tensor_name(tensor)] = value = f"{name}:{index}"
            for reader in (graph.ops[user] for user, _ in graph.consumers(tensor)):
                if reader.type in SWITCHES:
                    switch = self._edit.add(reader.type, f"{reader.name}/of_value", [value, self._now(reader.inputs[1])],
                                            device=reader.device)
                    self._like(reader, switch, variable.shape, len(reader.outputs))
                    self._take_in_loop(reader, switch, variable)
                elif reader.type not in _TAKERS:  # which have their own turn
                    self._successors[reader.name] = self._of_value(reader, value)

    def _of_value(self, op: Op, value: str) -> str:
        """Stages what does to a value in a loop what ``op`` does to the variable."""
        graph = self._graph
        name, *axis = stage_of_value(
            self._edit, op, value, [self._now(tensor) for tensor in op.inputs[1:]], f"{op.name}/of_value",
            [graph.ops[wait].name for wait in op.control_inputs], [value.partition(":")[0]])
        for one in axis:
            self._like(op, one, ())
        self._like(op, name, graph.tensors[op.outputs[0]].shape)
        self._replaced[graph.tensor_name(op.outputs[0])] = f"{name}:0"
        return name

    def _like(self, op: Op, name: str, shape: Shape, outputs: int = 1) -> None:
        """Puts a new node, whose results have this shape, into the TaskGraph and phase of ``op``."""
        self._before[name] = op.name
        node = self._edit.node(name)
        tag_like(node, self._step.definitions.node(op.name))
        if op.forward >= 0:
            forward = self._graph.ops[op.forward].name
            node.attr[FORWARD_ATTR].s = self._successors.get(forward, forward).encode()
        self.shapes.update((f"{name}:{index}", shape) for index in range(outputs))

    def _now(self, tensor: int) -> str:
        """What is read instead of a tensor; of a loop's result that is a handle, the variable's own."""
        name = self._graph.tensor_name(tensor)
        return self._replaced.get(name, name)

    def _read(self, op: Op, variable: Variable, handle: str) -> str:
        """Stages the read of a variable for an op."""
        graph = self._graph
        waits = [graph.ops[wait].name for wait in op.control_inputs
                 if graph.ops[wait].phase not in _REGION or variable.op in self._step.phases.variables.written_by.get(wait, ())]
        name = self._edit.add("ReadVariableOp", f"{self._successors[op.name]}/{variable.name}", [handle], device=op.device,
                              control_inputs=waits, attrs={"dtype": tf.as_dtype(variable.dtype)})
        self._like(op, name, variable.shape)
        return f"{name}:0"

    def _take_values(self, node: NodeDef, graph: OpGraph, op: Op, positions: Positions) -> None:
        """Makes a copy of ``op``, in the graph or in a function, take values and call functions that take them."""
        arguments = {_argument(op, position): variable for position, variable in positions.items()}
        types = node.attr["T" if op.type in WHILES else "Tin"].list.type
        for argument, variable in arguments.items():
            types[argument] = tf.as_dtype(variable.dtype).as_datatype_enum
            if op.type in WHILES and node.attr["output_shapes"].list.shape:
                node.attr["output_shapes"].list.shape[argument].CopyFrom(tf.TensorShape(variable.shape).as_proto())
        if op.type in CALLS:
            for position, variable in positions.items():
                for output in _handles(graph, op, position):
                    node.attr["Tout"].list.type[graph.tensors[output].index] = tf.as_dtype(variable.dtype).as_datatype_enum
        call_functions(node, {name: self._function(name, (op.body or {})[attribute], arguments)
                              for attribute, name in function_names(node).items() if attribute in (op.body or {})})

    def _function(self, name: str, body: OpGraph, arguments: Dict[int, Variable]) -> str:
        """The function that takes values as these arguments, and otherwise does what ``name`` does."""
        key = name, frozenset((index, variable.dtype, variable.shape) for index, variable in arguments.items())
        if key not in self._functions:
            self._functions[key] = self._edit.add_function(self._edited(name, body, arguments))
        return self._functions[key]

    def _edited(self, name: str, body: OpGraph, arguments: Dict[int, Variable]) -> FunctionDef:
        copy = FunctionCopy(self._edit.graph, self._edit.function(name))
        signature = copy.definition.signature
        inside: Dict[int, Positions] = {}  # functional op of the body -> its inputs that become values
        for index, variable in arguments.items():
            argument, dtype = signature.input_arg[index], tf.as_dtype(variable.dtype)
            argument.CopyFrom(type(argument)(name=argument.name, type=dtype.as_datatype_enum))  # without the variable's type
            copy.definition.arg_attr.pop(index, None)
            for op, position in _uses(body, index):
                if op.type == "_Retval":
                    signature.output_arg[op.attrs["index"]].type = dtype.as_datatype_enum
                elif op.type == "Identity":
                    copy.node(op.name).attr["T"].type = dtype.as_datatype_enum
                elif op.type in _FUNCTIONAL:
                    inside.setdefault(op.id, {})[position] = variable
                else:
                    _use_value(copy, op, dtype)
        for user, positions in inside.items():
            self._take_values(copy.node(body.ops[user].name), body, body.ops[user], positions)
        _note_shapes(copy.definition, body, arguments)
        return copy.finish(free_name(f"{name}_of_values", self._edit.has_function))


def _use_value(copy: FunctionCopy, op: Op, dtype: tf.DType) -> None:
    """Makes an op of a function that took a variable's handle do the same to its value."""
    node = copy.node(op.name)
    old, attributes, waits = copy.edge(node, 0), dict(node.attr), node.input[len(data_inputs(node)):]
    operands = data_inputs(node)
    node.op = traits(op.type).of_value
    definition = op_def(copy.graph, node.op)
    types = {definition.input_arg[0].type_attr: dtype}
    if len(definition.input_arg) > len(operands):  # a look-up in a value has an axis
        operands.append(copy.const(op.attrs.get("batch_dims", 0), f"{op.name}/axis", dtype=tf.int32))
        types[definition.input_arg[-1].type_attr] = tf.int32
    for name in [name for name in attributes if not name.startswith("_")]:
        del node.attr[name]
    for attribute in definition.attr:
        if attribute.name in types:
            node.attr[attribute.name].type = types[attribute.name].as_datatype_enum
        elif attribute.name in attributes:
            node.attr[attribute.name].CopyFrom(attributes[attribute.name])
        elif attribute.HasField("default_value"):
            node.attr[attribute.name].CopyFrom(attribute.default_value)
    del node.input[:]
    node.input.extend([*operands, *waits])
    copy.replace({old: copy.edge(node, 0)})


def _note_shapes(function: FunctionDef, body: OpGraph, arguments: Dict[int, Variable]) -> None:
    """Writes the shapes that are known of a function's tensors into its definition: of a copy TensorFlow knows none."""
    shapes: Dict[int, Shape] = {}
    for op in body.ops:
        if op.type == "_Arg":
            index = op.attrs["index"]
            shapes[index] = arguments[index].shape if index in arguments else body.tensors[op.outputs[0]].shape
    function.attr["_input_shapes"].list.shape.extend(_proto(shapes[index]) for index in sorted(shapes))
    for node in function.node_def:
        if node.name in body:
            node.attr["_output_shapes"].list.shape.extend(_proto(body.tensors[t].shape) for t in body.op(node.name).outputs)


def _proto(shape: Shape) -> Any:
    return tf.TensorShape(shape).as_proto()
