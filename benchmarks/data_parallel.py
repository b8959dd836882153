"""(c) Data parallelism on two logical CPU devices beside MirroredStrategy and hand-written in-graph replicas.

    python -m benchmarks.data_parallel

Weak scaling: the batch per replica is fixed; all systems start from the same parameters and see the same examples, so
their losses agree. ``local`` trains on one replica's batch, on one device which may use every core: two replicas
cannot do better than half its rate of steps by much.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload, initial, loss, variables

REPLICAS = 2
STEPS = {"mlp": 40, "encoder": 10}
ROUNDS = 3


# -- the systems: each returns a function that takes one step and returns the loss -------------------------------------


def local(workload: Workload) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    value = loss(workload, variables(workload), *_next_batch(workload.data(workload.batch, 0)))
    return _run(value, tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value), 1)


def whale(workload: Workload) -> Callable[[], Any]:
    import numpy as np
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init(cluster=f"cpu:{REPLICAS}")
    parts = [workload.data(workload.batch, seed) for seed in range(REPLICAS)]
    batch = tuple(np.concatenate(arrays) for arrays in zip(*parts))
    with wh.replicate():
        value = loss(workload, variables(workload), *_next_batch(batch))
    return _run(value, tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value), REPLICAS)


def shared_variables(workload: Workload) -> Callable[[], Any]:
    """In-graph replicas that read the variables of device 0, which also adds the gradients."""
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    with tf.device("/device:CPU:0"):
        parameters = variables(workload)
    losses, gradients = [], []
    for replica in range(REPLICAS):
        with tf.device(f"/device:CPU:{replica}"):
            losses.append(loss(workload, parameters, *_next_batch(workload.data(workload.batch, replica))))
            gradients.append(tf.gradients(losses[-1], list(parameters.values())))
    with tf.device("/device:CPU:0"):
        means = [tf.add_n(list(parts)) / REPLICAS for parts in zip(*gradients)]
        update = tf.train.GradientDescentOptimizer(LEARNING_RATE).apply_gradients(zip(means, parameters.values()))
        return _run(tf.add_n(losses) / REPLICAS, update, REPLICAS)


def mirrored_variables(workload: Workload) -> Callable[[], Any]:
    """In-graph replicas with variables of their own, kept equal by one collective per gradient."""
    import tensorflow.compat.v1 as tf
    from tensorflow.python.ops import collective_ops

    tf.disable_eager_execution()
    losses, updates = [], []
    for replica in range(REPLICAS):
        with tf.device(f"/device:CPU:{replica}"):
            parameters = variables(workload, f"replica_{replica}_")
            losses.append(loss(workload, parameters, *_next_batch(workload.data(workload.batch, replica))))
            gradients = tf.gradients(losses[-1], list(parameters.values()))
            means = [collective_ops.all_reduce(g, REPLICAS, 1, 1 + k, "Add", "Div") for k, g in enumerate(gradients)]
            updates.append(tf.train.GradientDescentOptimizer(LEARNING_RATE).apply_gradients(
                zip(means, parameters.values())))
    with tf.device("/device:CPU:0"):
        return _run(tf.add_n(losses) / REPLICAS, tf.group(*updates), REPLICAS)


def mirrored_strategy(workload: Workload) -> Callable[[], Any]:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    with strategy.scope():
        parameters = {n: tf.Variable(initial(n, shape), name=n) for n, shape in workload.shapes.items()}
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE)
    values = list(parameters.values())
    batches = strategy.experimental_distribute_values_from_function(
        lambda context: tuple(map(tf.constant, workload.data(workload.batch, context.replica_id_in_sync_group))))

    def replica_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(workload, parameters, *batch)
        gradients = tape.gradient(value, values)
        optimizer.apply_gradients([(g / REPLICAS, v) for g, v in zip(gradients, values)])
        return value

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(batch,)), axis=None)

    return lambda: step(batches).numpy()


SYSTEMS: Dict[str, Callable[[Workload], Callable[[], Any]]] = {
    "local": local, "whale_tf": whale, "shared variables": shared_variables, "mirrored variables": mirrored_variables,
    "MirroredStrategy": mirrored_strategy}


def _next_batch(batch: Any) -> Any:
    """From an input pipeline: what is computed from constants alone, TensorFlow computes once."""
    import tensorflow.compat.v1 as tf

    with tf.device("/device:CPU:0"):
        return tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(batch).repeat()).get_next()


def _run(value: Any, update: Any, devices: int) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    session = tf.Session(config=session_config(devices))
    session.run(tf.global_variables_initializer())
    return lambda: session.run([value, update])[0]


def worker(spec: Spec) -> Result:
    return step_times(SYSTEMS[spec["system"]](WORKLOADS[spec["model"]]()), STEPS[spec["model"]])


def systems() -> List[str]:
    """MirroredStrategy joins on TensorFlow 2."""
    import tensorflow as tf

    return [name for name in SYSTEMS if name != "MirroredStrategy" or tf.__version__.startswith("2")]


def report(console: Console) -> None:
    for model in WORKLOADS:
        names = systems()
        found = dict(zip(names, rounds(__file__, [{"system": name, "model": model} for name in names], ROUNDS)))
        ours = found["whale_tf"]
        rows = [[name, "{:.2f}".format(1 / r["wall_s"]), "{:.0f}".format(1e3 * r["cpu_s"]),
                 "{:.2f}".format(r["wall_s"] / ours["wall_s"]), "{:.2f}".format(r["cpu_s"] / ours["cpu_s"]),
                 "{:.4f}".format(r["loss"])] for name, r in found.items()]
        console.print(table(f"{model}, batch {WORKLOADS[model]().batch} on each of {REPLICAS} devices (local: one)", [
                "system", "steps/s", "CPU ms per step", "whale_tf is faster by (wall)", "(CPU)", "loss"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
