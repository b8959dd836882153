"""A captured training step, from which the passes build a Program."""

from __future__ import annotations

from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.across import Across, of_session
from whale_tf.ir.graph import Op, OpGraph, Phase, inner_ops
from whale_tf.ir.holder import Holder
from whale_tf.ir.region import Region
from whale_tf.ir.traits import PULLS, RANDOM, SWITCHES, VARIABLES, traits
from whale_tf.ir.walk import reached
from whale_tf.ir.writes import is_write


class Update(NamedTuple):
    """The optimizer's ops, by the TaskGraph on whose gradients they depend.

    APPLY ops that depend on the gradients of a single TaskGraph (clip by value, Adam, its slots) and lead to a write run on
    each copy of it.  Ops that depend on several TaskGraphs or on none (a global norm, the learning rate, ``global_step``) run
    once, and so do random ops, so that all copies get the same numbers::

        gradient (sum of clones) ─┬─> clip ──> ApplyAdam(v)            gradient ──> clip' ──> ApplyAdam(v') on replica 1
                                  └─> L2Loss ─┐                                      ^
        other TaskGraphs' ... ────────────────┴─> global norm (once) ──> scale ──────┘

    Attributes:
        task_graph: op number -> TaskGraph, for the APPLY ops that run on every copy.
        variables: op number -> TaskGraph, for every variable that has copies: the region's variables and their slots.
    """

    task_graph: Dict[int, int]
    variables: Dict[int, int]


class _Fields(NamedTuple):
    region: Region
    sources: Mapping[int, int]
    update: Update
    gradients: Tuple[Tuple[int, int], ...] = ()
    processes: int = 1
    of_results: Optional[Across] = None


class TrainingStep(_Fields, Holder):
    """Attributes:
    region: the ops between the inputs and the gradients.
    sources: batch inputs -> their batch dimension.
    update: see :class:`Update`.
    gradients: (gradient tensor, variable op) in the order in which the gradients become ready.
    processes: number of processes, each with its own Program and mini-batches.
    of_results: if results are known, which values cover the mini-batches of all processes.
    """

    @property
    def graph(self) -> OpGraph:
        return self.region.graph

    @property
    def across(self) -> Across:
        """Which values cover the mini-batches of all processes."""
        if self.processes == 1:
            return Across()
        return self.of_results or self.region.once(of_session)

    @property
    def is_pulled(self) -> bool:
        """Whether batch inputs come from an input pipeline, so that each model replica can take its own mini-batches."""
        return any(pulls_behind(self.graph, tensor) for tensor in self.sources)

    def task_graph_of(self, tensor: int) -> int:
        """TaskGraph that computes a tensor of the region."""
        return self.region.task_graph[self.graph.tensors[tensor].op]


def pulls_behind(graph: OpGraph, tensor: int) -> Set[int]:
    """Ops that take elements from an input pipeline and from which a tensor of the input side follows."""
    behind = reached([graph.tensors[tensor].op], lambda index: () if graph.ops[index].type in PULLS else (
        graph.tensors[t].op for t in graph.ops[index].inputs))
    return {index for index in behind if graph.ops[index].type in PULLS}


def find_update(region: Region, variables: Mapping[int, int], gradients: Mapping[int, int]) -> Update:
    """Find the APPLY ops that belong to a single TaskGraph.

    Args:
        variables: op number -> TaskGraph, for the region's variables.
        gradients: gradient tensor -> TaskGraph of its variable.
    """
    task_graph = {index: region.task_graph[index] for index in region.ops}
    single, homes = owned(region.graph, task_graph, variables, gradients)
    needed = _leading_to_writes(region.graph, single)
    return Update({index: owner for index, owner in single.items()
                   if index in needed and not _draws(region.graph.ops[index])}, homes)


def _draws(op: Op) -> bool:
    """Whether an op, or one in a function that it calls, draws random numbers: copies of it would draw different ones."""
    return any(each.type in RANDOM for each in (op, *inner_ops(op)))


def owned(graph: OpGraph, of: Mapping[int, int], variables: Mapping[int, int],
          gradients: Mapping[int, int]) -> Tuple[Dict[int, int], Dict[int, int]]:
    """The owners (TaskGraphs or devices) of the APPLY ops that depend on one owner alone, and of variables including slots.

    A value that is computed from one owner's values and from values that follow from several (a gradient, scaled by the global
    norm) belongs to that owner.  A scalar or a list of scalars (the sum of squares so far plus that of one more variable) then
    belongs to none, unless it is computed from a gradient or variable directly.

    Args:
        of: op of the region -> owner; ``variables`` and ``gradients`` have the owners of variables' ops and of gradient tensors.
    """
    apply_ops = [op for op in graph.ops if op.phase is Phase.APPLY]
    homes = dict(variables)
    nothing: FrozenSet[int] = frozenset()
    while True:
        classes: Dict[int, FrozenSet[int]] = {}
        for op in apply_ops:
            found, derived = set(), set()  # type: Set[int], Set[int]
            several: Set[int] = set()  # owners on which an operand depends
            for tensor in op.inputs:
                producer = graph.tensors[tensor].op
                if tensor in gradients:
                    found.add(gradients[tensor])
                elif producer in homes:
                    found.add(homes[producer])
                elif producer in of:
                    found.add(of[producer])
                elif len(classes.get(producer, nothing)) == 1:
                    derived |= classes[producer]
                else:
                    several |= classes.get(producer, nothing)
            if not found and several and _is_of_numbers(graph, op):
                derived |= several
            classes[op.id] = frozenset(found | derived)
        slots = {_referred(graph, t).id: next(iter(classes[op.id])) for op in apply_ops
                 if len(classes[op.id]) == 1 and traits(op.type).is_write
                 for t in op.inputs if _referred(graph, t).type in VARIABLES}
        if all(slot in homes for slot in slots):
            break
        homes = {**slots, **homes}
    return {index: next(iter(found)) for index, found in classes.items() if len(found) == 1}, homes


def _referred(graph: OpGraph, tensor: int) -> Op:
    """The variable to which a tensor refers, perhaps through the Switch of a version 1 condition; otherwise any other op."""
    op = graph.producer(tensor)
    while op.type in SWITCHES and graph.tensors[tensor].dtype.endswith(("resource", "_ref")):
        tensor = op.inputs[0]
        op = graph.producer(tensor)
    return op


def _is_of_numbers(graph: OpGraph, op: Op) -> bool:
    """Whether an op reads or computes nothing but scalars."""
    def are_numbers(tensors: Sequence[int]) -> bool:
        return all(graph.tensors[tensor].shape == () for tensor in tensors)

    return bool(op.outputs) and not is_write(op) and (are_numbers(op.outputs) or are_numbers(op.inputs))


def _leading_to_writes(graph: OpGraph, single: Mapping[int, int]) -> Set[int]:
    """The given ops that write a variable, or on which a write of the same TaskGraph depends."""
    needed: Set[int] = set()
    for index in sorted(single, reverse=True):
        op = graph.ops[index]
        if traits(op.type).is_write or any(
                user in needed and single[user] == single[index] for t in op.outputs for user, _ in graph.consumers(t)):
            needed.add(index)
    return needed
