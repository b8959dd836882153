"""Sums of looked-up rows and sparse products are divided by the rows (examples) to which their elements belong."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

WORDS, COLUMNS = 11, 5
SIZES = (8, 9, 7)  # examples of each step
NONE = contextlib.nullcontext if hasattr(contextlib, "nullcontext") else contextlib.ExitStack


class Inputs(NamedTuple):
    words: Any  # sparse ids of words
    weights: Any  # sparse, at the same places
    x: Any


def variable(name: str, *shape: int) -> tf.Variable:
    values = np.sin(np.arange(np.prod(shape)) + len(name)).reshape(shape)
    return tf.get_variable(name, initializer=values, use_resource=True)


def looked_up(combiner: str, is_weighted: bool) -> Any:
    def model(inputs: Inputs) -> tf.Tensor:
        return tf.nn.embedding_lookup_sparse(
            variable("table", WORDS, 4), inputs.words, inputs.weights if is_weighted else None, combiner=combiner)
    return model


def safe(inputs: Inputs) -> tf.Tensor:
    return tf.reshape(tf.nn.safe_embedding_lookup_sparse(variable("table", WORDS, 4), inputs.words), [-1, 4])


def product(inputs: Inputs) -> tf.Tensor:
    return tf.sparse.sparse_dense_matmul(inputs.weights, variable("wide", COLUMNS, 4))


def of_examples(inputs: Inputs) -> tf.Tensor:
    """The sparse matrix is made of examples."""
    return tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(tf.nn.relu(inputs.x)), variable("wide", 4, 4))


def wide_and_deep(inputs: Inputs) -> tf.Tensor:
    return tf.concat([product(inputs)[:, :2], looked_up("mean", False)(inputs)[:, 2:]], 1)


MODELS = {"sum": looked_up("sum", False), "mean": looked_up("mean", False), "sqrtn": looked_up("sqrtn", False),
          "weighted sum": looked_up("sum", True), "weighted mean": looked_up("mean", True),
          "weighted sqrtn": looked_up("sqrtn", True), "safe": safe, "product": product, "of examples": of_examples,
          "wide and deep": wide_and_deep}

# what the clones compute, in place of all examples' on one device
DIVIDED = {"sum": {"SparseSegmentSumWithNumSegments"}, "mean": {"SparseSegmentMeanWithNumSegments", "SparseSegmentMeanGrad"},
           "sqrtn": {"SparseSegmentSqrtNWithNumSegments", "SparseSegmentSqrtNGrad"}, "weighted sum": {"UnsortedSegmentSum"},
           "weighted mean": {"UnsortedSegmentSum"}, "weighted sqrtn": {"UnsortedSegmentSum"},
           "safe": {"SparseSegmentMeanWithNumSegments", "SparseSegmentMeanGrad"}, "product": {"SparseTensorDenseMatMul"},
           "of examples": {"SparseTensorDenseMatMul"},
           "wide and deep": {"SparseTensorDenseMatMul", "SparseSegmentMeanWithNumSegments"}}


def places(rng: np.random.RandomState, size: int, has_empty: bool) -> np.ndarray:
    """Where elements are, row by row.  The first rows are empty, so that some clone has no element at all."""
    counts = rng.randint(0 if has_empty else 1, COLUMNS, size)
    counts[:3 if has_empty else 0] = 0
    counts[-1] = max(counts[-1], 1)
    return np.array([(row, column) for row, count in enumerate(counts) for column in range(count)], np.int64)


def feeds(name: str, sizes: Sequence[int], inputs: Inputs, y: tf.Tensor, is_sorted: bool) -> List[Dict[Any, Any]]:
    rng, found = np.random.RandomState(0), []
    for size in sizes:
        where = places(rng, size, not name.startswith("weighted") or name == "weighted sum")  # TensorFlow 1.15 divides by zero
        if not is_sorted:
            where = rng.permutation(where)
        count, shape = len(where), [size, COLUMNS]
        found.append({inputs.words: (where, rng.randint(0, WORDS, count), shape), y: rng.randn(size, 1),
                      inputs.weights: (where, rng.rand(count) + 0.5, shape), inputs.x: rng.randn(size, 4)})
    return found


def trained(name: str, config: Optional[Dict[str, Any]] = None, cluster: str = "", stages: int = 1,
            sizes: Sequence[int] = SIZES, is_sorted: bool = True,
            optimizer: Any = tf.train.GradientDescentOptimizer) -> Tuple[List[np.ndarray], Dict[str, int]]:
    """Losses and variables; and how many ops of each type the clones have."""
    if config is not None:
        wh.init(config, cluster=cluster)
    scopes = [NONE, NONE]
    if config is not None:
        scopes = [lambda: wh.replicate(int(cluster[-1])), NONE] if stages == 1 else [lambda: wh.replicate(1)] * 2
    with tf.Graph().as_default() as graph:
        inputs = Inputs(tf.sparse_placeholder(tf.int64, [None, COLUMNS]), tf.sparse_placeholder(tf.float64, [None, COLUMNS]),
                        tf.placeholder(tf.float64, [None, 4]))
        y = tf.placeholder(tf.float64, [None, 1])
        with scopes[0]():
            h = tf.tanh(tf.matmul(MODELS[name](inputs) + inputs.x, variable("hidden", 4, 3)))
        with scopes[1]():
            loss = tf.reduce_mean(tf.square(tf.matmul(h, variable("last", 3, 1)) - y))
        train = optimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [session.run([loss, train], feed)[0] for feed in feeds(name, sizes, inputs, y, is_sorted)]
            variables = session.run(tf.trainable_variables())
        ops = [op.type for op in graph.get_operations() if "_r" in op.name and op.name.startswith("whale")]
    return [np.array(losses), *variables], {kind: ops.count(kind) for kind in ops}


@pytest.fixture(autouse=True)
def ended() -> Any:
    yield
    wh.shutdown()


def check(name: str, **given: Any) -> Dict[str, int]:
    plan = {key: given.pop(key) for key in ("config", "cluster", "stages") if key in given}
    local, _ = trained(name, **given)
    found, ops = trained(name, **plan, **given)
    for one, other in zip(local, found):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
    return ops


@pytest.mark.parametrize("name", MODELS)
def test_divided_by_rows(name: str) -> None:
    ops = check(name, config={}, cluster="cpu:2")
    assert not {kind for kind in DIVIDED[name] if ops.get(kind, 0) < 2}, ops


@pytest.mark.parametrize("name, config, cluster, stages", [
    ("weighted mean", {"num_micro_batch": 2}, "cpu:2", 1), ("mean", {}, "cpu:4", 1),
    ("sqrtn", {"num_micro_batch": 2}, "cpu:2", 2),
    ("wide and deep", {"emit": "call"}, "cpu:2", 1), ("weighted sum", {"emit": "call", "num_micro_batch": 2}, "cpu:2", 1)])
def test_under_other_plans(name: str, config: Dict[str, Any], cluster: str, stages: int) -> None:
    check(name, config=config, cluster=cluster, stages=stages)


def test_optimizer_of_rows() -> None:
    """Each row of the table has one gradient, as locally: an optimizer with moments changes it once."""
    check("mean", config={"num_micro_batch": 2}, cluster="cpu:2", optimizer=tf.train.AdamOptimizer)


def test_elements_in_any_order() -> None:
    ops = check("product", config={}, cluster="cpu:2", is_sorted=False)
    assert ops["SparseTensorDenseMatMul"] >= 4


def between_stages(replicas: Sequence[int]) -> List[np.ndarray]:
    """Looked-up rows, one for each element, which the next stage weighs and adds up.  Losses and variables."""
    if replicas:
        wh.init({"num_micro_batch": 2}, cluster=f"cpu:{sum(replicas)}")
    stages = [functools.partial(wh.replicate, count) for count in replicas] or [NONE, NONE]
    with tf.Graph().as_default():
        words, weights = tf.sparse_placeholder(tf.int64), tf.placeholder(tf.float64, [None])
        x = tf.placeholder(tf.float64, [None, 4])
        with stages[0]():
            rows, (ids, places_of) = tf.cast(words.indices[:, 0], tf.int32), tf.unique(words.values)
            found = tf.gather(tf.nn.embedding_lookup(variable("table", WORDS, 4), ids), places_of)
        with stages[1]():
            h = tf.tanh(tf.math.segment_sum(found * weights[:, tf.newaxis], rows) + x)
            loss = tf.reduce_mean(tf.square(tf.matmul(h, variable("last", 4, 1))))
        train = tf.train.AdamOptimizer(0.1).minimize(loss)
        rng, losses = np.random.RandomState(0), []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for size in SIZES:
                where = places(rng, size, False)
                losses.append(session.run([loss, train], {
                    words: (where, rng.randint(0, WORDS, len(where)), [size, COLUMNS]), weights: rng.rand(len(where)),
                    x: rng.randn(size, 4)})[0])
            return [np.array(losses), *session.run(tf.trainable_variables())]


def test_elements_between_stages() -> None:
    for one, other in zip(between_stages(()), between_stages((1, 1))):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("replicas", [(1, 2), (2, 1)])
def test_elements_between_stages_with_other_replicas_are_refused(replicas: Sequence[int]) -> None:
    with pytest.raises(wh.UnsupportedOpError, match="which of its rows belong to whose examples; use equal replica"):
        between_stages(replicas)


@pytest.mark.parametrize("change, message", [
    (lambda where, shape: (where, [shape[0] + 1, COLUMNS]), "says that there are 9 rows, but the examples"),
    (lambda where, shape: (np.concatenate([where, [[shape[0], 0]]]), shape), "has 1 elements in rows that no example has")])
def test_other_rows_are_named(change: Any, message: str) -> None:
    wh.init(cluster="cpu:2")
    with tf.Graph().as_default():
        matrix, y = tf.sparse_placeholder(tf.float64, [None, COLUMNS]), tf.placeholder(tf.float64, [None, 4])
        with wh.replicate(2):
            loss = tf.reduce_mean(tf.square(tf.sparse.sparse_dense_matmul(matrix, variable("wide", COLUMNS, 4)) - y))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            where, shape = change(np.array([[row, 1] for row in range(8)], np.int64), [8, COLUMNS])
            with pytest.raises(wh.InputError, match=message):
                session.run(train, {matrix: (where, np.ones(len(where)), shape), y: np.ones([8, 4])})


def test_last_examples_without_elements_are_named() -> None:
    """TensorFlow's sum over sorted ids then has fewer rows than there are examples."""
    wh.init(cluster="cpu:2")
    with tf.Graph().as_default():
        words, y = tf.sparse_placeholder(tf.int64, [None, COLUMNS]), tf.placeholder(tf.float64, [None, 4])
        with wh.replicate(2):
            rows = tf.nn.embedding_lookup_sparse(variable("table", WORDS, 4), words, None, combiner="sum")
            loss = tf.reduce_mean(tf.square(rows - y))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(wh.InputError, match="has elements in the first 1 rows only"):
                session.run(train, {words: ([[0, 0], [0, 1]], [3, 4], [8, COLUMNS]), y: np.ones([8, 4])})


