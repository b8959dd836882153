"""Keras scripts, which train in one process as in several.

``python -m tests.multiprocess.train_keras equality PATH``: ``fit`` and training loops, also with
variables divided over the processes; what they computed goes to ``PATH.RANK``.

``python -m tests.multiprocess.train_keras fit EPOCHS DIRECTORY``: ``fit`` with callbacks that write.  Environment variables:
PAUSE (seconds a step), SHORT (process 1 ends after so many steps).
"""
from __future__ import annotations

import json
import os
import pickle
import sys
import time
from typing import Any, Dict, List

import numpy as np

import whale_tf as wh
from whale_tf.config import VERIFIED

TASK = json.loads(os.environ.get("TF_CONFIG") or "{}")
RANK = TASK.get("task", {}).get("index", 0)
WORKERS = len(TASK.get("cluster", {}).get("worker", ())) or 1
BATCH = 16 // WORKERS


def parallel(**level: str) -> None:
    """Divides steps over the processes from now on, and variables as ``level`` says."""
    if WORKERS > 1:
        wh.init({"sync_batch_norm": True, **level})


parallel(**({"offload": "states"} if sys.argv[1] == "equality" else {}))  # first: with a host the server has one more device

import tensorflow as tf  # noqa: E402  # its variables and ops come after wh.init

keras = tf.keras  # 3 or, up to TensorFlow 2.15, 2
layers = keras.layers
RNG = np.random.RandomState(0)
X, LABELS, WEIGHTS = RNG.randn(61, 6), RNG.randint(0, 3, 61), RNG.rand(61)  # mini-batches of 16, 16, 16 and 13


class Steps(keras.callbacks.Callback):
    """What ``fit`` logs after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: List[Dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append({name: float(value) for name, value in logs.items()})
        if "PAUSE" in os.environ:
            time.sleep(float(os.environ["PAUSE"]))
        print(f"step {len(self.logs)} loss {self.logs[-1]['loss']!r}", flush=True)
        if RANK == 1 and os.environ.get("SHORT") == str(len(self.logs)):
            self.model.stop_training = True


def classifier(batch_norm: bool = False) -> Any:
    """Processes draw other initial values, and get those of process 0."""
    start = keras.initializers.RandomNormal(seed=RANK)
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", kernel_initializer=start, kernel_regularizer="l2")(inputs)
    if batch_norm:
        x = layers.BatchNormalization()(x)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax", kernel_initializer=start)(x))
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "sparse_categorical_crossentropy", metrics=["accuracy"],
                  weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy()])
    return model


def outcome(model: Any, *more: Any) -> List[np.ndarray]:
    return [np.array(value) for value in tf.nest.flatten(more) + model.variables + model.optimizer.variables]


def fitted(*data: Any, **options: Any) -> List[np.ndarray]:
    model, steps = classifier(batch_norm=True), Steps()
    history = model.fit(*data, epochs=2, verbose=0, callbacks=[steps], validation_data=(X[:20], LABELS[:20]), **options)
    assert len(steps.logs) == 8 or len(data) == 1
    return outcome(model, steps.logs, history.history, model.predict(X, verbose=0))


class Slow(layers.Dense):
    """A layer whose weights take time to write."""

    def save_own_variables(self, store: Any) -> None:
        time.sleep(0.2)
        super().save_own_variables(store)


def written(path: str) -> List[np.ndarray]:
    """A loop that goes on with what ``fit`` wrote last, and that with what a process wrote when the others were behind it."""
    model = keras.Sequential([keras.Input((6,)), Slow(3)])
    model.compile("sgd", "mse")
    save = keras.callbacks.ModelCheckpoint(f"{path}.fit.weights.h5", save_weights_only=True)
    model.fit(X[:48, :6], X[:48, :3], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[save])
    model.set_weights([0 * value for value in model.get_weights()])
    model.load_weights(f"{path}.fit.weights.h5")
    for number in range(2):
        if RANK == 0:
            model.save_weights(f"{path}.own.weights.h5")  # counts for nobody else
        model.fit(X[:BATCH * WORKERS], X[:BATCH * WORKERS, :3], batch_size=BATCH, verbose=0)
        model.save_weights(f"{path}.{number}.weights.h5")
        model.set_weights([0 * value for value in model.get_weights()])
        model.load_weights(f"{path}.{number}.weights.h5")
    return outcome(model)


class Middle(keras.metrics.Metric):
    """A metric that adds means: no sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, values: Any) -> None:
        self.total.assign_add(tf.cast(tf.reduce_mean(values), self.total.dtype))

    def result(self) -> Any:
        return self.total + 0


