"""Writes of a variable reach all its copies: initialisers, restores, ``load``, hand-written assigns.

::

    before     value ──> Assign(v)               after     value ──┬─> Assign(v')  (copy)
                                                                   └─> Assign(v)   waits for the copy's
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import set_input
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.rewrite.update import is_write


class Mirror:
    """Keeps copies equal to the original variable, whatever is added to the graph later.

    Args:
        copies: original variable op -> [(tensor name of the copy, its device)].
        handled: writes that have clones of their own (the optimizer's).
    """

    def __init__(
        self, graph: tf.Graph, copies: Dict[tf.Operation, Sequence[Tuple[str, str]]], handled: Set[tf.Operation]
    ) -> None:
        self._graph = graph
        self._copies = copies
        self._handled = set(handled)
        self._version = -1

    def update(self) -> None:
        """Mirror all writes that are new since the last call."""
        if not self._copies or self._graph.version == self._version:
            return
        edit = StagedEdit(self._graph)
        mirrored: List[Tuple[tf.Operation, List[str]]] = []
        for variable, copies in self._copies.items():
            for op in variable.outputs[0].consumers():
                if op in self._handled or not is_write(op.type):
                    continue
                self._handled.add(op)
                mirrored.append((op, self._stage(edit, variable, op, copies)))
        new = edit.commit()
        for op, names in mirrored:
            op._add_control_inputs([new[name] for name in names])
            self._handled.update(new[name] for name in names)
        self._version = self._graph.version

    def catch_up(self, is_initialized: Callable[[Sequence[tf.Tensor]], Sequence[bool]], run: Callable[[Any], Any]) -> None:
        """Copy the values of variables that were initialised before they had copies.

        Args:
            is_initialized: runs boolean tensors.
            run: runs ops.
        """
        edit = StagedEdit(self._graph)
        checks, assigns = {}, {}
        for variable, copies in self._copies.items():
            scope = "{}/catch_up".format(copies[0][0].rpartition(":")[0])
            is_resource = variable.type == "VarHandleOp"
            dtype = variable.get_attr("dtype")
            where = variable.device
            checks[variable] = edit.add(
                "VarIsInitializedOp" if is_resource else "IsVariableInitialized", scope + "/is_initialized",
                [variable.name], device=where)
            value = edit.add(
                "ReadVariableOp" if is_resource else "Identity", scope + "/value", [variable.name], device=where,
                attrs={"dtype" if is_resource else "T": dtype})
            assigns[variable] = [edit.add(
                "AssignVariableOp" if is_resource else "Assign", "{}/assign".format(scope), [copy, value], device=device,
                attrs={"dtype" if is_resource else "T": dtype}) for copy, device in copies]
        new = edit.commit()
        self._handled.update(new.values())
        variables = list(checks)
        known = is_initialized([new[checks[variable]].outputs[0] for variable in variables])
        run([new[name] for variable, ready in zip(variables, known) if ready for name in assigns[variable]])

    @staticmethod
    def _stage(
        edit: StagedEdit, variable: tf.Operation, op: tf.Operation, copies: Sequence[Tuple[str, str]]
    ) -> List[str]:
        names = []
        for copy, device in copies:
            scope = copy.rpartition(":")[0] + "/mirror"
            name = edit.clone([op], scope, device=device)[op.name]
            for position, tensor in enumerate(op.inputs):
                if tensor.op is variable:
                    set_input(edit, name, position, copy)
            names.append(name)
        return names
