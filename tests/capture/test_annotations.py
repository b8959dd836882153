"""Annotations and gradient calls are noted, and the ops tagged, in the graph they belong to."""
from __future__ import annotations

import gc
import weakref
from typing import Any, List

import pytest
import tensorflow as tf

from tests.capture.models import dense, placeholder
from whale_tf.capture import annotations as notes
from whale_tf.capture.record import record
from whale_tf.errors import AnnotationError

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("hooked")


def tag(operation: Any) -> int:
    try:
        return operation.get_attr("_whale_task_graph")
    except ValueError:
        return -1


def test_ops_inside_are_tagged(graph: Any) -> None:
    before = tf.constant(1.0)
    with notes.annotate(graph, "replicate", 2) as first:
        inside = tf.add(before, 1.0)
    with notes.annotate(graph, "split", name="experts") as second:
        other = tf.add(inside, 1.0)
    after = tf.add(other, 1.0)
    assert [tag(t.op) for t in (before, inside, other, after)] == [-1, 0, 1, -1]
    assert (first.strategy, first.device_count, first.name) == ("replicate", 2, "replicate_0")
    assert (second.strategy, second.device_count, second.name) == ("split", None, "experts")
    assert notes.annotations_of(graph).items == [first, second]
    assert [record(graph).op(t.op.name).task_graph for t in (before, inside, other, after)] == [-1, 0, 1, -1]


def test_tags_end_when_the_block_raises(graph: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with notes.annotate(graph, "replicate"):
            raise ZeroDivisionError
    assert tag(tf.constant(1.0).op) == -1
    with notes.annotate(graph, "replicate"):  # not taken for nested
        pass


def test_name_continues_its_task_graph(graph: Any) -> None:
    with notes.annotate(graph, "replicate", 1, "encoder"):
        pass
    with notes.annotate(graph, "replicate", 1, "head"):
        pass
    with notes.annotate(graph, "replicate", 1, "encoder") as again:
        x = tf.constant(1.0)
    assert again.index == 0
    assert tag(x.op) == 0
    assert len(notes.annotations_of(graph).items) == 2


def test_name_with_other_arguments_is_refused(graph: Any) -> None:
    with notes.annotate(graph, "replicate", 1, "encoder"):
        pass
    with pytest.raises(AnnotationError, match=r"'encoder' was opened as wh.replicate\(1\) .* as wh.split\(\)"):
        with notes.annotate(graph, "split", None, "encoder"):
            pass


def test_blocks_without_names_are_new_task_graphs(graph: Any) -> None:
    for _ in range(3):
        with notes.annotate(graph, "replicate", 1):
            pass
    assert [item.name for item in notes.annotations_of(graph).items] == ["replicate_0", "replicate_1", "replicate_2"]


def test_nesting_is_refused(graph: Any) -> None:
    with notes.annotate(graph, "replicate", 1):
        with pytest.raises(AnnotationError, match="wh.replicate inside wh.replicate .* Close the outer"):
            with notes.annotate(graph, "replicate", 1):
                pass
        with pytest.raises(AnnotationError, match="wh.set_default_strategy inside wh.replicate"):
            notes.set_default_strategy(graph, "replicate")
        assert tag(tf.constant(1.0).op) == 0
    assert len(notes.annotations_of(graph).items) == 1


@pytest.mark.parametrize("device_count", [0, -1, 1.5, "2", True])
def test_bad_device_counts(graph: Any, device_count: Any) -> None:
    with pytest.raises(AnnotationError, match="device count must be a whole number of at least 1"):
        with notes.annotate(graph, "replicate", device_count):
            pass


def test_unknown_strategy(graph: Any) -> None:
    with pytest.raises(AnnotationError, match="'stage' is not one of replicate, split"):
        with notes.annotate(graph, "stage"):
            pass


def test_other_graphs_are_not_touched(graph: Any) -> None:
    with notes.annotate(graph, "replicate", 1):
        with tf.Graph().as_default() as other:
            foreign = tf.constant(1.0)
            with notes.annotate(other, "split", 1):  # its own graph: not nested
                inside_other = tf.constant(1.0)
        own = tf.constant(1.0)
    assert tag(foreign.op) == -1
    assert tag(inside_other.op) == 0
    assert tag(own.op) == 0
    assert [item.strategy for item in notes.annotations_of(other).items] == ["split"]


@pytest.mark.parametrize("functional", [False, True])
def test_control_flow_inside(graph: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    with notes.annotate(graph, "replicate", 1):
        x = placeholder()
        _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])
        y = v1.cond(tf.reduce_sum(h) > 0, lambda: h, lambda: 2.0 * h)
    assert tag(y.op) == 0
    ops = record(graph)
    assert {op.task_graph for op in ops.ops} == {0}
    bodies = [body for op in ops.ops for body in (op.body or {}).values()]
    assert bool(bodies) == functional
    assert {op.task_graph for body in bodies for op in body.ops} <= {-1}


def test_annotating_inside_a_body_of_an_annotated_loop_is_nesting(graph: Any, control_flow: Any) -> None:
    control_flow(True)

    def body(i: Any) -> Any:
        with notes.annotate(v1.get_default_graph(), "replicate", 1):
            return i + 1

    with pytest.raises(AnnotationError, match="do not nest"):
        with notes.annotate(graph, "replicate", 1):
            v1.while_loop(lambda i: i < 3, body, [0])


@pytest.mark.slow
def test_inside_a_function_that_is_traced(graph: Any) -> None:
    """A function of its own, such as a whole training step, can be annotated."""
    found: List[Any] = []

    @tf.function
    def step(x: Any) -> Any:
        with notes.annotate(v1.get_default_graph(), "replicate", 1):
            y = x + 1.0
        found.append(tag(y.op))
        return y

    step.get_concrete_function(tf.TensorSpec([2], tf.float32))
    assert found[0] == 0


