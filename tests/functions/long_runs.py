"""A model whose steps tell which examples they saw, and runs of it that end early and go on."""
from __future__ import annotations

import random
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow as tf

import whale_tf as wh
from whale_tf._tf_compat import eager_context

EXAMPLES, BATCH, EPOCHS = 44, 8, 3  # five whole mini-batches and one of four
STEPS = -(-EXAMPLES // BATCH)
_RNG = np.random.RandomState(0)
X = _RNG.randn(EXAMPLES, 5)
Y = np.stack([X @ _RNG.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)  # a target, and a bit of a number for the example


class Stop(Exception):
    """A run ends here."""


class Steps(tf.keras.callbacks.Callback):
    """Records the logs of each step, and may end the run after one."""

    def __init__(self, end: Optional[Callable[[], Any]] = None, after: int = 0) -> None:
        super().__init__()
        self.record: List[Dict[str, float]] = []
        self._end, self._after = end, after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.record.append({name: float(value) for name, value in logs.items()})
        if self._end is not None and len(self.record) == self._after:
            self._end()


class Counts(tf.keras.callbacks.Callback):
    """Keeps variables of its own, and lists the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.totals = tf.Variable(0), [tf.keras.Variable(0.0)]
        self.rows = tf.ragged.constant([[1, 2], [3]])

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.weights = model.trainable_variables

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.assign_add(1)
        self.totals[0].assign(self.totals[0] + tf.cast(tf.reduce_sum(self.weights[-1]), "float32"))


class Outcome(NamedTuple):
    """Logs of each step, those of each epoch, and all variables at the end."""

    steps: List[Dict[str, float]]
    epochs: Dict[str, List[float]]
    variables: List[np.ndarray]


def metric() -> Any:
    """Adds up the bits of the examples seen."""
    keras = tf.keras

    class Seen(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="seen", dtype="float64")
            self.total = self.add_weight(name="total", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.reduce_sum(tf.cast(y_true[:, 1], tf.float64)))

        def result(self) -> Any:
            return self.total + 0

    return Seen()


def model(is_built: bool = True) -> Any:
    """Dropout draws from a generator of its own, noise from Keras' common one; Adam counts steps."""
    layers = tf.keras.layers
    stack = ([layers.Input((5,))] if is_built else []) + [
        layers.Dense(8, activation="tanh"), layers.Dropout(0.3), layers.GaussianNoise(0.1), layers.BatchNormalization(),
        layers.Dense(1)]
    made = tf.keras.Sequential(stack)
    made.compile(tf.keras.optimizers.Adam(0.05, clipnorm=1.0),
                 lambda y_true, y_pred: tf.square(y_true[:, :1] - y_pred), metrics=[metric()])
    return made


def arrays() -> Any:
    return dict(x=X, y=Y, batch_size=BATCH)


def dataset() -> Any:
    return dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20).batch(BATCH))


def endless() -> Any:
    """Epochs end in the middle of a round of the data."""
    return dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20).repeat().batch(BATCH, drop_remainder=True),
                steps_per_epoch=STEPS)


def of_unknown_length() -> Any:
    return dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20).filter(lambda x, y: True).batch(BATCH))


def python_dataset() -> Any:
    class Batches(tf.keras.utils.PyDataset):
        """Shuffled by Keras and, between epochs, by itself."""

        def __init__(self) -> None:
            super().__init__()
            self.order = np.arange(EXAMPLES)

        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            chosen = self.order[index * BATCH:(index + 1) * BATCH]
            return X[chosen], Y[chosen]

        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)

    return dict(x=Batches(), shuffle=True)


def generator() -> Any:
    def batches() -> Any:
        rng = np.random.RandomState(5)
        while True:
            order = rng.permutation(EXAMPLES)
            for start in range(0, EXAMPLES, BATCH):
                yield X[order[start:start + BATCH]], Y[order[start:start + BATCH]]
    return dict(x=batches(), steps_per_epoch=STEPS)


DATA: Dict[str, Callable[[], Any]] = {
    "arrays": arrays, "dataset": dataset, "endless": endless, "of unknown length": of_unknown_length,
    "python dataset": python_dataset, "generator": generator}


def fitted(config: Dict[str, Any], cluster: str, data: str, seed: Optional[int] = 1, end: Optional[Callable[[], Any]] = None,
           after: int = 0, epochs: int = EPOCHS, make: Callable[[], Any] = model, callbacks: Sequence[Any] = (),
           **options: Any) -> Outcome:
    """A script that trains a model; no cluster: without whale_tf."""
    if cluster:
        wh.init(config, cluster=cluster)
    else:
        wh.shutdown()
    keras = tf.keras
    if seed is not None:
        keras.utils.set_random_seed(seed)
    else:
        eager_context()._set_global_seed(None)  # whatever tests before have set
        np.random.seed(7)
        random.seed(7)
    made, steps = make(), Steps(end, after)
    history = made.fit(epochs=epochs, verbose=0, callbacks=[
        *callbacks, steps, keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, start_from_epoch=1),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0)], **DATA[data](), **options).history
    return Outcome(steps.record, history, [np.array(value) for value in made.variables + made.optimizer.variables])
