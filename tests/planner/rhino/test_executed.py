"""What an answer takes as the executor runs it: schedules worked out by hand."""
from __future__ import annotations

from typing import Any, Dict

import pytest

from tests.planner.rhino.graphs import Network
from whale_tf.cluster import Cluster
from whale_tf.patterns.spread import everywhere, once, partial, shard
from whale_tf.patterns.strategy import SHARDS, Strategy
from whale_tf.planner.rhino.assignment import assignment_of
from whale_tf.planner.rhino.executed import executed_seconds
from whale_tf.planner.rhino.search import search
from whale_tf.planner.sharding import Assignment
from whale_tf.profiler.op_cost import FREE, OpCost
from whale_tf.profiler.op_time import LAUNCH_S, UTILIZATION, op_seconds

RATE, MEMORY, LINK, LATENCY = 1e9, 1e12, 1e9, 1e-3


def machines(count: int) -> Cluster:
    kind = {"kind": "CPU", "memory_gib": 64, "fp32": RATE, "memory_bandwidth_bytes_per_s": MEMORY}
    links = {"local": {"bandwidth_gbytes_per_s": LINK / 1e9, "latency_s": LATENCY}}
    nodes = [{"devices": [f"d:{count}"], "links": links}]
    return Cluster.parse({"name": "c", "device_types": {"d": kind}, "nodes": nodes})


def nothing_divided(**fields: Any) -> Assignment:
    values: Dict[str, Any] = dict(dict(strategies={}, variables={}, home={}, choices=[]), **fields)
    return Assignment(**values)


def test_seconds_of_an_op() -> None:
    device = machines(1).devices[0]
    assert op_seconds(FREE, device, "float32") == 0
    assert op_seconds(OpCost(3e9, 1e12, True), device, "float32") == pytest.approx(LAUNCH_S + 3 / UTILIZATION)
    assert op_seconds(OpCost(3e9, 1e12, True), device, "float32", 2e12) == pytest.approx(LAUNCH_S + 3 / UTILIZATION + 2)
    assert op_seconds(OpCost(3e9, 2e12), device, "float32") == pytest.approx(LAUNCH_S + 2)


@pytest.mark.parametrize("count", [1, 4])
def test_what_is_not_divided_runs_once(count: int) -> None:
    """The sum of all ops, however many devices there are."""
    graph = Network(64, [1000, 2000], trained=False).graph
    product = 2 * 64 * 1000 * 2000 / (RATE * UTILIZATION) + 4 * 1000 * 2000 / MEMORY
    relu = 2 * 4 * 64 * 2000 / MEMORY
    expected = product + relu + 2 * LAUNCH_S
    assert executed_seconds(graph, nothing_divided(), machines(count)) == pytest.approx(expected)


def test_operands_are_sent_and_terms_added_up_on_the_first_device() -> None:
    """The product divided along its inner dimension: parts of x are sent, terms of the sum come back."""
    graph = Network(64, [1000, 2000], trained=False).graph
    product, weight = graph.op("layer_0/MatMul"), graph.op("layer_0/w")
    halves = (500, 500)
    row = Strategy("row", SHARDS, (shard(1, halves), shard(0, halves)), (partial,))
    found = nothing_divided(strategies={product.id: row}, variables={weight.id: shard(0, halves)}, home={product.id: 0})
    there = LATENCY + 4 * 64 * 500 / LINK
    half = LAUNCH_S + 64 * 1000 * 2000 / (RATE * UTILIZATION) + 4 * 500 * 2000 / MEMORY
    back = LATENCY + 4 * 64 * 2000 / LINK
    adding = LAUNCH_S + 3 * 4 * 64 * 2000 / MEMORY
    relu = LAUNCH_S + 2 * 4 * 64 * 2000 / MEMORY
    assert executed_seconds(graph, found, machines(2)) == pytest.approx(there + half + back + adding + relu)


def test_what_all_devices_need_is_sent_to_each() -> None:
    """Columns on three devices: the first one's link carries x twice, and gathers two thirds of the result."""
    graph = Network(64, [1000, 3000], trained=False).graph
    product, weight = graph.op("layer_0/MatMul"), graph.op("layer_0/w")
    thirds = shard(1, (1000,) * 3)
    column = Strategy("column", SHARDS, (everywhere, thirds), (thirds,))
    found = nothing_divided(strategies={product.id: column}, variables={weight.id: thirds}, home={product.id: 0})
    seconds = executed_seconds(graph, found, machines(3))
    sent, part = 4 * 64 * 1000, LAUNCH_S + 2 * 64 * 1000 * 1000 / (RATE * UTILIZATION) + 4e6 / MEMORY
    relu = LAUNCH_S + 2 * 4 * 64 * 3000 / MEMORY
    assert seconds == pytest.approx(2 * LATENCY + 2 * sent / LINK + part + 2 * 4 * 64 * 1000 / LINK + relu, rel=1e-6)


def test_tensors_are_sent_once_for_all_who_need_them() -> None:
    network = Network(64, [1000, 2000], trained=False)
    x, halves = network.graph.tensor("x"), shard(0, (32, 32))
    twice = network.add("Relu", "again", (x,), (64, 1000))
    first = Strategy("rows", SHARDS, (halves,), (halves,))
    ops = [network.graph.producer(twice).id]
    one = executed_seconds(network.graph, nothing_divided(strategies=dict.fromkeys(ops, first)), machines(2))
    ops.append(network.graph.producer(network.add("Relu", "more", (x,), (64, 1000))).id)
    two = executed_seconds(network.graph, nothing_divided(strategies=dict.fromkeys(ops, first)), machines(2))
    assert two - one < LATENCY / 2
    assert once not in first.needs


def test_model_replicas_sum_their_gradients() -> None:
    """Nothing is divided inside: each replica is as one device, then a gradient is sent, added up and sent back."""
    graph = Network(64, [1000, 2000]).graph
    gradient = graph.tensor("gradients/layer_0/W")
    alone = executed_seconds(graph, nothing_divided(settled={gradient: once}), machines(1))
    size = 4 * 1000 * 2000
    adding = LAUNCH_S + 3 * size / MEMORY
    both = executed_seconds(graph, nothing_divided(settled={gradient: once}), machines(2), 2)
    assert both == pytest.approx(alone + 2 * (LATENCY + size / LINK) + adding)
    assert executed_seconds(graph, nothing_divided(), machines(2), 2) == pytest.approx(
        executed_seconds(graph, nothing_divided(), machines(1)))


def test_dividing_pays_where_arithmetic_is_slow_and_not_where_links_are() -> None:
    graph = Network(4096, [256, 256, 256]).graph
    divided = assignment_of(search(graph, machines(4), shapes=[(4,)]))
    whole = executed_seconds(graph, nothing_divided(), machines(4))
    assert executed_seconds(graph, divided, machines(4)) < whole / 2
    slow_links = Cluster.parse("dapple-c:4")
    assert executed_seconds(graph, divided, slow_links) > executed_seconds(graph, nothing_divided(), slow_links)
