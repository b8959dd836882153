"""The rule table: one sharding rule per op type (DESIGN section 5).

``rule_for(op, graph)`` gives the rule of one op, built from its attributes, constant operands and shapes.  The rules lie
in one file per family; each file ends in the table of its op types.
"""
from __future__ import annotations

from typing import Dict, Optional

from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.rules import (
    control_flow,
    convolution,
    elementwise,
    gather,
    loss,
    matmul,
    normalisation,
    random,
    recurrent,
    reduction,
    shape,
    state,
)
from whale_tf.ir.rules.rule import Builder, NoRule, Rule, ShapeOperand, View

COMPUTING = (elementwise, matmul, reduction, shape, convolution, normalisation, gather, loss, random, recurrent)
RULES: Dict[str, Builder] = {}
for _family in COMPUTING + (state, control_flow):
    RULES.update(_family.RULES)


def rule_for(op: Op, graph: OpGraph, view: Optional[View] = None) -> Rule:
    """The sharding rule of an op.

    Args:
        view: where shapes and values of operands come from; the graph's static ones by default.  Pass one view for many
            ops: it remembers what it computed.

    Raises:
        NoRule: the op type is not in the table, or a shape or constant that its rule depends on is not known.
    """
    builder = RULES.get(op.type)
    if builder is None:
        raise NoRule(f"there is no rule for the op type {op.type}")
    return builder(op, view if view is not None else View(graph))


__all__ = ["COMPUTING", "RULES", "NoRule", "Rule", "ShapeOperand", "View", "rule_for"]
