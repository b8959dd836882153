"""The pipeline schedule as control edges.

Each replica of a TaskGraph runs its steps (forward or backward of one micro-batch) in the order its schedule gives: the
first ops of a step wait for a barrier, which waits for the last ops of the step before::

    F0 ──> barrier ──> F1 ──> barrier ──> B0 ──> barrier ──> F2 ...        (backward first, two forwards ahead)

Between the forward and the backward step of one micro-batch the data edges order enough.

An op that waits, or is waited for, TensorFlow's graph optimizer fuses with no other: a Conv2D would run apart from its bias and
its activation (on CPU 6% to 38% longer in all).  So an Identity in front of it waits in its place, and one behind it is waited
for.  The optimizer takes these away again once it has fused, and gives their edges to the fused ops.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import networkx as nx

from whale_tf._tf_compat import tf
from whale_tf.errors import PlanError
from whale_tf.graph_editor.nodes import Nodes, set_input
from whale_tf.ir.graph import Op
from whale_tf.ir.region import frame_of_outputs, frames
from whale_tf.rewrite.context import Clone, Context, Copy
from whale_tf.schedule import BACKWARD, Step, schedule


class Order:
    """Barriers of every clone: staged on construction, looked up by ``barriers``."""

    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context = context
        self._nodes = nodes
        self._frames = frames(context.graph)
        self._barriers: Dict[Tuple[int, Clone], Dict[str, List[str]]] = {}
        self._gated: Dict[Tuple[int, Clone], Dict[Tuple[Op, int], List[str]]] = {}
        self._after_backward: Dict[Tuple[int, Clone], str] = {}
        self._orders: List[List[Step]] = []
        if context.plan.num_micro_batch == 1:
            return
        orders = self._orders = [_order(context, index) for index in range(len(context.plan.task_graphs))]
        steps = [self._steps(index) for index in range(len(orders))]
        _check_acyclic(context, orders, steps)
        for index, order in enumerate(orders):
            for copy in context.replicas(index):
                self._stage(index, copy, order, steps[index])

    def barriers(self, task_graph: int, place: Union[Clone, Copy]) -> Optional[Mapping[str, List[str]]]:
        """Control inputs to add to those of a clone's ops that :meth:`gate` does not hold back, by original op name."""
        return self._barriers.get((task_graph, place)) if isinstance(place, Clone) else None

    def gate(self, task_graph: int, place: Clone) -> None:
        """Lets the other first ops of a clone's steps wait: through an Identity of their input, so once the inputs are set."""
        context = self._context
        for (op, position), barriers in self._gated.get((task_graph, place), {}).items():
            name = f"{context.scope(place)}/{op.name}"
            node, dtype = context.edit.node(name), context.dtype(op.inputs[position])
            scope = context.name("order", "into", context.scope(place).rpartition("/")[2], op.name)
            gate = self._nodes.identity(node.input[position], scope, dtype, node.device, barriers)
            set_input(context.edit, name, position, gate)

    def finish_with(self, task_graph: int, clone: Clone, op: str) -> None:
        """Let the step after a clone's backward step wait for ``op`` too (the addition of its gradients, which frees them).

        The control edge also keeps TensorFlow's graph optimizer from fusing the chain of additions into one AddN, which
        would keep all gradients alive.
        """
        barrier = self._after_backward.get((task_graph, clone))
        if barrier is not None:
            self._context.edit.node(barrier).input.append("^" + op)

    def close(self) -> None:
        """The barriers are in the graph: nothing more can be finished before them."""
        self._after_backward.clear()

    def in_backward_order(self, task_graph: int, clones: Sequence[Clone]) -> List[Clone]:
        """Clones of one copy, as their gradients become ready."""
        if not self._orders:
            return list(clones)
        place = {
            step.micro_batch: i for i, step in enumerate(self._orders[task_graph]) if step.kind == BACKWARD
        }
        return sorted(clones, key=lambda clone: place[clone.m])

    def _steps(self, task_graph: int) -> Dict[str, List[Op]]:
        """A TaskGraph's batch-level ops by step; what is computed from a gradient belongs to the backward step."""
        steps: Dict[str, List[Op]] = {"forward": [], "backward": []}
        for op in self._context.region.of_task_graph(task_graph, batch_level=True):
            if op.id not in self._context.region.early:
                steps["backward" if op.id in self._context.region.late else "forward"].append(op)
        return steps

    def _stage(self, task_graph: int, copy: Copy, order: List[Step], steps: Dict[str, List[Op]]) -> None:
        context = self._context
        ends = {kind: _ends(context, ops, self._frames) for kind, ops in steps.items()}
        device = context.device(task_graph, copy)
        for before, after in _pairs([step for step in order if steps[step.kind]]):
            place = Clone(copy.g, before.micro_batch, copy.r)
            scope = context.name(
                "order", "t{}_g{}_r{}".format(task_graph, *copy), f"before_{after.kind}{after.micro_batch}"
            )
            barrier = self._nodes.no_op(scope, device, [self._end(op, place, scope) for op in ends[before.kind][1]])
            if before.kind == BACKWARD:
                self._after_backward.setdefault((task_graph, place), barrier)
            key = (task_graph, Clone(copy.g, after.micro_batch, copy.r))
            for op in ends[after.kind][0]:
                position = self._first_floating(op.inputs)
                if position is None or self._first_floating(op.outputs) is None or op.id in self._frames:
                    self._barriers.setdefault(key, {}).setdefault(op.name, []).append(barrier)
                else:
                    self._gated.setdefault(key, {}).setdefault((op, position), []).append(barrier)

    def _end(self, op: Op, place: Clone, scope: str) -> str:
        """What is waited for in place of a clone of ``op``."""
        position = self._first_floating(op.outputs)
        name = f"{self._context.scope(place)}/{op.name}"
        if position is None:
            return name
        tensor, shard = op.outputs[position], self._context.shard(op)
        device = self._context.device(self._context.home(op), place, shard)
        return self._nodes.identity(
            self._context.tensor_in(tensor, place), scope + "/after/" + op.name, self._context.dtype(tensor), device
        )

    def _first_floating(self, tensors: Sequence[int]) -> Optional[int]:
        """Position of the first one of floating point numbers that is no reference to a variable: what the optimizer fuses
        computes these."""
        for position, tensor in enumerate(tensors):
            dtype = tf.as_dtype(self._context.graph.tensors[tensor].dtype)
            if dtype.is_floating and dtype == dtype.base_dtype:
                return position
        return None