def from_dataset(cluster: str) -> List[np.ndarray]:
    """Losses and variables of a model whose sparse inputs come from a dataset."""
    if cluster:
        wh.init(cluster=cluster)
    rng = np.random.RandomState(0)
    dense = np.maximum(rng.randn(24, COLUMNS), 0)
    dense[:, 0] += 0.1
    with tf.Graph().as_default():
        data = tf.data.Dataset.from_tensor_slices((dense, rng.randn(24, 4))).batch(8)
        matrix, y = tf.data.make_one_shot_iterator(data.map(lambda x, y: (tf.sparse.from_dense(x), y))).get_next()
        with wh.replicate(2) if cluster else NONE():
            loss = tf.reduce_mean(tf.square(tf.sparse.sparse_dense_matmul(matrix, variable("wide", COLUMNS, 4)) - y))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return [*(session.run([loss, train])[0] for _ in range(3)), *session.run(tf.trainable_variables())]


def test_sparse_tensors_of_a_dataset() -> None:
    for one, other in zip(from_dataset(""), from_dataset("cpu:2")):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


def test_mini_batches_of_their_own_are_refused() -> None:
    """Each would number the rows of its own."""
    with pytest.raises(wh.PlanError, match="is part of a sparse or ragged tensor, which numbers the rows of one mini-batch"):
        from_dataset("cpu:4")
