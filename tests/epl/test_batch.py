"""io.batch: "micro": every micro-batch of every model replica takes a batch of the input pipeline."""
from __future__ import annotations

from typing import Any, Callable, Dict

import pytest

import whale_tf as wh
from tests.epl.scripts import CLASSES, Outcome, assert_same, batches, layer, mean_loss, train
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import ConfigError, PlanError

BATCH, STEPS = 4, 3
NONE: Callable[[], Any] = lambda: v1.name_scope("")  # noqa: E731


def build(batch: int, is_static: bool, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    with first():
        data = batches(batch * STEPS, batch, is_static)
        h = layer(data["x"], 8, "one")
    with second():
        return mean_loss(layer(h, CLASSES, "two"), data["y"])


def divided(config: Dict[str, Any], cluster: str, is_static: bool, count: int, first: Callable[[], Any],
            second: Callable[[], Any]) -> Outcome:
    """Training on ``count`` batches of the pipeline in each step."""
    wh.init({"io.batch": "micro", "on_inexact": "error", **config}, cluster=cluster)

    def built() -> Any:
        with first():
            data = batches(count * BATCH * STEPS, BATCH, is_static)
            h = layer(data["x"], 8, "one")
        with second():
            return mean_loss(layer(h, CLASSES, "two"), data["y"])

    return train(built, STEPS)


def replicate(count: int) -> Callable[[], Any]:
    return lambda: wh.replicate(count)


CASES: Dict[str, Any] = {
    "accumulation": ({"num_micro_batch": 4}, "cpu:1", 4, replicate(1), NONE),
    "data parallel": ({"num_micro_batch": 2}, "cpu:2", 4, replicate(1), NONE),
    "divided micro-batch": ({"num_micro_batch": 2}, "cpu:2", 2, replicate(2), NONE),
    "pipeline": ({"num_micro_batch": 3}, "cpu:4", 6, replicate(1), replicate(1)),
    "called": ({"num_micro_batch": 3, "emit": "call"}, "cpu:4", 6, replicate(1), replicate(1)),
    "divided automatically": ({"num_micro_batch": 2, "num_task_graph": 2}, "cpu:4", 4, NONE, NONE),
    "split": ({"num_micro_batch": 2}, "cpu:4", 2, replicate(2), lambda: wh.split(2)),
}


@pytest.mark.slow
@pytest.mark.half
@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("case", sorted(CASES))
def test_step_equals_the_local_one_on_all_its_batches(case: str, is_static: bool) -> None:
    config, cluster, count, first, second = CASES[case]
    if case == "called":
        v1.enable_resource_variables()
    found = divided(config, cluster, is_static, count, first, second)
    text = wh.explain()
    wh.shutdown()
    assert_same(found, train(lambda: build(count * BATCH, is_static, NONE, NONE), STEPS))
    expected = f"A step has {count * BATCH} examples: {count} mini-batches of {BATCH}, one for each of" if is_static else (
        f"A step takes {count} mini-batches of open size, one for each of")
    assert expected in " ".join(text.split())
    assert "(io.batch: micro)" in " ".join(text.split())


@pytest.mark.slow
def test_first_step_is_verified() -> None:
    """The comparison knows all batches of a step."""
    config = {"num_micro_batch": 2, "verify": "first_step"}
    divided(config, "cpu:2", True, 4, replicate(1), NONE)


def test_fed_input_beside_a_pipeline_is_refused() -> None:
    wh.init({"io.batch": "micro", "num_micro_batch": 2}, cluster="cpu:1")
    with pytest.raises(PlanError, match="is fed: set io.batch to 'mini'"), v1.Graph().as_default():
        with wh.replicate(1):
            data = batches(16, BATCH, True)
            other = v1.placeholder(tf.float64, [BATCH, 6])
            loss = mean_loss(layer(data["x"] + other, CLASSES, "one"), data["y"])
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        wh.parallelize()


@pytest.mark.slow
def test_fed_mini_batch_is_divided() -> None:
    wh.init({"io.batch": "micro", "num_micro_batch": 2}, cluster="cpu:1")
    with v1.Graph().as_default():
        with wh.replicate(1):
            x = v1.placeholder(tf.float64, [8, 6])
            loss = tf.reduce_mean(layer(x, CLASSES, "one"))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        wh.parallelize()
    assert "A step has 8 examples: 1 mini-batch of 8." in wh.explain()


@pytest.mark.once
def test_functions_refuse_it() -> None:
    from whale_tf.cluster import Cluster
    from whale_tf.config import Config
    from whale_tf.runtime.functions import settings

    with pytest.raises(ConfigError, match="which is for input pipelines"):
        settings(Config({"io.batch": "micro"}), Cluster.parse("cpu:2"), False)
