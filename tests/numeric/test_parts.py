"""ZeRO with variables in parts: the local numbers under every level and optimizer, where parts are, and files."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models.optimizers import Adafactor, Lamb
from tests.numeric.test_homes import Trained, assert_equal

pytestmark = pytest.mark.half
BATCH, WORDS, WIDTH, HIDDEN = 16, 41, 6, 50
OPTIMIZERS: Dict[str, Callable[[], Any]] = {
    "adam": lambda: tf.train.AdamOptimizer(0.01), "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1), "lamb": lambda: Lamb(0.01), "adafactor": lambda: Adafactor(0.01),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.9)}
WAYS: Dict[str, Dict[str, Any]] = {
    "replicas": {}, "accumulating": {"num_micro_batch": 2},
    "nested": {"scopes": (1, 1), "num_micro_batch": 2},
    "again": {"num_micro_batch": 2, "recompute": "full"},
    "pipeline again": {"scopes": (2, 2), "num_micro_batch": 2, "recompute": "full"},
    "called": {"scopes": (1, 1), "num_micro_batch": 2, "emit": "call"}}


def build(optimizer: Any, scopes: Any, resource: bool) -> Dict[str, Any]:
    """A table of words with sparse gradients, a layer with most of the parameters, a penalty, and clipping by the global norm."""
    random = np.random.RandomState(0)

    def weight(name: str, *shape: int) -> tf.Variable:
        return tf.get_variable(name, initializer=0.5 * random.randn(*shape))

    with tf.variable_scope("", use_resource=resource):
        words = tf.placeholder(tf.int32, [BATCH, 3])
        with scopes[0]():
            x = tf.reshape(tf.nn.embedding_lookup(weight("table", WORDS, WIDTH), words), [-1, 3 * WIDTH])
            large = weight("large", 3 * WIDTH, HIDDEN)
            x = tf.tanh(tf.matmul(x, large) + weight("bias", HIDDEN))
        with scopes[-1]():
            out = weight("out", HIDDEN, 3)
            loss = tf.reduce_mean(tf.square(tf.matmul(x, out) - 0.5))
            loss += 0.01 * tf.nn.l2_loss(large) + 0.001 * tf.reduce_sum(tf.abs(out))
        chosen = optimizer()
        pairs = chosen.compute_gradients(loss)
        gradients, norm = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.5)
        update = chosen.apply_gradients(zip(gradients, [variable for _, variable in pairs]), tf.train.get_or_create_global_step())
    return {"words": words, "loss": loss, "norm": norm, "update": update, "large": large}


def train(optimizer: str, config: Optional[Dict[str, Any]] = None, resource: bool = True, steps: int = 3, plan: Any = None,
          save: Optional[Path] = None, restore: Optional[Path] = None, look: Any = None) -> Trained:
    """``config`` None: the local script; ``look``: called with the session after the last step."""
    feed, config = np.random.RandomState(1).randint(0, WORDS, [BATCH, 3]), None if config is None else dict(config)
    scopes: List[Any] = [lambda: tf.name_scope("part")] * 2
    if config is not None:
        counts = config.pop("scopes", ())
        scopes = [lambda count=count: wh.replicate(count) for count in counts] or scopes
        wh.init({"io.nested_batch": "divide", **config}, cluster="cpu:4", plan=plan)
    try:
        with tf.Graph().as_default():
            made = build(OPTIMIZERS[optimizer], scopes, resource)
            saver = tf.train.Saver()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if restore is not None:
                    saver.restore(session, str(restore))
                losses = [session.run([made["loss"], made["norm"], made["update"]], {made["words"]: feed})[0]
                          for _ in range(steps)]
                names = tf.global_variables()
                variables = {v.op.name: value for v, value in zip(names, session.run(names))}
                if save is not None:
                    saver.save(session, str(save))
                if look is not None:
                    look(session, made)
        return Trained(losses, variables)
    finally:
        if config is not None:
            wh.shutdown()


RUN = {  # every optimizer, level and way, and most pairs of them
    ("adam", "v3", "accumulating"), ("adam", "v2", "nested"), ("adam", "v1", "again"), ("momentum", "v3", "nested"),
    ("momentum", "v1", "replicas"), ("adagrad", "v2", "again"), ("adagrad", "v3", "pipeline again"), ("lamb", "v3", "again"),
    ("lamb", "v2", "accumulating"), ("lamb", "v1", "pipeline again"), ("adafactor", "v2", "replicas"),
    ("rmsprop", "v3", "called"), ("adagrad", "v1", "called"), ("adam", "v2", "pipeline again")}
_locals: Dict[Any, Trained] = {}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("optimizer, level, way, resource", [
    pytest.param(optimizer, level, way, resource, marks=[] if (optimizer, level, way) in RUN and (
        resource == (len(optimizer + way) % 3 > 0)) else [pytest.mark.full])
    for optimizer in OPTIMIZERS for level in ("v1", "v2", "v3") for way in WAYS for resource in (True, False)])
def test_training(optimizer: str, level: str, way: str, resource: bool) -> None:
    local = _locals.setdefault((optimizer, resource), _locals.get((optimizer, resource)) or train(optimizer, None, resource))
    parts: Dict[str, int] = {}

    def look(session: tf.Session, made: Any) -> None:
        plan = wh.current_plan()
        assert plan is not None
        for task in plan.task_graphs:
            parts.update(task.parts)

    assert_equal(train(optimizer, dict(WAYS[way], zero=level), resource, look=look), local)
    assert "large" in parts


def where(session: tf.Session, made: Any) -> Any:
    """The plan, explain(), and the devices of all variables that take memory: parts, and those in whole."""
    plan = wh.current_plan()
    assert plan is not None
    graph = tf.get_default_graph()
    divided = {op.name for op in graph.get_operations()}
    parts = {op.name: op for op in graph.get_operations() if op.name.startswith("shards/") and op.type == "VarHandleOp"}
    whole = {v.op.name: v.op for v in tf.global_variables()
             if not any(name.split("/", 2)[2] == v.op.name for name in parts)}
    devices = {name: (int(op.device[-1:] or 0), tuple(tf.TensorShape(op.get_attr("shape")).as_list()))
               for name, op in {**parts, **whole}.items()}
    updates = [op for op in graph.get_operations() if op.type == "ResourceApplyAdam"
               and (op.name.startswith("shards/") or f"shards/0/{op.name}" not in divided)]
    assert updates and all(op.inputs[-1].op.device == op.device for op in updates)  # the gradient, clipped by the global norm
    return plan, " ".join(wh.explain().split()), devices


def test_where_parts_are() -> None:
    """Of 246, 900, 50 and 150 numbers the largest, as few as will do, are divided; slots are beside their parts."""
    found: List[Any] = []
    train("adam", {"zero": "v3"}, steps=1, look=lambda session, made: found.append(where(session, made)))
    plan, text, devices = found[0]
    assert plan.task_graphs[0].parts == {"large": 1, "table": 1, "out": 0, "bias": 0}  # the table's gradient counts its rows
    homes = plan.task_graphs[0].homes
    for part in range(4):
        name = f"shards/{part}/large"
        assert devices[name] == (homes[name], (18, 13 if part < 2 else 12))
        for slot in ("Adam", "Adam_1"):
            assert devices[f"{name}/{slot}"] == devices[name]
    held = [sum(int(np.prod(shape)) for device, shape in devices.values() if device == number) for number in range(4)]
    assert sum(held) == 3 * (246 + 900 + 50 + 150) + 3 and max(held) < 1.05 * sum(held) / 4, held
    assert "Divided into parts, one for each replica" in text and "'large' (dimension 1)" in text


def test_plan_with_parts() -> None:
    """It is plain JSON, which says all that is needed, and what it says wrongly is refused by name.  Under every level each clone
    puts its parts together itself."""
    plans: List[Any] = []
    gathering: Dict[str, str] = {}  # scope of a clone -> device

    def look(session: tf.Session, made: Any) -> None:
        plans.append(wh.current_plan())
        gathering.update((op.name.split("/")[1], op.device[-5:]) for op in session.graph.get_operations()
                         if op.type == "ConcatV2" and op.name.endswith("/shards/gathered/t0/part/MatMul/ReadVariableOp_0"))

    train("adam", {"zero": "v2"}, steps=1, look=look)
    saved = json.loads(plans[0].to_json())
    assert gathering == {f"g0_m0_r{replica}": f"CPU:{replica}" for replica in range(4)}
    local = train("adam")
    assert_equal(train("adam", {}, plan=saved), local)
    for name, dim, message in [("nothing", 0, "has parts of variable 'nothing', but not the variable"),
                               ("large", 2, r"its shape \[18, 50\] has no dimension 2 with at least 4 elements"),
                               ("table", 0, "'table' along dimension 0, which is not possible: its gradient is sparse")]:
        changed = json.loads(json.dumps(saved))
        changed["task_graphs"][0]["parts"] = {name: dim}
        with pytest.raises(wh.PlanError, match=message):
            train("adam", {}, plan=changed)
    del saved["zero"]
    with pytest.raises(wh.PlanError, match="has parts of variable 'large', which needs zero v1, v2 or v3"):
        train("adam", {}, plan=saved)
    saved["task_graphs"][0]["homes"] = {}
    with pytest.raises(wh.PlanError, match="or model replicas that span processes; zero is 'none', processes: 1"):
        train("adam", {}, plan=saved)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["exact", "sharded"])
def test_checkpoints_are_the_local_script_s(init: str, tmp_path: Path) -> None:
    config = {"zero": "v3", "init": init}
    whole = train("adam", steps=4)
    train("adam", config, steps=2, save=tmp_path / "divided")
    after = train("adam", steps=2, restore=tmp_path / "divided")
    assert_equal(Trained(whole.losses[2:], whole.variables), after)
    train("adam", steps=2, save=tmp_path / "local")
    assert_equal(train("adam", config, steps=2, restore=tmp_path / "local"), after)


@pytest.mark.slow
def test_values_from_outside() -> None:
    """``load``, ``assign`` and reads work on the whole."""
    def look(session: tf.Session, made: Any) -> None:
        value = np.random.RandomState(3).randn(3 * WIDTH, HIDDEN)
        made["large"].load(value, session)
        np.testing.assert_array_equal(session.run(made["large"]), value)
        session.run(made["large"].assign(2.0 * value))
        np.testing.assert_array_equal(made["large"].eval(session), 2.0 * value)

    train("momentum", {"zero": "v3"}, steps=1, look=look)


def one_variable(variable: Callable[[], Any], config: Dict[str, Any]) -> str:
    """explain() of a model with a single variable, which is looked up in."""
    wh.init(config, cluster="cpu:4")
    try:
        with tf.Graph().as_default():
            words = tf.placeholder(tf.int32, [BATCH])
            loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(variable(), words) - 1.0))
            tf.train.AdagradOptimizer(0.1).minimize(loss)
            wh.parallelize()
            return " ".join(wh.explain().split())
    finally:
        wh.shutdown()


def test_what_stays_whole() -> None:
    """Parts of a table are of its columns, because the sparse gradient of each then has the same rows."""
    text = one_variable(lambda: tf.get_variable("row", [64, 3], use_resource=True), {"zero": "v1"})
    assert "Variable 'row' is not divided although it is larger than a device's share: its gradient is sparse" in text
    assert "Divided into parts" not in text
    text = one_variable(lambda: tf.get_variable("wide", [3, 8], use_resource=True), {"zero": "v1"})
    assert "'wide' (dimension 1)" in text and "is not divided" not in text
