"""Placeholders of unknown rank under plans that divide variables or move them: planning waits for the first training step, and
the Session, which has initialised the variables by then, begins anew."""
from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

BATCH = 8
ROWS = np.random.RandomState(2).randn(5 * BATCH, 6)
Strategy = Optional[Callable[[], Any]]
PLANS: Dict[str, Tuple[Dict[str, Any], str, Strategy]] = {
    "split": ({}, "cpu:2", lambda: wh.split(2)),
    "nested split": ({"io.nested_batch": "divide"}, "cpu:4", lambda: wh.split(2)),
    "zero v1": ({"zero": "v1"}, "cpu:2", None),
    "zero v3": ({"zero": "v3", "num_micro_batch": 2}, "cpu:2", None),
    "offload": ({"offload": "v0"}, "cpu:2", None),
    "cut": ({"num_task_graph": 2, "num_micro_batch": 2}, "cpu:2", None),
    "rhino": ({"auto_parallel": "rhino", "auto.batch_size": BATCH}, "cpu:2", None),
}


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    wh.shutdown()


class Model(NamedTuple):
    loss: tf.Tensor
    update: tf.Operation
    feed: Callable[[int], Dict]
    initial: List[tf.Operation]


def model(strategy: Strategy, kind: str = "fed", resource: bool = True) -> Model:
    def weights(name: str, *shape: int) -> Any:
        return tf.get_variable(name, initializer=np.random.RandomState(len(name)).randn(*shape) / 3, use_resource=resource)

    keep, initial = tf.placeholder("float64", name="keep"), [tf.global_variables_initializer]
    if kind == "iterator":
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(ROWS).batch(BATCH))
        x = iterator.get_next()
    else:
        x = tf.placeholder("float64", None if kind == "no shape" else [None, 6], name="x")
    rows = tf.reshape(x, [-1, 6])
    with contextlib.nullcontext() if strategy is None else strategy():
        if kind == "table":
            values = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), tf.constant([2, 0], tf.int64))
            found = tf.lookup.StaticHashTable(values, -1).lookup(tf.cast(rows[:, 0] > 0, tf.int64))
            rows += tf.one_hot(found, 6, dtype=tf.float64)
        h = tf.tanh(tf.matmul(rows, weights("first", 6, 8)) + weights("b", 8)) * keep
        if kind == "own collection":
            scale = tf.get_variable("scale", initializer=np.full(8, 1.5), trainable=False, collections=["own"])
            initial.append(lambda: scale.initializer)
            h *= scale
            total = tf.get_variable("total", initializer=np.zeros([]), trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(total, tf.reduce_sum(rows)))  # which nobody runs
        loss = tf.reduce_mean(tf.square(tf.matmul(h, weights("second", 8, 4))))
    update = tf.train.AdamOptimizer(0.1, epsilon=1e-3).minimize(loss, tf.train.get_or_create_global_step())
    done = [*(each() for each in initial), tf.tables_initializer(), *([iterator.initializer] if kind == "iterator" else [])]

    def feed(step: int) -> Dict:
        return {keep: 0.5, **({} if kind == "iterator" else {x: ROWS[step * BATCH:(step + 1) * BATCH]})}

    return Model(loss, update, feed, done)


def trained(plan: Optional[str], kind: str = "fed", path: str = "", resource: bool = True) -> List[np.ndarray]:
    """Losses and variables: evaluated, trained, saved, trained further, and restored; in a second session, too."""
    wh.shutdown()
    config, cluster, strategy = PLANS[plan] if plan else ({}, "", None)
    if plan:
        wh.init(config, cluster=cluster)
    with tf.Graph().as_default():
        made, found = model(strategy if plan else None, kind, resource), []  # type: ignore[var-annotated]
        saver = tf.train.Saver()
        with tf.Session() as session, tf.Session() as second:
            session.run(made.initial)
            second.run(made.initial)
            if kind != "iterator":
                found += [session.run(made.loss, made.feed(0)), second.run(made.loss, made.feed(1))]
            found += [session.run([made.loss, made.update], made.feed(step))[0] for step in range(3)]
            if path:
                name = saver.save(session, os.path.join(path, str(plan).replace(" ", "_")))
                reader = tf.train.load_checkpoint(name)
                found += [reader.get_tensor(each) for each in sorted(reader.get_variable_to_shape_map())]
                session.run(made.update, made.feed(3))
                saver.restore(session, name)
            found += [session.run([made.loss, made.update], made.feed(3))[0], *session.run(tf.trainable_variables())]
            found += [second.run([made.loss, made.update], made.feed(2))[0], *second.run(tf.global_variables())]
    return [np.asarray(each) for each in found]


