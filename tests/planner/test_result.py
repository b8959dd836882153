"""The search front: one result for every search, Plans, refusals."""
from __future__ import annotations

from typing import Any

import pytest

from tests.planner.results import check, profile
from whale_tf.cluster import Cluster
from whale_tf.errors import ClusterError, InfeasibleError, PlanError
from whale_tf.planner.dapple import search as dapple
from whale_tf.planner.measures import Allowed
from whale_tf.planner.search import METHODS, search
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import load_builtin


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_on_one_case(method: str) -> None:
    check(search(profile(), "dapple-b:4", 16, method), method)


def test_ops_of_the_layers_become_task_graphs() -> None:
    found = dapple.plans(StageCosts(profile(ops=True), Cluster.parse("dapple-b:2")), 16, "two-stages")[0]
    plan = found.to_plan(profile(ops=True))
    assert plan.graph == "f1" and found.kind == "straight"
    assert [op for graph in plan.task_graphs for op in graph.ops] == [
        f"m/{part}{i}" for i in range(6) for part in "ab"]
    assert [graph.devices for graph in plan.task_graphs] == [((0,),), ((1,),)]
    assert plan.gradients == () and plan.num_micro_batch == found.micro_batches


def test_data_parallel_plan() -> None:
    found = search(profile(), "dapple-b:4", 16, "data-parallel")
    plan = found.to_plan(profile())
    assert found.kind == "dp" and len(plan.task_graphs) == 1
    assert plan.task_graphs[0].devices == ((0, 1, 2, 3),) and plan.gradients[0].bytes == 24 * 10 ** 6


def test_pipelines_side_by_side_are_model_replicas() -> None:
    """AMP: dp pipelines divide the batch, a stage's tensor-parallel devices share each layer."""
    found = search(profile(), "amp-homogeneous", 16, "amp")
    plan = found.to_plan(profile())
    assert plan.num_model_replicas == found.model_replicas
    assert plan.nested_batch == ("divide" if found.model_replicas > 1 else "own")
    for stage, graph in zip(found.stages, plan.task_graphs):
        assert graph.strategy == stage.strategy and graph.devices == stage.devices


def test_plan_of_another_profile_is_refused() -> None:
    found = search(profile(), "dapple-b:2", 4)
    with pytest.raises(PlanError, match="searched for 'small'"):
        found.to_plan(load_builtin("bert-48@dapple"))


def test_profile_without_batch_size() -> None:
    with pytest.raises(PlanError, match="batch_granularity"):
        search(profile(batch_granularity=None), "dapple-b:2", 4)


@pytest.mark.parametrize("changes,part", [
    ({"method": "dapel"}, "Did you mean 'dapple'?"),
    ({"method": "pipedream"}, "there are dapple, data-parallel, amp, replicate-split, rhino, auto."),
    ({"global_batch": 0}, "global_batch is 0"),
    ({"profile": "bert-49"}, "Did you mean 'bert-48'?")])
def test_wrong_arguments(changes: Any, part: str) -> None:
    arguments = dict({"profile": profile(), "cluster": "dapple-b:2", "global_batch": 4}, **changes)
    with pytest.raises(PlanError) as caught:
        search(**arguments)
    assert part in str(caught.value)


@pytest.mark.parametrize("method", ["dapple", "amp", "data-parallel"])
def test_too_large_names_the_memory_that_would_do(method: str) -> None:
    """Half the model on each of two devices: 3 layers x 4 x 4 GB."""
    layers = [{"name": f"l{i}", "forward_flops": 1e9, "parameter_bytes": 4 * 10 ** 9, "output_bytes": 0} for i in range(6)]
    large = profile(layers=layers, name="large")
    with pytest.raises(InfeasibleError) as caught:
        search(large, "dapple-b:2", 8, method)
    assert "'large' fits the 2 devices of 'dapple-b:2' (V100-16GB has 16.00 GiB, 14.58 GiB for a step)" in str(caught.value)
    assert f"needs {48e9 / 2 ** 30:.2f} GiB" in str(caught.value)


def test_memory_named_is_enough() -> None:
    """A device with what the message asks for holds a plan."""
    layers = [{"name": f"l{i}", "forward_flops": 1e9, "parameter_bytes": (i + 1) * 10 ** 9, "activation_bytes": 10 ** 8,
               "output_bytes": 10 ** 6} for i in range(5)]
    large = profile(layers=layers, name="large")
    with pytest.raises(InfeasibleError) as caught:
        search(large, "dapple-b:2", 8)
    gib = float(str(caught.value).split("needs ")[1].split(" GiB")[0])
    gib = gib / 0.95 + 0.65 + 0.1  # a step has 95% of what the context leaves
    def nodes(memory: float) -> Any:
        return {"name": "c", "device_types": {"big": {"base": "V100-16GB", "memory_gib": memory}}, "nodes": [
            {"devices": "big:1", "nic": {"bandwidth_gbits_per_s": 25}, "count": 2}]}
    assert search(large, nodes(gib), 8).fits
    with pytest.raises(InfeasibleError):
        search(large, nodes(gib - 0.3), 8)


def test_recomputation_where_memory_is_short() -> None:
    """Activations for four micro-batches do not fit beside each other; with recomputation the pipeline stays full."""
    layers = [{"name": f"l{i}", "forward_flops": 1e12, "parameter_bytes": 4, "activation_bytes": 6 * 10 ** 9,
               "output_bytes": 10 ** 6} for i in range(4)]
    short = profile(layers=layers, name="short")
    plain, free = search(short, "dapple-b:4", 16, allowed=Allowed("none")), search(short, "dapple-b:4", 16)
    assert plain.measures.recompute == "none" and free.measures.recompute == "auto" and free.latency_s < plain.latency_s


def test_disconnected_cluster() -> None:
    nodes = [{"devices": "V100-16GB:1"}, {"devices": "V100-16GB:1"}]
    with pytest.raises(ClusterError, match="no network adapter"):
        search(profile(), {"name": "split", "nodes": nodes}, 4)  # type: ignore[arg-type]
