"""Searches against the simulator: the first plan is the one that plays fastest of all that there are."""
from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, List, Tuple

import numpy as np
import pytest

from benchmarks.measure import chosen
from whale_tf.cluster import Cluster
from whale_tf.planner import layers
from whale_tf.planner.amp import search as amp
from whale_tf.planner.amp.cost import AmpCosts, AmpStrategy
from whale_tf.planner.amp.placement import megatron
from whale_tf.planner.auto.choose import Request, choose
from whale_tf.planner.bounds import Bounds
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.measures import Allowed
from whale_tf.planner.search import search
from whale_tf.planner.simulated import ALGORITHM, simulated, simulator_of
from whale_tf.profiler.model_profile import ModelProfile, load_builtin

pytestmark = pytest.mark.once
WIDE = {"name": "wide", "batch_granularity": 1, "layers": [
    {"name": f"l{i}", "forward_flops": 1e11, "parameter_bytes": 2 * 10 ** 9, "output_bytes": 10 ** 5,
     "tensor_parallel_bytes": 10 ** 5, "activation_bytes": 10 ** 6} for i in range(3)]}


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["amp-homogeneous", "amp-het"])
def test_amps_first_plan_plays_fastest_of_all_its_strategies(cluster: str) -> None:
    profile, machines = load_builtin("gpt2-24"), Cluster.parse(cluster)
    costs = AmpCosts(profile, machines, 32)
    every = amp.search(costs)
    simulator = simulator_of(machines)
    bounds = Bounds(machines, simulator, ALGORITHM)
    plans = [one.candidate("amp", costs) for one in every]
    played = [simulated(one, machines, simulator=simulator) for one in plans]
    assert all(bounds.seconds(plan) <= one.latency_s for plan, one in zip(plans, played))
    best = min(one.latency_s for one in played if one.fits)
    assert search(profile, machines, 32, "amp").latency_s <= 1.05 * best


def test_plans_that_are_too_slow_are_not_played_and_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, machines = load_builtin("vgg-19"), Cluster.parse("amp-het")
    plays: List[str] = []

    def counted(found: Candidate, *more: Any) -> Candidate:
        plays.append(found.told)
        return simulated(found, *more)

    monkeypatch.setattr(layers, "simulated", counted)
    some = search(profile, machines, 64, "amp")
    few = len(plays)
    monkeypatch.setattr(layers.Layers, "least_seconds", lambda *_: 0.0)
    every = search(profile, machines, 64, "amp")
    assert 2 * few <= len(plays) - few and replace(some, search_seconds=0.0) == replace(every, search_seconds=0.0)


def test_all_searches_keep_a_tensor_parallel_answer_of_amp() -> None:
    """Layers of 8 GB with their states: only divided do two and more of them fit on devices of 16 GB."""
    profile, machines = ModelProfile.parse(WIDE), Cluster.parse("dapple-a:4")
    found = choose(profile, profile, machines, Request("all", None, None, 4))
    alone = search(profile, machines, 4, "amp")
    assert any(stage.strategy == "split" for stage in alone.stages)
    assert found.search == "amp" and found.latency_s == alone.latency_s


def test_benchmark_section_that_does_not_exist_is_named(capsys: pytest.CaptureFixture) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="layers")
    with pytest.raises(SystemExit):
        chosen(parser, {"layers": 1}, ["--only", "layer"])
    assert "--only has 'layer', expected some of layers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed, count", [(0, 8), pytest.param(1, 20, marks=pytest.mark.full)])
def test_random_small_clusters_get_the_plan_that_plays_fastest(seed: int, count: int) -> None:
    """AMP's first plan against all cuts of all its strategies, and DAPPLE's against those of them that divide no layer."""
    random = np.random.RandomState(seed)
    for _ in range(count):
        profile, cluster, batch = _drawn(random)
        layers, costs = len(profile.layers), AmpCosts(profile, cluster, batch)
        strategies = [AmpStrategy(degree, size, megatron(cluster, degree), (0, *inner, layers))
                      for degree in amp.degrees(profile, cluster) for size in amp.micro_batches(batch, degree.dp, 1)
                      for inner in itertools.combinations(range(1, layers), degree.pp - 1)]
        every = [amp.Estimated(one, costs.estimate(one)).candidate("amp", costs) for one in strategies]
        simulator = simulator_of(cluster)
        bounds = Bounds(cluster, simulator, ALGORITHM)
        played = [simulated(one, cluster, simulator=simulator) for one in every]
        for plan, one in zip(every, played):
            assert one.why_not or bounds.seconds(plan) <= one.latency_s * (1 + 1e-9)
        played = [one for one in played if one.fits]
        replicated = [one.latency_s for one in played if all(stage.strategy == "replicate" for stage in one.stages)]
        assert search(profile, cluster, batch, "amp").latency_s <= 1.03 * min(one.latency_s for one in played)
        assert search(profile, cluster, batch, "dapple", allowed=Allowed("none")).latency_s <= 1.03 * min(replicated)


def _drawn(random: np.random.RandomState) -> Tuple[ModelProfile, Cluster, int]:
    """Four to six layers, two nodes of one or two devices of two types, and a batch."""
    def one_of(*sizes: float) -> int:
        return int(random.choice(sizes))

    layers = [{"name": f"l{i}", "forward_flops": one_of(1e10, 2e10, 5e10, 2e11), "traffic_bytes": 1e8,
               "parameter_bytes": one_of(1e6, 1e7, 1e8), "output_bytes": one_of(1e5, 1e6), "activation_bytes": one_of(1e6, 1e7),
               "tensor_parallel_bytes": one_of(2e5, 8e5)} for i in range(random.randint(4, 7))]
    size, speed = random.randint(1, 3), int(random.choice([10, 25, 100]))
    nodes = [{"devices": f"{random.choice(['V100-16GB', 'T4', 'P100-16GB'])}:{size}", "links": "default",
              "nic": {"bandwidth_gbits_per_s": speed}} for _ in range(2)]
    profile = ModelProfile.parse({"name": "m", "batch_granularity": 1, "layers": layers})
    return profile, Cluster.parse({"name": "c", "nodes": nodes}), int(random.choice([8, 16]))
