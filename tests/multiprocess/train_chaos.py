"""Trains with snapshots, in one of several ways, and goes on wherever it has ended.

``python -m tests.multiprocess.train_chaos KIND PLAN DIRECTORY [KEY=VALUE...]``: KIND is a function's name here, or
``backup``, which is ``fit`` with Keras' BackupAndRestore in place of ``snapshot.path``.  Each step prints its number, the loss,
and the bits of the examples; all variables at the end go to ``DIRECTORY/variables.RANK.npz``.  Environment variables: PAUSE
(seconds a step), FULL_AT (a step after which the disk is full), HOLD (steps, such as ``3,8``, after which training waits until
there is a file ``DIRECTORY/go-3``, or ``go-8``).
"""
from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np

import whale_tf as wh

TASK = json.loads(os.environ.get("TF_CONFIG") or "{}")
RANK, WORKERS = TASK.get("task", {}).get("index", 0), len(TASK.get("cluster", {}).get("worker", ())) or 1
MOST = int(os.environ.get("WHALE_MAX_WORKERS", WORKERS))  # mini-batches of a step
EPOCHS, EXAMPLES, BATCH = 4, 48, 12  # of all processes together
STEPS = EPOCHS * EXAMPLES // BATCH


class Plan(NamedTuple):
    """Attributes:
    config: of ``wh.init``.
    cluster: None: that of ``whale run``.
    strategies: of the layers; none: the default.
    """

    config: Dict[str, Any]
    cluster: Any
    strategies: Sequence[Any] = ()


PLANS = {
    "plain": Plan({}, "cpu:1"),
    "pipeline": Plan({"num_micro_batch": 2}, "cpu:2", (("replicate", 1), ("replicate", 1))),
    "split": Plan({}, "cpu:2", (("replicate", 2), ("split", 2))),
    "zero": Plan({"zero": "v2"}, "cpu:2"),
    "two": Plan({}, None),
}


def report(step: int, loss: float, seen: float) -> None:
    """After each step."""
    print(f"step {step} loss {float(loss)!r} seen {float(seen)!r}", flush=True)
    while str(step) in os.environ.get("HOLD", "").split(",") and not os.path.exists(f"{sys.argv[3]}/go-{step}"):
        time.sleep(0.05)
    if step == int(os.environ.get("FULL_AT", 0)):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))  # output goes to a pipe
    time.sleep(float(os.environ.get("PAUSE", "0")))


def part(plan: Plan, number: int) -> Any:
    if not plan.strategies:
        return contextlib.nullcontext()
    kind, count = plan.strategies[number]
    return getattr(wh, kind)(count)


def batches(x: Any, y: Any, tf: Any, rounds: int = 1) -> Any:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5)
    return data.repeat(rounds).batch(BATCH // MOST)


def fit(plan: Plan, x: Any, y: Any, tf: Any, save_freq: Any = None) -> List[Any]:
    from tests.functions.long_runs import metric

    keras = tf.keras
    inputs = keras.Input((5,))
    with part(plan, 0):
        out = keras.layers.Dense(8, activation="tanh")(inputs)
    with part(plan, 1):
        out = keras.layers.Dense(1)(keras.layers.Dense(8, activation="tanh")(out))
    model = keras.Model(inputs, out)
    model.compile(keras.optimizers.Adam(0.05), lambda y_true, y_pred: tf.square(y_true[:, :1] - y_pred), metrics=[metric()])
    step = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: report(
        int(model.optimizer.iterations.numpy()), logs["loss"], logs["seen"]))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    backups = [] if save_freq is None else [keras.callbacks.BackupAndRestore(
        f"{sys.argv[3]}/snapshots", save_freq, double_checkpoint=True, delete_checkpoint=False)]
    model.fit(batches(x, y, tf), epochs=EPOCHS, verbose=0, callbacks=[*backups, step, plateau])
    return [value.numpy() for value in model.variables + model.optimizer.variables]


