"""What a user can get wrong: one clear message each, with the value, what was expected, and the way out."""
from __future__ import annotations

import json
from typing import Any, Callable, Dict, Iterator, Tuple, Type

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.eager import context

import whale_tf as wh
from tests.numeric.script import dense


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    wh.shutdown()
    with tf.Graph().as_default():
        yield
    wh.shutdown()


def train(loss: tf.Tensor) -> None:
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    wh.parallelize()


def two_stages(first: int = 1, second: int = 1, batch: Any = 8, use: Callable = tf.identity) -> None:
    x = tf.placeholder(tf.float32, [batch, 4], name="features")
    with wh.replicate(first, name="bottom"):
        h = tf.tanh(dense(x, 4, "one"))
    with wh.replicate(second, name="top"):
        y = use(dense(h, 4, "two"))
    train(tf.reduce_mean(tf.square(y)))


# -- what is done wrong ------------------------------------------------------------------------------------------------


def unknown_key() -> None:
    wh.init({"num_micro_batches": 4})


def wrong_type() -> None:
    wh.init({"num_micro_batch": "four"})


def impossible_value() -> None:
    wh.init({"num_micro_batch": 0})


def unknown_schedule() -> None:
    wh.init({"pipeline.schedule": "1f1b"})


def counts_that_do_not_divide() -> None:
    wh.init(cluster="cpu:4")
    two_stages(1, 2)


def more_devices_than_there_are() -> None:
    wh.init(cluster="cpu:4")
    two_stages(8, 1)


def replicate_inside_replicate() -> None:
    wh.init(cluster="cpu:4")
    with wh.replicate(2), wh.replicate(2):
        pass


def replicate_without_init() -> None:
    with wh.replicate(2):
        pass


def only_backward_ops() -> None:
    wh.init(cluster="cpu:2")
    x = tf.placeholder(tf.float32, [8, 4])
    with wh.replicate(1, name="forward"):
        loss = tf.reduce_mean(tf.square(dense(x, 4, "one")))
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    with wh.replicate(1, name="gradients_only"):
        gradients = optimizer.compute_gradients(loss)
    optimizer.apply_gradients(gradients)
    wh.parallelize()


def not_convex() -> None:
    """The first TaskGraph's last layer reads what the second one made of its first."""
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    x = tf.placeholder(tf.float32, [8, 4])
    with wh.replicate(1, name="outer"):
        h = tf.tanh(dense(x, 4, "one"))
    with wh.replicate(1, name="inner"):
        h = tf.tanh(dense(h, 4, "two"))
    with wh.replicate(1, name="outer"):
        loss = tf.reduce_mean(tf.square(dense(h, 4, "three")))
    train(loss)


def batch_not_divisible() -> None:
    wh.init({"num_micro_batch": 4}, cluster="cpu:2")
    two_stages(batch=10)


def plan_of_another_graph() -> None:
    wh.init(cluster="cpu:2")
    two_stages()
    plan = wh.current_plan().to_json()
    wh.init(cluster="cpu:2", plan=plan)
    with tf.Graph().as_default():
        two_stages(use=tf.nn.relu)


def plan_that_is_not_json() -> None:
    wh.init(plan="{not json")


def plan_with_an_unknown_key() -> None:
    wh.init(cluster="cpu:2")
    two_stages()
    plan = json.loads(wh.current_plan().to_json())
    plan["micro_batches"] = 3
    wh.init(cluster="cpu:2", plan=json.dumps(plan))


def plan_for_a_larger_cluster() -> None:
    wh.init(cluster="cpu:4")
    two_stages(2, 2)
    plan = wh.current_plan().to_json()
    wh.init(cluster="cpu:2", plan=plan)
    with tf.Graph().as_default():
        two_stages(2, 2)


def negative_device_count() -> None:
    wh.init(cluster={"nodes": [{"devices": "V100-32GB:-8"}]})


def unknown_cluster() -> None:
    wh.init(cluster="tpu:8")


