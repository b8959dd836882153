"""Training that neither a Session nor a tf.function runs, and annotations where there is no graph: refused, never silently local.
Where TensorFlow has no place to rewrite a function, that holds for functions, too."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import whale_tf as wh
from whale_tf._tf_compat import function_tracing
from whale_tf.capture.annotations import annotations_of

v1 = tf.compat.v1
X, Y = np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)
MORE_THAN_LOCAL: Dict[str, Dict[str, Any]] = {
    "4 devices": {"cluster": "cpu:4"},
    "auto_parallel": {"config": {"auto_parallel": True}, "cluster": "cpu:1"},
    "2 micro-batches": {"config": {"num_micro_batch": 2}, "cluster": "cpu:1"}}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with context.eager_mode():
        yield
    wh.shutdown()


def weights() -> tf.Variable:
    return tf.Variable(np.ones([4, 1], np.float32))


def loss_of(w: tf.Variable) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.matmul(X, w) - Y))


def keras_model() -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


# -- ways to train -----------------------------------------------------------------------------------------------------
def keras_fit() -> None:
    keras_model().fit(X, Y, verbose=0)


def keras_train_on_batch() -> None:
    keras_model().train_on_batch(X, Y)


def tape() -> None:
    w = weights()
    with tf.GradientTape() as recorded:
        loss = loss_of(w)
    w.assign_sub(0.1 * recorded.gradient(loss, w))


def minimize() -> None:
    w = weights()
    v1.train.GradientDescentOptimizer(0.1).minimize(lambda: loss_of(w), var_list=[w])


def gradients_in_a_function() -> None:
    w = weights()

    @tf.function
    def step() -> None:
        w.assign_sub(0.1 * tf.gradients(loss_of(w), [w])[0])

    step()


def gradients_by_a_keras_variable() -> None:
    layer = tf.keras.layers.Dense(1, use_bias=False)
    layer.build((None, 4))

    @tf.function
    def step() -> None:
        w = layer.trainable_weights[0]
        w.assign(w - 0.1 * tf.gradients(tf.reduce_mean(tf.square(layer(X) - Y)), [w])[0])

    step()


def tape_in_a_function() -> None:
    w = weights()

    @tf.function
    def step() -> None:
        with tf.GradientTape() as recorded:
            loss = loss_of(w)
        w.assign_sub(0.1 * recorded.gradient(loss, w))

    step()


DIVIDED = function_tracing() is not None  # functions are
EAGER = [tape, minimize]
FUNCTIONS = [keras_fit, keras_train_on_batch, gradients_in_a_function, gradients_by_a_keras_variable, tape_in_a_function]


@pytest.mark.slow
@pytest.mark.parametrize("train", EAGER if DIVIDED else EAGER + FUNCTIONS, ids=lambda train: train.__name__)
def test_training_is_refused_until_shutdown(train: Callable[[], None]) -> None:
    wh.init(cluster="cpu:2")
    with pytest.raises(wh.PlanError, match="2 devices.*disable_eager_execution.*Session.*wh.shutdown"):
        train()
    wh.shutdown()
    train()


@pytest.mark.slow
@pytest.mark.parametrize("train", EAGER + FUNCTIONS, ids=lambda train: train.__name__)
def test_where_nothing_is_divided_training_is_local(train: Callable[[], None]) -> None:
    wh.init(cluster="cpu:1")
    train()


@pytest.mark.parametrize("asked", MORE_THAN_LOCAL)
def test_message_says_what_was_asked_for(asked: str) -> None:
    wh.init(**MORE_THAN_LOCAL[asked])
    with pytest.raises(wh.PlanError, match=f"wh.init.. was given .*{asked}"):
        tape()


# -- what is no training -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_preparing_data_is_no_training() -> None:
    wh.init(cluster="cpu:4")
    rows = tf.data.Dataset.from_tensor_slices(X).map(lambda row: tf.cond(row[0] > 0, lambda: 2 * row, lambda: row))
    rows = rows.map(lambda row: tf.py_function(lambda value: value + 1, [row], tf.float32)).batch(4)
    assert [batch.numpy().tolist() for batch in rows] == 2 * [[[3.0] * 4] * 4]
    counter = tf.Variable(0)
    counter.assign_add(1)
    with tf.GradientTape() as recorded:
        x = tf.constant(X)
        recorded.watch(x)
        y = tf.reduce_sum(x * x)
    assert recorded.gradient(y, x).numpy().tolist() == (2 * X).tolist()

    @tf.function
    def slope(x: tf.Tensor) -> tf.Tensor:
        return tf.gradients(x * x, x)[0]

    assert slope(tf.constant(3.0)).numpy() == 6.0
    assert int(counter) == 1


@pytest.mark.slow
def test_graph_of_a_session_is_no_business_of_this() -> None:
    """Keras layers, function bodies and custom gradients in a graph that is then trained in parallel."""
    @tf.custom_gradient
    def scaled(x: tf.Tensor) -> Any:
        return 2.0 * x, lambda dy: 2.0 * dy

    losses = {}
    for devices in (1, 2):
        wh.init(cluster=f"cpu:{devices}")
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [8, 4])
            h = tf.keras.layers.Dense(3, kernel_initializer="ones")(x)
            _, h = tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), (0, scaled(h)))
            train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(h), name="loss"))
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                losses[devices] = [session.run(["loss:0", train], {x: 0.1 * X})[0] for _ in range(3)]
            assert len(annotations_of(graph).gradient_calls) == 1
            assert (wh.current_plan().num_devices, len(set(losses[devices]))) == (devices, 3)
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


def opened(strategy: Any) -> None:
    with strategy:
        pass


# -- annotations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("annotate, called", [
    (lambda: opened(wh.replicate(1)), "wh.replicate"), (lambda: opened(wh.split(1)), "wh.split"),
    (lambda: wh.set_default_strategy(wh.replicate(1)), "wh.set_default_strategy"),
    (lambda: wh.set_default_strategy(None), "wh.set_default_strategy")], ids=["replicate", "split", "default", "no default"])
def test_annotations_need_a_graph(annotate: Callable[[], Any], called: str, devices: int) -> None:
    wh.init(cluster=f"cpu:{devices}")
    if DIVIDED and called == "wh.set_default_strategy":
        annotate()  # of all functions that are traced from now on
    else:
        with pytest.raises(wh.AnnotationError, match=f"{called} applies to ops of a .* eager.*@tf.function"):
            annotate()

    @tf.function
    def step() -> None:
        annotate()

    if DIVIDED:
        step()
    else:
        with pytest.raises(wh.AnnotationError, match=f"{called} is used in a tf.function .'step'.*Session"):
            step()


def test_default_strategy_is_taken_back() -> None:
    wh.init(cluster="cpu:2")
    with tf.Graph().as_default() as graph:
        wh.set_default_strategy(wh.split(2))
        assert annotations_of(graph).default is not None
        wh.set_default_strategy(None)
        assert annotations_of(graph).default is None and annotations_of(graph).items == []
        wh.set_default_strategy(wh.split(2))
        x = v1.placeholder(tf.float32, [8, 4])
        with wh.replicate(2, name="rest"):
            loss = tf.reduce_mean(tf.matmul(x, v1.get_variable("w", [4, 1])))
        wh.set_default_strategy(None)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        plan = wh.parallelize()
    assert [(task.name, task.strategy) for task in plan.task_graphs] == [("rest", "replicate")]


def test_default_strategy_is_that_of_graphs_made_later() -> None:
    """An Estimator makes a graph of its own."""
    wh.init(cluster="cpu:2")
    with tf.Graph().as_default():
        wh.set_default_strategy(wh.split(2))
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8, 4])
        loss = tf.reduce_mean(tf.matmul(x, v1.get_variable("w", [4, 2])))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        plan = wh.parallelize()
    assert [(task.name, task.strategy) for task in plan.task_graphs] == [("default", "split")]
