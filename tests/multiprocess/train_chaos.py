"""Trains with snapshots, in one of several ways, and goes on wherever it has ended.

``python -m tests.multiprocess.train_chaos KIND PLAN DIRECTORY [KEY=VALUE...]``: KIND is a function's name here, or ``backup``,
which is ``fit`` with Keras' BackupAndRestore in place of ``snapshot.path``. Each step prints its number, the loss, and the bits
of the examples; all variables at the end go to ``DIRECTORY/variables.RANK.npz``. Environment variables: PAUSE (seconds a step),
FULL_AT (a step after which the disk is full; ``3,1``: that of process 1), HOLD (steps, such as ``3,8``, after which training
waits until there is a file ``DIRECTORY/go-3``, or ``go-8``), LAYERS (2; a plan of more TaskGraphs has as many), LOOK (steps
between two evaluations and checkpoints; none: there are none), NETNS (network namespace of this process), OWN (names of the
directories in which the processes have their snapshots, by rank, such as ``a,b``; or one name, of the directory of this
process). SIGUSR2 prints where it is.
"""
from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import time
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

import whale_tf as wh

TASK = json.loads(os.environ.get("TF_CONFIG") or "{}")
RANK, WORKERS = TASK.get("task", {}).get("index", 0), len(TASK.get("cluster", {}).get("worker", ())) or 1
MOST = int(os.environ.get("WHALE_MAX_WORKERS", WORKERS))  # mini-batches of a step
OWN = os.environ["OWN"].split(",") if "OWN" in os.environ else []
EPOCHS, EXAMPLES, BATCH = 4, 48, 12  # of all processes together
STEPS = EPOCHS * EXAMPLES // BATCH


class Plan(NamedTuple):
    """Attributes:
    config: of ``wh.init``.
    cluster: None: that of ``whale run``.
    strategies: of the layers; none: the default.
    spans: each process runs a part of a step that has one mini-batch.
    """

    config: Dict[str, Any]
    cluster: Any
    strategies: Sequence[Any] = ()
    spans: bool = False


PLANS = {
    "plain": Plan({}, "cpu:1"),
    "pipeline": Plan({"num_micro_batch": 2}, "cpu:2", (("replicate", 1), ("replicate", 1))),
    "split": Plan({}, "cpu:2", (("replicate", 2), ("split", 2))),
    "zero": Plan({"zero": "v2"}, "cpu:2"),
    "two": Plan({}, None),
    "stages": Plan({"num_micro_batch": 2, "io.slicing": False, "io.nested_batch": "divide"}, None,
                   (("replicate", 1), ("replicate", 1)), True),
}


def across(workers: int) -> Dict[str, Plan]:
    """Plans for several processes."""
    one, two = f"{workers}xcpu:1", f"{workers}xcpu:2"

    def parts(*strategies: Any, **config: Any) -> Plan:
        return Plan({"num_micro_batch": 2, "io.slicing": False, **config}, one, strategies, True)

    def pipeline(schedule: str, turns: int = 1, **config: Any) -> Plan:
        stages = [("replicate", 1)] * workers * turns
        return parts(*stages, **{"pipeline.schedule": schedule, "num_micro_batch": 4, **config})

    return {
        "data parallel": Plan({}, one),
        "nested": Plan({"num_micro_batch": 2}, two, (("replicate", 1), ("replicate", 1))),
        "split inside": Plan({}, f"{workers}xcpu:4", (("replicate", 2), ("split", 2))),
        "zero v1": Plan({"zero": "v1"}, one),
        "zero v2": Plan({"zero": "v2", "num_micro_batch": 2}, one),
        "zero v3": Plan({"zero": "v3"}, one),
        "offload": Plan({"offload": "states"}, one),
        "gpipe": pipeline("gpipe"),
        "backward_first": pipeline("backward_first"),
        "zero_bubble_h1": pipeline("zero_bubble_h1"),
        "zero_bubble_h2": pipeline("zero_bubble_h2"),
        "interleaved": pipeline("interleaved", 2),
        "zero_bubble_v": pipeline("zero_bubble_v", 2),
        "called": pipeline("backward_first", emit="call"),
        "stages on hosts": pipeline("backward_first", offload="states"),
        "split": parts(("replicate", workers), ("split", workers), num_micro_batch=1),
        "zero v2 in parts": parts(("replicate", workers), ("replicate", workers), zero="v2", num_micro_batch=1),
        "auto_parallel": parts(auto_parallel=True),
    }


def share(plan: Plan) -> Tuple[int, int]:
    """Which part of the examples this process reads, and of how many; (0, 1): all of them."""
    are_parts = plan.spans or len(set(map(len, wh.Cluster.local().nodes))) > 1  # or different numbers of devices
    return (0, 1) if are_parts else (RANK, WORKERS)


def say(what: str) -> None:
    """A moment at which something may happen to this process."""
    print(what, flush=True)


def is_look(step: int) -> bool:
    every = int(os.environ.get("LOOK", 0))
    return bool(every) and step % every == 0


