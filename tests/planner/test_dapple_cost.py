"""Eq. 1 to 3, playing a schedule, device sets."""
from __future__ import annotations

import itertools
from typing import Any, List, Sequence

import pytest

from tests.planner.dapple_cases import case
from whale_tf.cluster import Cluster
from whale_tf.planner.dapple import device_sets
from whale_tf.planner.dapple.cost import DappleCosts, Element, LayerStage, latency
from whale_tf.planner.dapple.device_sets import Servers
from whale_tf.planner.dapple.rehearse import rehearse
from whale_tf.profiler.model_profile import ModelProfile


def chain(*stages: Sequence[float]) -> List[Element]:
    """(F, B, AR) rows, free wires between them."""
    made: List[Element] = []
    for row in stages:
        made += ([Element(0.0, 0.0)] if made else []) + [Element(*row)]
    return made


@pytest.mark.parametrize("stages,micro_batches", list(itertools.product((1, 2, 4), (1, 3, 8))))
def test_equal_stages_take_the_textbook_time(stages: int, micro_batches: int) -> None:
    elements = chain(*[(1.0, 2.0)] * stages)
    expected = (micro_batches + stages - 1) * 3.0
    assert latency(elements, micro_batches) == pytest.approx(expected)
    assert rehearse(elements, micro_batches, [stages - s for s in range(stages)]) == pytest.approx(expected)


def test_latency_by_hand() -> None:
    """Three stages, the middle one busiest, gradients of the last and the first to sum."""
    elements = chain((1, 2, 10), (2, 3, 0), (1, 1, 30))
    # pivot 1: warm-up 1 + 2, steady 4 x 5, ending max(10 + 2 + 3, 0 + 3, 30 - 0) = 30
    assert latency(elements, 5) == 3 + 20 + 30


def test_memory_lengthens_the_cycle() -> None:
    """Room for one micro-batch: nothing overlaps, each takes its round trip."""
    elements = [Element(1.0, 1.0, 0.0, depth=1), Element(0.0, 0.0), Element(1.0, 1.0)]
    assert latency(elements, 6) == pytest.approx(6 * 4.0)
    assert rehearse(elements, 6, [1, 1]) == pytest.approx(6 * 4.0)


def test_wires_take_their_turn() -> None:
    """A wire of 3 between stages of 2: with enough micro-batches in flight it sets the pace in each direction."""
    elements = [Element(1.0, 1.0), Element(3.0, 3.0), Element(1.0, 1.0)]
    assert rehearse(elements, 1, [1, 1]) == pytest.approx(10.0)
    slow, fast = rehearse(elements, 20, [2, 1]), rehearse(elements, 20, [3, 1])
    assert fast < slow  # DAPPLE Table IV: policy B helps where the ratio is high


def test_slice_is_a_whole_number_of_samples() -> None:
    profile = ModelProfile.parse({"name": "m", "batch_granularity": 1, "layers": [
        {"name": "a", "forward_flops": 1e9, "output_bytes": 0}, {"name": "b", "forward_flops": 1e9}]})
    costs = DappleCosts(profile, Servers(Cluster.parse("dapple-b:4")), 8, 1)
    three = costs.times(LayerStage(0, 1, (0, 0, 0, 0), (1, 1, 1, 0)))[0]
    one = costs.times(LayerStage(0, 1, (0, 0, 0, 0), (1, 0, 0, 0)))[0]
    assert three == pytest.approx(one * 3 / 8)  # ceil(8 / 3) of 8


def wire(costs: DappleCosts, used: tuple, taken: tuple, receivers: tuple) -> float:
    return costs.wire(1, used, taken, receivers)


def test_wires_know_where_slices_are() -> None:
    profile = ModelProfile.parse({"name": "m", "batch_granularity": 1, "layers": [
        {"name": "a", "output_bytes": 10 ** 9}, {"name": "b"}]})
    costs = DappleCosts(profile, Servers(Cluster.parse("dapple-a")), 16, 1)
    nic = 16e9 / 3.125e9
    assert wire(costs, (0, 0), (8, 0), (0, 8)) == pytest.approx(nic, rel=1e-3)  # all of it through one adapter
    assert wire(costs, (0, 0), (8, 0), (0, 2)) == pytest.approx(nic, rel=1e-3)
    assert wire(costs, (0, 0), (4, 4), (4, 0)) == pytest.approx(nic / 2, rel=1e-3)
    assert wire(costs, (0, 0), (4, 4), (4, 4)) < nic / 8  # the same shares: nothing crosses


def test_interchangeable_servers_are_matched() -> None:
    servers = Servers(Cluster.parse("dapple-a:24"))
    assert servers.matched((4, 4, 0), (1, 3, 0), (3, 1, 0)) == (3, 1, 0)
    assert servers.canonical_order((0, 4, 0), (0, 2, 8)) == (2, 1, 0)
    mixed = Servers(Cluster.parse("V100-16GB:2,T4:2"))
    assert mixed.classes == (0, 1)
    assert mixed.matched((0, 0), (1, 2), (2, 1)) == (1, 2)


def test_all_sets_leave_out_only_exchanges() -> None:
    servers = Servers(Cluster.parse("dapple-a"))
    sets = list(servers.all_sets((0, 0)))
    assert len(sets) == len(set(sets)) == 9 * 10 // 2 - 1
    assert len(list(servers.all_sets((4, 0)))) == 5 * 9 - 1
    assert servers.count_states() == 45 and Servers(Cluster.parse("dapple-b")).count_states() == 17


@pytest.mark.parametrize("policy,expected", [
    (device_sets.fresh_first, (0, 4, 0)), (device_sets.append_first, (4, 0, 0)), (device_sets.scatter_first, (4, 0, 0))])
def test_policies_of_figure_5(policy: Any, expected: tuple) -> None:
    assert policy((6, 6, 6), (2, 0, 0), 4) == expected


def test_policies_fill_up_elsewhere() -> None:
    assert device_sets.scatter_first((4, 4), (0, 0), 6) == (3, 3)
    assert device_sets.scatter_first((4, 4), (2, 0), 4) == (2, 2)
    assert device_sets.fresh_first((4, 4), (2, 0), 6) == (2, 4)
    assert device_sets.append_first((4, 4), (2, 0), 6) == (2, 4)


def test_recomputation_trades_time_for_memory() -> None:
    problem = case(5)
    plain = problem._replace(recompute=False).costs()
    again = problem._replace(recompute=True).costs()
    stage = LayerStage(0, plain.num_layers, plain.servers.none(), plain.servers.sizes)
    assert again.times(stage)[1] == pytest.approx(plain.times(stage)[1] + plain.times(stage)[0])
    assert again.memory(stage).fixed > plain.memory(stage).fixed
