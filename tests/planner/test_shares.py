"""Uneven shards: what each device of a ``split`` TaskGraph takes."""
from __future__ import annotations

from typing import Sequence, Tuple

import pytest

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError
from whale_tf.ir.graph import OpGraph
from whale_tf.patterns.strategy import Sizes
from whale_tf.planner.sharding.shares import device_shares, fitting_units

MIXED = Cluster.parse("V100-32GB:1,P100-16GB:1")  # 15.7 and 9.3 TFLOP/s


def units_for(stacks: Sequence[int], count: int) -> int:
    """Units for batched matrix products over these many heads."""
    graph = OpGraph()
    for i, heads in enumerate(stacks):
        q, k = (graph.add(name + str(i), "Placeholder", (), [((8, heads, 4, 5), "float32")]) for name in "qk")
        graph.add("scores" + str(i), "BatchMatMulV2", (q.outputs[0], k.outputs[0]), [((8, heads, 4, 4), "float32")],
                  attrs={"adj_x": False, "adj_y": True})
    batch = {op.outputs[0]: 0 for op in graph.ops}
    return fitting_units(graph.ops, Sizes(graph), count, batch)


@pytest.mark.parametrize("stacks,count,units", [
    ((), 2, 16), ((), 3, 24), ((12,), 2, 12), ((4,), 2, 4), ((64,), 2, 16), ((12, 8), 2, 4), ((12,), 3, 12),
    ((9, 4), 2, 16),  # nothing goes into both
])
def test_units_go_into_heads(stacks: Tuple[int, ...], count: int, units: int) -> None:
    assert units_for(stacks, count) == units


def shares(rows: Sequence[Sequence[int]], cluster: Cluster = MIXED, algorithm: str = "exact", resident_bytes: float = 0.0
           ) -> Tuple[int, ...]:
    """Of a TaskGraph without stacks."""
    return device_shares("t", rows, cluster, algorithm, (), Sizes(OpGraph()), {}, resident_bytes, "fp32")


def test_shares_follow_speed_and_memory() -> None:
    assert shares([(0, 1)]) == (5, 3)
    assert shares([(1, 0)]) == (3, 5)
    assert shares([(0, 1), (1, 0)]) == (1, 1), "each place has a slow device"
    assert shares([(0, 1)], algorithm="even") == (1, 1)
    assert shares([(0, 1)], Cluster.parse("P100-16GB:2")) == (1, 1)
    assert shares([(0, 1)], resident_bytes=43 * 2 ** 30) == (11, 5)
    with pytest.raises(InfeasibleError, match="TaskGraph 't' on devices \\[0, 1\\]"):
        shares([(0, 1)], resident_bytes=64 * 2 ** 30)
