"""Bytes that a change of spread moves between devices, for a tensor of ``S`` bytes on ``n`` devices.

Ring collectives move as many (Whale section 3.2.2 prices its patterns by them)::

    from \\ to     once           everywhere      shard
    once          0              (n-1) S         (n-1)/n S
    shard         (n-1)/n S      (n-1) S         (n-1)/n S   (another dimension: all-to-all; the same: 0)
    partial       (n-1) S        2 (n-1) S       (n-1) S     (reduce-scatter)

The gradient goes back the other way: what was read whole by every device comes back as terms of a sum.
"""

from __future__ import annotations

from whale_tf.patterns.spread import EACH, EVERYWHERE, Spread, everywhere, partial


def moved_bytes(have: Spread, need: Spread, size: float, count: int) -> float:
    """Bytes that change devices when a tensor of ``size`` bytes goes from one spread to another (see the module)."""
    if have == need or have.kind in (EVERYWHERE, EACH):
        return 0.0
    others = count - 1
    if need.is_shard:
        return others * size if have.is_partial else others * size / count
    if need.is_partial:
        return float("inf")
    if need.kind == EVERYWHERE:
        return (2.0 if have.is_partial else 1.0) * others * size
    return others * size if have.is_partial else others * size / count


def gradient_bytes(have: Spread, need: Spread, size: float, count: int) -> float:
    """Bytes that the gradient of a tensor moves on its way back through ``have -> need``.

    The gradient of a term of a sum is the whole gradient, on every device; what every device read whole comes back as the
    terms of a sum.
    """
    back = partial if need.kind == EVERYWHERE else everywhere if need.is_partial else need
    target = everywhere if have.is_partial else have
    if have == need:
        return 0.0
    return moved_bytes(back, target, size, count)
