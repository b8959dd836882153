"""Gradients added up over micro-batches, and the order of a product's two gradients."""

from __future__ import annotations

from typing import Dict

import pytest

from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, Simulation, simulate, uniform_3d
from whale_tf.simulator.costs import EFFICIENCY
from whale_tf.simulator.laws import as_run
from whale_tf.simulator.model_graph import PARAMETER, ModelGraph
from whale_tf.simulator.zoo.transformers import transformer

BATCH = 4


def gpt(precision: str = "fp32") -> ModelGraph:
    return transformer("gpt", BATCH, 2, 64, 4, 16, 128, precision=precision)


def seconds_of(result: Simulation) -> Dict[int, float]:
    """Of all computations of each micro-batch."""
    found: Dict[int, float] = {}
    for lane, micro_batch, seconds in zip(result.graph.lane, result.graph.micro_batch, result.graph.seconds):
        if lane == 0:
            found[micro_batch] = found.get(micro_batch, 0.0) + seconds
    return found


@pytest.mark.parametrize("precision,size", [("fp32", 4), ("fp16", 2)])
@pytest.mark.parametrize("schedule", ["backward_first", "gpipe", "zero_bubble_h1"])
def test_every_micro_batch_but_the_first_adds_its_gradients_to_the_sum(precision: str, size: int, schedule: str) -> None:
    """It reads two of them and writes one."""
    cluster, model = Cluster.parse("V100-16GB:2"), gpt(precision)
    result = simulate(uniform_3d(model, pp=2, num_micro_batch=3, schedule=schedule), cluster)
    found, known = seconds_of(result), EFFICIENCY
    uses = sum(use.tensor == number for number, tensor in enumerate(model.tensors) if tensor.role == PARAMETER
               for op in model.ops for use in op.inputs)
    sums = sum(any(one.sum_seconds) for one in result.program.instructions)
    assert uses >= sums > len(model.tensors) // 4
    table = next(tensor for tensor in model.tensors if tensor.name == "embedding/tokens")  # looked up, and multiplied with
    moved = 3.0 * size * (model.parameter_count + table.size)
    rate = cluster.devices[0].memory_bandwidth_bytes_per_s * known.memory
    first, second, third = sorted(found[micro_batch] for micro_batch in range(3))  # GPipe goes back in the other order
    assert second == pytest.approx(third, rel=1e-12)
    assert second - first == pytest.approx(moved / rate + sums * known.launch_s, rel=1e-9)


@pytest.mark.parametrize("precision,xla,passes", [("fp32", True, 3.0), ("fp16", False, 3.0), ("fp16", True, 2.5)])
def test_xla_casts_gradients_of_mixed_precision_where_it_adds_them(precision: str, xla: bool, passes: float) -> None:
    """Sums are in float32; a gradient is then read in 16 bits."""
    model, cluster = as_run(gpt(), precision, xla), Cluster.parse("V100-16GB:1")
    found, known = seconds_of(simulate(uniform_3d(model, num_micro_batch=2), cluster, Options(xla=xla))), EFFICIENCY
    table = next(tensor for tensor in model.tensors if tensor.name == "embedding/tokens")
    rate = cluster.devices[0].memory_bandwidth_bytes_per_s * known.memory
    launches = (found[1] - found[0] - passes * 4 * (model.parameter_count + table.size) / rate) / known.launch_s
    assert launches == pytest.approx(round(launches), abs=1e-6)


def test_one_micro_batch_adds_up_nothing() -> None:
    model, cluster = gpt(), Cluster.parse("V100-16GB:1")
    one, two = (seconds_of(simulate(uniform_3d(model, num_micro_batch=count), cluster)) for count in (1, 2))
    assert one[0] == pytest.approx(two[0], rel=1e-12) and two[1] > two[0]


def test_under_zero_2_each_device_adds_up_its_own_part() -> None:
    model, cluster, launch_s = gpt(), Cluster.parse("V100-16GB:4"), EFFICIENCY.launch_s
    whole, parts = (simulate(uniform_3d(model, 4, num_micro_batch=2, zero=zero), cluster) for zero in ("none", "v2"))
    sums = [[seconds - launch_s for one in result.program.instructions for seconds in one.sum_seconds if seconds]
            for result in (whole, parts)]
    assert sums[1] == pytest.approx([seconds / 4 for seconds in sums[0]])


def test_sums_of_tensor_parallelism_run_beside_gradients_of_weights_unless_these_come_first() -> None:
    model, cluster = transformer("gpt", 8, 2, 1024, 16, 512, 1024, precision="fp16"), Cluster.parse("A100-80GB:4")
    hidden, exposed, alone, other = (
        simulate(uniform_3d(model, 1, tp)._replace(weights_first=first), cluster)
        for tp, first in ((4, False), (4, True), (1, False), (1, True)))
    assert exposed.step_time_s > hidden.step_time_s
    assert exposed.exposed_communication_s > hidden.exposed_communication_s
    assert exposed.devices[0].computation_s == pytest.approx(hidden.devices[0].computation_s, rel=1e-9)
    assert other.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)
