"""The step graph of a real script: what the simulator plays is what a traced step of the plan runs."""

from __future__ import annotations

import collections
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.simulator import Simulator, StepGraph, trace_of_run_metadata
from whale_tf.simulator.instructions import COMPUTATION

BATCH, WIDTH = 32, 16


def script(stages: Any) -> Tuple[Any, Any, Dict[Any, np.ndarray]]:
    x = tf.placeholder(tf.float32, [BATCH, WIDTH], "x")
    hidden = x
    for number, scope in enumerate(stages):
        with scope():
            weight = tf.get_variable(f"w{number}", initializer=np.eye(WIDTH, dtype="float32"), use_resource=True)
            hidden = tf.tanh(tf.matmul(hidden, weight, name=f"product{number}"))
            if number == len(stages) - 1:
                loss = tf.reduce_mean(hidden * hidden)
    return loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss), {x: np.ones([BATCH, WIDTH], "float32")}


def traced(loss: Any, update: Any, feed: Any, devices: int) -> Any:
    metadata = tf.RunMetadata()
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": devices})) as session:
        session.run(tf.global_variables_initializer())
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        session.run([loss, update], feed, options, metadata)
    return trace_of_run_metadata(metadata)


def executed(trace: Any) -> Dict[str, float]:
    return {event.name.split(":")[0]: 1e-3 for event in trace.events}


PLANS = {
    "pipeline": (lambda: [lambda: wh.replicate(1)] * 2, 2, {"num_micro_batch": 4}),
    "replicas": (lambda: [lambda: wh.replicate(2)], 2, {}),
    "mirrored": (lambda: [lambda: wh.replicate(2)], 2, {"variables": "mirrored"}),
    "split": (lambda: [lambda: wh.replicate(2), lambda: wh.split(2)], 2, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_every_product_of_the_simulation_runs_in_the_plan(name: str) -> None:
    """As many clones of each matrix product and update are simulated as a traced step has."""
    scopes, devices, config = PLANS[name]
    with tf.Graph().as_default():
        loss, update, feed = script([lambda: tf.name_scope("") for _ in scopes()])
        local = executed(traced(loss, update, feed, 1))
    with tf.Graph().as_default():
        wh.init(config, cluster=f"cpu:{devices}")
        try:
            loss, update, feed = script(scopes())
            plan = wh.parallelize()
            step = StepGraph.parse(wh.step_graph(name).to_json()).measured(BATCH, local)
            measured = traced(loss, update, feed, devices)
            together = [op.name for op in step.ops if op.type == "NoOp" and op.waits]
            waiting = [op for op in step.ops if any(step.ops[before].name in together for before in op.waits)]
            assert waiting and all("control_dependency" in op.name for op in waiting) and devices == 2
        finally:
            wh.shutdown()
    found = Simulator(Cluster.parse(f"cpu:{devices}")).run_step(plan, step)
    names = [found.program.instructions[number].name for number, lane in zip(found.graph.instruction, found.graph.lane)
             if lane == COMPUTATION]  # fmt: skip
    predicted = collections.Counter(one for one in names if _counts(one))
    ran = collections.Counter(_local(event.name.split(":")[0], predicted) for event in measured.events)
    assert predicted and predicted == {one: ran[one] for one in predicted}
    assert found.subject.samples == BATCH and len(found.devices) == devices
    held = [static.get("parameters", 0.0) for static in found.program.static_bytes.values()]
    variables = 2 * 4 * WIDTH**2  # with momentum
    assert sum(held) == {"pipeline": 2, "replicas": 1, "mirrored": 2, "split": 2}[name] * variables


def _counts(name: str) -> bool:
    return not name.endswith(")") and ("ApplyMomentum" in name or "product" in name and "MatMul" in name)


def _local(name: str, known: Any) -> str:
    """A clone's op, without the scopes of its clone."""
    parts = name.split("/")
    return next(("/".join(parts[i:]) for i in range(len(parts)) if "/".join(parts[i:]) in known), name)


def test_needs_a_rewritten_graph() -> None:
    wh.init(cluster="cpu:2")
    try:
        with pytest.raises(PlanError, match="wh.parallelize"):
            wh.step_graph()
    finally:
        wh.shutdown()
