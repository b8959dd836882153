"""``whale profile`` of scripts and model files, and from there to a plan that runs."""
from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, List

import numpy as np
import pytest

import whale_tf as wh
from tests.cli.scripts import SCRIPT
from tests.command_line import Called, call
from whale_tf._tf_compat import tf, v1
from whale_tf.cli import app
from whale_tf.cluster.hardware import device_type
from whale_tf.errors import ClusterError, PlanError
from whale_tf.measure.scripts import profile_model
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import StepGraph

WITH_WHALE = "import whale_tf as wh\nwh.init({!r}, cluster={!r}, plan={!r})"


def write(path: Any, whale: str = "") -> str:
    path.write_text(SCRIPT.format(whale=whale, batch=None))
    return str(path)


def run(*arguments: str) -> Called:
    return call(app, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("whale", ["", WITH_WHALE.format({"num_task_graph": 2}, "cpu:2", None)])
def test_script_is_profiled_and_not_trained(tmp_path: Any, whale: str) -> None:
    script, output = write(tmp_path / "train.py", whale), tmp_path / "profile.json"
    result = run("profile", script, str(tmp_path / "losses"), "-o", str(output), "--batch-size", "8")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "losses").exists()
    profile = ModelProfile.parse(str(output))
    assert profile.name == "train" and profile.optimizer == "momentum" and profile.graph and profile.batch_granularity == 1
    assert sum(layer.forward_flops for layer in profile.layers) == 4 * 2 * 6 * 6
    backward = 2 * 4 - 1  # nobody needs the gradient of the input
    assert sum(layer.backward_flops or 0.0 for layer in profile.layers) == backward * 2 * 6 * 6
    assert profile.parameter_bytes == 4 * 4 * 36
    assert "h3" in [op for layer in profile.layers for op in layer.ops]
    assert "all" in result.output and f"{4 * 36:,}" in result.output


def losses_of(script: str, output: Any, monkeypatch: Any) -> List[float]:
    monkeypatch.setattr(sys, "argv", [script, str(output)])
    with open(script, encoding="utf8") as handle:
        exec(compile(handle.read(), script, "exec"), {"__name__": "__main__"})
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("search", ["data-parallel", "dapple"])
def test_from_a_script_to_a_plan_that_runs(tmp_path: Any, monkeypatch: Any, search: str) -> None:
    local = losses_of(write(tmp_path / "local.py"), tmp_path / "local", monkeypatch)
    plan = tmp_path / "plan.json"
    result = run("plan", "--model", str(tmp_path / "local.py"), "--cluster", "cpu:2", "--global-batch", "8", "--search", search,
                 "-o", str(plan))
    assert result.exit_code == 0, result.output
    try:
        script = write(tmp_path / "parallel.py", WITH_WHALE.format({}, "cpu:2", str(plan)))
        parallel = losses_of(script, tmp_path / "parallel", monkeypatch)
        used = wh.current_plan()
    finally:
        wh.shutdown()
    assert used is not None and used.estimate.search == search
    np.testing.assert_allclose(parallel, local, rtol=1e-5)


@pytest.mark.slow
def test_measured_times_are_added_by_device_type(tmp_path: Any) -> None:
    script, output = write(tmp_path / "train.py"), tmp_path / "profile.json"
    for device in ("cpu", "V100-32GB"):
        result = run("profile", script, str(tmp_path / "losses"), "-o", str(output), "--batch-size", "8", "--measure", device)
        assert result.exit_code == 0, result.output
    assert not (tmp_path / "losses").exists(), "the script is left behind its third step"
    profile = ModelProfile.parse(str(output))
    names = [[point.device for point in layer.measured] for layer in profile.layers]
    assert names == [[device_type("cpu").name, "V100-32GB"]] * len(profile.layers)
    points = [point for layer in profile.layers for point in layer.measured]
    assert {point.batch for point in points} == {8} and sum(point.forward_s for point in points) > 0
    assert sum(point.backward_s for point in points) > 0


@pytest.mark.parametrize("device,match", [("V100-23GB", "Did you mean 'V100-32GB'")])
def test_unknown_device_type_is_refused(tmp_path: Any, device: str, match: str) -> None:
    with pytest.raises(ClusterError, match=match):
        profile_model(write(tmp_path / "train.py"), [], 8, "m", device)


