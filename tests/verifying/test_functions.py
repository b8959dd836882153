"""``verify: "first_step"`` in tf.functions and Keras' ``fit``, ``wh.verify``, and ``whale verify``."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.cli.scripts import SCRIPT
from tests.command_line import call
from tests.functions import test_training_steps as steps
from tests.functions.equality import WAYS, batches, check, clear_keras
from whale_tf.cli import app
from whale_tf.cluster import Processes
from whale_tf.emit.convert import Converter
from whale_tf.runtime import active
from whale_tf.runtime.triggers import functions as triggers

if tf.__version__.startswith("1."):
    pytest.skip("TensorFlow 1.15 has no functions that can be divided", allow_module_level=True)


@pytest.fixture
def said(monkeypatch: Any) -> Iterator[List[str]]:
    lines: List[str] = []
    monkeypatch.setattr(triggers, "say", lines.append)
    yield lines


@pytest.fixture
def forgetful(monkeypatch: Any) -> None:
    """Powers of weights are forgotten where values of clones are combined."""
    original = Converter.scale
    monkeypatch.setattr(Converter, "scale", lambda self, name, tensor, power, *rest, **more: original(
        self, name, tensor, 0, *rest, **more))


def model() -> Any:
    """A function that trains, and its variables."""
    w = tf.Variable(np.linspace(-1, 1, 18).reshape(6, 3), name="w")
    m = tf.Variable(tf.zeros_like(w), name="m")

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.matmul(tf.nn.dropout(x, 0.25), w)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        m.assign(0.9 * m + tape.gradient(loss, w))
        w.assign_sub(0.1 * m)
        return loss, logits

    return step, [w, m]


def trained(verify: str) -> List[np.ndarray]:
    tf.random.set_seed(7)
    wh.init({"verify": verify, "num_micro_batch": 2}, cluster="cpu:2")
    try:
        step, variables = model()
        values = [np.array(value) for x, y in batches((16, 16)) for value in step(tf.constant(x), tf.constant(y))]
        return values + [np.array(variable) for variable in variables]
    finally:
        wh.shutdown()


def test_function_is_compared_once_and_trains_as_before(said: List[str]) -> None:
    verified = trained("first_step")
    assert len(said) == 1 and "tf.function 'step' equals the local one in" in said[0] and "Not compared" not in said[0]
    for one, other in zip(verified, trained("off")):
        np.testing.assert_array_equal(one, other)
    assert len(said) == 1


def test_fault_is_caught_before_the_step(forgetful: None, said: List[str]) -> None:
    with pytest.raises(wh.MismatchError, match="the first training step of tf.function 'step' is not the local one"):
        trained("first_step")
    assert not said


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data parallel 4, 2 micro-batches", "stages of 1 and 2, called"])
def test_no_false_alarm(way: str, said: List[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("WHALE_VERIFY_FIRST_STEP", "1")
    check(steps.momentum, WAYS[way], batches())
    assert said and all("equals the local one" in line for line in said)


def test_step_that_the_loss_scale_skips(said: List[str]) -> None:
    """Its gradients overflow in float16, and not in the local step, which has no scale."""
    w, x, y = tf.Variable([[0.0]]), tf.ones([8, 1]), tf.fill([8, 1], -3.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 1])] * 2)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))

    wh.init({"verify": "first_step", "amp": "float16", "amp.loss_scale": "dynamic"}, cluster="cpu:2")
    try:
        for _ in range(4):
            step(x, y)
    finally:
        wh.shutdown()
    assert "skips this step of tf.function 'step', whose gradients are not finite; the next one is compared" in said[0]
    assert "the first step of tf.function 'step' equals the local one" in said[-1] and len(said) < 4


def test_function_that_is_called_in_a_loop_is_refused(said: List[str]) -> None:
    wh.init({"verify": "first_step"}, cluster="cpu:2")
    try:
        step, _ = model()

        @tf.function
        def several(x: Any, y: Any) -> Any:
            for _ in tf.range(2):
                step(x, y)
            return x

        x, y = batches((16,))[0]
        with pytest.raises(wh.PlanError, match="'step' is called inside a loop, a condition or a further function"):
            several(tf.constant(x), tf.constant(y))
    finally:
        wh.shutdown()


@pytest.mark.parametrize("what, told", [
    ("alone", ""), ("twice", "op 'StatefulPartitionedCall_1' of 'outer', which calls it, may write them, too"),
    ("clips", "op 'AssignVariableOp' of 'outer', which calls it, may write them, too"),
    ("noise", "'outer', which calls it, draws random numbers for its arguments anew")])
def test_function_that_another_one_calls_beside_other_ops(what: str, told: str, said: List[str]) -> None:
    """What these leave in the variables was taken for a fault of the step."""
    wh.init({"verify": "first_step"}, cluster="cpu:2")
    try:
        w = tf.Variable(np.linspace(-1, 1, 6).reshape(6, 1))

        @tf.function
        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.matmul(x, w) - 1) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))

        @tf.function
        def outer(x: Any) -> None:
            step(x + 9 * tf.random.normal(tf.shape(x), dtype=x.dtype) if what == "noise" else 2 * x)
            if what == "twice":
                step(x)
            if what == "clips":
                w.assign(w / 2)

        outer(tf.constant(batches((16,))[0][0]))
    finally:
        wh.shutdown()
    assert len(said) == 1 and "tf.function 'step' equals the local one in" in said[0]
    assert said[0].endswith(f"all variables, as the call itself left them ({told})") if told else "Not compared" not in said[0]


def test_function_whose_arguments_follow_from_a_variable_is_refused(said: List[str]) -> None:
    wh.init({"verify": "first_step"}, cluster="cpu:2")
    try:
        step, variables = model()
        outer = tf.function(lambda x, y: step(x * tf.reduce_mean(variables[0]), y)[0])
        x, y = batches((16,))[0]
        for _ in range(2):  # and is not called without a comparison then
            with pytest.raises(wh.PlanError, match="with arguments that do not follow from its own arguments alone"):
                outer(tf.constant(x), tf.constant(y))
    finally:
        wh.shutdown()


# -- Keras ---------------------------------------------------------------------------------------------------------------
def compiled() -> Any:
    tf.keras.utils.set_random_seed(0)
    inputs = tf.keras.Input((6,))
    outputs = tf.keras.layers.Dense(3)(tf.keras.layers.Dense(8, activation="relu")(inputs))
    found = tf.keras.Model(inputs, outputs)
    found.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return found


def fitted(verify: Optional[str]) -> Dict[str, Any]:
    x, y = batches((80,))[0]
    if verify is not None:
        wh.init({"verify": verify}, cluster="cpu:2")
    try:
        found = compiled()
        data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y)).batch(16)
        history = found.fit(data, epochs=2, verbose=0).history
        return dict(history, weights=found.get_weights())
    finally:
        wh.shutdown()
        clear_keras()


def test_verify_takes_what_a_call_takes(capsys: Any) -> None:
    """Tensors of several parts, and values of Python, by which a function chooses when it is traced."""
    wh.init({}, cluster="cpu:2")
    try:
        w = tf.Variable(np.ones([4, 1]))

        @tf.function
        def step(x: Any, weights: Any, name: str, is_squared: bool) -> Any:
            assert weights is None and name == "train" and is_squared is True
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.sparse.sparse_dense_matmul(x, w) - 1.0))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        wh.verify(step, tf.sparse.from_dense(np.eye(4)), None, "train", True)
        assert "equals the local one" in capsys.readouterr().out
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(tf.keras.utils, "set_random_seed"), reason="TensorFlow 2.7 and later")
def test_fit_takes_no_mini_batch_twice(said: List[str]) -> None:
    """Losses and metrics of all epochs are those without the comparison."""
    verified, plain = fitted("first_step"), fitted("off")
    assert len(said) == 1 and "equals the local one" in said[0]
    assert verified.keys() == plain.keys()
    for name, value in verified.items():
        for one, other in zip(value, plain[name]):
            np.testing.assert_array_equal(one, other, err_msg=name)


# -- wh.verify -------------------------------------------------------------------------------------------------------------
def test_verify_trains_nothing(capsys: Any) -> None:
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    try:
        step, variables = model()
        before = [np.array(variable) for variable in variables]
        wh.verify(step, *batches((16,))[0])
        for variable, value in zip(variables, before):
            np.testing.assert_array_equal(variable.numpy(), value)
        shown = capsys.readouterr().out
        assert "how divided" in shown and "NO" not in shown and "equals the local one" in shown
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(tf.keras.utils, "set_random_seed"), reason="TensorFlow 2.7 and later")
def test_verify_of_a_model_is_in_float64(capsys: Any) -> None:
    wh.init({}, cluster="cpu:2")
    try:
        found = compiled()
        x, y = batches((16,))[0]
        weights = found.get_weights()
        wh.verify(found, x.astype("float32"), y)
        assert "e-1" in capsys.readouterr().out  # differences and tolerances of float64
        for one, other in zip(found.get_weights(), weights):
            np.testing.assert_array_equal(one, other)
    finally:
        wh.shutdown()
        clear_keras()


def test_verify_raises_where_something_differs(forgetful: None, capsys: Any) -> None:
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    try:
        with pytest.raises(wh.MismatchError):
            wh.verify(model()[0], *batches((16,))[0])
        assert "NO" in capsys.readouterr().out
    finally:
        wh.shutdown()


def test_verify_of_what_is_not_divided() -> None:
    wh.init({}, cluster="cpu:2")
    try:
        with pytest.raises(wh.PlanError, match="nothing to compare"):
            wh.verify(tf.function(lambda x: 2.0 * x), np.ones(4))
    finally:
        wh.shutdown()


def test_verify_in_several_processes_is_refused(monkeypatch: Any) -> None:
    wh.init({}, cluster="cpu:2")
    try:
        monkeypatch.setattr(active.require("this test"), "processes", Processes(("localhost:1", "localhost:2"), 0))
        with pytest.raises(wh.PlanError, match="this job has 2; set verify to 'first_step'"):
            wh.verify(model()[0], *batches((16,))[0])
    finally:
        wh.shutdown()


# -- whale verify ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [False, True])
def test_command_trains_nothing(is_faulty: bool, tmp_path: Any, request: Any) -> None:
    if is_faulty:
        request.getfixturevalue("forgetful")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(whale="import whale_tf as wh\nwh.init({'num_task_graph': 2}, cluster='cpu:4')", batch=None))
    result = call(app, "verify", str(script), str(tmp_path / "losses"))
    assert result.exit_code == int(is_faulty), result.output
    assert "how divided" in result.output and ("NO" in result.output) == is_faulty
    assert not (tmp_path / "losses").exists(), "the script has trained"


def test_command_names_what_is_missing(tmp_path: Any) -> None:
    (tmp_path / "nothing.py").write_text("print('nothing')")
    result = call(app, "verify", str(tmp_path / "nothing.py"))
    assert result.exit_code == 2 and "ended without a training step that whale_tf divides" in result.output
