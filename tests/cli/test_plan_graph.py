"""``whale plan --search rhino`` and ``--search auto``: on scripts, model files and profiles, and the plans run."""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, Dict, List

import numpy as np
import pytest

import whale_tf as wh
from tests.cli.scripts import SCRIPT
from tests.command_line import Called, call
from whale_tf._tf_compat import tf, v1
from whale_tf.cli import app
from whale_tf.errors import PlanError
from whale_tf.plan import Plan

FAST_LINKS, SLOW_LINKS = 1e-4, 1e-5


@pytest.fixture(autouse=True)
def _no_state_left() -> Any:
    yield
    wh.shutdown()


def cluster(path: Any, link: float) -> str:
    """Two slow devices: over fast links all of a training step is worth dividing, over slow ones only into stages."""
    kind = {"kind": "CPU", "memory_gib": 4, "fp32": 1e5, "memory_bandwidth_bytes_per_s": 1e9}
    path.write_text(json.dumps({"name": "slow", "device_types": {"slow": kind}, "nodes": [
        {"devices": ["slow:2"], "links": {"local": {"bandwidth_gbytes_per_s": link, "latency_s": 1e-7}}}]}))
    return str(path)


def write(path: Any, whale: str = "", batch: Any = 8) -> str:
    path.write_text(SCRIPT.format(whale=whale, batch=batch))
    return str(path)


def run(*arguments: str) -> Called:
    return call(app, *arguments)


def plan(model: str, machines: str, search: str, *more: str) -> Any:
    return run("plan", "--model", model, "--cluster", machines, "--global-batch", "8", "--search", search, *more)


def losses_of(script: str, output: Any, monkeypatch: Any) -> List[float]:
    monkeypatch.setattr(sys, "argv", [script, str(output)])
    with open(script, encoding="utf8") as handle:
        exec(compile(handle.read(), script, "exec"), {"__name__": "__main__"})
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("search,link,kind", [("rhino", FAST_LINKS, "hybrid"), ("rhino", SLOW_LINKS, "straight"),
                                              ("auto", SLOW_LINKS, "straight/dp")])