def report(step: int, loss: float, seen: float) -> None:
    """After each step."""
    print(f"step {step} loss {float(loss)!r} seen {float(seen)!r}", flush=True)
    while str(step) in os.environ.get("HOLD", "").split(",") and not os.path.exists(f"{sys.argv[3]}/go-{step}"):
        time.sleep(0.05)
    full_at, *ranks = map(int, os.environ.get("FULL_AT", "0").split(","))
    if step == full_at and RANK in (ranks or [RANK]):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))  # output goes to a pipe
    time.sleep(float(os.environ.get("PAUSE", "0")))


def layers_of(plan: Plan) -> int:
    return max(2, len(plan.strategies), int(os.environ.get("LAYERS", 0)))


def part(plan: Plan, number: int) -> Any:
    if not plan.strategies:
        return contextlib.nullcontext()
    kind, count = plan.strategies[number]
    return getattr(wh, kind)(count)


def batches(plan: Plan, x: Any, y: Any, tf: Any, rounds: int = 1) -> Any:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5)
    return data.repeat(rounds).batch(BATCH if plan.spans else BATCH // MOST)


def fit(plan: Plan, x: Any, y: Any, tf: Any, save_freq: Any = None) -> List[Any]:
    from tests.functions.long_runs import metric

    keras = tf.keras
    inputs = keras.Input((5,))
    out, count = inputs, layers_of(plan)
    for number in range(count):
        with part(plan, number):
            out = keras.layers.Dense(8, activation="tanh")(out)
            if number == count - 1:
                out = keras.layers.Dense(1)(out)
    model = keras.Model(inputs, out)
    model.compile(keras.optimizers.Adam(0.05), lambda y_true, y_pred: tf.square(y_true[:, :1] - y_pred), metrics=[metric()])
    step = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: report(
        int(model.optimizer.iterations.numpy()), logs["loss"], logs["seen"]))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    backups = [] if save_freq is None else [keras.callbacks.BackupAndRestore(
        f"{sys.argv[3]}/snapshots", save_freq, double_checkpoint=True, delete_checkpoint=False)]
    begun = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: say("training") if not batch else None)
    more: Dict[str, Any] = {}
    if "LOOK" in os.environ:
        backups += [keras.callbacks.ModelCheckpoint(f"{sys.argv[3]}/model.keras"), keras.callbacks.LambdaCallback(
            on_test_begin=lambda logs: say("looking"), on_epoch_end=lambda epoch, logs: say("looking"))][::-1]
        more = {"validation_data": (x[:8], y[:8])}
    model.fit(batches(plan, x, y, tf), epochs=EPOCHS, verbose=0, callbacks=[*backups, begun, step, plateau], **more)
    return [value.numpy() for value in model.variables + model.optimizer.variables]


def loop(plan: Plan, x: Any, y: Any, tf: Any) -> List[Any]:
    keras = tf.keras
    layers = [keras.layers.Dense(8, activation="tanh") for _ in range(layers_of(plan) - 1)] + [keras.layers.Dense(1)]
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

    saved = tf.train.CheckpointManager(tf.train.Checkpoint(layers=layers, optimizer=optimizer), f"{sys.argv[3]}/checkpoints", 2)
    say("training")
    for _, elements in wh.resume(batches(plan, x, y, tf), epochs=EPOCHS):
        for features, labels in elements:
            number = int(optimizer.iterations.numpy()) + 1
            report(number, step(features, labels).numpy(), labels[:, 1].numpy().sum())
            if is_look(number):
                say("looking")
                saved.save(number)
                assert np.isfinite(sum(weight.numpy().sum() for layer in layers for weight in layer.weights))
    for layer in layers:  # a loop that had finished before makes no step, and thus no variables
        x = layer(x)
    return [weight.numpy() for layer in layers for weight in layer.weights]


def regression(plan: Plan, features: Any, labels: Any, tf: Any) -> Tuple[Any, Any, Any]:
    """Loss, train op and global step."""
    v1 = tf.compat.v1
    out, count = features, layers_of(plan)
    for number, columns in enumerate([8] * (count - 1) + [1]):
        with part(plan, number):
            initial = v1.random_uniform_initializer(-1, 1, seed=number, dtype=tf.float64)  # whatever the number of ops before it
            out = tf.tanh(tf.matmul(out, v1.get_variable(f"w{number}", [out.shape[1], columns], tf.float64, initial)))
    loss, steps = tf.reduce_mean(tf.square(labels[:, :1] - out)), v1.train.get_or_create_global_step()
    return loss, v1.train.AdamOptimizer(0.05).minimize(loss, global_step=steps), steps


