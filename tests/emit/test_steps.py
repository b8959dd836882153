"""Which steps of Sessions run side by side over several processes, looked at in one process."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.cluster import Cluster, Processes
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.errors import UnsupportedOpError
from whale_tf.parallelize import parallelize

PIPELINES = {"num_micro_batch": 2, "io.nested_batch": "divide"}


def emitted(x: Any, processes: int, config: Any, stages: int = 2, noise: Optional[float] = None, rank: int = 0) -> Any:
    """What process ``rank`` has rewritten: replicated stages, or all in one if there are none.

    Args:
        x: makes the input.
        noise: a seed of noise that the update adds to a gradient; 0: none.
    """
    wh.init({}, cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            if not stages:
                wh.set_default_strategy(wh.replicate())
            h = x()
            for stage in range(stages):
                with wh.replicate(1):
                    h = tf.tanh(h * tf.get_variable(f"v{stage}", [4], tf.float64))
            if not stages:
                h = tf.tanh(h * tf.get_variable("v", [4], tf.float64))
            optimizer = tf.train.GradientDescentOptimizer(.1)
            gradients = optimizer.compute_gradients(tf.reduce_mean(tf.square(h)))
            if noise is not None:
                gradients = [(gradient + tf.random_normal([4], dtype=tf.float64, seed=noise or None), variable)
                             for gradient, variable in gradients]
            optimizer.apply_gradients(gradients)
            addresses = tuple(f"a:{number}" for number in range(processes))
            cluster = Cluster.parse(f"{processes}xcpu:1")
            done = parallelize(graph, cluster, Config(config), None, Processes(addresses, rank), Keys())
            assert done is not None and done.emitted is not None
            return done.emitted
    finally:
        wh.shutdown()


def fed() -> tf.Tensor:
    return tf.placeholder(tf.float64, [None, 4])


def of_one_size() -> tf.Tensor:
    return tf.placeholder(tf.float64, [8, 4])


def pulled() -> tf.Tensor:
    data = tf.data.Dataset.from_tensors(tf.zeros([4], tf.float64)).repeat().batch(8, drop_remainder=True)
    return tf.data.make_one_shot_iterator(data).get_next()


@pytest.mark.parametrize("x, config, steps", [
    (fed, PIPELINES, ((0, 1), (2, 3))),
    (of_one_size, PIPELINES, ((0, 1, 2, 3),)),
    (pulled, {"num_micro_batch": 2}, ((0, 1), (2, 3))),  # each model replica takes mini-batches of its own
    (pulled, PIPELINES, ((0, 1, 2, 3),))])
def test_steps_of_sessions(x: Any, config: Any, steps: Any) -> None:
    for rank in range(4):
        found = emitted(x, 4, config, rank=rank).context.processes
        assert found.steps == steps and rank in found.members and found.leads == (rank == found.members[0])


def beside_an_evaluation() -> tf.Tensor:
    """The graph has another iterator, which no step reads."""
    with tf.name_scope("evaluation"):
        pulled()
    return pulled()


@pytest.mark.parametrize("x", [pulled, beside_an_evaluation])
def test_step_pulls_the_mini_batches_of_all_steps(x: Any) -> None:
    for rank in range(8):
        found = emitted(x, 8, {}, rank=rank)
        graph = found.context.tf_graph
        pulls = [op for op in graph.get_operations() if op.type == "IteratorGetNext" and "evaluation" not in op.name]
        assert len(pulls) == 4 and all(len(op.control_inputs) == (op.name != pulls[0].name) for op in pulls)
        last = {op.name for op in pulls} - {before.name for op in pulls for before in op.control_inputs}
        follows = {before.name for op in graph.get_operations() if "GradientDescent" in op.type or "Apply" in op.type
                   for before in op.control_inputs}
        assert rank // 2 == 3 or last <= follows
        assert not any("evaluation" in name for name in (*follows, *found.inputs))


def test_graph_does_not_grow_with_the_number_of_steps() -> None:
    sizes = [len(emitted(fed, processes, PIPELINES, rank=3).context.tf_graph.get_operations()) for processes in (16, 64)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("seed, steps", [(None, 2), (3, 2), (0, 1)])
def test_update_that_draws_without_a_seed_is_computed_once(seed: Optional[int], steps: int) -> None:
    """Steps side by side would draw other numbers, and their variables would differ."""
    assert len(emitted(fed, 4, PIPELINES, noise=seed).context.processes.steps) == steps


def test_update_that_draws_without_a_seed_is_refused_in_data_parallel_processes() -> None:
    assert emitted(fed, 2, {}, 0, noise=3)
    with pytest.raises(UnsupportedOpError, match="'random_normal/RandomStandardNormal'.*same on all processes; give it a seed"):
        emitted(fed, 2, {}, 0, noise=0)


def test_groups_of_other_processes_have_other_numbers() -> None:
    keys = Keys()
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    found = [keys.group(groups, number, name) for groups in (rows, columns) for name in ("CPU:0", "CPU:1") for number in (0, 1)]
    assert len(set(found)) == len(found)
    assert keys.group(rows, 1, "CPU:0") == found[1]
