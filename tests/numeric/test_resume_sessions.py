"""Training in Sessions that ends and goes on equals training that does not end: every step, every example, every variable."""
from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from whale_tf._tf_compat import eager_mode
from whale_tf.emit.session_part import SCOPE
from whale_tf.processes.watch import TERMINATED_STATUS
from whale_tf.runtime.snapshots import writing
from whale_tf.runtime.snapshots.files import Piece, Store
from whale_tf.runtime.snapshots.sessions import _seen

v1 = tf.compat.v1
EXAMPLES, BATCH, EPOCHS = 22, 4, 3  # five whole mini-batches and one of two
STEPS = -(-EXAMPLES // BATCH)
_RNG = np.random.RandomState(0)
X = _RNG.randn(EXAMPLES, 5)
Y = np.stack([X @ _RNG.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)  # a target, and a bit of a number for the example
INITIALIZER = v1.initializers.glorot_uniform(3)  # the shuffle has no seed
BATCHES = [(X[start:start + BATCH], Y[start:start + BATCH]) for start in range(0, EXAMPLES, BATCH)]


class Stop(Exception):
    """A run ends here."""


class Script(NamedTuple):
    """Attributes:
    fetches: the train op, the loss, the examples seen.
    inputs: placeholders; none: there is an iterator.
    """

    fetches: Tuple[Any, ...]
    inputs: Tuple[Any, ...]
    iterator: Any


Record = List[Tuple[float, int]]  # loss and examples of each step
Way = Tuple[Dict[str, Any], str, Callable[[int], Any]]  # configuration, cluster, number of a layer -> annotation


def script(parts: Callable[[int], Any], feeds: bool, repeats: Optional[int]) -> Script:
    inputs: Tuple[Any, ...] = (v1.placeholder(tf.float64, [None, 5]), v1.placeholder(tf.float64, [None, 2])) if feeds else ()
    iterator = None
    if not feeds:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(10).repeat(repeats).batch(BATCH)
        iterator = v1.data.make_initializable_iterator(data)
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    x, y = inputs or iterator.get_next()
    for number, (rows, columns) in enumerate(((5, 8), (8, 8), (8, 1))):
        with parts(number):
            x = tf.tanh(tf.matmul(x, v1.get_variable(f"w{number}", [rows, columns], tf.float64, INITIALIZER)))
    loss = tf.reduce_mean(tf.square(y[:, :1] - x))
    step = v1.train.get_or_create_global_step()
    train = v1.train.AdamOptimizer(0.05).minimize(loss, global_step=step)
    return Script((train, loss, tf.reduce_sum(y[:, 1])), inputs, iterator)


class Recorder:
    """Makes steps, and may end the run after one."""

    def __init__(self, run: Callable[..., Any], made: Script, end: Optional[Callable[[], Any]], after: int) -> None:
        self.record: Record = []
        self._run, self._made, self._end, self._after = run, made, end, after

    def step(self, *given: Any) -> None:
        _, loss, seen = self._run(self._made.fetches, dict(zip(self._made.inputs, given)))
        self.record.append((float(loss), int(seen)))
        if self._end is not None and len(self.record) == self._after:
            self._end()


def monitored(made: Script, end: Any, after: int) -> Tuple[Record, Any]:
    stop = v1.train.StopAtStepHook(last_step=EPOCHS * STEPS)
    with v1.train.MonitoredTrainingSession(hooks=[stop]) as session:
        steps = Recorder(session.run, made, end, after)
        while not session.should_stop():
            steps.step()
    return steps.record, None


def monitored_loop(made: Script, end: Any, after: int) -> Tuple[Record, Any]:
    with v1.train.MonitoredTrainingSession() as session:
        steps = Recorder(session.run, made, end, after)
        for _, batches in wh.resume(BATCHES, epochs=EPOCHS, session=session):
            for batch in batches:
                steps.step(*batch)
        with pytest.raises(wh.ConfigError, match="a Session trains outside of them"):
            steps.step(*BATCHES[0])
    return steps.record, None


def fed_loop(made: Script, end: Any, after: int) -> Tuple[Record, Any]:
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        steps = Recorder(session.run, made, end, after)
        for _, batches in wh.resume(BATCHES, epochs=EPOCHS):
            for batch in batches:
                steps.step(*batch)
        return steps.record, session.run(v1.global_variables())


def epoch_loop(made: Script, end: Any, after: int,
               run_of: Callable[[v1.Session], Callable[..., Any]] = lambda session: session.run) -> Tuple[Record, Any]:
    """The script initialises its iterator in each epoch."""
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        steps = Recorder(run_of(session), made, end, after)
        for _, batches in wh.resume(range(STEPS), epochs=EPOCHS):
            session.run(made.iterator.initializer)
            for _ in batches:
                steps.step()
        return steps.record, session.run(v1.global_variables())


def called_loop(made: Script, end: Any, after: int) -> Tuple[Record, Any]:
    """TensorFlow makes calls with feeds by runs."""
    rate = v1.placeholder(tf.float32, [])

    def calls(session: v1.Session) -> Callable[..., Any]:
        call = session.make_callable(made.fetches, [rate])
        return lambda fetches, feeds: call(0.1)
    return epoch_loop(made, end, after, calls)


def trained(kind: Callable[..., Tuple[Record, Any]], path: str, way: Way, end: Optional[Callable[[], Any]] = None, after: int = 0,
            every: int = 3) -> Tuple[Record, Any]:
    config, cluster, parts = way
    with tf.Graph().as_default():
        wh.init({**config, "snapshot.path": path, "snapshot.every_steps": every}, cluster=cluster)
        made = script(parts, feeds=kind in (fed_loop, monitored_loop), repeats=1 if kind in (epoch_loop, called_loop) else None)
        return kind(made, end, after)


def stop() -> None:
    raise Stop


PLAIN: Way = ({}, "cpu:1", lambda number: wh.replicate())
PIPELINE: Way = ({"num_micro_batch": 2}, "cpu:3", lambda number: wh.replicate(1))
DIVIDED: Way = ({}, "cpu:2", lambda number: wh.replicate(2) if number == 0 else wh.split(2))
NESTED: Way = ({}, "cpu:6", lambda number: wh.replicate(1))  # each model replica takes mini-batches of its own
COPIES: Way = ({"variables": "mirrored"}, "cpu:2", lambda number: wh.replicate())


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("kind, first, second, after", [
    (monitored, PIPELINE, DIVIDED, 8), (epoch_loop, DIVIDED, COPIES, 7), (fed_loop, COPIES, PIPELINE, 4),
    (monitored_loop, PLAIN, PLAIN, 8), (monitored, NESTED, NESTED, 8), (called_loop, PLAIN, PLAIN, 8),
    pytest.param(epoch_loop, PLAIN, PLAIN, 9, marks=pytest.mark.full)])
def test_goes_on_at_the_next_example(tmp_path: Any, capfd: Any, kind: Any, first: Way, second: Way, after: int) -> None:
    """In the middle and at the end of an epoch."""
    whole, variables = trained(kind, str(tmp_path / "whole"), first)
    assert len(whole) == EPOCHS * STEPS
    assert sum(seen for _, seen in whole) == EPOCHS * (2 ** EXAMPLES - 1) or kind is monitored
    with pytest.raises(Stop):
        trained(kind, str(tmp_path / "ends"), first, stop, after)
    rest, others = trained(kind, str(tmp_path / "ends"), second)
    start = (after - 1) // 3 * 3
    np.testing.assert_allclose(rest, whole[start:], 1e-9)
    for value, other in zip(others or (), variables or ()):
        np.testing.assert_allclose(value, other, 1e-9, 1e-12)
    assert f"after {start} steps" in capfd.readouterr().err or kind is not monitored


@pytest.mark.half
@pytest.mark.slow
def test_ends_by_signals(tmp_path: Any, capfd: Any) -> None:
    """After all hooks have acted on the step, and in a loop."""
    for kind in (monitored, fed_loop):
        path = str(tmp_path / kind.__name__)
        whole, _ = trained(kind, path + "-whole", PLAIN, every=100)
        with pytest.raises(SystemExit) as ended:
            trained(kind, path, PLAIN, lambda: os.kill(os.getpid(), signal.SIGTERM), 4, every=100)
        assert ended.value.code == TERMINATED_STATUS
        assert "snapshot of step 4 is complete; ending" in capfd.readouterr().err
        np.testing.assert_allclose(trained(kind, path, PLAIN, every=100)[0], whole[4:], 1e-9)


@contextmanager
def graph(path: str) -> Iterator[Any]:
    with tf.Graph().as_default():
        wh.init({"snapshot.path": path, "snapshot.every_steps": 1}, cluster="cpu:1")
        yield v1.get_variable("w", [5, 1], tf.float64)


def write(store: Store, folder: str, rank: int) -> None:
    """A part with something in it."""
    with eager_mode():
        store.write_part(folder, rank, [Piece("n", "n", "n", (), (), True)], [np.array(1.0)])


def trains(w: Any, x: Any) -> Any:
    return v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.matmul(x, w)))