def test_default_strategy(graph: Any) -> None:
    first = notes.set_default_strategy(graph, "replicate", 2)
    with notes.annotate(graph, "split", 2, "experts") as experts:
        pass
    table = notes.annotations_of(graph)
    assert table.default is first
    assert (first.index, experts.index) == (0, 1)
    second = notes.set_default_strategy(graph, "replicate", 4)
    assert table.default is second
    assert table.items == [second, experts]


def test_second_default_strategy_begins_another_task_graph(graph: Any) -> None:
    first = notes.set_default_strategy(graph, "split", 2)
    x = placeholder()
    with notes.annotate(graph, "replicate", 2) as block:
        y = x + 1.0
    replaced = notes.set_default_strategy(graph, "replicate", 2)
    second = notes.set_default_strategy(graph, "replicate", 1)  # no op in between
    z = y * 2.0
    table = notes.annotations_of(graph)
    assert (tag(x.op), tag(y.op), tag(z.op)) == (first.index, block.index, -1)
    assert table.items == [first, block, second] and table.default is second
    assert (first.name, second.name, second.index) == ("default", "default_2", replaced.index)


def test_eager_execution_is_refused() -> None:
    if v1.executing_eagerly():
        with pytest.raises(AnnotationError, match="tf.Graph"):
            notes.current_graph("wh.replicate")
    with tf.Graph().as_default() as graph:
        assert notes.current_graph("wh.replicate") is graph


def test_function_bodies_are_refused(control_flow: Any) -> None:
    control_flow(True)

    def body() -> Any:
        notes.current_graph("wh.split")
        return tf.constant(1.0)

    with tf.Graph().as_default():
        with pytest.raises(AnnotationError, match="wh.split is used in the body of a function .*around the whole call"):
            v1.cond(v1.placeholder(tf.bool, []), body, body)
        with pytest.raises(AnnotationError, match="in the body of a function"):
            tf.data.Dataset.range(3).map(lambda i: body())


def test_default_strategy_that_was_taken_back_leaves_the_others_as_they_are(graph: Any) -> None:
    notes.forget_default_strategy(graph)  # nothing to take back
    first = notes.set_default_strategy(graph, "replicate", 2)
    with notes.annotate(graph, "split", 2) as experts:
        x = placeholder()
    notes.forget_default_strategy(graph)
    table = notes.annotations_of(graph)
    assert (table.default, table.items) == (None, [experts])
    assert tag(x.op) == experts.index == first.index + 1
    second = notes.set_default_strategy(graph, "replicate", 4)
    assert second.index > experts.index and table.items == [experts, second]


def test_gradient_call_is_noted(graph: Any) -> None:
    x = placeholder()
    loss = tf.reduce_mean(dense(x, 1, "a"), name="loss")
    unused = v1.get_variable("unused", [1])
    pairs = v1.train.GradientDescentOptimizer(0.1).compute_gradients(loss)
    call, = notes.annotations_of(graph).gradient_calls
    assert call.ys == ["loss:0"]
    assert call.xs == ["a/w:0", "a/b:0", "unused:0"]
    assert call.grads == [pairs[0][0].name, pairs[1][0].name, None]
    assert (call.first_op, call.last_op) == ("gradients/Shape", graph.get_operations()[-1].name)
    assert pairs[2][1] is unused


def test_sparse_gradients_and_other_tensors(graph: Any) -> None:
    table = v1.get_variable("table", [5, 2])
    rows = tf.gather(table, placeholder([None], "ids", tf.int32), name="rows")
    gradients = tf.gradients(tf.reduce_sum(rows), [table, rows])
    call, = notes.annotations_of(graph).gradient_calls
    sparse = gradients[0]
    assert call.xs == ["table:0", rows.name]
    assert call.grads == [(sparse.values.name, sparse.indices.name, sparse.dense_shape.name), gradients[1].name]


def test_call_that_fails_is_not_kept(graph: Any) -> None:
    x = placeholder()
    with pytest.raises(Exception):  # noqa: B017 (TensorFlow's own error, another in each version)
        tf.gradients(tf.raw_ops.Angle(input=tf.complex(x, x), name="angle"), [object()])
    loss = tf.reduce_mean(x)
    tf.gradients(loss, x)
    calls = notes.annotations_of(graph).gradient_calls
    assert [call.ys for call in calls] == [[loss.name]]
    assert calls[0].index == 1
    assert tag(tf.constant(1.0).op) == -1


@pytest.mark.parametrize("functional", [False, True])
def test_gradients_through_control_flow_are_one_call(graph: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    x = placeholder()
    _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])
    y = v1.cond(tf.reduce_sum(h) > 0, lambda: tf.tanh(h), lambda: 2.0 * h)
    tf.gradients(y, x)
    assert [call.xs for call in notes.annotations_of(graph).gradient_calls] == [["x:0"]]


def test_hessians_are_calls_of_the_same_graph(graph: Any) -> None:
    x = v1.get_variable("v", [3])
    tf.hessians(tf.reduce_sum(tf.square(x)), x)
    calls = notes.annotations_of(graph).gradient_calls
    assert calls
    assert [call.index for call in calls] == list(range(len(calls)))


@pytest.mark.slow
def test_forgotten_graph_frees_its_annotations() -> None:
    with tf.Graph().as_default() as graph:
        with notes.annotate(graph, "replicate", 1):
            tf.constant(1.0)
    table = weakref.ref(notes.annotations_of(graph))
    assert table() is not None
    del graph
    gc.collect()
    assert table() is None
