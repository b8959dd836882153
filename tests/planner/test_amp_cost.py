"""AMP's cost model by hand, placements and searches."""
from __future__ import annotations

from typing import Any

import pytest

from whale_tf.cluster import Cluster
from whale_tf.planner.amp.cost import AmpCosts, AmpStrategy, Degrees, tensor_degrees
from whale_tf.planner.amp.placement import megatron
from whale_tf.planner.amp.search import degrees, micro_batches
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import Measurement, ModelProfile, load_builtin

PEAK = 15.7e12
MB = 10 ** 6


def profile(layers: int = 4, **changes: Any) -> ModelProfile:
    row = dict({"forward_flops": PEAK * 0.75 * 1e-3, "output_bytes": 10 * MB, "parameter_bytes": 100 * MB,
                "tensor_parallel_bytes": 20 * MB}, **changes)
    return ModelProfile.parse({"name": "m", "batch_granularity": 1,
                               "layers": [dict(row, name=f"l{i}") for i in range(layers)]})


def two_nodes(type_name: str = "V100-16GB", other: str = "V100-16GB") -> Cluster:
    """Two nodes of two devices, 10 GB/s inside and 1 GB/s between them, no latency."""
    inner = {"pcie": {"bandwidth_gbytes_per_s": 10, "latency_us": 0}}
    nic = {"bandwidth_gbytes_per_s": 1, "latency_us": 0}
    return Cluster.parse({"name": "two", "nodes": [
        {"devices": f"{name}:2", "links": inner, "nic": nic} for name in (type_name, other)]})


def estimate(costs: AmpCosts, degree: Degrees, size: int, cuts: tuple) -> Any:
    return costs.estimate(AmpStrategy(degree, size, megatron(costs.cluster, degree), cuts))


READ_S = 3 * 100 * MB / 900e9  # parameters once forward, twice backward


def test_equations_3_to_5_by_hand() -> None:
    costs = AmpCosts(profile(), two_nodes(), 8)
    got = estimate(costs, Degrees(2, 2, 1), 1, (0, 1, 4))
    layer = 3e-3 + READ_S
    edge = 2 * 10 * MB / 1e9
    assert got.pipeline_s == pytest.approx(3 * 3 * layer + edge + 4 * layer)  # gas 4, the slow stage has three layers
    ring = 2 * (1 / 2) * 300 * MB / 10e9
    assert got.allreduce_s == pytest.approx(ring)
    assert got.seconds == got.pipeline_s + got.allreduce_s


def test_blocking_messages_are_part_of_the_cycle() -> None:
    layer, edge = 3e-3 + READ_S, 2 * 10 * MB / 1e9
    got = estimate(AmpCosts(profile(), two_nodes(), 8, blocking=True), Degrees(2, 2, 1), 1, (0, 2, 4))
    assert got.pipeline_s == pytest.approx(3 * (2 * layer + edge) + edge + 4 * layer)


def test_tensor_parallelism_sums_forward_and_backward() -> None:
    costs = AmpCosts(profile(), two_nodes(), 8)
    got = estimate(costs, Degrees(2, 1, 2), 2, (0, 2, 4))
    layer = 2 * 3e-3 / 2 + READ_S / 2 + 2 * (2 * (1 / 2) * 2 * 20 * MB / 10e9)
    assert got.pipeline_s == pytest.approx(3 * 2 * layer + 2 * 2 * 10 * MB / 1e9 + 4 * layer)


def test_rings_share_the_adapter() -> None:
    """dp over both nodes: with two tensor-parallel ranks two rings leave each node."""
    alone = estimate(AmpCosts(profile(), two_nodes(), 8), Degrees(1, 4, 1), 1, (0, 4)).allreduce_s
    assert alone == pytest.approx(2 * (3 / 4) * 400 * MB / 1e9)
    shared = estimate(AmpCosts(profile(), two_nodes(), 8), Degrees(1, 2, 2), 1, (0, 4)).allreduce_s
    assert shared == pytest.approx(2 * 2 * (1 / 2) * 200 * MB / 1e9)
    paper = estimate(AmpCosts(profile(), two_nodes(), 8, shared_adapters=False), Degrees(1, 2, 2), 1, (0, 4)).allreduce_s
    assert paper == pytest.approx(shared / 2)


