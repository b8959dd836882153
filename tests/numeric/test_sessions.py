"""What a session does beside training steps: evaluation, writes of variables, summaries, estimators, shutdown."""
from __future__ import annotations

import contextlib
import inspect
import json
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as session_module
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_impl, gradients_util
from tensorflow.python.training import monitored_session, optimizer, saver

import whale_tf as wh
from tests.multiprocess.launch import printed
from tests.numeric.script import dense, rng

pytestmark = pytest.mark.graph_optimizer
BATCH, WIDTH = 24, 4
CONFIG = {"num_micro_batch": 2}
ROWS = rng("sessions").randn(BATCH, WIDTH)
TARGETS = rng("targets").randn(BATCH, WIDTH)

TF1 = tf.__version__.startswith("1.")


class Small(NamedTuple):
    """Two stages of one layer, trained with momentum."""

    x: tf.Tensor
    target: tf.Tensor
    y: tf.Tensor
    loss: tf.Tensor
    update: tf.Operation
    kernel: tf.Variable
    summary: tf.Tensor


def small(annotate: bool, resource: bool = True, batch: Optional[int] = BATCH) -> Small:
    def stage() -> Any:
        return wh.replicate(2) if annotate else contextlib.nullcontext()

    with tf.variable_scope("", use_resource=resource):
        x, target = (tf.placeholder(tf.float64, [batch, WIDTH], name=name) for name in ("x", "target"))
        with stage():
            h = tf.tanh(dense(x, WIDTH, "one"))
        with stage():
            y = dense(h, WIDTH, "two")
            loss = tf.reduce_mean(tf.square(y - target))
        update = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, tf.train.get_or_create_global_step())
    summary = tf.summary.merge([tf.summary.scalar("loss", loss), tf.summary.histogram("y", y)])
    return Small(x, target, y, loss, update, tf.trainable_variables()[0], summary)


def locally_and_parallel(body: Callable[[Small, tf.Session], Any], resource: bool = True,
                         batch: Optional[int] = BATCH) -> List[Any]:
    """``body`` on an initialised session of the local script, and of the parallel one."""
    answers = []
    for annotate in (False, True):
        if annotate:
            wh.init(CONFIG, cluster="cpu:4")
        try:
            with tf.Graph().as_default():
                model = small(annotate, resource, batch)
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
                    answers.append(body(model, session))
        finally:
            wh.shutdown()
    return answers


def feed(model: Small, rows: slice = slice(None)) -> Dict:
    return {model.x: ROWS[rows], model.target: TARGETS[rows]}


def step(model: Small, session: tf.Session) -> float:
    return session.run([model.loss, model.update], feed(model))[0]


def assert_same(answers: List[Any]) -> None:
    local, parallel = answers
    np.testing.assert_allclose(parallel, local, rtol=1e-10)


# -- fetches -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluation_between_steps() -> None:
    def body(model: Small, session: tf.Session) -> List[float]:
        return [step(model, session), session.run(model.loss, feed(model)), step(model, session)]

    assert_same(locally_and_parallel(body))


@pytest.mark.slow
def test_prediction_needs_no_label() -> None:
    def body(model: Small, session: tf.Session) -> np.ndarray:
        step(model, session)
        return session.run(model.y, {model.x: ROWS})

    assert_same(locally_and_parallel(body))


@pytest.mark.slow
def test_update_alone_and_structured_fetches() -> None:
    def body(model: Small, session: tf.Session) -> Any:
        assert session.run(model.update, feed(model)) is None
        fetched = session.run({"a": [model.loss, model.update], "b": (model.y,)}, feed(model))
        assert fetched["a"][1] is None
        kernel = session.run(model.kernel)  # beside the update it would be the old value or the new one
        return np.concatenate([[fetched["a"][0]], fetched["b"][0].ravel(), kernel.ravel()])

    assert_same(locally_and_parallel(body))