def test_model_file_cannot_be_measured() -> None:
    with pytest.raises(PlanError, match="has no input pipeline to run it with"):
        profile_model("model.pb", [], 8, "m", "cpu")


# -- model files -----------------------------------------------------------------------------------------------------------


def model(train: bool) -> Dict[str, Any]:
    x = v1.placeholder("float32", [None, 8, 8, 3], name="x")
    h = v1.nn.conv2d(x, v1.get_variable("filter", [3, 3, 3, 16]), strides=[1, 2, 2, 1], padding="SAME", name="conv")
    logits = v1.matmul(v1.reshape(v1.nn.relu(h), [-1, 256]), v1.get_variable("w", [256, 10]), name="logits")
    if train:
        v1.train.AdamOptimizer().minimize(v1.reduce_mean(v1.square(logits)))
    return {"logits": logits}


FLOPS = 2 * 16 * 27 * 16 + 2 * 256 * 10
PARAMETERS = 27 * 16 + 2560


@pytest.mark.slow
def test_frozen_model(tmp_path: Any) -> None:
    with tf.Graph().as_default() as graph, v1.Session() as session:
        model(train=False)
        session.run(v1.global_variables_initializer())
        frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["logits"])
    path = tmp_path / "model.pb"
    path.write_bytes(frozen.SerializeToString())
    profile = profile_model(str(path), [], 4, "frozen").profile
    assert sum(layer.forward_flops for layer in profile.layers) == FLOPS
    assert sum(layer.backward_flops or 0.0 for layer in profile.layers) == 2 * FLOPS
    assert profile.parameter_bytes == 4 * PARAMETERS
    assert sum(layer.activation_bytes for layer in profile.layers) == 4 * (256 + 256 + 10)


@pytest.mark.slow
def test_meta_graph(tmp_path: Any) -> None:
    with tf.Graph().as_default():
        model(train=True)
        v1.train.export_meta_graph(str(tmp_path / "model.meta"))
    result = run("profile", str(tmp_path / "model.meta"), "--json")
    assert result.exit_code == 0, result.output
    profile = ModelProfile.parse(result.output)
    assert sum(layer.forward_flops for layer in profile.layers) == FLOPS and profile.parameter_bytes == 4 * PARAMETERS


# -- refusals --------------------------------------------------------------------------------------------------------------


def test_script_without_training_is_refused(tmp_path: Any) -> None:
    (tmp_path / "nothing.py").write_text("print('nothing')\n")
    result = run("profile", str(tmp_path / "nothing.py"))
    assert result.exit_code == 1 and "ended without finalizing or running a graph" in result.output


@pytest.mark.parametrize("name,match", [("missing.py", "is not a script"), ("missing.pb", "there is no model file"),
                                        ("model.onnx", "is not a script")])
def test_files_of_another_kind_are_refused(name: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        profile_model(os.path.join("nowhere", name), [], 4, "m")


def test_broken_model_file_is_refused(tmp_path: Any) -> None:
    (tmp_path / "broken.pb").write_bytes(b"not a graph")
    with pytest.raises(PlanError, match="is no GraphDef"):
        profile_model(str(tmp_path / "broken.pb"), [], 4, "m")


@pytest.mark.slow
def test_script_s_plan_is_simulated_op_by_op(tmp_path: Any) -> None:
    """Times of two batch sizes are kept beside each other; the plan is the one a search made for the same script."""
    script, ops, plan = write(tmp_path / "train.py"), tmp_path / "ops.json", tmp_path / "plan.json"
    for batch in ("8", "16"):
        result = run("profile", script, str(tmp_path / "losses"), "--ops", str(ops), "--batch-size", batch, "--measure", "CPU")
        assert result.exit_code == 0, result.output
    kept = StepGraph.parse(str(ops))
    assert {batch for points in kept.seconds.values() for batch, _ in points} == {8.0, 16.0}
    made = run("plan", "--model", script, "--cluster", "cpu:2", "--global-batch", "16", "-o", str(plan))
    assert made.exit_code == 0, made.output
    arguments = ["simulate", "--plan", str(plan), "--ops", str(ops), "--cluster", "cpu:2", "--json"]
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert answer["step_time_s"] > 0 and min(answer["peak_memory_bytes"]) > 0
    refused = run(*(arguments + ["--model", "mlp"]))
    assert refused.exit_code == 1 and "without --model" in refused.output
