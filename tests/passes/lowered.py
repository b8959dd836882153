"""Lowered recipes, computed with numbers: what their primitives make of given values."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

import numpy as np

from whale_tf.passes.lowering import Primitive, in_order
from whale_tf.passes.lowering import primitive as kinds
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
