"""Conditions and calls that update variables of several processes."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import numpy as np
import pytest
import tensorflow as tf

from whale_tf._tf_compat import eager_context, function_tracing
from whale_tf.capture.handles import variable_handles
from whale_tf.emit.effects import divide_effects
from whale_tf.runtime.verifying.local import make_variable
from whale_tf.runtime.verifying.replay import Replay

if function_tracing() is None:
    pytest.skip("functions are divided from TensorFlow 2.4 on", allow_module_level=True)

pytestmark = pytest.mark.slow


def pieces(update: Callable[..., Any], owners: List[Optional[int]], given: Any = (),
           members: Any = range(4)) -> Dict[str, List[int]]:
    """Piece -> numbers of the variables that it takes, in a function that makes ``update`` of variables with these owners.

    Args:
        given: values of its argument for which the pieces together do what the whole does.
        members: the processes of the step.
    """
    with tf.device("CPU:0"):
        variables = [tf.Variable(float(number)) for number in range(len(owners))]
    function = tf.function(lambda x: update(x, *variables)).get_concrete_function(tf.TensorSpec([], tf.float32))
    graph, number = function.graph, {id(variable.handle): index for index, variable in enumerate(variables)}
    numbers = {inner.op.name: number[id(outer)] for outer, inner in graph.captures}
    assert set(numbers) == set(variable_handles(graph))
    before = {op.name for op in graph.get_operations()}
    expected = [outcome(graph, numbers, value) for value in given]
    found = divide_effects(graph, {name: owners[index] for name, index in numbers.items()}, members)
    assert set(found) == {op.name for op in graph.get_operations()} - before
    taken = {}
    for name in found:  # a control output runs, and what runs after the whole runs after its pieces
        assert graph.get_operation_by_name(name) in graph.control_outputs
        taken[name] = sorted(numbers[tensor.op.name] for tensor in graph.get_operation_by_name(name).inputs
                             if tensor.op.name in numbers)
        assert {owners[index] for index in taken[name]} <= {None, found[name]}
    for value, values in zip(given, expected):
        np.testing.assert_allclose(outcome(graph, numbers, value), values, 1e-6)
    return dict(sorted(taken.items()))


def outcome(graph: Any, numbers: Dict[str, int], value: float) -> List[float]:
    """What a function returns, and what it leaves in its variables, whose values are their numbers."""
    definition, handles = tf.compat.v1.GraphDef(), variable_handles(graph)
    definition.CopyFrom(graph.as_graph_def())
    for node in definition.node:
        if node.name in handles:
            make_variable(node, handles[node.name])
    replay = Replay(definition, {name: np.float32(index) for name, index in numbers.items()}, None)
    fetches = {str(index): tensor.name for index, tensor in enumerate(graph.outputs)}
    found = replay.run(fetches, [op.name for op in graph.control_outputs], {graph.inputs[0].name: value})
    state = replay.variables()
    replay.close()
    return [*(found[str(index)] for index in range(len(fetches))), *(state[name] for name in sorted(numbers))]


def test_each_process_updates_its_own() -> None:
    def update(x: tf.Tensor, one: Any, other: Any, count: Any) -> tf.Tensor:
        def is_finite() -> tf.Tensor:
            one.assign_sub(x * tf.cast(count, tf.float32))
            other.assign_sub(x + tf.cast(count, tf.float32))
            tf.cond(count > 3, lambda: count.assign(0), lambda: count.assign_add(1))
            return x * 2
        return tf.cond(x > 0, is_finite, lambda: x)

    assert pieces(update, [0, 1, None], (1, -1)) == {"cond/of_0": [0, 2], "cond/of_1": [1, 2], "cond/of_all": [2]}
    assert pieces(update, [5, 7, None], members=(5, 7)) == pieces(update, [0, 1, None])  # steps side by side have equal names
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

    # a result is of one variable or the other
    assert pieces(update, [0, 1], (2, 1, -1)) == {"cond/of_0": [0], "cond/of_1": [1], "cond/of_all": []}
    assert pieces(of_one, [0, 1], (2, -1)) == {"cond/of_0": [0], "cond/of_1": [1]}


def test_what_another_process_computes_is_taken_in_the_next_round() -> None:
    def update(x: tf.Tensor, one: Any, other: Any, count: Any) -> tf.Tensor:
        def from_one() -> tf.Tensor:
            one.assign_add(x)
            other.assign(one * x)
            return x
        return tf.cond(x > 0, from_one, lambda: x)

    def counted(x: tf.Tensor, one: Any, other: Any, count: Any) -> tf.Tensor:
        def after_counting() -> tf.Tensor:
            count.assign_add(1)
            one.assign_add(tf.cast(count, tf.float32))
            other.assign_add(x)
            return one + count
        return tf.cond(x > 0, after_counting, lambda: x - other)

    assert pieces(update, [0, 1, None], (2, -1)) == {"cond/of_0": [0], "cond/of_1": [1], "cond/of_all": []}
    assert pieces(counted, [0, 1, None], (2, -1)) == {
        "cond/of_0": [0, 2], "cond/of_1": [1], "cond/of_all": [2], "cond/of_all_2": []}


def test_common_norm_of_what_processes_keep() -> None:
    """As in Keras' accumulated gradients that are clipped together, inside of the condition of its loss scale."""
    def update(x: tf.Tensor, one: Any, other: Any, count: Any) -> None:
        def is_due() -> tf.Tensor:
            norm = tf.sqrt(tf.reduce_sum(tf.stack([tf.square(one + x), tf.square(other + x)])))
            one.assign_sub(x / norm)
            other.assign_sub(x / norm)
            return tf.constant(0)

        def is_not() -> tf.Tensor:
            one.assign_add(x)
            other.assign_add(x)
            return tf.constant(0)

        def is_finite() -> tf.Tensor:
            tf.cond(x > 1, is_due, is_not)
            count.assign_add(1)
            return tf.constant(0)

        tf.cond(x > 0, is_finite, lambda: tf.constant(0))

    assert pieces(update, [0, 1, None], (2, 1, -1)) == {
        "cond/of_0": [0], "cond/of_0_2": [0], "cond/of_1": [1], "cond/of_1_2": [1], "cond/of_all": [2]}


