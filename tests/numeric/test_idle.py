"""A plan of several devices whose step is divided in name only says so."""
from __future__ import annotations

import contextlib
import warnings
from typing import Any, Iterator, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh


def variable(name: str, rows: int, columns: int) -> tf.Tensor:
    return tf.get_variable(name, initializer=np.linspace(-1, 1, rows * columns).reshape(rows, columns))


def of_variables() -> tf.Tensor:
    """There are no examples."""
    return tf.matmul(variable("v", 8, 4), variable("w", 4, 4))


def of_sparse() -> tf.Tensor:
    """The matrix of words has few elements, but the variable has many rows."""
    words = tf.sparse_placeholder("float64", [8, 500])
    return tf.matmul(tf.sparse.sparse_dense_matmul(words, variable("w", 500, 4)), variable("v", 4, 4))


def of_section() -> tf.Tensor:
    """From the decomposition on, all examples are needed together."""
    x = tf.placeholder("float64", [8, 8])
    return tf.matmul(tf.linalg.svd(tf.matmul(x, variable("w", 8, 2)), compute_uv=False)[None], variable("v", 2, 64)) @ variable(
        "u", 64, 64)


def of_several_sections() -> tf.Tensor:
    """The first one has little to do; in the second one, a cast runs with the sort behind it, so that fewer bytes are sent."""
    h = tf.matmul(tf.placeholder("float32", [8, 8]), tf.cast(variable("w", 8, 8), "float32"))
    scale = tf.reduce_sum(tf.sort(h, 0, name="first"))
    largest = tf.reduce_max(tf.sort(tf.cast(h, "float64", name="cast"), 0, name="second"))
    return tf.matmul(largest * tf.ones([1, 64], "float64"), variable("u", 64, 64)) * tf.cast(scale, "float64")


def of_examples() -> tf.Tensor:
    return tf.matmul(tf.placeholder("float64", [None, 4]), variable("w", 4, 4))


def of_whole_variable() -> tf.Tensor:
    """Most bytes are in a variable that only a sort reads."""
    return of_examples() + tf.reduce_sum(tf.sort(variable("v", 1, 256)))


@contextlib.contextmanager
def planned(model: Any, config: Any = None, devices: int = 2, block: Any = wh.replicate) -> Iterator[Tuple[List[str], str]]:
    """What is warned about, and ``wh.explain()``."""
    wh.init(config, cluster=f"cpu:{devices}")
    try:
        with tf.Graph().as_default(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with block(devices):
                loss = tf.reduce_mean(tf.square(model()))
            tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            wh.parallelize()
            yield [str(each.message) for each in warned if each.category is wh.IdleWarning], " ".join(wh.explain().split())
    finally:
        wh.shutdown()


@pytest.mark.parametrize("model, cause", [
    (of_variables, "'MatMul' (MatMul). It follows from no input"), (of_section, "from 'Svd' (Svd) on"),
    (of_sparse, "'SparseTensorDenseMatMul/SparseTensorDenseMatMul' (SparseTensorDenseMatMul). All examples are needed together"),
    (of_several_sections, "from 'second/TopKV2' (TopKV2) on")])
def test_idle_device_warns(model: Any, cause: str) -> None:
    with planned(model) as (warned, explained):
        assert len(warned) == 1 and warned[0].startswith("the plan uses 2 devices, but ") and cause in warned[0], warned
        assert "Divided over 2 devices: " in explained and "% of the parameter bytes" in explained
    with planned(model, {"on_idle": "allow"}) as (warned, _):
        assert not warned
    with pytest.raises(wh.IdleError, match="set on_idle to 'allow'"), planned(model, {"on_idle": "error"}):
        pass


def test_busy_devices_do_not_warn() -> None:
    with planned(of_examples) as (warned, explained):
        assert not warned and "Divided over 2 devices: 100% of the floating-point operations" in explained
        assert "No products" not in explained
        assert "100% of the parameter bytes." in explained
    with planned(of_variables, devices=1) as (warned, explained):
        assert not warned and "Divided" not in explained


def test_devices_of_a_pipeline_without_products_are_named() -> None:
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            with wh.replicate(1):
                h = of_examples()
            with wh.replicate(1):
                loss = tf.reduce_mean(tf.square(tf.sin(h)))
            tf.train.GradientDescentOptimizer(0.1).minimize(loss)
            wh.parallelize()
            assert "\nNo products on CPU:1.\n" in wh.explain()
    finally:
        wh.shutdown()


def test_what_runs_once_is_not_counted_as_divided() -> None:
    with planned(of_section, {"on_idle": "allow"}) as (_, explained):
        assert "0.377% of the parameter bytes." in explained  # 16 of 4240 numbers
        assert "replicate(2) │ 17 (6 once)" in explained and "once per mini-batch, on CPU:0." in explained
        assert "│ 2 │ local │ 1 │ 1 │ 128 B" in explained  # only the first product's gradient is a sum


def test_variables_that_split_leaves_whole_warn() -> None:
    with planned(of_whole_variable, block=wh.split) as (warned, explained):
        assert len(warned) == 1 and "keeps 1 variable(s) whole, such as 'v' (2048 bytes)" in warned[0], warned
        assert "5.88% of the parameter bytes (5.88% are in parts)." in explained
