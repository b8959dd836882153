"""``wh.Timeline`` in ``fit`` and around functions: what it writes, and that it changes no number."""
from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.viz.test_training import scalars_of
from whale_tf.diagnosis import scalars
from whale_tf.diagnosis.record import parse
from whale_tf.errors import PlanError, WhaleError
from whale_tf.runtime.curves import memory_of
from whale_tf.runtime.snapshots.values import attributes

keras = pytest.importorskip("keras", minversion="3.0")
RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(72, 6).astype("float32"), RNG.randint(0, 3, 72)


def fitted(timeline: Optional[Dict[str, Any]], epochs: int = 2) -> List[Any]:
    """Losses and weights of a pipeline of two stages after 9 mini-batches in each epoch."""
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    with wh.replicate(1):
        x = keras.layers.Dense(8, activation="tanh")(inputs)
    with wh.replicate(1):
        outputs = keras.layers.Dense(3, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).filter(lambda *_: True).batch(8)  # ends by an error
    callbacks = [] if timeline is None else [wh.Timeline(**timeline)]
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, validation_data=data.take(2))
    return [history.history["loss"], history.history["val_loss"], *model.get_weights()]


@pytest.mark.slow
def test_fit(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("step.svg", "step.json", "record.json", "logs")}
    found = fitted(dict(timeline=files["step.svg"], trace=files["step.json"], record=files["record.json"],
                        log_dir=files["logs"], steps=(6, 7), update_freq=4))
    for one, other in zip(found, fitted(None)):
        assert np.array_equal(one, other)
    measured = parse(files["record.json"])
    process, = measured.processes
    assert process.traced == 2 and measured.step.batch == 8  # of the dataset, whose shapes leave it open
    calls = {(ran.device, ran.micro_batch) for ran in process.timeline if ran.micro_batch >= 0}
    assert {(device, micro_batch) for device in (0, 1) for micro_batch in (0, 1)} <= calls
    events = [one for one in json.loads(Path(files["step.json"]).read_text())["traceEvents"] if one["ph"] == "X"]
    rows = {(one["cat"], one["args"]["stage"], one["args"]["micro_batch"]) for one in events}
    assert {(kind, stage, part) for kind in ("forward", "backward") for stage in (0, 1) for part in (0, 1)} <= rows
    assert "measured: " in Path(files["step.svg"]).read_text(encoding="utf8")
    written = scalars_of(files["logs"])
    steps = [step for step, _ in written[scalars.EXAMPLES_PER_S]]
    assert steps == [9, 13, 17, 18]  # means over 4 steps, without the first three, and without the traced ones
    for (_, rate), (_, seconds) in zip(written[scalars.EXAMPLES_PER_S], written[scalars.SECONDS]):
        assert rate * seconds == pytest.approx(8, rel=1e-5)
    (step, bubble), = written[scalars.BUBBLE]
    assert step == 7 and 0.0 < bubble < 1.0 and 0.0 <= written[scalars.EXPOSED][0][1] <= bubble
    assert scalars.MFU not in written and scalars.PEAK.format(0) not in written  # CPUs have no known peak, and no counted memory
    assert written[scalars.PREDICTED_PEAK.format(1)][0][1] > 0


@pytest.mark.slow
def test_loop_of_a_function(tmp_path: Path) -> None:
    variable = tf.Variable(np.ones([6, 2]))
    results = []
    for timeline in (None, {"record": str(tmp_path / "r.json"), "log_dir": str(tmp_path / "logs"), "steps": (5, 6)}):
        wh.init(cluster="cpu:2")
        variable.assign(np.ones([6, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64)])
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(x, variable)))
            variable.assign_sub(0.01 * tape.gradient(loss, variable))
            return loss

        with contextlib.nullcontext() if timeline is None else wh.Timeline(update_freq=2, **timeline):
            losses = [float(step(tf.constant(X[:8].astype("float64")))) for _ in range(8)]
        results.append([losses, variable.numpy()])
    for one, other in zip(*results):
        assert np.array_equal(one, other)
    assert parse(str(tmp_path / "r.json")).step.batch == 8  # as its argument has
    assert {round(rate * seconds) for (_, rate), (_, seconds) in zip(*map(
        scalars_of(str(tmp_path / "logs")).get, (scalars.EXAMPLES_PER_S, scalars.SECONDS)))} == {8}


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="needs wh.init"):
        wh.Timeline("step.svg")
    wh.init(cluster="cpu:2")
    for given, message in (({}, "nothing to write"), ({"timeline": "step.pdf"}, "ends in .png or .svg"),
                           ({"trace": "no/step.json"}, "no directory 'no'"), ({"log_dir": "x", "steps": (2, 3)}, "at least 5"),
                           ({"log_dir": "x", "update_freq": 0}, "at least 1")):
        with pytest.raises(PlanError, match=message):
            wh.Timeline(**given)
    wh.doctor(6)
    with pytest.raises(PlanError, match="one of them in a run"), wh.Timeline(log_dir=str(tmp_path)):
        pass


def test_memory_is_that_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"current": 3, "peak": 5}, raising=False)
    prefix = "/job:localhost/replica:0/task:0/device:"
    found = memory_of([(0, prefix + "CPU:0"), (1, prefix + "GPU:0")])
    assert found == {scalars.IN_USE.format(1): 3.0, scalars.PEAK.format(1): 5.0}


def test_training_that_was_interrupted_can_begin_again(tmp_path: Path) -> None:
    wh.init(cluster="cpu:2")
    first, second = (wh.Timeline(log_dir=str(tmp_path / str(step)), steps=(step, step)) for step in (5, 6))
    first.on_train_begin()
    with pytest.warns(UserWarning, match="an earlier wh.Timeline"):
        second.on_train_begin()
    first.on_train_end()
    with pytest.warns(UserWarning, match="has traced nothing"):
        second.on_train_end()
    assert attributes(second, {}, "").items() >= {"_count": 0, "_log_dir": str(tmp_path / "6")}.items()
    assert "_run" not in attributes(second, {}, "")  # what a snapshot keeps is data
