"""A run of ``fit`` that ends and goes on equals one that does not end: every step, every example, every variable."""
from __future__ import annotations

import glob
import os
import resource
import shutil
import signal
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.command_line import call
from whale_tf.cli import app
from whale_tf.processes.watch import TERMINATED_STATUS
from whale_tf.runtime.snapshots import joining, writing
from whale_tf.runtime.snapshots.values import NotData, from_json, to_json

pytestmark = pytest.mark.skipif(not hasattr(tf, "keras") or not hasattr(tf.keras, "ops"), reason="snapshots are of Keras 3's fit")
if hasattr(tf.keras, "ops"):
    from tests.functions import long_runs
    from tests.functions.long_runs import Outcome, Stop, fitted

Way = Tuple[Dict[str, Any], str, Callable[[], Any]]  # configuration, cluster, model


def stop() -> None:
    raise Stop


def check(found: Any, expected: Any) -> None:
    """Steps since the first one (a run that goes on knows those before), epochs, and variables."""
    assert len(found.steps) == len(expected.steps)
    for one, other in zip(found.steps, expected.steps):
        np.testing.assert_allclose(list(one.values()), list(other.values()), 1e-9)
    assert found.epochs.keys() == expected.epochs.keys()
    for name, values in expected.epochs.items():
        np.testing.assert_allclose(found.epochs[name], values, 1e-9)
    for value, other in zip(found.variables, expected.variables):
        np.testing.assert_allclose(value, other, 1e-9, 1e-12)


def seen(steps: Sequence[Dict[str, float]]) -> List[int]:
    """Bits of the examples that each step saw: what the metric, which begins anew in each epoch, has added."""
    totals = [int(step["seen"]) for step in steps]
    return [total - before if total > before else total for before, total in zip([0, *totals], totals)]


@pytest.mark.slow
@pytest.mark.parametrize("data, every, after, seed", [
    ("arrays", 4, 14, None), ("dataset", 3, 7, 1), ("endless", 4, 14, None), ("python dataset", 3, 8, None),
    pytest.param("of unknown length", 1, 6, 1, marks=pytest.mark.full),
    pytest.param("generator", 4, 14, 1, marks=pytest.mark.full),
    pytest.param("arrays", 1, 6, 1, marks=pytest.mark.full), pytest.param("dataset", 1, 6, None, marks=pytest.mark.full)])
def test_goes_on_at_the_next_example(float64: None, tmp_path: Any, data: str, every: int, after: int, seed: Any) -> None:
    """With random numbers, callbacks that count epochs, and positions in the middle and at the end of one."""
    def run(name: str, **options: Any) -> Any:
        return fitted({"snapshot.path": str(tmp_path / name), "snapshot.every_steps": every}, "cpu:1", data, seed, **options)

    if seed is None:  # initial values are drawn anew in every run: the first snapshot has those that count
        with pytest.raises(Stop):
            run("ends", end=stop, after=every + 1)
        shutil.copytree(tmp_path / "ends", tmp_path / "whole")
    whole = run("whole")
    with pytest.raises(Stop):
        run("ends", end=stop, after=after)
    check(run("ends"), whole)
    if data in ("arrays", "dataset", "python dataset"):
        number = len(seen(whole.steps)) // long_runs.STEPS
        assert sum(seen(whole.steps)) == number * (2 ** long_runs.EXAMPLES - 1), "each example once an epoch"


@pytest.mark.slow
def test_goes_on_from_ends_of_epochs(float64: None, tmp_path: Any) -> None:
    """Twice, and with more epochs when it had finished: data of Python are told as often that an epoch is over."""
    def run(name: str, epochs: int, **options: Any) -> Outcome:
        return fitted({"snapshot.path": str(tmp_path / name), "snapshot.every_steps": long_runs.STEPS}, "cpu:1", "python dataset",
                      epochs=epochs, make=plain, **options)

    whole = run("whole", 4)
    for after in (7, 13):
        with pytest.raises(Stop):
            run("ends", 3, end=stop, after=after)
    run("ends", 3)
    again = run("ends", 4)
    check(again._replace(epochs={}), whole._replace(epochs={}))


@pytest.mark.slow
def test_variables_of_callbacks_remain_variables(float64: None, tmp_path: Any) -> None:
    def run(name: str, **options: Any) -> Any:
        counts = long_runs.Counts()
        fitted({"snapshot.path": str(tmp_path / name), "snapshot.every_steps": 2}, "cpu:2", "arrays", epochs=1,
               make=plain, callbacks=[counts], **options)
        return counts

    whole = run("whole")
    with pytest.raises(Stop):
        run("ends", end=stop, after=3)
    again = run("ends")
    assert int(again.steps) == int(whole.steps) == long_runs.STEPS
    assert float(again.totals[0]) == pytest.approx(float(whole.totals[0]), 1e-6)
    assert all(hasattr(one, "assign") for one in (again.steps, *again.totals, *again.weights))


