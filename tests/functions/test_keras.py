"""Keras 3: ``fit`` and what surrounds it give what they give without whale_tf."""
from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import WAYS, Scope, Way, clear_keras

keras = pytest.importorskip("keras", minversion="3.0")
layers = keras.layers
PIPELINE = WAYS["pipeline 2, 4 micro-batches"]
TOLERANCE = 1e-11  # float64


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)
    clear_keras()


Make = Callable[[Sequence[Scope]], Any]
RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(40, 6), RNG.randint(0, 3, 40)  # three mini-batches of 16, the last of 8
EVEN = 32  # examples of the first two, which have one trace
TOKENS, IMAGES = RNG.randint(0, 20, (40, 7)), RNG.randn(40, 6, 6, 1)


def compiled(model: Any, **options: Any) -> Any:
    given = dict({"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}, **options)
    model.compile(**given)
    return model


# -- models ------------------------------------------------------------------------------------------------------------
def functional(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6,))
    with stages[0]():
        x = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
        x = layers.LayerNormalization()(x)
    with stages[1]():
        x = layers.Dense(8, activation="relu", bias_constraint="max_norm")(x)
        outputs = layers.Dense(3, activation="softmax")(x)
    return compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5, use_ema=True))


def sequential(stages: Sequence[Scope]) -> Any:
    model = keras.Sequential()
    with stages[0]():
        model.add(layers.Dense(8, activation="tanh"))
    with stages[1]():
        model.add(layers.Dense(3, activation="softmax"))
    return compiled(model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))


class Subclassed(keras.Model):
    """Layers that are made under annotations, and an annotation in ``call``."""

    def __init__(self, stages: Sequence[Scope]) -> None:
        super().__init__()
        self.stages = list(stages)
        with stages[0]():
            self.first = layers.Dense(8, activation="tanh")
        self.second = layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        with self.stages[1]():
            return self.second(2.0 * hidden)


def subclassed(stages: Sequence[Scope]) -> Any:
    return compiled(Subclassed(stages), optimizer=keras.optimizers.RMSprop(0.01, clipvalue=0.1))


class OwnStep(keras.Model):
    """A training step of the user's."""

    def train_step(self, data: Any) -> Dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=prediction)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


def own_step(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6,))
    with stages[0]():
        x = layers.Dense(8, activation="tanh")(inputs)
    with stages[1]():
        outputs = layers.Dense(3, activation="softmax")(x)
    return compiled(OwnStep(inputs, outputs), optimizer=keras.optimizers.AdamW(0.01))


def text(stages: Sequence[Scope]) -> Any:
    """Sparse gradients, attention."""
    inputs = keras.Input((7,), dtype="int32")
    with stages[0]():
        x = layers.Embedding(20, 8)(inputs)
        x = x + layers.MultiHeadAttention(2, 4)(x, x)
    with stages[1]():
        outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(inputs, outputs), optimizer="adagrad")


def recurrent(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((7,), dtype="int32")
    with stages[0]():
        x = layers.LSTM(5)(layers.Embedding(20, 4)(inputs))
    with stages[1]():
        outputs = layers.Dense(3, activation="softmax")(x)
    return compiled(keras.Model(inputs, outputs))


def convolutional(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6, 6, 1))
    with stages[0]():
        x = layers.MaxPooling2D()(layers.Conv2D(4, 3, activation="relu")(inputs))
    with stages[1]():
        outputs = layers.Dense(3, activation="softmax")(layers.Flatten()(x))
    return compiled(keras.Model(inputs, outputs))


def accumulating(stages: Sequence[Scope]) -> Any:
    """Updates in every second step only."""
    inputs = keras.Input((6,))
    with stages[0]():
        x = layers.Dense(8, activation="tanh")(inputs)
    with stages[1]():
        outputs = layers.Dense(3, activation="softmax")(x)
    return compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


def shared(stages: Sequence[Scope]) -> Any:
    """A layer that is called in both stages, operations without a layer, a frozen layer."""
    inputs, twice = keras.Input((6,)), layers.Dense(6, activation="tanh")
    with stages[0]():
        x = 2.0 * twice(inputs) + 1.0
    with stages[1]():
        x = twice(keras.ops.abs(x)) - inputs
        frozen = layers.Dense(8, trainable=False)
        outputs = layers.Dense(3, activation="softmax")(frozen(x))
    return compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.Adam(0.01, clipnorm=0.1))


