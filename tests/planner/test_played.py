"""Searches against the simulator: the first plan is the one that plays fastest of all that there are."""
from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measure import chosen
from whale_tf.cluster import Cluster
from whale_tf.planner.amp import search as amp
from whale_tf.planner.amp.cost import Costs
from whale_tf.planner.auto.choose import Request, choose
from whale_tf.planner.search import amp_result, search
from whale_tf.planner.simulated import simulated
from whale_tf.profiler.model_profile import ModelProfile, load_builtin

pytestmark = pytest.mark.once
WIDE = {"name": "wide", "batch_granularity": 1, "layers": [
    {"name": f"l{i}", "forward_flops": 1e11, "parameter_bytes": 2 * 10 ** 9, "output_bytes": 10 ** 5,
     "tensor_parallel_bytes": 10 ** 5, "activation_bytes": 10 ** 6} for i in range(3)]}


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["amp-homogeneous", "amp-het"])
def test_amps_first_plan_plays_fastest_of_all_its_strategies(cluster: str) -> None:
    profile, machines = load_builtin("gpt2-24"), Cluster.parse(cluster)
    costs = Costs(profile, machines, 32)
    every = amp.search(costs)
    played = [simulated(replace(amp_result("amp", costs, every[number:], 0.0), profile=profile), machines)
              for number in range(len(every))]
    best = min(one.latency_s for one in played if one.fits)
    assert search(profile, machines, 32, "amp").latency_s <= 1.05 * best


def test_all_searches_keep_a_tensor_parallel_answer_of_amp() -> None:
    """Layers of 8 GB with their states: only divided do two and more of them fit on devices of 16 GB."""
    profile, machines = ModelProfile.parse(WIDE), Cluster.parse("dapple-a:4")
    found = choose(profile, profile, machines, Request("all", None, None, 4))
    alone = search(profile, machines, 4, "amp")
    assert any(stage.strategy == "split" for stage in alone.stages)
    assert found.search == "amp" and found.latency_s == alone.latency_s


def test_a_benchmark_section_that_does_not_exist_is_named(capsys: pytest.CaptureFixture) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="layers")
    with pytest.raises(SystemExit):
        chosen(parser, {"layers": 1}, ["--only", "layer"])
    assert "--only has 'layer', expected some of layers" in capsys.readouterr().err