def _order(context: Context, task_graph: int) -> List[Step]:
    plan = context.plan
    return list(
        schedule(
            plan.schedule, task_graph, len(plan.task_graphs), plan.num_micro_batch, plan.task_graphs[task_graph].warmup
        )
    )


def _pairs(order: List[Step]) -> List[Tuple[Step, Step]]:
    """(step, next step) of different micro-batches; a step after its own micro-batch's waits for the one before that."""
    pairs = []
    for i, after in enumerate(order):
        for before in reversed(order[:i]):
            if before.micro_batch != after.micro_batch:
                pairs.append((before, after))
                break
    return pairs


def _ends(context: Context, ops: List[Op], frames_of: Mapping[int, Tuple[str, ...]]) -> Tuple[List[Op], List[Op]]:
    """(entries, exits) of a step: ops that no op of the step comes before, and ops outside of loops that none follows."""
    members = {op.id for op in ops}
    entries: List[Op] = []
    followed: Set[int] = set()
    for op in ops:
        before = [p for p in context.graph.predecessors(op) if p in members]
        followed.update(before)
        if not before:
            entries.append(op)
    return entries, [op for op in ops if op.id not in followed and not frame_of_outputs(op, frames_of)]


def _check_acyclic(context: Context, orders: List[List[Step]], steps: List[Dict[str, List[Op]]]) -> None:
    """Refuse a schedule that would wait for itself (gradients of gradients that cross stages back and forth).

    Steps of one micro-batch that depend on each other both ways count as one.
    """
    stage_of = {
        op.id: (index, kind) for index, by_kind in enumerate(steps) for kind, ops in by_kind.items() for op in ops
    }
    data = nx.DiGraph()
    data.add_nodes_from(stage_of.values())
    for index, stage in stage_of.items():
        for before in context.graph.predecessors(context.graph.ops[index]):
            if before in stage_of and stage_of[before] != stage:
                data.add_edge(stage_of[before], stage)
    group = {
        stage: number for number, component in enumerate(nx.strongly_connected_components(data)) for stage in component
    }
    whole = nx.DiGraph()
    for m in range(context.plan.num_micro_batch):
        whole.add_edges_from(((group[a], m), (group[b], m)) for a, b in data.edges if group[a] != group[b])
    for index, order in enumerate(orders):
        for step, following in _pairs([step for step in order if steps[index][step.kind]]):
            whole.add_edge(
                (group[(index, step.kind)], step.micro_batch), (group[(index, following.kind)], following.micro_batch)
            )
    if not nx.is_directed_acyclic_graph(whole):
        raise PlanError(
            f"schedule {context.plan.schedule!r} cannot order this graph: its stages wait for each other's gradients "
            f"within a micro-batch (gradients "
            "of gradients across TaskGraphs); use pipeline.schedule = 'gpipe', one micro-batch, or one TaskGraph for the "
            "part that is differentiated twice"
        )
