"""Conditions and calls that update variables of several processes."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import pytest
import tensorflow as tf

from whale_tf._tf_compat import function_tracing
from whale_tf.capture.handles import variable_handles
from whale_tf.emit.effects import divide_effects

if function_tracing() is None:
    pytest.skip("functions are divided from TensorFlow 2.4 on", allow_module_level=True)


def pieces(update: Callable[..., Any], owners: List[Optional[int]]) -> Dict[str, List[int]]:
    """Piece -> numbers of the variables that it takes, in a function that makes ``update`` of variables with these owners."""
    with tf.device("CPU:0"):
        variables = [tf.Variable(float(number)) for number in range(len(owners))]
    function = tf.function(lambda x: update(x, *variables)).get_concrete_function(tf.TensorSpec([], tf.float32))
    graph, number = function.graph, {id(variable.handle): index for index, variable in enumerate(variables)}
    numbers = {inner.op.name: number[id(outer)] for outer, inner in graph.captures}
    assert set(numbers) == set(variable_handles(graph))
    before = {op.name for op in graph.get_operations()}
    found = divide_effects(graph, {name: owners[index] for name, index in numbers.items()})
    assert found == {op.name for op in graph.get_operations()} - before
    for name in found:  # a control output runs, and what runs after the whole runs after its pieces
        assert graph.get_operation_by_name(name) in graph.control_outputs
    return {name: sorted(numbers[tensor.op.name] for tensor in graph.get_operation_by_name(name).inputs
                         if tensor.op.name in numbers) for name in sorted(found)}


def test_each_process_updates_its_own() -> None:
    def update(x: tf.Tensor, one: Any, other: Any, count: Any) -> tf.Tensor:
        def is_finite() -> tf.Tensor:
            one.assign_sub(x * tf.cast(count, tf.float32))
            other.assign_sub(x + tf.cast(count, tf.float32))
            tf.cond(count > 3, lambda: count.assign(0), lambda: count.assign_add(1))
            return x * 2
        return tf.cond(x > 0, is_finite, lambda: x)

    assert pieces(update, [0, 1, None]) == {"cond/of_0": [0, 2], "cond/of_1": [1, 2], "cond/of_all": [2]}
    assert pieces(update, [3, None, None]) == {"cond/of_3": [0, 2], "cond/of_all": [1, 2]}
    assert pieces(update, [None, None, None]) == pieces(update, [2, 2, 2]) == {}


def test_conditions_and_calls_inside_are_divided_too() -> None:
    @tf.function
    def both(one: Any, other: Any, x: tf.Tensor) -> None:
        one.assign(x)
        other.assign(-x)

    def update(x: tf.Tensor, one: Any, other: Any) -> None:
        def inside() -> tf.Tensor:
            both(one, other, x)
            return tf.cond(x > 1, lambda: one.assign_add(x) + 0.0, lambda: other.assign_add(x) + 0.0)
        tf.cond(x > 0, inside, lambda: x)

    def of_one(x: tf.Tensor, one: Any, other: Any) -> tf.Tensor:
        def inside() -> tf.Tensor:
            both(one, other, x)
            return one + x
        return tf.cond(x > 0, inside, lambda: x)

    assert pieces(update, [0, 1]) == {}  # a result is of one variable or the other
    assert pieces(of_one, [0, 1]) == {"cond/of_0": [0], "cond/of_1": [1]}


def test_what_another_process_computes_is_not_taken() -> None:
    def update(x: tf.Tensor, one: Any, other: Any, count: Any) -> None:
        def from_one() -> tf.Tensor:
            one.assign_add(x)
            other.assign(one * x)
            return x
        tf.cond(x > 0, from_one, lambda: x)

    def counted(x: tf.Tensor, one: Any, other: Any, count: Any) -> None:
        def after_counting() -> tf.Tensor:
            count.assign_add(1)
            one.assign_add(tf.cast(count, tf.float32))
            other.assign_add(x)
            return x
        tf.cond(x > 0, after_counting, lambda: x)

    assert pieces(update, [0, 1, None]) == {}
    assert pieces(counted, [0, 1, None]) == {}


def test_gradients_that_several_updates_read_and_random_numbers() -> None:
    def update(x: tf.Tensor, one: Any, other: Any, count: Any, noise: Callable[[], Any] = lambda: 0.0) -> None:
        def both() -> tf.Tensor:
            with tf.control_dependencies([one.assign_add(x)]):  # an op that waits for another process's is no reader of it
                other.assign_add(x + noise())
            return x
        tf.cond(x > 0, both, lambda: x)

    def noisy(*variables: Any) -> None:
        update(*variables, noise=lambda: tf.random.normal([]))

    def seeded(*variables: Any) -> None:
        update(*variables, noise=lambda: tf.random.normal([], seed=1))

    apart = {"cond/of_0": [0], "cond/of_1": [1], "cond/of_all": []}  # each process has the result
    assert pieces(update, [0, 1, None]) == pieces(seeded, [0, 1, None]) == apart
    assert pieces(noisy, [0, 1, None]) == {}
