"""What several processes train with ``zero``, and the local script: Adam, and an optimizer of elementary ops whose changes are
scaled by the norm of all of them; gradients clipped by their global norm; runs outside of the step; checkpoints.

``python -m tests.multiprocess.train_zero DIRECTORY`` is a process: it restores ``DIRECTORY/local``, trains, saves
``DIRECTORY/divided``, trains on, and writes what it has found to ``DIRECTORY/found.<rank>``.  Three processes train under v3
only.
"""
from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.cluster import find_processes
from whale_tf.runtime import active

BATCH, WIDTH, LAYERS, STEPS = 8, 6, 5, 2
OPTIMIZERS = ("adam", "lamb")
SIZE = LAYERS * WIDTH * WIDTH * 8  # bytes of the trained variables
LEVELS = {("adam", True): "v3", ("adam", False): "v3", ("lamb", True): "v2", ("lamb", False): "v1"}
OF_THREE = ("adam", True), ("lamb", False)  # of these, what three processes train


class Model(NamedTuple):
    """Attributes:
    score: what no gradient follows from.
    penalty: follows from a variable alone.
    """

    x: tf.Tensor
    fetches: List[tf.Tensor]
    update: tf.Operation
    score: tf.Tensor
    penalty: tf.Tensor


class Found(NamedTuple):
    """Attributes:
    fetched: loss and norms of each step.
    variables: after the last step.
    kept: bytes of the optimizer's state in this process between two steps.
    values: bytes of the trained variables there.
    looked: what runs outside of the step have found.
    refused: what was said of a run that trains and reads state of the other process.
    devices: of trained variables and of the optimizer's.
    """

    fetched: List[List[float]]
    variables: Dict[str, np.ndarray]
    kept: int = 0
    refused: str = ""
    devices: str = ""
    values: int = 0
    looked: List[np.ndarray] = []


def build(optimizer: str, in_turn: bool) -> Model:
    """``in_turn``: each variable's update waits for the one before, where elementary ops make it."""
    random = np.random.RandomState(0)
    x = tf.placeholder(tf.float64, [None, WIDTH])
    h = x
    for layer in range(LAYERS):
        h = tf.tanh(tf.matmul(h, tf.get_variable(f"w{layer}", initializer=random.randn(WIDTH, WIDTH))))
    variables = tf.trainable_variables()
    penalty = 0.01 * tf.nn.l2_loss(variables[1])
    loss = tf.reduce_mean(tf.square(h - 0.5))
    if tf.get_variable_scope().use_resource:  # else it may be computed after the update
        loss += penalty
    score = tf.reduce_mean(tf.cast(h > 0.1, tf.float64))
    gradients, norm = tf.clip_by_global_norm(tf.gradients(loss, variables, gate_gradients=True), 0.1)
    if optimizer == "adam":
        step = tf.train.get_or_create_global_step()
        return Model(x, [loss, norm], tf.train.AdamOptimizer(0.01).apply_gradients(zip(gradients, variables), step),
                     score, penalty)
    changes, writes = [], []
    for v, g in zip(variables, gradients):
        with tf.variable_scope(v.op.name):
            m, n = (tf.get_variable(name, initializer=np.zeros(v.shape.as_list()), trainable=False) for name in "mn")
        new_m, new_n = 0.9 * m + 0.1 * g, 0.99 * n + 0.01 * g * g
        change = new_m / (tf.sqrt(new_n) + 1e-3) + 0.01 * v
        changes.append(tf.norm(v) / (tf.norm(change) + 1e-9) * change)
        with tf.control_dependencies([changes[-1]]):
            writes += [tf.assign(m, new_m), tf.assign(n, new_n)]
    scale = 0.05 / tf.global_norm(changes)  # of the optimizer's state for all variables
    behind = writes if in_turn else list(writes)
    for v, change in zip(variables, changes):
        with tf.control_dependencies(behind):
            writes.append(tf.assign_sub(v, scale * change))
    return Model(x, [loss, norm], tf.group(*writes), score, penalty)


def examples(part: Optional[int], processes: int = 2) -> np.ndarray:
    """``part``: of a process; None: of all."""
    every = np.random.RandomState(1).randn(processes, BATCH, WIDTH)
    return every.reshape(-1, WIDTH) if part is None else every[part]


