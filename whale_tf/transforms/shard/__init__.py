"""The pass ``shard``: applies an assignment to a step whose TaskGraphs are ``split``, before everything else.

Afterwards every part of an op is an ordinary op, tagged with the device it runs on, and communication is ordinary ops between
them.  Code for micro-batches, replicas, pipelines and gradient sums need not know about it.  The divided originals stay in the
user's graph, unused, and are no longer part of the step.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, List, NamedTuple, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import GradientCall
from whale_tf.capture.captured import Captured, captured_after
from whale_tf.capture.new_shapes import with_new_shapes
from whale_tf.capture.recording import renamed_call
from whale_tf.graph_editor.edges import tensor_name
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import Op, Phase, Shape
from whale_tf.ir.traits import WHILES
from whale_tf.patterns.spread import EACH, Spread
from whale_tf.planner.sharding import Assignment
from whale_tf.transforms.shard.divided_variables import DividedVariable, DividedVariables
from whale_tf.transforms.shard.lower import Lowering
from whale_tf.transforms.shard.values import put_together

ROOT = "shards"


class Pieces(NamedTuple):
    """A divided tensor, for fetches: names of its parts, put together or added up."""

    names: Tuple[str, ...]
    spread: Spread

    def joined(self, nodes: Nodes, names: Sequence[str], scope: str, dtype: Any, host: str) -> str:
        """Stages the whole, from the parts of these names."""
        if self.spread.is_divided:
            return put_together(nodes, names, self.spread, scope, dtype, host)
        return nodes.add_n(names, scope, dtype, host)


def shard(captured: Captured, assignment: Assignment, counts: Dict[int, int],
          gathering: AbstractSet[int] = frozenset()) -> Tuple[Captured, DividedVariables]:
    """The step with parts instead of each divided op, and the variables that are divided.

    Args:
        counts: number of devices of each TaskGraph with divided ops or variables.
        gathering: ops whose calls put together the parts of variables that they read.
    """
    step = captured.recording
    assert step is not None
    edit = StagedEdit.after(step.definitions)
    scopes = {op.name.partition("/")[0] for op in captured.graph.ops}
    lowering = Lowering(captured, assignment, counts, edit, free_name(ROOT, scopes.__contains__))
    staged = len(edit)
    lowering.run()
    mover = _Mover(captured, lowering, gathering)
    mover.move_edges()
    calls = [mover.call(call) for call in step.annotations.gradient_calls]
    shapes = with_new_shapes(step, edit, [node.name for node in edit.nodes()[staged:]], mover.shapes())
    mover.move_waits()
    replaced = {**mover.replaced(), **step.replaced}
    parts = [_parts(step.definitions.graph, captured.graph.ops[op], names, assignment)
             for op, names in lowering.variables.items()]
    for variable in parts:
        if not variable.is_resource:
            replaced[variable.op.outputs[0].name] = Pieces(tuple(map(tensor_name, variable.names)), variable.spread)
    done = {*lowering.done, *step.done}
    variables = DividedVariables(step.definitions.graph, parts, replaced, done, lowering.root)
    shapes.update(variables.stage(edit))
    successors = {name: lowering.forward_name(captured.graph.op(name)) for name in lowering.done}
    return captured_after(captured, step.after(edit, calls, successors, shapes, replaced, tags=lowering.tags)), variables


def _parts(graph: tf.Graph, op: Op, names: Sequence[str], assignment: Assignment) -> DividedVariable:
    return DividedVariable(graph.get_operation_by_name(op.name), tuple(names), assignment.variables[op.id],
                           assignment.task_graph[op.id], op.type == "VarHandleOp", tf.as_dtype(op.attrs["dtype"]).base_dtype,
                           tuple(op.attrs["shape"]))


class _Mover:
    """Moves edges, waits, fetches and gradient calls from the divided ops to their parts."""

    def __init__(self, captured: Captured, lowering: Lowering, gathering: AbstractSet[int]) -> None:
        self._graph, self._captured = captured.graph, captured
        self._lowering, self._gathering = lowering, gathering
        self._roots = {captured.graph.ops[op].outputs[0] for op in lowering.variables}

    def move_edges(self) -> None:
        """Makes ops that are not divided read the whole of divided tensors."""
        graph, lowering = self._graph, self._lowering
        for tensor in sorted(lowering.values.table):
            is_handle = graph.tensors[tensor].dtype == "resource" and graph.producer(tensor).type not in WHILES
            if tensor in self._roots or is_handle:
                continue
            for op, position in graph.consumers(tensor):
                if graph.ops[op].name not in lowering.done:
                    lowering.edit.move_input(graph.ops[op].name, position, self._whole_for(graph.ops[op], tensor))

    def _whole_for(self, op: Op, tensor: int) -> str:
        """What an undivided op reads instead of a divided tensor."""
        values, reader = self._lowering.values, self._captured.task_graph[op.id]
        is_gathered = values.table[tensor].spread.is_shard and self._graph.tensors[tensor].op not in self._gathering
        if op.id in self._gathering and is_gathered:
            return values.gathered(tensor, reader, op.phase is Phase.BACKWARD)
        return values.whole(tensor, reader if reader >= 0 else None)

    def move_waits(self) -> None:
        """Makes ops that are not divided wait for all parts of divided ops."""
        for op in self._graph.ops:
            if not op.control_inputs or op.name in self._lowering.done:
                continue
            divided = [self._graph.ops[wait] for wait in op.control_inputs if self._graph.ops[wait].name in self._lowering.done]
            if divided:
                self._lowering.edit.move_waits(op.name, [wait.name for wait in divided],
                                               [part for wait in divided for part in self._parts(wait)])

    def _parts(self, op: Op) -> Tuple[str, ...]:
        """Names of the ops that replace a divided one."""
        return tuple(dict.fromkeys(part.partition(":")[0] for row in self._lowering.done[op.name] for part in row))

    def replaced(self) -> Dict[str, Any]:
        """Divided op or tensor -> the ops, the tensor, or the Pieces, that replace it."""
        found: Dict[str, Any] = {}
        for name in self._lowering.done:
            op = self._graph.op(name)
            found[name] = self._parts(op)
            for tensor in op.outputs:
                value = self._lowering.values.table.get(tensor)
                if value is not None:
                    names = tuple(tensor_name(part) for part in value.names)
                    found[self._graph.tensor_name(tensor)] = names[0] if len(names) == 1 else Pieces(names, value.spread)
        return found

    def call(self, call: GradientCall) -> GradientCall:
        """A gradient call with parts of variables, and of their gradients."""
        xs, grads = [], []  # type: List[str], List[Any]
        for x, grad in zip(call.xs, call.grads):
            more = self._parts_of(x, grad)
            xs.extend(name for name, _ in more)
            grads.extend(name for _, name in more)
        return renamed_call(call, [self._whole(y) for y in call.ys], xs, grads)

    def _parts_of(self, x: str, grad: Any) -> List[Tuple[str, Any]]:
        values = self._lowering.values
        tensor = self._graph.tensor(x)
        variable = values.table.get(tensor)
        if variable is None or not self._is_variable(tensor):
            return [(self._whole(x), self._whole(grad))]
        if isinstance(grad, tuple) and self._graph.tensor(grad[0]) in self._lowering.assignment.settled:  # others are of rows
            slices = values.parts(self._graph.tensor(grad[0]), variable.spread, variable.task_graph)
            rest = self._whole(grad[1:])
            return [(tensor_name(name), (tensor_name(part), *rest)) for name, part in zip(variable.names, slices)]
        if isinstance(grad, str):  # spread like the variable before the cut between BACKWARD and APPLY
            parts = values.parts(self._graph.tensor(grad), variable.spread, variable.task_graph)
            return list(zip(map(tensor_name, variable.names), map(tensor_name, parts)))
        return [(tensor_name(name), self._whole(grad)) for name in variable.names]

    def _is_variable(self, tensor: int) -> bool:
        """Whether a tensor is a divided variable, or a plain read of one."""
        producer = self._graph.producer(tensor)
        strategy = self._lowering.assignment.strategies.get(producer.id)
        return tensor in self._roots or (strategy is not None and strategy.pattern == "read")

    def _whole(self, name: Any) -> Any:
        if isinstance(name, (list, tuple)):
            return type(name)([self._whole(each) for each in name])
        if name is None:
            return None
        return tensor_name(self._lowering.values.whole(self._graph.tensor(name)))

    def shapes(self) -> Dict[str, Shape]:
        """Shapes of the parts, as far as those of the local script's tensors are known.  TensorFlow infers less from a clone,
        because gradients and users set shapes by hand."""
        found = dict(self._lowering.values.shapes)
        view = self._lowering.view
        for number, spread, names in self._lowering.values.made():
            shape = () if self._graph.tensors[number].dtype == "resource" else view.shape(number)
            if shape is None or spread.kind == EACH or (spread.is_divided and self._graph.tensors[number].dtype == "variant"):
                continue  # parts of a weight stand for a list of it
            shapes = spread.shapes(shape) if shape and spread.is_divided else [tuple(shape)] * len(names)  # handles have none
            found.update((tensor_name(name), own) for name, own in zip(names, shapes)
                         if name.partition(":")[0] in self._lowering.edit)
        return found