def test_plan_of_a_script_runs(tmp_path: Any, monkeypatch: Any, search: str, link: float, kind: str) -> None:
    machines, output = cluster(tmp_path / "cluster.json", link), str(tmp_path / "plan.json")
    script = write(tmp_path / "local.py")
    result = plan(script, machines, search, "-o", output, "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout[result.stdout.index("{"):])
    assert value["kind"] in kind.split("/") and value["model"] == "local" and value["num_devices"] == 2 and value["latency_s"] > 0
    used_devices = sorted(d for stage in value["stages"] for d in stage["devices"])
    assert used_devices == [0, 1] or value["search"] == "undivided"
    assert value["search_seconds"] > 0
    assert len(value["peak_memory_bytes"]) == 2 and value["runners_up"] and "first_layer" in value["stages"][0]
    made = Plan.parse(output)
    assert made.estimate.search == value["search"] and bool(made.shards) == (kind == "hybrid")
    local = losses_of(script, tmp_path / "losses", monkeypatch)
    whale = f"import whale_tf as wh\nwh.init({{}}, cluster={machines!r}, plan={output!r})"
    parallel = losses_of(write(tmp_path / "parallel.py", whale), tmp_path / "parallel", monkeypatch)
    used = wh.current_plan()
    assert used is not None and used.task_graphs == made.task_graphs and used.shards == made.shards
    np.testing.assert_allclose(parallel, local, rtol=1e-5)


@pytest.mark.slow
def test_plan_is_the_one_that_auto_parallel_makes(tmp_path: Any, monkeypatch: Any) -> None:
    """The command's search decides nothing about memory."""
    machines, output = cluster(tmp_path / "cluster.json", FAST_LINKS), str(tmp_path / "plan.json")
    assert plan(write(tmp_path / "train.py"), machines, "rhino", "-o", output).exit_code == 0
    whale = f"import whale_tf as wh\nwh.init({{'auto_parallel': 'rhino', 'zero': 'none'}}, cluster={machines!r})"
    losses_of(write(tmp_path / "auto.py", whale), tmp_path / "losses", monkeypatch)
    used = wh.current_plan()
    made = Plan.parse(output)
    assert used is not None and replace(made, task_graphs=used.task_graphs) == used
    ((one,), (other,)) = used.task_graphs, made.task_graphs
    assert replace(one, variables=other.variables) == other, "of one replica both mean the same"
    text = run("explain", output).output
    assert "found by rhino" in text and "Sharding patterns" in text and "Rejected: rhino: mesh 2, " in text


@pytest.mark.slow
def test_tables(tmp_path: Any) -> None:
    machines = cluster(tmp_path / "cluster.json", FAST_LINKS)
    result = plan(write(tmp_path / "train.py"), machines, "rhino")
    assert result.exit_code == 0, result.output
    for part in ("Sharding patterns", "node 0", "searched in", "undivided: one device"):
        assert part in result.output
    slow = plan(str(tmp_path / "train.py"), cluster(tmp_path / "slow.json", SLOW_LINKS), "rhino")
    assert all(part in slow.output for part in ("warm-up", "peak", "pipeline of 2 stages"))


def model(train: bool) -> Dict[str, Any]:
    x = v1.placeholder("float32", [8, 6], name="x")
    h = v1.nn.relu(v1.matmul(x, v1.get_variable("w", [6, 12]), name="first"))
    logits = v1.matmul(h, v1.get_variable("v", [12, 4]), name="second")
    if train:
        v1.train.AdamOptimizer().minimize(v1.reduce_mean(v1.square(logits)))
    return {"logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("search", ["rhino", "auto"])
def test_model_files(tmp_path: Any, search: str) -> None:
    machines = cluster(tmp_path / "cluster.json", FAST_LINKS)
    frozen(tmp_path / "frozen.pb")
    exported(tmp_path / "train.meta", train=True)
    for name in ("frozen.pb", "train.meta"):
        output = str(tmp_path / (name + ".json"))
        result = plan(str(tmp_path / name), machines, search, "--json", "-o", output)
        assert result.exit_code == 0, result.output
        value = json.loads(result.stdout[result.stdout.index("{"):])
        assert value["model"] == name.split(".")[0] and value["latency_s"] > 0
        made = Plan.parse(output)
        if value["search"] == "rhino" and made.shards:
            assert "first" in made.shards and any("gradients" in op for op in made.shards) == (name == "train.meta")


def exported(path: Any, train: bool) -> str:
    with tf.Graph().as_default():
        model(train)
        v1.train.export_meta_graph(str(path))
    return str(path)


def frozen(path: Any) -> str:
    with tf.Graph().as_default() as graph, v1.Session() as session:
        model(train=False)
        session.run(v1.global_variables_initializer())
        made = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["second"])
    path.write_bytes(made.SerializeToString())
    return str(path)


def fetched(path: str) -> Any:
    """What a script computes that imports the frozen model."""
    made = v1.GraphDef()
    with open(path, "rb") as handle:
        made.ParseFromString(handle.read())
    with tf.Graph().as_default(), v1.Session() as session:
        tf.import_graph_def(made, name="")
        largest = tf.reduce_max(session.graph.get_tensor_by_name("second:0"), axis=1)  # what a script does with the results
        return np.concatenate(session.run([largest, tf.transpose(session.graph.get_tensor_by_name("second:0"))], {
            "x:0": np.arange(48, dtype=np.float32).reshape(8, 6) / 48}), axis=None)


@pytest.mark.slow
@pytest.mark.parametrize("search,link,shape", [("rhino", FAST_LINKS, (1, 1)), ("dapple", SLOW_LINKS, (2, 8))])
def test_plan_of_a_frozen_model_runs(tmp_path: Any, search: str, link: float, shape: Any) -> None:
    path, output = frozen(tmp_path / "frozen.pb"), str(tmp_path / "plan.json")
    result = plan(path, cluster(tmp_path / "cluster.json", link), search, "-o", output)
    assert result.exit_code == 0, result.output
    expected = fetched(path)
    wh.init(plan=output, cluster="cpu:2")
    np.testing.assert_allclose(fetched(path), expected, rtol=1e-5, atol=1e-7)
    used = wh.current_plan()
    assert used is not None and (len(used.task_graphs), used.num_micro_batch) == shape


@pytest.mark.slow
def test_imported_training_steps_are_not_run_as_planned(tmp_path: Any) -> None:
    path, output = exported(tmp_path / "train.meta", train=True), str(tmp_path / "plan.json")
    assert plan(path, cluster(tmp_path / "cluster.json", FAST_LINKS), "rhino", "-o", output).exit_code == 0
    refused = pytest.raises(PlanError, match="training steps imported from a MetaGraph")
    for arguments, refusal in (
            ({"plan": output, "cluster": "cpu:2"}, refused), ({"config": {"num_task_graph": 2}}, refused),
            *((given, pytest.warns(UserWarning, match=f"did not see.*given {what}, but this graph trains as it is"))
              for given, what in (({"cluster": "cpu:2"}, "2 devices"), ({"config": {"num_micro_batch": 2}}, "2 micro-batches"),
                                  ({"config": {"amp": "bfloat16"}}, "amp 'bfloat16'")))):
        wh.init(**{"cluster": "cpu:1", **arguments})
        with tf.Graph().as_default(), refusal, v1.Session() as session:
            v1.train.import_meta_graph(path)
            session.run("x:0", {"x:0": np.zeros([8, 6])})


@pytest.mark.slow
def test_plan_for_a_model_with_variables_that_does_not_train(tmp_path: Any) -> None:
    path, output = exported(tmp_path / "model.meta", train=False), str(tmp_path / "plan.json")
    assert plan(path, cluster(tmp_path / "cluster.json", FAST_LINKS), "rhino", "-o", output).exit_code == 0
    wh.init(plan=output, cluster="cpu:2")
    with tf.Graph().as_default(), v1.Session() as session, pytest.raises(PlanError, match="has variables; freeze it"):
        model(train=False)
        session.run("x:0", {"x:0": np.zeros([8, 6])})


@pytest.mark.slow
@pytest.mark.parametrize("search,batch,annotation,match", [
    ("rhino", 16, "", "have 16 examples, but the batch to plan for is 8; give 16"),
    ("auto", 8, "with wh.replicate(1): ", "has annotations ('replicate_0', "),
])
def test_scripts_that_do_not_go_with_it(tmp_path: Any, search: str, batch: int, annotation: str, match: str) -> None:
    script = write(tmp_path / "train.py", "import whale_tf as wh\nwh.init({}, cluster='cpu:2')", batch)
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text().replace("h = tf.tanh(", annotation + "h = tf.tanh("))
    result = plan(script, cluster(tmp_path / "cluster.json", FAST_LINKS), search)
    assert result.exit_code == 1 and match in result.output


def test_profiles() -> None:
    result = plan("vgg-19@dapple", "dapple-c:4", "rhino")
    assert result.exit_code == 1 and "reads an op graph, but 'vgg-19@dapple' is searched by its layers" in result.output
    result = plan("vgg-19@dapple", "dapple-c:4", "rhino", "--recompute", "full")
    assert result.exit_code == 1 and "leave --recompute out" in result.output


@pytest.mark.slow
def test_all_searches_of_a_profile() -> None:
    result = run("plan", "--model", "vgg-19@dapple", "--cluster", "dapple-c:4", "--global-batch", "512", "--search", "auto",
                 "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert value["search"] in ("dapple", "amp", "auto", "data-parallel") and value["runners_up"]
    searches = {value["search"], *(text.split(":")[0] for text in value["runners_up"])}
    assert len(searches) > 1, "each says which search found it"
