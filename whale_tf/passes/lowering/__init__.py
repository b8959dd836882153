"""Recipes of a Program, lowered to primitive ops with operands and devices (see :mod:`whale_tf.passes.lowering.lowering`)."""

from __future__ import annotations

from whale_tf.passes.lowering.lowering import Lowering
from whale_tf.passes.lowering.primitive import Primitive, in_order
from whale_tf.passes.lowering.text import lowered_text

__all__ = ["Lowering", "Primitive", "in_order", "lowered_text"]
