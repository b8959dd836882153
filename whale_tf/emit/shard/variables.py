"""Divided variables, as the rest of the user's graph sees them: whole.

Initializers, restores, ``load``, hand-written assigns, savers and reads name the local script's variable.  Its value lives in
parts; the variable itself is never initialised and takes no memory::

    before   value ──> Assign(v) - - > init          after   value ──┬─> Slice ──> Assign(v/0) - - ┬ - > init
                                                                     └─> Slice ──> Assign(v/1) - - ┘
             v ──> Mean                                      v/0, v/1 ──> Concat ──> Mean

Savers write and read slices (:mod:`whale_tf.emit.shard.checkpoints`).
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.shard.checkpoints import Checkpoints, Parts, host_of
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor import add_control_inputs, consumers, remove_control_inputs, set_input
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import ASSIGNS, READS, State, traits


class DividedVariables:
    """Keeps the local script's variables usable, whatever is added to the graph later.

    Args:
        replaced: fetches of what stands in the place of a tensor or op; grows with every update.
        divided: names of the ops whose uses of the variables are divided themselves.
        undo: grows with what takes the edits back.

    """

    def __init__(self, graph: tf.Graph, variables: Sequence[Parts], replaced: Dict[str, Any], divided: Set[str], root: str,
                 undo: List[Callable[[], Any]]) -> None:
        self._graph = graph
        self._variables = variables
        self._replaced = replaced
        self._divided = set(divided)
        self._handled: Set[Tuple[str, str]] = set()  # (variable, op that uses it)
        self._root = root
        self._undo = undo
        self._version = -1
        self._known = 0  # operations that were there at the last update
        self._unplaced: Dict[str, str] = {}  # an op that saves or restores -> the part beside which it runs
        self._initials: Dict[str, Parts] = {}  # a divided write, which makes its value in parts -> what it initialises
        self._loads: Dict[str, List[str]] = {}
        self._writes: Dict[str, List[str]] = {}  # a write of the whole -> the writes of the parts
        self._reads: List[Tuple[tf.Tensor, str]] = []  # a tensor, and what its readers read instead

    def update(self) -> None:
        """Let all uses that are new since the last call work on the parts."""
        if not self._variables or self._graph.version == self._version:
            return
        self._place()
        edit = self._edit(self._writes)
        operations = self._graph.get_operations()
        saves = edit.save([op for op in operations[self._known:] if op.type == "SaveV2"])
        self._known = len(operations)
        for variable in self._variables:
            users = [op for op in variable.op.outputs[0].consumers()
                     if (op.name not in self._divided or op.type in READS | ASSIGNS)  # later uses may need them, too
                     and (variable.op.name, op.name) not in self._handled and op.name not in saves]
            # writes first: reads wait for them
            for op in sorted(dict.fromkeys(users), key=lambda op: not traits(op.type).is_write):
                if op.name in self._divided and traits(op.type).is_write:
                    self._initials[op.name] = variable
                    self._writes[op.name] = list(self._replaced[op.name])  # an initializer of all may be built later
                elif op.name in self._divided:
                    edit.read(variable, op, ())
                else:
                    edit.use(variable, op)
                self._handled.add((variable.op.name, op.name))
        self._commit(edit)
        self._reads.extend(edit.reads)
        self._move(edit.inputs)
        self._version = self._graph.version

    def loads(self, op: tf.Operation, feeds: Sequence[tf.Tensor]) -> List[str]:
        """``Variable.load`` runs an initializer and feeds its value: what writes the parts of that, where a run of ``op`` makes
        them otherwise."""
        if op.name not in self._initials or all(feed is not op.inputs[1] for feed in feeds):
            return []
        if op.name not in self._loads:
            edit = self._edit({})
            self._loads[op.name] = edit.write(self._initials[op.name], op)
            self._commit(edit)
        return self._loads[op.name]

    def _edit(self, writes: Dict[str, List[str]]) -> _Edit:
        return _Edit(self._graph, self._root, self._variables, writes)

    def _commit(self, edit: _Edit) -> None:
        edit.commit()
        self._unplaced.update(edit.checkpoints.placed)
        self._place()

    def _place(self) -> None:
        """Give a device to what runs beside parts that have one by now."""
        for name, part in list(self._unplaced.items()):
            device = self._graph.get_operation_by_name(part).device
            if device:
                del self._unplaced[name]
            if host_of(device):
                self._graph.get_operation_by_name(name)._set_device(host_of(device))

    def _move(self, inputs: Sequence[Tuple[tf.Operation, int, str]]) -> None:
        """Edges and waits of the user's ops, old and new, turn to the parts."""
        for tensor, name in self._reads:
            new = self._tensor(name)
            self._replaced.setdefault(tensor.name, new.name)
            for reader, position in consumers(tensor):
                if not _is_reference(reader, position):
                    self._set_input(reader, position, new)
        for op, position, name in inputs:
            self._set_input(op, position, self._tensor(name))
        waits = Waits()
        for name, writes in self._writes.items():
            self._replaced[name] = tuple(writes)
            old = self._graph.get_operation_by_name(name)
            parts = [self._graph.get_operation_by_name(write) for write in writes]
            for waiting in old._control_outputs:
                if waiting not in parts:
                    waits.instead(waiting, old, parts)
        waits.carry_out(self._undo)

    def _set_input(self, op: tf.Operation, position: int, tensor: tf.Tensor) -> None:
        before = op.inputs[position]
        set_input(op, position, tensor)
        self._undo.append(functools.partial(op._update_input, position, before))

    def _tensor(self, name: str) -> tf.Tensor:
        return self._graph.get_tensor_by_name(name if ":" in name else name + ":0")

    def catch_up(self, original_run: Callable) -> None:
        """Parts of variables that were initialised before they were divided take their values."""
        edit = StagedEdit(self._graph)
        nodes = Nodes(edit)
        checks, assigns = [], []
        for variable in self._variables:
            scope = f"{self._root}/catch_up/{variable.op.name}"
            whole = _read(nodes, variable, variable.op.name, scope + "/value", ())
            is_resource = variable.op.type == "VarHandleOp"
            query = "VarIsInitializedOp" if is_resource else "IsVariableInitialized"
            checks.append(edit.add(query, scope + "/is_initialized", [variable.op.name]))
            assigns.append([
                edit.add("AssignVariableOp" if is_resource else "Assign", f"{scope}/assign{i}",
                         [part, _part_of(nodes, variable, whole, i, scope)],
                         attrs={"dtype" if is_resource else "T": variable.op.get_attr("dtype")})
                for i, part in enumerate(variable.names)])
        new = edit.commit()
        for variable in self._variables:
            self._handled.update((variable.op.name, op.name) for op in variable.op.outputs[0].consumers())
        known = original_run([new[name].outputs[0] for name in checks])
        original_run([new[name] for names, ready in zip(assigns, known) if ready for name in names])


