"""What passes over ops have in common that put new ops in place of others."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Union

from whale_tf._tf_compat import NodeDef, op_def, tf
from whale_tf.capture.annotations import PHASE_ATTR, TASK_GRAPH_ATTR
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import CALL_ATTR, Op, OpGraph
from whale_tf.ir.traits import traits

TAGS = (TASK_GRAPH_ATTR, PHASE_ATTR, CALL_ATTR)


def tag_like(node: NodeDef, model: NodeDef) -> None:
    """Puts a node into the TaskGraph, phase and gradient call of another one."""
    for name in TAGS:
        if name in model.attr:
            node.attr[name].CopyFrom(model.attr[name])


def stage_of_value(edit: StagedEdit, op: Union[Op, tf.Operation], value: str, others: Sequence[str], name: str,
                   waits: Sequence[str], axis_waits: Sequence[str] = ()) -> List[str]:
    """Stages what does to the value of a variable what ``op`` does to the variable, by its handle.

    Args:
        others: what it reads besides.
        waits, axis_waits: what it waits for, and what the axis of a look-up waits for.

    Returns:
        Names of the new nodes, the one that has the result first.
    """
    kind = traits(op.type).of_value
    every = op.attrs if isinstance(op, Op) else op.node_def.attr
    read = every.__getitem__ if isinstance(op, Op) else op.get_attr
    attrs: Dict[str, Any] = {key: read(key) for key in ("out_type", "batch_dims") if key in every}
    axis = []
    if len(op_def(edit.graph, kind).input_arg) > 1 + len(others):  # a look-up in a value has an axis
        axis = [edit.const(attrs.get("batch_dims", 0), f"{op.name}/axis", dtype=tf.int32, device=op.device,
                           control_inputs=axis_waits)]
    return [edit.add(kind, name, [value, *others, *axis], device=op.device, control_inputs=waits, attrs=attrs), *axis]


def move_waits(graph: OpGraph, edit: StagedEdit, successors: Mapping[str, str]) -> None:
    """Makes ops that wait for a replaced op wait for its successor.  The replaced ops themselves stay as they are."""
    for op in graph.ops:
        waits = [graph.ops[wait].name for wait in op.control_inputs if graph.ops[wait].name in successors]
        if waits and op.name not in successors:
            edit.move_waits(op.name, waits, [successors[name] for name in waits])
