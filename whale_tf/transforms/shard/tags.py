"""Tags of new nodes of a ``split`` TaskGraph: their TaskGraph, device and phase."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

from whale_tf.capture.annotations import FORWARD_ATTR, PHASE_ATTR, TASK_GRAPH_ATTR
from whale_tf.capture.record import Tags
from whale_tf.graph_editor.stage import Stage
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import REPLICA_ATTR, SHARD_ATTR
from whale_tf.ir.region import GATHER_ATTR


class TaggedStage(Stage):
    """Stages nodes and tags them for the op graph; TensorFlow's graph does not get the tags.  As the device, callers give the
    number of a device within the TaskGraph.

    Args:
        tags: of all nodes, which the stages of all TaskGraphs fill.

    Attributes:
        is_backward: whether the nodes are part of a gradient call.
        is_gathering: whether the nodes put parts of variables together, again in each call.
        controls: ops that every node waits for.
    """

    def __init__(self, edit: StagedEdit, task_graph: int, tags: Dict[str, Tags]) -> None:
        super().__init__(edit.graph)
        self.edit = edit
        self.task_graph = task_graph
        self.is_backward = self.is_gathering = False
        self.controls: Sequence[str] = ()
        self._tags = tags

    def add(self, op_type: str, name: str, inputs: Sequence[str] = (), *, device: str = "",
            control_inputs: Sequence[str] = (), attrs: Optional[Mapping[str, Any]] = None) -> str:
        staged = self.edit.add(op_type, name, inputs, control_inputs=[*control_inputs, *self.controls], attrs=attrs)
        self.tag(staged, int(device or 0))
        return staged

    def const(self, value: Any, name: str, *, dtype: Any = None, device: str = "", control_inputs: Sequence[str] = ()) -> str:
        staged = self.edit.const(value, name, dtype=dtype, control_inputs=control_inputs)
        self._tags[staged] = {TASK_GRAPH_ATTR: self.task_graph, SHARD_ATTR: int(device or 0)}
        return staged

    def tag(self, name: str, shard: int, forward: str = "", replica: Optional[int] = None) -> None:
        """Args:
        forward: name of the forward op that a backward node was made from.
        replica: of a part of a variable, the model replica that keeps it.
        """
        tags: Tags = {TASK_GRAPH_ATTR: self.task_graph, SHARD_ATTR: shard, FORWARD_ATTR: forward or None}
        if replica is not None:
            tags[REPLICA_ATTR] = replica
        if self.is_backward:
            tags[PHASE_ATTR] = "backward"
        if self.is_gathering:
            tags[GATHER_ATTR] = 1
        self._tags[name] = tags