@functools.lru_cache(maxsize=None)
def local(kind: str, path: str = "") -> List[np.ndarray]:
    return trained(None, kind, path)


def assert_same(found: List[np.ndarray], expected: List[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_scalar_of_unknown_rank(plan: str) -> None:
    assert_same(trained(plan), local("fed"))


@pytest.mark.parametrize("plan, kind", [("split", "no shape"), ("zero v1", "table"), ("split", "table"), ("offload", "iterator"),
                                        ("split", "iterator"), ("zero v1", "own collection")])
def test_what_else_a_session_has_before_the_first_step(plan: str, kind: str) -> None:
    assert_same(trained(plan, kind), local(kind))


@pytest.mark.parametrize("plan", ["split", "zero v3"])
def test_checkpoints(plan: str, tmp_path: Any) -> None:
    assert_same(trained(plan, "fed", str(tmp_path)), trained(None, "fed", str(tmp_path)))


def test_reference_variables() -> None:
    assert_same(trained("split", resource=False), trained(None, resource=False))


def monitored(plan: Optional[str], path: str) -> List[np.ndarray]:
    """Two sessions, one after the other; the second one continues from the first one's checkpoint."""
    wh.shutdown()
    config, cluster, strategy = PLANS[plan] if plan else ({}, "", None)
    if plan:
        wh.init(config, cluster=cluster)
    found: List[Any] = []
    for _ in range(2):
        with tf.Graph().as_default():
            made = model(strategy)
            with tf.train.MonitoredTrainingSession(checkpoint_dir=path, save_checkpoint_steps=2, save_summaries_steps=None,
                                                   save_summaries_secs=None, log_step_count_steps=None) as session:
                found += [session.run([made.loss, made.update], made.feed(step))[0] for step in range(3)]
                found += session.run(tf.trainable_variables())
    return [np.asarray(each) for each in found]


def test_monitored_session_that_saves_before_the_first_step(tmp_path: Any) -> None:
    assert_same(monitored("split", str(tmp_path / "split")), monitored(None, str(tmp_path / "local")))


def test_state_that_would_be_lost_is_refused() -> None:
    wh.init({"zero": "v1"}, cluster="cpu:2")
    with tf.Graph().as_default():
        made = model(None, "iterator")
        with tf.Session() as session:
            session.run(made.initial)
            session.run(made.loss, made.feed(0))
            with pytest.raises(wh.PlanError, match="a Session ran 'IteratorGetNext' before the first training step.* begin anew"):
                session.run(made.update, made.feed(0))


def test_planning_ahead_says_that_it_can_wait() -> None:
    wh.init({}, cluster="cpu:2")
    with tf.Graph().as_default():
        made = model(lambda: wh.split(2))
        message = r"'keep:0' is not known.* or leave out wh.parallelize\(\): planning then waits for the first training step"
        with pytest.raises(wh.UnknownShapeError, match=message):
            wh.parallelize()
        with tf.Session() as session, pytest.raises(wh.UnknownShapeError, match="or leave out partial_run"):
            session.partial_run_setup(made.update)


def test_training_runs_that_do_not_need_all_inputs() -> None:
    """Of two models, each is trained by runs of its own, which feed nothing to the other."""
    def losses() -> List[float]:
        with tf.Graph().as_default():
            made = []
            for name in ("one", "other"):
                x = tf.placeholder("float64", name=name)
                w = tf.get_variable("w_" + name, initializer=ROWS[:6], use_resource=True)
                loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
                made.append((x, loss, tf.train.GradientDescentOptimizer(0.01).minimize(loss)))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                return [session.run([loss, update], {x: ROWS[:BATCH]})[0] for _ in range(2) for x, loss, update in made]

    expected = losses()
    wh.init(cluster="cpu:2")
    with pytest.warns(UserWarning, match="a training run of a graph does not need 'other:0', an input of unknown rank"):
        found = losses()
    assert wh.current_plan() is not None
    np.testing.assert_allclose(found, expected, 1e-12)
