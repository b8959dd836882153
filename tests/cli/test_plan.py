"""``whale plan`` and ``whale diff``."""
from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, List

import pytest

from tests.command_line import Called, call
from whale_tf.cli import app
from whale_tf.cli.plan import differences, picture
from whale_tf.cluster import Cluster
from whale_tf.plan import Plan
from whale_tf.planner.dapple.search import plans
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import load_builtin


def run(*arguments: str) -> Called:
    return call(app, *arguments)


def plan(*more: str) -> List[str]:
    return ["plan", "--model", "vgg-19@dapple", "--cluster", "dapple-c:4", "--global-batch", "512", *more]


def test_json_object() -> None:
    result = run(*plan("--json"))
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert value["model"] == "vgg-19@dapple" and value["search"] == "dapple" and value["num_devices"] == 4
    assert sorted(device for stage in value["stages"] for device in stage["devices"]) == [0, 1, 2, 3]
    low, high = value["samples_per_s_range"]
    assert low < value["samples_per_s"] < high and value["samples_per_s"] == pytest.approx(512 / value["latency_s"])


def test_tables_and_picture() -> None:
    result = run(*plan())
    assert result.exit_code == 0
    for part in ("node 3", "(input to pool4)", "4 micro-batches", "peak", "samples/s, ", "accuracy: "):
        assert part in result.stdout


def test_written_plan_can_be_read_and_compared(tmp_path: Any) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert run(*plan("-o", a)).exit_code == 0
    assert run(*plan("--search", "data-parallel", "--output", b)).exit_code == 0
    assert Plan.parse(a).estimate.search == "dapple"
    same = run("diff", a, a)
    assert same.exit_code == 0 and "equal" in same.stdout
    other = run("diff", a, b, "--json")
    assert other.exit_code == 1 and json.loads(other.stdout)["estimate.search"] == ["dapple", "data-parallel"]
    assert run("diff", a, str(tmp_path / "none.json")).exit_code == 2


def test_written_plan_is_the_one_that_was_simulated(tmp_path: Any) -> None:
    """On unequal devices its parts of a micro-batch are uneven."""
    path, cluster = str(tmp_path / "plan.json"), "V100-32GB:1,P100-16GB:1"
    found = run("plan", "--model", "vgg-19@dapple", "--cluster", cluster, "--global-batch", "64", "--search", "data-parallel",
                "-o", path, "--json")
    assert found.exit_code == 0, found.output
    assert Plan.parse(path).task_graphs[0].slices is not None
    again = run("simulate", "--plan", path, "--cluster", cluster, "--json")
    assert again.exit_code == 0, again.output
    value = json.loads(again.stdout)
    assert value["step_time_s"] == pytest.approx(json.loads(found.stdout)["latency_s"], rel=1e-9)
    assert value["peak_memory_bytes"] == json.loads(found.stdout)["peak_memory_bytes"]


def test_written_plan_is_explained(tmp_path: Any) -> None:
    path = str(tmp_path / "plan.json")
    assert run(*plan("-o", path)).exit_code == 0
    result = run("explain", path)
    assert result.exit_code == 0 and "found by dapple" in result.output and "Estimated: " in result.output
    assert "stage_0" in result.output
    assert run("explain", str(tmp_path / "missing.json")).exit_code == 1


def test_list() -> None:
    names = json.loads(run("plan", "--list", "--json").stdout)
    asked = {"bert-48@dapple", "xlnet-36", "gnmt-16", "vgg-19@dapple", "resnet-50@dapple", "amoebanet-36", "gpt2-24", "transgan"}
    assert asked <= set(names["models"])
    assert {"dapple-a", "dapple-b", "dapple-c", "amp-het", "amp-homogeneous"} <= set(names["clusters"])
    assert {"dapple", "amp"} <= set(names["searches"])
    assert "GNMT" not in names["models"] and "8 + 8 LSTM layers" in run("plan", "--list").stdout


@pytest.mark.parametrize("arguments,part", [
    (["plan", "--model", "bert-4b", "--cluster", "dapple-a", "--global-batch", "8"], "Did you mean 'bert-48'?"),
    (["plan", "--model", "bert-48@dapple", "--cluster", "dapple-d", "--global-batch", "8"], "dapple"),
    (["plan", "--model", "moe-32e-10b", "--cluster", "dapple-b:2", "--global-batch", "8", "--search", "amp",
      "--offload", "none"], "GiB"),
    (["plan", "--model", "dlrm", "--cluster", "dapple-a", "--global-batch", "8"], "`whale simulate --model dlrm`"),
    (["plan", "--model", "bert-48@dapple"], "--cluster")])
def test_errors_are_one_message(arguments: List[str], part: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0 and "Traceback" not in result.output
    assert part in result.output


@pytest.mark.slow
def test_picture_shows_stages_over_devices() -> None:
    cluster = Cluster.parse("dapple-a")
    found = plans(StageCosts(load_builtin("vgg-19@dapple"), cluster), 512, "two-stages")[0]
    lines = [line.plain for line in picture(found, cluster)]
    shown = [int(label) for line in lines for label in line.split()[2:]]
    first = found.stages[0].all_devices
    assert len(lines) == 2 and shown == [0 if device in first else 1 for device in range(16)]


def test_differences_name_the_place() -> None:
    a = {"x": [{"y": 1}, {"y": 2}], "z": [1, 2]}
    b = {"x": [{"y": 1}], "z": [1, 3], "w": True}
    assert differences(a, b) == {"x[1]": [{"y": 2}, None], "z": [[1, 2], [1, 3]], "w": [None, True]}
    assert differences(a, a) == {}


@pytest.mark.slow
def test_command_line_loads_no_tensorflow() -> None:
    code = "import sys, whale_tf.cli; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
