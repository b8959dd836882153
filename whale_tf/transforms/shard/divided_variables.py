"""Makes divided variables look whole to the rest of the user's graph.

Initializers, restores, ``load``, hand-written assigns, savers and reads name the local script's variable.  Its value is in its
parts; the variable itself is never initialised and takes no memory::

    before   value ──> Assign(v) - - > init          after   value ──> Split ──┬─> Assign(v/0) - - ┬ - > init
                                                                               └─> Assign(v/1) - - ┘
             v ──> Mean                                      v/0, v/1 ──> Concat ──> Mean

Savers write and read slices (:mod:`whale_tf.transforms.shard.checkpoints`).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor import consumers
from whale_tf.graph_editor.control_flow import call_functions
from whale_tf.graph_editor.edges import canonical_edge, edges_of, tensor_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.graph_editor.variables import Replaced, catch_up, read
from whale_tf.ir.graph import Shape
from whale_tf.ir.traits import ASSIGNS, CONDITIONALS, READS, Role, VariableUse, traits
from whale_tf.transforms.replacing import stage_of_value
from whale_tf.transforms.shard.branches import reading_parts
from whale_tf.transforms.shard.checkpoints import Checkpoints, DividedVariable, host_of
from whale_tf.transforms.shard.values import put_together


class DividedVariables:
    """Keeps the local script's variables usable, whatever is added to the graph later.

    Args:
        replaced: tensor or op -> its replacement, for fetches; grows with every update.
        divided: names of the ops whose uses of the variables are themselves divided.
    """

    def __init__(self, graph: tf.Graph, variables: Sequence[DividedVariable], replaced: Dict[str, Any], divided: Set[str],
                 root: str) -> None:
        self._graph, self._variables, self._replaced = graph, variables, replaced
        self._divided = set(divided)
        self._handled: Set[Tuple[str, str]] = set()  # (variable, op that uses it)
        self._root = root
        self._version = -1
        self._known = 0  # number of operations at the last update
        self._unplaced: Dict[str, str] = {}  # an op that saves or restores -> the part near which it runs
        self._initials: Dict[str, DividedVariable] = {}  # a divided write, which makes its value in parts -> the variable
        self._loads: Dict[str, List[str]] = {}
        self._writes: Dict[str, List[str]] = {}  # a write or read of the whole -> those of the parts
        self._reads: List[Tuple[tf.Tensor, str]] = []  # a tensor, and the one that its readers read instead
        self._unread: Set[str] = set()  # reads and queries whose results nothing reads, so nothing is staged for them
        self._fetched: Set[str] = set()  # of these, those that were fetched

    @property
    def parts(self) -> Sequence[DividedVariable]:
        """The parts of every divided variable."""
        return self._variables

    def update(self) -> None:
        """Makes all uses that are new since the last call work on the parts."""
        if not self._variables or self._graph.version == self._version:
            return
        self._place()
        edit = StagedEdit(self._graph)
        self.stage(edit)
        edit.commit()
        self._place()
        self._version = self._graph.version

    def note_fetches(self, names: Iterable[str]) -> bool:
        """Whether :meth:`update` is necessary because ops of these names are fetched."""
        found = self._unread.intersection(names)
        self._unread -= found
        self._fetched |= found
        if found:
            self._version = -1
        return bool(found)

    def stage(self, edit: StagedEdit) -> Dict[str, Shape]:
        """Stages the edits that make uses which are new since the last call work on the parts.

        Returns:
            Shapes of new tensors, as far as they are known.
        """
        own, staged = self._uses(edit, self._writes), _Users(edit)
        operations = self._graph.get_operations()
        saves = own.save([op for op in operations[self._known:] if op.type == "SaveV2"])
        self._known = len(operations)
        for variable in self._variables:
            users = [op for op in variable.op.outputs[0].consumers()
                     if (op.name not in self._divided or op.type in READS | ASSIGNS)  # later uses may need them, too
                     and (variable.op.name, op.name) not in self._handled and op.name not in saves]
            # writes first: reads wait for them
            for op in sorted(set(users), key=lambda op: (not traits(op.type).is_write, op.name)):
                if op.name in self._divided and traits(op.type).is_write:
                    self._initials[op.name] = variable
                    self._writes[op.name] = list(self._replaced[op.name])  # an initializer of all variables may be built later
                elif self._is_unread(op, staged, edit):
                    continue
                elif op.name in self._divided:
                    own.read(variable, op, ())
                else:
                    own.use(variable, op)
                self._handled.add((variable.op.name, op.name))
        own.finish()
        self._unplaced.update(own.checkpoints.placed)
        self._reads.extend(own.reads)
        self._move(edit, staged)
        return own.shapes

    def _is_unread(self, op: tf.Operation, staged: _Users, edit: StagedEdit) -> bool:
        """Whether an op is a read or a query whose result no undivided op reads.  Many are: TensorFlow makes one of each for
        every resource variable.  In a function, all count as read, because its results and stateful ops run."""
        is_query = traits(op.type).state is VariableUse.IS_INITIALIZED
        if self._graph.building_function or op.name in self._fetched or not (is_query or op.type in READS):
            return False
        edge, is_divided = canonical_edge(op.outputs[0].name), op.name in self._divided
        if edge in staged.readers or any(user.name not in self._divided and edge in edit.original(user).input
                                         for user in op.outputs[0].consumers()):
            return False
        if not is_divided and (op._control_outputs or op.name in staged.waiting):
            return False
        if not is_divided:
            self._unread.add(op.name)
        return True

    def loads(self, op: tf.Operation, feeds: Sequence[tf.Tensor]) -> List[str]:
        """``Variable.load`` runs an initializer and feeds its value.  These are the ops that write the parts of this value, if a
        run of ``op`` would make the parts in another way."""
        if op.name not in self._initials or all(feed is not op.inputs[1] for feed in feeds):
            return []
        if op.name not in self._loads:
            edit = StagedEdit(self._graph)
            own = self._uses(edit, {})
            self._loads[op.name] = own.write(self._initials[op.name], op)
            own.finish()
            edit.commit()
            self._unplaced.update(own.checkpoints.placed)
            self._place()
        return self._loads[op.name]

    def _uses(self, edit: StagedEdit, writes: Dict[str, List[str]]) -> _Uses:
        return _Uses(edit, self._root, self._variables, writes)

    def _place(self) -> None:
        """Gives a device to ops that run near parts which now have one."""
        for name, part in list(self._unplaced.items()):
            device = self._graph.get_operation_by_name(part).device
            if device:
                del self._unplaced[name]
            if host_of(device):
                self._graph.get_operation_by_name(name)._set_device(host_of(device))

    def _move(self, edit: StagedEdit, staged: _Users) -> None:
        """Moves edges and waits of all ops, old, new and staged, to the parts."""
        staged.update()
        for tensor, name in self._reads:
            self._replaced.setdefault(tensor.name, tensor_name(name))
            edge = canonical_edge(tensor.name)
            for reader, position in consumers(tensor):
                if edit.original(reader).input[position] != edge:
                    continue
                if reader._input_types[position]._is_ref_dtype and traits(reader.type).is_write:
                    raise UnsupportedOpError(
                        f"op {reader.name!r} ({reader.type}) writes to what op {tensor.op.name!r} returns, a variable that "
                        "wh.split or zero divides; assign to the variable itself, under tf.control_dependencies of the first "
                        "write")
                if not reader._input_types[position]._is_ref_dtype:
                    edit.move_input(reader.name, position, name)
            for user, position in staged.readers.get(edge, ()):
                edit.move_input(user, position, name)
        waits: Dict[str, Tuple[List[str], List[str]]] = {}
        for name, writes in self._writes.items():
            self._replaced[name] = tuple(writes)
            old = self._graph.get_operation_by_name(name)
            after = [op.name for op in old._control_outputs if "^" + name in edit.original(op).input]
            for op in (*after, *staged.waiting.get(name, ())):
                if op not in writes:
                    olds, news = waits.setdefault(op, ([], []))
                    olds.append(name)
                    news.extend(writes)
        for op, (olds, news) in waits.items():
            edit.move_waits(op, olds, news)

    def catch_up(self, original_run: Callable) -> None:
        """Gives the parts of variables that were initialised before they were divided these values."""
        def replaced(variable: DividedVariable) -> Replaced:
            return Replaced(variable.op, f"{self._root}/catch_up/{variable.op.name}", lambda nodes, value, scope: [
                (name, "", part) for name, part in zip(variable.names, _parts_of(nodes, variable, value, scope))])

        def note(new: Mapping[str, tf.Operation]) -> None:
            for variable in self._variables:
                self._handled.update((variable.op.name, op.name) for op in variable.op.outputs[0].consumers() if op.name in new)

        catch_up(self._graph, map(replaced, self._variables), original_run, note)


class _Users:
    """The staged nodes that use a tensor or an op, by edge: readers with the position of the input, and those that wait."""

    def __init__(self, edit: StagedEdit) -> None:
        self._edit, self._known = edit, 0
        self.readers: Dict[str, List[Tuple[str, int]]] = {}
        self.waiting: Dict[str, List[str]] = {}
        self.update()

    def update(self) -> None:
        """Adds the nodes that were staged since the last time."""
        nodes = self._edit.nodes()[self._known:]
        self._known += len(nodes)
        for node in nodes:
            name = node.name
            for position, edge in enumerate(edges_of(node)):
                if edge[0] == "^":
                    self.waiting.setdefault(edge[1:], []).append(name)
                else:
                    self.readers.setdefault(edge, []).append((name, position))


class _Uses:
    """What one update stages.

    Attributes:
        writes: a write or read of the whole -> those of the parts, which others wait for; including those of earlier updates.
        reads: a tensor and the name of the one that its readers read instead.
        shapes: of new tensors, as far as they are known.
    """

    def __init__(self, edit: StagedEdit, root: str, variables: Sequence[DividedVariable], writes: Dict[str, List[str]]) -> None:
        self._edit = edit
        self._nodes = nodes = Nodes(edit)
        self._root = root
        self._by_op = {variable.op: variable for variable in variables}
        self.writes = writes
        self.checkpoints = Checkpoints(
            nodes, root, self._by_op,
            lambda variable, part, scope, controls: _read(nodes, variable, part, scope, controls), self._edges, self._controls)
        self.reads: List[Tuple[tf.Tensor, str]] = []
        self.shapes: Dict[str, Shape] = {}
        self._conditions: Set[str] = set()

    def save(self, ops: Sequence[tf.Operation]) -> Set[str]:
        """Names of the ``SaveV2`` ops that are replaced by saves of slices."""
        ends = {op.name: self.checkpoints.save(op) for op in ops}
        saved = {name: [end] for name, end in ends.items() if end is not None}
        self.writes.update(saved)
        return set(saved)

    def use(self, variable: DividedVariable, op: tf.Operation) -> None:
        """Handles one op that takes the variable's reference or handle."""
        scope = f"{self._root}/{op.name}"
        if traits(op.type).is_write:
            self._write(variable, op, scope)
        elif traits(op.type).state is VariableUse.IS_INITIALIZED:
            self.writes[op.name] = asked = self._clones(op, scope, [{0: part} for part in variable.names])
            name = asked[0]
            for i, other in enumerate(asked[1:], 1):
                name = self._nodes.add("LogicalAnd", f"{scope}/and{i}", [name, other], "")
            self.reads.append((op.outputs[0], name))
        elif op.type in READS:
            self.writes[op.name] = self.read(variable, op, self._controls(op))
        elif traits(op.type).role is Role.SWITCH:
            self._switch(variable, op, scope)
        elif op.type in CONDITIONALS and variable.is_resource:
            self._condition(op, scope)
        elif not variable.is_resource:
            whole, _ = self._whole(variable, scope, self._controls(op))
            for position, tensor in enumerate(op.inputs):
                if tensor.op is variable.op:
                    self._edit.move_input(op.name, position, whole)
        elif traits(op.type).state is not VariableUse.HANDLE:
            if not traits(op.type).of_value:
                self._refuse(variable, op)
            self._of_whole(variable, op, scope)

    def _of_whole(self, variable: DividedVariable, op: tf.Operation, scope: str) -> None:
        """Makes the readers of a look-up by the handle read a look-up in the whole."""
        controls = self._controls(op)
        whole, _ = self._whole(variable, scope, controls)
        name, *_ = stage_of_value(self._edit, op, whole, self._edges(op)[1:], scope + "/of_value", controls)
        self.writes[op.name] = [name]
        self.reads.append((op.outputs[0], name))

    def _switch(self, variable: DividedVariable, op: tf.Operation, scope: str) -> None:
        """Makes a branch of a TensorFlow 1 condition that takes the variable take the parts and read these."""
        switched = self._clones(op, scope, [{0: part} for part in variable.names])
        for index, tensor in enumerate(op.outputs):
            parts = variable._replace(names=tuple(f"{name}:{index}" for name in switched))
            for user in tensor.consumers():
                if user.type not in READS:
                    self._refuse(variable, user)
                self.writes[user.name] = self.read(parts, user, self._controls(user))

    def _condition(self, op: tf.Operation, scope: str) -> None:
        """Makes branches that are functions take the parts' handles, for all variables of an op at once."""
        if op.name in self._conditions:
            return
        self._conditions.add(op.name)
        taken = {position: self._by_op[tensor.op] for position, tensor in enumerate(op.inputs) if tensor.op in self._by_op}
        functions = reading_parts(self._edit, op, taken)
        operands = self._edges(op)
        for position, variable in taken.items():
            operands[position] = variable.names[0]
            operands += variable.names[1:]
        node = self._edit.copy(op, scope + "/of_parts", operands, control_inputs=self._controls(op))
        call_functions(node, {name: self._edit.add_function(function) for name, function in functions.items()})
        node.attr["Tin"].list.type.extend(
            tf.resource.as_datatype_enum for variable in taken.values() for _ in variable.names[1:])
        self.writes[op.name] = [node.name]
        self.reads += [(tensor, f"{node.name}:{index}") for index, tensor in enumerate(op.outputs)]

    def _refuse(self, variable: DividedVariable, op: tf.Operation) -> None:
        raise UnsupportedOpError(
            f"op {op.name!r} ({op.type}) uses the handle of variable {variable.op.name!r}, which wh.split divides over devices; "
            "read the variable's value instead (tf.identity(v)), or use wh.replicate for its layer")

    def _write(self, variable: DividedVariable, op: tf.Operation, scope: str) -> None:
        if op.type not in ASSIGNS:
            raise UnsupportedOpError(
                f"op {op.name!r} ({op.type}) writes a part of variable {variable.op.name!r}, which wh.split divides over "
                "devices; assign the whole variable, or use wh.replicate for its layer")
        self.writes[op.name] = writes = self.write(variable, op)
        if op.outputs:
            dtype = op.outputs[0].dtype.base_dtype
            self.reads.append((op.outputs[0], put_together(self._nodes, writes, variable.spread, scope + "/whole", dtype, "")))

    def write(self, variable: DividedVariable, op: tf.Operation) -> List[str]:
        """Stages, for a write of the whole, writes of the parts: each takes its slice of the value."""
        scope = f"{self._root}/{op.name}"
        restored = self.checkpoints.restored(variable, op.inputs[1])
        values = restored or _parts_of(self._nodes, variable, self._edges(op)[1], scope)
        return self._clones(op, scope, [{0: part, 1: value} for part, value in zip(variable.names, values)])

    def _clones(self, op: tf.Operation, scope: str, inputs: Sequence[Dict[int, str]]) -> List[str]:
        """A copy of an op for each part, with inputs of its own by position."""
        (template,), edges, controls = self._edit.templates([op]), self._edges(op), self._controls(op)
        return [self._edit.copy(template, f"{scope}/part{i}", [own.get(position, edge) for position, edge in enumerate(edges)],
                                control_inputs=controls, same_attrs=True).name for i, own in enumerate(inputs)]

    def _edges(self, op: tf.Operation) -> List[str]:
        """What an op reads once the staged edges have moved."""
        return [edge for edge in edges_of(self._edit.original(op)) if edge[0] != "^"]

    def _controls(self, op: tf.Operation) -> List[str]:
        """What ``op`` waits for, with the parts' writes instead of a write of the whole."""
        waits = [edge[1:] for edge in edges_of(self._edit.original(op)) if edge[0] == "^"]
        return [name for wait in waits for name in self.writes.get(wait, [wait])]

    def read(self, variable: DividedVariable, op: tf.Operation, controls: Sequence[str]) -> List[str]:
        """Makes the readers of a plain read read the whole, put together from the parts.

        Returns:
            The reads of the parts.
        """
        whole, parts = self._whole(variable, f"{self._root}/{op.name}", controls)
        self.reads.append((op.outputs[0], whole))
        return parts

    def _whole(self, variable: DividedVariable, scope: str, controls: Sequence[str]) -> Tuple[str, List[str]]:
        """The variable's value after ``controls``, and the reads of its parts."""
        parts = [_read(self._nodes, variable, part, f"{scope}/part{i}", controls) for i, part in enumerate(variable.names)]
        whole = put_together(self._nodes, parts, variable.spread, scope + "/whole", variable.dtype, "")
        self.shapes[whole + ":0"] = variable.shape
        self.shapes.update((part + ":0", shape) for part, shape in zip(parts, variable.spread.shapes(variable.shape)))
        return whole, parts

    def finish(self) -> None:
        self.checkpoints.finish()
        self.reads += self.checkpoints.reads


def _read(nodes: Nodes, variable: DividedVariable, name: str, scope: str, controls: Sequence[str]) -> str:
    return read(nodes, variable.is_resource, name, scope, variable.dtype, "", controls)


def _parts_of(nodes: Nodes, variable: DividedVariable, value: str, scope: str) -> List[str]:
    spread = variable.spread
    if spread.is_tiles:
        return [nodes.slice_ranges(value, {one.dim: (one.start, one.size) for one in part.ranges}, len(variable.shape),
                                   f"{scope}/tile{i}", variable.dtype, "") for i, part in enumerate(spread.parts)]
    return nodes.split(value, list(spread.sizes), len(spread.sizes), spread.dim, scope + "/split", variable.dtype, "")
