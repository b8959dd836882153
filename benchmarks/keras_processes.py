"""Keras 3's ``fit`` in two processes, each on one core with one thread, beside a loop under MultiWorkerMirroredStrategy.

    python -m benchmarks.keras_processes [MODEL...]

``fit`` of Keras 3 does not run under MultiWorkerMirroredStrategy, so that has the same Keras model in a loop of a tf.function,
with one batch that stays in memory, and no metrics; ``fit`` takes its batches from tf.data, counts losses, and calls back.

Weak scaling: every process has a batch of the same size.
"""
from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, step_times, table

PROCESSES, WARMUP, ROUNDS, LEARNING_RATE = 2, 3, 3, 0.01
STEPS = {"mlp": 30, "encoder": 15}


def mlp(keras: Any) -> Any:
    layers = [keras.layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(10)])


def encoder(keras: Any) -> Any:
    inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1000, 128)(inputs)
    for _ in range(2):
        normal = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 32)(normal, normal)
        wide = keras.layers.Dense(512, activation="relu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(128)(wide)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


MODELS: Dict[str, Callable[[Any], Any]] = {"mlp": mlp, "encoder": encoder}


def data(model: str, rank: int) -> Tuple[Any, Any]:
    import numpy as np

    rng = np.random.RandomState(rank)
    if model == "mlp":
        return rng.randn(256, 1024).astype("float32"), rng.randint(0, 10, 256)
    return rng.randint(0, 1000, (32, 64)), rng.randint(0, 10, 32)


def loss_of(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(name: str, rank: int, is_whale: bool) -> Result:
    import tensorflow as tf

    import whale_tf as wh

    one_thread(tf)
    if is_whale:
        wh.init({"io.slicing": False}, cluster=f"{PROCESSES}xcpu:1")
    import keras

    class Clock(keras.callbacks.Callback):
        times: List[Tuple[float, float]] = []
        loss = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.loss = float(logs["loss"])
            self.times.append((time.perf_counter(), time.process_time()))

    keras.utils.set_random_seed(1)
    model, clock = MODELS[name](keras), Clock()
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss_of(keras), jit_compile=False)
    dataset = tf.data.Dataset.from_tensors(data(name, rank)).repeat()
    model.fit(dataset, steps_per_epoch=WARMUP + STEPS[name], verbose=0, callbacks=[clock])
    wall, cpu = [statistics.median(after - before for before, after in zip(row[WARMUP - 1:], row[WARMUP:]))
                 for row in zip(*clock.times)]
    return {"wall_s": wall, "cpu_s": cpu, "loss": clock.loss}


def multi_worker_mirrored(name: str, rank: int) -> Result:
    import tensorflow as tf

    one_thread(tf)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring))
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = MODELS[name](keras)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE)
    x, y = map(tf.constant, data(name, rank))
    trained = [variable.value for variable in model.trainable_variables]

    def replica_step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(keras)(y, model(x, training=True))  # under a strategy Keras divides it by the number of replicas
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained))
        return loss

    @tf.function
    def step() -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step), axis=None)

    losses: List[float] = []

    def one_step() -> float:
        losses.append(float(step()))
        return statistics.mean(losses)  # as ``fit`` logs it

    return step_times(one_step, STEPS[name], WARMUP)


SYSTEMS: Dict[str, Callable[[str, int], Result]] = {
    "fit in one process, without whale_tf": lambda name, rank: fit(name, rank, False),
    "fit, whale_tf": lambda name, rank: fit(name, rank, True),
    "loop, MultiWorkerMirroredStrategy": multi_worker_mirrored,
}


def one_thread(tf: Any, inter: int = 1) -> None:
    """One thread within an op, and so many for ops."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(inter)


def worker(spec: Spec) -> Result:
    """One of the processes; each has a core of its own."""
    from whale_tf.cluster import find_processes

    rank = find_processes().rank
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % (os.cpu_count() or 1)]})
    return SYSTEMS[spec["system"]](spec["model"], rank)


def report(console: Console) -> None:
    for model in sys.argv[1:] or MODELS:
        found: Dict[str, List[Result]] = {name: [] for name in SYSTEMS}
        for _ in range(ROUNDS):
            for name, results in found.items():
                results.append(ask(__file__, {"system": name, "model": model}, 1 if "one process" in name else PROCESSES))
        wall, cpu = ({name: statistics.median(result[key] for result in results) for name, results in found.items()}
                     for key in ("wall_s", "cpu_s"))
        last = list(SYSTEMS)[-1]
        console.print(table(f"{model}, the same batch in each process", [
            "system", "steps/s", "CPU ms per step", "of MWMS' speed", "by CPU time", "mean loss"], [
            [name, f"{1 / wall[name]:.2f}", f"{1e3 * cpu[name]:.0f}", f"{wall[last] / wall[name]:.2f}",
             f"{cpu[last] / cpu[name]:.2f}", f"{found[name][0]['loss']:.4f}"] for name in SYSTEMS]))


if __name__ == "__main__":
    main(__file__, worker, report)