class _Edit:
    """What one update stages.

    Attributes:
        writes: a write of the whole -> the writes of the parts, those of earlier updates included.
        reads: a tensor and the name of what its readers read instead.
        inputs: (op, input position) and what it reads instead.
    """

    def __init__(self, graph: tf.Graph, root: str, variables: Sequence[Parts], writes: Dict[str, List[str]]) -> None:
        self._edit = StagedEdit(graph)
        self._nodes = nodes = Nodes(self._edit)
        self._root = root
        self.writes = writes
        self.checkpoints = Checkpoints(
            nodes, root, {variable.op: variable for variable in variables},
            lambda variable, part, scope, controls: _read(nodes, variable, part, scope, controls), self._controls)
        self.reads: List[Tuple[tf.Tensor, str]] = []
        self.inputs: List[Tuple[tf.Operation, int, str]] = []

    def save(self, ops: Sequence[tf.Operation]) -> Set[str]:
        """Names of the ``SaveV2`` ops that slices are saved in the place of."""
        ends = {op.name: self.checkpoints.save(op) for op in ops}
        saved = {name: [end] for name, end in ends.items() if end is not None}
        self.writes.update(saved)
        return set(saved)

    def use(self, variable: Parts, op: tf.Operation) -> None:
        """One op that takes the variable's reference or handle."""
        scope = f"{self._root}/{op.name}"
        if traits(op.type).is_write:
            self._write(variable, op, scope)
        elif traits(op.type).state is State.IS_INITIALIZED:
            name = self._clone(op, scope + "/part", {0: variable.names[0]})
            self.reads.append((op.outputs[0], name))
        elif op.type in READS:
            self.read(variable, op, self._controls(op))
        elif variable.op.type != "VarHandleOp":
            whole = self._whole(variable, scope, self._controls(op))
            self.inputs += [(op, i, whole) for i, tensor in enumerate(op.inputs) if tensor.op is variable.op]
        elif traits(op.type).state is not State.HANDLE:
            raise UnsupportedOpError(
                f"op {op.name!r} ({op.type}) uses the handle of variable {variable.op.name!r}, which wh.split divides "
                f"over devices; read the variable's "
                "value instead (tf.identity(v)), or use wh.replicate for its layer")

    def _write(self, variable: Parts, op: tf.Operation, scope: str) -> None:
        if op.type not in ASSIGNS:
            raise UnsupportedOpError(
                f"op {op.name!r} ({op.type}) writes a part of variable {variable.op.name!r}, which wh.split divides "
                f"over devices; assign the whole variable, "
                "or use wh.replicate for its layer")
        self.writes[op.name] = writes = self.write(variable, op)
        if op.outputs:
            dtype = op.outputs[0].dtype.base_dtype
            self.reads.append((op.outputs[0], self._nodes.concat(
                writes, variable.spread.dim, scope + "/whole", dtype, "")))

    def write(self, variable: Parts, op: tf.Operation) -> List[str]:
        """A write of the whole, for the parts: each takes its slice of the value."""
        scope, writes = f"{self._root}/{op.name}", []
        restored = self.checkpoints.restored(variable, op.inputs[1])
        for i, part in enumerate(variable.names):
            value = restored[i] if restored else _part_of(self._nodes, variable, op.inputs[1].name, i, scope)
            writes.append(self._clone(op, f"{scope}/part{i}", {0: part, 1: value}))
        return writes

    def _clone(self, op: tf.Operation, name: str, inputs: Dict[int, str]) -> str:
        operands = [inputs.get(position, tensor.name) for position, tensor in enumerate(op.inputs)]
        return self._edit.copy(op, name, operands, control_inputs=self._controls(op)).name

    def _controls(self, op: tf.Operation) -> List[str]:
        """The parts' writes where ``op`` waits for a write."""
        return [name for control in op.control_inputs for name in self.writes.get(control.name, [control.name])]

    def read(self, variable: Parts, op: tf.Operation, controls: Sequence[str]) -> None:
        """A plain read: its readers read the whole."""
        self.reads.append((op.outputs[0], self._whole(variable, f"{self._root}/{op.name}", controls)))

    def _whole(self, variable: Parts, scope: str, controls: Sequence[str]) -> str:
        """The variable's value after ``controls``."""
        parts = [_read(self._nodes, variable, part, f"{scope}/part{i}", controls)
                 for i, part in enumerate(variable.names)]
        return self._nodes.concat(parts, variable.spread.dim, scope + "/whole", variable.op.get_attr("dtype"), "")

    def commit(self) -> None:
        self.checkpoints.finish()
        self.reads += self.checkpoints.reads
        self._edit.commit()