def looped() -> List[np.ndarray]:
    """A loop over a dataset, with results of the step and metrics that count, that average, and that assign."""
    model, optimizer = classifier(), keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    accuracy, mean, confusion = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean(), keras.metrics.MeanIoU(
        3, sparse_y_pred=False)
    middle = Middle()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            probabilities = model(x, training=True)
            loss = loss_of(y, probabilities)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, probabilities)
        confusion.update_state(y, probabilities)
        mean.update_state(loss)
        middle.update_state(probabilities[:, 0])
        right = tf.equal(tf.argmax(probabilities, -1), y)
        return loss, tf.reduce_mean(tf.cast(right, tf.float64)), tf.shape(x)[0], probabilities

    returned = []
    for x, y in tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(BATCH):
        *scalars, rows = step(x, y)
        assert rows.shape[0] == x.shape[0]  # the process' own
        returned.append(scalars)
    return outcome(model, returned, accuracy.variables, mean.variables, confusion.variables,
                   middle.variables, optimizer.variables)


def equality(path: str) -> None:
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    dataset = tf.data.Dataset.from_tensor_slices((X, LABELS)).shuffle(61, seed=3).batch(BATCH, drop_remainder=True)
    found = {"arrays, weights, states": fitted(X, LABELS, batch_size=BATCH, shuffle=False, sample_weight=WEIGHTS)}
    parallel(offload="v0")
    found["v0"] = words()
    parallel()
    found["written"] = written(path)
    found.update({"shuffled arrays": fitted(X, LABELS, batch_size=BATCH), "loop": looped()})
    parallel(zero="v2")
    found["dataset, v2"] = fitted(dataset.take(48 // BATCH))
    parallel(zero="v3")
    found["v3"] = words()
    os.environ.pop(VERIFIED, None)  # gradients that overflow are not the local ones
    parallel(zero="v2", amp="float16")
    found["skipped"] = skipped()
    with open(f"{path}.{RANK}", "wb") as handle:
        pickle.dump(found, handle)


def skipped() -> List[np.ndarray]:
    """A step whose gradients overflow under float16, and a function that returns something after the step's writes."""
    kernel = tf.Variable(tf.ones([2, 2]))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, kernel))
        kernel.assign_sub(1e-9 * tape.gradient(loss, kernel))
        return loss

    @tf.function
    def caller(x: tf.Tensor) -> Any:
        return tf.experimental.Optional.from_value(step(x))

    return [np.array(caller(tf.fill([BATCH, 2], 1e4)).has_value())]


def bytes_here(variables: Any) -> List[int]:
    """What an optimizer's variables take in this process between two steps: on their own, and in parts."""
    own, parts = 0, 0
    for variable in variables:
        variable = getattr(variable, "_value", variable)  # Keras 3 has its own class around TensorFlow's
        record = vars(variable).get("_whale_parts")
        if record is not None:
            own += tf.raw_ops.ReadVariableOp(resource=record.handle, dtype=variable.dtype).numpy().nbytes
            parts += sum(tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=variable.dtype).numpy().nbytes
                         for division, held in record.parts.items() for number, part in enumerate(held)
                         if not division.is_elsewhere(number))
    return [own, parts]


def words() -> List[np.ndarray]:
    """Look-ups, a loop with the function's own gradients, and evaluation between its steps."""
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(11, 5), layers.Flatten(), layers.Dense(3)])
    optimizer, losses = keras.optimizers.Adam(0.05), []
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    tokens = np.abs(X[:48, :4] * 4).astype("int32") % 11
    for x, y in tf.data.Dataset.from_tensor_slices((tokens, LABELS[:48])).batch(BATCH):
        losses.append(step(x, y))
        losses.append(tf.reduce_mean(model(tokens)))
    sizes = bytes_here(optimizer.variables)
    return [np.array(value) for value in [*losses, *model.variables, *optimizer.variables, sizes]]


def fit(epochs: int, directory: str) -> None:
    print("process", os.getpid(), flush=True)
    keras.utils.set_random_seed(1)
    os.makedirs(directory, exist_ok=True)
    callbacks = keras.callbacks
    classifier().fit(X, LABELS, batch_size=BATCH, epochs=epochs, verbose=0, validation_data=(X[:20], LABELS[:20]), callbacks=[
        Steps(), callbacks.BackupAndRestore(f"{directory}/backup", delete_checkpoint=False),
        callbacks.ModelCheckpoint(f"{directory}/model.keras"), callbacks.CSVLogger(f"{directory}/log.csv", append=True)])
    print("finished", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "equality":
        equality(sys.argv[2])
    else:
        fit(int(sys.argv[2]), sys.argv[3])
