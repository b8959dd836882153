"""Random ops: the shape is an operand; a shard draws numbers of its own."""
from __future__ import annotations

from typing import Dict, FrozenSet

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import WHOLE, Builder, NoRule, Rule, ShapeOperand, View, axes

SHAPED: FrozenSet[str] = frozenset((
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "StatelessRandomUniform",
    "StatelessRandomNormal", "StatelessTruncatedNormal", "StatelessRandomUniformInt", "StatelessRandomUniformV2",
    "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", "StatelessRandomUniformIntV2"))
RANDOM: FrozenSet[str] = SHAPED | frozenset((
    "Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "ParameterizedTruncatedNormal"))


def drawn(op: Op, view: View) -> Rule:
    rank = view.rank(op.outputs[0])
    if rank is None:
        value = view.value(op.inputs[0])
        if value is None:
            raise NoRule("the rank of its result is not known")
        rank = len(value)
    full = axes(rank)
    others = (None,) * (len(op.inputs) - 1)
    return Rule((None,) + others, (full,), "n" * len(op.inputs), {}, (ShapeOperand(0, full),))


def multinomial(op: Op, view: View) -> Rule:
    return Rule(((("b",), ("c",)), None), ((("b",), ("sample",)),), "nn", {"c": WHOLE, "sample": WHOLE})


def shuffle(op: Op, view: View) -> Rule:
    full = axes(view.need_rank(op.inputs[0]))
    return Rule((full,), (full,), "m", {f[0]: WHOLE for f in full[:1]})


RULES: Dict[str, Builder] = dict.fromkeys(SHAPED, drawn)
RULES.update({"Multinomial": multinomial, "RandomShuffle": shuffle})
