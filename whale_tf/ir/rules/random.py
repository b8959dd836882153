"""Random ops: the shape is an operand; a shard draws its own numbers."""
from __future__ import annotations

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import WHOLE, Rule, ShapeOperand, View, axes


def drawn(op: Op, view: View) -> Rule:
    full = axes(view.filled_rank(op))
    return Rule((None,) * len(op.inputs), (full,), "n" * len(op.inputs), {}, (ShapeOperand(0, full),))


def multinomial(op: Op, view: View) -> Rule:
    return Rule(((("b",), ("c",)), None), ((("b",), ("sample",)),), "nn", {"c": WHOLE, "sample": WHOLE})


def shuffle(op: Op, view: View) -> Rule:
    full = view.need_dims(op.inputs[0])
    return Rule((full,), (full,), "m", {f[0]: WHOLE for f in full[:1]})
