"""Chooses how each op of a ``split`` TaskGraph is divided: the choice with the fewest bytes (Whale section 3.2.2)."""

from __future__ import annotations

from whale_tf.planner.sharding.assignment import Assignment, assign, assign_parts
from whale_tf.planner.sharding.batch import batch_ops, with_batch
from whale_tf.planner.sharding.problem import BATCH, ShardingProblem
from whale_tf.planner.sharding.shares import device_shares

__all__ = ["BATCH", "Assignment", "ShardingProblem", "assign", "assign_parts", "batch_ops", "device_shares", "with_batch"]
