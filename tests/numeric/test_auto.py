"""Automatic plans compute what the local script computes: un-annotated models, divided by every search."""
from __future__ import annotations

import json
from typing import Any, Dict, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tests.numeric.split  # noqa: F401  # registers its cases
import whale_tf as wh
from tests.numeric import equality
from tests.numeric.cases import Inputs
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal, find_case, local_outcome, reference
from tests.numeric.script import Setting, Stages, dense
from tests.numeric.section_cases import case_of
from tests.numeric.unequal import described, equal

pytestmark = pytest.mark.half
SETTING = Setting()
TWO_STAGES = {"num_task_graph": 2, "num_micro_batch": 4}


def run_auto(name: str, setting: Setting, config: Dict[str, Any], cluster: Any, plan: Any = None) -> Tuple[Outcome, wh.Plan]:
    """The un-annotated script under an automatic plan."""
    case = find_case(name)
    wh.init(dict(config, **(case.config or {})), cluster=cluster, plan=plan)
    try:
        outcome = equality.run_script(case, setting, Stages(), 1, 1)
        used = wh.current_plan()
        assert used is not None
        assert ("Estimated: " in wh.explain()) == (used.estimate.latency_s is not None)
        return outcome, used
    finally:
        wh.shutdown()


def check_auto(name: str, config: Dict[str, Any], cluster: Any, setting: Setting = SETTING, plan: Any = None) -> wh.Plan:
    outcome, used = run_auto(name, setting, config, cluster, plan)
    assert_equal(outcome, local_outcome(name, reference(setting), 1), TOLERANCE[setting.dtype])
    return used


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_sum", "sum_with_l2", "weighted_loss", "clipped_adam", "convolution", "tied_embedding",
                                  "sparse_embedding", "while_loop_v1", "recurrent_v1", "conditional_v1", "gan",
                                  "gradient_penalty", "ragged", "batch_norm"])
def test_two_task_graphs(name: str) -> None:
    plan = check_auto(name, TWO_STAGES, equal(2))
    assert [task.devices for task in plan.task_graphs] == [((0,),), ((1,),)]
    assert plan.num_micro_batch == 4 and plan.estimate.search == "auto"


