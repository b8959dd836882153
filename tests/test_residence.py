"""Where variables live under a plan: who reads them, and which devices keep their values and optimizer state."""

from __future__ import annotations

from typing import Any

from tests.passes.drawings import plan
from whale_tf.plan import Plan
from whale_tf.residence import Residence, residence

SIDE_BY_SIDE = (0, 1), (2, 3)


def shared(count: int, **more: Any) -> Plan:
    return plan([count], tasks={0: {"variables": "shared", **more.pop("task", {})}}, **more)


def test_residence_without_home() -> None:
    assert residence(plan([2]), 0, "v") == Residence((0, 1), (0, 1), (0, 1))
    assert residence(shared(2), 0, "v") == Residence((0, 1), (0,), (0,))
    assert residence(shared(2, model_replicas=2), 0, "v") == Residence((0, 1, 2, 3), (0,), (0,))
    divided = plan([2], tasks={0: {"strategy": "split"}})
    assert residence(divided, 0, "v", shard=1) == Residence((1,), (1,), (1,))


def test_residence_in_processes_side_by_side() -> None:
    """Each has a copy of its own: on its first device that reads it."""
    assert residence(shared(2, model_replicas=2, processes=((1, 0), (2, 3))), 0, "v").values == (0, 2)
    assert residence(shared(2, model_replicas=2, processes=((0,), (1, 2, 3))), 0, "v").values == (0,)  # parts of one step


def test_residence_at_home() -> None:
    at_home = {"homes": {"v": 1}}
    assert residence(shared(2, task=at_home, zero="v1"), 0, "v") == Residence((0, 1), (1,), (1,))
    assert residence(shared(2, task={"homes": {"v": 2}}, offload="v0"), 0, "v") == Residence((0, 1), (2,), (2,))
    two = residence(shared(2, model_replicas=2, processes=SIDE_BY_SIDE, task=at_home, zero="v2"), 0, "v")
    assert two == Residence((0, 1, 2, 3), (1, 3), (1,))
    three = residence(shared(2, model_replicas=2, processes=SIDE_BY_SIDE, task=at_home, zero="v3"), 0, "v")
    assert three.values == three.states == (1,)
