"""Version 1 loops in clones: equal to the local script; what is staged outside a loop enters its frame."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.emit import control_flow as cf
from tests.emit.control_flow import Setting
from tests.graph_editor.graphs import control_flow
from tests.numeric.script import weight
from whale_tf.errors import UnsupportedOpError

pytestmark = [pytest.mark.half, pytest.mark.graph_optimizer]
BODIES = [cf.reshaped, cf.mean_in_body, cf.weight_decay_in_body, cf.divided_by_rows, cf.nested, cf.branches,
          cf.weights_alone]


@pytest.mark.slow
@pytest.mark.parametrize("body, static", [
    pytest.param(body, static, marks=[] if number % 2 == static else [pytest.mark.full])
    for number, body in enumerate(BODIES) for static in (True, False)])
def test_clones_compute_what_the_local_script_does(body: Any, static: bool) -> None:
    expected = cf.run(body, Setting(1, static))
    found = cf.run(body, Setting(1, static, 2, 2))
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=1e-10, atol=1e-12)
    frames = {op.get_attr("frame_name") for op in found.graph.get_operations()
              if op.type == "Enter" and op.name.startswith("whale/")}
    assert len(frames) >= 8  # forward and backward loop, 4 clones each


def entered(body: Any, static: bool) -> Any:
    """What was brought into loops, by op type."""
    graph = cf.run(body, Setting(1, static, 2), steps=1).graph
    return [op for op in graph.get_operations() if op.name.startswith("whale/enter/")]


@pytest.mark.slow
def test_constants_wait_for_the_frame_and_run_time_numbers_enter_it() -> None:
    static = entered(cf.weight_decay_in_body, True)
    assert {op.type for op in static} == {"Const"} and all(op.control_inputs for op in static)
    at_run_time = entered(cf.weight_decay_in_body, False)
    assert {op.type for op in at_run_time} == {"Enter", "Identity"}
    assert all(op.get_attr("is_constant") for op in at_run_time if op.type == "Enter")


@pytest.mark.slow
def test_number_enters_an_inner_loop_through_the_outer() -> None:
    inner = [op for op in entered(cf.nested, False) if op.type == "Enter" and op.inputs[0].op.type == "Enter"]
    outer = [op.inputs[0].op for op in inner]
    assert inner and not {op.get_attr("frame_name") for op in inner} & {op.get_attr("frame_name") for op in outer}
    assert all(not op.inputs[0].op.type == "Enter" for op in outer)


@pytest.mark.slow
def test_loop_over_two_task_graphs_is_refused() -> None:
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default(), control_flow(1):
            x = tf.placeholder(tf.float64, [cf.BATCH, cf.WIDTH])
            left, right = (weight(name, [cf.WIDTH, cf.WIDTH], "float64") for name in ("left", "right"))

            def body(i: tf.Tensor, h: tf.Tensor) -> Any:
                with wh.replicate(1, name="left"):
                    h = tf.tanh(tf.matmul(h, left))
                with wh.replicate(1, name="right"):
                    return i + 1, tf.tanh(tf.matmul(h, right))

            loss = tf.reduce_mean(tf.while_loop(lambda i, h: i < 2, body, [0, x])[1])
            tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with pytest.raises(UnsupportedOpError, match="the while loop 'while/.*' has ops of TaskGraphs 'left' and 'right'"):
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
    finally:
        wh.shutdown()


def adapted(config: Any) -> np.ndarray:
    """Weights that are trained through a step of their own on each example, in a loop."""
    with tf.Graph().as_default(), control_flow(1):
        if config is not None:
            wh.init(config, cluster="cpu:2")
            wh.set_default_strategy(wh.replicate(2))
        tasks = tf.placeholder(tf.float64, [None, 4, 3])
        kernel = weight("kernel", [3, 5], "float64")

        def error(task: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.square(tf.tanh(tf.matmul(task, kernel)) - 0.5))

        losses = tf.map_fn(lambda task: error(task, kernel - tf.gradients(error(task, kernel), [kernel])[0]), tasks)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(losses))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {tasks: np.random.RandomState(0).randn(8, 4, 3)})
            return np.asarray(session.run(kernel))


@pytest.mark.slow
def test_shards_of_gradients_are_cut_inside_of_a_loop() -> None:
    """The numbers of columns of both shards are constants outside of the loop, which runs on one device."""
    expected = adapted(None)
    try:
        with pytest.warns(wh.IdleWarning):
            np.testing.assert_allclose(adapted({"zero": "v3"}), expected, rtol=1e-12)
    finally:
        wh.shutdown()
