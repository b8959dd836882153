"""Rhino's meshes of two dimensions, pipelines and hybrids compute what the local script computes."""
from __future__ import annotations

import json
from typing import Any, Dict

import pytest

import whale_tf as wh
from tests.numeric.equality import TOLERANCE, assert_equal, find_case, local_outcome, run_script
from tests.numeric.script import Setting, Stages
from tests.numeric.test_rhino import FEDS, check, only_rhino, slow_devices  # noqa: F401 (a fixture for all tests here)
from whale_tf.plan import Plan

pytestmark = pytest.mark.half
SLOW_LINKS = 1e-4


def two_nodes() -> Dict[str, Any]:
    """Two slow devices in each of two nodes, whose network is a thousand times slower than what is inside them."""
    description = slow_devices(2)
    (node,) = description["nodes"]
    node["nic"] = {"bandwidth_gbytes_per_s": 1e-3, "latency_s": 1e-7}
    return dict(description, nodes=[node, node])


def check_mesh(name: str, monkeypatch: Any, setting: Setting = FEDS) -> None:
    """Two model replicas of two devices each, over which everything but the examples is divided."""
    monkeypatch.setattr("whale_tf.planner.rhino.automatic._executable", lambda question, cluster: [(2, 2)])
    plan = check(name, 4, setting)
    assert plan.num_model_replicas == 2 and plan.nested_batch == "divide" and plan.task_graphs[0].devices == ((0, 1), (2, 3))
    assert set(plan.shards.values()) - {"once"}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipped_adam", "sum_with_l2", "transformer", "sparse_embedding", "gan", "weighted_loss"])
def test_meshes_of_two_by_two_devices(name: str, monkeypatch: Any) -> None:
    check_mesh(name, monkeypatch)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(static_batch=False), Setting(resource=False, runner="monitored")], ids=str)
def test_inputs_and_sessions_on_a_mesh(setting: Setting, monkeypatch: Any) -> None:
    check_mesh("classifier_adam", monkeypatch, setting)


@pytest.mark.once
@pytest.mark.slow
def test_mesh_of_two_dimensions_is_chosen_and_runs_again() -> None:
    """Experts are divided inside the nodes, examples between them: only gradients go over the slow network."""
    plan = check("experts_adam", 4, cluster=two_nodes())
    assert plan.num_model_replicas == 2 and plan.nested_batch == "divide"
    assert plan.task_graphs[0].devices == ((0, 1), (2, 3)) and "stack" in plan.shards.values()
    assert any(text.startswith("rhino: mesh 4, ") for text in plan.estimate.runners_up)
    assert check("experts_adam", 4, plan=json.loads(plan.to_json()), cluster=two_nodes()) == plan


def check_pipeline(name: str, count: int, plan: Any = None) -> Plan:
    case = find_case(name)
    config = dict({"auto_parallel": "rhino"} if plan is None else {}, **(case.config or {}))
    wh.init(config, cluster=slow_devices(count, SLOW_LINKS), plan=plan)
    try:
        found = run_script(case, FEDS, Stages(), 1, 1)
        ran = wh.current_plan()
    finally:
        wh.shutdown()
    assert_equal(found, local_outcome(name, FEDS, 1), TOLERANCE[FEDS.dtype])
    return ran


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name,count,stages,replicas", [("momentum", 2, 2, 1), ("clipped_adam", 4, 2, 2),
                                                        ("tied_embedding", 4, 2, 2)])
def test_pipelines_and_hybrids(name: str, count: int, stages: int, replicas: int, monkeypatch: Any) -> None:
    """Where no op is divided the central choice is a pipeline, or one of stages with replicas: of theirs, or of the model's."""
    monkeypatch.setattr("whale_tf.planner.rhino.automatic._executable", lambda question, cluster: [])
    plan = check_pipeline(name, count)
    assert plan.estimate.search == "rhino" and not plan.shards and plan.num_micro_batch > 1
    assert {task.device_count * plan.num_model_replicas for task in plan.task_graphs} == {replicas}
    assert len(plan.task_graphs) == stages
    assert plan.estimate.runners_up[0].startswith("rhino: mesh ")


@pytest.mark.slow
def test_saved_pipeline_runs_again() -> None:
    plan = check_pipeline("momentum", 2)
    again = check_pipeline("momentum", 2, json.loads(plan.to_json()))
    assert again.task_graphs == plan.task_graphs and again.num_micro_batch == plan.num_micro_batch