def test_values_between_processes_have_their_static_shape() -> None:
    """So that each is one message, whichever branch is taken."""
    rows = [tf.Variable(tf.fill([3], float(number))) for number in range(2)]

    @tf.function
    def update(x: tf.Tensor) -> None:
        def both() -> tf.Tensor:
            rows[1].assign(x * rows[0])
            return tf.constant(0)
        tf.cond(tf.reduce_sum(x) > 0, both, lambda: tf.constant(0))

    graph = update.get_concrete_function(tf.TensorSpec([None], tf.float32)).graph
    owner = {inner.op.name: next(index for index, row in enumerate(rows) if row.handle is outer)
             for outer, inner in graph.captures}
    assert divide_effects(graph, owner, range(2)) == {"cond/of_0": 0, "cond/of_1": 1, "cond/of_all": None}
    assert [tensor.shape.as_list() for tensor in graph.get_operation_by_name("cond/of_0").outputs] == [[3]]
    assert graph.get_operation_by_name("cond/of_1").inputs[-1].op.name == "cond/of_0"


def test_what_cannot_travel_is_not_divided() -> None:
    def update(x: tf.Tensor, one: Any, other: Any, count: Any) -> None:
        def in_a_loop() -> tf.Tensor:
            def both(index: tf.Tensor) -> tf.Tensor:
                one.assign_add(x)
                other.assign_add(x)
                return index + 1
            return tf.while_loop(lambda index: index < 2, both, [tf.constant(0)])[0]
        tf.cond(x > 0, in_a_loop, lambda: tf.constant(0))

    assert pieces(update, [0, 1, None]) == {}


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
    assert pieces(update, [0, 1, None], (2, -1)) == pieces(seeded, [0, 1, None], (2, -1)) == apart
    assert pieces(noisy, [0, 1, None]) == apart  # the first process draws


def test_random_numbers_are_drawn_once() -> None:
    """What follows from them is the same in both processes, which hand values back and forth."""
    def noisy(x: tf.Tensor, one: Any, other: Any) -> tf.Tensor:
        def both() -> tf.Tensor:
            noise = tf.random.uniform([])
            one.assign(x + noise)
            other.assign(x - noise)
            one.assign(one + other)
            other.assign(one / 2)
            return one + other
        return tf.cond(x > 0, both, lambda: x)

    assert pieces(noisy, [1, 2], (4, -1)) == {
        "cond/of_1": [0], "cond/of_1_2": [0], "cond/of_2": [1], "cond/of_2_2": [1], "cond/of_all": []}


def test_random_numbers_for_what_every_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_context(), "_seed", None)  # other tests have set one

    def noisy(x: tf.Tensor, count: Any, other: Any) -> tf.Tensor:
        def inside() -> tf.Tensor:
            noise = tf.random.uniform([])
            count.assign(x + noise)
            count.assign_sub(noise)
            return x
        def both() -> tf.Tensor:
            tf.cond(x > 1, inside, lambda: x)
            return x + 1
        return tf.cond(x > 0, both, lambda: x)

    assert pieces(noisy, [None, None], (4, 1, -1)) == {"cond/of_0": [], "cond/of_all": [0]}
    assert pieces(lambda x, one: noisy(x, one, one), [2], (4, 1)) == {}  # one process draws, and no other needs it
