"""``verify: "first_step"`` in Sessions: no false alarm, faults are caught, and nothing else changes."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.test_matrix import AXES, run
from whale_tf.capture.record import record
from whale_tf.emit.convert import Converter
from whale_tf.emit.shares import BatchShares
from whale_tf.runtime.sessions import Fetches
from whale_tf.runtime.triggers import sessions as triggers
from whale_tf.runtime.verifying.cut import sample

ROWS: List[Dict[str, Any]] = [
    dict(zip(AXES, values)) for values in (
        ("mlp_mean", "nested2x2", 2, "backward_first", "float32", True, True, True, "session", "auto", "inline", "none", "none"),
        ("clipped_adam", "counts1:3", 2, "gpipe", "float64", True, False, False, "callable", "mirrored", "call", "none", "none"),
        ("sum_with_l2", "replicate4", 4, "gpipe", "float64", True, False, True, "monitored", "auto", "inline", "none", "v2"),
        ("recurrent_v1", "pipeline2", 2, "gpipe", "float32", False, True, False, "session", "auto", "inline", "none", "none"))]


@pytest.fixture
def said(monkeypatch: Any) -> Iterator[List[str]]:
    """What is said; every test's steps are verified."""
    lines: List[str] = []
    monkeypatch.setattr(triggers, "say", lines.append)
    monkeypatch.setenv("WHALE_VERIFY_FIRST_STEP", "1")
    yield lines


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_no_false_alarm(row: Dict[str, Any], said: List[str]) -> None:
    run(row)
    assert len(said) == 1 and "equals the local one" in said[0] and "Not compared" not in said[0]


class Trained:
    """What a small script with dropout, batches from an iterator and a checkpoint leaves."""

    def __init__(self, path: Any, config: Dict[str, Any], rate: float = 0.25) -> None:
        wh.init(config, cluster="cpu:2")
        try:
            with tf.Graph().as_default():
                self._train(path, rate)
        finally:
            wh.shutdown()

    def _train(self, path: Any, rate: float) -> None:
        tf.set_random_seed(3)
        rows = np.random.RandomState(0).randn(96, 4)
        iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(rows).batch(8))
        x = iterator.get_next()
        with wh.replicate(2):
            w = tf.get_variable("w", initializer=np.linspace(-1, 1, 8).reshape(4, 2), use_resource=True)
            hidden = tf.nn.dropout(tf.matmul(x, w), rate=rate, seed=5)
            loss = tf.reduce_mean(tf.square(hidden - 1.0))
        update = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            self.losses = [session.run([loss, update])[0] for _ in range(3)]
            self.examples = session.run(x)
            saved = saver.save(session, str(path / "model"))
            self.variables = session.run(tf.global_variables())
        self.saved = {name: tf.train.load_variable(saved, name) for name, _ in tf.train.list_variables(saved)}


@pytest.mark.parametrize("random", ["own", "local"])
def test_it_leaves_no_trace(random: str, tmp_path: Any, said: List[str], monkeypatch: Any) -> None:
    """Random numbers, elements of the iterator, variables and checkpoints are what they are without it."""
    verified = Trained(tmp_path, {"random": random})
    assert len(said) == 1 and "equals the local one in 1 result, 1 gradient, 2 new values" in said[0]
    monkeypatch.delenv("WHALE_VERIFY_FIRST_STEP")
    plain = Trained(tmp_path, {"random": random})
    assert len(said) == 1, "it is off"
    assert verified.losses == plain.losses and verified.saved.keys() == plain.saved.keys()
    np.testing.assert_array_equal(verified.examples, plain.examples)
    for one, other in zip([*verified.variables, *verified.saved.values()], [*plain.variables, *plain.saved.values()]):
        np.testing.assert_array_equal(one, other)


def test_wrong_part_is_caught(tmp_path: Any, said: List[str], monkeypatch: Any) -> None:
    """All clones get the first one's examples."""
    monkeypatch.setattr(BatchShares, "position", lambda self, task_graph, clone: 0)
    with pytest.raises(wh.MismatchError) as error:
        Trained(tmp_path, {}, rate=0.0)
    assert error.value.tensor and error.value.task_graph and not said


