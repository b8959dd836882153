"""Plans are compared as played: the chosen one is never slower than the undivided graph or data parallelism."""
from __future__ import annotations

import functools
from typing import Any, Dict

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from benchmarks.rhino import Case, compared, played_cases
from whale_tf import searching
from whale_tf.capture.captured import capture
from whale_tf.capture.sizes import sized
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.rhino.executed import executed_seconds
from whale_tf.planner.sharding import Assignment

SMALL = ("MLP, tiny", "MLP, wide", "encoder, tiny", "MoE, tiny", "ResNet, digits", "embedding, tiny")
CASES = [case for case in played_cases() if case.name in SMALL]


@functools.lru_cache(maxsize=None)
def results(case: Case) -> Dict[str, Candidate]:
    return compared(case)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} on {case.cluster}")
def test_the_chosen_plan_is_not_slower_than_doing_nothing_or_data_parallelism(case: Case) -> None:
    found = results(case)
    chosen = found.pop("chosen")
    assert {"undivided", "data-parallel"} <= set(found)
    assert all(chosen.latency_s <= other.latency_s * (1.0 if name != "division" else 1.01) for name, other in found.items())
    assert chosen.fits and len(chosen.peak_memory_bytes) == len(Cluster.parse(case.cluster))


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} on {case.cluster}")
def test_the_objective_of_a_division_is_nearly_what_it_takes(case: Case) -> None:
    """Rhino adds up what devices do beside each other, so that it bounds the played time."""
    division = results(case).get("division")
    if division is not None:
        assert 0.85 * division.formula_latency_s <= division.latency_s <= 1.001 * division.formula_latency_s


@pytest.mark.once
@pytest.mark.parametrize("name", ["MLP, tiny", "encoder, tiny", "embedding, tiny"])
def test_the_undivided_graph_has_one_price(name: str) -> None:
    """Played as a Program, and as a division in which nothing is divided."""
    case = next(case for case in CASES if case.name == name)
    wh.init(cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            tf.train.AdamOptimizer(1e-4).minimize(case.build(case.batch))
        captured, cluster = capture(graph), Cluster.parse(case.cluster)
        found = searching.compared(graph, cluster, Config({"auto_parallel": "dapple"}))
        nothing: Any = Assignment({}, {}, {}, [])
        known = sized(captured.definitions, captured.graph, captured.sources, case.batch)
        expected = executed_seconds(known, nothing, cluster)
    finally:
        wh.shutdown()
    undivided = next(one for one in found if one.search == "undivided")
    assert undivided.latency_s == pytest.approx(expected, rel=1e-6)
    assert undivided.plan is not None and undivided.plan.task_graphs[0].devices == ((0,),)
