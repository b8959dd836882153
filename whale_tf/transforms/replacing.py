"""What passes over ops have in common that put new ops in place of others."""

from __future__ import annotations

from typing import Mapping

from whale_tf._tf_compat import NodeDef
from whale_tf.capture.annotations import PHASE_ATTR, TASK_GRAPH_ATTR
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import CALL_ATTR, OpGraph

TAGS = (TASK_GRAPH_ATTR, PHASE_ATTR, CALL_ATTR)


def tag_like(node: NodeDef, model: NodeDef) -> None:
    """Puts a node into the TaskGraph, phase and gradient call of another one."""
    for name in TAGS:
        if name in model.attr:
            node.attr[name].CopyFrom(model.attr[name])


def move_waits(graph: OpGraph, edit: StagedEdit, successors: Mapping[str, str]) -> None:
    """Makes ops that wait for a replaced op wait for its successor.  The replaced ops themselves stay as they are."""
    for op in graph.ops:
        waits = [graph.ops[wait].name for wait in op.control_inputs if graph.ops[wait].name in successors]
        if waits and op.name not in successors:
            edit.move_waits(op.name, waits, [successors[name] for name in waits])
