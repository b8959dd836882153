"""The check for races finds one, and nothing where there is none."""
from __future__ import annotations

from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from tests.numeric.races import no_races, unordered


def _step(order: str, scope: str = "whale") -> Any:
    """A lookup in a variable, and its update."""
    with tf.variable_scope("", use_resource=True):
        table = tf.get_variable("table", initializer=[1.0, 2.0, 3.0])
    with tf.name_scope(scope):
        read = tf.gather(table, [0])
        with tf.control_dependencies([read] if order == "read first" else []):
            update = table.assign_add([1.0, 1.0, 1.0], read_value=False)
        if order == "write first":
            with tf.control_dependencies([update]):
                read = tf.gather(table, [0])
    return read, update


@pytest.mark.parametrize("order", ["read first", "write first", "none"])
def test_what_follows_from_the_other_is_in_order(graph: tf.Graph, order: str) -> None:
    read, update = _step(order)
    assert bool(unordered([read.op, update])) == (order == "none")
    assert not unordered([read.op]), "without the write"


@pytest.mark.parametrize("waits_for", ["the loop", "nothing"])
def test_loops_result_follows_from_its_rounds(graph: tf.Graph, waits_for: str) -> None:
    with tf.variable_scope("", use_resource=True):
        table = tf.get_variable("table", initializer=[1.0, 2.0, 3.0])
    with tf.name_scope("whale"):
        read = tf.gather(table, [0])
        _, total = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x + read), [0, tf.zeros([1])])
        last = total if waits_for == "the loop" else tf.constant(0)
        with tf.control_dependencies([last]):
            update = table.assign_add([1.0, 1.0, 1.0], read_value=False)
    assert bool(unordered([total.op, update])) == (waits_for != "the loop")


def test_local_scripts_own_races_are_left_alone(graph: tf.Graph) -> None:
    read, update = _step("none", "model")
    assert not unordered([read.op, update])


def test_runs_of_sessions_are_checked(graph: tf.Graph) -> None:
    read, update = _step("none")
    with no_races(), tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(update)
        with pytest.raises(AssertionError, match="before or after the write"):
            session.run([read, update])
