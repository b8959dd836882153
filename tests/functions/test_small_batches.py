"""Mini-batches with fewer examples than parts are trained whole, on one device, and a warning says so."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import WAYS, Scope, Way, batches, check, clear_keras, run
from tests.functions.test_training_steps import NESTED, momentum, perceptron
from whale_tf._tf_compat import function_tracing

tracing = function_tracing()
pytestmark = pytest.mark.skipif(tracing is None or tracing.compilation is None, reason="TensorFlow has them since 2.15")
LATER = (16, 3, 16, 1)


def of_open_size(scopes: Sequence[Scope]) -> Tuple[Callable[..., Any], Sequence[Any]]:
    step, variables = momentum(scopes)
    return tf.function(step.python_function, input_signature=[
        tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)]), variables


def in_another(scopes: Sequence[Scope]) -> Tuple[Callable[..., Any], Sequence[Any]]:
    """A loop over two mini-batches that calls the step."""
    step, variables = of_open_size(scopes)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
    def steps(x: tf.Tensor, y: tf.Tensor) -> Any:
        losses = tf.zeros([2], tf.float64)
        for number in tf.range(2):
            losses = tf.tensor_scatter_nd_update(losses, [[number]], [step(x, y)["loss"]])
        return losses
    return steps, variables


@pytest.mark.parametrize("build", [momentum, of_open_size, in_another], ids=["known sizes", "open sizes", "called in a loop"])
@pytest.mark.parametrize("way", [NESTED, WAYS["data parallel 4, 2 micro-batches"]], ids=["pipeline", "data parallel"])
def test_steps(build: Any, way: Way) -> None:
    with pytest.warns(UserWarning, match="a mini-batch of 3 examples does not divide over [48] parts"):
        check(build, way, batches(LATER))


@pytest.mark.parametrize("config", [{"zero": "v2"}, {"zero": "v3"}, {"offload": "states"}], ids=["v2", "v3", "offload"])
def test_variables_elsewhere(config: Any) -> None:
    """They come to their user's place for such a step, and go back."""
    with pytest.warns(UserWarning, match="3 examples does not divide over 4 parts"):
        check(of_open_size, Way((), 4, config), batches(LATER))


def test_split_variables() -> None:
    with pytest.warns(UserWarning, match="3 examples does not divide over 4 parts"):
        check(of_open_size, Way((1, 2), 3, {"num_micro_batch": 4}, split=(1,)), batches(LATER))


@pytest.mark.parametrize("draw", ["counted", "generated"])
def test_draws_as_locally(draw: str) -> None:
    """An op that counts its draws itself would go on with other numbers after a step without it."""
    def build(stages: Sequence[Scope]) -> Tuple[Callable[..., Any], Sequence[Any]]:
        weights, generator = perceptron()[0], tf.random.Generator.from_seed(2)

        @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            noise = (tf.random.normal(tf.shape(x), dtype=tf.float64, seed=1) if draw == "counted" else
                     generator.normal(tf.shape(x), dtype=tf.float64))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(x + noise, weights)))
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            return loss
        return step, [weights]

    way = Way((), 4, {"random": "local"})
    if draw == "counted":
        with pytest.raises(wh.InputError, match="a mini-batch of 3 examples does not divide over 4 parts"):
            run(build, batches(LATER), way)
    else:
        with pytest.warns(UserWarning, match="3 examples does not divide over 4 parts"):
            check(build, way, batches(LATER))


def test_first_of_known_size_is_refused() -> None:
    with pytest.raises(wh.PlanError, match="a mini-batch of 3 examples does not divide over 4 parts of TaskGraph"):
        run(momentum, batches((3,)), NESTED)


def test_calls_of_divided_variables_are_refused() -> None:
    """One function cannot have variables in parts and whole."""
    with pytest.raises(wh.InputError, match="a mini-batch of 3 examples does not divide over 4 parts"):
        run(in_another, batches(LATER), Way((), 4, {"zero": "v2"}))


def test_an_error_in_a_local_step_is_the_scripts_own() -> None:
    weights = perceptron()

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64)])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.debugging.check_numerics(tf.matmul(x, weights[0]), "as it was"))
        weights[0].assign_sub(tape.gradient(loss, weights[0]))
        return loss

    wh.init(cluster="cpu:4")
    step(tf.ones([8, 6], tf.float64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as it was"), pytest.warns(UserWarning, match="does not divide"):
        step(tf.fill([1, 6], tf.constant(np.nan, tf.float64)))


RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(35, 6), RNG.randint(0, 3, 35)  # two mini-batches of 16, and the last of 3
Fit = Callable[[Any], Sequence[float]]  # trains a model; its losses


def compare(fit: Fit, way: Way, steps: int = 1) -> None:
    """A model is trained as without whale_tf, and its optimizer and its draws have counted the same steps."""
    keras = pytest.importorskip("keras", minversion="3.0")

    def trained(stages: Sequence[Scope]) -> List[Any]:
        clear_keras()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,), dtype="float64")
        with stages[0]():
            hidden = keras.layers.Dense(8, activation="tanh", dtype="float64")(inputs)
            hidden = keras.layers.Dropout(0.25, dtype="float64")(hidden)
        with stages[1]():
            outputs = keras.layers.Dense(3, activation="softmax", dtype="float64")(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", steps_per_execution=steps)
        losses = fit(model)
        return [losses, *[one.numpy() for one in (*model.variables, *model.optimizer.variables)]]

    expected = trained([contextlib.nullcontext] * 2)
    wh.init({"random": "local", **way.config}, cluster=f"cpu:{way.devices}")
    try:
        found = trained(way.scopes())
    finally:
        wh.shutdown()
    for one, other in zip(expected, found):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)  # Keras casts what a loss takes to float32


def of_unknown_number(count: int) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X[:count], LABELS[:count])).batch(16)
    return data.filter(lambda x, y: True)


@pytest.mark.slow
@pytest.mark.parametrize("way, steps", [
    (Way((), 4, {}), 1), (Way((1, 1), 2, {"num_micro_batch": 4}), 3)], ids=["data parallel", "pipeline"])
def test_fit(way: Way, steps: int) -> None:
    """The last mini-batch of each epoch has three examples."""
    with pytest.warns(UserWarning, match="a mini-batch of 3 examples does not divide over 4 parts"):
        compare(lambda model: model.fit(X, LABELS, batch_size=16, epochs=2, verbose=0).history["loss"], way, steps)


@pytest.mark.slow
def test_fit_that_asks_for_more() -> None:
    """Keras asks an iterator for a mini-batch that it does not have, and counts the step.  So no condition is there, also if
    the model was trained on other data before."""
    def fit(model: Any) -> Sequence[float]:
        found = model.fit(X, LABELS, batch_size=16, verbose=0).history["loss"]
        found += model.fit(of_unknown_number(32), epochs=2, verbose=0).history["loss"]
        return [*found, *model.fit(X, LABELS, batch_size=16, verbose=0).history["loss"]]

    compare(fit, Way((), 4, {}))


@pytest.mark.slow
def test_fit_that_asks_for_more_refuses_few_examples() -> None:
    with pytest.raises(wh.InputError, match="a mini-batch of 3 examples does not divide over 4 parts"):
        compare(lambda model: model.fit(of_unknown_number(len(X)), verbose=0).history["loss"], Way((), 4, {}))
