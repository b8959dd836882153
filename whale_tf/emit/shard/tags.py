"""Tags of new nodes of a ``split`` TaskGraph: their TaskGraph, device and phase."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

from whale_tf.capture.annotations import FORWARD_ATTR, PHASE_ATTR, SHARD_ATTR, TASK_GRAPH_ATTR
from whale_tf.graph_editor.attrs import NodeDef
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.region import GATHER_ATTR


class TaggedStage:
    """Stages nodes with tags.  As the device, callers give the number of a device within the TaskGraph.

    Attributes:
        is_backward: whether the nodes are part of a gradient call.
        is_gathering: whether the nodes put parts of variables together, again in each call.
        controls: ops that every node waits for.
    """

    def __init__(self, edit: StagedEdit, task_graph: int) -> None:
        self.edit = edit
        self.task_graph = task_graph
        self.is_backward = self.is_gathering = False
        self.controls: Sequence[str] = ()

    def add(self, op_type: str, name: str, inputs: Sequence[str] = (), *, device: str = "",
            control_inputs: Sequence[str] = (), attrs: Optional[Dict[str, Any]] = None) -> str:
        staged = self.edit.add(op_type, name, inputs, control_inputs=list(control_inputs) + list(self.controls), attrs=attrs)
        self.tag(self.edit.node(staged), int(device or 0))
        return staged

    def const(self, value: Any, name: str, *, device: str = "") -> str:
        staged = self.edit.const(value, name)
        node = self.edit.node(staged)
        node.attr[TASK_GRAPH_ATTR].i = self.task_graph
        node.attr[SHARD_ATTR].i = int(device or 0)
        return staged

    def tag(self, node: NodeDef, shard: int, forward: str = "") -> None:
        """``forward``: name of the forward op that a backward node was made from."""
        node.device = ""
        node.attr[TASK_GRAPH_ATTR].i = self.task_graph
        node.attr[SHARD_ATTR].i = shard
        if self.is_backward:
            node.attr[PHASE_ATTR].s = b"backward"
        if self.is_gathering:
            node.attr[GATHER_ATTR].i = 1
        if forward:
            node.attr[FORWARD_ATTR].s = forward.encode()
        elif FORWARD_ATTR in node.attr:
            del node.attr[FORWARD_ATTR]
