"""Estimators that end and go on equal Estimators that do not end: every step, every example, what they evaluate."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.numeric.test_resume_sessions import DIVIDED, INITIALIZER, PIPELINE, PLAIN, Stop, Way
from whale_tf.runtime.snapshots.runs import Runs

if not tf.__version__.startswith("1."):
    pytest.skip("whale_tf knows the Estimators of TensorFlow 1", allow_module_level=True)

v1 = tf.compat.v1
EXAMPLES, BATCH = 12, 4
_RNG = np.random.RandomState(0)
X = _RNG.randn(EXAMPLES, 5)
Y = np.stack([X @ _RNG.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)  # a target, and a bit of a number for the example


class Recorder(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Loss and examples of each step; may end the run after one."""

    def __init__(self, after: Optional[int]) -> None:
        self.record: List[Tuple[float, int]] = []
        self._after = after

    def before_run(self, context: Any) -> Any:
        return v1.train.SessionRunArgs(["loss:0", "seen:0"])

    def after_run(self, context: Any, values: Any) -> None:
        self.record.append((float(values.results[0]), int(values.results[1])))
        if len(self.record) == self._after:
            raise Stop


def estimator(path: str, way: Way, steps: int) -> Any:
    parts = way[2]

    def model(features: Any, labels: Any, mode: str) -> Any:
        x = features
        for number, (rows, columns) in enumerate(((5, 8), (8, 8), (8, 1))):
            with parts(number):
                x = tf.tanh(tf.matmul(x, v1.get_variable(f"w{number}", [rows, columns], tf.float64, INITIALIZER)))
        loss = tf.reduce_mean(tf.square(labels[:, :1] - x), name="loss")
        tf.reduce_sum(labels[:, 1], name="seen")
        train = v1.train.AdamOptimizer(0.05).minimize(loss, v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    config = tf.estimator.RunConfig(model_dir=path + "-model", save_checkpoints_steps=steps, keep_checkpoint_max=2)
    return tf.estimator.Estimator(model, config=config)


def data() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(5).repeat().batch(BATCH)


def held_out() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)


def twice(made: Any, hook: Recorder) -> Dict[str, float]:
    """Two calls that make so many steps each, and an evaluation between them."""
    made.train(data, [hook], steps=5)
    made.evaluate(held_out)
    made.train(data, [hook], 6)
    return made.evaluate(held_out)


def once(made: Any, hook: Recorder) -> Dict[str, float]:
    tf.estimator.train_and_evaluate(made, tf.estimator.TrainSpec(data, 9, [hook]),
                                    tf.estimator.EvalSpec(held_out, None, throttle_secs=0))
    return made.evaluate(held_out)


def trained(script: Callable[[Any, Recorder], Dict[str, float]], path: str, way: Way, after: Optional[int] = None,
            checkpoint: int = 2) -> Tuple[List[Tuple[float, int]], Dict[str, Any]]:
    config, cluster, _ = way
    wh.init({**config, "snapshot.path": path, "snapshot.every_steps": 3}, cluster=cluster)
    hook = Recorder(after)
    made = estimator(path, way, checkpoint)
    found = script(made, hook)
    return hook.record, {**found, **{name: made.get_variable_value(name) for name in made.get_variable_names()}}


@pytest.mark.slow
@pytest.mark.parametrize("script, after, start, first, second", [
    (twice, 7, 5, DIVIDED, PLAIN), (once, 8, 6, PIPELINE, PLAIN), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (twice, 4, 3, PLAIN, PIPELINE), (twice, 10, 8, PLAIN, PLAIN), (once, 2, 0, PLAIN, DIVIDED)))])
def test_goes_on_at_the_next_example(tmp_path: Any, script: Any, after: int, start: int, first: Way, second: Way) -> None:
    """In the first and the second call, before and after their first snapshots; checkpoints are newer or older than these."""
    whole, found = trained(script, str(tmp_path / "whole"), first)
    path = str(tmp_path / "ends")
    with pytest.raises(Stop):
        trained(script, path, first, after)
    rest, others = trained(script, path, second)
    np.testing.assert_allclose(rest, whole[start:], 1e-9)
    assert others.keys() == found.keys()
    for name, value in found.items():
        np.testing.assert_allclose(others[name], value, 1e-9, 1e-12)
    again, same = trained(script, path, second)  # all has been done
    assert again == [] and same.keys() == found.keys()
    np.testing.assert_array_equal(same["w0"], others["w0"])


def test_what_is_refused(tmp_path: Any, monkeypatch: Any) -> None:
    wh.init({"snapshot.path": str(tmp_path / "0")}, cluster="cpu:1")
    with pytest.raises(wh.ConfigError, match="no model_dir of its own"):
        tf.estimator.Estimator(lambda features, labels, mode: None).train(data, steps=1)
    path = str(tmp_path / "1")
    with pytest.raises(Stop):
        trained(lambda made, hook: made.train(data, [hook], steps=9), path, PLAIN, 8)
    with pytest.raises(wh.SnapshotError, match="is to make 6 steps, but snapshot .* was taken after 6 of them"):
        trained(lambda made, hook: made.train(data, [hook], steps=6), path, PLAIN)
    monkeypatch.setattr(Runs, "_neighbours", lambda *given: object())  # as where hosts have directories of their own
    with pytest.raises(wh.ConfigError, match=r"snapshot.path '.*/2' is not one directory for all processes, but an Estim"):
        trained(lambda made, hook: made.train(data, [hook], steps=1), str(tmp_path / "2"), PLAIN)
