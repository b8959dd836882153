"""Scripts as they are published: inputs without shapes, Python functions as inputs, labels of several batches."""
from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.cli.scripts import HEAD, PUBLISHED

pytestmark = pytest.mark.half
PLANS: Dict[str, Dict[str, Any]] = {
    "replicate": {}, "micro-batches": {"num_micro_batch": 2}, "auto": {"auto_parallel": True},
    "pipeline": {"num_task_graph": 2, "num_micro_batch": 2}}


def run(script: str, config: Optional[Dict[str, Any]]) -> Tuple[List[Tuple[str, float]], bool]:
    """What the script prints, and whether it was rewritten.

    Args:
        config: None: without whale_tf.
    """
    lines: List[str] = []
    if config is not None:
        wh.init(config, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph:
            exec(script, {"print": lambda *words: lines.append(" ".join(str(word) for word in words))})
        values = [(name, float(value)) for name, value in re.findall(r"value (.+) (\S+)", "\n".join(lines))]
        return values, config is not None and wh.current_plan(graph) is not None
    finally:
        if config is not None:
            wh.shutdown()


def check(script: str, config: Dict[str, Any]) -> None:
    expected, (found, is_rewritten) = run(script, None)[0], run(script, config)
    assert is_rewritten and expected
    assert [name for name, _ in found] == [name for name, _ in expected]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=1e-10, atol=1e-12)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name, plan", [
    ("keep_prob", "replicate"), ("keep_prob", "auto"), ("halves", "micro-batches"), ("halves", "replicate"),
    ("python_input", "pipeline"), ("python_input", "auto"), ("generator", "replicate"), ("flat_targets", "micro-batches"),
    ("full_batch", "replicate")])
def test_published_scripts(name: str, plan: str) -> None:
    check({**PUBLISHED, **SCRIPTS}[name], PLANS[plan])


@pytest.mark.slow
def test_session_that_ran_before_trains_in_parallel() -> None:
    """A Session does not see that edges move of ops that it has; whether the step runs as planned shows in what it executed."""
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            x, w = tf.placeholder("float64"), tf.get_variable("w", initializer=np.ones([3, 2]))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
            train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                assert session.run(loss, {x: np.ones([2, 3])}) == 9.0
                assert wh.current_plan(tf.get_default_graph()) is None
                options, metadata = tf.RunOptions(output_partition_graphs=True), tf.RunMetadata()
                session.run([loss, train], {x: np.ones([4, 3])}, options, metadata)
                names = {node.name for part in metadata.partition_graphs for node in part.node}
                assert any(name.startswith("whale/g0_m0_r1/") for name in names)
                assert not any(name.startswith("gradients/MatMul_grad/MatMul") for name in names)
                with pytest.raises(wh.InputError, match=r"'Placeholder:0' is fed shape \(3,\) .* rank .*\(4, 3\)"):
                    session.run(train, {x: np.ones([3])})
                later = tf.group(train)
                with pytest.raises(wh.UnsupportedOpError, match="'group_deps.*' was added after the first training run"):
                    session.run(later, {x: np.ones([4, 3])})
    finally:
        wh.shutdown()