def look(session: Any, model: Model, feed: np.ndarray, assign: Any, beside: bool) -> List[np.ndarray]:
    """Runs outside of the step, and one that trains and reads what follows from a variable (``beside``).  The last process writes
    before the others read, which must not notice."""
    first, second = tf.trainable_variables()[:2]
    state = active.current()
    runtime = None if state is None else state.runtime
    is_ahead = runtime is not None and runtime.processes.rank == runtime.processes.count - 1
    if runtime is not None and not is_ahead:
        runtime.exchange(b"")
    found = [session.run(model.score, {model.x: 2 * feed[:4]}), session.run(second)]
    found.append(session.run(model.fetches[0], {model.x: feed}))
    first.load(0.9 * found[1], session)
    session.run(assign)
    if runtime is not None and is_ahead:
        runtime.exchange(b"")
    if beside:
        found.append(session.run([model.penalty, model.update], {model.x: feed})[0])
    return found + session.run([first, second, model.penalty])


def train(optimizer: str, resource: bool, feed: np.ndarray, directory: Path, restore: str = "", save: str = "",
          steps: int = STEPS, rank: Optional[int] = None, container: str = "", looks: bool = True) -> Found:
    """``steps`` steps, runs outside of the step if ``looks``, a checkpoint, ``steps`` steps."""
    name = container or f"{optimizer}{resource}"
    with tf.Graph().as_default() as graph, graph.container(name), tf.variable_scope("", use_resource=resource):
        if rank is not None:
            wh.set_default_strategy(wh.replicate())
        model, saver = build(optimizer, resource), tf.train.Saver()
        trained = tf.trainable_variables()
        assign = tf.assign(trained[2], 0.5 * trained[2]).op
        kept, values, refused, looked = 0, 0, "", []  # type: int, int, str, List[np.ndarray]
        state = [v for v in tf.global_variables() if "/" in v.op.name]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, str(directory / restore))
            fetched = [session.run([*model.fetches, model.update], {model.x: feed})[:-1] for _ in range(steps)]
            if looks:
                looked = look(session, model, examples(0), assign, resource)
            if save:
                saver.save(session, str(directory / save))
            fetched += [session.run([*model.fetches, model.update], {model.x: feed})[:-1] for _ in range(steps)]
            if rank is not None:
                sizes = {v: bytes_here(v) for v in state}
                kept, away = sum(sizes.values()), [v for v in state if not sizes[v]]
                values = sum(bytes_here(v) for v in trained)
                try:
                    session.run([model.update, away[0]], {model.x: feed}) if away else None
                except wh.UnsupportedOpError as error:
                    refused = str(error)
            found = session.run({v.op.name: v for v in tf.global_variables()})
        devices = {v.op.device.rpartition("/device:")[2] for v in trained + state}
        return Found([list(map(float, row)) for row in fetched], found, kept, refused, " ".join(sorted(devices)), values, looked)


def offload(directory: Path, rank: Optional[int], level: str = "states", steps: int = STEPS, **how: str) -> Found:
    """Adam with each process' variables on its own host."""
    if rank is not None:
        wh.init({"offload": level, "num_micro_batch": 2}, cluster="2xcpu:2")
    found = train("adam", level == "states", examples(rank), directory, steps=steps, rank=rank, container=level, **how)
    if rank is not None:
        wh.shutdown()
    return found


def train_scaled(resource: bool, feeds: List[np.ndarray], config: Optional[Dict[str, Any]] = None) -> Found:
    """Products that stay float32 under a loss scale, beside a variable that forward ops read and that follows from another one;
    gradients overflow where a feed is huge."""
    if config is not None:
        wh.init(config, cluster="2xcpu:2")
    with tf.Graph().as_default() as graph, graph.container(f"scaled{resource}"), tf.variable_scope("", use_resource=resource):
        if config is not None:
            wh.set_default_strategy(wh.replicate())
        random, x = np.random.RandomState(0), tf.placeholder(tf.float32, [None, WIDTH])
        weights = [tf.get_variable(f"w{i}", initializer=random.randn(WIDTH, WIDTH).astype("float32") / 3) for i in range(LAYERS)]
        mean = tf.get_variable("mean", [WIDTH, WIDTH], tf.float32, tf.ones_initializer(), trainable=False)
        h = x
        for w in [mean, *weights]:
            h = tf.reduce_sum(tf.expand_dims(h, 2) * w, 1)
        loss = tf.reduce_mean(tf.square(h))
        with tf.control_dependencies([tf.train.AdamOptimizer(0.01).minimize(loss, tf.train.get_or_create_global_step())]):
            update = tf.assign(mean, 0.5 * mean + 0.1 * weights[0].read_value())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            fetched = [[float(session.run([loss, update.op], {x: feed})[0])] for feed in feeds]
            found = session.run({v.op.name: v for v in tf.global_variables()})
    if config is not None:
        wh.shutdown()
    return Found(fetched, found)


