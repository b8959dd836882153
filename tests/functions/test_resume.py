"""A training loop over ``wh.resume`` that ends and goes on equals one that does not end: every step, every example, every
variable, and what the script itself keeps."""
from __future__ import annotations

import os
import random
import signal
from contextlib import nullcontext
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from whale_tf._tf_compat import eager_context
from whale_tf.processes.watch import TERMINATED_STATUS

pytestmark = pytest.mark.skipif(not hasattr(tf, "keras"), reason="functions are divided from TensorFlow 2.4 on")

EXAMPLES, BATCH, EPOCHS = 20, 4, 3
STEPS = EXAMPLES // BATCH
_RNG = np.random.RandomState(0)
X = _RNG.randn(EXAMPLES, 5)
Y = np.stack([X @ _RNG.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)  # a target, and a bit of a number for the example


class Stop(Exception):
    """A run ends here."""


class Shuffled:
    """Mini-batches in an order that NumPy's common generator draws in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(EXAMPLES)
        for start in range(0, EXAMPLES, BATCH):
            yield X[order[start:start + BATCH]], Y[order[start:start + BATCH]]


class Outcome(NamedTuple):
    """What the script kept of all steps and epochs, and the variables at the end."""

    state: Dict[str, Any]
    variables: List[np.ndarray]


def looped(config: Dict[str, Any], cluster: str, make_data: Callable[[], Any], parts: Callable[[int], Any],
           end: Optional[Callable[[], Any]] = None, after: int = 0, at_epoch: int = -1) -> Outcome:
    """A script with a loop of its own: layers, an optimizer with slots, a generator, a metric that no function has, and noise of
    Python's and NumPy's.

    Args:
        parts: the number of a layer -> an annotation.
        end: called after so many steps of this process, or at an epoch's end.
    """
    wh.init(config, cluster=cluster)
    keras = tf.keras
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(size, activation="tanh") for size in (8, 8, 1)]
    optimizer, noise, total = keras.optimizers.Adam(0.05), tf.random.Generator.from_seed(3), tf.Variable(0.0, dtype=tf.float64)

    def predicted(x: Any) -> Any:
        for number, layer in enumerate(layers):
            with parts(number):
                x = layer(x)
        return x

    @tf.function
    def step(x: Any, y: Any, scale: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y[:, :1] - scale * tf.cast(noise.normal([1]), tf.float64) - predicted(x)))
        weights = [weight for layer in layers for weight in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss, tf.reduce_sum(y[:, 1])

    state: Dict[str, Any] = {"steps": [], "best": np.inf}
    count, saves = 0, []
    for epoch, batches in wh.resume(make_data(), epochs=EPOCHS, state=state):
        for x, y in batches:
            loss, seen = step(x, y, tf.constant(0.1 * random.random() + np.random.rand(), tf.float64))
            total.assign_add(seen)
            state["steps"].append((epoch, float(loss), int(seen), float(total)))
            count += 1
            if len(state["steps"]) == 7:  # in the first step behind a snapshot, which does not have it
                saves.append(tf.Variable(0, trainable=False))
            if end is not None and count == after:
                end()
        state["best"] = min(state["best"], float(loss))
        if epoch == at_epoch and end is not None:
            end()
    predicted(tf.constant(X))  # without a step, nothing has made the weights yet
    variables = [variable for layer in layers for variable in layer.weights] + [total, noise.state]
    of_optimizer = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return Outcome(state, [np.array(value.numpy()) for value in [*variables, *of_optimizer]])


def check(found: Outcome, expected: Outcome) -> None:
    np.testing.assert_allclose(found.state["steps"], expected.state["steps"], 1e-9)
    np.testing.assert_allclose(found.state["best"], expected.state["best"], 1e-9)
    for value, other in zip(found.variables, expected.variables):
        np.testing.assert_allclose(value, other, 1e-9, 1e-12)


def dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(10).batch(BATCH)


def stop() -> None:
    raise Stop


def plain(number: int) -> Any:
    return wh.replicate()


def pipeline(number: int) -> Any:
    return wh.replicate(1)


def hybrid(number: int) -> Any:
    return wh.replicate(2) if number == 0 else wh.split(2)


@pytest.mark.slow
@pytest.mark.parametrize("make_data, first, second, after", [
    (dataset, ({"num_micro_batch": 2}, "cpu:3", pipeline), ({"zero": "v2"}, "cpu:2", plain), 8),
    (Shuffled, ({}, "cpu:1", plain), ({}, "cpu:1", plain), STEPS + 2),
    pytest.param(dataset, ({"zero": "v2"}, "cpu:2", plain), ({}, "cpu:1", plain), 2 * STEPS, marks=pytest.mark.full),
    pytest.param(Shuffled, ({}, "cpu:2", hybrid), ({}, "cpu:2", hybrid), STEPS + 2, marks=pytest.mark.full),
    pytest.param(dataset, ({}, "cpu:2", hybrid), ({"num_micro_batch": 2}, "cpu:3", pipeline), STEPS, marks=pytest.mark.full)])
def test_goes_on_at_the_next_example(float64: None, tmp_path: Any, capfd: Any, make_data: Any, first: Any, second: Any,
                                     after: int) -> None:
    def run(name: str, way: Any, **options: Any) -> Outcome:
        config, cluster, parts = way
        return looped({**config, "snapshot.path": str(tmp_path / name), "snapshot.every_steps": 3}, cluster, make_data, parts,
                      **options)

    whole = run("whole", first)
    if first[1] != "cpu:1":
        explained = wh.explain("step")
        assert "Snapshots: every 3 steps; the last 2 are kept" in explained and "MiB each from this process" in explained
    seen = np.array(whole.state["steps"])[:, 2]
    assert len(seen) == EPOCHS * STEPS and seen.sum() == EPOCHS * (2 ** EXAMPLES - 1)
    with pytest.raises(Stop):
        run("ends", first, end=stop, after=after)
    check(run("ends", second), whole)
    told = capfd.readouterr().err
    assert f"the loop goes on in epoch {(after - 1) // 3 * 3 // STEPS + 1}" in told and "in 2 starts" in told
    again = run("ends", second)
    assert "has finished in an earlier run" in capfd.readouterr().err
    check(again, whole)


@pytest.mark.slow
def test_ends_by_signals(float64: None, tmp_path: Any) -> None:
    """In the middle of an epoch, and while the script evaluates at the end of one, which it does once."""
    def run(name: str, **options: Any) -> Outcome:
        return looped({"snapshot.path": str(tmp_path / name), "snapshot.every_steps": 100}, "cpu:1", dataset, plain, **options)

    whole = run("whole")
    for options in ({"after": 2}, {"at_epoch": 0}):
        with pytest.raises(SystemExit) as ended:
            run("ends", end=lambda: os.kill(os.getpid(), signal.SIGUSR1), **options)
        assert ended.value.code == TERMINATED_STATUS
    check(run("ends"), whole)


def test_what_is_refused(tmp_path: Any) -> None:
    config = {"snapshot.path": str(tmp_path), "snapshot.every_steps": 1}
    wh.init(config, cluster="cpu:1")
    for given, text in (((3,), "needs a tf.data.Dataset"), (([], 0), "whole number from 1 on"),
                        ((iter([1]), 2), "can be gone through only once"), (([], 1, []), "must be a dict")):
        with pytest.raises(wh.ConfigError, match=text):
            wh.resume(*given)
    with pytest.raises(wh.ConfigError, match="another fit or wh.resume has begun inside"):
        for _, outer in wh.resume([1, 2]):
            for _ in outer:
                for _, inner in wh.resume([1]):
                    assert list(inner) == [1]
    wh.init({**config, "snapshot.path": str(tmp_path / "other")}, cluster="cpu:1")
    with pytest.raises(wh.ConfigError, match=r"wh.resume\(state=...\) has 'a': <object"):
        for _, batches in wh.resume([1, 2], state={"a": object()}):
            list(batches)
    for data in ([1, 2], range(2)):
        wh.init(config, cluster="cpu:1")
        with pytest.raises(wh.SnapshotError, match="data of the type range, but had list") if data != [1, 2] else nullcontext():
            for _, batches in wh.resume(data):
                list(batches)


def test_order_that_does_not_go_on_is_said(tmp_path: Any, capfd: Any) -> None:
    """Of a dataset that was made before ``wh.init``; later ones get seeds."""
    wh.shutdown()
    eager_context()._set_global_seed(None)
    for is_first in (True, False):
        data = tf.data.Dataset.range(4).shuffle(4)
        wh.init({"snapshot.path": str(tmp_path / str(is_first))}, cluster="cpu:1")
        for _, batches in wh.resume(data if is_first else tf.data.Dataset.range(4).shuffle(4)):
            list(batches)
        assert ("wh.resume has a dataset that is shuffled without a seed" in capfd.readouterr().err) == is_first


def test_state_under_names_that_look_alike(tmp_path: Any) -> None:
    state: Dict[Any, Any] = {}
    for given in ({1: np.zeros(2), "1": np.ones(2), "a": [np.full(2, 2.0)], "a/0": np.full(2, 3.0)}, {}):
        state = dict(given)
        wh.init({"snapshot.path": str(tmp_path)}, cluster="cpu:1")
        for _, batches in wh.resume([0], state=state):
            list(batches)
    assert {name: np.ravel(value).tolist() for name, value in state.items()} == {
        1: [0, 0], "1": [1, 1], "a": [2, 2], "a/0": [3, 3]}


def test_without_snapshots() -> None:
    wh.init(cluster="cpu:1")
    assert [(epoch, list(batches)) for epoch, batches in wh.resume([1, 2], epochs=2)] == [(0, [1, 2]), (1, [1, 2])]
