"""Inputs that are combined one by one, but have different numbers of rows, are refused when the step runs, by their names."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.emit.checks import misfit
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.layout import Layout

PLANS: Dict[str, Tuple[Dict[str, Any], Tuple[int, int]]] = {  # configuration, and replicas of the two stages
    "replicas": ({}, (2, 2)),
    "called": ({"emit": "call"}, (2, 2)),
    "micro_batches": ({"num_micro_batch": 2}, (1, 1)),
    "called_micro_batches": ({"num_micro_batch": 2, "emit": "call"}, (1, 1)),
    "other_replicas": ({"num_micro_batch": 2}, (1, 3)),
}
DIFFERENT = r"'{}:\d' has 11 examples, but '{}:\d' has 8 in the same mini-batch, and op '.*' combines them; .* wh.batch_axis"
Inputs = Callable[[], Tuple[tf.Tensor, tf.Tensor, Dict[tf.Tensor, np.ndarray]]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    wh.shutdown()
    with tf.Graph().as_default():
        yield
    wh.shutdown()


def placeholders(rows: int = 8, others: int = 11) -> Tuple[tf.Tensor, tf.Tensor, Dict[tf.Tensor, np.ndarray]]:
    x, y = tf.placeholder("float64", [None, 3], name="x"), tf.placeholder("float64", [None, 2], name="y")
    return x, y, {x: np.ones([rows, 3]), y: np.ones([others, 2])}


def two_datasets() -> Tuple[tf.Tensor, tf.Tensor, Dict[tf.Tensor, np.ndarray]]:
    def rows(size: int, width: int, name: str) -> tf.Tensor:
        data = tf.data.Dataset.from_tensor_slices(np.ones([size * 4, width])).batch(size).repeat()
        return tf.data.make_one_shot_iterator(data).get_next(name=name)

    return rows(8, 3, "x"), rows(11, 2, "y"), {}


def python_function() -> Tuple[tf.Tensor, tf.Tensor, Dict[tf.Tensor, np.ndarray]]:
    x = tf.placeholder("float64", [None, 3], name="x")
    y = tf.py_func(lambda rows: np.ones([len(rows) + 3, 2]), [x], "float64", name="y")
    y.set_shape([None, 2])
    return x, y, {x: np.ones([8, 3])}


def variable(name: str) -> tf.Tensor:
    return tf.get_variable(name, initializer=np.linspace(-1, 1, 6).reshape(3, 2))


def difference(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return x - y


def in_a_loop(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: [i + 1, h * 0.5 - y], [tf.constant(0), x])[1]


def in_a_condition(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) < 1e9, lambda: x - y, lambda: x * 2)


def with_all_examples(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.linalg.svd(tf.matmul(x, y, transpose_a=True), compute_uv=False) + tf.sort(x * y, 0)[0]


def build(plan: str, inputs: Inputs, combined: Callable = difference) -> Tuple[Any, Any, Any]:
    config, replicas = PLANS[plan]
    wh.init(config, cluster="cpu:4")
    x, y, feeds = inputs()
    with wh.replicate(replicas[0]):
        h = tf.tanh(tf.matmul(x, variable("one")))
    with wh.replicate(replicas[1]) if plan != "called" else contextlib.nullcontext():
        prediction = tf.matmul(h, variable("two")[:2], name="prediction")
        loss = tf.nn.l2_loss(combined(prediction, y))
    update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    wh.parallelize()
    return [loss, update], prediction, feeds


@contextlib.contextmanager
def session() -> Iterator[tf.Session]:
    with tf.Session() as one:
        one.run(tf.global_variables_initializer())
        yield one


@pytest.mark.half
@pytest.mark.parametrize("inputs", [two_datasets, python_function])
@pytest.mark.parametrize("plan", PLANS)
def test_inputs_of_different_sizes(plan: str, inputs: Inputs) -> None:
    train, prediction, feeds = build(plan, inputs)
    with session() as one:
        assert one.run(prediction, feeds).shape == (8, 2)
        with pytest.raises(wh.InputError, match=DIFFERENT.format("y", "x")):
            one.run(train, feeds)


@pytest.mark.half
@pytest.mark.parametrize("combined", [in_a_loop, in_a_condition, with_all_examples])
@pytest.mark.parametrize("plan", ["replicas", "called", "micro_batches"])
def test_where_they_meet(plan: str, combined: Callable) -> None:
    train, _, feeds = build(plan, two_datasets, combined)
    with session() as one, pytest.raises(wh.InputError, match=DIFFERENT.format("y", "x")):
        one.run(train, feeds)


@pytest.mark.parametrize("plan", PLANS)
def test_only_what_is_fetched_is_fed(plan: str) -> None:
    _, prediction, feeds = build(plan, placeholders)
    with session() as one:
        assert one.run(prediction, dict(list(feeds.items())[:1])).shape == (8, 2)


@pytest.mark.parametrize("plan", PLANS)
def test_what_follows_from_a_prediction_needs_no_labels(plan: str) -> None:
    """Between the forward passes of a pipeline there are backward ones, and a part of a replica needs an example."""
    train, prediction, feeds = build(plan, lambda: placeholders(8, 8))
    (x, rows), (y, labels) = feeds.items()
    later = [tf.nn.softmax(prediction), tf.argmax(tf.sigmoid(prediction), 1)]
    error = tf.reduce_mean(tf.abs(later[0] - y))
    with session() as one:
        one.run(train, feeds)
        expected = [np.exp(row) / np.exp(row).sum() for row in one.run(prediction, {x: rows})]
        for some in (rows, rows[:1]):
            shares, best, logits = one.run([*later, prediction], {x: some})
            np.testing.assert_allclose(shares, expected[:len(some)], rtol=1e-12)
            assert best.shape == (len(some),) and logits.shape == (len(some), 2)
            assert one.run(error, {x: some, y: labels[:len(some)]}) == pytest.approx(np.mean(np.abs(np.array(expected) - 1)))


@pytest.mark.parametrize("plan", ["replicas", "called"])
def test_fed_in_proportion(plan: str) -> None:
    """Each clone gets the same share of both."""
    train, _, feeds = build(plan, lambda: placeholders(8, 16))
    with session() as one, pytest.raises(wh.InputError, match="'y:0' has 16 examples, but 'x:0' has 8 in the same mini-batch"):
        one.run(train, feeds)


@pytest.mark.half
@pytest.mark.parametrize("plan", ["replicas", "called", "micro_batches"])
@pytest.mark.parametrize("combined", [
    lambda x, y: tf.concat([x, np.ones([8, 2])], 1),
    lambda x, y: tf.stack([np.ones([8, 2]), x]),
])
def test_table_of_other_length(plan: str, combined: Callable) -> None:
    """A constant has a row for each example."""
    train, _, feeds = build(plan, lambda: placeholders(8, 8), combined)
    (x, rows), *_ = feeds.items()
    with session() as one:
        one.run(train, {x: rows})
        with pytest.raises(wh.InputError, match=r"8 rows along dimension 0, but the examples .* 12 \(rows of 'x:0'\)"):
            one.run(train, {x: np.ones([12, 3])})


@pytest.mark.parametrize("plan", ["replicas", "called", "micro_batches"])
def test_parts_with_other_rows(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that says that each example has two rows of the prediction, where it has one."""
    layout = BatchAxis.layout

    def wrong(axis: BatchAxis, tensor: int) -> Layout:
        is_it = axis.graph.tensor_name(tensor) == "prediction:0"
        return layout(axis, tensor)._replace(blocks=(2,)) if is_it else layout(axis, tensor)

    monkeypatch.setattr(BatchAxis, "layout", wrong)
    with tf.variable_scope("", use_resource=True):  # with these a called step can be fetched from
        train, prediction, feeds = build(plan, lambda: placeholders(8, 8))
    text = r"parts of 'prediction:0' have 8 rows .* examples have 16 \(rows of"
    with session() as one, pytest.raises(wh.InputError, match=text):
        one.run([prediction, train], feeds)


