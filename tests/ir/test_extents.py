"""Sizes are exact polynomials of the batch; evaluators agree with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from whale_tf.errors import GraphError
from whale_tf.ir import extents
from whale_tf.ir.evaluate import evaluate
from whale_tf.ir.extents import Size, as_value, batch_size, scalar, vector

T = Size.of(("dim", 3, 1))


def test_arithmetic_is_polynomial() -> None:
    size = (2 * batch_size + 1) * T - T
    assert size == 2 * batch_size * T
    assert size // T == 2 * batch_size and size // (2 * batch_size) == T
    assert size - size == 0 and isinstance(size - size, int)
    assert (batch_size + 3).counts == {"": 1} and (batch_size + 3).constant == 3 and size.counts is None
    assert (batch_size * batch_size).counts is None
    assert (4 * batch_size + 2).at(5) == 22 and size.at(5) == 10 * T


@pytest.mark.parametrize("size, surplus", [(batch_size + 3, 3), (2 * batch_size * T, 0), (batch_size * T - 1, -1), (T, None),
                                           (batch_size + T, None), (batch_size * batch_size, None)])
def test_sum_over_parts_is_above_the_whole_by_the_surplus_of_each(size: Size, surplus: int) -> None:
    assert size.surplus == surplus


@pytest.mark.parametrize("a, b", [(batch_size, 2), (batch_size + 1, 3), (T, batch_size), (6 * batch_size, batch_size + 1)])
def test_inexact_division_is_refused(a: Size, b: Size) -> None:
    with pytest.raises(ValueError):
        a // b


def test_maximum_takes_sizes_to_be_at_least_one() -> None:
    assert extents.maximum(batch_size, 1) == batch_size
    assert extents.maximum(3 * batch_size, batch_size) == 3 * batch_size
    assert extents.minimum(batch_size, 1) == 1
    with pytest.raises(ValueError):
        extents.maximum(batch_size, 5)


@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("a, b, expected", [
    ([batch_size, 4], [4], ([], [0])), ([batch_size, 1], [batch_size, 4], ([1], [])), ([4], [batch_size, 3, 4], ([0, 1], [])),
    ([1, 1], [1], ([0, 1], [0, 1])), ([1, batch_size], [1, batch_size], ([], [])), ([1, 2], [1, 1], ([0], [0, 1])),
])
def test_broadcast_gradient_axes(batch: int, a: list, b: list, expected: tuple) -> None:
    assert extents.broadcast_gradient_args(a, b) == expected
    numbers = [[s.at(batch) if isinstance(s, Size) else s for s in shape] for shape in (a, b)]
    assert extents.broadcast_gradient_args(*numbers) == expected


def test_unknown_sizes_before_the_batch_make_the_axes_doubtful() -> None:
    with pytest.raises(ValueError):
        extents.broadcast_gradient_args([T, batch_size], [4, batch_size])


def test_reduced_shape_of_a_dynamic_mean() -> None:
    """math_ops.reduced_shape and the Mean gradient's divisor, on [b, 3, 4] over axes [0, 2]."""
    shape, axes = vector([batch_size, 3, 4]), as_value([0, 2])
    kept, = evaluate("DynamicStitch", {}, [as_value([0, 1, 2]), axes, shape, as_value([1, 1])]) or []
    assert list(kept) == [1, 3, 1]
    scaling, = evaluate("FloorDiv", {}, [shape, evaluate("Maximum", {}, [kept, as_value(1)])[0]]) or []  # type: ignore
    assert list(scaling) == [batch_size, 1, 4]
    whole, = evaluate("Prod", {}, [shape, as_value([0])]) or []
    assert whole[()] == 12 * batch_size


CASES = [
    ("StridedSlice", {"shrink_axis_mask": 1}, [[7, 8, 9], [1], [2], [1]]),
    ("StridedSlice", {"begin_mask": 1, "end_mask": 1}, [[7, 8, 9], [0], [0], [-1]]),
    ("Slice", {}, [[7, 8, 9], [1], [-1]]), ("GatherV2", {}, [[7, 8, 9], [2, 0], 0]), ("Pack", {"axis": 0}, [1, 2, 3]),
    ("ConcatV2", {}, [[1, 2], [3], 0]), ("Reshape", {}, [[1, 2, 3, 4], [2, 2]]), ("Transpose", {}, [[[1, 2], [3, 4]], [1, 0]]),
    ("Max", {"keep_dims": True}, [[[1, 5], [3, 4]], [1]]), ("Sum", {}, [[[1, 5], [3, 4]], [0]]), ("Tile", {}, [[1, 2], [2]]),
    ("Range", {}, [1, 9, 3]), ("Fill", {}, [[2], 5]), ("InvertPermutation", {}, [[2, 0, 1]]), ("ListDiff", {}, [[0, 1, 2], [1]]),
    ("SplitV", {}, [[1, 2, 3], [1, 2], 0]), ("Split", {"num_split": 2}, [0, [1, 2, 3, 4]]), ("Unpack", {"axis": 0}, [[1, 2]]),
    ("ConcatOffset", {}, [1, [2, 3], [2, 4]]), ("Pad", {}, [[1, 2], [[1, 0]]]), ("FloorMod", {}, [[5, -1], 3]),
    ("Equal", {}, [[1, 2], [1, 3]]), ("ExpandDims", {}, [[1, 2], 0]), ("Squeeze", {"squeeze_dims": [0]}, [[[1, 2]]]),
]


