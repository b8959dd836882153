"""Plans for several processes and their local parts."""
from __future__ import annotations

from typing import Any, Dict

import pytest

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import AnnotationError, ConfigError, PlanError
from whale_tf.ir.graph import OpGraph
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan, check_plan
from whale_tf.planner.assemble import ModelFacts, StageStatistics, TaskGraphSpec
from whale_tf.planner.auto.settings import layers_of
from whale_tf.planner.buckets import Gradient, Limits, buckets, limits

PARTS = ((0, 1), (2, 3))
STAGE = StageStatistics((), 0, 4, 8, (Gradient("w", 4),))


def plan_of(*counts: Any, **config: Any) -> Plan:
    specs = [TaskGraphSpec(f"t{i}", "replicate", count) for i, count in enumerate(counts)]
    facts = ModelFacts(OpGraph(), specs, [STAGE] * len(counts), [], {})
    return annotated_plan(facts, Cluster.parse("cpu:4"), Config(config), PARTS)


def test_replicas_stay_within_a_process() -> None:
    plan = plan_of(None)
    assert plan.task_graphs[0].devices == PARTS and plan.num_model_replicas == 2
    assert plan.processes == PARTS and plan.gradients[0].backend == "collective"
    assert plan_of(1).task_graphs[0].devices == ((0,), (1,), (2,), (3,))
    pipeline = plan_of(1, 1, num_micro_batch=2)
    assert [task.devices for task in pipeline.task_graphs] == [((0,), (2,)), ((1,), (3,))]


def test_local_part_holds_a_process_own_replicas() -> None:
    part = plan_of(1).local_part(1)
    assert part.num_model_replicas == 2 and part.task_graphs[0].devices == ((2,), (3,))
    assert Plan.parse(part.to_json()) == part


def test_plan_of_one_process_is_its_local_part() -> None:
    plan = Plan.parse({"graph": "x", "num_devices": 1, "task_graphs": [{"name": "a", "devices": [[0]]}]})
    assert plan.local_part(0) is plan


@pytest.mark.parametrize("changes, message", [
    ({"random": "locl"}, "random is 'locl', expected 'own' or 'local'"),
    ({"loss_scale": 0}, "loss_scale is 0, expected null, or a number of at least 1, or 'dynamic'"),
    ({"gradients": [{"task_graph": 2, "backend": "local"}]}, "gradients name TaskGraph 2, the plan has 2"),
    ({"task_graphs": [{"name": "a", "ops": ["x", "y"], "devices": [[0]]}, {"name": "b", "ops": ["y"], "devices": [[1]]}]},
     r"op 'y' is in the TaskGraphs \[0, 1\]; leave it in one")])
def test_plans_that_could_not_be_carried_out_as_they_say_are_refused(changes: Any, message: str) -> None:
    tasks = [{"name": name, "devices": [[device]]} for device, name in enumerate("ab")]
    with pytest.raises(PlanError, match=message):
        Plan.parse(dict({"graph": "x", "num_devices": 2, "task_graphs": tasks}, **changes))


def test_nothing_is_no_plan() -> None:
    """Neither one nor several by name."""
    with pytest.raises(PlanError, match="task_graphs is missing"):
        Plan.by_name({})


@pytest.mark.parametrize("devices, spans", [([[0, 2]], True), ([[0], [1], [2]], True), ([[0], [3]], False), ([[1]], True)])
def test_plans_that_span_processes(devices: Any, spans: bool) -> None:
    plan = Plan.parse({"graph": "x", "num_devices": 4, "num_model_replicas": len(devices), "processes": PARTS,
                       "task_graphs": [{"name": "a", "devices": devices}]})
    assert plan.spans_processes is spans
    assert (plan.local_part(0) is plan) is spans


@pytest.mark.parametrize("counts, devices", [
    ((4,), [((0, 1, 2, 3),)]), ((2, 2), [((0, 1),), ((2, 3),)]), ((1, 3), [((0,),), ((1, 2, 3),)])])