def test_what_is_refused(tmp_path: Any) -> None:
    with graph(str(tmp_path / "0")), pytest.raises(wh.ConfigError, match="needs the Session in which the loop trains"):
        wh.resume([1])
    with graph(str(tmp_path / "0")) as w, v1.Session() as session:
        train = trains(w, tf.constant(X))
        session.run(w.initializer)
        with pytest.raises(wh.ConfigError, match="a Session trains outside of them; write: for epoch, batches in wh.resume"):
            session.run(train)
    with graph(str(tmp_path / "1")) as w:
        queue = v1.FIFOQueue(3, [tf.float64], [[22, 5]])
        train, filled = trains(w, queue.dequeue()), queue.enqueue(X)
        with v1.train.MonitoredTrainingSession() as session:
            session.run(filled)
            with pytest.raises(wh.ConfigError, match="takes from a queue, so that its position in the data is not known"):
                session.run(train)
    for path, name in (("2", "w"), ("2", "other")):
        with tf.Graph().as_default():
            wh.init({"snapshot.path": str(tmp_path / path), "snapshot.every_steps": 1}, cluster="cpu:1")
            train = trains(v1.get_variable(name, [5, 1], tf.float64), tf.constant(X))
            if name == "w":
                with v1.train.MonitoredTrainingSession() as session:
                    session.run(train)
                    session.run(train)
            else:
                with pytest.raises(wh.SnapshotError, match="has a value of 'w', which this graph does not have"):
                    v1.train.MonitoredTrainingSession()
    store = Store(str(tmp_path / "3" / "session-0"), 2, print)
    folder = store.folder(4, 1)
    write(store, folder, 0)
    with eager_mode():
        store.write_part(folder, 1, [], [])
    store.complete(folder, 4, 2, "{}", lambda: True, {"part-0.json": ("process 0 (b:1)", "process 1 (c:1)")})
    os.remove(os.path.join(folder, "part-1.json"))
    assert [one.step for one in store.newest()] == [4]  # process 1 alone held nothing
    os.remove(os.path.join(folder, "part-0.json"))  # but other hosts have this one
    with graph(str(tmp_path / "3")) as w:
        trains(w, tf.constant(X))
        with pytest.raises(wh.SnapshotError, match=r"kept by process 0 \(b:1\) and by .*; nor does one before; start again with"):
            v1.train.MonitoredTrainingSession()


