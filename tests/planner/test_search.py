"""Searches end to end: what they find is legal, and scored alike by another road."""
from __future__ import annotations

import json
from typing import List

import pytest

from tests.command_line import call
from whale_tf.cli import app
from whale_tf.cluster import Cluster
from whale_tf.errors import WhaleError
from whale_tf.plan import Plan
from whale_tf.planner.dapple.cost import Element, latency
from whale_tf.planner.search import search
from whale_tf.profiler.model_profile import load_builtin

SMALL = "V100-16GB:2,V100-16GB:2"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dapple", "amp"])
@pytest.mark.parametrize("model", ["bert-48@dapple", "vgg-19@dapple"])
def test_found_plan_is_legal_and_runs_through_json(method: str, model: str) -> None:
    found = search(model, SMALL, 16, method)
    profile = load_builtin(model)
    assert [stage.first_layer for stage in found.stages] == [0] + [s.last_layer + 1 for s in found.stages[:-1]]
    assert found.stages[-1].last_layer == len(profile.layers) - 1
    used = [device for stage in found.stages for device in stage.all_devices]
    assert sorted(used) == list(range(4))
    assert found.latency_s > 0 and len(found.peak_memory_bytes) == 4
    assert found.fits == all(
        peak <= device.memory_bytes for peak, device in zip(found.peak_memory_bytes, Cluster.parse(SMALL).devices))
    plan = found.to_plan(profile)
    assert Plan.parse(plan.to_json()) == plan
    assert plan.estimate.search.startswith(method)


def test_latency_is_the_papers_equation_for_one_stage() -> None:
    one = [Element(2.0, 4.0, 1.0, 6.0)]
    assert latency(one, 5) == pytest.approx(2.0 + 4 * 6.0 + 4.0 + 1.0)


@pytest.mark.parametrize("arguments,words", [
    (["--model", "bert-4b"], "bert-48@dapple"), (["--model", "bert-48@dapple", "--search", "dappel"], "dapple")])
def test_command_line_names_what_is_wrong(arguments: List[str], words: str) -> None:
    base = ["plan", "--cluster", "cpu:2", "--global-batch", "4"]
    result = call(app, *base, *arguments)
    assert result.exit_code != 0
    assert words in str(result.output) + str(result.exception)


@pytest.mark.slow
def test_command_line_prints_one_object() -> None:
    result = call(app, *f"plan --model vgg-19@dapple --cluster {SMALL} --global-batch 16 --json".split())
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert {"search", "kind", "stages", "micro_batches", "latency_s", "peak_memory_bytes", "search_seconds"} <= set(found)


def test_model_that_fits_nowhere_is_refused_with_the_memory_it_needs() -> None:
    with pytest.raises(WhaleError, match="GB|GiB|bytes"):
        search("moe-32e-10b", "T4:2", 8, "dapple")
