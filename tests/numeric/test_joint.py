"""Automatic plans where memory is short: what is searched together fits, is the fastest, and computes the local numbers."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import pytest

import whale_tf as wh
from tests.numeric.unequal import described
from whale_tf._tf_compat import tf, v1
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.search import find_plan
from whale_tf.planner.candidate import TIE, Candidate

pytestmark = [pytest.mark.half, pytest.mark.slow]
BATCH, WIDTH, LAYERS = 192, 12, 8
AMPLE = 100.0  # MiB of a device
SHORT = 0.11  # of the 0.123 that data parallelism keeps on each of two devices, which is the fastest plan


def build() -> Any:
    """(inputs, loss, update) of a script without annotations."""
    x = v1.placeholder(v1.float64, [BATCH, WIDTH])
    h, random = x, np.random.RandomState(0)
    for number in range(LAYERS):
        h = v1.tanh(v1.matmul(h, v1.get_variable(f"w{number}", initializer=random.randn(WIDTH, WIDTH) / 5, use_resource=True)))
    loss = v1.reduce_mean(v1.square(h))
    return x, loss, v1.train.AdamOptimizer(0.01).minimize(loss)


class Trained(NamedTuple):
    losses: List[float]
    variables: List[Any]
    plan: Optional[wh.Plan]


def train(config: Optional[Dict[str, Any]], cluster: Any = None) -> Trained:
    if config is not None:
        wh.init(config, cluster=cluster)
    try:
        with tf.Graph().as_default():
            x, loss, update = build()
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                batches = np.random.RandomState(1).randn(3, BATCH, WIDTH)
                losses = [session.run([loss, update], {x: batch})[0] for batch in batches]
                return Trained(losses, session.run(v1.trainable_variables()), wh.current_plan() if config is not None else None)
    finally:
        wh.shutdown()


def machine(memory_mib: float) -> Any:
    return described([(100, memory_mib)] * 2)


@pytest.fixture(scope="module")
def local() -> Trained:
    return train(None)


@pytest.mark.parametrize("config, memory, measure", [
    ({"auto_parallel": True, "num_micro_batch": 1, "recompute": "none"}, SHORT, "zero"),
    ({"auto_parallel": "dapple", "num_micro_batch": 1, "zero": "none"}, SHORT, "kept"),
    ({"auto_parallel": "dapple", "pipeline.schedule": "interleaved"}, AMPLE, "interleaved"),
    ({"auto_parallel": "dapple", "pipeline.schedule": "zero_bubble_v"}, AMPLE, "zero_bubble_v")],
    ids=["zero", "recompute", "interleaved", "v"])
def test_what_is_chosen_fits_and_computes_the_local_numbers(
        config: Dict[str, Any], memory: float, measure: str, local: Trained) -> None:
    cluster = machine(memory)
    found = train(config, cluster)
    np.testing.assert_allclose(found.losses, local.losses, rtol=1e-10)
    for one, other in zip(found.variables, local.variables):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    plan = found.plan
    assert plan is not None
    assert 0 < max(plan.estimate.peak_memory_bytes) <= Cluster.parse(cluster).devices[0].usable_bytes
    if measure == "zero":
        assert plan.zero != "none" and any(task.homes for task in plan.task_graphs)
    elif measure == "kept":
        assert any(task.kept is not None for task in plan.task_graphs) and plan.zero == "none"
    else:
        assert plan.schedule == measure and len(plan.task_graphs) > len({task.devices for task in plan.task_graphs})
    if memory < AMPLE:
        assert len(plan.estimate.without) == 1 and " too large" in plan.estimate.without[0]


class Searches:
    """Plans of one graph, which is never run."""

    def __init__(self) -> None:
        with tf.Graph().as_default() as self.graph:
            build()

    def find(self, memory: float, **config: Any) -> Candidate:
        found = find_plan(self.graph, "model", Cluster.parse(machine(memory)), Config(config))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def searches() -> Any:
    wh.init(cluster="cpu:1")
    yield Searches()
    wh.shutdown()


@pytest.mark.parametrize("memory", [AMPLE, SHORT])
def test_no_uniform_pipeline_that_fits_is_faster(searches: Any, memory: float) -> None:
    """Nor data parallelism or the undivided graph, which are in the same search."""
    taken = searches.find(memory, auto_parallel="dapple")
    assert taken.fits and taken.is_played
    fitting = []
    for count in (2, 8):
        try:
            fitting.append(searches.find(memory, num_task_graph=2, num_micro_batch=count).latency_s)
        except wh.InfeasibleError:
            pass
    assert fitting and taken.latency_s <= min(fitting) * TIE
    if memory == AMPLE:
        assert not taken.measures.described() and not taken.without
        assert {"data-parallel", "undivided"} <= {taken.search, *(text.partition(":")[0] for text in taken.runners_up)}


def test_message_says_the_smallest_need(searches: Any) -> None:
    with pytest.raises(wh.InfeasibleError, match="smallest of .* needs .* MiB on its fullest device") as caught:
        searches.find(0.01, auto_parallel="dapple", num_micro_batch=1)
    least = caught.value.least_bytes
    assert least > 0.01 * 2 ** 20
    assert searches.find(1.001 * least / 2 ** 20, auto_parallel="dapple", num_micro_batch=1).measures.described()
