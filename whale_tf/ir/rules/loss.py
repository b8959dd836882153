"""Losses that also return their gradient."""
from __future__ import annotations

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.elementwise import elementwise_rule
from whale_tf.ir.rules.rule import WHOLE, Dims, Rule, View

_ROWS: Dims = (("b",),)
_LOGITS: Dims = (("b",), ("c",))


def softmax_cross_entropy(op: Op, view: View) -> Rule:
    """(logits, labels) -> (loss per row, gradient); operands may broadcast."""
    rule = elementwise_rule("nn", 2, tuple(map(view.shape, op.inputs)))
    rename = {(): (), ("d0",): ("b",), ("d1",): ("c",)}
    inputs = tuple(tuple(rename[d] for d in dims) if isinstance(dims, tuple) else _LOGITS for dims in rule.inputs)
    return Rule(inputs, (_ROWS, _LOGITS), "nn", {"c": WHOLE})


def sparse_softmax_cross_entropy(op: Op, view: View) -> Rule:
    """(logits, class numbers) -> (loss per row, gradient)."""
    return Rule((_LOGITS, _ROWS), (_ROWS, _LOGITS), "nn", {"c": WHOLE})
