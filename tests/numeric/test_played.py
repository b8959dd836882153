"""Plans are compared in simulation: the chosen one is never slower than the undivided graph or data parallelism."""
from __future__ import annotations

import functools

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from benchmarks.rhino import Case, Compared, compared, played_cases
from whale_tf.capture.captured import capture
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Request
from whale_tf.decide.search import OPTIMISM, Search, best_plan

SMALL = ("MLP, tiny", "MLP, wide", "encoder, tiny", "MoE, tiny", "ResNet, digits", "embedding, tiny")
CASES = [case for case in played_cases() if case.name in SMALL]


@functools.lru_cache(maxsize=None)
def results(case: Case) -> Compared:
    return compared(case)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} on {case.cluster}")
def test_chosen_plan_is_not_slower_than_doing_nothing_or_data_parallelism(case: Case) -> None:
    found = dict(results(case).plans)
    chosen = found.pop("chosen")
    assert {"undivided", "data-parallel"} <= set(found)
    assert all(chosen.latency_s <= other.latency_s * (1.0 if name != "division" else 1.01) for name, other in found.items())
    assert chosen.fits and len(chosen.peak_memory_bytes) == len(Cluster.parse(case.cluster))


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} on {case.cluster}")
def test_objective_of_a_division_is_nearly_what_it_takes(case: Case) -> None:
    """Rhino adds up what devices do beside each other, and does not count the ops that cut tensors and put them together."""
    plans, objective_s = results(case)
    if "division" in plans:
        found = plans["division"]
        assert found.is_played and OPTIMISM * objective_s <= found.latency_s <= 1.2 * objective_s


@pytest.mark.once
@pytest.mark.slow
def test_division_is_compiled_only_where_its_search_believes_in_it() -> None:
    """The chosen plan is played, in any case; what was not says so."""
    case = next(case for case in CASES if case.name == "MoE, tiny")
    wh.init(cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            tf.train.AdamOptimizer(1e-4).minimize(case.build(case.batch))
        captured, cluster, config = capture(graph), Cluster.parse(case.cluster), Config({"auto_parallel": "rhino"})
        search = Search(captured, Request(cluster, config))
        found, decision = best_plan(captured, Request(cluster, config))
    finally:
        wh.shutdown()
    assert found.is_played and decision.plan is found.plan and found.latency_s == min(
        one.latency_s for one in [*search.staged, *(one.found for one in search.divided)])
    waiting = [one.found for one in search.divided if one.decision is None and not one.found.why_not]
    assert waiting and all(one.assignment is not None and not one.is_played and "simulated" not in one.told for one in waiting)
