"""Memory of a micro-batch by liveness, counted by hand."""
from __future__ import annotations

from typing import Any, Iterator, Set, Tuple

import pytest

import whale_tf as wh
from whale_tf._tf_compat import tf, v1
from whale_tf.capture.captured import capture
from whale_tf.ir.batch_axis import analyse
from whale_tf.ir.region import Region, find_region
from whale_tf.plan import Plan, TaskGraphPlan
from whale_tf.planner.memory import device_peaks
from whale_tf.profiler.liveness import MicroBatchMemory, micro_batch_memory

BATCH, WIDTH = 8, 4
HIDDEN, OUTPUT, KERNEL = 4 * BATCH * WIDTH, 4 * BATCH, 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(autouse=True)
def _hooks() -> Iterator[None]:
    wh.init({}, cluster="cpu:2")
    yield
    wh.shutdown()


def two_layers() -> Tuple[Region, Set[int]]:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder("float32", [BATCH, WIDTH])
        h = v1.tanh(v1.matmul(x, v1.get_variable("a", [WIDTH, WIDTH])))
        y = v1.matmul(h, v1.get_variable("b", [WIDTH, 1]))
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(v1.reduce_mean(v1.square(y)))
        captured = capture(graph)
    axis = analyse(captured.graph, captured.sources, captured.scope)
    region = find_region(captured.graph, captured.task_graph, axis, list(captured.sources))
    return region, {tensor for target in captured.phases.targets for tensor in target.tensors}


def test_what_the_backward_pass_reads_is_kept() -> None:
    memory = micro_batch_memory(*two_layers(), task_graph=0)
    # the hidden layer (written over the product by Tanh) and the output, which Square's gradient reads; the square only
    # makes the loss, which no update needs
    assert memory.kept == memory.forward_peak == HIDDEN + OUTPUT
    assert memory.gradients == KERNEL
    assert memory.backward_peak > HIDDEN + KERNEL


def test_a_part_of_the_batch_takes_a_part_of_the_memory() -> None:
    region, gradients = two_layers()
    quarter = micro_batch_memory(region, gradients, 0, micro_batches=2, replicas=2)
    assert quarter.kept == (HIDDEN + OUTPUT) / 4 and quarter.gradients == KERNEL


def test_micro_batches_in_flight_add_what_they_keep() -> None:
    memory = MicroBatchMemory(kept=10, forward_peak=12, backward_peak=15, gradients=3)
    assert memory.peak(1, 1) == 15 and memory.peak(3, 8) == 15 + 20 + 3 and memory.peak(3, 2) == 15 + 10 + 3
    assert memory.peak(3, 8, share=0.5) == (15 + 20) / 2 + 3


@pytest.mark.parametrize("slices", [None, (3, 1)])
def test_devices_hold_variables_slots_and_their_part(slices: Any) -> None:
    region, gradients = two_layers()
    task = TaskGraphPlan(name="model", devices=((0, 1),), slices=slices)
    plan = Plan(graph="g", num_devices=3, task_graphs=(task,))
    found = device_peaks(plan, region, gradients, [2 * KERNEL])
    memory = micro_batch_memory(region, gradients, 0, replicas=2)
    shares = (1.0, 1.0) if slices is None else (1.5, 0.5)
    assert found == [int(2 * KERNEL + memory.peak(1, 1, share)) for share in shares] + [0]
