"""Loops, conditions and calls that read variables run on the devices of their replicas."""
from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.emit.control_flow import WIDTH, Setting, loop, run
from tests.graph_editor.graphs import control_flow
from tests.numeric.script import weight
from whale_tf.capture.recording import recording_of
from whale_tf.ir.traits import CALLS, CONDITIONALS, WHILES
from whale_tf.transforms.values import pass_values

FUNCTIONAL = WHILES | CONDITIONALS | CALLS
pytestmark = pytest.mark.filterwarnings("error::whale_tf.errors.IdleWarning")  # given if a loop is not divided


def inside() -> tf.Variable:
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return weight("inside", [WIDTH, WIDTH], "float64")


def in_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel = inside()
    return loop(3, lambda i, h: (tf.tanh(tf.matmul(h, kernel) + tf.matmul(x, w)),), x)[0]


def in_nested_loops(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel = inside()
    return loop(2, lambda i, h: loop(2, lambda j, g: (tf.tanh(tf.matmul(g, kernel) + tf.matmul(x, w)),), h), x)[0]


def in_condition_of_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel = inside()
    return loop(3, lambda i, h: (tf.cond(i > 0, lambda: tf.tanh(tf.matmul(h, kernel)), lambda: tf.matmul(x, w)),), x)[0]


def in_two_loops(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return in_loop(in_loop(x, w), w)


def in_condition(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel, positive = inside(), tf.reduce_sum(w) > -100.0
    return tf.cond(positive, lambda: tf.matmul(tf.tanh(x), kernel), lambda: tf.matmul(x, w))


def in_case(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel, number = inside(), tf.cast(tf.reduce_sum(w) > -100.0, tf.int32)
    return tf.switch_case(number, [lambda: tf.matmul(x, w), lambda: tf.matmul(tf.tanh(x), kernel)])


def in_call(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel = inside()
    return tf.function(lambda h: tf.tanh(tf.matmul(h, kernel)))(tf.matmul(x, w))


def in_call_of_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel = inside()
    layer = tf.function(lambda h: tf.tanh(tf.matmul(h, kernel)))
    return loop(3, lambda i, h: (layer(h) + tf.matmul(x, w),), x)[0]


def look_up_in_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    table = weight("table", [5, WIDTH], "float64")
    numbers = tf.cast(tf.abs(x[:, 0]) * 2, tf.int32) % 5
    return loop(3, lambda i, h: (tf.tanh(h + tf.gather(table, (numbers + i) % 5)),), tf.matmul(x, w))[0]


def in_loop_of_call(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The function returns the handle of the variable, which its gradient asks for the shape."""
    kernel = inside()
    layers = tf.function(lambda h: loop(3, lambda i, h: (tf.tanh(tf.matmul(h, kernel)),), h)[0])
    return layers(tf.matmul(x, w))


def in_loop_of_nested_calls(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel = inside()
    layer = tf.function(lambda h: tf.tanh(tf.matmul(h, kernel)))
    layers = tf.function(lambda h: loop(3, lambda i, h: (layer(h),), h)[0])
    return tf.function(lambda h: tf.sin(layers(h)) + layer(h))(tf.matmul(x, w))


def look_up_in_call(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    table = weight("table", [5, WIDTH], "float64")
    numbers = tf.cast(tf.abs(x[:, 0]) * 2, tf.int32) % 5
    return tf.function(lambda h: tf.tanh(h + tf.gather(table, numbers)))(tf.matmul(x, w))


def look_ups_in_loop_of_call(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The gradient's function has an Identity of each handle, too."""
    table, rows = weight("table", [3, 3, WIDTH], "float64"), weight("rows", [3, WIDTH], "float64")
    numbers = tf.cast(tf.abs(x[:, :2]) * 2, tf.int32) % 3

    def once(i: tf.Tensor, h: tf.Tensor) -> Any:
        places = (numbers + i) % 3
        return (tf.tanh(h + tf.gather_nd(table, places) + tf.gather(rows, places[:, 0])),)

    return tf.function(lambda h: loop(3, once, h)[0])(tf.matmul(x, w))


def in_loop_of_condition(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kernel, positive = inside(), tf.reduce_sum(w) > -100.0
    return tf.cond(positive, lambda: loop(3, lambda i, h: (tf.tanh(tf.matmul(h, kernel)),), tf.matmul(x, w))[0], lambda: x)


def in_loop_of_condition_of_call(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda h: in_loop_of_condition(h, w))(x)


BODIES = [in_loop, in_condition, in_case, in_call]
if not tf.__version__.startswith("1."):  # which cannot differentiate these, and does not know the rank of a look-up in a loop
    BODIES += [in_nested_loops, in_condition_of_loop, look_up_in_loop, in_call_of_loop, in_loop_of_call, in_loop_of_nested_calls,
               look_up_in_call, look_ups_in_loop_of_call, in_loop_of_condition, in_loop_of_condition_of_call]


@pytest.mark.parametrize("config", [{}, {"num_micro_batch": 2}], ids=["plain", "micro-batches"])
@pytest.mark.parametrize("body", BODIES)
def test_ops_of_a_replica_run_on_its_device(body: Callable[..., Any], config: Any) -> None:
    found = run(body, Setting(2, True, 2, extra=config))
    np.testing.assert_allclose(found.numbers, run(body, Setting(2, True)).numbers, rtol=1e-12, atol=1e-14)
    devices = {op.device[-5:] for op in found.graph.get_operations() if "_r1/" in op.name and op.type in FUNCTIONAL}
    assert devices == {"CPU:1"}


@pytest.mark.parametrize("config", [{"zero": "v2"}, {"offload": "states", "num_micro_batch": 2}], ids=["zero", "offload"])
@pytest.mark.parametrize("body", [in_two_loops, in_nested_loops, look_up_in_loop, *BODIES[5:6], *BODIES[7:8]])
def test_version_1_loops_read_variables_that_are_in_one_place(body: Callable[..., Any], config: Any) -> None:
    found = run(body, Setting(1, False, 2, extra=config))
    np.testing.assert_allclose(found.numbers, run(body, Setting(1, False)).numbers, rtol=1e-12, atol=1e-14)


def test_a_condition_that_asks_whether_a_variable_has_a_value_keeps_its_handle() -> None:
    def body(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        missing = tf.get_variable("missing", [WIDTH, WIDTH], tf.float64, trainable=False, collections=[])  # without a value
        chosen = tf.cond(missing.is_initialized(), lambda: missing + 0.0, lambda: tf.tanh(w))
        return tf.matmul(x, w + tf.stop_gradient(chosen))

    np.testing.assert_allclose(run(body, Setting(2, True, 2)).numbers, run(body, Setting(2, True)).numbers, rtol=1e-12)


def test_a_loop_that_writes_a_variable_keeps_its_handle() -> None:
    wh.init({}, cluster="cpu:2")
    with tf.Graph().as_default() as graph, control_flow(2), tf.variable_scope("", use_resource=True):
        kernel, count = inside(), tf.get_variable("count", [], tf.float64, trainable=False)

        def once(i: tf.Tensor, h: tf.Tensor) -> Any:
            with tf.control_dependencies([count.assign_add(1.0)]):
                return (tf.tanh(tf.matmul(h, kernel)),)

        loss = tf.reduce_sum(loop(3, once, tf.ones([1, WIDTH], tf.float64))[0])
        tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        ops = pass_values(recording_of(graph)).graph
    found = next(op for op in ops.ops if op.type in WHILES)
    sources = {ops.producer(tensor).name: ops.tensors[tensor].dtype for tensor in found.inputs}
    assert sources["count"] == "resource" and "inside" not in sources
    assert sources[f"{found.name}/inside"] == "float64"


def reads_in_turn(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A read of a variable in a loop waits for that of another."""
    one, two = inside(), weight("other", [WIDTH, WIDTH], "float64")

    def body(i: tf.Tensor, h: tf.Tensor) -> Any:
        first = tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=tf.float64)
        with tf.control_dependencies([first]):
            second = tf.raw_ops.ReadVariableOp(resource=two.handle, dtype=tf.float64)
        return (tf.tanh(tf.matmul(tf.matmul(h, first), second) + tf.matmul(x, w)),)

    return loop(2, body, x)[0]


def test_reads_in_loops_of_version_1_may_wait_for_each_other() -> None:
    found = run(reads_in_turn, Setting(1, False, 2, extra={"variables": "mirrored"}))
    np.testing.assert_allclose(found.numbers, run(reads_in_turn, Setting(1, False)).numbers, rtol=1e-12, atol=1e-14)


def test_loop_that_reads_what_a_loop_before_it_writes() -> None:
    """The value that it is given is read after the write."""
    wh.init({}, cluster="cpu:2")
    with tf.Graph().as_default() as graph, control_flow(2), tf.variable_scope("", use_resource=True):
        kernel, scale = inside(), tf.get_variable("scale", [], tf.float64, tf.ones_initializer(), trainable=False)

        def once(i: tf.Tensor, h: tf.Tensor) -> Any:
            with tf.control_dependencies([scale.assign_add(1.0)]):
                return (tf.tanh(tf.matmul(h, kernel)),)

        first = loop(2, once, tf.ones([1, WIDTH], tf.float64))[0]
        second = loop(2, lambda i, h: (tf.matmul(h, kernel) * scale,), first)[0]
        loops = [op for op in graph.get_operations() if op.type in WHILES]
        loops[1]._add_control_input(loops[0])  # as a tf.function has it
        tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(second))
        ops = pass_values(recording_of(graph)).graph
    forward = [op for op in ops.ops if op.type in WHILES and "gradients" not in op.name]
    read = next(op for op in ops.ops if op.name == f"{forward[1].name}/scale")
    assert read.type == "ReadVariableOp" and [ops.ops[wait].name for wait in read.control_inputs] == [forward[0].name]
