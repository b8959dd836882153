"""The schedule is real: the order of work and the memory of a traced step."""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterator, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models import bert
from tests.numeric import trace
from tests.numeric.script import dense
from whale_tf.schedule import WEIGHT, orders, warmup_depths

pytestmark = pytest.mark.graph_optimizer
STAGES = 4


@pytest.fixture(autouse=True)
def fresh_graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield
    wh.shutdown()


def run_traced(loss: tf.Tensor, feed: Dict) -> tf.RunMetadata:
    """The third step of training under ``loss``."""
    update = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
    with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=STAGES)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run([loss, update], feed)
        return trace.traced(session, [loss, update], feed)


def deep_perceptron(micro_batches: int, **config: Any) -> tf.RunMetadata:
    """Four stages of two layers each, and micro-batches of 128 examples, whose activations outweigh gradients of weights."""
    wh.init(dict(config, num_micro_batch=micro_batches), cluster=f"cpu:{STAGES}")
    x = tf.placeholder(tf.float32, [128 * micro_batches, 64])
    h = x
    for stage in range(STAGES):
        with wh.replicate(1):
            for layer in range(2):
                h = tf.tanh(dense(h, 64, f"layer_{stage}_{layer}"))
    feed = {x: np.random.RandomState(0).randn(128 * micro_batches, 64)}
    return run_traced(tf.reduce_mean(tf.square(h)), feed)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 8])
@pytest.mark.parametrize("policy", ["PA", "PB"])
def test_one_forward_one_backward(policy: str, micro_batches: int) -> None:
    metadata = deep_perceptron(micro_batches, **{"pipeline.schedule": "backward_first", "pipeline.warmup": policy})
    order, steps = trace.executed_order(metadata), trace.intervals(metadata)
    for stage in range(STAGES):
        ahead = STAGES - stage if policy == "PA" else 2 * (STAGES - stage) - 1
        assert order[stage] == trace.one_f_one_b(ahead, micro_batches), f"stage {stage}"
        assert trace.most_alive(steps[stage]) <= min(ahead, micro_batches)
        assert not trace.overlapping(steps[stage])


@pytest.mark.slow
@pytest.mark.parametrize("schedule, policy", [("zero_bubble_h1", "PA"), ("zero_bubble_h2", "PB")])
def test_gradients_of_weights_fill_what_a_stage_would_wait(schedule: str, policy: str) -> None:
    metadata = deep_perceptron(8, **{"pipeline.schedule": schedule})
    executed = trace.executed_order(metadata, range(1, STAGES))
    for stage, order in enumerate(orders(schedule, 8, warmup_depths(policy, STAGES, None, 8))):
        assert executed[stage] == [str(step) for step in order if stage or step.kind != WEIGHT], f"stage {stage}"
        assert not trace.overlapping(trace.intervals(metadata, range(1, STAGES))[stage])


@pytest.mark.slow
def test_gpipe_runs_all_forward_steps_first() -> None:
    metadata = deep_perceptron(8, **{"pipeline.schedule": "gpipe"})
    for stage, order in trace.executed_order(metadata).items():
        assert order[:8] == trace.all_forward_first(8), f"stage {stage}"
        assert sorted(order[8:]) == [f"B{m}" for m in range(8)]
        assert trace.most_alive(trace.intervals(metadata)[stage]) == 8


def encoder(micro_batches: int, **config: Any) -> tf.RunMetadata:
    """Four stages of one layer each, and micro-batches of 4 sequences."""
    wh.init(dict(config, num_micro_batch=micro_batches), cluster=f"cpu:{STAGES}")
    shape = bert.BertConfig(hidden=32, heads=2, ffn=64, seq=64)
    x = tf.placeholder(tf.float32, [4 * micro_batches, shape.seq, shape.hidden])
    h = x
    for stage in range(STAGES):
        with wh.replicate(1):
            h = bert.encoder_layer(h, shape, name=f"layer_{stage}")
    feed = {x: np.random.RandomState(0).randn(*x.shape.as_list())}
    return run_traced(tf.reduce_mean(tf.square(h)), feed)


@functools.lru_cache(maxsize=None)
def peak_bytes(model: Callable[..., tf.RunMetadata], schedule: str, micro_batches: int, emit: str) -> int:
    """The first stage's."""
    with tf.Graph().as_default():
        config = {"pipeline.schedule": schedule, "pipeline.warmup": "PA", "emit": emit}
        return trace.peak_bytes(model(micro_batches, **config))[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", [deep_perceptron, pytest.param(encoder, marks=pytest.mark.full)])
def test_backward_first_needs_half_the_memory_of_gpipe(model: Callable[..., tf.RunMetadata]) -> None:
    peaks = {name: peak_bytes(model, name, 12, "inline") for name in ("backward_first", "gpipe")}
    assert peaks["backward_first"] <= 0.5 * peaks["gpipe"], peaks


@pytest.mark.slow
@pytest.mark.parametrize("model, counts", [
    (deep_perceptron, (8, 12)), pytest.param(encoder, (8, 16, 32), marks=pytest.mark.full)])
@pytest.mark.parametrize("emit, most", [("inline", 1.1), ("call", 1.25)])
def test_memory_does_not_grow_with_micro_batches(emit: str, most: float, model: Callable[..., tf.RunMetadata],
                                                 counts: Tuple[int, ...]) -> None:
    """When the donated tensors of a called step end depends on the order in which ready ops run."""
    peaks = {count: peak_bytes(model, "backward_first", count, emit) for count in counts}
    assert max(peaks.values()) <= most * min(peaks.values()), peaks


class TestTheHelpers:
    def metadata(self, *nodes: Tuple[str, int, int]) -> tf.RunMetadata:
        """Nodes ``(name, begin, end)`` on device 1, each of which holds 8 bytes while it runs."""
        metadata = tf.RunMetadata()
        device = metadata.step_stats.dev_stats.add(device="/job:localhost/replica:0/task:0/device:CPU:1")
        for name, begin, end in nodes:
            node = device.node_stats.add(node_name=name, all_start_micros=begin, op_end_rel_micros=end - begin)
            memory = node.memory.add()
            memory.allocation_records.add(alloc_micros=begin, alloc_bytes=8)
            memory.allocation_records.add(alloc_micros=end, alloc_bytes=-8)
        return metadata

    def test_order_and_memory(self) -> None:
        metadata = self.metadata(
            ("whale/g0_m0_r0/MatMul", 1, 4), ("whale/g0_m0_r0/more/MatMul", 2, 5), ("MatMul", 0, 9),
            ("whale/g0_m1_r0/MatMul", 6, 7), ("whale/g0_m0_r0/gradients/MatMul_grad/MatMul", 8, 10),
            ("whale/g0_m1_r0/gradients/MatMul_grad/MatMul", 9, 12), ("whale/g0_m0_r0/Shape", 20, 30))
        steps = trace.intervals(metadata)[1]
        assert steps == {"F0": (1, 5), "F1": (6, 7), "B0": (8, 10), "B1": (9, 12)}
        assert trace.executed_order(metadata) == {1: ["F0", "F1", "B0", "B1"]}
        assert trace.most_alive(steps) == 2
        assert trace.overlapping(steps) == [("B0", "B1")]
        assert trace.peak_bytes(metadata) == {1: 3 * 8}

    def test_orders(self) -> None:
        assert trace.one_f_one_b(2, 3) == ["F0", "F1", "B0", "F2", "B1", "B2"]
        assert trace.one_f_one_b(4, 2) == ["F0", "F1", "B0", "B1"]
