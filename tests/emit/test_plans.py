"""What a plan says is what runs: other TaskGraphs than the annotations', other communicators."""
from __future__ import annotations

import json
from typing import Any, Dict, List, Optional

import numpy as np
import pytest

import whale_tf as wh
from tests.numeric.script import dense
from whale_tf._tf_compat import v1

BATCH = 12


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    wh.shutdown()


def build(annotated: bool) -> Dict[str, Any]:
    """Three dense layers, the first two in one TaskGraph."""
    x = v1.placeholder("float64", [BATCH, 6], name="x")
    h = x
    for names in (("first", "second"), ("third",)):
        if annotated:
            with wh.replicate(1, name=names[0]):
                h = layers(h, names)
        else:
            h = layers(h, names)
    loss = v1.reduce_mean(v1.square(h), name="loss")
    return {"x": x, "loss": loss, "train": v1.train.AdamOptimizer(0.01, epsilon=1e-6).minimize(loss)}


def layers(h: Any, names: Any) -> Any:
    for name in names:
        h = v1.tanh(dense(h, 5, name), name=name + "/out")
    return h


def losses(config: Optional[Dict[str, Any]] = None, cluster: str = "cpu:2", plan: Optional[Dict] = None) -> List[float]:
    """Losses of four steps; without a config: of the local script."""
    if config is not None:
        wh.init(config, cluster=cluster, plan=plan)
    examples = np.random.RandomState(0).randn(4, BATCH, 6)
    with v1.Graph().as_default():
        model = build(annotated=config is not None)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return [session.run([model["loss"], model["train"]], {model["x"]: x})[0] for x in examples]


def plan_of(config: Dict[str, Any], cluster: str = "cpu:2") -> Dict[str, Any]:
    losses(config, cluster)
    plan = wh.current_plan()
    assert plan is not None
    return json.loads(plan.to_json())


def test_ops_moved_to_another_task_graph_run_there() -> None:
    expected = losses()
    plan = plan_of({"num_micro_batch": 2})
    moved = [name for name in plan["task_graphs"][0]["ops"] if name.startswith("second")]
    assert moved
    plan["task_graphs"][0]["ops"] = [name for name in plan["task_graphs"][0]["ops"] if name not in moved]
    plan["task_graphs"][1]["ops"] += moved
    np.testing.assert_allclose(losses({}, plan=plan), expected, rtol=1e-12)
    graph_plan = wh.current_plan()
    assert graph_plan is not None and set(moved) <= set(graph_plan.task_graphs[1].ops)


def test_task_graphs_on_devices_in_another_order() -> None:
    plan = plan_of({"num_micro_batch": 2})
    plan["task_graphs"][0]["devices"], plan["task_graphs"][1]["devices"] = [[1]], [[0]]
    np.testing.assert_allclose(losses({}, plan=plan), losses(), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["cpu:4", "cpu:2"])
def test_collectives_add_up_as_plain_sums_do(cluster: str) -> None:
    expected = losses()
    config = {"communication.backend": "collective", "io.nested_batch": "divide"}
    np.testing.assert_allclose(losses(config, cluster), expected, rtol=1e-12)


def test_fetching_one_gradient_of_a_collective_does_not_hang() -> None:
    wh.init({"communication.backend": "collective", "io.nested_batch": "divide"}, cluster="cpu:4")
    with v1.Graph().as_default():
        x = v1.placeholder("float64", [BATCH, 6])
        with wh.replicate(2):
            loss = v1.reduce_mean(v1.square(dense(x, 3, "only")))
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        gradients = optimizer.compute_gradients(loss)
        update = optimizer.apply_gradients(gradients)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            feed = {x: np.ones([BATCH, 6])}
            alone = session.run(gradients[0][0], feed)
            with_update = session.run([gradients[0][0], update], feed)[0]
    np.testing.assert_allclose(with_update, alone, rtol=1e-12)


def test_horovod_needs_processes() -> None:
    with pytest.raises(wh.ConfigError, match="communication.backend is 'horovod'"):
        losses({"communication.backend": "horovod", "io.nested_batch": "divide"}, "cpu:4")
