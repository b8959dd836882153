"""Recipes of a Program, lowered to primitive ops with operands and devices (see :mod:`whale_tf.passes.lowering.lowering`)."""

from __future__ import annotations

from whale_tf.passes.lowering.lowering import Lowering
from whale_tf.passes.lowering.primitive import Primitive, in_order, text_of

__all__ = ["Lowering", "Primitive", "in_order", "text_of"]
