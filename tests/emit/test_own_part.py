"""What one of several processes runs of a step, and which values may cross."""
from __future__ import annotations

from typing import Any, Callable, List, Optional

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework.func_graph import FuncGraph

from whale_tf.cluster import Processes
from whale_tf.emit.own_part import _Division
from whale_tf.errors import PlanError

FIRST, SECOND = ("/job:worker/replica:0/task:{}/device:CPU:0".format(task) for task in range(2))
PROCESSES = Processes(("a:1", "b:1"), 0)


def crossing(build: Callable[[tf.Tensor], Any]) -> List[str]:
    """Names of the values that the second process reads of the first one.

    Args:
        build: makes, with control flow of version 1, what the second process reads last.
    """
    with tf.Graph().as_default() as graph:
        was_on = tf.control_flow_v2_enabled()
        tf.disable_control_flow_v2()
        try:
            x = tf.placeholder(tf.float64, [2, 2], "x")
            with tf.device(FIRST):
                found = build(product(x))
            with tf.device(SECOND):
                product(found, "result")
        finally:
            (tf.enable_control_flow_v2 if was_on else tf.disable_control_flow_v2)()
    step = FuncGraph("step")
    with step.as_default():
        result, = tf.import_graph_def(graph.as_graph_def(), {}, ["result:0"], name="")
        step.outputs = [result]
    division = _Division(step, {}, {}, PROCESSES)
    return [division._definitions[one.output[0]].name for one in division.found.crossings if one.receiver == 1]


def product(x: tf.Tensor, name: Optional[str] = None) -> tf.Tensor:
    """Something that is not cheap, so that processes do not compute it again."""
    return tf.matmul(x, x, name=name)


def looped(x: tf.Tensor, device: str = FIRST) -> tf.Tensor:
    def body(i: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.device(device):
            return i + 1, product(y)

    return tf.while_loop(lambda i, y: i < 3, body, [0, x], name="loop")[1]


def branch(x: tf.Tensor, taken: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.cond(x[0, 0] > 0.0, lambda: taken(x), lambda: x)


def in_branch(x: tf.Tensor, taken: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """The second process reads a value inside of a branch."""
    def both(x: tf.Tensor) -> tf.Tensor:
        value = product(taken(x), "value")
        with tf.device(SECOND):
            return product(value)

    return branch(x, both)


@pytest.mark.parametrize("build, expected", [
    (looped, None),
    (lambda x: branch(x, product), None),
    (lambda x: looped(x, SECOND), "'loop/while_context' has ops of several processes"),
    (lambda x: in_branch(x, product), "'cond/value' is computed in some steps only"),
    (lambda x: in_branch(x, lambda x: branch(x, product)), "'cond/value' is computed in some steps only"),
    (lambda x: in_branch(x, looped), "'cond/value' is computed in some steps only"),
], ids=[
    "behind a loop", "behind a branch", "in a loop", "in a branch", "behind a branch in a branch", "behind a loop in a branch"])
def test_values_of_control_flow_of_version_1(build: Callable[[tf.Tensor], tf.Tensor], expected: Optional[str]) -> None:
    if expected is None:
        assert len(crossing(build)) == 1
    else:
        with pytest.raises(PlanError, match=expected):
            crossing(build)