@pytest.mark.slow
def test_gradients_and_per_example_values_are_merged() -> None:
    def body(model: Small, session: tf.Session) -> Any:
        graph = tf.get_default_graph()
        gradient = graph.get_tensor_by_name("gradients/one/MatMul_grad/tuple/control_dependency_1:0")
        hidden = graph.get_tensor_by_name("Tanh:0")
        values = session.run([gradient, hidden, model.update], feed(model))[:2]
        return np.concatenate([value.ravel() for value in values])

    assert_same(locally_and_parallel(body))


@pytest.mark.slow
def test_summaries_show_the_whole_batch() -> None:
    def body(model: Small, session: tf.Session) -> List[float]:
        texts = [session.run([model.summary, model.update], feed(model))[0] for _ in range(3)]
        values = [value for text in texts for value in tf.Summary.FromString(text).value]
        return [v.histo.sum if v.HasField("histo") else v.simple_value for v in values]

    local, parallel = locally_and_parallel(body)
    np.testing.assert_allclose(parallel, local, rtol=1e-6)


@pytest.mark.slow
def test_scope_whose_name_begins_like_ours_is_the_users() -> None:
    """Later ops in the user's scope ``whales`` are no clones, so a tensor of the model may be fed to them."""
    def body(model: Small, session: tf.Session) -> np.ndarray:
        step(model, session)
        hidden = session.graph.get_tensor_by_name("Tanh:0")
        with tf.name_scope("whales"):
            doubled = 2.0 * hidden
        return session.run(doubled, {hidden: ROWS})

    assert_same(locally_and_parallel(body))


@pytest.mark.slow
def test_global_step_counts_steps() -> None:
    def body(model: Small, session: tf.Session) -> int:
        for _ in range(3):
            step(model, session)
        return session.run(tf.train.get_global_step())

    assert locally_and_parallel(body) == [3, 3]


@pytest.mark.slow
def test_fewer_examples_than_clones() -> None:
    """Four examples run on four clones; three are refused, and training goes on after it."""
    def body(model: Small, session: tf.Session) -> List[float]:
        def run(count: int) -> float:
            return session.run([model.loss, model.update], feed(model, slice(0, count)))[0]

        losses = [run(24), run(4), run(5)]
        if len([op for op in session.graph.get_operations() if op.name.startswith("whale/")]):
            with pytest.raises(wh.InputError, match="a mini-batch of 3 examples does not divide over 4 parts; use a "):
                run(3)
        return losses + [run(24)]

    assert_same(locally_and_parallel(body, batch=None))


# -- writes of variables -----------------------------------------------------------------------------------------------


WRITES: Dict[str, Callable[[Small, tf.Session], Any]] = {
    "load": lambda model, session: model.kernel.load(np.eye(WIDTH), session),
    "assign": lambda model, session: session.run(tf.assign(model.kernel, tf.eye(WIDTH, dtype=tf.float64))),
    "assign_add": lambda model, session: session.run(tf.assign_add(model.kernel, tf.eye(WIDTH, dtype=tf.float64))),
    "initializer": lambda model, session: session.run(model.kernel.initializer),
    "all initializers": lambda model, session: session.run(tf.global_variables_initializer()),
}


@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False])
@pytest.mark.parametrize("name", sorted(WRITES))
def test_writes_reach_every_copy(name: str, resource: bool) -> None:
    def body(model: Small, session: tf.Session) -> List[float]:
        losses = [step(model, session) for _ in range(2)]
        WRITES[name](model, session)
        return losses + [step(model, session) for _ in range(3)] + list(session.run(model.kernel).ravel())

    assert_same(locally_and_parallel(body, resource))


@pytest.mark.slow
@pytest.mark.parametrize("variables, calls", [("auto", False), ("mirrored", True)])
def test_variables_initialised_before_the_optimizer_exists(variables: str, calls: bool) -> None:
    answers = []
    for annotate in (False, True):
        if annotate:
            wh.init({**CONFIG, "variables": variables}, cluster="cpu:4")
        with tf.Graph().as_default():
            x = tf.placeholder_with_default(ROWS, [BATCH, WIDTH])
            with wh.replicate(4) if annotate else contextlib.nullcontext():
                loss = tf.reduce_mean(tf.square(dense(x, WIDTH, "one")))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                before = session.run(loss)
                update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
                step = session.make_callable([loss, update]) if calls else lambda: session.run([loss, update])
                answers.append([before] + [step()[0] for _ in range(3)])
        wh.shutdown()
    assert_same(answers)