@pytest.mark.parametrize("op, attrs, inputs", CASES)
def test_evaluators_on_numbers(op: str, attrs: dict, inputs: list) -> None:
    from tests.ir.reference import REFERENCE  # the same op types, written with plain NumPy

    results = evaluate(op, attrs, [as_value(x) for x in inputs])
    expected = REFERENCE[op](attrs, [np.array(x) for x in inputs])
    assert results is not None
    for result, value in zip(results, expected):
        np.testing.assert_array_equal(result.astype(int), value)


ROWS = [[1, 2], [3, 4]]


@pytest.mark.parametrize("op, attrs, inputs, expected", [
    ("SplitV", {}, [[1, 2, 3, 4], [-1, 1], 0], [[1, 2, 3], [4]]), ("SplitV", {}, [[1, 2, 3, 4], [1, -1, 2], 0], [[1], [2], [3, 4]]),
    ("Cast", {"DstT": "bool"}, [[5, 0]], [[1, 0]]), ("Cast", {"DstT": "int64"}, [[5, 0]], [[5, 0]]),
    ("Select", {}, [[1, 0], ROWS, [[5, 6], [7, 8]]], [[[1, 2], [7, 8]]]), ("Select", {}, [0, ROWS, [[5, 6], [7, 8]]], [[[5, 6], [7, 8]]]),
    ("Equal", {"incompatible_shape_error": False}, [[1, 2], [1, 2, 3]], [0]),
    ("NotEqual", {"incompatible_shape_error": False}, [[1, 2], [1, 2, 3]], [1]),
    ("SelectV2", {}, [[1, 0], ROWS, [[5, 6], [7, 8]]], [[[1, 6], [3, 8]]]),
])
def test_values(op: str, attrs: dict, inputs: list, expected: list) -> None:
    results = evaluate(op, attrs, [as_value(x) for x in inputs])
    assert results is not None and [result.tolist() for result in results] == expected


def test_what_cannot_be_known_is_none() -> None:
    assert evaluate("Cast", {"DstT": "bool"}, [vector([T])]) is None
    assert evaluate("DynamicStitch", {}, [as_value(0), as_value(1), as_value([5, 6]), as_value([7, 8])]) is None
    assert evaluate("FloorDiv", {}, [as_value(vector([batch_size])), as_value([2])]) is None
    assert evaluate("Less", {}, [vector([batch_size]), as_value([5])]) is None
    assert evaluate("Range", {}, [as_value(0), vector([batch_size])[0:1].reshape(()), as_value(1)]) is None
    equal = evaluate("Equal", {}, [vector([batch_size, 2 * batch_size]), vector([batch_size, batch_size])])
    assert equal is not None and list(equal[0]) == [1, 0]


@pytest.mark.parametrize("op, attrs, inputs", CASES + [
    ("FloorDiv", {}, [[4, 6], [2, 3]]), ("Maximum", {}, [[1, 2], 3]), ("Prod", {}, [[2, 3], [0]]), ("Less", {}, [[1, 2], 2]),
    ("DynamicStitch", {}, [[0], [1], [2], [3]]), ("BroadcastArgs", {}, [[1, 3], [2, 3]]), ("Select", {}, [1, 2, 3]),
])
@pytest.mark.parametrize("size", [batch_size, 2 * batch_size + 1, T])
def test_no_evaluator_fails_on_sizes(op: str, attrs: dict, inputs: list, size: Size) -> None:
    """Each number in turn is one that nobody knows: either the rest says enough, or there is no value."""
    for position, operand in enumerate(inputs):
        for index in np.ndindex(*np.shape(operand)):
            values = [as_value(x).copy() for x in inputs]
            values[position][index] = size
            evaluate(op, attrs, values)


@pytest.mark.parametrize("op, attrs, inputs, message", [
    ("Reshape", {}, [[1, 2, 3], [2, 2]], "cannot reshape"),
    ("ConcatV2", {}, [[1, 2], [[3]], 0], "dimension"), ("Split", {}, [0, [1, 2]], "KeyError: 'num_split'"),
])
def test_what_no_graph_can_hold_is_an_error_that_names_the_op(op: str, attrs: dict, inputs: list, message: str) -> None:
    with pytest.raises(GraphError, match=f"'broken' \\({op}\\) cannot be evaluated for operands .*{message}"):
        evaluate(op, attrs, [as_value(x) for x in inputs], "broken")


def test_what_fails_if_it_runs_has_no_value() -> None:
    assert evaluate("GatherV2", {}, [as_value([7, 8]), as_value([2]), as_value(0)]) is None
    assert evaluate("StridedSlice", {"shrink_axis_mask": 1}, [as_value(x) for x in ([7, 8], [2], [3], [1])]) is None


def test_division_by_zero_and_unwritten_elements_have_no_value() -> None:
    assert evaluate("FloorDiv", {}, [as_value(1), as_value(0)]) is None
    assert evaluate("FloorMod", {}, [scalar(batch_size), as_value(0)]) is None
    assert evaluate("DynamicStitch", {}, [as_value([1]), as_value([5])]) is None
