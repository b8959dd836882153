"""The rule by which two steps are equal, without TensorFlow."""
from __future__ import annotations

from typing import Any, Dict, List

import numpy as np
import pytest

from whale_tf.errors import MismatchError
from whale_tf.runtime.verifying.compare import (
    GRADIENT,
    LOSS,
    TENSOR,
    TOLERANCE,
    VALUE,
    Item,
    check,
    compare,
    is_skipped,
    key,
    shown,
    summary,
    table,
)

ONES = np.ones(100)


def item(found: Any, expected: Any = ONES, name: str = "x:0", what: str = TENSOR, order: int = 0, dtype: str = "float64",
         **more: Any) -> Item:
    return Item(name, what, order, "stage 0", "sharded(dim=0)", dtype, np.asarray(found), np.asarray(expected), **more)


def is_equal(*items: Item) -> List[bool]:
    return [one.is_equal for one in compare(items)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tolerance_follows_from_the_type(dtype: str) -> None:
    within, beyond = ONES * (1 + 0.9 * TOLERANCE[dtype]), ONES * (1 + 1.1 * TOLERANCE[dtype])
    assert is_equal(item(within, dtype=dtype), item(beyond, dtype=dtype)) == [True, False]


def test_small_gradient_is_judged_beside_the_largest() -> None:
    large = item(ONES, what=GRADIENT, is_backward=True)
    noise = item(1e-12 * ONES, 2e-12 * ONES, what=GRADIENT, is_backward=True)
    wrong = item(1e-6 * ONES, 2e-6 * ONES, what=GRADIENT, is_backward=True)
    assert is_equal(large, noise, wrong) == [True, True, False]


def test_new_value_is_judged_by_its_change() -> None:
    old = 1000.0 * ONES
    right, wrong = old + 1e-6, old + 2e-6  # an update that is made twice changes the value itself by one part in 10^9
    assert is_equal(item(right, right, before=old), item(wrong, right, before=old)) == [True, False]
    assert is_equal(item(old + 2e-13, old, before=old)) == [True]  # rounding of the value itself


def test_integers_shapes_and_nan() -> None:
    count = np.arange(3)
    assert is_equal(item(count, count, dtype=""), item(count + 1, count, dtype="")) == [True, False]
    assert is_equal(item(ONES[:50]), item(ONES * np.nan), item(ONES * np.nan, ONES * np.nan)) == [False, False, True]
    assert is_equal(item(ONES * np.inf, ONES * np.inf)) == [True]


def test_scaled_gradients_that_overflow_are_skipped() -> None:
    """They may do so in one order of a sum and not in another."""
    found = compare([item(ONES * np.inf, what=GRADIENT, is_backward=True, is_scaled=True),
                     item(ONES * np.nan, ONES * np.inf, what=GRADIENT, is_backward=True, is_scaled=True),
                     item(1e-6 * ONES, 2e-6 * ONES, what=GRADIENT, is_backward=True, is_scaled=True),
                     item(ONES * np.inf, what=GRADIENT, is_backward=True)])
    assert [one.is_equal for one in found] == [True, True, False, False]
    assert "skipped" in table(found) and "skips it because of 2 of them" in summary(found, {}, 0.0, "it") and is_skipped(found)


def test_what_rounding_may_do_is_no_difference() -> None:
    """A ReLU at 0: the local step itself moves as far if its variables are moved by some units."""
    flipped = item(ONES + 1e-6, what=GRADIENT)
    calls = []

    def moved() -> Dict[str, np.ndarray]:
        calls.append(1)
        return {key(flipped): ONES - 1e-6}

    assert [one.is_equal for one in compare([flipped], moved)] == [True] and len(calls) == 1
    assert [one.is_equal for one in compare([item(ONES)], moved)] == [True] and len(calls) == 1, "only if something differs"
    assert [one.is_equal for one in compare([flipped], lambda: {key(flipped): ONES + 1e-9})] == [False]


def test_first_difference_is_named() -> None:
    items = [item(2 * ONES, name="late:0", order=9, what=LOSS), item(1.5 * ONES, name="early:0", order=3), item(ONES, order=1)]
    text = (r"tensor 'early:0' of TaskGraph 'stage 0' \(sharded\(dim=0\)\): norm 15 in the divided step and 10 in the local one.*"
            "first of 2 values that differ, of 3")
    with pytest.raises(MismatchError, match=text) as error:
        check(compare(items), "this graph")
    assert (error.value.tensor, error.value.task_graph) == ("early:0", "stage 0")


def test_table_and_the_line() -> None:
    found = compare([item(ONES), item(2 * ONES, name="y:0", what=VALUE)])
    text = table(found)
    assert "NO" in text and "yes" in text and "sharded(dim=0)" in text and shown(found).row_count == 2
    line = summary(found[:1], {"noise:0": "random numbers"}, 1.25, "this graph")
    assert "equals the local one in 1 tensor" in line and "delayed it by 1.2 s" in line and "noise:0 (random numbers)" in line