def scanned(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """TensorFlow puts the write of all steps to the tensor array next to the steps, wherever the array is."""
    steps = tf.transpose(tf.reshape(dense(z, 12, "steps"), [-1, 3, 4]), [1, 0, 2])
    last = tf.scan(lambda state, step: tf.tanh(state + step), steps[1:], initializer=steps[0])[-1]
    return tf.reduce_mean(tf.math.squared_difference(last, inputs["target"]))


@pytest.mark.slow
def test_tensor_array_in_another_task_graph_than_what_it_holds() -> None:
    case, before = case_of(scanned), tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    wh.init(TWO_STAGES, cluster=equal(2))
    try:
        found = equality.run_script(case, SETTING, Stages(), 1, 1)
    finally:
        wh.shutdown()
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()
    assert_equal(found, equality.run_local(case, SETTING), TOLERANCE[SETTING.dtype])


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name,search", [("encoder", True), ("gan", True), ("momentum", "dapple"), ("clipped_adam", "amp")])
def test_searches(name: str, search: Any) -> None:
    plan = check_auto(name, {"auto_parallel": search}, equal(4))
    assert plan.estimate.latency_s and plan.estimate.global_batch == 48 and len(plan.estimate.peak_memory_bytes) == 4
    if search is True:
        assert plan.estimate.runners_up


def with_slow_links(count: int) -> Dict[str, Any]:
    """Devices between which gradients take long, and even activations of pipelines: what is divided sends less of both."""
    kind = {"kind": "CPU", "memory_gib": 4, "fp32": 2e6, "fp64": 2e6, "memory_bandwidth_bytes_per_s": 1e8}
    return {"name": "slow links", "device_types": {"slow": kind}, "nodes": [
        {"devices": ["slow"] * count, "links": {"local": {"bandwidth_gbytes_per_s": 0.001, "latency_s": 1e-7}}}]}


@pytest.mark.slow
def test_all_searches_and_rhino_is_the_fastest() -> None:
    case = find_case("classifier_adam")
    wh.init({"auto_parallel": True, "init": "sharded", "zero": "none"}, cluster=with_slow_links(2))
    try:
        outcome, plan = equality.run_script(case, SETTING, Stages(), 1, 1), wh.current_plan()
    finally:
        wh.shutdown()
    assert_equal(outcome, equality.run_local(case, SETTING), TOLERANCE[SETTING.dtype])
    assert plan is not None and plan.estimate.search == "rhino" and len(plan.task_graphs) == 1
    assert set(plan.shards.values()) - {"once"}
    others = plan.estimate.runners_up
    assert others[0].startswith("data-parallel: ") and plan.estimate.latency_s is not None
    seconds = [float(text.rpartition("simulated ")[2].split(" ")[0]) for text in others]
    assert plan.estimate.latency_s < min(seconds) and plan.estimate.global_batch == 48


@pytest.mark.slow
@pytest.mark.parametrize("name,text", [("momentum", "rhino"), ("while_loop_v1", "rhino: mesh")])
def test_every_search_is_named(name: str, text: str) -> None:
    estimate = check_auto(name, {"auto_parallel": True}, equal(4)).estimate
    assert any(told.startswith(text) for told in (estimate.search, *estimate.runners_up))
    assert any(told.startswith("data-parallel") for told in (estimate.search, *estimate.runners_up))


@pytest.mark.slow
def test_nested_pipelines_divide_the_mini_batch() -> None:
    plan = check_auto("encoder", {"num_task_graph": 2, "num_micro_batch": 2, "auto_parallel": True}, equal(4))
    assert plan.num_model_replicas == 2 and plan.nested_batch == "divide"
    sizes = [len(task.ops) for task in plan.task_graphs]
    assert max(sizes) < 3 * min(sizes), "the two halves of two equal layers are of about the same size"


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(static_batch=False), Setting(dtype="float32", resource=False),
                                     Setting(dataset=True), Setting(static_batch=False, dataset=True)])
def test_settings(setting: Setting) -> None:
    plan = check_auto("clipped_adam", TWO_STAGES, equal(2), setting)
    assert plan.estimate.global_batch == (48 if setting.static_batch else 32)


@pytest.mark.slow
def test_automatic_plan_is_run_again_from_json() -> None:
    plan = check_auto("momentum", {"num_task_graph": 2}, equal(2))
    again = check_auto("momentum", {}, equal(2), plan=plan.to_json())
    assert again == plan


@pytest.mark.slow
def test_cut_moved_by_hand_runs() -> None:
    data = json.loads(check_auto("momentum", TWO_STAGES, equal(2)).to_json())
    first, second = data["task_graphs"]
    moved = [name for name in first["ops"] + second["ops"] if not name.startswith("one/")]
    first["ops"] = [name for name in first["ops"] + second["ops"] if name not in moved]
    second["ops"] = moved
    first["devices"], second["devices"] = [[1]], [[0]]
    used = check_auto("momentum", {}, equal(2), plan=data)
    assert set(used.task_graphs[0].ops) == set(first["ops"]) and used.task_graphs[0].devices == ((1,),)


def _refused(change: Any, match: str) -> None:
    _, plan = run_auto("mlp_mean", SETTING, TWO_STAGES, equal(2))
    data = json.loads(plan.to_json())
    change(data)
    with pytest.raises(wh.WhaleError, match=match):
        run_auto("mlp_mean", SETTING, {}, equal(2), data)