@pytest.mark.parametrize("config, parts", [({"variables": "mirrored"}, lambda: wh.replicate(2)), ({}, lambda: wh.split(2))])
def test_values_and_callables_made_before_the_optimizer_exists(config: Dict[str, Any], parts: Callable[[], Any]) -> None:
    """They follow the training, although the Session has had their ops before these changed."""
    answers = []
    for annotate in (False, True):
        if annotate:
            wh.init(config, cluster="cpu:2")
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            with parts() if annotate else contextlib.nullcontext():
                loss = tf.reduce_mean(tf.square(dense(tf.placeholder_with_default(ROWS, [BATCH, WIDTH]), WIDTH, "one")))
            metric = 2.0 * loss
            with tf.Session() as session:
                initialise, read, read_loss = map(session.make_callable, (
                    tf.global_variables_initializer(), tf.trainable_variables()[0].read_value(), metric))
                initialise()
                answers.append([*read().ravel()])
                update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
                for _ in range(2):
                    answers[-1].append(session.run([update, metric])[1])
                answers[-1] += [*read().ravel(), read_loss()]
        wh.shutdown()
    assert_same(answers)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch, unit", [(BATCH, 1), (None, 2 ** 28)])
def test_uneven_slices_of_an_edited_plan(batch: Optional[int], unit: int) -> None:
    """A person gives the first replica three times the work of the second, and unequal micro-batches; also in numbers whose
    products with the examples do not fit 32 bits."""
    def run(plan: Any = None) -> Any:
        wh.init(CONFIG, cluster="cpu:4", plan=plan)
        try:
            with tf.Graph().as_default():
                model = small(annotate=True, batch=batch)
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
                    return [step(model, session) for _ in range(5)], wh.current_plan()
        finally:
            wh.shutdown()

    even, plan = run()
    data = json.loads(plan.to_json())
    data["micro_batch_slices"] = [2, 1]
    data["task_graphs"][0]["slices"] = [3 * unit, unit]
    uneven, used = run(wh.Plan.parse(data).to_json())
    assert used.micro_batch_slices == (2, 1) and used.task_graphs[0].slices == (3 * unit, unit)
    np.testing.assert_allclose(uneven, even, rtol=1e-10)


@pytest.mark.slow
def test_session_takes_what_tf_config_has_set() -> None:
    """A Session without a ConfigProto takes memory growth, threads and the optimizer's options from tf.config."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    try:
        wh.init(cluster="cpu:2")
        with tf.Graph().as_default(), tf.Session() as session:
            config = session._config
    finally:
        tf.config.optimizer.set_experimental_options({"constant_folding": True, **before})
    rewrites = config.graph_options.rewrite_options
    assert rewrites.constant_folding == rewrites.OFF
    assert config.device_count["CPU"] >= 2


def test_explicit_rewrite_and_explanation() -> None:
    wh.init(CONFIG, cluster="cpu:4")
    try:
        with tf.Graph().as_default():
            small(annotate=True)
            plan = wh.parallelize()
            assert [t.device_count for t in plan.task_graphs] == [2, 2] and plan.num_micro_batch == 2
            assert wh.current_plan() == plan
            text = str(wh.explain())
        for task_graph in plan.task_graphs:
            assert task_graph.name in text
        assert plan.schedule in text
        assert wh.total_devices() == wh.total_gpus() == 4
    finally:
        wh.shutdown()


# -- life cycle --------------------------------------------------------------------------------------------------------


def patched_places() -> Dict[str, Any]:
    """Every attribute of TensorFlow's classes and modules in which hooks could hide."""
    places = [session_module.BaseSession, session_module.Session, session_module.InteractiveSession, ops.Graph,
              optimizer.Optimizer, saver.Saver, monitored_session.Scaffold, monitored_session.MonitoredSession,
              gradients_util, gradients_impl]
    return {f"{place.__name__}.{name}": value for place in places for name, value in vars(place).items()
            if callable(value) or isinstance(inspect.getattr_static(place, name), property)}


