"""The search for the patterns of a ``split`` TaskGraph follows no state that another makes needless, and loses nothing by it."""
from __future__ import annotations

import itertools
from typing import Any, List

import pytest

import whale_tf as wh
from models import bert
from whale_tf._tf_compat import tf, v1
from whale_tf.decide import split
from whale_tf.patterns.moves import gradient_bytes, moved_bytes
from whale_tf.patterns.spread import everywhere, once, partial, shard
from whale_tf.planner.sharding import assignment, search

SHARDS = [shard(0, (2, 2)), shard(1, (2, 2)), shard(1, (3, 1))]


@pytest.mark.parametrize("price", [moved_bytes, gradient_bytes])
def test_whole_tensors_and_shards_are_brought_elsewhere_for_the_same_bytes(price: Any) -> None:
    """What :meth:`State.price_of_becoming` rests on; nothing is dearer for the state that is kept."""
    for have, other in itertools.permutations([once] + SHARDS, 2):
        for need in [once, everywhere, partial] + SHARDS:
            if need != have and need != other:
                assert price(have, need, 96.0, 2) == price(other, need, 96.0, 2), (have, other, need)


@pytest.mark.parametrize("layers,devices", [(1, 2), (1, 4), (2, 4)])
def test_cheapest_costs_what_it_costs_when_every_state_is_followed(monkeypatch: Any, layers: int, devices: int) -> None:
    costs: List[float] = []
    original = search.cheapest

    def both(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(search, "WIDTH", 1 << 20)
            patch.setattr(search, "_undominated", list)
            costs.append(sum(original(*arguments)[2].values()))
        found = original(*arguments)
        costs.append(sum(found[2].values()))
        return found

    monkeypatch.setattr(assignment, "cheapest", both)
    with tf.Graph().as_default():
        wh.init(cluster=f"cpu:{devices}")
        config = bert.BertConfig(layers=layers, hidden=8, heads=4, ffn=16, seq=4)
        inputs = bert.inputs(config, 2)
        with wh.split(devices):
            x, table = bert.embed(inputs.tokens, config, inputs.segments)
            for number in range(layers):
                x = bert.encoder_layer(x, config, name=f"layer_{number}")
            loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, table, config), inputs)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        wh.parallelize()
    wh.shutdown()
    assert len(costs) == 2 and costs[0] == pytest.approx(costs[1], rel=1e-12) and costs[0] > 0


def test_weights_are_divided_even_if_sending_them_costs_less() -> None:
    """The rows of 64 tokens could be divided instead: on two devices that sends a kernel of 8 x 8, and no activations."""
    wh.init(cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            x, kernel = v1.placeholder("float32", [None, 64, 8]), v1.get_variable("kernel", [8, 8])
            with wh.split(2):
                y = tf.raw_ops.BatchMatMulV2(x=x, y=kernel, name="product")
            v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(y)))
            wh.parallelize()
            plan = wh.current_plan()
            assert plan is not None and plan.shards["product"] in ("column", "row")
    finally:
        wh.shutdown()


def test_backward_products_count_what_adding_up_terms_exchanges(monkeypatch: Any) -> None:
    """Sending half of the gradient to each device is less than sending it whole, but leaves terms of a larger sum."""
    found: List[assignment.Assignment] = []
    original = split.assign

    def noted(*arguments: Any) -> assignment.Assignment:
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(split, "assign", noted)
    wh.init(cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder("float32", [4096, 256])
            with wh.split(2):
                inner = tf.nn.relu(tf.matmul(x, v1.get_variable("first", [256, 1024])))
                y = tf.matmul(inner, v1.get_variable("second", [1024, 256]), name="product")
            v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(y)))
            backward = [index for index, op in enumerate(graph.get_operations()) if op.name == "gradients/product_grad/MatMul"]
            wh.parallelize()
            assert [found[-1].strategies[index].gives for index in backward] == [(shard(1, (512, 512)),)]
    finally:
        wh.shutdown()
