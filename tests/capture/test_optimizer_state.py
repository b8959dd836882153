"""Memory follows from what the script's optimizer keeps, in annotated and automatic plans."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator

import pytest
import tensorflow as tf

import whale_tf as wh
from models.optimizers import Adafactor, Lamb
from whale_tf.capture.captured import capture
from whale_tf.errors import InfeasibleError

v1 = tf.compat.v1

WIDTH, BATCH, MICRO_BATCHES = 256, 32, 8
KERNEL = 4 * WIDTH * WIDTH
ACTIVATION = 4 * WIDTH * BATCH // MICRO_BATCHES  # of one micro-batch

OPTIMIZERS: Dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(1e-3),
    "lamb": lambda: Lamb(1e-3),
    "adafactor": lambda: Adafactor(1e-3),
}
STATE = {"sgd": 0, "momentum": KERNEL, "adam": 2 * KERNEL, "lamb": 2 * KERNEL, "adafactor": 2 * 4 * WIDTH}
SCALARS = 32  # powers of decay rates, a step count


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    wh.shutdown()


def cpus(count: int, memory_bytes: float) -> Dict[str, Any]:
    kind = {"kind": "CPU", "memory_bytes": int(memory_bytes), "fp32": 1e9, "memory_bandwidth_bytes_per_s": 1e10}
    return {"name": "small", "device_types": {"small": kind}, "nodes": [{"devices": [f"small:{count}"], "links": {
        "local": {"bandwidth_gbytes_per_s": 1000, "latency_us": 0.01}}}]}


def layer(x: Any, name: str) -> Any:
    return v1.matmul(x, v1.get_variable(name, [WIDTH, WIDTH]))


def train(optimizer: str, resource: bool = True, annotate: bool = False) -> Any:
    """Two equal layers."""
    with v1.variable_scope("", use_resource=resource):
        x = v1.placeholder("float32", [BATCH, WIDTH])
        if annotate:
            with wh.replicate(1):
                y = v1.tanh(layer(x, "a"))
            with wh.replicate(1):
                loss = v1.reduce_mean(v1.square(layer(y, "b")))
        else:
            loss = v1.reduce_mean(v1.square(layer(v1.tanh(layer(x, "a")), "b")))
        OPTIMIZERS[optimizer]().minimize(loss, global_step=v1.train.get_or_create_global_step())
    return loss


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_what_an_optimizer_keeps(optimizer: str, resource: bool) -> None:
    wh.init({}, cluster="cpu:2")
    with tf.Graph().as_default() as graph:
        train(optimizer, resource)
        captured = capture(graph)
    state = {captured.graph.ops[op].name: size for op, size in captured.state_bytes().items()}
    assert set(state) <= {"a", "b"}
    for name in "ab":
        assert STATE[optimizer] <= state.get(name, 0) <= STATE[optimizer] + SCALARS


def warmup(optimizer: str, memory_bytes: float) -> int:
    """Of the first of two stages."""
    wh.init({"num_micro_batch": MICRO_BATCHES}, cluster=cpus(2, memory_bytes))
    with tf.Graph().as_default():
        train(optimizer, annotate=True)
        wh.parallelize()
        plan = wh.current_plan()
    wh.shutdown()
    assert plan is not None
    return plan.task_graphs[0].warmup


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_annotated_stages_keep_as_many_micro_batches_as_the_optimizer_leaves_room_for(optimizer: str) -> None:
    resident = 2 * KERNEL + STATE[optimizer] + SCALARS
    assert warmup(optimizer, resident + ACTIVATION) == 1
    assert warmup(optimizer, resident + 8 * ACTIVATION) == 2


def peaks(optimizer: str) -> Any:
    """Of an automatic plan with a device for each layer."""
    wh.init({"num_task_graph": 2, "num_micro_batch": 2}, cluster=cpus(2, 2 ** 30))
    with tf.Graph().as_default():
        train(optimizer)
        wh.parallelize()
        plan = wh.current_plan()
    wh.shutdown()
    assert plan is not None and len(plan.task_graphs) == 2
    return plan.estimate.peak_memory_bytes


def test_peaks_of_automatic_plans_count_what_the_optimizer_keeps() -> None:
    plain = peaks("sgd")
    for optimizer in ("momentum", "adam", "lamb"):
        for found, base in zip(peaks(optimizer), plain):
            assert STATE[optimizer] <= found - base <= STATE[optimizer] + SCALARS


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "lamb"])
def test_automatic_plans_are_refused_only_where_the_optimizers_own_memory_does_not_fit(optimizer: str) -> None:
    needed = 3 * KERNEL + STATE[optimizer]  # the kernel, its gradient's sum, and a micro-batch's gradient beside that

    def plan(memory_bytes: float) -> None:
        wh.init({"num_task_graph": 2, "num_micro_batch": 2}, cluster=cpus(2, memory_bytes))
        with tf.Graph().as_default():
            train(optimizer)
            wh.parallelize()
        wh.shutdown()

    plan(needed + 0.4 * KERNEL)
    with pytest.raises(InfeasibleError, match="fits? "):
        plan(needed - 0.1 * KERNEL)