@pytest.mark.slow
def test_shutdown_leaves_nothing_behind() -> None:
    wh.shutdown()
    before = patched_places()
    with tf.Session(graph=tf.Graph()) as session:
        devices = len(session.list_devices())  # logical ones that eager execution in this process has, too
    wh.init(CONFIG, cluster="cpu:4")
    assert {name for name, value in patched_places().items() if before.get(name) is not value}
    wh.shutdown()
    after = patched_places()
    assert set(after) == set(before)
    assert not [name for name in before if before[name] is not after[name]]
    with tf.Graph().as_default() as graph:
        small(annotate=False)
        with tf.Session() as session:
            assert len(session.list_devices()) == devices
            session.run(tf.global_variables_initializer())
        assert not [op.name for op in graph.get_operations() if "whale" in op.name or "_whale" in str(op.node_def.attr)]


@pytest.mark.slow
def test_second_init_starts_afresh() -> None:
    try:
        wh.init({"num_micro_batch": 2}, cluster="cpu:4")
        with tf.Graph().as_default():
            small(annotate=True)
            assert wh.parallelize().num_devices == 4
        wh.init(cluster="cpu:2")
        with tf.Graph().as_default():
            small(annotate=True)
            plan = wh.parallelize()
        assert (plan.num_devices, plan.num_micro_batch, len(plan.task_graphs)) == (2, 1, 2)
    finally:
        wh.shutdown()


V2_OFF = """
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
from tests.numeric import test_sessions as t
def body(model, session):
    return [t.step(model, session) for _ in range(3)]
t.assert_same(t.locally_and_parallel(body, resource=False))
"""


@pytest.mark.slow
def test_with_version_2_behaviour_switched_off() -> None:
    """As a TensorFlow 1 script runs on TensorFlow 2: no eager execution, loops as dataflow ops, reference variables."""
    printed("-c", V2_OFF)


# -- estimators (TensorFlow 1.15 only: 2.x has none) -------------------------------------------------------------------


@pytest.fixture
def estimator_runs(tmp_path: Any) -> Iterator[Callable[[bool, bool], Dict[str, float]]]:
    def model_fn(annotate: bool) -> Callable[..., Any]:
        def build(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
            with wh.replicate(1) if annotate else contextlib.nullcontext():
                h = tf.tanh(dense(features, WIDTH, "one"))
            with wh.replicate(1) if annotate else contextlib.nullcontext():
                error = dense(h, WIDTH, "two") - labels
                loss = tf.reduce_mean(tf.square(error))
            metrics = {"absolute": tf.metrics.mean(tf.abs(error))}
            update = None
            if mode == tf.estimator.ModeKeys.TRAIN:
                update = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, tf.train.get_global_step())
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=update, eval_metric_ops=metrics)

        return build

    def data() -> Any:
        return tf.data.Dataset.from_tensors((ROWS, TARGETS)).repeat(100)

    def run(annotate: bool, together: bool) -> Dict[str, float]:
        if annotate:
            wh.init(CONFIG, cluster="cpu:2")
        try:
            estimator = tf.estimator.Estimator(model_fn(annotate), model_dir=str(tmp_path / str(annotate)))
            if together:
                return tf.estimator.train_and_evaluate(
                    estimator, tf.estimator.TrainSpec(data, max_steps=8), tf.estimator.EvalSpec(data, steps=2))[0]
            estimator.train(data, max_steps=4)
            estimator.train(data, max_steps=8)
            return estimator.evaluate(data, steps=2)
        finally:
            wh.shutdown()

    yield run


if TF1:
    @pytest.mark.slow
    @pytest.mark.parametrize("together", [False, True])
    def test_estimator(estimator_runs: Callable[[bool, bool], Dict[str, float]], together: bool) -> None:
        local, parallel = (estimator_runs(annotate, together) for annotate in (False, True))
        assert local["global_step"] == parallel["global_step"] == 8
        np.testing.assert_allclose(parallel["loss"], local["loss"], rtol=1e-6)
        np.testing.assert_allclose(parallel["absolute"], local["absolute"], rtol=1e-6)
