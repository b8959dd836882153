"""Functional loops and conditionals in clones: equal to the local script, with functions of their own."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.emit import control_flow as cf
from tests.emit.control_flow import Setting
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor import function_names

pytestmark = pytest.mark.half
LOOPS = [cf.reshaped, cf.mean_in_body, cf.weight_decay_in_body, cf.divided_by_rows, cf.positions, cf.weights_alone]


@pytest.mark.slow
@pytest.mark.parametrize("body, static", [
    pytest.param(body, static, marks=[] if number % 2 == static else [pytest.mark.full])
    for number, body in enumerate(LOOPS) for static in (True, False)])
def test_clones_compute_what_the_local_script_does(body: Any, static: bool) -> None:
    expected = cf.run(body, Setting(2, static))
    found = cf.run(body, Setting(2, static, 2, 2))
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=1e-10, atol=1e-12)
    clones = cf.functional_clones(found.graph)
    assert len(clones) >= 8 or body is cf.weights_alone  # forward and backward loop, 4 clones each


def calls(result: cf.Result, attribute: str) -> Any:
    """Functions that the clones of the forward loop call."""
    clones = [op for op in cf.functional_clones(result.graph) if "gradients" not in op.name]
    return [function_names(op.node_def)[attribute] for op in clones]


@pytest.mark.slow
def test_clones_of_one_size_share_a_function_and_the_original_keeps_its_own() -> None:
    found = cf.run(cf.reshaped, Setting(2, True, 2, 2), steps=1)
    assert len(set(calls(found, "body"))) == 1 and len(calls(found, "body")) == 4
    loop, = [op for op in found.graph.get_operations() if op.type.endswith("While") and op.name == "while"]
    original = function_names(loop.node_def)["body"]
    assert original not in calls(found, "body")
    shapes = {name: sorted({tuple(tf.make_ndarray(node.attr["value"].tensor).ravel()[:1]) for node in nodes(found, name)
                            if node.op == "Const" and node.attr["dtype"].type == tf.int32.as_datatype_enum
                            and node.attr["value"].tensor.tensor_shape.dim})
              for name in (original, calls(found, "body")[0])}
    assert (cf.BATCH,) in shapes[original] and (cf.BATCH // 4,) not in shapes[original]
    assert (cf.BATCH // 4,) in shapes[calls(found, "body")[0]]


def nodes(result: cf.Result, function: str) -> Any:
    library = result.graph.as_graph_def().library.function
    return next(f for f in library if f.signature.name == function).node_def


@pytest.mark.slow
def test_numbers_known_at_run_time_are_parameters_of_one_function_for_all_clones() -> None:
    found = cf.run(cf.weight_decay_in_body, Setting(2, False, 2, 2), steps=1)
    original, = [op for op in found.graph.get_operations() if op.type.endswith("While") and op.name == "while"]
    clones = [op for op in cf.functional_clones(found.graph) if "gradients" not in op.name]
    assert len(set(calls(found, "body"))) == 1 and len(set(calls(found, "cond"))) == 1
    assert {len(op.inputs) for op in clones} == {len(original.inputs) + 1}
    assert len({op.inputs[-1].name for op in clones}) == len(clones)  # each its own weight


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_each_clone_draws_its_own_numbers(version: int) -> None:
    numbers = cf.run(cf.drawn, Setting(version, True, 2), steps=1).numbers
    y = numbers[1:1 + cf.BATCH * cf.WIDTH].reshape(2, -1)
    assert not np.intersect1d(y[0], y[1]).size


def shared_draw(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return cf.loop(2, lambda i, h: [tf.tanh(tf.matmul(h, w)) * tf.random_uniform([], dtype=tf.float64)], x)[0]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_numbers_drawn_in_a_loop_for_all_examples_alike_are_refused(version: int) -> None:
    with pytest.raises(UnsupportedOpError, match="random numbers.*that must be the same on all devices.*before"):
        cf.run(shared_draw, Setting(version, True, 2), steps=1)


@pytest.mark.slow
def test_static_mean_in_a_body_is_refused_where_model_replicas_take_batches_of_their_own() -> None:
    with pytest.raises(UnsupportedOpError, match="'Mean' in a body of 'while' takes a mean over the batch.*'divide'"):
        cf.run(cf.mean_in_body, Setting(2, True, 1, dataset=True), steps=1)


def ordered_draw(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    def body(i: tf.Tensor, h: tf.Tensor) -> Any:
        with tf.control_dependencies([h]):
            drawn = tf.random_uniform([], seed=5, dtype=tf.float64)
        return [tf.tanh(tf.matmul(h, w)) * drawn]

    return cf.loop(2, body, x)[0]


def test_micro_batches_share_what_is_drawn_in_a_body() -> None:
    """A called step would draw once for each micro-batch, so it is not called."""
    expected = cf.run(ordered_draw, Setting(2, False))
    found = cf.run(ordered_draw, Setting(2, False, 2, 2, {"emit": "call"}))
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=1e-10, atol=1e-12)


def test_constant_of_the_batch_size_in_a_body_of_batches_of_any_size_is_refused() -> None:
    def body(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        numbers = np.arange(1.0, cf.BATCH + 1)[:, None]
        return tf.cond(tf.reduce_sum(w) > -1e9, lambda: tf.constant(numbers) * tf.matmul(x, w), lambda: x)

    with pytest.raises(UnsupportedOpError, match="the model is built for mini-batches of .* size of 'Placeholder:0' open"):
        cf.run(body, Setting(2, False, 2))
