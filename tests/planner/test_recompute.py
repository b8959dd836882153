"""What a row of parts keeps, against all choices there are."""
from __future__ import annotations

import itertools
from typing import Iterator, Tuple

import numpy as np
import pytest

from whale_tf.planner.recompute import BOUNDS, Choice, RecomputableParts


def parts(seed: int, size: int, in_flight: int) -> RecomputableParts:
    """What crosses depends on where a segment begins, and some of it no backward op reads."""
    random = np.random.RandomState(seed)
    held, seconds = random.randint(1, 100, size).astype(float), random.randint(1, 50, size).astype(float)
    crossing = np.triu(random.randint(1, 20, (size, size)).astype(float))
    crossing[:, -1] = 0.0
    return RecomputableParts(held, seconds, crossing, np.floor(crossing / random.randint(1, 4, (size, size))), in_flight)


def every_choice(row: RecomputableParts) -> Iterator[Choice]:
    """All ways to cut the row, and to drop segments of it or, of one part, to keep them."""
    for cuts in itertools.product((False, True), repeat=row.size - 1):
        ends = [q for q, is_end in enumerate(cuts) if is_end] + [row.size - 1]
        spans = list(zip([0] + [end + 1 for end in ends], ends))
        for drops in itertools.product((False, True), repeat=len(spans)):
            if all(drop or p == q for drop, (p, q) in zip(drops, spans)):
                yield priced(row, [(p, q, drop) for drop, (p, q) in zip(drops, spans)])


def priced(row: RecomputableParts, spans: "list[Tuple[int, int, bool]]") -> Choice:
    """With one micro-batch in flight the last segment is not dropped really: the backward pass begins with it."""
    kept = seconds = largest = 0.0
    segments = []
    for p, q, is_dropped in spans:
        is_still_there = is_dropped and q == row.size - 1 and row.in_flight == 1
        segments.append((q, is_dropped and not is_still_there))
        if is_dropped:
            kept += row.crossing[p, q]
            seconds += 0.0 if is_still_there else row.seconds[p:q + 1].sum()
            largest = max(largest, row.held[p:q + 1].sum())
        else:
            kept += row.held[q] + row.unread[q, q]
    return Choice(row.in_flight * kept + largest, seconds, tuple(segments))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("in_flight", [1, 3])
def test_smallest_is_the_least_of_all(seed: int, in_flight: int) -> None:
    """Of equal ones the fastest.  All held at once, without cuts, keeps nothing else."""
    row = parts(seed, 6, in_flight)
    everything = Choice(in_flight * row.held.sum(), 0.0, tuple((part, False) for part in range(row.size)))
    choices = [everything, *every_choice(row)]
    found, best = row.smallest(), min((choice.memory, choice.seconds) for choice in choices)
    assert found[:2] == best and found in choices


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_fastest_fits_and_is_within_two_percent_of_memory(seed: int, in_flight: int, share: float) -> None:
    """Memory is counted in steps of the budget, rounded up for each segment: the answer is as fast as the best in a budget that
    is smaller by one step for each part."""
    row = parts(seed, 6, in_flight)
    choices = list(every_choice(row))
    least = row.smallest().memory
    budget = least + share * (row.memory_without - least)
    found = row.fastest(budget)
    assert found is not None and found.memory <= budget
    assert found.seconds >= min([choice.seconds for choice in choices if choice.memory <= budget], default=0.0)
    assert found.seconds <= min([choice.seconds for choice in choices if choice.memory <= budget * (1 - row.size / 512)],
                                default=np.inf)
    same = [choice for choice in choices if choice.segments == found.segments]
    assert any(choice.seconds == found.seconds and choice.memory <= found.memory + 1e-9 for choice in same)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("in_flight", [1, 3])
def test_frontier_has_the_fastest_of_all_choices_for_every_memory(seed: int, in_flight: int) -> None:
    row = parts(seed, 6, in_flight)
    choices = [(choice.memory, choice.seconds) for choice in every_choice(row)] + [(row.memory_without, 0.0)]
    frontier = row.frontier()
    assert set(frontier) <= set(choices) and frontier == sorted(frontier)
    for memory, seconds in choices:
        assert min(some_s for held, some_s in frontier if held <= memory) <= seconds


def test_many_sizes_of_segments_are_sampled() -> None:
    row = parts(0, 12, 3)
    sizes = {row.held[p:q + 1].sum() for p in range(12) for q in range(p, 12)}
    assert len(sizes) > BOUNDS and len(row._bounds()) == BOUNDS and sizes.issuperset(row._bounds())
    assert row._bounds()[0] == min(sizes) and row._bounds()[-1] == max(sizes) == row.held.sum()
    few = parts(0, 6, 3)
    few = few._replace(held=few.held * [0, 1, 1, 1, 1, 1])
    assert few._bounds().tolist() == sorted({few.held[p:q + 1].sum() for p in range(6) for q in range(p, 6)} - {0})


def test_nothing_fits() -> None:
    row = parts(0, 6, 2)
    assert row.fastest(0.9 * row.smallest().memory) is None


def test_choice_says_which_parts_are_dropped() -> None:
    """Four equal parts and little that crosses: as little as possible is kept if two are dropped at a time."""
    size = 4
    crossing = np.array([[1.0 if p <= q < size - 1 else 0.0 for q in range(size)] for p in range(size)])
    row = RecomputableParts(np.full(size, 100.0), np.ones(size), crossing, np.zeros((size, size)), 2)
    assert row.smallest().segments == ((0, True), (1, True), (2, True), (3, True))
    assert row.smallest().memory == 2 * 3 + 100


def row_of(held: "list[float]", seconds: "list[float]", crossing: "list[list[float]]", in_flight: int) -> RecomputableParts:
    """No tensor crosses that no backward op reads."""
    return RecomputableParts(np.array(held), np.array(seconds), np.array(crossing), np.zeros((len(held), len(held))), in_flight)


def test_memory_is_counted_in_512_parts_of_the_budget() -> None:
    """Rounded up, and what takes the whole budget fits.  Nothing is dropped under a bound of 0."""
    row = row_of([100.0], [3.0], [[0.0]], 2)
    kept = ((0, False),)
    assert row._within(1000.0, 0.0) == [Choice(1000.0 * 103 / 512, 0.0, kept)]
    assert row._within(512.0, 0.0) == [Choice(200.0, 0.0, kept)]
    assert row._within(200.0, 0.0) == [Choice(200.0, 0.0, kept)] and row._within(199.0, 0.0) == []


def test_slower_choice_of_the_same_memory_replaces_none() -> None:
    """The whole row is still there when the backward pass begins; cut in two, its first part would be computed again."""
    row = row_of([100.0, 100.0], [1.0, 5.0], [[10.0, 10.0], [0.0, 0.0]], 1)
    found, = row._within(220.0, 200.0)
    assert (found.seconds, found.segments) == (0.0, ((1, False),))


def test_everything_is_kept_where_that_is_the_least() -> None:
    """Between parts more crosses than backward ops read."""
    row = row_of([10.0, 10.0], [1.0, 1.0], [[50.0, 50.0], [0.0, 50.0]], 2)
    assert row.smallest() == Choice(40.0, 0.0, ((0, False), (1, False)))


def test_segments_of_a_byte_are_bounds_too() -> None:
    assert row_of([0.0, 1.0, 4.0], [1.0] * 3, [[0.0] * 3] * 3, 2)._bounds().tolist() == [1.0, 4.0, 5.0]
