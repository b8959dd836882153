"""Bridges against counting examples one by one."""
from __future__ import annotations

from typing import List, Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from whale_tf.bridges import Cuts, crossing, cuts, pattern


@pytest.mark.parametrize("producer,consumer,name", [
    (2, 2, "one-to-one"), (1, 3, "split"), (3, 1, "concat"), (4, 2, "concat"), (2, 4, "split"), (2, 3, "split-concat"),
    (3, 2, "split-concat")])
def test_patterns_of_dapples_figure_9(producer: int, consumer: int, name: str) -> None:
    assert pattern(cuts(producer), cuts(consumer)) == name


def test_equal_counts_with_other_slices_are_not_one_to_one() -> None:
    assert pattern(cuts(2), cuts(2, (3, 1))) == "split-concat"


def test_bridge_that_cuts_for_one_consumer_and_not_for_another() -> None:
    """Consumer 0 puts producers 0 and 1 together, consumers 1 and 2 get halves of producer 2."""
    assert pattern(cuts(3, (1, 1, 2)), cuts(3, (2, 1, 1))) == "split-concat"


def owners(bounds: Cuts, examples: int) -> List[int]:
    """Replica of each example, cut at whole examples as the rewriter does."""
    edges = [int(examples * cut) for cut in bounds]
    return [replica for replica in range(len(edges) - 1) for _ in range(edges[replica], edges[replica + 1])]


slices = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@hypothesis.given(slices, slices, st.integers(1, 40))
def test_every_example_a_consumer_needs_is_read(one: Sequence[int], other: Sequence[int], examples: int) -> None:
    producer, consumer = cuts(len(one), one), cuts(len(other), other)
    made, used = owners(producer, examples), owners(consumer, examples)
    for replica in range(len(other)):
        found = crossing(producer, consumer, replica)
        needed = {source for source, user in zip(made, used) if user == replica}
        assert needed <= set(found.producers)
        if found.covers:
            read = [i for i, source in enumerate(made) if source in found.producers]
            assert read == [i for i, user in enumerate(used) if user == replica]