def test_counts_beyond_a_process_go_over_the_whole_cluster(counts: Any, devices: Any) -> None:
    plan = plan_of(*counts)
    assert [task.devices for task in plan.task_graphs] == devices and plan.spans_processes
    assert {sync.backend for sync in plan.gradients} == {"local"}


@pytest.mark.parametrize("processes", [((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0,), (1, 2, 3, 4))])
def test_processes_have_each_device_once(processes: Any) -> None:
    with pytest.raises(PlanError, match="processes must list each of the devices 0 to 3 once"):
        Plan.parse({"graph": "x", "num_devices": 4, "processes": processes, "task_graphs": [{"name": "a", "devices": [[0]]}]})


@pytest.mark.parametrize("counts, config, error, message", [
    ((5,), {}, AnnotationError, "asks for 5 devices, but the cluster has 4"),
    ((None,), {"communication.backend": "local"}, ConfigError, "sums inside one process, but there are 2"),
    ((4,), {"communication.backend": "horovod"}, ConfigError, "model replicas span the 2 processes"),
    ((4,), {"communication.fp16": True}, ConfigError, "model replicas span the 2 processes"),
    ((1, 1), {"cluster.device_place_prefer_intra_node": False, "cluster.colocate_split_and_replicate": True}, ConfigError,
     "leave one of them out")])
def test_refused(counts: Any, config: Dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_of(*counts, **config)


def test_gradients_travel_as_float16_between_processes_only() -> None:
    assert plan_of(None, **{"communication.fp16": True}).gradients[0].fp16 and not plan_of(None).gradients[0].fp16


def test_stages_across_processes_and_their_replicas_within() -> None:
    across = {"cluster.device_place_prefer_intra_node": False}
    plan = plan_of(1, 1, **across)
    assert [task.devices for task in plan.task_graphs] == [((0,), (1,)), ((2,), (3,))] and plan.spans_processes
    assert {sync.backend for sync in plan.gradients} == {"local"}
    assert [task.devices for task in plan_of(1, 3, **across).task_graphs] == [((0,),), ((1, 2, 3),)]
    assert plan_of(None, **across).task_graphs[0].devices == PARTS  # one TaskGraph has no stages
    assert plan_of(1, **across).task_graphs[0].devices == ((0,), (1,), (2,), (3,))


def test_search_places_stages_itself() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="choose devices themselves"):
        layers_of(nothing, nothing, Cluster.parse("cpu:4"), Config({"cluster.device_place_prefer_intra_node": False}))


def test_plan_for_other_processes_is_refused() -> None:
    with pytest.raises(PlanError, match="made for 2 process.es. with devices"):
        check_plan(plan_of(None), Cluster.parse("cpu:4"))


def test_small_gradients_travel_together() -> None:
    kind, other = ("float32", 0), ("float32", 1)
    gradients = [Gradient("a", 4, kind), Gradient("big", 90, kind), Gradient("b", 4, kind), Gradient("c", 4, other),
                 Gradient("d", 4, other), Gradient("sparse"), Gradient("e", 4, other)]
    assert buckets(gradients, Limits(10, 100)) == (("a", "b"), ("big",), ("c", "d", "e"), ("sparse",))
    assert buckets(gradients[3:], Limits(10, 5)) == (("c", "d"), ("sparse",), ("e",))
    assert all(len(bucket) == 1 for bucket in buckets(gradients, limits(Cluster.parse("2xcpu:1"), ((0,), (1,)), 1)))


def test_limits_grow_with_latency() -> None:
    """At least 200 us, for a remote call, and 1.25 GB/s between nodes, 10 GB/s of memory: (W-1) a m / 2, 10 W a b."""
    found = limits(Cluster.parse("2xcpu:1"), ((0,), (1,)))
    assert found == pytest.approx((1000e3, 5000e3))
    described = Cluster.parse("2xcpu:1").to_dict()
    for node in described["nodes"]:
        node["nic"]["latency_s"] = 5e-4  # measured
    assert limits(Cluster.parse(described), ((0,), (1,))) == pytest.approx((2500e3, 12500e3))
