"""Phases of graphs without a record of gradient calls: frozen models and MetaGraphs.

In a MetaGraph of a training script, the forward pass is what the ops of the ``gradients`` scopes read, and all that this needs;
in a frozen model it is everything.
"""

from __future__ import annotations

import re
from typing import FrozenSet, Set

from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.traits import VARIABLES, traits
from whale_tf.ir.walk import reached
from whale_tf.profiler.chain import needed_by_updates

_GRADIENTS = re.compile(r"(^|/)gradients(_\d+)?/")


def model_phases(ops: OpGraph) -> FrozenSet[int]:
    """Gives every op of a model its phase: FORWARD, INPUT or OTHER.

    Returns:
        The ops of the forward pass.
    """
    scope = _forward(ops)
    for op in ops.ops:
        op.phase = Phase.FORWARD if op.id in scope else Phase.INPUT if traits(op.type).is_input else Phase.OTHER
    return scope


def training_phases(ops: OpGraph) -> None:
    """Sets, after :func:`model_phases`, the phases of a training step, if there is one: updates, and what else these need."""
    for op in ops.ops:
        if op.phase is Phase.OTHER and traits(op.type).is_update:
            op.phase = Phase.APPLY
    needed = needed_by_updates(ops)
    for op in ops.ops:
        if op.phase is Phase.OTHER and op.id in needed and op.type not in VARIABLES:
            op.phase = Phase.BACKWARD


def _forward(ops: OpGraph) -> FrozenSet[int]:
    """Ops of the forward pass."""
    gradients = {op.id for op in ops.ops if _GRADIENTS.search(op.name)}
    if not gradients:
        return frozenset(op.id for op in ops.ops if not traits(op.type).is_input)

    def before(index: int) -> Set[int]:
        return {source for source in ops.predecessors(ops.ops[index])
                if source not in gradients and not traits(ops.ops[source].type).is_input}

    return frozenset(reached(set().union(*map(before, gradients)), before))
