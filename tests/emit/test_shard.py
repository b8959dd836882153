"""What ``wh.split`` puts into the graph: where parts are, what crosses between devices, that the cheapest pattern is taken."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models.optimizers import Adafactor
from tests.emit.crossing import crossing_bytes, reached

pytestmark = pytest.mark.half


class Built(NamedTuple):
    """``crossing``: bytes that a training step sends between devices; ``stored``: bytes of variables by device."""

    shards: Dict[str, str]
    crossing: int
    stored: Dict[str, int]
    explained: str


def layer(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [int(x.shape[-1]), units], initializer=tf.zeros_initializer())
        return tf.nn.bias_add(tf.matmul(x, kernel), tf.get_variable("bias", [units], initializer=tf.zeros_initializer()))


def classifier(batch: int, width: int, classes: int, count: int, force: Any = None, replicated: bool = False) -> Built:
    """A softmax classifier under ``wh.split`` behind features on its first device."""
    config: Dict[str, Any] = {"cluster.colocate_split_and_replicate": True}
    if force is not None:
        config["patterns.force"] = force
    wh.init(config, cluster=f"cpu:{count}")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            x = tf.placeholder("float32", [batch, 4])
            label = tf.placeholder("int32", [batch])
            with wh.replicate(1):
                features = tf.tanh(layer(x, width, "features"))
            with wh.split(count):
                logits = layer(features, classes, "classes")
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
            update = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            plan = wh.parallelize()
            stored: Dict[str, int] = {}
            for op in reached(graph, update):
                if op.type == "VarHandleOp":
                    size = 4 * tf.TensorShape(op.get_attr("shape")).num_elements()
                    stored[op.device[-5:]] = stored.get(op.device[-5:], 0) + size
            return Built(dict(plan.shards), crossing_bytes(reached(graph, update)), stored, wh.explain())
    finally:
        wh.shutdown()


SHAPES = [(batch, width, classes, count) for batch, width, classes, count in (
    (8, 16, 64, 2), (8, 64, 16, 2), (32, 8, 400, 2), (32, 400, 12, 2), (4, 12, 24, 3), (4, 24, 12, 3), (16, 9, 90, 3),
    (16, 90, 9, 3), (8, 16, 40, 4), (8, 40, 8, 4), (64, 8, 8, 2), (2, 128, 128, 2), (2, 100, 300, 4), (2, 300, 100, 4),
    (48, 5, 5, 2), (1, 50, 60, 2), (1, 60, 50, 2), (24, 7, 1000, 2), (24, 1000, 7, 3), (12, 36, 48, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("batch,width,classes,count", [
    pytest.param(*shape, marks=[pytest.mark.full] if i % 3 else []) for i, shape in enumerate(SHAPES)])
def test_cheapest_pattern_is_taken(batch: int, width: int, classes: int, count: int) -> None:
    """Of SP1 (column) and SP2 (row) the one with the fewest bytes in the rewritten graph, whatever the formulas say."""
    forced = {pattern: classifier(batch, width, classes, count, {"classes": pattern}).crossing for pattern in ("column", "row")}
    chosen = classifier(batch, width, classes, count)
    assert chosen.crossing == min(forced.values()), (chosen.shards, chosen.crossing, forced)


@pytest.mark.slow
def test_hundred_thousand_classes_are_divided_by_column() -> None:
    """The paper's Fig. 15: SP1 beats SP2 on ResNet-50's head; it sends no logits."""
    built = classifier(32, 2048, 100000, 2)
    assert built.shards["classes/MatMul"] == "column" and "class_sharded" in built.shards.values()
    features = 32 * 2048 * 4
    assert 2 * features <= built.crossing < 2 * features + 32 * 4 * 8
    assert "class_sharded" in built.explained and "column" in built.explained


@pytest.mark.slow
def test_each_device_stores_its_part() -> None:
    """Ten classes over three devices: four, three and three, and a momentum slot beside each variable."""
    built = classifier(6, 5, 10, 3, {"classes": "column"})
    features = 2 * 4 * (4 * 5 + 5)
    assert built.stored == {"CPU:0": 2 * 4 * 4 * 6 + features, "CPU:1": 2 * 4 * 3 * 6, "CPU:2": 2 * 4 * 3 * 6}


def wide_and_narrow(resource: bool = True) -> tf.Operation:
    """Two layers that wh.split divides over two devices; returns their update."""
    with tf.variable_scope("", use_resource=resource):
        x = tf.placeholder("float32", [8, 6])
        with wh.split(2):
            y = layer(tf.nn.relu(layer(x, 24, "wide")), 6, "narrow")
        return tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.square(y)))


@pytest.mark.slow
def test_column_and_a_row_exchange_nothing_in_between() -> None:
    wh.init(cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph:
            update = wide_and_narrow()
            assert dict(wh.parallelize().shards) == {"wide/MatMul": "column", "narrow/MatMul": "row"}
            # forward the other device's term of y, backward its gradient; x comes from the input side
            assert crossing_bytes(reached(graph, update)) == 2 * 8 * 6 * 4
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("pattern,divided,whole", [("column", "columns", "rows"), ("row", "rows", "columns")])
def test_factored_moments_follow_the_dimension_they_are_of(pattern: str, divided: str, whole: str) -> None:
    """Of a square matrix: the moments of the divided dimension are divided with it; of the others, terms of a mean go to the
    first device, and the mean to the other.  Nothing else of the update but scalars changes devices."""
    wh.init({"patterns.force": pattern}, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            x = tf.placeholder("float32", [4, 16])
            with wh.split(2):
                y = tf.matmul(x, tf.get_variable("kernel", [16, 16]))
            update = Adafactor().minimize(tf.reduce_sum(tf.square(y)))
            wh.parallelize()
            ops = reached(graph, update)
            shapes = {op.name: tf.TensorShape(op.get_attr("shape")).as_list() for op in ops
                      if op.type == "VarHandleOp" and "Adafactor" in op.name}
            assert shapes == {"kernel/Adafactor/" + whole: [16], "shards/0/kernel/Adafactor/" + divided: [8],
                              "shards/1/kernel/Adafactor/" + divided: [8]}
            sent = {(tensor.name, place(op)): tensor.shape.num_elements() for op in ops if "Adafactor/update" in op.name
                    for tensor in op.inputs if tensor.dtype.is_floating and place(op) != place(tensor.op)}
            assert sorted(size for size in sent.values() if size > 1) == [16, 16], sent
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("pattern,divided,whole", [("embedding", "rows", "columns"), ("embedding_column", "columns", "rows")])
def test_factored_moments_of_an_embedding(pattern: str, divided: str, whole: str) -> None:
    """Whose gradient is sparse: values and the numbers of their rows."""
    wh.init({"patterns.force": pattern}, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            numbers = tf.placeholder("int32", [4])
            with wh.split(2):
                y = tf.nn.embedding_lookup(tf.get_variable("words", [16, 16]), numbers)
            update = Adafactor().minimize(tf.reduce_sum(tf.square(y)))
            wh.parallelize()
            slots = {op.name for op in reached(graph, update) if op.type == "VarHandleOp" and "Adafactor" in op.name}
            assert slots == {"words/Adafactor/" + whole, "shards/0/words/Adafactor/" + divided,
                             "shards/1/words/Adafactor/" + divided}
    finally:
        wh.shutdown()


@pytest.mark.parametrize("strategies,added", [(("replicate", "replicate"), []), (("replicate", "split"), ["shards"])], ids=str)
def test_ops_with_one_clone_are_not_cloned(strategies: Tuple[str, str], added: List[str]) -> None:
    """They run where they are, on the devices of the plan, and so do parts."""
    wh.init(cluster="cpu:3" if "split" in strategies else "cpu:2")
    try:
        with tf.Graph().as_default() as graph:
            x = tf.placeholder("float32", [8, 4])
            for number, strategy in enumerate(strategies):
                with wh.replicate(1) if strategy == "replicate" else wh.split(2):
                    x = tf.tanh(layer(x, 6, f"layer_{number}"))
            update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.square(x)))
            known = set(graph.get_operations())
            wh.parallelize()
            assert sorted({op.name.partition("/")[0] for op in graph.get_operations() if op not in known}) == added
            products = {place(op) for op in reached(graph, update) if op.type == "MatMul"}
            assert products == {"CPU:0", "CPU:1"} | ({"CPU:2"} if "split" in strategies else set())
    finally:
        wh.shutdown()


def place(op: tf.Operation) -> str:
    return op.device[-5:] or "CPU:0"


@pytest.mark.slow
@pytest.mark.parametrize("width,kind", [(9, "Split"), (10, "SplitV")])
def test_parts_along_a_dimension_come_from_one_op(width: int, kind: str) -> None:
    wh.init({"patterns.force": "row"}, cluster="cpu:3")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            x = tf.placeholder("float32", [4, width])
            with wh.split(3):
                y = layer(x, 5, "layer")
            update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.square(y)))
            wh.parallelize()
            ops = reached(graph, update)
            cut, = [op for op in ops if op.type in ("Slice", "Split", "SplitV")]
            assert cut.type == kind and x in cut.inputs
            readers = [{place(op) for op in tensor.consumers() if op in ops} for tensor in cut.outputs]
            assert readers == [{"CPU:0"}, {"CPU:1"}, {"CPU:2"}]
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False])
def test_gradients_wait_for_each_other_only_where_updates_are_in_place(resource: bool) -> None:
    """TensorFlow delays the gradient of each operand until those of all operands are there, which would be all devices'."""
    wh.init({"patterns.force": {"wide": "column", "narrow": "row"}}, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph:
            update = wide_and_narrow(resource)
            wh.parallelize()
            parts = [op for op in reached(graph, update) if op.name.startswith("shards/1/") and "control_dependency" in op.name]
            waiting = [op.name for op in parts if "MatMul_grad" in op.name]  # of an activation, and of two kernels
            assert len(waiting) == (0 if resource else 3), waiting
    finally:
        wh.shutdown()
