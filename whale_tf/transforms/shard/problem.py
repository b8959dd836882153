"""What the sharding search must know about a captured graph."""

from __future__ import annotations

from typing import AbstractSet, Collection, Dict, FrozenSet, List, Mapping, Optional, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import LAYOUT_ATTR, LAYOUT_OF_ATTR, NOT_DIVIDED, TRAINED, Op, OpGraph, Phase
from whale_tf.ir.traits import ASSIGNS, WHILES, traits
from whale_tf.ir.units import bound
from whale_tf.patterns.strategy import Sizes
from whale_tf.planner.sharding.problem import ShardingProblem, SplitTaskGraph
from whale_tf.planner.sharding.slots import factored_slots


def divided_dims(batch: BatchAxis) -> Dict[int, int]:
    """Tensor -> the dimension that counts examples."""
    return {tensor: layout.dim for tensor, layout in batch.layouts.items() if layout.is_sharded}


def sharding_problem(captured: Captured, batch: Mapping[int, int], shares: Mapping[int, Tuple[int, ...]],
                     by_batch: Collection[int] = (), only: Optional[Collection[int]] = None,
                     whole: AbstractSet[int] = frozenset(), bodies: Optional[BatchAxis] = None) -> ShardingProblem:
    """Args:
    batch: tensor -> the dimension that counts examples, which stays whole.
    shares: shares of each split TaskGraph's devices.
    by_batch: split TaskGraphs whose devices have their own examples.
    only: the trained variables that may be divided; the values of their sparse gradients get the same layout.
    whole: ops that are not divided, whatever they read.
    bodies: how the batch passes through the bodies of loops, which may be divided; None: loops stay whole.
    """
    splits = [SplitTaskGraph(number, captured.specs[number].name, parts, number in by_batch)
              for number, parts in shares.items()]
    inside = captured.once(in_bodies)
    trained = {op: task_graph for op, task_graph in captured.variable_task_graph.items()
               if task_graph in shares and op not in inside and (only is None or op in only)}
    _check_layouts(captured, shares, trained, inside)
    slots = {op: [slot for slot in found if slot not in inside] for op, found in _slots(captured, trained).items()}
    variables: Dict[int, int] = {slot: -1 for found in slots.values() for slot in found}
    variables.update(trained)
    gradients, rows = (
        {target.tensors[0]: target.variable for target in captured.phases.targets
         if target.is_sparse is is_sparse and (only is None or target.variable in only)} for is_sparse in (False, True))
    others = {variable.op for variable in captured.phases.variables
              if variable.op not in captured.variable_task_graph and variable.op not in inside}
    factored = {slot: found for slot, found in factored_slots(
        captured.graph, Sizes(captured.graph), gradients, rows, others - set(variables)).items() if found.variable in trained}
    variables.update(dict.fromkeys(factored, -1))
    if only is not None:
        gradients = {**gradients, **rows}
    return ShardingProblem(captured.graph, captured.task_graph, splits, batch, variables, slots, gradients, factored, whole,
                           captured.once(bound_ops), {} if bodies is None else _loops(captured.graph, bodies))


def _loops(graph: OpGraph, batch: BatchAxis) -> Dict[int, Dict[int, int]]:
    """Loop of the step with a body that is a function -> tensor of the body -> the dimension that counts examples."""
    loops = [op for op in graph.ops if op.type in WHILES and op.phase in TRAINED and {"body", "cond"}.issubset(op.body or ())]
    return {op.id: divided_dims(batch.bodies[op.id, "body"]) if (op.id, "body") in batch.bodies else {} for op in loops}


def _check_layouts(captured: Captured, shares: Mapping[int, Tuple[int, ...]], trained: Mapping[int, int],
                   inside: Mapping[int, Op]) -> None:
    """Raises:
    UnsupportedOpError: a layout divides a variable that stays whole.
    """
    for variable in captured.phases.variables if shares else ():
        attrs = captured.graph.ops[variable.op].attrs
        if attrs.get(LAYOUT_ATTR, NOT_DIVIDED) != NOT_DIVIDED and variable.op not in trained:
            user = inside.get(variable.op)
            why = (f"op {user.name!r} ({user.type}) takes it whole" if user is not None
                   else "no op of the forward pass reads it")
            raise UnsupportedOpError(f"{attrs[LAYOUT_OF_ATTR]} cannot be kept, because {why}; leave it out of the layout map")


def bound_ops(captured: Captured) -> FrozenSet[int]:
    """Ops of the step's TensorFlow 1 loops and conditions, whose bodies are not functions."""
    return bound(captured.graph, [op for op in captured.graph.ops if op.phase in TRAINED])


def in_bodies(captured: Captured) -> Dict[int, Op]:
    """Variables that stay whole -> the op that is the reason: one that takes them for a condition, a loop or a called function of
    the step, or that writes parts of them although it is not an optimizer's update."""
    graph, found, inside = captured.graph, {}, captured.once(bound_ops)
    for variable in captured.phases.variables:
        for tensor in variable.aliases:
            for user, _ in graph.consumers(tensor):
                op, dtype = graph.ops[user], graph.tensors[tensor].dtype
                if (op.body and op.phase in TRAINED) or (op.id in inside and dtype.endswith(("resource", "_ref"))) or (
                        op.phase is Phase.OTHER and traits(op.type).is_write and op.type not in ASSIGNS):
                    found[variable.op] = op
    return found


def _slots(captured: Captured, trained: Collection[int]) -> Dict[int, List[int]]:
    """For each trained variable, the variables of the same shape that the optimizer keeps for it, or averages of it: those that
    the same op updates, those that lead to its update (Keras 3's optimizers consist of elementary ops), or those that are named
    after it (``w/Adam``), which is the only sign for the sparse updates of some optimizers."""
    variables = captured.phases.variables
    named = {variables[other].name: other for other in captured.variable_task_graph}
    updated: Dict[int, List[int]] = {}  # variable -> trained variables whose updates write it
    for op in trained:
        for slot in variables[op].slots:
            updated.setdefault(slot, []).append(op)
    for op, kept in captured.optimizer_state.items():
        for slot in kept if op in trained else ():
            updated.setdefault(slot, []).append(op)
    found: Dict[int, List[int]] = {op: [] for op in trained}
    for other in variables:
        if other.op in captured.variable_task_graph:
            continue
        owners = {*updated.get(other.op, ()), *_owners(other.name, named)}
        for owner in owners:
            if owner in found and variables[owner].shape == other.shape:
                found[owner].append(other.op)
    return found


def _owners(name: str, named: Mapping[str, int]) -> List[int]:
    """Variables after which a variable is named.  ``w/Adam`` begins with the name of ``w``; an average made in a separate scope
    (``train/w/ExponentialMovingAverage``) has the name before its last part, and if several names fit, the longest counts."""
    parts = name.split("/")[:-1]
    beginnings = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    endings = ["/".join(parts[start:]) for start in range(len(parts))]
    longest = next((ending for ending in endings if ending in named), None)
    return [named[each] for each in (*beginnings, *([longest] if longest is not None else [])) if each in named]