def unsupported_op() -> None:
    """Numbers that a loop draws once for all examples: every clone would draw its own."""
    wh.init(cluster="cpu:2")
    two_stages(2, 2, use=lambda y: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: [i + 1, h * tf.random_uniform([])], [tf.constant(0), y])[1])


def eager_execution() -> None:
    wh.init(cluster="cpu:2")
    with context.eager_mode(), wh.replicate(2):
        pass


def parallelize_without_an_update() -> None:
    wh.init(cluster="cpu:2")
    with wh.replicate(2):
        dense(tf.placeholder(tf.float32, [8, 4]), 4, "one")
    wh.parallelize()


def batch_size_that_the_graph_contradicts() -> None:
    """The input's batch size is not known, and 32 examples are assumed; the model is written for 64."""
    wh.init({"auto_parallel": True}, cluster="cpu:2")
    noise = tf.placeholder(tf.float32, [None, 4], name="noise")
    train(tf.reduce_mean(tf.square(tf.reshape(dense(noise, 4, "one"), [64, 4]))))


def data_without_the_models_batch_size() -> None:
    wh.init(cluster="cpu:2")
    x = tf.placeholder(tf.float32, [None, 4], name="features")
    h = tf.zeros([8, 4])
    for _ in range(2):
        h = tf.tanh(dense(x, 4, "one") + dense(h, 4, "two"))
    train(tf.reduce_mean(tf.square(h)))


def op_added_to_the_region_later() -> None:
    wh.init(cluster="cpu:2")
    x = tf.placeholder(tf.float32, [8, 4])
    with wh.replicate(2):
        h = dense(x, 4, "one")
        loss = tf.reduce_mean(tf.square(h))
    train(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with wh.replicate(2):
            later = tf.tanh(h, name="later")
        update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(later))
        session.run(update, {x: np.zeros([8, 4])})


def zero_without_replicas() -> None:
    wh.init({"zero": "v2", "num_micro_batch": 2}, cluster="cpu:2")
    two_stages()


def float16_without_a_scale() -> None:
    wh.init({"amp": "float16", "amp.loss_scale": 1}, cluster="cpu:2")
    two_stages()


def too_little_memory(devices: int, **config: str) -> None:
    kind = dict(kind="CPU", memory_bytes=200, fp32=1e10, memory_bandwidth_bytes_per_s=1e10)
    nodes = [{"devices": ["Small"] * devices, "links": "default"}]
    wh.init(config, cluster={"device_types": {"Small": kind}, "nodes": nodes})
    train(tf.reduce_mean(tf.square(tf.tanh(dense(tf.placeholder(tf.float32, [8, 4]), 4, "one")))))


def less_memory_than_the_most_recomputation_needs() -> None:
    too_little_memory(1, recompute="auto")


def less_memory_than_any_choice_needs() -> None:
    too_little_memory(2, recompute="auto", zero="auto")


def offload_without_a_host() -> None:
    """The Session was made before ``wh.init`` knew that a CPU device stands for the host."""
    with tf.Session(config=tf.ConfigProto()) as session:  # one CPU device, however many tf.config has been asked for
        wh.init({"offload": "states"}, cluster="cpu:1")
        x = tf.placeholder(tf.float32, [8, 4])
        update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(dense(x, 4, "one"))))
        session.run(update, {x: np.zeros([8, 4])})


def nccl_on_logical_devices_of_one_gpu() -> None:
    wh.init({"communication.backend": "collective"}, cluster="gpu:2")
    config = tf.ConfigProto()
    config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[512, 512])
    x = tf.placeholder(tf.float32, [8, 4])
    update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(dense(x, 4, "one"))))
    with tf.Session(config=config) as session:
        session.run(update, {x: np.zeros([8, 4])})


