"""Sharding rules, one for each op type.

``rule_for(op, graph)`` returns the rule of one op, built from its attributes, constant operands and shapes.  Each family of
makers has its own file.  ``rule`` in an op type's row (:mod:`whale_tf.ir.traits`) names its maker and further arguments:
``"shape.reshape"`` is ``shape.reshape(op, view)``, and ``"state.update vsg"`` is ``state.update(op, view, "vsg")``.
"""
from __future__ import annotations

from typing import Callable, Dict, Optional

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
    stacks,
    state,
)
from whale_tf.ir.rules.rule import Builder, NoRule, Rule, ShapeOperand, View
from whale_tf.ir.traits import TABLE

_FILES = {"control_flow": control_flow, "convolution": convolution, "elementwise": elementwise, "gather": gather, "loss": loss,
          "matmul": matmul, "normalisation": normalisation, "random": random, "recurrent": recurrent, "reduction": reduction,
          "shape": shape, "stacks": stacks, "state": state}


def maker(rule: str) -> Builder:
    """The maker named by a row's ``rule``."""
    name, *rest = rule.split()
    file, _, function = name.partition(".")
    found: Callable[..., Rule] = getattr(_FILES[file], function)
    arguments = [int(text) if text.lstrip("-").isdigit() else text for text in rest]
    return (lambda op, view: found(op, view, *arguments)) if arguments else found


_MAKERS: Dict[str, Builder] = {rule: maker(rule) for rule in {row.rule for row in TABLE.values() if row.rule}}
RULES: Dict[str, Builder] = {op_type: _MAKERS[row.rule] for op_type, row in TABLE.items() if row.rule}


def rule_for(op: Op, graph: OpGraph, view: Optional[View] = None) -> Rule:
    """The sharding rule of an op.

    Args:
        view: provides the operands' shapes and values; by default the graph's static ones.  Pass the same view for many ops,
            because it caches its results.

    Raises:
        NoRule: the op type has no rule, or a shape or constant that the rule needs is not known.
    """
    builder = RULES.get(op.type)
    if builder is None:
        raise NoRule(f"there is no rule for the op type {op.type}")
    return builder(op, view if view is not None else View(graph))


def known_rule(op: Op, graph: OpGraph, view: Optional[View] = None) -> Optional[Rule]:
    """The sharding rule of an op, as :func:`rule_for`; None if it has none, or if it is not known."""
    try:
        return rule_for(op, graph, view)
    except NoRule:
        return None


__all__ = ["RULES", "NoRule", "Rule", "ShapeOperand", "View", "known_rule", "rule_for"]