def plain(is_built: bool = True) -> Any:
    layers = tf.keras.layers
    return compiled(tf.keras.Sequential(([layers.Input((5,))] if is_built else []) + [
        layers.Dense(8, activation="tanh"), layers.Dense(8, activation="tanh"), layers.Dense(1)]))


def divided() -> Any:
    layers = tf.keras.layers
    inputs = layers.Input((5,))
    with wh.replicate(1):
        x = layers.Dense(8, activation="tanh")(inputs)
    with wh.split(2):
        x = layers.Dense(1)(layers.Dense(8, activation="tanh")(x))
    return compiled(tf.keras.Model(inputs, x))


def compiled(model: Any) -> Any:
    model.compile(tf.keras.optimizers.Adam(0.05), lambda y_true, y_pred: tf.square(y_true[:, :1] - y_pred),
                  metrics=[long_runs.metric()])
    return model


def damage(folder: str) -> None:
    """The newest snapshot has another bit, and a run has ended while it wrote one after it."""
    newest = sorted(glob.glob(f"{folder}/step-*"))[-1]
    path, = glob.glob(f"{newest}/part-0.data-*")
    with open(path, "r+b") as handle:
        handle.seek(40)
        byte = handle.read(1)[0]
        handle.seek(40)
        handle.write(bytes([byte ^ 1]))
    os.makedirs(f"{folder}/step-000000999-1")


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [
    (({"num_micro_batch": 2}, "cpu:3", divided), ({"zero": "v2"}, "cpu:2", lambda: plain(False))),
    pytest.param(({"zero": "v2"}, "cpu:4", plain), ({}, "cpu:1", plain), marks=pytest.mark.full)])
def test_goes_on_under_another_plan(float64: None, tmp_path: Any, capfd: Any, first: Way, second: Way) -> None:
    """Where a snapshot is damaged, the one before counts; a run that is finished does not train again."""
    def run(way: Way, name: str, **options: Any) -> Outcome:
        config, cluster, make = way
        return fitted({**config, "snapshot.path": str(tmp_path / name), "snapshot.every_steps": 2}, cluster, "dataset", make=make,
                      **options)

    whole = run(first, "whole")
    with pytest.raises(Stop):
        run(first, "ends", end=stop, after=9)
    damage(str(tmp_path / "ends/fit-0"))
    check(run(second, "ends"), whole)
    assert "(step 8) does not count: part-0.data-00000-of-00001 differs from its checksum" in capfd.readouterr().err
    check(run(second, "ends"), whole)
    assert "fit has finished in an earlier run" in capfd.readouterr().err


