"""Batch normalisation: in training, its statistics cover the examples that it gets."""
from __future__ import annotations

from typing import Dict

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.convolution import image
from whale_tf.ir.rules.rule import STATISTIC, STATISTIC_GRADIENT, SUM, Dims, Rule, View, attr

_CHANNEL: Dims = (("c",),)


def _pixels(rank: int) -> Dict[str, str]:
    return {f"x{d}": STATISTIC for d in range(rank - 2)}


def fused_batch_norm(op: Op, view: View) -> Rule:
    """(x, scale, offset, mean, variance) -> (y, batch mean, batch variance, reserves ...)."""
    rank = view.need_rank(op.inputs[0])
    x = image(op, rank - 2, "c", "x")
    training = attr(op, "is_training", True)
    kinds = {**_pixels(rank), "n": STATISTIC} if training else {}
    count = len(op.outputs) - 1
    outputs = (x,) + (_CHANNEL,) * min(count, 4) + (None,) * max(count - 4, 0)
    return Rule((x,) + (_CHANNEL,) * 4, outputs, "n" * len(op.inputs), kinds)


def fused_batch_norm_grad(op: Op, view: View) -> Rule:
    """(dy, x, scale, reserves ...) -> (dx, dscale, doffset, unused, unused); linear in dy."""
    rank = view.need_rank(op.inputs[0])
    x = image(op, rank - 2, "c", "x")
    training = attr(op, "is_training", True)
    sums = dict.fromkeys(["n"] + sorted(_pixels(rank)), SUM)
    kinds = {**sums, "n": STATISTIC_GRADIENT} if training else sums
    reserves = tuple(_CHANNEL if i < 2 else None for i in range(len(op.inputs) - 3))
    unused = (None,) * (len(op.outputs) - 3)
    return Rule((x, x, _CHANNEL) + reserves, (x, _CHANNEL, _CHANNEL) + unused, "m" + "n" * (len(op.inputs) - 1), kinds)