def loop(plan: Plan, x: Any, y: Any, tf: Any) -> List[Any]:
    keras = tf.keras
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    optimizer = keras.optimizers.Adam(0.05)

    @tf.function
    def step(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            for number, layer in enumerate(layers):
                with part(plan, number):
                    features = layer(features)
            loss = tf.reduce_mean(tf.square(labels[:, :1] - features))
        weights = [weight for layer in layers for weight in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    for _, elements in wh.resume(batches(x, y, tf), epochs=EPOCHS):
        for features, labels in elements:
            report(int(optimizer.iterations.numpy()) + 1, step(features, labels).numpy(), labels[:, 1].numpy().sum())
    for layer in layers:  # a loop that had finished before makes no step, and thus no variables
        x = layer(x)
    return [weight.numpy() for layer in layers for weight in layer.weights]


def session(plan: Plan, x: Any, y: Any, tf: Any, feeds: bool = False) -> List[Any]:
    v1 = tf.compat.v1
    if feeds:
        features, labels = v1.placeholder(tf.float64, [None, 5]), v1.placeholder(tf.float64, [None, 2])
    else:
        iterator = v1.data.make_initializable_iterator(batches(x, y, tf, EPOCHS))
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        features, labels = iterator.get_next()
    out = features
    for number, columns in enumerate((8, 1)):
        with part(plan, number):
            initial = v1.random_uniform_initializer(-1, 1, seed=number, dtype=tf.float64)  # whatever the number of ops before it
            out = tf.tanh(tf.matmul(out, v1.get_variable(f"w{number}", [out.shape[1], columns], tf.float64, initial)))
    loss, ids = tf.reduce_mean(tf.square(labels[:, :1] - out)), tf.identity(labels[:, 1])
    count = v1.train.get_or_create_global_step()
    train = v1.train.AdamOptimizer(0.05).minimize(loss, global_step=count)
    variables = v1.global_variables()

    class Last(v1.train.SessionRunHook):
        def end(self, session: Any) -> None:
            self.values = session.run(variables)

    if feeds:
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            are_parts = len(set(map(len, wh.Cluster.local().nodes))) > 1  # of a step: processes have different numbers of devices
            rank, workers = (0, 1) if are_parts else (RANK, WORKERS)
            rows = [slice(start, start + BATCH) for start in range(0, EXAMPLES, BATCH)]
            for _, elements in wh.resume(rows, epochs=EPOCHS):
                for each in elements:
                    own = slice(each.start + rank * BATCH // workers, each.start + (rank + 1) * BATCH // workers)
                    _, value = session.run([train, loss], {features: x[own], labels: y[own]})
                    report(session.run(count), value, y[own, 1].sum())
            return session.run(variables)
    last = Last()
    with v1.train.MonitoredTrainingSession(hooks=[v1.train.StopAtStepHook(last_step=STEPS), last]) as session:
        while not session.should_stop():
            _, value, seen = session.run([train, loss, ids])
            report(last_step(session, count), value, seen.sum())
    return last.values


def last_step(session: Any, count: Any) -> int:
    """Read aside: beside the train op it may be fetched before or after the update."""
    return int(session.run_step_fn(lambda step_context: step_context.session.run(count)))


def main() -> None:
    kind, plan, folder = sys.argv[1], PLANS[sys.argv[2]], sys.argv[3]
    given = {key: json.loads(value) for key, value in (each.split("=") for each in sys.argv[4:])}
    import tensorflow as tf

    if kind in ("session", "feeds"):
        tf.compat.v1.disable_eager_execution()
    snapshots = {} if kind == "backup" else {"snapshot.path": f"{folder}/snapshots", **given}
    wh.init({**plan.config, **snapshots}, cluster=plan.cluster)
    print("process", os.getpid(), flush=True)
    rng = np.random.RandomState(0)
    x = rng.randn(EXAMPLES, 5)
    y = np.stack([x @ rng.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)
    if kind in ("session", "feeds"):
        tf.compat.v1.set_random_seed(3)
        values = session(plan, x, y, tf, kind == "feeds")
    else:
        tf.keras.backend.set_floatx("float64")
        tf.keras.utils.set_random_seed(3)
        more = [given.get("snapshot.every_steps", "epoch")] if kind == "backup" else []
        values = {"fit": fit, "backup": fit, "loop": loop}[kind](plan, x, y, tf, *more)
    np.savez(f"{folder}/variables.{RANK}.npz", *[np.array(value) for value in values])
    print("finished", flush=True)


if __name__ == "__main__":
    main()
