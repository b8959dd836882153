"""The pass ``look_up_values``: look-ups in variables that only one process has read the value that its owner sends (ZeRO v3; see
:mod:`whale_tf.passes.owners`).

::

    before   table ──> ResourceGather(ids) ──> x          after   table ──> ReadVariableOp ──> GatherV2(ids) ──> x

A look-up takes the variable's handle, behind which only the owner has a value.  A read can be replaced with what was sent.  The
gradient stays as it is: rows and their numbers.
"""

from __future__ import annotations

from typing import Dict, List

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import FORWARD_ATTR, PHASE_ATTR, TASK_GRAPH_ATTR
from whale_tf.capture.captured import Captured, captured_after
from whale_tf.capture.record import Tags
from whale_tf.capture.recording import renamed, renamed_call
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import CALL_ATTR, SHARD_ATTR, Op, Shape
from whale_tf.ir.region import Region
from whale_tf.ir.traits import VARIABLE_LOOK_UPS
from whale_tf.transforms.replacing import move_waits, stage_of_value

_TAGS = (SHARD_ATTR, PHASE_ATTR, CALL_ATTR)


def look_up_values(captured: Captured, region: Region) -> Captured:
    """The step in which look-ups in trained variables read values; the same step if there are none."""
    trained = {variable for _, variable in captured.gradients}
    found = [op for op in captured.graph.ops if region.contains(op) and op.type in VARIABLE_LOOK_UPS
             and captured.graph.tensors[op.inputs[0]].op in trained]
    return _Staged(captured, region, found).run() if found else captured


class _Staged:
    """Stages a read and a look-up in its value for each op of ``lookups``, then moves the edges.

    Attributes:
        shapes: shapes of new tensors, by name.
        tags: what the op graph says about new nodes.
    """

    def __init__(self, captured: Captured, region: Region, lookups: List[Op]) -> None:
        assert captured.recording is not None, "the graph has been rewritten"
        self._captured, self._region, self._lookups = captured, region, lookups
        self._graph, self._step = captured.graph, captured.recording
        self._edit = StagedEdit.after(self._step.definitions)
        self._successors: Dict[str, str] = {}  # look-up -> the one in the value
        self.shapes: Dict[str, Shape] = {}
        self.tags: Dict[str, Tags] = {}

    def run(self) -> Captured:
        graph, edit, step = self._graph, self._edit, self._step
        for op in self._lookups:
            self._successors[op.name] = self._stage(op)
        replaced = {graph.tensor_name(op.outputs[0]): f"{self._successors[op.name]}:0" for op in self._lookups}
        for op in self._lookups:
            for user, position in graph.consumers(op.outputs[0]):
                name = graph.ops[user].name
                edit.move_input(self._successors.get(name, name), position, replaced[graph.tensor_name(op.outputs[0])])
        move_waits(graph, edit, self._successors)
        calls = [renamed_call(call, renamed(call.ys, replaced), renamed(call.xs, replaced), renamed(call.grads, replaced))
                 for call in step.annotations.gradient_calls]
        instead = {name: (new,) for name, new in self._successors.items()}  # a function runs all its look-ups in variables
        recording = step.after(edit, calls, self._successors, self.shapes, {**step.replaced, **replaced, **instead},
                               tags=self.tags)
        return captured_after(self._captured, recording)

    def _stage(self, op: Op) -> str:
        graph, edit = self._graph, self._edit
        variable, output = graph.tensors[op.inputs[0]].op, graph.tensors[op.outputs[0]]
        waits = [self._successors.get(graph.ops[wait].name, graph.ops[wait].name) for wait in op.control_inputs]
        before = [name for name, wait in zip(waits, op.control_inputs) if wait not in self._region.batch_level]
        read = edit.add("ReadVariableOp", f"{op.name}/value", [graph.tensor_name(op.inputs[0])], device=op.device,
                        control_inputs=before, attrs={"dtype": tf.as_dtype(output.dtype)})
        name, axis = stage_of_value(edit, op, read, [graph.tensor_name(op.inputs[1])], f"{op.name}/of_value", waits)
        self.tags.update(dict.fromkeys((read, axis, name), self._tags(op)))
        self.shapes[f"{read}:0"] = self._captured.phases.variables[variable].shape
        self.shapes[f"{axis}:0"] = ()
        self.shapes[f"{name}:0"] = output.shape
        return name

    def _tags(self, op: Op) -> Tags:
        """What puts a node into the TaskGraph and phase of ``op``."""
        tags: Tags = {TASK_GRAPH_ATTR: op.task_graph, **{name: op.attrs[name] for name in _TAGS if name in op.attrs}}
        if op.forward >= 0:
            forward = self._graph.ops[op.forward].name
            tags[FORWARD_ATTR] = self._successors.get(forward, forward)
        return tags