class Adversaries(keras.Model):
    """Trains one part, and then the other against what the first has become; each has an optimizer, the sum a penalty."""

    def __init__(self, stages: Sequence[Scope]) -> None:
        super().__init__()
        with stages[0]():
            self.maker = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(6)])
        with stages[1]():
            self.judge = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.steps = {"maker": keras.optimizers.Adam(0.01), "judge": keras.optimizers.Adam(0.01)}
        self.means = {name: keras.metrics.Mean(name) for name in self.steps}
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, x: Any) -> Any:
        return self.judge(self.maker(x))

    def train_step(self, data: Any) -> Dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        ones, made = tf.ones((tf.shape(x)[0], 1), x.dtype), self.maker(x[:, ::-1])
        with tf.GradientTape() as tape, tf.GradientTape() as inner:
            inner.watch(x)
            real = self.judge(x)
            loss = self.loss_of(tf.concat([ones, 0 * ones], 0), self.judge(tf.concat([x, made], 0)))
            loss += tf.reduce_mean((tf.norm(inner.gradient(real, x), axis=1) - 1.0) ** 2)
        self._apply("judge", tape, loss)
        with tf.GradientTape() as tape:
            loss = self.loss_of(ones, self(x[:, ::-1]))
        self._apply("maker", tape, loss)
        return {name: mean.result() for name, mean in self.means.items()}

    def _apply(self, name: str, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = getattr(self, name).trainable_variables
        self.steps[name].apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.means[name].update_state(loss)


def adversaries(stages: Sequence[Scope]) -> Any:
    model = Adversaries(stages)
    model.compile(loss="mse")
    model(X[:1])
    return model


MODELS: Dict[str, Any] = {"functional": (functional, X), "sequential": (sequential, X), "subclassed": (subclassed, X),
                          "own_step": (own_step, X), "text": (text, TOKENS), "recurrent": (recurrent, TOKENS),
                          "convolutional": (convolutional, IMAGES), "accumulating": (accumulating, X),
                          "shared": (shared, X), "adversaries": (adversaries, X)}
OTHERS = "sequential", "subclassed", "text", "recurrent", "convolutional"


# -- training ----------------------------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    values: Dict[str, Any]
    weights: List[np.ndarray]


def trained(make: Make, x: np.ndarray, way: Optional[Way], everything: bool = False, **fit: Any) -> Outcome:
    """What ``fit`` and ``predict`` return, and all weights.

    Args:
        everything: also what ``train_on_batch`` and ``evaluate`` return; and the last mini-batch of ``fit`` is smaller. Each of
            them is one more trace.
    """
    with trained_in(way) as stages:
        keras.utils.set_random_seed(0)
        model = make(stages)
        count = len(x) if everything else EVEN
        options = dict({"batch_size": 16, "epochs": 1, "validation_data": (x[:12], LABELS[:12])}, **fit)
        values = dict(model.fit(x[:count], LABELS[:count], verbose=0, **options).history)
        if everything:
            values["train_on_batch"] = model.train_on_batch(x[:16], LABELS[:16])
            values["evaluate"] = model.evaluate(x, LABELS, verbose=0)
        values["predict"] = model.predict(x[:5], verbose=0)
        return Outcome(values, [weight.numpy() for weight in model.weights + model.optimizer.variables])


@contextlib.contextmanager
def trained_in(way: Optional[Way]) -> Iterator[List[Scope]]:
    if way is None:
        yield [contextlib.nullcontext] * 2
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are not compiled by XLA")
        wh.init(way.config, cluster=f"cpu:{way.devices}")
        try:
            yield way.scopes()
            plan = wh.current_plan()
            assert plan is not None and plan.num_devices == way.devices
            assert len([task for task in plan.task_graphs if task.batch_of is None]) == max(1, len(way.counts))
        finally:
            wh.shutdown()


def check(make: Make, x: np.ndarray, way: Way, everything: bool = False, **fit: Any) -> None:
    local, parallel = [trained(make, x, each, everything, **fit) for each in (None, way)]
    assert local.values.keys() == parallel.values.keys() and len(local.weights) == len(parallel.weights)
    for name, expected in local.values.items():
        np.testing.assert_allclose(parallel.values[name], expected, rtol=1e-6, atol=1e-9, err_msg=name)  # metrics: float32
    for expected, found in zip(local.weights, parallel.weights):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("model", [  # test_matrix.py has the others' like, and tests below have the first two
    pytest.param(name, marks=[pytest.mark.full] if name in OTHERS else []) for name in MODELS])
def test_models(model: str) -> None:
    make, x = MODELS[model]
    check(make, x, PIPELINE, everything=model == "functional", epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("model, way", [
    ("subclassed", "pipeline 2 nested 2, 2 micro-batches"),
    pytest.param("functional", "data parallel 2", marks=pytest.mark.full),
    pytest.param("text", "pipeline 2 nested 2, 2 micro-batches", marks=pytest.mark.full)])
def test_models_in_other_ways(model: str, way: str) -> None:
    make, x = MODELS[model]
    check(make, x, WAYS[way], epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("fit", [
    {"sample_weight": np.linspace(0.5, 2.0, 40), "shuffle": False, "steps_per_epoch": 2},
    {"steps_per_execution": 2},
    pytest.param({"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "validation_split": 0.2, "validation_data": None},
                 marks=pytest.mark.full)], ids=lambda fit: next(iter(fit)))
def test_arguments_of_fit(fit: Dict[str, Any]) -> None:
    def make(stages: Sequence[Scope]) -> Any:
        model = sequential(stages)
        model.compile(model.optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"],
                      weighted_metrics=["accuracy"], steps_per_execution=fit.get("steps_per_execution", 1))
        return model

    given = {name: value for name, value in fit.items() if name != "steps_per_execution"}
    check(make, X, PIPELINE, everything="class_weight" not in fit, **given)


@pytest.mark.slow
@pytest.mark.parametrize("policy, tolerance", [
    ("mixed_float16", 1e-3), pytest.param("mixed_bfloat16", 1e-2, marks=pytest.mark.full)])
def test_mixed_precision(policy: str, tolerance: float) -> None:
    """Sums of micro-batches are rounded elsewhere than the local script's.  Under float16 gradients are scaled, by more and more
    where none overflows."""

    def make(stages: Sequence[Scope]) -> Any:
        inputs = keras.Input((6,), dtype="float32")
        with stages[0]():
            x = layers.Dense(8, activation="tanh", dtype=policy)(inputs)
        with stages[1]():
            outputs = layers.Dense(3, activation="softmax", dtype="float32")(x)
        adam = keras.optimizers.Adam(0.01)
        if policy == "mixed_float16":
            adam = keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0 ** 10, dynamic_growth_steps=2)
        return compiled(keras.Model(inputs, outputs), optimizer=adam)

    x = X.astype(np.float32)
    local, parallel = trained(make, x, None, epochs=2), trained(make, x, PIPELINE, epochs=2)
    np.testing.assert_allclose(parallel.values["predict"], local.values["predict"], rtol=tolerance, atol=tolerance)
    for expected, found in zip(local.weights, parallel.weights):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("model, way", [
    ("functional", Way((1, 2), 3, {"num_micro_batch": 2}, split=(1,))), ("text", Way((2, 1), 3, {}, split=(0,))),
    pytest.param("subclassed", Way((2, 2), 2, {}, split=(1,)), marks=pytest.mark.full),
    ("accumulating", Way((1, 2), 3, {}, split=(1,))),
    pytest.param("own_step", Way((2, 1), 3, {}, split=(0,)), marks=pytest.mark.full)], ids=str)
def test_divided_layers(model: str, way: Way) -> None:
    make, x = MODELS[model]
    check(make, x, way, everything=model == "functional", epochs=2)


# -- callbacks and files -------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("way", [PIPELINE, Way((2, 1), 3, {}, split=(0,))], ids=["pipeline", "split"])
def test_files_are_the_local_ones(way: Way, tmp_path: Any) -> None:
    """A checkpoint of each epoch and a saved model are read where whale_tf is not; weights that are loaded or assigned later
    train on as they do there."""

    def go_on(model: Any) -> List[np.ndarray]:
        model.load_weights(str(tmp_path / "1.weights.h5"))
        model.layers[1].kernel.assign(0.5 * model.layers[1].kernel)
        model.fit(X[:EVEN], LABELS[:EVEN], batch_size=16, shuffle=False, verbose=0)
        return [weight.numpy() for weight in model.weights]

    with trained_in(way) as stages:
        keras.utils.set_random_seed(0)
        model = functional(stages)
        callbacks = [keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True),
                     keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True),
                     keras.callbacks.EarlyStopping(), keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))]
        model.fit(X[:EVEN], LABELS[:EVEN], batch_size=16, epochs=3, verbose=0, callbacks=callbacks,
                  validation_data=(X[:16], LABELS[:16]))
        model.save(tmp_path / "model.keras")
        tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
        expected = model.predict(X[:EVEN], verbose=0)
        trained_on = go_on(model)
    keras.utils.set_random_seed(1)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X[:EVEN], verbose=0), expected, rtol=TOLERANCE)
    restored = functional([contextlib.nullcontext, contextlib.nullcontext])
    tf.train.Checkpoint(model=restored).restore(str(tmp_path / "checkpoint")).expect_partial()
    np.testing.assert_allclose(restored.predict(X[:EVEN], verbose=0), expected, rtol=TOLERANCE)
    for found, one in zip(go_on(loaded), trained_on):
        np.testing.assert_allclose(found, one, rtol=TOLERANCE, atol=TOLERANCE)
    assert os.path.exists(tmp_path / "best.keras")


