"""What a stage costs, by hand."""
from __future__ import annotations

from typing import Dict, List, Tuple

import pytest

from whale_tf.cluster import Cluster
from whale_tf.planner.measures import Measures
from whale_tf.planner.stage_costs import StageCosts, StageMemory, Transfer, Work
from whale_tf.profiler.model_profile import ModelProfile

LAYERS: List[Dict[str, object]] = [
    {"name": "words", "parameter_bytes": 8, "activation_bytes": 100, "output_bytes": 10, "tied": "words"},
    {"name": "wide", "parameter_bytes": 6, "activation_bytes": 400, "output_bytes": 20, "tensor_parallel_bytes": 1},
    {"name": "again", "parameter_bytes": 8, "activation_bytes": 200, "tied": "words"}]
TIMES = ((1.0, 2.0), (3.0, 5.0), (0.5, 1.0))


def costs(**measures: str) -> StageCosts:
    """On a fast and a slow device; times for 4 samples."""
    kinds = {name: {"kind": "CPU", "memory_gib": gib, "fp32": 1e9, "memory_bandwidth_bytes_per_s": 1e9}
             for name, gib in (("F", 2), ("S", 1))}
    nodes = [{"devices": ["F", "S"], "nic": {"bandwidth_bytes_per_s": 8.0, "latency_s": 0.5}, "links": "default"}]
    layers = [dict(layer, measured=[
        {"device": name, "tensor_parallel": 1, "batch": 4, "forward_s": f * by, "backward_s": b * by}
        for name, by in (("F", 1), ("S", 2))]) for layer, (f, b) in zip(LAYERS, TIMES)]
    profile = ModelProfile.parse({"name": "drawn", "optimizer_bytes_per_parameter_byte": 2, "layers": layers})
    return StageCosts(profile, Cluster.parse({"name": "two", "device_types": kinds, "nodes": nodes}), Measures(**measures))


@pytest.mark.parametrize("recompute,expected", [
    ("none", (0.0, 700.0)),  # a micro-batch in flight holds everything
    ("full", (400.0, 10.0 + 10.0 + 20.0)),  # the inputs of layers; the largest layer is computed again at a time
    ("stage", (700.0, 10.0))])  # its own input
def test_memory(recompute: str, expected: Tuple[float, float]) -> None:
    """The tied parameter counts once: 14 bytes, with their gradients and two states each."""
    again, each = expected
    group = costs(recompute=recompute).group((0, 1), 3)
    found = group.memory(0, 3)
    assert found == StageMemory(14 * 4 + again * 3, each * 3, group.limit) and found.bytes(5) == found.fixed + 5 * found.each
    assert group.limit == group.memory(1, 2).limit < costs().group((0,), 3).limit  # of the smaller device
    fixed, held = group.all_memory()
    assert all((fixed[a, b], held[a, b]) == group.memory(a, b)[:2] for b in range(1, 4) for a in range(b))


def test_layer_that_cannot_be_split_is_held_whole() -> None:
    sizes = costs().bytes(2)
    assert sizes.parameters[0][3] == 8 + 6 / 2 and sizes.each[0][3] == 100 + 400 / 2 + 200


def test_slowest_device_decides_and_recomputation_is_backward_work() -> None:
    assert costs().group((0,), 4).work(1, 3) == Work(3.5, 6.0)
    assert costs().group((0, 1), 4).work(1, 3) == Work(7.0, 12.0)
    assert costs(recompute="full").group((0, 1), 4).work(1, 3) == Work(7.0, 19.0)


def test_transfers() -> None:
    assert costs().ring((0,)) == Transfer() and Transfer.slowest([]) == Transfer()
    three = StageCosts(costs().profile, Cluster.parse("dapple-b:3"))
    link = three.cluster.bottleneck((0, 1, 2))
    assert three.ring((0, 1, 2)).seconds(6.0) == pytest.approx(4 * (6.0 / 3 / link.bandwidth_bytes_per_s + link.latency_s))
    assert Transfer.slowest([Transfer(1.0, 4.0), Transfer(2.0, 3.0)]).seconds(10.0) == 24.0
