"""Sharding patterns: how one op of a ``split`` TaskGraph can run on several devices (Whale section 3.2.2).

Strategies follow from the rule table (:mod:`whale_tf.ir.rules`); ``planner/sharding`` prices and chooses them, and
``transforms/shard`` carries them out.
"""

from __future__ import annotations

from whale_tf.patterns.spread import Spread
from whale_tf.patterns.strategy import Localise, Strategies, Strategy, computed_once, strategies

__all__ = ["Localise", "Spread", "Strategies", "Strategy", "computed_once", "strategies"]
