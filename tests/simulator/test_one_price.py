"""A built-in model has one price: every command answers the same step time and memory for the same plan."""
from __future__ import annotations

import json
from typing import Any, Dict, Tuple

import pytest

from tests.command_line import call
from whale_tf.cli import app
from whale_tf.errors import seconds_text
from whale_tf.plan import Plan
from whale_tf.simulator import model_names
from whale_tf.simulator.laws import LAYERS

pytestmark = pytest.mark.once
CLUSTERS = ("V100-32GB:2", "2xA100-80GB:1", "cpu:2", "H200-141GB:1,P100-16GB:1")
BATCH = "8"
MODELS = [name for name, has_layers in model_names().items() if has_layers]
SAMPLED = 5  # every fifth model runs without --full, each on another cluster
CASES = [pytest.param(model, cluster, id=f"{model}-{cluster}",
                      marks=() if number % SAMPLED == 0 and number // SAMPLED % len(CLUSTERS) == place else pytest.mark.full)
         for number, model in enumerate(MODELS) for place, cluster in enumerate(CLUSTERS)]


def answer(*arguments: str) -> Tuple[int, Dict[str, Any], str]:
    result = call(app, *arguments)
    assert "Traceback" not in result.output
    return result.exit_code, json.loads(result.stdout) if result.exit_code == 0 else {}, result.output


@pytest.mark.parametrize("model, cluster", CASES)
def test_all_commands_answer_the_same(model: str, cluster: str, tmp_path: Any) -> None:
    path, on = str(tmp_path / "plan.json"), ("--cluster", cluster, "--global-batch", BATCH)
    code, plan, told = answer("plan", "--model", model, *on, "--search", "data-parallel", "--recompute", "none", "--zero", "none",
                              "--offload", "none", "-o", path, "--json")
    if code:
        assert "GiB" in told
        _, simulated, _ = answer("simulate", "--model", model, *on, "--dp", "2", "--json")
        assert simulated["oom"]
        return
    _, simulated, _ = answer("simulate", "--plan", path, *on, "--json")
    _, compared, _ = answer("compare", path, *on, "--json")
    expected = pytest.approx(plan["latency_s"], rel=1e-9)
    assert simulated["step_time_s"] == expected and compared["step_time_s"] == expected
    peaks = [peak for peak in plan["peak_memory_bytes"] if peak]
    assert simulated["peak_memory_bytes"] == peaks == compared["peak_memory_bytes"] and 0 < simulated["mfu"] <= 1.0
    shown = call(app, "explain", path).stdout
    estimate = Plan.parse(path).estimate
    assert f"Estimated: {seconds_text(plan['latency_s'])}" in shown and "iB on a device" in shown
    assert list(estimate.peak_memory_bytes) == plan["peak_memory_bytes"]
    assert ("the layers of its profile" if estimate.times == LAYERS else "as TensorFlow runs it") in shown
    if plan["micro_batches"] == 1 and len(peaks) == 2 and "," not in cluster:  # the same, by its degrees
        _, uniform, _ = answer("simulate", "--model", model, *on, "--dp", "2", "--json")
        assert uniform["step_time_s"] == expected and uniform["peak_memory_bytes"] == peaks


def test_profile_keeps_its_own_times_and_says_so(tmp_path: Any) -> None:
    path, on = str(tmp_path / "plan.json"), ("--cluster", "V100-32GB:2", "--global-batch", BATCH)
    _, own, _ = answer("plan", "--profile", "bert-base", *on, "-o", path, "--json")
    _, model, _ = answer("plan", "--model", "bert-base", *on, "--json")
    _, simulated, _ = answer("simulate", "--plan", path, *on, "--json")
    assert simulated["step_time_s"] == pytest.approx(own["latency_s"], rel=1e-9) and own["latency_s"] < model["latency_s"]
    assert "the layers of its profile" in call(app, "plan", "--profile", "bert-base", *on).stdout
