"""Chooses how each op of a ``split`` TaskGraph is divided: the choice with the fewest bytes (Whale section 3.2.2)."""

from __future__ import annotations

from whale_tf.planner.sharding.assignment import Assignment, assign
from whale_tf.planner.sharding.batch import batch_ops, with_batch
from whale_tf.planner.sharding.problem import BATCH, Problem
from whale_tf.planner.sharding.shares import device_shares

__all__ = ["BATCH", "Assignment", "Problem", "assign", "batch_ops", "device_shares", "with_batch"]
