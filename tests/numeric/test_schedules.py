"""Schedules with numbers of micro-batches that no number of stages divides, and the one that is chosen."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import whale_tf as wh
from tests.numeric.equality import check
from tests.numeric.plans import FOLDED, SCHEDULES, SHAPES, Parallel, Shape
from tests.numeric.script import Setting
from whale_tf._tf_compat import v1
from whale_tf.planner.candidate import TIE

pytestmark = [pytest.mark.half, pytest.mark.slow]


@pytest.mark.half
@pytest.mark.parametrize("schedule, shape, micro_batches", [
    ("zero_bubble_h1", "counts2:1:1", 2), ("zero_bubble_h2", "nested2x2", 3), ("zero_bubble_v", "folded2x2", 3),
    ("interleaved", "folded2x2", 3)])
@pytest.mark.parametrize("emit", ["inline", "call"])
def test_any_number_of_micro_batches(schedule: str, shape: str, micro_batches: int, emit: str) -> None:
    check("clipped_adam", Setting(), Parallel(SHAPES[shape], micro_batches, schedule, extra=(("emit", emit),)))


def test_updates_wait_for_forward_steps_on_which_no_gradient_depends() -> None:
    """The gradient of a linear score does not read the score, whose forward step reads the reference variable that is updated."""
    check("gradient_penalty", Setting(resource=False, static_batch=True), Parallel(SHAPES["counts2:1:1"], 2, "zero_bubble_h1"))


def test_steps_wait_for_no_branch_that_is_not_taken() -> None:
    """They would not run then, and neither would the update."""
    check("conditional_v1", Setting(), Parallel(SHAPES["pipeline4"], 2, "zero_bubble_h1"))


@pytest.mark.parametrize("schedule, stages, devices", [("zero_bubble_v", 4, 4), ("interleaved", 2, 2)])
def test_two_devices_for_each_of_two_task_graphs_on_them(schedule: str, stages: int, devices: int) -> None:
    check("mlp_sum", Setting(), Parallel(Shape((2,) * stages, devices, 2), 2, schedule))


def layers(count: int, width: int = 64, each: int = 1) -> Any:
    x = v1.placeholder(v1.float64, [32, width])
    h = x
    for number in range(count):
        with wh.replicate(1):
            for kernel in range(number * each, (number + 1) * each):
                h = v1.tanh(v1.matmul(h, v1.get_variable(f"kernel{kernel}", [width, width], v1.float64, use_resource=True)))
            loss = v1.reduce_mean(h) if number == count - 1 else None
    return x, loss


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    wh.shutdown()


@pytest.mark.parametrize("count, allowed", [(2, SCHEDULES), (4, FOLDED)])
def test_auto_takes_the_fastest_and_names_the_others(count: int, allowed: Any) -> None:
    wh.init({"num_micro_batch": 4, "pipeline.schedule": "auto"}, cluster="cpu:2")
    with v1.Graph().as_default():
        x, loss = layers(count)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run([loss, train], {x: np.ones(x.shape)})
        plan = wh.current_plan()
    assert plan is not None and plan.schedule in allowed
    told = plan.estimate.runners_up
    named = [next((name for name in allowed if f", {name}," in text), "backward_first") for text in told]
    assert sorted([plan.schedule, *named]) == sorted(allowed)
    assert plan.estimate.latency_s is not None
    others = [float(text.rpartition("simulated ")[2].split()[0]) for text in told]
    assert plan.estimate.latency_s <= min(others) * TIE


@pytest.mark.parametrize("schedule, counts, message", [
    ("interleaved", (1, 2), "with the same number of devices"),
    ("zero_bubble_v", (1, 1, 1), "puts two TaskGraphs on each device"),
    ("interleaved", (1, 1, 1), "do not divide over 2 device")])
def test_refusals(schedule: str, counts: Any, message: str) -> None:
    with pytest.raises(wh.WhaleError, match=message):
        check("mlp_mean", Setting(), Parallel(Shape(counts, 2, 2), 2, schedule))


@pytest.mark.parametrize("schedule", FOLDED)
def test_no_backward_pass_waits_for_what_an_earlier_stage_repeats(schedule: str) -> None:
    """The gradient of a kernel reads what the stage before sent: the tensor, not its repetition in that stage's backward pass."""
    found = []
    for config in ({"recompute": "none"}, {"recompute": "full"}):
        wh.init({"num_micro_batch": 4, "pipeline.schedule": schedule, **config}, cluster="cpu:2")
        with v1.Graph().as_default():
            x, loss = layers(4, each=2)
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            values = {kernel: np.random.RandomState(number).randn(64, 64) / 8 for number, kernel in
                      enumerate(v1.trainable_variables())}
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for kernel, value in values.items():
                    kernel.load(value, session)
                for _ in range(3):
                    session.run([loss, train], {x: np.random.RandomState(9).randn(32, 64)})
                found.append(session.run(v1.trainable_variables()))
        wh.shutdown()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-10)