# error class, and words that the message must hold: the value, what was expected, the way out
EXPECTED: Dict[Callable[[], None], Tuple[Type[Exception], Tuple[str, ...]]] = {
    unknown_key: (wh.ConfigError, ("num_micro_batches", "num_micro_batch")),
    wrong_type: (wh.ConfigError, ("num_micro_batch", "four", "whole number")),
    impossible_value: (wh.ConfigError, ("num_micro_batch", "0", "at least 1")),
    unknown_schedule: (wh.ConfigError, ("pipeline.schedule", "1f1b", "backward_first", "gpipe")),
    counts_that_do_not_divide: (wh.WhaleError, ("3", "4", "devices")),
    more_devices_than_there_are: (wh.WhaleError, ("8", "4", "devices")),
    replicate_inside_replicate: (wh.AnnotationError, ("replicate", "inside")),
    replicate_without_init: (wh.WhaleError, ("wh.init",)),
    only_backward_ops: (wh.AnnotationError, ("gradients_only", "backward")),
    not_convex: (wh.WhaleError, ("outer", "two/MatMul", "three/MatMul")),
    batch_not_divisible: (wh.WhaleError, ("10", "4 micro-batches", "bottom", "slice")),
    plan_of_another_graph: (wh.PlanError, ("this graph is", "new plan")),
    plan_that_is_not_json: (wh.PlanError, ("JSON",)),
    plan_with_an_unknown_key: (wh.PlanError, ("micro_batches",)),
    plan_for_a_larger_cluster: (wh.PlanError, ("4", "2", "devices")),
    negative_device_count: (wh.ClusterError, ("-8", "devices")),
    unknown_cluster: (wh.ClusterError, ("tpu",)),
    unsupported_op: (wh.UnsupportedOpError, ("random", "the same on all devices")),
    parallelize_without_an_update: (wh.PlanError, ("minimize",)),
    op_added_to_the_region_later: (wh.WhaleError, ("later",)),
    data_without_the_models_batch_size: (
        wh.UnsupportedOpError, ("built for mini-batches of 8", "'features:0' open", "dataset.batch(8, drop_remainder=True)")),
    eager_execution: (wh.AnnotationError, ("graph", "eager")),
    zero_without_replicas: (wh.ConfigError, ("zero is 'v2'", "no TaskGraph of this plan has two", "wh.replicate(n) with n > 1")),
    float16_without_a_scale: (UserWarning, ("amp is 'float16' without a loss scale", "amp.loss_scale to 'dynamic'", "bfloat16")),
    less_memory_than_the_most_recomputation_needs: (
        wh.InfeasibleError, ("needs ", "bytes on a device even if it keeps as little as possible", "has 200", "micro-batches")),
    less_memory_than_any_choice_needs: (
        wh.InfeasibleError, ("the smallest of", "ZeRO", "bytes on its fullest device", "room for 200 bytes", "larger devices")),
    nccl_on_logical_devices_of_one_gpu: (wh.PlanError, ("'collective'", "NCCL", "logical", "'local'")),
    offload_without_a_host: (
        wh.PlanError, ("CPU:1 (the host, on which offload 'states' keeps", "this Session does not have", "after wh.init()")),
    batch_size_that_the_graph_contradicts: (wh.PlanError, ("noise:0", "32 do not fit", "64", "'Reshape'", "auto.batch_size")),
}


@pytest.mark.filterwarnings("error:amp is 'float16'")
@pytest.mark.parametrize("mistake", EXPECTED, ids=lambda mistake: mistake.__name__)
def test_message(mistake: Callable[[], None]) -> None:
    error, words = EXPECTED[mistake]
    with pytest.raises(error) as raised:
        mistake()
    message = str(raised.value)
    assert not [word for word in words if word not in message], message
    assert 30 < len(message) < 1000, message


def test_cluster_file_with_a_negative_count(tmp_path: Any) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": [{"devices": "V100-32GB:-8"}]}))
    with pytest.raises(wh.ClusterError, match="-8"):
        wh.init(cluster=str(path))


def test_refused_graph_still_trains_locally() -> None:
    """A refusal leaves the graph as it was."""
    with pytest.raises(wh.UnsupportedOpError):
        unsupported_op()
    wh.shutdown()
    update = [op for op in tf.get_default_graph().get_operations() if op.name == "GradientDescent"]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(update, {"features:0": np.ones([8, 4])})
