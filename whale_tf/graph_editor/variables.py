"""Reads and writes of variables, by reference or by handle, and values for what the rewrite puts in place of variables."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit


def read(nodes: Nodes, is_resource: bool, name: str, scope: str, dtype: Any, device: str = "", waits: Sequence[str] = ()) -> str:
    """The value of variable ``name``."""
    if is_resource:
        return nodes.add("ReadVariableOp", scope, [name], device, waits, dtype=dtype)
    return nodes.identity(name, scope, dtype, device, waits)


def assign(nodes: Nodes, is_resource: bool, name: str, value: str, scope: str, dtype: Any, device: str = "",
           waits: Sequence[str] = (), **attrs: Any) -> str:
    """The op that writes variable ``name``."""
    if is_resource:
        return nodes.add("AssignVariableOp", scope, [name, value], device, waits, dtype=dtype, **attrs)
    return nodes.add("Assign", scope, [name, value], device, waits, T=dtype, **attrs)


class Replaced(NamedTuple):
    """A variable, and what stands beside it or in its place: ``values(nodes, value, scope)`` lists the name, the device and the
    value of each, from the variable's value."""

    op: tf.Operation
    scope: str
    values: Callable[[Nodes, str, str], Iterable[Tuple[str, str, str]]]


def catch_up(graph: tf.Graph, variables: Iterable[Replaced], run: Callable[[Any], Any],
             note: Callable[[Mapping[str, tf.Operation]], None]) -> None:
    """For a session that ran before the rewrite: what replaces variables takes the values of those that are initialised.

    Args:
        run: runs tensors or ops.
        note: gets the new ops before they run.
    """
    edit = StagedEdit(graph)
    nodes, checks, assigns = Nodes(edit), [], []
    for op, scope, values in variables:
        is_resource, dtype = op.type == "VarHandleOp", op.get_attr("dtype")
        query = "VarIsInitializedOp" if is_resource else "IsVariableInitialized"
        checks.append(nodes.add(query, scope + "/is_initialized", [op.name], op.device))
        value = read(nodes, is_resource, op.name, scope + "/value", dtype, op.device)
        assigns.append([assign(nodes, is_resource, name, part, f"{scope}/assign{i}", dtype, device)
                        for i, (name, device, part) in enumerate(values(nodes, value, scope))])
    new = edit.commit()
    note(new)
    known = run([new[name].outputs[0] for name in checks])
    run([new[name] for names, ready in zip(assigns, known) if ready for name in names])
