"""Ops without inputs under ``init: sharded``: constants and random numbers are made part by part."""

from __future__ import annotations

from typing import Optional

from whale_tf.ir.graph import Op
from whale_tf.ir.rules import View
from whale_tf.ir.traits import GENERATORS, RANDOM, traits
from whale_tf.patterns.spread import Spread, everywhere
from whale_tf.patterns.strategy import ADVANCED, CUT, RESEEDED, SHARDS, Localise, Strategy


def source(op: Op, view: View, spread: Spread) -> Optional[Strategy]:
    """The strategy that makes a constant or random numbers in parts; None if there is none.

    The kernels of Philox generators compute element ``j`` of their result from counter ``j // group``, wherever they run, so a
    part is drawn by counting from its first element (``advanced``; Rhino section 6.3).  Other seeded draws take a separate seed
    for each part, which gives other numbers of the same distribution (``reseeded``).
    """
    whole = (everywhere,) * len(op.inputs)
    if op.type == "Const":
        return Strategy("cut", CUT, whole, (spread,))
    if op.type not in GENERATORS & RANDOM or None in (view.shape(op.outputs[0]) or (None,)):
        return None
    if traits(op.type).philox and is_seeded(op):
        return Strategy("advanced", ADVANCED, whole, (spread,))
    if view.value(op.inputs[0]) is None:
        return None
    how = RESEEDED if is_seeded(op) else SHARDS
    return Strategy(how, how, whole, (spread,), (Localise(0, spread.dim, spread.sizes),))


def is_seeded(op: Op) -> bool:
    """Whether a random op's numbers are the same in every session; seeds may be operands."""
    return "seed" not in op.attrs or bool(op.attrs["seed"] or op.attrs.get("seed2"))