def scaled_feeds(part: Optional[int]) -> List[np.ndarray]:
    """Of process 1 one mini-batch is huge; the local script (None) does without that step."""
    feeds = [np.random.RandomState(step).randn(2, BATCH, WIDTH).astype("float32") for step in range(4)]
    if part is None:
        return [feed.reshape(2 * BATCH, WIDTH) for feed in feeds[:1] + feeds[2:]]
    feeds[1][1] = 1e30
    return [feed[part] for feed in feeds]


def counted_steps(directory: Path) -> List[int]:
    """Training steps since a save as SIGTERM counts them, where this process and where the other one runs the update."""
    with tf.Graph().as_default():
        wh.set_default_strategy(wh.replicate())
        x = tf.placeholder(tf.float32, [None, WIDTH])
        large, small = (tf.get_variable(name, [WIDTH, width], use_resource=True) for name, width in (("large", 3), ("small", 2)))
        losses = [tf.reduce_mean(tf.square(tf.matmul(x, v))) for v in (large, small)]
        updates = [tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[v]) for loss, v in zip(losses, (large, small))]
        saver, found = tf.train.Saver(), []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for update, count in zip(updates, (3, 2)):
                saver.save(session, str(directory / "counted"))
                for _ in range(count):
                    session.run(update, {x: np.ones([2, WIDTH])})
                saves = active.current().termination._saved.values()  # process 0 alone saves
                found += [saved.steps_since() for saved in saves]
        return found


def bytes_here(variable: Any) -> int:
    """What a variable takes in this process: read by a graph of which whale_tf knows nothing."""
    op = variable.op
    common = dict(shape=tf.TensorShape(None), dtype=op.get_attr("dtype"), container=op.get_attr("container").decode(),
                  shared_name=op.get_attr("shared_name").decode() or op.name)
    with tf.Graph().as_default(), tf.device(op.device):
        if op.type == "VarHandleOp":
            value = tf.raw_ops.ReadVariableOp(resource=tf.raw_ops.VarHandleOp(**common), dtype=common["dtype"])
        else:
            value = tf.raw_ops.VariableV2(**common)
        with tf.Session() as session:
            return session.run(value).nbytes


def divided(optimizer: str, resource: bool, level: str, directory: Path, rank: int, processes: int, micro_batches: int) -> Found:
    name = f"{optimizer}{resource}"
    wh.init({"zero": level, "num_micro_batch": micro_batches}, cluster=f"{processes}xcpu:2")
    try:
        return train(optimizer, resource, examples(rank, processes), directory, f"{name}_local", f"{name}_divided", rank=rank)
    finally:
        wh.shutdown()


def main_of_two(directory: Path, rank: int) -> Dict[Any, Any]:
    found: Dict[Any, Any] = {}
    for level in ("states", "v0"):  # first: with a host the server has one more device
        found[level] = offload(directory, rank, level, restore=f"adam{level == 'states'}_local", save=f"{level}_saved")
    for (optimizer, resource), level in LEVELS.items():
        found[optimizer, resource] = divided(optimizer, resource, level, directory, rank, 2, 2)
    for resource in (True, False):
        config = {"zero": "v3" if resource else "v1", "num_micro_batch": 2, "amp": "float16"}
        found["scaled", resource] = train_scaled(resource, scaled_feeds(rank), config)
    wh.init({"zero": "v1"}, cluster="2xcpu:1")
    found["steps"] = counted_steps(directory)
    wh.shutdown()
    wh.init({"zero": "v3"}, cluster="2xcpu:1")
    found["steps of v3"] = counted_steps(directory)
    wh.shutdown()
    return found


def main_of_three(directory: Path, rank: int) -> Dict[Any, Any]:
    return {(optimizer, resource): divided(optimizer, resource, "v3", directory, rank, 3, 1 + (optimizer == "lamb"))
            for optimizer, resource in OF_THREE}


def main(directory: Path) -> None:
    processes = find_processes()
    found = (main_of_two if processes.count == 2 else main_of_three)(directory, processes.rank)
    (directory / f"found.{processes.rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    from tests.multiprocess import train_zero as module  # what is pickled is of this module

    module.main(Path(sys.argv[1]))