@pytest.mark.slow
def test_tensorboard_has_the_local_numbers(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    logged = {}
    for name, way in (("local", None), ("divided", PIPELINE)):
        with trained_in(way) as stages:
            clear_keras()
            keras.utils.set_random_seed(0)
            board = keras.callbacks.TensorBoard(str(tmp_path / name), histogram_freq=1, update_freq=1)
            functional(stages).fit(X[:EVEN], LABELS[:EVEN], batch_size=16, epochs=2, shuffle=False, verbose=0,
                                   validation_data=(X[:16], LABELS[:16]), callbacks=[board])
        logged[name] = {
            (os.path.basename(os.path.dirname(file)), value.tag, event.step): tf.make_ndarray(value.tensor)
            for file in map(str, (tmp_path / name).rglob("events*")) for event in tf.compat.v1.train.summary_iterator(file)
            for value in event.summary.value if value.tag.startswith(("epoch_", "batch_", "evaluation_"))}
    assert logged["local"].keys() == logged["divided"].keys() and len(logged["local"]) > 10
    for key, value in logged["local"].items():
        np.testing.assert_allclose(logged["divided"][key], value, rtol=1e-5, err_msg=str(key))


@pytest.mark.slow
def test_training_goes_on_after_an_interruption(tmp_path: Any) -> None:
    """From the state of optimizer and model that BackupAndRestore kept."""

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise KeyboardInterrupt

    def run(stages: Sequence[Scope], folder: str) -> List[np.ndarray]:
        for callbacks in ([keras.callbacks.LambdaCallback(on_epoch_begin=stop)], []):
            keras.utils.set_random_seed(0)
            model = functional(stages)
            with contextlib.suppress(KeyboardInterrupt):
                model.fit(X[:EVEN], LABELS[:EVEN], batch_size=16, shuffle=False, epochs=3, verbose=0,
                          callbacks=[keras.callbacks.BackupAndRestore(str(tmp_path / folder)), *callbacks])
        return [weight.numpy() for weight in model.weights + model.optimizer.variables]

    local = run([contextlib.nullcontext, contextlib.nullcontext], "local")
    with trained_in(PIPELINE) as stages:
        parallel = run(stages, "parallel")
    for expected, found in zip(local, parallel):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_dropout_and_batch_normalization_train() -> None:
    """Whose numbers differ from the local ones by their nature: the explanation says so."""
    with trained_in(PIPELINE) as stages, pytest.warns(
            wh.InexactWarning, match="batch_normalization.* does not compute what the local script computes") as warned:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        with stages[0]():
            x = layers.BatchNormalization()(layers.Dense(32)(inputs))
            x = layers.Dropout(0.5)(x)
        with stages[1]():
            outputs = layers.Dense(3, activation="softmax")(x)
        model = compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.Adam(0.05))
        history = model.fit(X, LABELS, batch_size=16, epochs=15, verbose=0).history["loss"]
        assert "Not exactly the local result" in wh.explain() and "batch_normalization" in wh.explain()
    assert history[-1] < 0.8 * history[0]
    assert len([item for item in warned if item.category is wh.InexactWarning]) == 1  # the smaller last batch is traced, too


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"emit": "call"}], ids=["inlined", "called"])
def test_clones_drop_out_each_its_own(config: Dict[str, Any]) -> None:
    """All clones draw from one seed generator, whose state goes on by one in each step."""
    with trained_in(Way((), 2, dict(config, num_micro_batch=2))):
        keras.utils.set_random_seed(0)
        dropout, scale = layers.Dropout(0.5), layers.Dense(20, use_bias=False, kernel_initializer="identity")
        model = keras.Sequential([keras.Input((20,)), scale, dropout])
        step = keras.optimizers.SGD(0.0)
        kept = []

        @tf.function(reduce_retracing=True)
        def train(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                y = model(x, training=True)
                loss = tf.reduce_mean(y)
            step.apply_gradients([(tape.gradient(loss, scale.kernel), scale.kernel)])
            return y

        step.build([scale.kernel])
        before = dropout.seed_generator.state.numpy()
        for size in (8, 12, 12):  # the second trace is for batches of every size
            kept += [tuple(row > 0) for row in train(tf.ones([size, 20], tf.float64)).numpy()]
        after = dropout.seed_generator.state.numpy()
    assert len(set(kept)) == 32 and 0.3 < np.mean(kept) < 0.7
    assert list(after - before) == [0, 3]


@pytest.mark.slow
def test_batch_normalization_is_exact_when_synchronised() -> None:
    def make(stages: Sequence[Scope]) -> Any:
        inputs = keras.Input((6,))
        x = layers.BatchNormalization()(layers.Dense(8)(inputs))
        return compiled(keras.Model(inputs, layers.Dense(3, activation="softmax")(x)))

    check(make, X, Way((), 2, {"sync_batch_norm": True, "num_micro_batch": 2}))


# -- XLA and eager execution ---------------------------------------------------------------------------------------------
def test_xla_is_turned_off_where_keras_chose_it(monkeypatch: Any) -> None:
    from keras.src.trainers.trainer import Trainer

    monkeypatch.setattr(Trainer, "_resolve_auto_jit_compile", lambda self: True)  # as it does where there is a GPU
    assert sequential([contextlib.nullcontext, contextlib.nullcontext]).jit_compile
    wh.init(cluster="cpu:2")
    with pytest.warns(UserWarning, match="2 devices: Keras models with jit_compile='auto' are not compiled by XLA"):
        model = sequential([contextlib.nullcontext, contextlib.nullcontext])
    assert not model.jit_compile
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not sequential([contextlib.nullcontext, contextlib.nullcontext]).jit_compile
    wh.shutdown()  # before the patch is taken back: it gives Keras what it found


@pytest.mark.slow
def test_what_is_refused() -> None:
    with trained_in(WAYS["data parallel 2"]) as stages:
        for options, message in (({"jit_compile": True}, "compiled by XLA .jit_compile=True"),
                                 ({"run_eagerly": True}, "op by op.*leave out run_eagerly=True")):
            model = compiled(sequential(stages), **options)
            with pytest.raises(wh.PlanError, match=message):
                model.fit(X, LABELS, batch_size=16, verbose=0)
        sequential(stages).fit(X, LABELS, batch_size=16, verbose=0)
    early = compiled(sequential([contextlib.nullcontext, contextlib.nullcontext]))
    early.fit(X, LABELS, batch_size=16, verbose=0)
    with trained_in(WAYS["data parallel 2"]):
        with pytest.raises(wh.PlanError, match="was called before wh.init.. and .*compile the model again"):
            early.fit(X, LABELS, batch_size=16, verbose=0)
        compiled(early).fit(X, LABELS, batch_size=16, verbose=0)


def test_model_put_together_inside_an_annotation() -> None:
    """Its layers have annotations of their own, which count."""
    wh.init({}, cluster="cpu:2")
    try:
        inputs = keras.Input((6,))
        with wh.replicate(1):
            hidden = layers.Dense(8, activation="tanh")(inputs)
        with wh.replicate(1):
            model = compiled(keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden)))
        model.fit(X[:32], LABELS[:32], batch_size=16, verbose=0)
        plan = wh.current_plan()
        assert plan is not None and [task.devices for task in plan.task_graphs] == [((0,),), ((1,),)]
    finally:
        wh.shutdown()


