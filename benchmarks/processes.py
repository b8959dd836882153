"""(e) Two training processes, each on one core with one thread, beside MultiWorkerMirroredStrategy, Horovod and PyTorch.

    python -m benchmarks.processes [MODEL...]

Weak scaling: every process has the same batch, and all systems start from the same parameters.  Efficiency is the time of a step
of one such process alone, over that of the system.  ``apart`` are two processes that do not talk: what the machine itself takes.
Horovod (docs/processes.md) and PyTorch join where they are installed; PyTorch's efficiency is against one process of its own.
The pipelines divide one process' batch into M micro-batches over two stages, one in each process, whale_tf's with warm-up PB;
their efficiency is against the bubble's bound, ``(M + 1) / 2M`` of the time of one process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import sys
from typing import Any, Callable, Dict, List, Sequence

from rich.console import Console

from benchmarks.measure import Result, Spec, first_result, main, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload, head_loss, initial, loss, variables
from whale_tf.cluster.processes import free_ports, tf_configs

PROCESSES = 2
STEPS = {"mlp": 30, "encoder": 8}
ROUNDS = 3
MICRO_BATCHES = (2, 4, 8)


# -- the systems: each returns a function that takes one step and returns the loss -------------------------------------


def local(workload: Workload, rank: int) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    value = loss(workload, variables(workload), *_next_batch(workload, rank))
    return _run(value, tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value))


def whale(workload: Workload, rank: int, **config: Any) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init(dict({"io.slicing": False}, **config), cluster=f"{PROCESSES}xcpu:1")
    with wh.replicate():
        value = loss(workload, variables(workload), *_next_batch(workload, rank))
    return _run(value, tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value))


def pipeline(workload: Workload, rank: int, micro_batches: int) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init({"io.slicing": False, "num_micro_batch": micro_batches, "pipeline.warmup": "PB"},
            cluster=f"{PROCESSES}xcpu:1")
    x, labels = _next_batch(workload, 0)
    parameters = variables(workload)
    for first in (0, 2):
        with wh.replicate(1):
            for stage in workload.stages[first:first + 2]:
                x = stage(x, parameters)
            if first:
                value = head_loss(x, labels)
    return _run(value, tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(value))


def horovod(workload: Workload, rank: int) -> Callable[[], Any]:
    import horovod.tensorflow as hvd
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    hvd.init()
    value = loss(workload, variables(workload), *_next_batch(workload, hvd.rank()))
    update = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(LEARNING_RATE)).minimize(value)
    broadcast = hvd.broadcast_global_variables(0)
    return _run(value, update, broadcast)


def multi_worker_mirrored(workload: Workload, rank: int) -> Callable[[], Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring))
    with strategy.scope():
        parameters = {name: tf.Variable(initial(name, shape), name=name) for name, shape in workload.shapes.items()}
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE)
    trained = list(parameters.values())
    batch = tuple(map(tf.constant, workload.data(workload.batch, rank)))

    def replica_step() -> Any:
        with tf.GradientTape() as tape:
            value = loss(workload, parameters, *batch)
        gradients = [gradient / PROCESSES for gradient in tape.gradient(value, trained)]
        optimizer.apply_gradients(zip(gradients, trained))
        return value

    @tf.function
    def step() -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step), axis=None)

    return lambda: step().numpy()


PIPELINES = {f"{of}pipeline, {count} micro-batches": count for of in ("", "PyTorch, ") for count in MICRO_BATCHES}
ALONE = "one process", "PyTorch, one process"
TORCH = "PyTorch, one process", "PyTorch, DDP", *(name for name in PIPELINES if name.startswith("PyTorch"))
SYSTEMS: Dict[str, Callable[..., Callable[[], Any]]] = {
    "one process": local,
    "apart": local,
    "whale_tf": whale,
    "whale_tf, float16": lambda workload, rank: whale(workload, rank, **{"communication.fp16": True}),
    "MultiWorkerMirroredStrategy": multi_worker_mirrored,
    "Horovod": horovod,
    **{name: functools.partial(pipeline, micro_batches=count) for name, count in PIPELINES.items() if name not in TORCH},
}


def _next_batch(workload: Workload, rank: int) -> Any:
    import tensorflow.compat.v1 as tf

    batch = workload.data(workload.batch, rank)
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def _run(value: Any, update: Any, *first: Any) -> Callable[[], Any]:
    import tensorflow.compat.v1 as tf

    session = tf.Session(config=session_config(1, inter=1, intra=1))
    session.run([tf.global_variables_initializer(), tf.tables_initializer()])
    for op in first:
        session.run(op)
    return lambda: session.run([value, update])[0]


def worker(spec: Spec) -> Result:
    """One of the processes; each has a core of its own."""
    rank = int(os.environ.get("HOROVOD_RANK", spec["rank"]))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    return step_times(SYSTEMS[spec["system"]](WORKLOADS[spec["model"]](), rank), STEPS[spec["model"]])


# -- starting them -----------------------------------------------------------------------------------------------------


def measured(system: str, model: str) -> Result:
    """What the system's first process measured.

    Raises:
        RuntimeError: it failed.
    """
    count = 1 if system in ALONE else PROCESSES
    script = "torch_workloads.py" if system in TORCH else os.path.basename(__file__)  # in which TensorFlow comes after PyTorch
    command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), script), "--worker"]
    alone: List[Dict[str, str]] = [{"TF_CONFIG": ""}] * count
    ports = free_ports(count)
    variables_of = alone if system in ("one process", "apart", "Horovod", *TORCH) else tf_configs(ports)
    specs = [json.dumps({"system": system, "model": model, "rank": rank, "steps": STEPS[model], "port": ports[-1],
                         "micro_batches": PIPELINES.get(system, 0)}) for rank in range(count)]
    commands: List[Sequence[str]] = [command + [spec] for spec in specs]
    if system == "Horovod":
        options = ["-np", str(count), "-H", f"localhost:{count}", "--gloo"]
        commands = [[sys.executable, "-m", "horovod.runner.launch"] + options + list(commands[0])]
    if system in TORCH and system in PIPELINES:
        commands.reverse()  # the last stage has the loss
    return first_result(commands, variables_of)


def systems() -> List[str]:
    import tensorflow as tf

    missing = set() if tf.__version__.startswith("2") else {"MultiWorkerMirroredStrategy"}
    if importlib.util.find_spec("horovod") is None:
        missing.add("Horovod")
    torch = TORCH if importlib.util.find_spec("torch") else ()
    return [*(name for name in SYSTEMS if name not in missing), *torch]


def report(console: Console) -> None:
    for model in sys.argv[1:] or WORKLOADS:
        found: Dict[str, List[Result]] = {name: [] for name in systems()}
        for _ in range(ROUNDS):
            for name, results in found.items():
                results.append(measured(name, model))
        rows = []
        for name, results in found.items():
            alone = {key: statistics.median(result[key] for result in found[ALONE[name in TORCH]]) for key in ("wall_s", "cpu_s")}
            wall, cpu = (statistics.median(result[key] for result in results) for key in ("wall_s", "cpu_s"))
            count = PIPELINES.get(name)
            bound = (count + 1) / (2 * count) if count else 1.0
            rows.append([name, f"{1 / wall:.2f}", f"{1e3 * cpu:.0f}",
                         "{:.2f}".format(alone["wall_s"] * bound / wall),
                         "-" if count else "{:.2f}".format(alone["cpu_s"] / cpu),
                         "{:.4f}".format(results[0]["loss"])])
        console.print(table(f"{model}, batch {WORKLOADS[model]().batch} in each of {PROCESSES} processes (pipelines: of both)", [
                "system", "steps/s", "CPU ms per step", "efficiency", "of CPU time", "loss"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
