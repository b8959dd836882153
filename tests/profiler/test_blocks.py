"""Repeated blocks of a chain, and where it is cut otherwise."""
from __future__ import annotations

from typing import List, Sequence

import numpy as np
import pytest

from whale_tf.ir.graph import OpGraph
from whale_tf.profiler.blocks import Repeat, block_starts, fine_starts, layer_starts, quiet_starts, repeats
from whale_tf.profiler.chain import Chain


def chain(types: str, crossing: Sequence[float] = (), flops: Sequence[float] = (), names: Sequence[str] = ()) -> Chain:
    """One op for each letter, its type."""
    graph = OpGraph()
    for number, letter in enumerate(types):
        graph.add(names[number] if names else f"op{number}", letter, (), [((4, 4), "float32")])
    count = len(types)
    work = np.array(flops or [1.0] * count)
    zeros = np.zeros(count)
    return Chain(graph, tuple((i,) for i in range(count)), ((),) * count, work, 2 * work, zeros, zeros, zeros, zeros,
                 np.array(list(crossing) or [1.0] * count), 1)


def test_repeated_part_is_found_with_its_shortest_period() -> None:
    assert repeats(chain("xx" + "abc" * 4 + "y")) == [Repeat(2, 12, 3)]


def test_two_repeated_parts_are_found_in_order() -> None:
    assert repeats(chain("p" + "ab" * 3 + "q" + "cde" * 4 + "r")) == [Repeat(1, 6, 2), Repeat(8, 12, 3)]


def test_shapes_tell_blocks_apart() -> None:
    wide = chain("abab")
    wide.graph.tensors[2:] = [t._replace(shape=(8, 8)) for t in wide.graph.tensors[2:]]
    assert repeats(wide) == []


def test_cheap_repeated_part_does_not_count() -> None:
    assert repeats(chain("aaaz", flops=[1, 1, 1, 1000])) == []


def test_blocks_start_where_fewest_bytes_cross() -> None:
    # behind every b (places 1, 4, 7, 10) little crosses
    crossing = [9, 1, 9] * 4
    assert block_starts(chain("abc" * 4, crossing)) == {2, 5, 8, 11}


def test_of_equal_places_blocks_start_where_their_name_scope_does() -> None:
    names = [f"layer_{i // 3}/op{i}" for i in range(1, 13)]
    assert block_starts(chain("abc" * 4, names=names)) == {2, 5, 8, 11}


def test_layers_are_the_blocks_and_quiet_places_outside() -> None:
    found = layer_starts(chain("xyz" + "ab" * 4 + "uvw"), limit=20)
    assert found == [0, 1, 2, 3, 5, 7, 9, 11, 12, 13]


def test_fine_starts_cut_inside_blocks_too() -> None:
    assert fine_starts(chain("ab" * 4), limit=20) == list(range(8))


@pytest.mark.parametrize("limit", [4, 8, 16])
def test_quiet_starts_take_one_quiet_place_in_each_part(limit: int) -> None:
    random = np.random.RandomState(0)
    crossing: List[float] = random.randint(1, 100, 200).astype(float).tolist()
    work = random.rand(200).tolist()
    found = quiet_starts(chain("a" * 200, crossing, work), limit)
    assert len(found) <= limit and found == sorted(set(found)) and 0 not in found
    mean = np.mean([crossing[start - 1] for start in found])
    assert mean < np.mean(crossing) / 3
    parts = np.diff([0.0] + [sum(work[:start]) for start in found] + [sum(work)])
    assert parts.max() <= 2.0 * sum(work) / limit + max(work)


def test_merging_keeps_all_work_and_the_crossings_at_the_cuts() -> None:
    whole = chain("abcdef", crossing=[1, 2, 3, 4, 5, 0], flops=[1, 2, 3, 4, 5, 6])
    merged = whole.merged([0, 2, 5])
    assert merged.ops == ((0, 1), (2, 3, 4), (5,))
    assert merged.forward_flops.tolist() == [3, 12, 6] and merged.crossing_bytes.tolist() == [2, 5, 0]
