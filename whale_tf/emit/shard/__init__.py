"""``split`` TaskGraphs: an assignment carried out on a tf.Graph, before everything else.

Afterwards every part of an op is an ordinary op, tagged with the device it runs on, and communication is ordinary ops
between them; micro-batches, replicas, pipelines and gradient sums need not know.  The divided originals stay in the graph,
unused.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.annotations import FORWARD_ATTR, REPLACED_ATTR, annotations_of
from whale_tf.capture.captured import Captured
from whale_tf.emit.shard.lower import Lowering
from whale_tf.emit.shard.variables import DividedVariables, Parts, Waits
from whale_tf.graph_editor import set_input
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.patterns.spread import EACH, Spread
from whale_tf.planner.sharding import Assignment

ROOT = "shards"


class Pieces(NamedTuple):
    """A divided tensor, for fetches: names of its parts, joined along ``spread.dim`` or added up."""

    names: Tuple[str, ...]
    spread: Spread


class Sharded:
    """What :func:`shard` did.

    Attributes:
        replaced: tensor of the local script -> the tensor, or the Pieces, in its place; op -> the ops in its place.
        variables: see :class:`DividedVariables`.
    """

    def __init__(self) -> None:
        self.replaced: Dict[str, Union[str, Pieces, Tuple[str, ...]]] = {}
        self.variables: Optional[DividedVariables] = None
        self.restore: List[Callable[[], Any]] = []

    def undo(self) -> None:
        """Let everything read the local script's ops again; the parts stay in the graph, unused."""
        while self.restore:
            self.restore.pop()()
        self.replaced.clear()


def shard(graph: tf.Graph, captured: Captured, assignment: Assignment, counts: Dict[int, int], done: Sharded) -> None:
    """Put the parts of every divided op in its place.

    Args:
        counts: devices of each split TaskGraph.
        done: filled in; ``done.undo()`` takes the edits back, also after an error.
    """
    root, index = ROOT, 0
    while any(name == root or name.startswith(root + "/") for name in (op.name for op in captured.graph.ops)):
        index += 1
        root = f"{ROOT}_{index}"
    edit = StagedEdit(graph, captured.export)
    lowering = Lowering(graph, captured, assignment, counts, edit, root)
    lowering.run()
    mover = _Mover(graph, captured, lowering, done)
    moves = mover.stage_moves()
    calls = mover.stage_calls()
    new = edit.commit()
    mover.set_shapes(new)
    mover.move(moves)
    mover.rename(calls)
    variables = [Parts(graph.get_operation_by_name(captured.graph.ops[op].name), tuple(names),
                       assignment.variables[op]) for op, names in lowering.variables.items()]
    for variable in variables:
        if variable.op.type != "VarHandleOp":
            done.replaced[variable.op.outputs[0].name] = Pieces(
                tuple(_tensor_name(name) for name in variable.names), variable.spread)
    done.variables = DividedVariables(graph, variables, done.replaced, set(lowering.done), root, done.restore)
    done.variables.update()


