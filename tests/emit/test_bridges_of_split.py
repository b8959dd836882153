"""What crosses at the borders of ``wh.replicate`` and ``wh.split`` on the same devices: no device gathers the whole batch.

Whale fuses the gather of a bridge with the partition that follows it (section 3.2.3). What the fusion saves is counted against
the same rewrite without it: a gather on the first device of the ``split`` TaskGraph, and a partition from there.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, NamedTuple, Set

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models import layers, moe, resnet
from tests.emit.crossing import between_task_graphs, crossing_bytes, reached, to_gradient_sums
from whale_tf.decide import split as division
from whale_tf.transforms.shard.values import Values

pytestmark = pytest.mark.half


class Built(NamedTuple):
    """``bytes``: between TaskGraphs in a step; ``gradients``: bytes to sums of replicas' gradients; ``bridged``: elements of
    tensors that are put together from parts."""

    bytes: int
    gradients: int
    bridged: Set[int]
    patterns: Set[str]


Build = Callable[[int], tf.Tensor]


def built(build: Build, count: int, force: Any = None) -> Built:
    wh.init({"variables": "mirrored", **({} if force is None else {"patterns.force": force})}, cluster=f"cpu:{count}")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            update = tf.train.GradientDescentOptimizer(0.1).minimize(build(count))
            plan = wh.parallelize()
            ops = reached(graph, update)
            bridged = {op.outputs[0].shape.num_elements() for op in ops if op.type == "ConcatV2"}
            return Built(crossing_bytes(ops, between_task_graphs), crossing_bytes(ops, to_gradient_sums), bridged,
                         set(plan.shards.values()))
    finally:
        wh.shutdown()


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Built]:
    """Like ``built``, without fusion."""
    def run(build: Build, count: int, force: Any = None) -> Built:
        whole = Values.whole
        with monkeypatch.context() as patch:
            patch.setattr(division, "_by_batch", lambda *args: set())
            patch.setattr(Values, "_maker", lambda self, tensor, task_graph: task_graph)
            patch.setattr(Values, "whole", lambda self, tensor, reader=None: whole(self, tensor))
            return built(build, count, force)

    return run


# -- experts -----------------------------------------------------------------------------------------------------------

MOE = moe.MoeConfig(hidden=6, ffn=10, experts=12, top_k=1, seq=8, capacity_factor=1.5)


def experts(batch: int, count: int) -> tf.Tensor:
    with wh.replicate(count):
        x = tf.placeholder("float32", [batch, MOE.seq, MOE.hidden])
        x = layers.layer_norm(x, "norm")
        gating = moe.gating_dispatch(x, MOE)
    with wh.split(count):
        y = moe.experts(gating.combine, gating.dispatched, MOE)
    with wh.replicate(count):
        return tf.reduce_mean(tf.square(x + y)) + gating.auxiliary


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_tokens_go_to_experts_and_back_by_all_to_all(count: int, unfused: Callable[..., Built]) -> None:
    """Dispatched tokens there and results back, forward and backward: four times (n-1)/n of them, and nothing else."""
    batch = 12
    dispatched = 4 * MOE.experts * batch * MOE.capacity * MOE.hidden
    build = functools.partial(experts, batch)
    after, before = built(build, count), unfused(build, count, "stack")
    assert after.patterns == {"stack", "batch"}
    assert after.bytes == 4 * dispatched * (count - 1) // count
    assert before.bytes >= 2 * after.bytes
    assert max(after.bridged) == dispatched // 4 // count  # no device puts more than its experts' tokens together
    assert max(before.bridged) >= dispatched // 4


# -- choice --------------------------------------------------------------------------------------------------------------


def layer_of(batch: int, width: int, classes: int, count: int) -> tf.Tensor:
    with wh.replicate(count):
        x = layers.dense(tf.placeholder("float32", [batch, 4]), width, "features", activation=tf.tanh)
        labels = tf.placeholder("int32", [batch])
    with wh.split(count):
        return layers.mean_cross_entropy(layers.dense(x, classes, "classes"), labels)


@pytest.mark.slow
@pytest.mark.parametrize("batch,width,classes,count", [
    (8, 16, 64, 2), (8, 64, 4, 2), (12, 9, 90, 3), (12, 90, 6, 3), (8, 24, 24, 4), (4, 120, 4, 4)])
def test_cheapest_pattern_is_taken(batch: int, width: int, classes: int, count: int) -> None:
    """Where each device has its own examples, too, of column and row the one with the fewest bytes in the rewritten graph."""
    build = functools.partial(layer_of, batch, width, classes)
    forced = {pattern: built(build, count, {"classes": pattern}).bytes for pattern in ("column", "row")}
    assert built(build, count).bytes == min(forced.values()), forced


# -- classifier --------------------------------------------------------------------------------------------------------

RESNET = resnet.ResnetConfig(blocks=(1,), width=32, image=8, small_image=True, classes=48)


def classifier(batch: int, count: int) -> tf.Tensor:
    """Whale's Example 2: features replicated, the classifier divided."""
    inputs = resnet.inputs(RESNET, batch)
    with wh.replicate(count):
        features = resnet.features(inputs.images, RESNET)
    with wh.split(count):
        return layers.mean_cross_entropy(resnet.classifier(features, RESNET), inputs.labels)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_features_divided_by_row_go_by_all_to_all(count: int, unfused: Callable[..., Built]) -> None:
    """Every device has all features of its examples, and needs its features of all examples; gradients go back likewise."""
    batch = 8
    features, logits = 4 * batch * RESNET.width, 4 * batch * RESNET.classes
    build = functools.partial(classifier, batch)
    after, before = built(build, count, {"head": "row"}), unfused(build, count, {"head": "row"})
    # terms of the logits are summed over the batch where the loss of each example is computed, and their gradient goes to all
    assert after.bytes == 2 * features * (count - 1) // count + 2 * logits * (count - 1)
    assert after.bytes < before.bytes


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_classes_divided_by_column_sum_gradients_over_examples(count: int, unfused: Callable[..., Built]) -> None:
    """Features go to all devices, and their gradients' terms come back to where each example is: no device has all of them."""
    batch = 8
    features = 4 * batch * RESNET.width
    build = functools.partial(classifier, batch)
    after, before = built(build, count, {"head": "column"}), unfused(build, count, {"head": "column"})
    exchanged = after.bytes - 2 * features * (count - 1)  # numbers per example, of the loss over divided classes
    assert 0 < exchanged <= 4 * batch * 8 * (count - 1)
    assert before.bytes - after.bytes >= features * (count - 1) // count


@pytest.mark.half
@pytest.mark.slow
def test_gradients_of_a_hundred_thousand_classes_are_not_synchronised() -> None:
    """ResNet-50 of Whale's section 5.1.2, two devices: 89.7% of data parallelism's gradient bytes are the classifier's."""
    config = dataclasses.replace(resnet.ResnetConfig.resnet50(), classes=100000)

    def build(is_hybrid: bool, count: int) -> tf.Tensor:
        inputs = resnet.inputs(config, 2 * count)
        with wh.replicate(count, name="features"):
            features = resnet.features(inputs.images, config)
        with wh.split(count) if is_hybrid else wh.replicate(count, name="features"):
            return layers.mean_cross_entropy(resnet.classifier(features, config), inputs.labels)

    hybrid, replicated = (built(functools.partial(build, is_hybrid), 2) for is_hybrid in (True, False))
    assert hybrid.patterns == {"column", "class_sharded"}
    assert 1 - hybrid.gradients / replicated.gradients == pytest.approx(0.897, abs=0.001)
    assert replicated.bytes == 0 and hybrid.bytes < 0.01 * hybrid.gradients
