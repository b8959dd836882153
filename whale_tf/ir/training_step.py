"""A captured training step: what the passes make a Program of."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Set, Tuple

from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import PULLS, VARIABLES, traits


class Update(NamedTuple):
    """The optimizer's ops, by whose gradients they follow from.

    APPLY ops that follow from the gradients of one TaskGraph alone (clip by value, Adam, its slots) and lead to a write run on
    each of its copies.  Those that follow from several TaskGraphs or from none (a global norm, the learning rate,
    ``global_step``) run once::

        gradient (sum of clones) ─┬─> clip ──> ApplyAdam(v)            gradient ──> clip' ──> ApplyAdam(v') on replica 1
                                  └─> L2Loss ─┐                                      ^
        other TaskGraphs' ... ────────────────┴─> global norm (once) ──> scale ──────┘

    Attributes:
        task_graph: of the APPLY ops that run on every copy, by op number.
        variables: home TaskGraph of every variable that has copies, by op number: the region's and their slots.
    """

    task_graph: Dict[int, int]
    variables: Dict[int, int]


class TrainingStep(NamedTuple):
    """Attributes:
    region: the ops between the inputs and the gradients.
    sources: batch inputs and their batch dimension.
    update: see there.
    gradients: (gradient tensor, variable op) in the order in which the gradients become ready.
    processes: that take part, each with a Program of its own on mini-batches of its own.
    """

    region: Region
    sources: Mapping[int, int]
    update: Update
    gradients: Tuple[Tuple[int, int], ...] = ()
    processes: int = 1

    @property
    def graph(self) -> OpGraph:
        return self.region.graph

    @property
    def is_pulled(self) -> bool:
        """Whether batch inputs come from an input pipeline, of which model replicas can take mini-batches of their own."""
        return any(self.graph.producer(tensor).type in PULLS for tensor in self.sources)

    def home(self, tensor: int) -> int:
        """TaskGraph that computes a tensor of the region."""
        return self.region.task_graph[self.graph.tensors[tensor].op]


def find_update(region: Region, variables: Mapping[int, int], gradients: Mapping[int, int]) -> Update:
    """Which APPLY ops belong to one TaskGraph.

    Args:
        variables: home TaskGraph of the region's variables, by op number.
        gradients: home TaskGraph of the variable that a gradient tensor belongs to.
    """
    graph = region.graph
    apply_ops = [op for op in graph.ops if op.phase is Phase.APPLY]
    task_graph = {index: region.task_graph[index] for index in region.ops}
    homes = dict(variables)
    nothing: FrozenSet[int] = frozenset()
    while True:
        classes: Dict[int, FrozenSet[int]] = {}
        for op in apply_ops:
            found: Set[int] = set()
            for tensor in op.inputs:
                producer = graph.tensors[tensor].op
                if tensor in gradients:
                    found.add(gradients[tensor])
                elif producer in homes:
                    found.add(homes[producer])
                elif producer in task_graph:
                    found.add(task_graph[producer])
                elif len(classes.get(producer, nothing)) == 1:
                    found |= classes[producer]
            classes[op.id] = frozenset(found)
        slots = {
            graph.tensors[t].op: next(iter(classes[op.id]))
            for op in apply_ops
            if len(classes[op.id]) == 1 and traits(op.type).is_write
            for t in op.inputs
            if graph.producer(t).type in VARIABLES
        }
        if all(slot in homes for slot in slots):
            break
        homes = {**slots, **homes}
    single = {index: next(iter(found)) for index, found in classes.items() if len(found) == 1}
    return Update({index: single[index] for index in _leading_to_writes(graph, single)}, homes)


def _leading_to_writes(graph: OpGraph, single: Mapping[int, int]) -> List[int]:
    """Those of the ops that write a variable, or that such an op of the same TaskGraph follows from; in graph order."""
    needed: Set[int] = set()
    for index in sorted(single, reverse=True):
        op = graph.ops[index]
        if traits(op.type).is_write or any(
                user in needed and single[user] == single[index] for t in op.outputs for user, _ in graph.consumers(t)):
            needed.add(index)
    return sorted(needed)
