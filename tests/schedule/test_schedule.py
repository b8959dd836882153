from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whale_tf.schedule as schedules
from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.plan import SCHEDULES as NAMES_IN_PLANS
from whale_tf.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    WEIGHT,
    Step,
    auto_policy,
    check_warmups,
    in_flight,
    orders,
    text,
    warmup_depths,
)

COUNTS = st.integers(1, 12)


def order(name: str, num_micro_batch: int, warmup: int) -> List[Step]:
    return list(orders(name, num_micro_batch, [warmup])[0])


class Played(NamedTuple):
    """``ends``: when each place ends; ``idle``: how long it waits between its first and its last step."""

    ends: List[int]
    idle: List[int]


def play(found: Sequence[Sequence[Step]], count: int) -> Optional[Played]:
    """Run places, each strictly in its own order, by data dependencies of a chain of ``count`` TaskGraphs; F, B and W take one
    unit of time each, B two where it is not divided.  None: they wait for each other for ever."""
    splits = any(step.kind == WEIGHT for steps in found for step in steps)
    position, clock, idle = [0] * len(found), [-1] * len(found), [0] * len(found)
    ends: Dict[Step, int] = {}
    progress = True
    while progress:
        progress = False
        for place, steps in enumerate(found):
            while position[place] < len(steps):
                step = steps[position[place]]
                ready = [ends.get(one) for one in needed(step, count)]
                if None in ready:
                    break
                start = max([0, clock[place], *ready])
                idle[place] += start - clock[place] if position[place] else 0
                clock[place] = ends[step] = start + (2 if step.kind == BACKWARD and not splits else 1)
                position[place] += 1
                progress = True
    return Played(clock, idle) if all(at == len(steps) for at, steps in zip(position, found)) else None


def needed(step: Step, count: int) -> List[Step]:
    if step.kind == FORWARD:
        return [step._replace(task_graph=step.task_graph - 1)] * (step.task_graph > 0)
    if step.kind == WEIGHT:
        return [step._replace(kind=BACKWARD)]
    later = [step._replace(task_graph=step.task_graph + 1)] * (step.task_graph < count - 1)
    return [step._replace(kind=FORWARD), *later]


def laid_out(name: str, stages: int, micro_batches: int, each: int = 1) -> Tuple[Sequence[Sequence[Step]], int]:
    """The orders of a pipeline as a plan has them, and how many TaskGraphs there are."""
    row, count = SCHEDULES[name], stages * each
    warmups = warmup_depths(row.policy or "PA", count, None, micro_batches) if row.folding is None else (1,) * count
    return orders(name, micro_batches, warmups, row.folding(count, each) if row.folding else None), count


