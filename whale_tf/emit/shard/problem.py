"""What the sharding search must know of a captured graph."""

from __future__ import annotations

from typing import Collection, Dict, FrozenSet, List, Mapping, Sequence, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.traits import ASSIGNS, traits
from whale_tf.ir.units import bound
from whale_tf.patterns.strategy import Sizes
from whale_tf.planner.sharding.problem import Problem, SplitTaskGraph
from whale_tf.planner.sharding.slots import factored_slots

TRAINED = (Phase.FORWARD, Phase.BACKWARD, Phase.APPLY)


def divided_dims(batch: BatchAxis) -> Dict[int, int]:
    """Tensor -> the dimension that counts examples."""
    return {tensor: layout.dim for tensor, layout in batch.layouts.items() if layout.is_sharded}


def sharding_problem(
    captured: Captured, batch: Mapping[int, int], shares: Mapping[int, Tuple[int, ...]], by_batch: Collection[int] = ()
) -> Problem:
    """Args:
    batch: tensor -> the dimension that counts examples, which stays whole.
    shares: of each split TaskGraph's devices.
    by_batch: split TaskGraphs whose devices have examples of their own.
    """
    splits = [SplitTaskGraph(number, captured.specs[number].name, parts, number in by_batch)
              for number, parts in shares.items()]
    whole = in_bodies(captured)
    trained = {op: home for op, home in captured.variable_homes.items() if home in shares and op not in whole}
    slots = {op: [slot for slot in _slots(captured, op) if slot not in whole] for op in trained}
    variables: Dict[int, int] = {slot: -1 for found in slots.values() for slot in found}
    variables.update(trained)
    gradients, rows = (
        {target.tensors[0]: target.variable for target in captured.phases.targets if target.is_sparse is is_sparse}
        for is_sparse in (False, True)
    )
    others = {variable.op for variable in captured.phases.variables
              if variable.op not in captured.variable_homes and variable.op not in whole}
    factored = {slot: found for slot, found in factored_slots(
        captured.graph, Sizes(captured.graph), gradients, rows, others - set(variables)).items() if found.variable in trained}
    variables.update(dict.fromkeys(factored, -1))
    return Problem(captured.graph, captured.task_graph, splits, batch, variables, slots, gradients, factored,
                   bound_ops(captured))


def bound_ops(captured: Captured) -> FrozenSet[int]:
    """Ops of the step's TensorFlow 1 loops and conditions, which have no functions for bodies."""
    return bound(captured.graph, [op for op in captured.graph.ops if op.phase in TRAINED])


def in_bodies(captured: Captured) -> Dict[int, Op]:
    """Variables that stay whole, and why: an op that takes them for a condition, a loop or a called function of the step, or that
    writes a part of them although it is no optimizer's update."""
    graph, found, inside = captured.graph, {}, bound_ops(captured)
    for variable in captured.phases.variables:
        for tensor in variable.aliases:
            for user, _ in graph.consumers(tensor):
                op = graph.ops[user]
                if (op.body and op.phase in TRAINED) or (op.id in inside and _is_handle(graph.tensors[tensor].dtype)) or (
                        op.phase is Phase.OTHER and traits(op.type).is_write and op.type not in ASSIGNS):
                    found[variable.op] = op
    return found


def _is_handle(dtype: str) -> bool:
    return dtype == "resource" or dtype.endswith("_ref")


def _slots(captured: Captured, variable: int) -> List[int]:
    """Variables of the same shape that the optimizer keeps for a variable, or averages of it: updated by the same op, or called
    after it (``w/Adam``), which is all there is to go by for the sparse updates of some optimizers."""
    variables = captured.phases.variables
    trained = variables[variable]
    names = [variables[other].name for other in captured.variable_homes]
    return [
        other.op
        for other in variables
        if other.op not in captured.variable_homes
        and other.shape == trained.shape
        and (other.op in trained.slots or other.name.startswith(trained.name + "/")
             or _called_after(other.name, names) == trained.name)
    ]


def _called_after(name: str, variables: Sequence[str]) -> str:
    """The variable that an average made in a scope of its own is of (``train/w/ExponentialMovingAverage`` of ``w``)."""
    of = "/" + name.rpartition("/")[0]
    return max((other for other in variables if of.endswith("/" + other)), key=len, default="")
