from __future__ import annotations

import pytest

from tests.simulator.synthetic import flat_cluster
from whale_tf.cluster import Cluster
from whale_tf.errors import ConfigError
from whale_tf.simulator.laws import default_laws
from whale_tf.simulator.network import FLAT, Network, Protocol, fair_share
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECV, Group

SIZE = 1e8


def seconds(network: Network, kind: str, devices: tuple, size: float = SIZE) -> float:
    best = network.best(kind, Group(devices), size)
    return best.latency_s + size * best.seconds_per_byte


@pytest.mark.parametrize("count", [2, 4, 7])
@pytest.mark.parametrize(
    "kind, steps, share", [(ALL_REDUCE, 2, 2.0), (ALL_GATHER, 1, 1.0), (REDUCE_SCATTER, 1, 1.0), (ALL_TO_ALL, 1, 1.0)]
)
def test_ring_is_alpha_beta(kind: str, steps: int, share: float, count: int) -> None:
    network = Network(flat_cluster(count, 1e9, 1e-5), algorithms=("ring",))
    alpha = steps * (count - 1) * 1e-5
    assert seconds(network, kind, tuple(range(count))) == pytest.approx(alpha + share * (count - 1) / count * SIZE / 1e9)


def test_tree_wins_for_small_messages_and_ring_for_large_ones() -> None:
    network = Network(flat_cluster(16, 1e9, 1e-5))
    group = Group(tuple(range(16)))
    assert network.best(ALL_REDUCE, group, 10.0).name == "tree"
    assert network.best(ALL_REDUCE, group, 1e9).name == "ring"


@pytest.mark.parametrize("kind", [ALL_GATHER, REDUCE_SCATTER])
def test_hierarchical_gather_is_half_of_an_all_reduce(kind: str) -> None:
    network, group = Network(Cluster.parse("a100:32")), Group(tuple(range(32)))
    half, whole = (next(one for one in network.algorithms_of(name, group) if one.name == "hierarchical")
                   for name in (kind, ALL_REDUCE))
    assert 2 * half.latency_s == pytest.approx(whole.latency_s)
    assert 2 * half.seconds_per_byte == pytest.approx(whole.seconds_per_byte)
    assert network.best(kind, group, 1e5).name == "hierarchical", "7 hops inside and 3 between nodes, not 31"


@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER])
def test_hops_inside_the_slowest_node_count(kind: str) -> None:
    """Whichever node comes first: one has NVLink, the other PCIe."""
    found = [next(one.latency_s for one in Network(Cluster.parse(name)).algorithms_of(kind, Group((0, 1, 2, 3)))
                  if one.name == "hierarchical") for name in ("V100-32GB:2,P100-16GB:2", "P100-16GB:2,V100-32GB:2")]
    assert found[0] == found[1]


def test_hierarchical_wins_on_fast_nodes_with_as_many_adapters() -> None:
    network = Network(Cluster.parse("a100:32"))
    assert network.best(ALL_REDUCE, Group(tuple(range(32))), 1e8).name == "hierarchical"


def test_nvlink_mesh_sums_its_channels() -> None:
    """Eight V100 of a DGX-1: six lanes of 20 GB/s leave every GPU."""
    network = Network(Cluster.parse("hc2"), algorithms=("ring",))
    assert seconds(network, ALL_REDUCE, tuple(range(8))) == pytest.approx(14 * 3.4e-6 + 2 * 7 / 8 * SIZE / 120e9)


def test_ring_over_nodes_is_as_fast_as_the_adapter() -> None:
    network = Network(Cluster.parse("hc2"), algorithms=("ring",))
    slowest = min(12e9, 100e9 / 8, 10e9)  # PCIe slot, adapter, uplink to it
    assert seconds(network, ALL_REDUCE, tuple(range(16))) == pytest.approx(2 * 15 / 16 * SIZE / slowest, rel=0.02)