def test_equal_static_sizes_need_no_check() -> None:
    wh.init(cluster="cpu:2")
    x, y = tf.placeholder("float64", [8, 3]), tf.placeholder("float64", [8, 2])
    with wh.replicate(2):
        loss = tf.reduce_mean(tf.square(tf.matmul(x, variable("one")) - y))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    wh.parallelize()
    assert not [op.name for op in tf.get_default_graph().get_operations() if op.type == "Assert"]


@pytest.mark.parametrize("replicas", [2, 4])
def test_checks_do_not_multiply(replicas: int) -> None:
    wh.init({"num_micro_batch": 2}, cluster="cpu:4")
    x, y, _ = placeholders()
    with wh.replicate(replicas):
        loss = tf.reduce_mean(tf.square(tf.matmul(x, variable("one")) - y))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    wh.parallelize()
    names = [op.name for op in tf.get_default_graph().get_operations() if op.name.startswith("whale/guard")]
    assert len(names) == 3, names


@pytest.mark.parametrize("plan", ["replicas", "called", "micro_batches"])
def test_operands_that_do_not_fit(plan: str) -> None:
    wh.init(PLANS[plan][0], cluster="cpu:2")
    x = tf.placeholder("float64", [None, None], name="x")
    with wh.replicate(2):
        loss = tf.reduce_mean(tf.matmul(x, variable("one"), name="product"))
    update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    text = r"op 'product' fails in a part of .*\[\d,5\].*wh.batch_axis|emit to 'inline'"
    with session() as one, pytest.raises(wh.InputError, match=text):
        one.run(update, {x: np.ones([8, 5])})


@pytest.mark.parametrize("detail", [
    "[_Derived_]RecvAsync is cancelled.", "[_Derived_] ", "[_Derived_]{{function_node whale_t0_backward}} ",
    "2 root error(s) found.\n  (0) Cancelled: Function was cancelled before it was started"])
def test_cancelled_says_how_to_find_the_op(detail: str) -> None:
    """Of two bodies that fail at once TensorFlow may report the one that was cancelled."""
    assert "set emit to 'inline'" in misfit(f"{detail}\n\t [[node whale/g0_m0_r1/t0_backward (defined at ops.py:1) ]]")
    assert not misfit(f"{detail}\n\t [[node mine (defined at ops.py:1) ]]")


@pytest.mark.parametrize("check", [
    lambda y: tf.debugging.check_numerics(y, "of my own size"),
    lambda y: tf.gather(tf.constant([1.0], "float64"), tf.cast(y, tf.int32)),
])
def test_other_errors_stay(check: Callable) -> None:
    train, _, feeds = build("replicas", lambda: placeholders(8, 8), lambda x, y: x - check(y))
    feeds = {key: np.full(value.shape, np.inf if value.shape[1] == 2 else 1.0) for key, value in feeds.items()}
    with session() as one, pytest.raises(tf.errors.InvalidArgumentError):
        one.run(train, feeds)
