"""Writes of a variable reach all its copies: initialisers, restores, ``load``, hand-written assigns.

::

    before     value ──> Assign(v)               after     value ──┬─> Assign(v')  (copy)
                                                                   └─> Assign(v)   waits for the copy's
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Set

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import set_input
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import traits


class VariableCopy(NamedTuple):
    """A copy of a variable: its tensor's name, and where it lives."""

    tensor: str
    device: str


class Mirror:
    """Keeps copies equal to the original variable, whatever is added to the graph later.

    Args:
        copies: for each copy of the model (by its name scope): original variable op -> its copy there.
        handled: writes that have clones of their own (the optimizer's).
    """

    def __init__(
        self, graph: tf.Graph, copies: Dict[str, Dict[tf.Operation, VariableCopy]], handled: Set[tf.Operation]
    ) -> None:
        self._graph = graph
        self._copies = copies
        self._variables = list(dict.fromkeys(variable for group in copies.values() for variable in group))
        self._handled = set(handled)
        self._version = -1

    def update(self) -> None:
        """Mirror all writes that are new since the last call."""
        if not self._copies or self._graph.version == self._version:
            return
        edit = StagedEdit(self._graph)
        staged = self.stage(edit)
        if staged:
            self.finish(edit.commit(), staged)
        self._version = self._graph.version

    def stage(self, edit: StagedEdit) -> Dict[tf.Operation, List[str]]:
        """Stage a clone of each new write for every copy.

        Returns:
            Names of the clones of each write, for :meth:`finish` once they are in the graph.
        """
        writes = self._new_writes()
        waits: Dict[tf.Operation, List[str]] = {op: [] for op in writes}
        for scope, group in self._copies.items():
            ops = [op for op, variable in writes.items() if variable in group]
            where = {op: group[writes[op]].device for op in ops}
            names = edit.clone(ops, scope + "/mirror", device=where.__getitem__)
            for op in ops:
                for position, tensor in enumerate(op.inputs):
                    if tensor.op in group:
                        set_input(edit, names[op.name], position, group[tensor.op].tensor)
                waits[op].append(names[op.name])
        return waits

    def finish(self, new: Mapping[str, tf.Operation], staged: Mapping[tf.Operation, Sequence[str]]) -> None:
        """Let each write wait for its clones.

        Args:
            new: what the edit added; the optimizer's writes among it are not mirrored again.
        """
        for op, copies in staged.items():
            op._add_control_inputs([new[name] for name in copies])
        self._handled.update(staged)
        self._handled.update(new.values())

    def _new_writes(self) -> Dict[tf.Operation, tf.Operation]:
        """Each write that has no clones yet, and the variable it writes."""
        return {
            op: variable
            for variable in self._variables
            for op in variable.outputs[0].consumers()
            if op not in self._handled and traits(op.type).is_write
        }

    def catch_up(self, is_initialized: Callable[[Sequence[tf.Tensor]], Sequence[bool]], run: Callable[[Any], Any]) -> None:
        """Copy the values of variables that were initialised before they had copies.

        Args:
            is_initialized: runs boolean tensors.
            run: runs ops.
        """
        edit = StagedEdit(self._graph)
        checks: Dict[tf.Operation, str] = {}
        assigns: Dict[tf.Operation, List[str]] = {}
        for variable in self._variables:
            is_resource = variable.type == "VarHandleOp"
            attrs = {"dtype" if is_resource else "T": variable.get_attr("dtype")}
            copies = {scope: group[variable] for scope, group in self._copies.items() if variable in group}
            scope = f"{next(iter(copies))}/catch_up/{variable.name}"
            checks[variable] = edit.add(
                "VarIsInitializedOp" if is_resource else "IsVariableInitialized",
                scope + "/is_initialized",
                [variable.name],
                device=variable.device,
            )
            value = edit.add(
                "ReadVariableOp" if is_resource else "Identity",
                scope + "/value",
                [variable.name],
                device=variable.device,
                attrs=attrs,
            )
            assigns[variable] = [
                edit.add(
                    "AssignVariableOp" if is_resource else "Assign",
                    scope + "/assign",
                    [copy.tensor, value],
                    device=copy.device,
                    attrs=attrs,
                )
                for copy in copies.values()
            ]
        new = edit.commit()
        self._handled.update(new.values())
        variables = list(checks)
        known = is_initialized([new[checks[variable]].outputs[0] for variable in variables])
        run([new[name] for variable, ready in zip(variables, known) if ready for name in assigns[variable]])