def players() -> Any:
    """A model with two optimizers that Keras does not know, beside one that is not used, and a generator of TensorFlow's."""
    keras = tf.keras

    class Players(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = keras.layers.Dense(5), keras.layers.Dense(1)
            self.others = {"judge": keras.optimizers.Adam(0.02), "maker": keras.optimizers.Adam(0.05)}
            self.noise = tf.random.Generator.from_seed(3)

        def call(self, x: Any) -> Any:
            return self.judge(self.maker(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            noise = tf.cast(self.noise.normal([5]), x.dtype)
            with tf.GradientTape() as tape:
                judged = tf.reduce_mean(tf.square(self.judge(x) - y[:, :1]))
            self.others["judge"].apply_gradients([*zip(tape.gradient(judged, self.judge.trainable_variables),
                                                       self.judge.trainable_variables)])
            with tf.GradientTape() as tape:
                made = tf.reduce_mean(tf.square(self.judge(self.maker(x + noise))))
            self.others["maker"].apply_gradients([*zip(tape.gradient(made, self.maker.trainable_variables),
                                                       self.maker.trainable_variables)])
            return {"loss": made, "judged": judged, "seen": tf.reduce_sum(y[:, 1])}

    model = Players()
    model(long_runs.X[:1])
    model.compile(keras.optimizers.Adam(0.05))
    return model


@pytest.mark.slow
def test_optimizers_that_keras_does_not_know(float64: None, tmp_path: Any) -> None:
    """Their slots, and a generator's state, are found in the function that was traced; SIGUSR1 ends the run after a step."""
    def run(name: str, **options: Any) -> Outcome:
        return fitted({"snapshot.path": str(tmp_path / name), "snapshot.every_steps": 100, "zero": "v2"}, "cpu:2", "arrays",
                      make=players, **options)

    whole = run("whole")
    with pytest.raises(SystemExit) as end:
        run("ends", end=lambda: os.kill(os.getpid(), signal.SIGUSR1), after=8)
    assert end.value.code == TERMINATED_STATUS
    again = run("ends")
    check(again, whole)
    assert seen([*again.steps[:3]])[0] > 0


@pytest.mark.slow
def test_full_disk(float64: None, tmp_path: Any, capfd: Any, monkeypatch: Any) -> None:
    """Training goes on; a run that ends then goes on from the last snapshot that could be written."""
    told: List[str] = []  # the limit is for the file of captured output, too
    monkeypatch.setattr(writing, "say", told.append)

    def run(**options: Any) -> Outcome:
        return fitted({"snapshot.path": str(tmp_path), "snapshot.every_steps": 4}, "cpu:1", "dataset", make=plain, **options)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill() -> None:
        while not glob.glob(f"{tmp_path}/fit-0/step-000000004-*/manifest.json"):
            time.sleep(0.05)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))

    try:
        full = run(end=fill, after=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told and told[0].startswith("snapshot of step 8 cannot be written, so the one before remains"), told
    check(run(), full)
    assert "after 4 steps" in capfd.readouterr().err


@pytest.mark.slow
def test_other_models_and_places_are_refused(float64: None, tmp_path: Any) -> None:
    config = {"snapshot.path": str(tmp_path), "snapshot.every_steps": 2}
    with pytest.raises(Stop):
        fitted(config, "cpu:1", "arrays", make=plain, end=stop, after=3)
    with pytest.raises(wh.SnapshotError, match=r"variable .* is .*, but float64 \(.*\) in the snapshot"):
        fitted(config, "cpu:1", "arrays")
    with pytest.raises(wh.SnapshotError, match="an epoch of fit has 1 steps, but had 6"):
        fitted(config, "cpu:1", "arrays", make=plain, steps_per_epoch=1)
    wh.init(config, cluster="cpu:1")
    variable = tf.Variable(1.0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = variable * 2
        variable.assign_sub(tape.gradient(loss, variable))

    with pytest.raises(wh.ConfigError, match="trains outside of them; write: for epoch, batches in wh.resume"):
        step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["divided", "random"])
def test_weights_file_of_fit(float64: None, tmp_path: Any, kind: str) -> None:
    """It is what Keras saves: weights, the optimizer's state, those of generators."""
    import h5py

    own, out = str(tmp_path / "own.weights.h5"), str(tmp_path / "out.weights.h5")
    saves = tf.keras.callbacks.LambdaCallback(on_train_end=lambda logs: saves.model.save_weights(own))
    make, config, cluster = (divided, {"num_micro_batch": 2}, "cpu:3") if kind == "divided" else (
        long_runs.model, {"zero": "v2"}, "cpu:2")
    long_runs.fitted({**config, "snapshot.path": str(tmp_path / "snapshots")}, cluster, "dataset", make=make, epochs=1,
                     callbacks=[saves])
    wh.shutdown()
    result = call(app, "checkpoint", str(tmp_path / "snapshots"), out)
    assert result.exit_code == 0, result.output

    def values(path: str) -> Dict[str, np.ndarray]:
        found: Dict[str, np.ndarray] = {}
        with h5py.File(path, "r") as file:
            file.visititems(lambda name, one: found.update({name: one[()]} if isinstance(one, h5py.Dataset) else {}))
        return found

    ours, keras = values(out), values(own)
    assert ours.keys() == keras.keys() and len(ours) > 10
    for name, value in keras.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
        assert ours[name].dtype == value.dtype
    (plain if kind == "divided" else make)().load_weights(out)
    with pytest.raises(wh.SnapshotError, match="of fit is a weights file of Keras, so give it a name that ends with .weights.h5"):
        joining.join(str(tmp_path / "snapshots"), str(tmp_path / "checkpoint"))


def test_values() -> None:
    value = {"a": [1, 2.5, None, (True, "x")], 3: np.float32(0.1), "array": np.arange(3), "nan": [float("inf")], "empty": {}}
    value["scalar"] = np.array(2.5)
    arrays: Dict[str, Any] = {}
    found = from_json(to_json(value, arrays, "n"), arrays)
    assert repr(found) == repr(value) and isinstance(found[3], np.float32)
    assert repr(from_json(to_json(value["scalar"], arrays, "s"), {"s": np.float64(2.5)})) == "array(2.5)"  # as it is read
    for other in (lambda: None, np.array(["text"]), np.array(["2020-01-01"], "datetime64[D]"), np.longdouble([1.5])):
        with pytest.raises(NotData):  # text would come back as bytes, and the others cannot be written
            to_json([other], {}, "n")
