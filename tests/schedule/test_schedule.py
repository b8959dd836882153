from __future__ import annotations

from typing import List, Sequence, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.schedule import BACKWARD, FORWARD, SCHEDULES, Step, auto_policy, check_warmups, schedule, warmup_depths

NAMES = st.sampled_from(sorted(SCHEDULES))
COUNTS = st.integers(1, 12)


def order(name: str, num_micro_batch: int, warmup: int, stage: int = 0, num_stages: int = 1) -> List[Step]:
    return list(schedule(name, stage, num_stages, num_micro_batch, warmup))


def text(steps: Sequence[Step]) -> str:
    return " ".join(str(step) for step in steps)


def run_together(orders: Sequence[Sequence[Step]]) -> bool:
    """Run a chain of stages, each strictly in its own order, by data dependencies; True if all of them finish."""
    position = [0] * len(orders)
    done = set()
    progress = True
    while progress:
        progress = False
        for stage, steps in enumerate(orders):
            while position[stage] < len(steps):
                step = steps[position[stage]]
                source = stage - 1 if step.kind == FORWARD else stage + 1
                if 0 <= source < len(orders) and (source, step) not in done:
                    break
                done.add((stage, step))
                position[stage] += 1
                progress = True
    return all(at == len(steps) for at, steps in zip(position, orders))


def most_alive(steps: Sequence[Step]) -> int:
    alive, most = 0, 0
    for step in steps:
        alive += 1 if step.kind == FORWARD else -1
        most = max(most, alive)
    return most


@given(NAMES, COUNTS, COUNTS)
def test_every_micro_batch_once_forward_then_once_backward(name: str, num_micro_batch: int, warmup: int) -> None:
    steps = order(name, num_micro_batch, warmup)
    assert sorted(steps) == sorted([Step(kind, m) for kind in (FORWARD, BACKWARD) for m in range(num_micro_batch)])
    for m in range(num_micro_batch):
        assert steps.index(Step(FORWARD, m)) < steps.index(Step(BACKWARD, m))


@given(COUNTS, COUNTS)
def test_backward_first_keeps_exactly_warmup_micro_batches_alive(num_micro_batch: int, warmup: int) -> None:
    assert most_alive(order("backward_first", num_micro_batch, warmup)) == min(warmup, num_micro_batch)


@given(COUNTS, COUNTS)
def test_gpipe_keeps_all_alive(num_micro_batch: int, warmup: int) -> None:
    assert most_alive(order("gpipe", num_micro_batch, warmup)) == num_micro_batch


@settings(max_examples=200)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), COUNTS)
def test_stages_finish_together_exactly_when_the_warmups_are_accepted(warmups: List[int], num_micro_batch: int) -> None:
    orders = [order("backward_first", num_micro_batch, warmup, stage, len(warmups)) for stage, warmup in enumerate(warmups)]
    try:
        check_warmups(warmups, num_micro_batch)
        accepted = True
    except PlanError:
        accepted = False
    assert accepted == run_together(orders)


@given(st.integers(1, 6), COUNTS)
def test_gpipe_stages_finish_together(num_stages: int, num_micro_batch: int) -> None:
    assert run_together([order("gpipe", num_micro_batch, 1, stage, num_stages) for stage in range(num_stages)])


@given(st.sampled_from(["PA", "PB"]), st.lists(st.integers(1, 9), min_size=1, max_size=7), COUNTS)
def test_depths_obey_policy_memory_and_order(policy: str, limits: List[int], num_micro_batch: int) -> None:
    num_stages = len(limits)
    depths = warmup_depths(policy, num_stages, limits, num_micro_batch)
    check_warmups(depths, num_micro_batch)
    for stage, depth in enumerate(depths):
        wanted = num_stages - stage if policy == "PA" else 2 * (num_stages - stage) - 1
        # as deep as allowed: by its own policy, memory and micro-batches, or by some stage before it
        before = [min(limits[i], num_stages - i if policy == "PA" else 2 * (num_stages - i) - 1) for i in range(stage)]
        assert depth == min([wanted, limits[stage], num_micro_batch] + before)


def test_dapple_figure_3_and_11() -> None:
    assert text(order("backward_first", 5, 2)) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert text(order("backward_first", 3, 1)) == "F0 B0 F1 B1 F2 B2"
    assert text(order("gpipe", 3, 1)) == "F0 F1 F2 B2 B1 B0"


@pytest.mark.parametrize("policy, expected", [("PA", (4, 3, 2, 1)), ("PB", (7, 5, 3, 1))])
def test_policies_without_limits(policy: str, expected: Tuple[int, ...]) -> None:
    assert warmup_depths(policy, 4, None, 16) == expected


def test_a_stage_short_of_memory_holds_back_the_stages_after_it() -> None:
    assert warmup_depths("PB", 4, (2, 9, 9, 9), 16) == (2, 2, 2, 1)


@pytest.mark.parametrize("ratio, policy", [(0.16, "PB"), (0.10, "PB"), (0.06, "PA"), (0.03, "PA"), (0.0, "PA")])
def test_auto_policy_is_that_of_dapple_table_iv(ratio: float, policy: str) -> None:
    assert auto_policy(ratio) == policy


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: schedule("backward_frist", 0, 1, 1, 1), PlanError, "Did you mean 'backward_first'"),
        (lambda: schedule("gpipe", 2, 2, 1, 1), PlanError, "stage is 2, expected 0 to 1"),
        (lambda: schedule("gpipe", 0, 1, 0, 1), PlanError, "num_micro_batch is 0"),
        (lambda: schedule("gpipe", 0, 1, 1, 0), PlanError, "warmup is 0"),
        (lambda: warmup_depths("PC", 2, None, 2), PlanError, "'PC', expected one of PA, PB"),
        (lambda: warmup_depths("PA", 0), PlanError, "num_stages is 0"),
        (lambda: warmup_depths("PA", 3, (1, 1), 2), PlanError, "2 entries"),
        (lambda: warmup_depths("PA", 3, (2, 0, 1), 2), InfeasibleError, "do not fit on stage 1"),
        (lambda: check_warmups((1, 2), 4), PlanError, "use warmup <= 1 on stage 1"),
        (lambda: check_warmups((1, 0), 4), PlanError, "stage 1 has warmup 0"),
        (lambda: auto_policy(float("nan")), PlanError, "nan"),
        (lambda: auto_policy(-1), PlanError, "expected a number of at least 0"),
    ],
)
def test_refusals(call, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message.replace("(", r"\(")):
        call()


def test_depths_beyond_the_micro_batches_do_not_matter() -> None:
    check_warmups((2, 9), 2)
    assert order("backward_first", 2, 9) == order("backward_first", 2, 2)