def test_nccl_sends_from_next_to_the_adapter() -> None:
    """12.2 of an adapter's 12.5 GB/s were measured on 4 nodes of 8 V100 (NVIDIA/nccl-tests issue 29); our law says 6% less."""
    law = default_laws().framework
    network = Network(Cluster.parse("hc2"), {ALL_REDUCE: 1.0 / law.all_reduce}, FLAT, law.protocols, near_adapters=True)
    bus = 2 * 31 / 32 * 1e9 / seconds(network, ALL_REDUCE, tuple(range(32)), 1e9)
    assert bus == pytest.approx(12.2e9, rel=0.06) and network.best(ALL_REDUCE, Group(tuple(range(32))), 1e9).name == "ring"


def test_protocol_for_small_messages_and_one_for_large_ones() -> None:
    protocols = (Protocol("", 8e-6), Protocol("low latency", 4e-6, 0.25, 0.5))
    network = Network(flat_cluster(4, 1e9, 1e-5), algorithms=("ring",), protocols=protocols)
    found = {one.name: one for one in network.algorithms_of(ALL_REDUCE, Group((0, 1, 2, 3)))}
    assert found["ring"].latency_s == pytest.approx(8e-6 + 6e-5) and found["ring, low latency"].latency_s == pytest.approx(1.9e-5)
    assert found["ring, low latency"].seconds_per_byte == pytest.approx(2 * found["ring"].seconds_per_byte)
    assert dict(found["ring, low latency"].loads)[0] == pytest.approx(2 * dict(found["ring"].loads)[0])
    assert [network.best(ALL_REDUCE, Group((0, 1, 2, 3)), size).name for size in (1e3, 1e6)] == ["ring, low latency", "ring"]


def test_point_to_point_adds_what_shares_a_link() -> None:
    network = Network(flat_cluster(3))
    group = Group((0, 1, 2), ((0, 1, 0.5), (0, 2, 0.5)))
    assert network.best(SEND_RECV, group, SIZE).seconds_per_byte == pytest.approx(1.0 / 1e9)


@pytest.mark.parametrize("name, devices", [("hc2", (0, 3, 9, 17, 18)), ("a100:16", tuple(range(16))), ("hc1", (0, 1, 5))])
def test_all_to_all_loads_are_those_of_all_pairs(name: str, devices: tuple) -> None:
    network = Network(Cluster.parse(name))
    pairs: dict = {}
    for a in devices:
        for b in devices:
            for link in network.path(a, b) if a != b else ():
                pairs[link] = pairs.get(link, 0.0) + 1.0 / len(devices)
    (algorithm,) = network.algorithms_of(ALL_TO_ALL, Group(devices))
    assert dict(algorithm.loads) == pytest.approx(pairs)


def test_correction_factor_of_a_collective() -> None:
    plain, corrected = Network(flat_cluster(4)), Network(flat_cluster(4), {ALL_GATHER: 1.5})
    assert seconds(corrected, ALL_GATHER, (0, 1, 2, 3)) == 1.5 * seconds(plain, ALL_GATHER, (0, 1, 2, 3))
    assert seconds(corrected, ALL_REDUCE, (0, 1)) == seconds(plain, ALL_REDUCE, (0, 1))


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ring'"):
        Network(flat_cluster(2), algorithms=("rign",))


@pytest.mark.parametrize(
    "demands, level",
    [
        ([(10.0, 1)], float("inf")),
        ([(10.0, 2)], 5.0),
        ([(10.0, 1), (10.0, 3)], 2.5),
        ([(2.0, 1), (10.0, 1)], 8.0),
        ([(2.0, 1), (10.0, 2)], 4.0),
        ([(5.0, 2)], float("inf")),
        ([(1.0, 4), (6.0, 1)], float("inf")),
        ([(1.0, 4), (7.0, 1)], 6.0),
    ],
)
def test_fair_share_fills_the_link_and_starves_nobody(demands: list, level: float) -> None:
    assert fair_share(10.0, demands) == pytest.approx(level)
    used = sum(min(demand, level) * count for demand, count in demands)
    assert used == pytest.approx(min(10.0, sum(demand * count for demand, count in demands)))