@pytest.mark.slow
@pytest.mark.parametrize("key,value,match", [
    ("graph", "0" * 16, "the plan was made for graph 0000000000000000, but this graph is"),
    ("num_devices", 3, "made for 3 devices, but the cluster has 2"),
    ("devices", [[7]], "uses device 7, the cluster has devices 0 to 1"),
    ("ops", ["nowhere"], "lists op 'nowhere', which the graph does not have"),
    ("cut", None, "is not convex: a path leaves it and comes back"),
])
def test_edited_plans_are_refused_with_the_reason(key: str, value: Any, match: str) -> None:
    def change(data: Dict[str, Any]) -> None:
        tasks = data["task_graphs"]
        if key == "cut":  # the first and the last layer against the ones between them
            ops = tasks[0]["ops"] + tasks[1]["ops"]
            tasks[0]["ops"] = [name for name in ops if name.startswith(("one/", "four/"))]
            tasks[1]["ops"] = [name for name in ops if name.startswith(("two/", "three/"))]
        elif key in tasks[0]:
            tasks[0][key] = value
        else:
            data[key] = value

    _refused(change, match)


# -- annotations, refusals -------------------------------------------------------------------------------------------------


def annotated(config: Dict[str, Any], cluster: Any) -> Optional[wh.Plan]:
    wh.init(config, cluster=cluster)
    try:
        equality.run_script(find_case("mlp_mean"), SETTING, Stages([lambda: wh.replicate(1)] * 2), 1, 1)
        return wh.current_plan()
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"offload": "v0"}, {"zero": "v3"}])
def test_values_that_are_sent_after_an_op_without_a_result(config: Dict[str, Any]) -> None:
    """A gradient call's tuple of gradients ends with an op that only waits."""
    wh.init({"auto_parallel": "dapple", **config}, cluster="cpu:2")
    with tf.Graph().as_default():
        scale, kernel = (tf.get_variable(name, initializer=np.ones(shape), use_resource=True)
                         for name, shape in (("scale", ()), ("kernel", (4, 3))))
        errors = tf.square(tf.matmul(tf.placeholder(tf.float64, [8, 4]), kernel))
        tf.train.AdamOptimizer(0.1).minimize(tf.exp(-scale) * tf.reduce_mean(errors) + scale)
        try:
            assert wh.parallelize().estimate.latency_s
        finally:
            wh.shutdown()


@pytest.mark.slow
def test_annotations_stand_under_auto_parallel() -> None:
    plan = annotated({"auto_parallel": True, "num_micro_batch": 2, "num_task_graph": 2}, "cpu:2")
    assert plan is not None and plan.estimate.search == "annotated" and plan.task_graphs[0].name == "replicate_0"


@pytest.mark.slow
def test_number_of_task_graphs_against_annotations_is_refused() -> None:
    with pytest.raises(wh.ConfigError, match="num_task_graph is 3, but the model is annotated with 2 TaskGraphs"):
        annotated({"num_task_graph": 3}, "cpu:4")


@pytest.mark.slow
@pytest.mark.parametrize("config,cluster,match", [
    ({"num_task_graph": 3}, "cpu:4", "3 TaskGraphs with a device each do not divide the 4 .* num_task_graph to 1 or 2 or 4"),
    ({"num_task_graph": 4, "pipeline.schedule": "interleaved"}, "cpu:2",
     r"num_task_graph to 1 or 2 \(interleaved and zero_bubble_v then divide what each device has"),
    ({"num_task_graph": 40}, equal(40), "num_task_graph is 40, but 'model' can be cut into at most"),
    ({"num_task_graph": 2}, described([(100, 0.001)] * 2), "fits? in memory"),
    ({"auto_parallel": True}, described([(100, 0.001)] * 2), "fits"),
    ({"auto_parallel": "dapple", "num_task_graph": 2}, "cpu:2", "chooses the number of TaskGraphs itself"),
    ({"auto_parallel": "rhino", "num_task_graph": 2}, "cpu:2", "num_stages is 2 under auto_parallel 'rhino'"),
])
def test_refusals(config: Dict[str, Any], cluster: Any, match: str) -> None:
    with pytest.raises(wh.WhaleError, match=match):
        run_auto("mlp_mean", SETTING, config, cluster)