def test_forgotten_weights_are_caught_and_named(tmp_path: Any, said: List[str], monkeypatch: Any) -> None:
    original = Converter.scale
    monkeypatch.setattr(Converter, "scale", lambda self, name, tensor, power, *rest, **more: original(
        self, name, tensor, 0, *rest, **more))  # powers of weights are forgotten
    with pytest.raises(wh.MismatchError, match=r"the first training step of this graph is not the local one: .* of TaskGraph "
                                               r"'replicate_0' \(partial w\^1\): norm .* It is the first of \d+ values"):
        Trained(tmp_path, {"verify": "first_step"}, rate=0.0)


def test_result_that_is_not_the_compared_one_is_caught(tmp_path: Any, said: List[str], monkeypatch: Any) -> None:
    """The loss is that of the undivided ops, unless clones are fetched beside it."""
    monkeypatch.setattr(Fetches, "_is_parallel", lambda self, op: op.name.startswith("whale/"))
    with pytest.raises(wh.MismatchError, match=r"computes 'Mean:0' for 'Mean:0', but 'whale/merged/Mean_0/value:0' beside"):
        Trained(tmp_path, {}, rate=0.0)


def test_input_without_examples_has_one_value(said: List[str]) -> None:
    """Two model replicas take mini-batches of their own, each with a number that scales the loss."""
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            rows = tf.data.Dataset.from_tensor_slices(np.ones((64, 4))).batch(8, drop_remainder=True)
            x, number = tf.data.make_one_shot_iterator(tf.data.Dataset.zip((rows, tf.data.Dataset.range(1, 9)))).get_next()
            with wh.replicate(1):
                w = tf.get_variable("w", initializer=np.ones((4, 2)), use_resource=True)
                loss = tf.reduce_mean(tf.matmul(x, w)) * tf.cast(number, tf.float64)
            update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                with pytest.raises(wh.MismatchError, match="model replicas take different values of input 'IteratorGetNext:1'"):
                    session.run(update)
    finally:
        wh.shutdown()


@pytest.mark.parametrize("is_resource", [True, False], ids=["resource", "reference"])
def test_what_a_run_may_read_before_or_after_an_update_is_not_compared(is_resource: bool, said: List[str]) -> None:
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=is_resource):
            x = tf.placeholder(tf.float64, [8, 4])
            counter = tf.get_variable("counter", initializer=np.int64(0), trainable=False)
            w = tf.get_variable("w", initializer=np.ones((4, 2)))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
            update = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=counter)
            racing = tf.add(counter, 0, name="racing")
            with tf.control_dependencies([update]):
                after = tf.add(counter.read_value(), 0, name="after")
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                assert session.run([update, loss, racing, after], {x: np.ones((8, 4))})[3] == 1
    finally:
        wh.shutdown()
    assert "equals the local one in 2 results, 1 gradient, 2 new values" in said[0], said
    assert "racing:0 (it may be read before or after an update" in said[0] and "after:0" not in said[0], said


def test_tensors_of_unknown_rank_are_not_samples() -> None:
    """The sum of a gradient over dimensions of size one loses that of the examples in a clone with one example."""
    with tf.Graph().as_default() as graph:
        known, unknown = tf.placeholder(tf.float32, [None, 2], "known"), tf.placeholder(tf.float32, None, "unknown")
    ops = record(graph)
    assert [ops.tensor_name(tensor) for tensor in sample([ops.tensor(unknown.name), ops.tensor(known.name)], ops)] == [known.name]


@pytest.mark.parametrize("precision", ["none", "float16"])
def test_static_sizes_of_several_mini_batches(precision: str, said: List[str]) -> None:
    """The local step takes all mini-batches at once. What holds the size of one is replaced, also in ops of another type."""
    wh.init({"amp.dtype": precision, "amp.loss_scale": 128} if precision != "none" else {}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            wh.set_default_strategy(wh.replicate(1))
            rows = np.random.RandomState(0).rand(16, 8).astype(np.float32)
            iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(rows).batch(4, drop_remainder=True))
            x = iterator.get_next()
            hidden = tf.matmul(x, tf.get_variable("w", [8, 8], use_resource=True))
            hidden = tf.reshape(tf.reshape(hidden, [4 * 2, 4]), [4, 8]) + 0.1
            loss = tf.reduce_mean(tf.square(hidden))
            update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            with tf.Session() as session:
                session.run([tf.global_variables_initializer(), iterator.initializer])
                taken = session.run([loss, x, update])[1]
    finally:
        wh.shutdown()
    np.testing.assert_array_equal(taken, rows[:8])
    assert len(said) == 1 and "equals the local one" in said[0] and "Not compared" not in said[0]
