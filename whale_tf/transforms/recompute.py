"""The pass ``recompute``: forward ops that a TaskGraph runs again in its backward pass.

::

    before   x ──> layer ──> y ──> ...                after   x ──> layer ──> y ──> ...
             │       │ (what it computes)                     │
             └───────┴──> layer' <── dy                       └──> x/again ──> layer/again ──> layer' <── dy
                                                                      ^ waits for dy

The copies are ops of the backward pass.  Those that read kept tensors wait for the gradient with which their first reader
combines them, so nothing is computed before it is needed.  They also wait for earlier backward ops that read copies: TensorFlow
may leave ready ops (gradients of weights) for later, and would hold the copies of many layers meanwhile.  An Identity of the kept
tensor waits instead of them, because TensorFlow's graph optimizer does not fuse ops with control edges.  It also keeps the
optimizer from merging the copies with the originals.
"""
from __future__ import annotations

from bisect import bisect_left
from typing import Collection, Dict, List, Mapping, Tuple

from whale_tf.capture.annotations import FORWARD_ATTR, PHASE_ATTR, TASK_GRAPH_ATTR
from whale_tf.capture.captured import Captured, captured_after
from whale_tf.capture.record import Tags
from whale_tf.errors import PlanError
from whale_tf.graph_editor.names import names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import CALL_ATTR, SHARD_ATTR, Op, OpGraph, Shape
from whale_tf.ir.region import Region
from whale_tf.passes.outline import UNSENT
from whale_tf.plan import Plan
from whale_tf.planner.recompute import Readers, redone


def recompute(captured: Captured, region: Region, plan: Plan) -> Captured:
    """The step with the ops that its TaskGraphs run again according to the plan.

    Raises:
        PlanError: the plan keeps a tensor that the graph does not have.
    """
    assert captured.recording is not None, "the graph has been rewritten"
    readers, graph = Readers(region), region.graph
    edit = StagedEdit.after(captured.definitions)
    again = _Again(captured, edit, region.batch_level)
    for number, task in enumerate(plan.task_graphs):
        if task.kept is None:
            continue
        missing = [name for name in task.kept if name.partition(":")[0] not in graph]
        if missing:
            raise PlanError(f"TaskGraph {task.name!r} of the plan keeps tensor {missing[0]!r}, which the graph does not have")
        redo = redone(readers, number, {graph.tensor(name) for name in task.kept})
        reads = [(reader, position, tensor) for tensor in redo.wanted for reader, position in graph.consumers(tensor)
                 if reader in readers.backward and region.task_graph[reader] == number]
        again.copy(redo.waits, sorted({reader for reader, _, _ in reads}))
        for reader, position, tensor in reads:
            edit.move_input(graph.ops[reader].name, position, again.names[tensor])
    recording = captured.recording.after(
        edit, list(captured.gradient_calls), {}, again.shapes, captured.recording.replaced, tags=again.tags)
    return captured_after(captured, recording)


class _Again:
    """Stages copies of forward ops.

    Attributes:
        names: tensor -> name of the copy's tensor.
        shapes: shapes of new tensors, by name.
        tags: what the op graph says about new nodes.
    """

    def __init__(self, captured: Captured, edit: StagedEdit, batch_level: Collection[int]) -> None:
        self._captured, self._edit, self._batch_level = captured, edit, batch_level
        self._graph: OpGraph = captured.graph
        self.names: Dict[int, str] = {}
        self.shapes: Dict[str, Shape] = {}
        self.tags: Dict[str, Tags] = {}
        self._gates: Dict[Tuple[int, int, int], str] = {}
        self._earlier: Dict[int, List[Op]] = {}  # op that copies wait for -> readers of copies that they wait for, too
        taken, self._suffix = names_taken(edit.graph), "again"
        while any(f"{op.name}/{self._suffix}" in taken for op in self._graph.ops):
            self._suffix += "_"

    def copy(self, ops: Mapping[int, int], readers: Collection[int]) -> None:
        """Stages a copy of each op, after the backward op that it waits for and earlier ``readers`` of copies."""
        graph, definitions = self._graph, self._captured.definitions
        ends = sorted(set(ops.values()))
        for reader in readers:  # in graph order, in which nothing up to an end reads what waits for it
            position = bisect_left(ends, reader)
            if position < len(ends) and ends[position] != reader and reader in self._batch_level:
                self._earlier.setdefault(ends[position], []).append(graph.ops[reader])
        for index in sorted(ops):
            for tensor in graph.ops[index].outputs:
                self.names[tensor] = f"{graph.ops[index].name}/{self._suffix}:{graph.tensors[tensor].index}"
                self.shapes[self.names[tensor]] = graph.tensors[tensor].shape
        for index in sorted(ops):
            op, wait = graph.ops[index], ops[index]
            inputs = [self.names[t] if graph.tensors[t].op in ops else self._behind(t, index, wait) for t in op.inputs]
            name = f"{op.name}/{self._suffix}"
            self._edit.copy(definitions.node(op.name), name, inputs, device=op.device, same_attrs=True)
            self._tag(name, index, wait)

    def _behind(self, tensor: int, reader: int, wait: int) -> str:
        """A kept tensor, for a copy of ``reader``: the tensor itself if it is on the step level, else its Identity after the op
        that the copy waits for."""
        graph, op = self._graph, self._graph.ops[reader]
        name = graph.tensor_name(tensor)
        if graph.tensors[tensor].op not in self._batch_level or graph.tensors[tensor].dtype in UNSENT:
            return name
        key = tensor, wait, op.shard
        if key not in self._gates:
            where = f"{op.name}/{self._suffix}_{len(self._gates)}"
            earlier = [o.name for o in self._earlier.get(wait, []) if o.shard == op.shard]
            gate = self._edit.add(
                "Identity", where, [name], device=op.device, control_inputs=[graph.ops[wait].name, *earlier])
            self._tag(gate, reader, wait)
            self._gates[key] = f"{gate}:0"
            self.shapes[f"{gate}:0"] = graph.tensors[tensor].shape
        return self._gates[key]

    def _tag(self, name: str, forward: int, wait: int) -> None:
        """Tags a node as part of the backward pass of a forward op, and of the gradient call of the op that it waits for."""
        op, call = self._graph.ops[forward], self._graph.ops[wait].attrs.get(CALL_ATTR)
        tags: Tags = {TASK_GRAPH_ATTR: op.task_graph, PHASE_ATTR: "backward", FORWARD_ATTR: op.name}
        for key, value in ((SHARD_ATTR, op.attrs.get(SHARD_ATTR)), (CALL_ATTR, call)):
            if value is not None:
                tags[key] = value
        self.tags[name] = tags