def test_parts_of_a_lost_process_are_not_waited_for(tmp_path: Any, monkeypatch: Any) -> None:
    """Training waits for the snapshot before it notices the loss itself."""
    told: List[str] = []
    lost = iter([False, False, True])
    monkeypatch.setattr(writing, "say", told.append)
    store = Store(str(tmp_path), 2, told.append)
    writer = writing.Writer(2, 0, "/device:CPU:0", lambda: next(lost))
    job = writing.Job(store, store.folder(3, 1), 3, "{}", [], [])
    writer.start(job)
    assert not writer.wait_for_manifest(job) and writer.failed_step == 3
    assert len(told) == 1 and "snapshot of step 3 cannot be written" in told[0] and "part-1.json did not come" in told[0]
    assert not list(store.newest())


def test_damaged_snapshot_takes_no_place(tmp_path: Any) -> None:
    """Otherwise all that follow on an earlier step would be deleted as soon as they are written."""
    told: List[str] = []

    def take(store: Store, step: int) -> str:
        folder = store.folder(step, 1)
        write(store, folder, 0)
        store.complete(folder, step, 1, "{}", lambda: False)
        return folder

    os.remove(os.path.join(take(Store(str(tmp_path), 1, told.append), 40), "part-0.json"))
    store = Store(str(tmp_path), 1, told.append)
    assert not list(store.newest()) and "does not count" in told[0]
    for step in (20, 30):
        take(store, step)
    assert [one.step for one in store.newest()] == [30]


def test_messages_between_processes_are_no_data() -> None:
    with tf.Graph().as_default():
        for scope, refused in ((SCOPE + "/1", False), ("script", True)):
            with tf.name_scope(scope):
                taken = v1.FIFOQueue(1, [tf.float64], [[]]).dequeue()
            assert bool(_seen([taken.op]).refused) == refused


def test_a_dynamic_loss_scale_is_refused(tmp_path: Any) -> None:
    """It is state that TensorFlow's collections of variables do not have."""
    with tf.Graph().as_default():
        wh.init({"snapshot.path": str(tmp_path), "amp": "float16"}, cluster="cpu:2")
        with wh.replicate():
            x = tf.matmul(tf.constant(X, tf.float32), v1.get_variable("w", [5, 1]))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(x))
        with pytest.raises(wh.ConfigError, match="the loss scale of a Session's graph is dynamic and would not go on"):
            with v1.train.MonitoredTrainingSession() as session:
                session.run(train)


def test_fed_training_without_a_loop_is_said(tmp_path: Any, capfd: Any) -> None:
    with graph(str(tmp_path)) as w:
        x = v1.placeholder(tf.float64, [None, 5])
        train = trains(w, x)
        with v1.train.MonitoredTrainingSession() as session:
            session.run(train, {x: X})
    assert "what it feeds a run that goes on is its own affair" in capfd.readouterr().err


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shuffle_in_a_function_of_a_dataset_is_said(tmp_path: Any, recwarn: Any, seed: Optional[int]) -> None:
    """Its seed is in the function, where it gets none from its name."""
    with tf.Graph().as_default():
        wh.init({"snapshot.path": str(tmp_path)}, cluster="cpu:1")
        data = tf.data.Dataset.range(2).flat_map(lambda _: tf.data.Dataset.from_tensor_slices(X).shuffle(10, seed))
        v1.data.make_one_shot_iterator(data.shuffle(10))
    assert ["is shuffled without a seed" in str(one.message) for one in recwarn if "snapshot" in str(one.message)] == [True] * (
        seed is None)
