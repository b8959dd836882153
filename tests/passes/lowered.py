"""Lowered recipes, computed with numbers: what their primitives make of given values."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence

import numpy as np

from whale_tf.ir.graph import OpGraph
from whale_tf.passes.lowering import Primitive, in_order
from whale_tf.passes.lowering import primitive as kinds
from whale_tf.passes.lowering.levels import divide, levels
from whale_tf.passes.replicate import clones
from whale_tf.plan import Plan
from whale_tf.program import Clone

WEIGHT = 0.25  # of each clone
MADE: Dict[str, Callable[..., Any]] = {
    kinds.SUM: lambda *x: sum(x), kinds.ADD: np.add, kinds.MAX: lambda *x: np.maximum.reduce(x),
    kinds.CONCAT: lambda *x: np.concatenate(x), kinds.IDENTITY: lambda x: x, kinds.PACK: lambda *x: list(x),
    kinds.ALL_REDUCE: lambda *x: x[0] if len(x) == 1 else [sum(x)] * len(x), kinds.ALL_GATHER: lambda x: x,
    kinds.SCALE_PROCESS: lambda x: x}


def computed(value: Primitive, given: Callable[[Clone], Any]) -> Any:
    """What a primitive makes of the clones' values of its tensor, if other processes have nothing."""
    made: Dict[Primitive, Any] = {}
    for each in in_order([value], made):
        operands = [made[operand] for operand in each.operands]
        if each.kind == kinds.VALUE:
            made[each] = given(each.clone)
        elif each.kind == kinds.SCALE:
            made[each] = operands[0] * WEIGHT ** each.detail
        elif each.kind in (kinds.UNPACK, kinds.TAKE):
            made[each] = operands[0][each.detail]
        else:
            made[each] = MADE[each.kind](*operands)
    return made[value]


class Numbers:
    """Rows, with the sizes that the clones of a plan have of a mini-batch."""

    def __init__(self, plan: Plan, batch: int, blocks: Sequence[int] = (1,)) -> None:
        self.plan, self.batch, self.blocks = plan, batch, blocks
        self.sizes: List[Dict[Clone, int]] = []
        self.starts: List[Dict[Clone, int]] = []
        for number in range(len(plan.task_graphs)):
            sizes = divide(batch, levels(plan, number, False))
            self.sizes.append(dict(zip(clones(plan, number), sizes)))
            self.starts.append(dict(zip(clones(plan, number), [sum(sizes[:place]) for place in range(len(sizes))])))

    def weight(self, task_graph: int, clone: Clone) -> float:
        return self.sizes[task_graph][clone] / self.batch

    def own(self, whole: np.ndarray, task_graph: int, clone: Clone) -> np.ndarray:
        """A clone's rows of all rows."""
        start, size = self.starts[task_graph][clone], self.sizes[task_graph][clone]
        ends = [sum(self.blocks[:place]) * self.batch for place in range(len(self.blocks))]
        return np.concatenate([whole[end + start * each:end + (start + size) * each] for end, each in zip(ends, self.blocks)])

    def computed(self, value: Primitive, given: Callable[[Clone], np.ndarray]) -> np.ndarray:
        """What a primitive makes of the clones' values of its tensor."""
        made: Dict[Primitive, Any] = {}
        for each in in_order([value], made):
            made[each] = self._made(each, [made[operand] for operand in each.operands], given)
        return made[value]

    def _made(self, each: Primitive, operands: List[Any], given: Callable[[Clone], np.ndarray]) -> Any:
        if each.kind == kinds.VALUE:
            return given(each.clone)
        if each.kind == kinds.SCALE:
            return operands[0] * self.weight(each.task_graph, each.clone) ** each.detail
        if each.kind == kinds.SHIFT:
            return operands[0] + each.detail * self.starts[each.task_graph][each.clone]
        if each.kind == kinds.SHARE:
            replicas = self.plan.task_graphs[each.task_graph].replica_count
            weights = [self.weight(each.task_graph, each.clone._replace(r=r)) for r in range(replicas)]
            return operands[0] * weights[each.clone.r] / sum(weights)
        if each.kind == kinds.BLOCK:
            size = self.sizes[each.task_graph][each.clone]
            before = sum(self.blocks[:each.detail]) * size
            return operands[0][before:before + self.blocks[each.detail] * size]
        if each.kind == kinds.CUT:
            rows = self.blocks[each.detail.block]
            first = self.starts[each.detail.task_graph][each.detail.pieces[0]]
            start = self.starts[each.task_graph][each.clone] - first
            return operands[0][start * rows:(start + self.sizes[each.task_graph][each.clone]) * rows]
        return MADE[each.kind](*operands)


def terms(value: Primitive) -> Dict[Clone, float]:
    """Clone -> how often its value is in a sum."""
    powers: Dict[Clone, float] = {}
    total = computed(value, lambda clone: powers.setdefault(clone, 1024.0 ** len(powers)))
    found = {}
    for clone, power in sorted(powers.items(), key=lambda item: -item[1]):
        times, total = divmod(total, power * WEIGHT)
        if times:
            found[clone] = times * WEIGHT
    return found


def of_kind(values: Sequence[Primitive], kind: str) -> List[Primitive]:
    """The primitives of a kind that values are made of."""
    return [each for each in in_order(values, {}) if each.kind == kind]


def ops_of(graph: OpGraph, waits: Sequence[Primitive]) -> List[str]:
    """Names of the ops of the update for which something waits."""
    assert {each.kind for each in waits} <= {kinds.OP}
    return [graph.ops[each.detail].name for each in waits]


def of_message(graph: OpGraph, values: Mapping[str, Primitive], given: Mapping[str, Any], arrived: Any = None) -> Dict[str, Any]:
    """What a message means in a process, which has the ``given`` values of tensors and variables, or receives ``arrived``."""
    made: Dict[Primitive, Any] = {}
    for each in in_order(list(values.values()), {}):
        operands = [made[operand] for operand in each.operands]
        if each.kind in (kinds.READ, kinds.VALUE):
            made[each] = given[graph.tensor_name(each.tensor)]
        elif each.kind == kinds.UNPACK:
            made[each] = operands[0][each.detail]
        elif each.kind == kinds.PACK:
            made[each] = operands
        elif each.kind == kinds.BROADCAST and not operands:
            made[each] = arrived
        else:
            made[each] = operands[0] if operands else None
    return {name: made[value] for name, value in values.items()}
