"""What training waits for snapshots: between two steps of ``fit``, with one snapshot in ten steps.

    python -m benchmarks.snapshots
    whale run --workers 2 -m benchmarks.snapshots

An encoder trains three times: without, with whale_tf's snapshots, and with Keras' BackupAndRestore, which writes before training
goes on.  The time between the end of a step and the beginning of the next one is the training thread's; CPU seconds count, which
do not depend on what else the machine does, and include no waiting for the disk.  Updates after a snapshot write to new memory;
this shows in the CPU seconds of all threads per step.
"""
from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any, Dict, List

import numpy as np

import whale_tf as wh

STEPS, EVERY, BATCH, LENGTH, WIDTH, LAYERS = 60, 10, 8, 64, 256, 4


def encoder(keras: Any) -> Any:
    layers = keras.layers
    x = inputs = keras.Input((LENGTH, WIDTH))
    for _ in range(LAYERS):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, WIDTH // 4)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def measured(way: str, folder: str) -> Dict[str, Any]:
    """Times of one training run."""
    wh.init({"snapshot.path": folder, "snapshot.every_steps": EVERY} if way == "snapshots" else {"auto_parallel": False})
    import tensorflow as tf

    keras = tf.keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.between: List[Any] = []
            self.ended = (0.0, 0.0)
            self.begun = 0.0
            self.steps: List[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch:
                self.between.append((batch, time.thread_time() - self.ended[0], time.perf_counter() - self.ended[1]))
            self.begun = time.process_time()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps.append(time.process_time() - self.begun)
            self.ended = time.thread_time(), time.perf_counter()

    rng = np.random.RandomState(0)
    x, y = rng.randn(STEPS * BATCH, LENGTH, WIDTH).astype("float32"), rng.randn(STEPS * BATCH, 1)
    clock, model = Clock(), encoder(keras)
    more = [keras.callbacks.BackupAndRestore(folder, save_freq=EVERY)] if way == "BackupAndRestore" else []
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), verbose=0, callbacks=[clock, *more])
    return {"between": clock.between[EVERY:], "steps": clock.steps[EVERY:],
            "bytes": sum(value.numpy().nbytes for value in model.variables + model.optimizer.variables)}


def main() -> None:
    print(f"{'':18}{'per save, training thread':>42}{'per step, all threads':>24}")
    print(f"{'':18}{'ms of CPU':>21}{'ms of wall clock':>21}{'ms of CPU':>24}")
    for way in ("none", "snapshots", "BackupAndRestore"):
        with tempfile.TemporaryDirectory() as own:
            found = measured(way, os.environ.get("SHARED", own))
        saves = [one for one in found["between"] if one[0] % EVERY == 0]
        cpu, wall = [1000 * statistics.median(one[number] for one in saves) for number in (1, 2)]
        print(f"{way:18}{cpu:21.1f}{wall:21.1f}{1000 * statistics.mean(found['steps']):24.1f}", flush=True)
    print(f"{found['bytes'] / 2**20:.0f} MiB of variables")


if __name__ == "__main__":
    main()
