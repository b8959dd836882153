"""Variables at home, on a replica or on the host: where things are, the local numbers where the matrix has none, refusals."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.plans import HOMES

pytestmark = pytest.mark.half
BATCH, WIDTH, LAYERS = 24, 8, 6


class Trained(NamedTuple):
    losses: List[float]
    variables: Dict[str, np.ndarray]


def build(scope: Any = None, stages: int = 1) -> Dict[str, Any]:
    """A perceptron in float64; an optimizer like LAMB (You et al. 2020), of elementary ops, and clipping by the global norm."""
    random = np.random.RandomState(0)
    x = tf.placeholder(tf.float64, [BATCH, WIDTH])
    h = x
    for stage in range(stages):
        with scope() if scope is not None else tf.name_scope("part"):
            for layer in range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages):
                h = tf.tanh(tf.matmul(h, tf.get_variable(f"w{layer}", initializer=random.randn(WIDTH, WIDTH))))
            if stage == stages - 1:
                loss = tf.reduce_mean(tf.square(h - 0.5))
    variables = tf.trainable_variables()
    gradients, norm = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.1)
    writes = []
    for v, g in zip(variables, gradients):
        with tf.variable_scope(v.op.name):
            m, n = (tf.get_variable(name, initializer=np.zeros([WIDTH, WIDTH]), trainable=False) for name in "mn")
        new_m, new_n = 0.9 * m + 0.1 * g, 0.99 * n + 0.01 * g * g
        change = new_m / (tf.sqrt(new_n) + 1e-3) + 0.01 * v
        ratio = tf.norm(v) / (tf.norm(change) + 1e-9)
        with tf.control_dependencies([change, ratio]):
            writes += [tf.assign(m, new_m), tf.assign(n, new_n), tf.assign_sub(v, 0.01 * ratio * change)]
    return {"x": x, "loss": loss, "norm": norm, "update": tf.group(*writes)}


def train(config: Optional[Dict[str, Any]], scope: Any = None, devices: int = 4, stages: int = 1, steps: int = 3,
          plan: Any = None, save: Optional[Path] = None, restore: Optional[Path] = None) -> Trained:
    """``config`` None: the local script."""
    feed = np.random.RandomState(1).randn(BATCH, WIDTH)
    if config is not None:
        wh.init(dict({"io.nested_batch": "divide"}, **config), cluster=f"cpu:{devices}", plan=plan)
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            made = build(scope if config is not None else None, stages)
            saver = tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if restore is not None:
                    saver.restore(session, str(restore))
                losses = [session.run([made["loss"], made["norm"], made["update"]], {made["x"]: feed})[0] for _ in range(steps)]
                variables = {v.op.name: value for v, value in zip(tf.global_variables(), session.run(tf.global_variables()))}
                if save is not None:
                    saver.save(session, str(save))
        return Trained(losses, variables)
    finally:
        if config is not None:
            wh.shutdown()


def assert_equal(one: Trained, other: Trained) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-11)
    assert one.variables.keys() == other.variables.keys()
    for name, value in one.variables.items():
        np.testing.assert_allclose(value, other.variables[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("homes", ["v1", "v3", "v2_states"])
@pytest.mark.parametrize("scope, stages, micro_batches", [
    (lambda: wh.replicate(4), 1, 2), (lambda: wh.split(2), 1, 1), (lambda: wh.replicate(1), 2, 2)],
    ids=["replicas", "split", "pipeline"])
def test_optimizer_of_elementary_ops(homes: str, scope: Any, stages: int, micro_batches: int) -> None:
    assert_equal(train(dict(HOMES[homes], num_micro_batch=micro_batches, recompute="full"), scope, stages=stages), train(None))


@pytest.mark.slow
@pytest.mark.parametrize("homes", ["v3", "states"])
def test_checkpoints_are_the_local_script_s(homes: str, tmp_path: Path) -> None:
    whole = train(None, steps=4)
    train(HOMES[homes], steps=2, save=tmp_path / "divided")
    after = train(None, steps=2, restore=tmp_path / "divided")
    assert_equal(Trained(whole.losses[2:], whole.variables), after)
    train(None, steps=2, save=tmp_path / "local")
    assert_equal(train(HOMES[homes], steps=2, restore=tmp_path / "local"), after)


def parallelized(config: Dict[str, Any], devices: int = 4, **model: Any) -> Any:
    """The plan, explain(), and the devices of variables and of the ops that update them."""
    wh.init(config, cluster=f"cpu:{devices}")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            build(wh.replicate, **model)
            wh.parallelize()
            devices_of: Dict[str, str] = {v.op.name: v.op.device for v in tf.global_variables()}
            squares = [op.device for op in tf.get_default_graph().get_operations() if op.type in ("L2Loss", "Sqrt")]
            reads = [op for op in tf.get_default_graph().get_operations() if "/reads/" in op.name and "/after/" not in op.name]
            waiting = sum(bool(op.control_inputs) for op in reads)
            program = wh.current_program()
            assert program is not None
            return wh.current_plan(), wh.explain(), devices_of, squares, program.to_text(), reads, waiting
    finally:
        wh.shutdown()


def test_what_is_at_home() -> None:
    """Six variables of one size, so that three devices need none in parts."""
    plan, text, devices, squares, program, reads, waiting = parallelized({"zero": "v3"}, devices=3)
    homes = plan.task_graphs[0].homes
    assert sorted(homes) == [f"w{layer}" for layer in range(LAYERS)]
    assert sorted(list(homes.values()).count(device) for device in range(3)) == [2, 2, 2]
    for name, device in devices.items():
        assert device.endswith(f"CPU:{homes[name[:2]]}")  # slots are where their variable is
    assert set(squares) >= set(devices.values()) and "zero v3" in text and "reads anew" in program
    per_clone = 2 * LAYERS - 1  # forward and backward; the first layer's input needs no gradient
    assert len(reads) == 3 * per_clone and waiting == 3 * (per_clone - 1)  # the forward pass begins with a matrix product
    assert {op.device for op in reads} == set(devices.values())
    plan, text, devices, squares, program, reads, waiting = parallelized({"offload": "states"}, devices=1)
    assert not reads
    assert set(plan.task_graphs[0].homes.values()) == {plan.hosts[0]} and "the host: 6" in text and "reads anew" not in program
    assert all(device.endswith("CPU:1") for device in devices.values())
    assert sum(device.endswith("CPU:1") for device in squares) >= 2 * LAYERS


@pytest.mark.slow
def test_plan_as_json() -> None:
    plan = parallelized({"zero": "v2"})[0]
    read = json.loads(plan.to_json())
    assert_equal(train({}, lambda: wh.replicate(4), plan=read), train(None))
    read["task_graphs"][0]["homes"]["w"] = 0
    with pytest.raises(wh.PlanError, match="has a home for variable 'w', which the graph does not have"):
        train({}, lambda: wh.replicate(4), plan=read)
    read["task_graphs"][0]["homes"]["w0"] = 4
    with pytest.raises(wh.PlanError, match="the home of variable 'w0' is device 4, the cluster has devices 0 to 3"):
        train({}, lambda: wh.replicate(4), plan=read)
    read["zero"] = "none"
    with pytest.raises(wh.PlanError, match=r"homes for its variables beside its own devices \[0, 1, 2, 3\], and both zero and o"):
        train({}, lambda: wh.replicate(4), plan=read)


@pytest.mark.parametrize("config, devices, message", [
    ({"zero": "v1"}, 1, "zero is 'v1', which divides variables over the replicas .* no TaskGraph of this plan has two"),
    ({"zero": "v1", "variables": "mirrored"}, 2, "variables is 'mirrored', a copy for every replica, and zero is 'v1'"),
    ({"offload": "v0", "communication.backend": "collective"}, 2, "offload is 'v0', which puts a variable in one place, but"),
    ({"zero": "v4"}, 2, "config key 'zero' is 'v4', expected"), ({"offload": "v1"}, 2, "config key 'offload' is 'v1', expected")])
def test_what_is_refused(config: Dict[str, Any], devices: int, message: str) -> None:
    with pytest.raises(wh.ConfigError, match=message):
        parallelized(config, devices)


def test_levels_of_epl() -> None:
    for level, ours in (("", "none"), ("v0", "v1"), ("v1", "v2"), ("v2", "v3")):
        assert wh.Config({"zero.level": level}).zero == ours
    assert wh.Config({"zero": "v0"}).zero == "v1" and wh.Config({"offload.level": "v0"}).offload == "v0"
    assert wh.Config({"offload.level": ""}).offload == "none"