def test_each_stage_has_the_speed_of_its_devices() -> None:
    """T4 computes at 8.1 TFLOPS and reads at 300 GB/s; the exact assignment gives it fewer layers."""
    mixed = AmpCosts(profile(12, parameter_bytes=0), two_nodes(other="T4"), 8)
    degree = Degrees(2, 2, 1)
    strategy = mixed.assign(degree, 1, megatron(mixed.cluster, degree))
    assert strategy is not None and strategy.cuts == (0, 8, 12)
    slow = 4 * 3e-3 * 15.7 / 8.1
    assert mixed.estimate(strategy).pipeline_s == pytest.approx(3 * 8 * 3e-3 + 8 * 3e-3 + slow + 2 * 10 * MB / 1e9)


def test_memory_counts_the_micro_batches_in_flight() -> None:
    costs = AmpCosts(profile(activation_bytes=3000 * MB), two_nodes(), 8)
    got = estimate(costs, Degrees(2, 2, 1), 1, (0, 2, 4))
    fixed, kept = 4 * 200 * MB, 2 * 3000 * MB
    assert got.peak_bytes == (fixed + 2 * kept, fixed + 2 * kept, fixed + kept, fixed + kept) and got.fits
    split = estimate(costs, Degrees(2, 1, 2), 1, (0, 2, 4))
    assert split.peak_bytes[0] == (fixed + 2 * kept) // 2
    assert not estimate(costs, Degrees(2, 2, 1), 4, (0, 2, 4)).fits


def test_cuts_fit_memory_where_some_do() -> None:
    """The first layer holds most of the memory and none of the work, so the balanced cut does not fit."""
    rows = [{"name": f"l{i}", "forward_flops": PEAK * 0.75 * 1e-3, "output_bytes": 0, "parameter_bytes": size * MB}
            for i, size in enumerate((1800, 1500, 1500, 1500, 10, 10))]
    costs = AmpCosts(ModelProfile.parse({"name": "m", "batch_granularity": 1, "layers": rows}), two_nodes(), 8)
    degree = Degrees(2, 2, 1)
    placement = megatron(costs.cluster, degree)
    strategy = costs.assign(degree, 1, placement)
    assert strategy is not None and strategy.cuts == (0, 2, 6) and costs.estimate(strategy).fits
    assert not costs.estimate(AmpStrategy(degree, 1, placement, (0, 3, 6))).fits


def test_tied_parameters_once() -> None:
    costs = StageCosts(profile(3, tied="words"), two_nodes())
    assert costs.bytes(1).parameters[0][3] == 100 * MB and costs.bytes(2).parameters[0][3] == 50 * MB


def test_megatron_placement_keeps_tensor_ranks_in_a_node() -> None:
    placement = megatron(Cluster.parse("amp-homogeneous"), Degrees(2, 2, 4))
    assert placement.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]


def test_degrees_and_micro_batches() -> None:
    cluster = Cluster.parse("amp-homogeneous")
    every = list(degrees(load_builtin("gpt2-24"), cluster))
    assert all(d.pp * d.dp * d.tmp == 16 and d.tmp in (1, 2, 4) for d in every) and len(every) == 12
    assert micro_batches(32, 4, 1) == [1, 2, 4, 8] and micro_batches(32, 4, 4) == [4, 8] and micro_batches(32, 3, 1) == []
    assert micro_batches(8, 8, 2) == [1]


def test_only_measured_tensor_degrees() -> None:
    points = tuple(Measurement(device="T4", tensor_parallel=n, batch=1, forward_s=1.0, backward_s=1.0) for n in (1, 2))
    measured = ModelProfile.parse({"name": "m", "batch_granularity": 1, "layers": [
        {"name": "l", "tensor_parallel_bytes": 8, "measured": points}]})
    assert tensor_degrees(measured, Cluster.parse("amp-homogeneous")) == [1, 2]
    assert tensor_degrees(profile(), Cluster.parse("amp-homogeneous")) == [1, 2, 4]