def test_annotation_without_layers() -> None:
    wh.init(cluster="cpu:2")
    with pytest.raises(wh.AnnotationError, match="no Keras layer or variable was made inside.*@tf.function"):
        with wh.replicate(1):
            tf.ones([2]) + 1.0
    with pytest.raises(wh.AnnotationError, match="annotations do not nest"):
        with wh.replicate(1):
            layers.Dense(1)
            with wh.replicate(1):
                pass


def test_evaluation_of_annotated_layers_warns_of_nothing() -> None:
    """It runs on one device, like all that does not train; nobody meant it to be divided."""
    with trained_in(PIPELINE) as stages, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = subclassed(stages)
        model.evaluate(X, LABELS, verbose=0)
        model.fit(X, LABELS, batch_size=16, validation_data=(X, LABELS), verbose=0)


def test_layers_added_to_a_sequential_model_with_an_input() -> None:
    """Keras calls all its layers again for each layer that is added."""
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    model, made_before = keras.Sequential([keras.Input((6,))]), layers.Dense(3, activation="softmax")
    with wh.replicate(1, name="one"):
        model.add(layers.Dense(8, activation="tanh"))
    with wh.replicate(1, name="two"):
        model.add(made_before)
    compiled(model).fit(X[:16], LABELS[:16], batch_size=8, verbose=0)
    assert [task.name for task in wh.current_plan().task_graphs] == ["one", "two"]
