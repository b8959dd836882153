"""Values that one process computes in a branch of a TensorFlow 1 condition, and that others read there.

A message that is sent in some steps only would leave its receiver waiting in the others.  So what enters the branch crosses, in
every step, and each process that reads what follows from it repeats the ops in between::

    as written     beta (0) ──> Switch (0) ──> Cast (0) ──> ApplyAdam (1)
    then           beta (0) ══> Switch (1) ──> Cast (1) ──> ApplyAdam (1)

A read of a variable in a branch becomes one in front of it, unless the branch writes the variable before.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Optional, Set

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.control_flow import frame_of_ops
from whale_tf.graph_editor.names import free_name, names_taken
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import MERGES, RANDOM, SWITCHES, VARIABLES, traits
from whale_tf.ir.units import in_branches
from whale_tf.ir.walk import reached

READ = "ReadVariableOp"


def repeat_in_branches(graph: tf.Graph, readers: Iterable[tf.Operation], owner: Callable[[tf.Operation], Optional[int]],
                       scope: str) -> None:
    """Makes ops read nothing that another process computes in some steps only, where that is possible.

    Args:
        readers: the ops.
        owner: the process that runs an op; None: each that needs it.
        scope: of the new ops, which belong to no process.
    """
    if any(op.type in SWITCHES for op in graph.get_operations()):
        _Branches(graph, owner, scope).repeat(readers)


class _CannotRepeat(Exception):
    """A value follows from what happens in the branch."""


class _Branches:
    """See :func:`repeat_in_branches`."""

    def __init__(self, graph: tf.Graph, owner: Callable[[tf.Operation], Optional[int]], scope: str) -> None:
        self._in_loop = frame_of_ops(graph)
        self._may_miss: Set[tf.Operation] = in_branches(
            graph.get_operations(), _before, lambda op: op.type, self._in_loop)  # type: ignore[arg-type, return-value]
        self._edit, self._owner, self._scope = StagedEdit(graph), owner, scope
        self._nodes, self._taken = Nodes(self._edit), names_taken(graph)
        self._repeated: Dict[str, str] = {}

    def repeat(self, readers: Iterable[tf.Operation]) -> None:
        for op in readers:
            own = self._owner(op)
            for position, tensor in enumerate(op.inputs):
                sender = self._owner(tensor.op) if tensor.op in self._may_miss and tensor.dtype != tf.resource else None
                if sender is None or sender == own or (tensor.dtype._is_ref_dtype and op._input_types[position]._is_ref_dtype):
                    continue
                try:
                    self._edit.move_input(op.name, position, self._value(tensor))
                except _CannotRepeat:
                    continue
        self._edit.commit()

    def _value(self, tensor: tf.Tensor) -> str:
        """The name of a value that every process may compute, from what is there in every step."""
        op = tensor.op
        if op not in self._may_miss or self._owner(op) is None:
            return str(tensor.name)
        if tensor.name not in self._repeated:
            self._repeated[tensor.name] = self._new(tensor)
        return self._repeated[tensor.name]

    def _new(self, tensor: tf.Tensor) -> str:
        op = tensor.op
        if op in self._in_loop:
            raise _CannotRepeat
        if op.type in SWITCHES:
            if tensor.dtype._is_ref_dtype:
                self._check_unwritten(op, _variable(tensor))
            return self._switch(self._value(op.inputs[0]), op.inputs[1], tensor.value_index, tensor.dtype.base_dtype, op.name)
        if op.type == READ:
            return self._read(op)
        if op.op_def.is_stateful or op.type in MERGES | RANDOM or tensor.dtype._is_ref_dtype:
            raise _CannotRepeat
        name = self._name(op.name)
        node = self._edit.copy(op, name, [self._value(each) for each in op.inputs],
                               control_inputs=[wait.name for wait in op.control_inputs if self._owner(wait) is None])
        node.attr.pop("_class", None)
        return f"{name}:{tensor.value_index}"

    def _read(self, op: tf.Operation) -> str:
        """A read of a variable in front of its branch."""
        handle, switches = op.inputs[0], []  # type: tf.Tensor, List[tf.Tensor]
        while handle.op.type in SWITCHES:
            switches.append(handle)
            handle = handle.op.inputs[0]
        self._check_unwritten(op, handle.op)
        befores = {before for one in (op, *(switch.op for switch in switches)) for before in one.control_inputs}
        befores.update(switch.op.inputs[1].op for switch in switches)
        dtype = op.outputs[0].dtype
        value = self._nodes.add(READ, self._name(op.name), [handle.name], handle.op.device, sorted(
            before.name for before in befores - self._may_miss if before.type not in VARIABLES), dtype=dtype)
        for switch in reversed(switches):
            value = self._switch(value, switch.op.inputs[1], switch.value_index, dtype, switch.op.name)
        return value

    def _switch(self, value: str, predicate: tf.Tensor, index: int, dtype: tf.DType, name: str) -> str:
        found = self._nodes.add("Switch", self._name(name), [value, self._value(predicate)], "", T=dtype)
        return f"{found.partition(':')[0]}:{index}"

    def _check_unwritten(self, op: tf.Operation, variable: tf.Operation) -> None:
        """Raises:
            _CannotRepeat: the branch may write the variable before ``op``, or it is no variable.
        """
        before = reached([op], _before)
        if variable.type not in VARIABLES or any(
                traits(one.type).is_write and one in self._may_miss and _variable(one.inputs[0]) is variable for one in before):
            raise _CannotRepeat

    def _name(self, name: str) -> str:
        return free_name(f"{self._scope}/{name}", lambda name: name in self._edit or name in self._taken)


def _variable(tensor: tf.Tensor) -> tf.Operation:
    """What a handle or a reference comes from."""
    while tensor.op.type in SWITCHES:
        tensor = tensor.op.inputs[0]
    return tensor.op


def _before(op: tf.Operation) -> List[tf.Operation]:
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]
