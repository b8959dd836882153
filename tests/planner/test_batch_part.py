"""The TaskGraph beside a ``split`` one that holds what its devices compute for their own examples: in plans, and on devices."""
from __future__ import annotations

from typing import Any, Dict

import pytest

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import AnnotationError, PlanError
from whale_tf.ir.graph import OpGraph
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan, placed
from whale_tf.planner.assemble import ModelFacts, StageStatistics, TaskGraphSpec

SPECS = [TaskGraphSpec("features", "replicate", 2), TaskGraphSpec("classes", "split", 2),
         TaskGraphSpec("classes/batch", "replicate", 2, batch_of=1)]
STAGE = StageStatistics((), 0, 4, 8, ())


def plan_of(cluster: str, **config: Any) -> Plan:
    facts = ModelFacts(OpGraph(), SPECS, [STAGE] * 3, [], {})
    return annotated_plan(facts, Cluster.parse(cluster), Config({key.replace("__", "."): v for key, v in config.items()}))


@pytest.mark.parametrize("cluster,config,rows", [
    ("cpu:2", {}, [((0, 1),)] * 3),
    ("cpu:4", {}, [((0, 1),), ((2, 3),), ((2, 3),)]),
    ("cpu:4", {"cluster__colocate_split_and_replicate": True}, [((0, 1), (2, 3))] * 3)])
def test_it_is_where_its_split_task_graph_is_and_asks_for_no_devices(cluster: str, config: Dict[str, Any], rows: Any) -> None:
    plan = plan_of(cluster, **config)
    assert [task.devices for task in plan.task_graphs] == rows
    assert [task.batch_of for task in plan.task_graphs] == [None, None, 1]
    assert Plan.parse(plan.to_json()) == plan


def test_it_is_a_stage_of_a_pipeline_together_with_its_split_task_graph() -> None:
    plan = plan_of("cpu:4", num_micro_batch=4, pipeline__warmup="PA")
    assert [task.warmup for task in plan.task_graphs] == [2, 1, 1]


def test_it_divides_the_batch_like_the_replicas_beside_it() -> None:
    plan = plan_of("V100-32GB:1,P100-16GB:1")
    assert plan.task_graphs[0].slices is not None and plan.task_graphs[2].slices == plan.task_graphs[0].slices


def test_counts_that_do_not_fit_are_refused_without_it() -> None:
    with pytest.raises(AnnotationError, match=r"for 4 devices together \(replicate\(2\), split\(2\)\), but the cluster has 3"):
        placed(SPECS, Cluster.parse("cpu:3"), Config({}))


BESIDE = {"name": "b", "devices": [[0, 1]], "batch_of": 0}


@pytest.mark.parametrize("tasks,message", [
    ([BESIDE, {"name": "s", "strategy": "split", "devices": [[0, 1]]}], "'b' .number 0. holds the batch part of TaskGraph 0"),
    ([{"name": "r", "devices": [[0, 1]]}, BESIDE], "expected one of strategy 'split' before it"),
    ([{"name": "s", "strategy": "split", "devices": [[1, 0]]}, BESIDE], "needs strategy 'replicate', its devices"),
    ([{"name": "s", "strategy": "split", "devices": [[0, 1]]}, dict(BESIDE, strategy="split")], "it has 'split'"),
    ([{"name": "s", "strategy": "split", "devices": [[0, 1]]}, dict(BESIDE, batch_of=3)], "batch part of TaskGraph 3")])
def test_plans_that_say_otherwise_are_refused(tasks: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse({"graph": "x", "num_devices": 2, "task_graphs": tasks})
