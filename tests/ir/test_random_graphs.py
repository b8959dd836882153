"""Random graphs: whatever the analysis gives a layout and does not call inexact merges to the whole's values."""

from __future__ import annotations

import warnings
from typing import List

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.ir import generator, interpreter
from whale_tf.ir.batch_axis import analyse
from whale_tf.ir.extents import is_counted

PARTS = ([1, 4, 2], [3, 4], [1, 1, 5])


def check(draw: generator.Draw, parts: List[int], steps: int = 25) -> float:
    """Compare all tensors of a random graph; the share of those that change with the batch that could be compared."""
    grown = generator.grow(draw, steps)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        axis = analyse(grown.graph, grown.sources)
        merged = interpreter.run_in_clones(grown.graph, axis, grown.feed, parts)
    divided = [t for t in grown.values if t in axis.layouts]
    compared = 0
    for tensor in divided:
        extent = axis.extents.get(tensor)
        if tensor not in merged or (extent is not None and any(not is_counted(s) for s in extent.flat)):
            continue
        compared += 1
        np.testing.assert_allclose(merged[tensor], grown.values[tensor], rtol=1e-9, atol=1e-9,
                                   err_msg=f"{grown.graph.tensor_name(tensor)} ({axis.layout(tensor)})")
    return compared / max(1, len(divided))


@hypothesis.given(st.data(), st.sampled_from(PARTS))
def test_random_graphs_divide_exactly(data: st.DataObject, parts: List[int]) -> None:
    random = np.random.RandomState(data.draw(st.integers(0, 2**31 - 1)))
    check(lambda n: int(random.randint(n)), parts)


@pytest.mark.slow
def test_most_of_what_is_generated_can_be_divided() -> None:
    """The test above would pass if everything were refused."""
    shares = []
    for seed in range(150):
        random = np.random.RandomState(seed)
        shares.append(check(lambda n, random=random: int(random.randint(n)), PARTS[seed % 3]))
    assert np.mean(shares) > 0.8
