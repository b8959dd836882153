"""Sharding rules, one for each op type.

``rule_for(op, graph)`` returns the rule of one op, built from its attributes, constant operands and shapes.  Each family of
makers has its own file.  ``rule`` in an op type's row (:mod:`whale_tf.ir.traits`) names its maker: ``"shape.reshape"`` is the
function ``reshape`` of the file ``shape``, and ``"state.update vsg"`` is the result of ``update("vsg")``.
"""
from __future__ import annotations

from typing import Dict, Optional, Union

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
from whale_tf.ir.traits import TABLE

_FILES = {"control_flow": control_flow, "convolution": convolution, "elementwise": elementwise, "gather": gather, "loss": loss,
          "matmul": matmul, "normalisation": normalisation, "random": random, "recurrent": recurrent, "reduction": reduction,
          "shape": shape, "state": state}


def maker(rule: str) -> Builder:
    """The maker named by a row's ``rule``."""
    name, *arguments = rule.split()
    file, _, function = name.partition(".")
    found = getattr(_FILES[file], function)
    builder: Builder = found(*map(_argument, arguments)) if arguments else found
    return builder


def _argument(text: str) -> Union[int, str]:
    return int(text) if text.lstrip("-").isdigit() else text


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


__all__ = ["RULES", "NoRule", "Rule", "ShapeOperand", "View", "rule_for"]
