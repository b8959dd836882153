"""``fit`` with snapshots, which goes on wherever it has ended.

``python -m tests.multiprocess.train_long DIRECTORY [KEY=VALUE...]``: what each step logged goes to standard output, all variables
at the end to ``DIRECTORY/variables.RANK.npz``.  Environment variables: PAUSE (seconds a step), SPANS (each process runs a part of
the step).
"""
from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

import whale_tf as wh

TASK = json.loads(os.environ.get("TF_CONFIG") or "{}")
RANK, WORKERS = TASK.get("task", {}).get("index", 0), len(TASK.get("cluster", {}).get("worker", ())) or 1
SPANS = "SPANS" in os.environ
EPOCHS, EXAMPLES, BATCH = 4, 48, 8  # of all processes together

given = {key: json.loads(value) for key, value in (each.split("=") for each in sys.argv[2:])}
wh.init({"snapshot.path": f"{sys.argv[1]}/snapshots", **({"io.slicing": False, "num_micro_batch": 2} if SPANS else {}), **given})

import tensorflow as tf  # noqa: E402  # its variables and ops come after wh.init

from tests.functions.long_runs import metric  # noqa: E402

keras = tf.keras
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)


class Steps(keras.callbacks.Callback):
    """Prints what ``fit`` logs after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        time.sleep(float(os.environ.get("PAUSE", "0")))
        print(f"step {self.count} loss {float(logs['loss'])!r} seen {float(logs['seen'])!r}", flush=True)


def model() -> Any:
    layers = keras.layers
    inputs = keras.Input((5,))
    with wh.replicate(1) if SPANS else contextlib.nullcontext():
        x = layers.Dense(8, activation="tanh")(inputs)
    with wh.replicate(1) if SPANS else contextlib.nullcontext():
        x = layers.Dense(8, activation="tanh")(x)
        x = layers.Dense(1)(x)
    made = keras.Model(inputs, x)
    made.compile(keras.optimizers.Adam(0.05), lambda y_true, y_pred: tf.square(y_true[:, :1] - y_pred), metrics=[metric()])
    return made


def main() -> None:
    os.makedirs(sys.argv[1], exist_ok=True)
    rng = np.random.RandomState(0)
    x = rng.randn(EXAMPLES, 5)
    y = np.stack([x @ rng.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5).batch(BATCH if SPANS else BATCH // WORKERS)
    made = model()
    print("process", os.getpid(), flush=True)
    made.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Steps(), keras.callbacks.ReduceLROnPlateau("loss", patience=1)],
             validation_data=(x[:8], y[:8]))
    np.savez(f"{sys.argv[1]}/variables.{RANK}.npz", *[value.numpy() for value in made.variables + made.optimizer.variables])
    print("finished", flush=True)


if __name__ == "__main__":
    main()