class _Mover:
    """Edges, waits, fetches and gradient calls turn from the divided ops to their parts."""

    def __init__(self, graph: tf.Graph, captured: Captured, lowering: Lowering, done: Sharded) -> None:
        self._tf_graph, self._graph, self._captured = graph, captured.graph, captured
        self._lowering, self._done = lowering, done
        self._roots = {captured.graph.ops[op].outputs[0] for op in lowering.variables}

    def stage_moves(self) -> List[Tuple[int, int, str]]:
        """(op, input position, tensor name) of every edge from a divided op to one that is not: it reads the whole."""
        graph, found = self._graph, []
        for tensor, _ in sorted(self._lowering.values.table.items()):
            if tensor in self._roots or graph.tensors[tensor].dtype == "resource":
                continue
            for op, position in graph.consumers(tensor):
                if graph.ops[op].name not in self._lowering.done:
                    reader = self._captured.task_graph[op]
                    found.append((op, position, self._lowering.values.whole(tensor, reader if reader >= 0 else None)))
        return found

    def stage_calls(self) -> List[Tuple[Any, str, List[Any]]]:
        """New fields of the gradient calls: a variable and its gradient become their parts."""
        changes: List[Tuple[Any, str, List[Any]]] = []
        for call in annotations_of(self._tf_graph).gradient_calls:
            xs, grads = [], []  # type: List[str], List[Any]
            for x, grad in zip(call.xs, call.grads):
                more = self._parts_of(x, grad)
                xs.extend(name for name, _ in more)
                grads.extend(name for _, name in more)
            changes += [(call, "ys", [self._whole(y) for y in call.ys]), (call, "xs", xs), (call, "grads", grads)]
        return changes

    def _parts_of(self, x: str, grad: Any) -> List[Tuple[str, Any]]:
        values = self._lowering.values
        tensor = self._graph.tensor(x)
        variable = values.table.get(tensor)
        if variable is None or not self._is_variable(tensor):
            return [(self._whole(x), self._whole(grad))]
        if isinstance(grad, str):  # spread like the variable before the cut between BACKWARD and APPLY
            parts = values.parts(self._graph.tensor(grad), variable.spread, variable.task_graph)
            return list(zip([_tensor_name(n) for n in variable.names], [_tensor_name(n) for n in parts]))
        return [(_tensor_name(name), self._whole(grad)) for name in variable.names]

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
        return _tensor_name(self._lowering.values.whole(self._graph.tensor(name)))

    def set_shapes(self, new: Dict[str, tf.Operation]) -> None:
        """Parts know the sizes that the local script's tensors know: TensorFlow infers less of a clone's, because gradients
        and users set shapes by hand."""
        view = self._lowering.view
        for number, spread, names in self._lowering.values.made():
            shape = view.shape(number)
            if shape is None or self._graph.tensors[number].dtype == "resource" or spread.kind == EACH:
                continue
            for i, name in enumerate(names):
                op, _, index = name.partition(":")
                if op in new:
                    sizes = [spread.sizes[i] if d == spread.dim else size for d, size in enumerate(shape)]
                    new[op].outputs[int(index or 0)].set_shape(sizes)

    def move(self, moves: Sequence[Tuple[int, int, str]]) -> None:
        restore = self._done.restore
        for op, position, name in moves:
            tf_op = self._tf_graph.get_operation_by_name(self._graph.ops[op].name)
            before = tf_op.inputs[position]
            set_input(tf_op, position, self._tf_graph.get_tensor_by_name(_tensor_name(name)))
            restore.append(functools.partial(tf_op._update_input, position, before))
        waits = Waits()
        for name, parts in self._lowering.done.items():
            self._replace(self._graph.op(name), [part.partition(":")[0] for row in parts for part in row], waits)
        waits.carry_out(restore)

    def _replace(self, op: Any, parts: List[str], waits: Waits) -> None:
        graph, done = self._tf_graph, self._done
        tf_op = graph.get_operation_by_name(op.name)
        tf_op._set_attr(REPLACED_ATTR, v1.AttrValue(b=True))
        done.restore.append(lambda: tf_op._set_attr(REPLACED_ATTR, v1.AttrValue(b=False)))
        new = [graph.get_operation_by_name(part) for part in dict.fromkeys(parts)]
        for waiting in tf_op._control_outputs:
            if waiting.name not in self._lowering.done and waiting not in new and waiting.name not in self._lowering.edit:
                waits.instead(waiting, tf_op, new)
        done.replaced[op.name] = tuple(dict.fromkeys(parts))
        for tensor in op.outputs:
            value = self._lowering.values.table.get(tensor)
            if value is not None:
                names = tuple(_tensor_name(name) for name in value.names)
                done.replaced[self._graph.tensor_name(tensor)] = names[0] if len(names) == 1 else Pieces(names, value.spread)

    def rename(self, changes: Sequence[Tuple[Any, str, List[Any]]]) -> None:
        for call, field, names in changes:
            before = getattr(call, field)
            setattr(call, field, names)
            self._done.restore.append(functools.partial(setattr, call, field, before))
        for op in self._graph.ops:  # what is computed once, from the gradient of a divided op, belongs to a part of it now
            if op.forward >= 0 and self._graph.ops[op.forward].name in self._lowering.done \
                    and op.name not in self._lowering.done:
                self._retag(op)

    def _retag(self, op: Any) -> None:
        tf_op = self._tf_graph.get_operation_by_name(op.name)
        forward = self._graph.ops[op.forward]
        old, new = (v1.AttrValue(s=name.encode()) for name in (forward.name, self._lowering.forward_name(forward)))
        tf_op._set_attr(FORWARD_ATTR, new)
        self._done.restore.append(lambda: tf_op._set_attr(FORWARD_ATTR, old))


def _tensor_name(name: str) -> str:
    return name if ":" in name else name + ":0"