def session(plan: Plan, x: Any, y: Any, tf: Any, feeds: bool = False) -> List[Any]:
    v1 = tf.compat.v1
    if feeds:
        features, labels = v1.placeholder(tf.float64, [None, 5]), v1.placeholder(tf.float64, [None, 2])
    else:
        iterator = v1.data.make_initializable_iterator(batches(plan, x, y, tf, EPOCHS))
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        features, labels = iterator.get_next()
    loss, train, count = regression(plan, features, labels, tf)
    ids = tf.identity(labels[:, 1])
    variables = v1.global_variables()

    class Last(v1.train.SessionRunHook):
        def end(self, session: Any) -> None:
            self.values = session.run(variables)

    if feeds:
        saver = v1.train.Saver()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            rank, workers = share(plan)
            rows = [slice(start, start + BATCH) for start in range(0, EXAMPLES, BATCH)]
            say("training")
            for _, elements in wh.resume(rows, epochs=EPOCHS):
                for each in elements:
                    own = slice(each.start + rank * BATCH // workers, each.start + (rank + 1) * BATCH // workers)
                    _, value = session.run([train, loss], {features: x[own], labels: y[own]})
                    number = session.run(count)
                    report(number, value, y[own, 1].sum())
                    if is_look(number):
                        say("looking")
                        saver.save(session, f"{sys.argv[3]}/checkpoints/model", number)
                        if RANK == 0:  # the others do not look
                            assert np.isfinite(session.run(loss, {features: x[:8], labels: y[:8]}))
            return session.run(variables)
    last = Last()
    saves = {"checkpoint_dir": f"{sys.argv[3]}/checkpoints", "save_checkpoint_steps": int(os.environ["LOOK"]),
             "save_checkpoint_secs": None} if "LOOK" in os.environ else {}
    with v1.train.MonitoredTrainingSession(hooks=[v1.train.StopAtStepHook(last_step=STEPS), last], **saves) as session:
        say("training")
        while not session.should_stop():
            _, value, seen = session.run([train, loss, ids])
            number = last_step(session, count)
            report(number, value, seen.sum())
            if is_look(number) and RANK == 0:
                say("looking")
                session.run_step_fn(lambda step_context: step_context.session.run(variables))
    return last.values


def estimator(plan: Plan, x: Any, y: Any, tf: Any) -> List[Any]:
    """``train_and_evaluate``, which evaluates each of its checkpoints."""
    v1 = tf.compat.v1

    def model(features: Any, labels: Any, mode: str) -> Any:
        loss, train, count = regression(plan, features, labels, tf)
        ids = tf.identity(labels[:, 1])

        class Steps(v1.train.SessionRunHook):
            def after_create_session(self, session: Any, coord: Any) -> None:
                say("training")

            def before_run(self, run_context: Any) -> Any:
                return v1.train.SessionRunArgs([loss, ids])

            def after_run(self, run_context: Any, run_values: Any) -> None:
                value, seen = run_values.results
                report(run_context.session.run(count), value, seen.sum())

        if mode == tf.estimator.ModeKeys.EVAL:
            say("looking")
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, training_hooks=[Steps()])

    settings = tf.estimator.RunConfig(f"{sys.argv[3]}/checkpoints", save_checkpoints_steps=int(os.environ.get("LOOK", 5)))
    trained = tf.estimator.Estimator(model, config=settings)
    tf.estimator.train_and_evaluate(
        trained, tf.estimator.TrainSpec(lambda: batches(plan, x, y, tf, EPOCHS), max_steps=STEPS),
        tf.estimator.EvalSpec(lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(8), None, throttle_secs=0))
    return [trained.get_variable_value(name) for name in sorted(trained.get_variable_names())]


def last_step(session: Any, count: Any) -> int:
    """Read aside: beside the train op it may be fetched before or after the update."""
    return int(session.run_step_fn(lambda step_context: step_context.session.run(count)))


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    if "NETNS" in os.environ:  # this thread's, and of those that it starts
        with open("/run/netns/" + os.environ["NETNS"]) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "this process cannot enter its network namespace")
    kind, plan, folder = sys.argv[1], {**PLANS, **across(WORKERS)}[sys.argv[2]], sys.argv[3]
    given = {key: json.loads(value) for key, value in (each.split("=") for each in sys.argv[4:])}
    import tensorflow as tf

    kinds = {"session": session, "feeds": lambda *rest: session(*rest, feeds=True), "estimator": estimator}
    if kind in kinds:
        tf.compat.v1.disable_eager_execution()
    snapshots = {} if kind == "backup" else {
        "snapshot.path": f"{folder}/snapshots" + (f"/{OWN[RANK % len(OWN)]}" if OWN else ""), **given}
    wh.init({**plan.config, **snapshots}, cluster=plan.cluster)
    print("process", os.getpid(), flush=True)
    rng = np.random.RandomState(0)
    x = rng.randn(EXAMPLES, 5)
    y = np.stack([x @ rng.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)
    if kind in kinds:
        tf.compat.v1.set_random_seed(3)
        values = kinds[kind](plan, x, y, tf)
    else:
        tf.keras.backend.set_floatx("float64")
        tf.keras.utils.set_random_seed(3)
        more = [given.get("snapshot.every_steps", "epoch")] if kind == "backup" else []
        values = {"fit": fit, "backup": fit, "loop": loop}[kind](plan, x, y, tf, *more)
    np.savez(f"{folder}/variables.{RANK}.npz", *[np.array(value) for value in values])
    print("finished", flush=True)


if __name__ == "__main__":
    main()
