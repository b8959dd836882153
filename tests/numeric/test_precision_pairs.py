"""Mixed precision together with each pass that saves memory or time, under the forms of parallelism.

In the first step all numbers and all sums of some of them are small multiples of a power of two, which either type holds exactly.
So every plan must find what the local float32 script finds, to the last bit.  The second step overflows float16 in one example,
and must change nothing.  The third step rounds.
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

BATCH, WORDS, WIDTH = 8, 6, 4
IDS = np.array([0, 1, 2, 3, 4, 5, 2, 0])
SIGNS = np.where(np.arange(BATCH * WIDTH).reshape(BATCH, WIDTH) % 3, 1.0, -1.0)
BESIDE = np.arange(BATCH * WIDTH).reshape(BATCH, WIDTH) % 2


class Step(NamedTuple):
    """Loss, and all variables after the step."""

    loss: float
    variables: List[np.ndarray]


class Trained(NamedTuple):
    steps: List[Step]
    divided: Dict[str, int]  # variables in parts under ``zero``, by name -> dimension
    text: str


def weight(name: str, *shape: int) -> Any:
    random = np.random.RandomState(sum(map(ord, name)))
    return tf.get_variable(name, initializer=random.randint(-1, 2, shape).astype("float32"))


def build(scopes: Sequence[Any]) -> Dict[str, Any]:
    """Look-ups and two stages of products, Momentum."""
    ids = tf.placeholder(tf.int32, [None], name="ids")
    beside = tf.placeholder(tf.float32, [None, WIDTH], name="beside")
    signs = tf.placeholder(tf.float32, [None, WIDTH], name="signs")
    with scopes[0]():
        x = tf.nn.embedding_lookup(weight("table", WORDS, WIDTH), ids) + beside
        h = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight("first", WIDTH, WIDTH)), weight("bias", WIDTH)))
    with scopes[-1]():
        h = tf.nn.relu(tf.matmul(h, weight("second", WIDTH, WIDTH)))
        loss = tf.reduce_mean(tf.matmul(h, weight("third", WIDTH, WIDTH)) * signs) / 8
    return {"loss": loss, "update": tf.train.MomentumOptimizer(0.5, 0.5).minimize(loss)}


def train(config: Dict[str, Any], scopes: Sequence[Any] = (), cluster: str = "cpu:1") -> Trained:
    """Three steps; without ``scopes`` of the script by itself."""
    huge = np.array(BESIDE, "float32")
    if config.get("amp") == "float16":
        huge[-1] = 1e5
    if scopes:
        wh.init(config, cluster=cluster)
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            made, found = build(scopes or [lambda: tf.name_scope("")]), []
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for beside in (BESIDE, huge, BESIDE):
                    feed = {"ids:0": IDS, "beside:0": beside, "signs:0": SIGNS}
                    loss = session.run([made["loss"], made["update"]], feed)[0]
                    found.append(Step(loss, session.run(tf.global_variables())))
            parts = [task.parts for task in wh.current_plan().task_graphs] if scopes else []
            return Trained(found, {name: dim for part in parts for name, dim in part.items()}, wh.explain() if scopes else "")
    finally:
        if scopes:
            wh.shutdown()


def one() -> Any:
    return wh.replicate(1)


def two() -> Any:
    return wh.replicate(2)


def split() -> Any:
    return wh.split(2)


SHAPES: Dict[str, Any] = {
    "data": ([two], "cpu:2", {}), "pipeline": ([one, one], "cpu:2", {"num_micro_batch": 2}),
    "nested": ([one, one], "cpu:4", {"num_micro_batch": 2}), "split": ([split], "cpu:2", {}),
    "data and split": ([two, split], "cpu:2", {"cluster.colocate_split_and_replicate": True}),
}
PASSES: Dict[str, Dict[str, Any]] = {
    "v1": {"zero": "v1"}, "v2": {"zero": "v2"}, "v3": {"zero": "v3"}, "host": {"offload": "v0"}, "states": {"offload": "states"},
    "recompute": {"recompute": "full"}, "auto": {"recompute": "auto"}, "xla": {"xla": True}, "called": {"emit": "call"},
}
PAIRS = [("float16", "v1", "data"), ("float16", "v2", "nested"), ("bfloat16", "v3", "data and split"),
         ("float16", "host", "pipeline"), ("float16", "states", "split"), ("bfloat16", "recompute", "split"),
         ("bfloat16", "xla", "pipeline")]


@pytest.fixture(scope="module")
def local() -> Dict[str, List[Step]]:
    return on_one_device()


def on_one_device() -> Dict[str, List[Step]]:
    """By type; float32 is the script by itself."""
    found = {"float32": train({}).steps}
    for dtype in ("float16", "bfloat16"):
        if dtype == "float16" or not tf.__version__.startswith("1."):
            found[dtype] = train({"amp": dtype}, [one]).steps
    return found


def check(found: List[Step], local: Dict[str, List[Step]], dtype: str) -> None:
    exact = local["float32"]
    assert found[0].loss == exact[0].loss
    for value, other in zip(found[0].variables, exact[0].variables):
        np.testing.assert_array_equal(value, other)
    if dtype == "float16":  # eight bits round too much to compare further steps
        for value, before in zip(found[1].variables, found[0].variables):
            np.testing.assert_array_equal(value, before)
        np.testing.assert_allclose(found[2].loss, local[dtype][2].loss, rtol=4e-3)
        for value, other in zip(found[2].variables, local[dtype][2].variables):
            assert np.linalg.norm(value - other) <= 4e-3 * np.linalg.norm(other)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("dtype, name, shape", PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_equals_one_device(local: Dict[str, List[Step]], dtype: str, name: str, shape: str) -> None:
    if dtype not in local:
        pytest.skip("TensorFlow 1.15 has no products of bfloat16 on CPU")
    scopes, cluster, more = SHAPES[shape]
    found = train({**PASSES[name], **more, "amp": dtype}, scopes, cluster)
    check(found.steps, local, dtype)
    if shape == "split":
        assert "embedding_column" in found.text, "a loss scale leaves variables divisible"
    elif "zero" in PASSES[name] and "split" not in shape:
        assert "table" in found.divided