def test_what_is_not_known_is_refused_with_the_remedy() -> None:
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            x, w = tf.placeholder("float64", name="x"), tf.get_variable("w", initializer=np.ones([3, 2]))
            train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.matmul(x, w)))
            message = r"input 'x:0' is not known.* x.set_shape\(\[None, ...\]\), or say with wh.batch_axis\(tensor, dim\)"
            with pytest.raises(wh.UnknownShapeError, match=message):
                wh.parallelize()
            with tf.Session() as session, pytest.raises(wh.UnknownShapeError, match=message):
                session.partial_run_setup(train, [x])
            with pytest.raises(wh.AnnotationError, match="from 0 to 1, or None"):
                wh.batch_axis(w.read_value(), 2)
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_fed_inputs_that_do_not_fit_each_other() -> None:
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            x, y = tf.placeholder("float64", [None, 3], name="x"), tf.placeholder("float64", [None], name="y")
            w = tf.get_variable("w", initializer=np.ones([3, 1]))
            loss = tf.reduce_mean(tf.square(tf.reshape(tf.matmul(x, w), [-1]) - y))
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                with pytest.raises(wh.InputError, match="'y:0' is fed 9 examples, but 'x:0' is fed 6 examples in the same"):
                    session.run(train, {x: np.ones([6, 3]), y: np.ones([9])})
                session.run(train, {x: np.ones([6, 3]), y: np.ones([6])})
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_fed_inputs_that_the_model_cuts_in_three() -> None:
    """An example is a row of each third, unless the user says that each row is one."""
    def losses(sizes: List[Tuple[int, int]], stated: bool = False) -> List[float]:
        with tf.Graph().as_default():
            x, y = tf.placeholder("float64", [None, 3], name="x"), tf.placeholder("float64", [None, 2], name="y")
            for each in (x, y) if stated else ():
                wh.batch_axis(each, 0)
            parts = tf.split(tf.matmul(x, tf.get_variable("w", initializer=np.arange(6.0).reshape(3, 2) / 7)), 3)
            loss = tf.reduce_mean(tf.square(tf.concat([part - tf.reduce_mean(part, 0) for part in parts], 0) - y))
            update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                values = np.random.RandomState(0)
                return [session.run([loss, update], {x: values.randn(a, 3), y: values.randn(b, 2)})[0] for a, b in sizes]

    expected = losses([(9, 9), (12, 12)])
    wh.init({}, cluster="cpu:4")
    try:
        with pytest.raises(wh.InputError, match=r"of 3 examples \(3 rows of '.:0' each\) does not divide over 4 parts"):
            losses([(9, 9)])
        with pytest.raises(wh.InputError, match="fed . examples of 3 rows, but '.:0' is fed .* say with wh.batch_axis.tensor, 0"):
            losses([(12, 15)])
        with pytest.raises(wh.InputError, match="'x:0' is fed 13 rows, .* a multiple of 3, or say with wh.batch_axis.tensor, 0"):
            losses([(13, 13)])
        np.testing.assert_allclose(losses([(9, 9), (12, 12)], True), expected, rtol=1e-12)
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [12, None])
def test_python_function_that_returns_other_rows(batch: Optional[int]) -> None:
    """A kernel is applied to each of them, as to examples."""
    def losses(stated: bool) -> List[float]:
        with tf.Graph().as_default():
            x = tf.placeholder("float64", [batch, 3], name="x")
            more = tf.py_func(lambda rows: rows[:5] * 2, [x], "float64", name="more")
            more.set_shape([None, 3])
            if stated:
                wh.batch_axis(more, None)
            w = tf.get_variable("w", initializer=np.arange(6.0).reshape(3, 2) / 7)
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w))) + tf.reduce_mean(tf.abs(tf.matmul(more, w)))
            update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                return [session.run([loss, update], {x: rows})[0] for rows in np.random.RandomState(0).randn(2, 12, 3)]

    expected = losses(False)
    wh.init({}, cluster="cpu:4")
    try:
        np.testing.assert_allclose(losses(False), expected, rtol=1e-12)  # the rows are examples of their own
        np.testing.assert_allclose(losses(True), expected, rtol=1e-12)
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_stated_axis_lets_a_python_function_work_on_examples() -> None:
    """In the middle of the model: each part of the batch calls it with its own examples."""
    sizes = []

    def scaled(rows: np.ndarray) -> np.ndarray:
        sizes.append(len(rows))
        return np.abs(rows).sum(1, keepdims=True) + 1

    def train(divided: bool) -> List[float]:
        with tf.Graph().as_default():
            x = tf.placeholder("float64", [None, 3])
            hidden = tf.matmul(x, tf.get_variable("w", initializer=np.arange(6.0).reshape(3, 2) / 7))
            factor = tf.py_func(scaled, [tf.stop_gradient(hidden)], "float64")
            factor.set_shape([None, 1])
            if divided:
                wh.batch_axis(factor, 0)
            loss = tf.reduce_mean(tf.square(hidden / factor - 1))
            update = tf.train.AdamOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                batches = np.random.RandomState(0).randn(3, 6, 3)
                return [float(session.run([loss, update], {x: batch})[0]) for batch in batches]

    expected = train(False)
    del sizes[:]
    wh.init({"num_micro_batch": 2}, cluster="cpu:1")
    try:
        np.testing.assert_allclose(train(True), expected, rtol=1e-12)
        assert sizes == [3] * 6
        del sizes[:]
        np.testing.assert_allclose(train(False), expected, rtol=1e-12)  # without it once, with all examples
        assert sizes == [6] * 3
    finally:
        wh.shutdown()


SCRIPTS = {
    # elements of a generator without shapes: the first step is local, and shows them
    "generator": HEAD + '''
def examples():
    for _ in range(4):
        yield random.randn(8, 4), random.randn(8)

x, y = tf.data.make_one_shot_iterator(tf.data.Dataset.from_generator(examples, ("float64", "float64"))).get_next()
hidden = tf.tanh(tf.matmul(x, weights("one", 4, 5)))
loss = tf.reduce_mean(tf.square(tf.reshape(tf.matmul(hidden, weights("two", 5, 1)), [-1]) - y))
train = tf.train.AdamOptimizer(0.1).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        print("value loss", repr(float(session.run([loss, train])[0])))
    report(session)
''',
    # targets of a language model, one row for each word
    "flat_targets": HEAD + '''
words, targets = tf.placeholder("int32", [None, 5]), tf.placeholder("int32", [None])
hidden = tf.tanh(tf.matmul(tf.reshape(tf.nn.embedding_lookup(weights("table", 9, 4), words), [-1, 4]), weights("one", 4, 9)))
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=hidden, labels=targets))
train = tf.train.AdamOptimizer(0.1).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(3):
        feed = {words: random.randint(0, 9, [6 + step, 5]), targets: random.randint(0, 9, [(6 + step) * 5])}
        print("value loss", repr(float(session.run([loss, train], feed)[0])))
    report(session)
''',
    # all examples in every step, through inputs of which not even the rank is known
    "full_batch": HEAD + '''
X, Y = tf.placeholder("float64"), tf.placeholder("float64")
prediction = tf.add(tf.multiply(X, weights("slope")), weights("offset"))
cost = tf.reduce_sum(tf.pow(prediction - Y, 2)) / (2 * 17)
train = tf.train.GradientDescentOptimizer(0.1).minimize(cost)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        session.run(train, {X: random.randn(17), Y: random.randn(17)})
        print("value cost", repr(float(session.run(cost, {X: 0.5, Y: 1.5}))))
    report(session)
''',
}