def most_alive(steps: Sequence[Step], last: str = BACKWARD) -> int:
    alive, most = 0, 0
    for step in steps:
        alive += (step.kind == FORWARD) - (step.kind == last)
        most = max(most, alive)
    return most


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), COUNTS, st.integers(2, 4))
def test_every_step_once_and_no_stage_waits_for_ever(name: str, stages: int, micro_batches: int, each: int) -> None:
    row = SCHEDULES[name]
    each = 1 if row.folding is None else 2 if name == "zero_bubble_v" else each
    found, count = laid_out(name, stages, micro_batches, each)
    kinds = (FORWARD, BACKWARD, WEIGHT) if row.splits else (FORWARD, BACKWARD)
    assert len(found) == stages
    assert sorted(step for steps in found for step in steps) == sorted(
        Step(kind, m, t) for kind in kinds for m in range(micro_batches) for t in range(count))
    assert play(found, count) is not None


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_bubbles_are_those_of_the_papers(stages: int) -> None:
    for micro_batches in range(2 * stages - 1, 16):
        rest = stages - 1
        for name, idle, ends in (("backward_first", 3 * rest, 3 * rest), ("gpipe", 3 * rest, 3 * rest),
                                 ("zero_bubble_h1", rest, rest), ("zero_bubble_h2", 0, rest)):
            played = play(*laid_out(name, stages, micro_batches))
            assert played is not None and (max(played.idle), max(played.ends)) == (idle, 3 * micro_batches + ends), name
        for each in (2, 3):  # in units of a smaller step
            played = play(*laid_out("interleaved", stages, micro_batches, each))
            assert played is not None
            assert micro_batches % stages or max(played.ends) == 3 * micro_batches * each + 3 * rest
        played = play(*laid_out("zero_bubble_v", stages, micro_batches, 2))
        assert played is not None and rest <= max(played.ends) - 6 * micro_batches <= rest + max(0, stages - 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_memory_is_that_of_the_papers(stages: int) -> None:
    for micro_batches in range(2 * stages - 1, 14):
        held = {name: in_flight(*laid_out(name, stages, micro_batches)) for name in ("backward_first", "gpipe", "zero_bubble_h1",
                                                                                     "zero_bubble_h2")}
        assert held["backward_first"] == tuple(range(stages, 0, -1))
        assert held["gpipe"] == (micro_batches,) * stages
        assert held["zero_bubble_h1"] == (min(stages, micro_batches),) * stages
        assert held["zero_bubble_h2"] == (2 * stages - 1,) * stages
        assert max(most_alive(steps, WEIGHT) for steps in laid_out("zero_bubble_v", stages, micro_batches, 2)[0]) == min(
            2 * stages, 2 * micro_batches)
        for place, steps in enumerate(laid_out("interleaved", stages, micro_batches, 2)[0]):
            assert most_alive(steps) <= 2 * (stages - place - 1) + stages + 1


def test_pictures_of_the_docstrings() -> None:
    for name, each in (("zero_bubble_h1", 1), ("zero_bubble_h2", 1), ("zero_bubble_v", 2), ("interleaved", 2)):
        module = getattr(schedules, "zero_bubble" if name[-2:] in ("h1", "h2") else name)
        picture = " ".join((module.__globals__["__doc__"]).replace(" .", " ").split())
        for steps in laid_out(name, 2, 4, each)[0]:
            assert text(steps) in picture, name


def test_plans_know_the_names() -> None:
    assert sorted(SCHEDULES) == sorted(NAMES_IN_PLANS)


@given(st.sampled_from(["backward_first", "gpipe"]), COUNTS, COUNTS)
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
    found = orders("backward_first", num_micro_batch, warmups)
    try:
        check_warmups(warmups, num_micro_batch)
        accepted = True
    except PlanError:
        accepted = False
    assert accepted == (play(found, len(warmups)) is not None)


@given(st.integers(1, 6), COUNTS)
def test_gpipe_stages_finish_together(num_stages: int, num_micro_batch: int) -> None:
    assert play(orders("gpipe", num_micro_batch, (1,) * num_stages), num_stages) is not None


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
    assert warmup_depths(policy, 4, None, 16) == warmup_depths(policy, 4) == expected


def test_stage_short_of_memory_holds_back_the_stages_after_it() -> None:
    assert warmup_depths("PB", 4, (2, 9, 9, 9), 16) == warmup_depths("PB", 4, (2, 9, 9, 9)) == (2, 2, 2, 1)


@pytest.mark.parametrize("ratio, policy", [(0.16, "PB"), (0.10, "PB"), (0.08, "PB"), (0.06, "PA"), (0.03, "PA"), (0.0, "PA")])
def test_auto_policy_is_that_of_dapple_table_iv(ratio: float, policy: str) -> None:
    assert auto_policy(ratio) == policy


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: orders("backward_frist", 1, [1]), PlanError, "Did you mean 'backward_first'"),
        (lambda: orders("interleaved", 2, [1] * 4, (0, 0, 1, 1)), PlanError, "they are on (0, 0, 1"),
        (lambda: orders("zero_bubble_v", 2, [1] * 3, (0, 1, 2)), PlanError, "use another schedule"),
        (lambda: orders("gpipe", 0, [1]), PlanError, "num_micro_batch is 0"),
        (lambda: orders("gpipe", 1, [0]), PlanError, "warmups are (0"),
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
