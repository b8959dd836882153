"""The allocator by hand, and its invariants on random lives."""

from __future__ import annotations

import numpy as np
import pytest

from whale_tf.simulator.allocator import UNIT, Arena, reach_of

pytestmark = pytest.mark.once
MIB = 1 << 20


def test_sizes_are_multiples_of_the_unit_and_freed_neighbours_join() -> None:
    arena = Arena()
    a, b, c = arena.take(1), arena.take(UNIT + 1), arena.take(UNIT)
    assert (a, b, c) == ((0, UNIT), (UNIT, 2 * UNIT), (3 * UNIT, UNIT))
    arena.give_back(a)
    arena.give_back(b)
    assert arena.take(3 * UNIT) == (0, 3 * UNIT) and arena.reach == 4 * UNIT


def test_smallest_chunk_that_fits_is_taken_whole_unless_it_is_twice_as_large() -> None:
    arena = Arena()
    held = [arena.take(size * UNIT) for size in (8, 1, 3, 1)]
    arena.give_back(held[0])
    arena.give_back(held[2])
    assert arena.take(2 * UNIT) == held[2], "3 units for 2: not split"
    assert arena.take(2 * UNIT) == (0, 2 * UNIT), "8 units for 2: split"
    large = Arena()
    first, _ = large.take(400 * MIB), large.take(1)
    large.give_back(first)
    assert large.take(250 * MIB) == (0, 250 * MIB), "more than 128 MiB would be lost"


def test_holes_make_the_memory_reach_further_than_the_tensors() -> None:
    """Two tensors of 2 around a small one that stays: one of 4 does not fit into the holes that they leave."""
    sizes, born, dies = [2.0 * MIB, 1.0 * MIB, 2.0 * MIB, 1.0 * MIB, 4.0 * MIB], [0, 1, 2, 3, 5], [4, 9, 4, 9, 9]
    assert reach_of(sizes, born, dies) == 10 * MIB
    assert reach_of(sizes, born, dies, kept=[MIB]) == 11 * MIB


def test_chunks_never_overlap_and_everything_is_joined_in_the_end() -> None:
    random = np.random.RandomState(0)
    arena, held = Arena(), []
    for _ in range(2000):
        if held and random.rand() < 0.5:
            arena.give_back(held.pop(random.randint(len(held))))
        else:
            held.append(arena.take(float(random.randint(1, 100 * UNIT))))
        ordered = sorted(held)
        assert all(a + size <= b for (a, size), (b, _) in zip(ordered, ordered[1:]))
    for chunk in held:
        arena.give_back(chunk)
    assert arena._top == 0 and not arena._sizes