class Waits:
    """Ops that are to wait for others, gathered: what one waits for is changed as a whole, and a group may wait for all."""

    def __init__(self) -> None:
        self._changes: Dict[tf.Operation, Tuple[List[tf.Operation], List[tf.Operation]]] = {}

    def instead(self, waiting: tf.Operation, old: tf.Operation, news: Sequence[tf.Operation]) -> None:
        """Let ``waiting`` wait for ``news`` in place of ``old``."""
        olds, found = self._changes.setdefault(waiting, ([], []))
        olds.append(old)
        found.extend(news)

    def carry_out(self, undo: List[Callable[[], Any]]) -> None:
        for op, (olds, news) in self._changes.items():
            present = set(op.control_inputs)
            fresh = [new for new in dict.fromkeys(news) if new not in present]
            _swap(op, olds, fresh)
            undo.append(functools.partial(_swap, op, fresh, olds))


def _swap(op: tf.Operation, before: Sequence[tf.Operation], after: Sequence[tf.Operation]) -> None:
    remove_control_inputs(op, before)
    add_control_inputs(op, after)


def _is_reference(op: tf.Operation, position: int) -> bool:
    return bool(op._input_types[position]._is_ref_dtype)


def _read(nodes: Nodes, variable: Parts, name: str, scope: str, controls: Sequence[str]) -> str:
    dtype = variable.op.get_attr("dtype")
    if variable.op.type == "VarHandleOp":
        return nodes.add("ReadVariableOp", scope, [name], "", controls, dtype=dtype)
    return nodes.identity(name, scope, dtype, "", controls)


def _part_of(nodes: Nodes, variable: Parts, value: str, i: int, scope: str) -> str:
    spread = variable.spread
    rank = len(variable.op.get_attr("shape").dim)
    return nodes.slice_dim(value, spread.dim, rank, spread.starts[i], spread.sizes[i], f"{scope}/slice{i}",
                           variable.op.get_attr("dtype"), "")
