"""Small training programs divided into uneven clones: every tensor, loss and gradient merges to the whole's value."""

from __future__ import annotations

from typing import Iterator, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ir.emulation import Emulation
from tests.ir.programs import CONTROL_FLOW, PROGRAMS, Program, build, dense, feeds, variable
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import Options

PARTS = [1, 4, 2]
BATCH = sum(PARTS)
FLOAT32 = ("losses_weighted",)


@pytest.fixture(params=["while frames", "functions"])
def control_flow(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways TensorFlow writes loops and conditions."""
    was_enabled = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if request.param == "functions" else tf.disable_control_flow_v2)()
    yield request.param
    (tf.enable_control_flow_v2 if was_enabled else tf.disable_control_flow_v2)()


def check(program: Program, batch: Optional[int], resource: bool = False, everything: bool = True,
          options: Options = Options()) -> Emulation:
    """Build, divide, run and compare."""
    with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=resource):
        inputs, found = build(program, batch)
        initialiser = tf.global_variables_initializer()
        emulation = Emulation(graph, dict.fromkeys(inputs, 0), found, PARTS, options)
        feed = dict(zip([t.name for t in inputs], feeds(program, BATCH)))
        whole, merged = emulation.run(feed, initialiser.name, everything)
    tolerance = 1e-5 if program.name in FLOAT32 else 1e-9
    assert len(found) > 1 and not emulation.axis.inexact
    for tensor, expected, actual in zip(emulation.fetches, whole, merged):
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * 1e-2, err_msg=f"{emulation.ops.tensor_name(tensor)} ({emulation.axis.layout(tensor)})")
    return emulation


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("batch", [BATCH, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_tensor_merges_to_the_whole_s(program: Program, batch: Optional[int]) -> None:
    if program.only == "static":
        batch = BATCH
    check(program, batch, resource=bool(len(program.name) % 2))


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.graph_optimizer  # folds the constants that the emulation puts beside the ops of a loop, outside of its frame
@pytest.mark.parametrize("batch", [BATCH, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", CONTROL_FLOW, ids=str)
def test_loops_and_conditions(program: Program, batch: Optional[int], control_flow: str) -> None:
    if program.only == "static":
        batch = BATCH
    if program.only == "while frames" and control_flow == "functions":
        tf.disable_control_flow_v2()
    emulation = check(program, batch, everything=control_flow == "functions" and not program.only)
    types = {op.type for op in emulation.ops.ops}
    assert types & ({"Switch"} if "while frames" in (control_flow, program.only) else {"While", "StatelessWhile", "If", "StatelessIf"})


def _batch_statistics(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(dense(x, 4, "a"), axes=[0])
    h = tf.nn.batch_normalization(dense(x, 4, "a2"), mean, variance, variable("beta", 4), variable("gamma", 4), 1e-3)
    return tf.reduce_mean(tf.square(h)) + tf.reduce_sum(h) / (1.0 + tf.reduce_sum(tf.square(h)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [BATCH, None], ids=["static", "dynamic"])
def test_synchronised_statistics_are_exact(batch: Optional[int]) -> None:
    """Statistics of trained values, forward and backward, combined over the clones."""
    program = Program("batch_statistics", _batch_statistics, [("float64", (6,))])
    check(program, batch, options=Options(sync=lambda op: True))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [BATCH, None], ids=["static", "dynamic"])
def test_unsynchronised_statistics_are_each_clone_s_own(batch: Optional[int]) -> None:
    """Merged gradients are the weighted mean of what the local program gives on each part by itself."""
    def normalised(x: tf.Tensor) -> tf.Tensor:
        h = dense(x, 4, "a")
        mean, variance = tf.nn.moments(h, axes=[0])
        return tf.reduce_mean(tf.square(tf.tanh((h - mean) * tf.rsqrt(variance + 1e-3)) + variable("shift", 4)))
    program = Program("normalised", normalised, [("float64", (6,))])
    with tf.Graph().as_default() as graph:
        inputs, found = build(program, batch)
        initialiser = tf.global_variables_initializer()
        emulation = Emulation(graph, dict.fromkeys(inputs, 0), found, [3, 4])
    examples = feeds(program, 7)[0]
    _, merged = emulation.run({inputs[0].name: examples}, initialiser.name)
    assert emulation.axis.inexact
    expected = []
    with tf.Graph().as_default(), tf.Session() as session:
        (x,), results = build(program, None)
        session.run(tf.global_variables_initializer())
        parts = [session.run(results, {x: part}) for part in (examples[:3], examples[3:])]
        expected = [3 / 7.0 * a + 4 / 7.0 * b for a, b in zip(*parts)]
    for actual, value in zip(merged, expected):
        np.testing.assert_allclose(actual, value, rtol=1e-9, atol=1e-12)


def _examples_apart(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda row: tf.reduce_sum(tf.square(row)), dense(x, 3, "a")))


@pytest.mark.slow
def test_loops_over_examples(control_flow: str) -> None:
    """In functions each clone's loop runs over its own examples."""
    program = Program("apart", _examples_apart, [("float64", (6,))])
    if control_flow == "functions":
        check(program, None, everything=False)
    else:
        with pytest.raises(UnsupportedOpError, match="cannot be divided along the batch: it has an element for each example"):
            check(program, None)


def _in_batch_softmax(x: tf.Tensor) -> tf.Tensor:
    h = dense(x, 3, "a")
    return tf.reduce_mean(tf.nn.softmax(tf.matmul(h, h, transpose_b=True)))


def _first_example(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(dense(x, 3, "a")[0])


def _half_of_the_batch(x: tf.Tensor) -> tf.Tensor:
    h = dense(x, 3, "a")
    return tf.reduce_mean(h[:tf.shape(h)[0] // 2])


def _shuffled(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.random_shuffle(x) * dense(x, 6, "b"))


def _groups(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.reshape(dense(x, 3, "a"), [3, -1])))


@pytest.mark.parametrize("batch", [BATCH, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("build_loss", [
    _in_batch_softmax, _first_example, _half_of_the_batch, _shuffled, _groups])
def test_what_mixes_examples_is_refused(build_loss: object, batch: Optional[int]) -> None:
    program = Program("refused", build_loss, [("float64", (6,))])  # type: ignore[arg-type]
    with tf.Graph().as_default() as graph:
        inputs, found = build(program, batch)
        with pytest.raises(UnsupportedOpError, match="cannot be divided along the batch: .*Move it out of the parallel region"):
            Emulation(graph, dict.fromkeys(inputs, 0), found, PARTS)
