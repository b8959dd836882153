"""Where the batch axis goes, pattern by pattern, on graphs of a few ops."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import pytest

from tests.ir.graphs import Draft, equal
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import (
    EXTENT,
    Known,
    Localise,
    Offset,
    Options,
    Reduce,
    Scale,
    Slice,
    Whole,
    analyse,
    find_batch_axis,
    propagate,
)
from whale_tf.ir.extents import batch_size
from whale_tf.ir.layout import Layout, Rows, partial, replicated, sharded
from whale_tf.ir.rules import rule_for

B = 8
SECTIONS = Options(sections=True)


@pytest.fixture
def g() -> Draft:
    return Draft()


def mean(g: Draft, x: int, shape: Any = (), keep: bool = False, axes: Any = (0,)) -> int:
    return g.op("Mean", [x, g.const(list(axes))], shape, attrs={"keep_dims": keep})


def test_mean_and_sum_losses_differ_in_power_only(g: Draft) -> None:
    x = g.source(B, 4)
    h = g.op("MatMul", [x, g.variable(4, 3)], (B, 3))
    average, total = mean(g, h, (3,)), g.op("Sum", [h, g.const([0])], (3,))
    by_constant = g.op("RealDiv", [total, g.const(np.float32(B))], (3,))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(h) == sharded(0)
    assert axis.layout(average) == partial(1)
    assert axis.layout(total) == partial() and axis.layout(by_constant) == partial()
    assert not axis.conversions and not axis.inexact and axis.batch == B


def test_weight_gradient_contracts_the_batch(g: Draft) -> None:
    x, dy = g.source(None, 4), g.source(None, 3)
    dw = g.op("MatMul", [x, dy], (4, 3), attrs={"transpose_a": True})
    axis = analyse(g.graph, {x: 0, dy: 0})
    assert axis.layout(dw) == partial() and axis.source_of([dw]) in (x, dy)


def test_whole_terms_join_partial_sums_by_their_power(g: Draft) -> None:
    """Sum loss + L2: adding clones must not count L2 once per clone.  Mean loss + L2: the weights do it."""
    x, w = g.source(None, 4), g.variable(4)
    penalty = g.op("L2Loss", [w], ())
    totals = g.op("Sum", [x, g.const([0, 1])], ())
    averages = mean(g, x, (), axes=(0, 1))
    sum_loss = g.op("AddV2", [totals, penalty], ())
    mean_loss = g.op("AddN", [averages, penalty], ())
    both = g.op("AddN", [totals, averages, penalty], ())
    axis = analyse(g.graph, {x: 0})
    op = g.graph.tensors
    assert axis.layout(sum_loss) == partial() and axis.conversions[op[sum_loss].op, 1] == (Scale(1),)
    assert axis.layout(mean_loss) == partial(1) and not any(k[0] == op[mean_loss].op for k in axis.conversions)
    assert axis.layout(both) == partial()
    assert axis.conversions[op[both].op, 1] == (Scale(1),) and axis.conversions[op[both].op, 2] == (Scale(1),)


def test_dynamic_divisor_has_power_minus_one(g: Draft) -> None:
    x = g.source(None, 4)
    shape = g.op("Shape", [x], (2,), dtype="int32")
    one = g.const([1])
    n = g.op("StridedSlice", [shape, g.const([0]), one, one], (), dtype="int32", attrs={"shrink_axis_mask": 1})
    count = g.op("Cast", [n], (), attrs={"DstT": "float32"})
    loss = g.op("RealDiv", [g.op("Sum", [x, g.const([0, 1])], ()), count], ())
    root = g.op("Sqrt", [count], ())
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(shape) is EXTENT and axis.extents[n][()] == batch_size
    assert axis.layout(count) == replicated(-1)
    assert axis.layout(loss) == partial(1)
    assert axis.conversions[g.graph.tensors[root].op, 0] == (Scale(-1),) and axis.layout(root) == replicated()


def test_odd_extents_become_the_whole_batch_s(g: Draft) -> None:
    x = g.source(None, 4)
    rows = g.op("Size", [x], (), dtype="int32")
    less = g.op("Sub", [rows, g.const(1)], (), dtype="int32")
    number = g.op("Cast", [less], (), attrs={"DstT": "float32"})
    axis = analyse(g.graph, {x: 0})
    assert axis.extents[less][()] == 4 * batch_size - 1
    assert axis.conversions[g.graph.tensors[number].op, 0] == (Whole((4 * batch_size - 1,)),)
    assert axis.layout(number) == replicated()


@pytest.mark.parametrize("type_, dtype, attrs", [
    ("Cast", "int32", {"DstT": "int32"}), ("Ceil", "float32", {}), ("Greater", "bool", {}), ("FloorDiv", "float32", {})])
def test_share_of_the_batch_by_which_something_is_chosen_is_exact(g: Draft, type_: str, dtype: str, attrs: dict) -> None:
    """Three of ten examples times 10 / 3 need not be ten."""
    x = g.source(None, 4)
    rows = g.op("GatherV2", [g.op("Shape", [x], (2,), dtype="int32"), g.const(0), g.const(0)], (), dtype="int32")
    number = g.op("Cast", [rows], (), attrs={"DstT": "float32"})
    share = g.op("Mul", [number, g.const(np.float32(0.7))], ())
    chosen = g.op(type_, [share] + [g.const(np.float32(7))] * (type_ in ("Greater", "FloorDiv")), (), dtype=dtype, attrs=attrs)
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(number) == axis.layout(chosen) == replicated()
    assert axis.conversions == {(g.graph.tensors[number].op, 0): (Whole((batch_size,)),)}


def test_denominator_without_parameters_is_computed_once(g: Draft) -> None:
    x, weights = g.source(None), g.source(None)
    top = g.op("Sum", [g.op("Mul", [g.op("Mul", [x, g.variable()], (None,)), weights], (None,)), g.const([0])], ())
    bottom = g.op("Sum", [weights, g.const([0])], ())
    loss = g.op("DivNoNan", [top, bottom], ())
    axis = analyse(g.graph, {x: 0, weights: 0})
    assert axis.layout(loss) == partial() and not axis.inexact
    assert axis.conversions == {(g.graph.tensors[loss].op, 1): (Reduce("sum", 0),)}


def test_ratio_of_two_trained_sums_is_inexact_unless_synchronised(g: Draft) -> None:
    x = g.source(None)
    h = g.op("Mul", [x, g.variable()], (None,))
    top, bottom = g.op("Sum", [h, g.const([0])], ()), mean(g, h)
    ratio = g.op("RealDiv", [top, bottom], (), name="ratio")
    axis = analyse(g.graph, {x: 0})
    assert [(g.graph.ops[op].name, "mean" in reason) for op, reason in axis.inexact] == [("ratio", True)]
    assert axis.layout(ratio) == partial()
    exact = analyse(g.graph, {x: 0}, options=Options(sync=lambda op: op.name == "ratio"))
    assert not exact.inexact
    assert exact.conversions == {(g.graph.tensors[ratio].op, 1): (Reduce("sum", 1),)}


def test_extremes_over_the_batch(g: Draft) -> None:
    x = g.source(None, 3)
    largest = g.op("Max", [x, g.const([0])], (3,))
    trained = g.op("Max", [g.op("Mul", [x, g.variable()], (None, 3)), g.const([0])], (3,))
    scaled, other = g.op("RealDiv", [x, largest], (None, 3)), g.op("RealDiv", [x, trained], (None, 3))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(largest) == Layout("max")
    assert axis.conversions[g.graph.tensors[scaled].op, 1] == (Reduce("max", 0),)
    assert [op for op, _ in axis.inexact] == [g.graph.tensors[other].op]
    assert axis.layout(scaled) == axis.layout(other) == sharded(0)


def test_assertion_about_some_example_is_about_all(g: Draft) -> None:
    some = g.op("Any", [g.source(None, dtype="bool"), g.const([0])], (), dtype="bool")
    g.op("Assert", [some, some], name="check")
    axis = analyse(g.graph, {0: 0})
    assert axis.conversions == {(g.graph.op("check").id, 0): (Reduce("any", 0),)}


@pytest.mark.parametrize("type_", ["Identity", "EnsureShape", "StopGradient", "Reshape"])
def test_extreme_passes_what_only_hands_it_on(g: Draft, type_: str) -> None:
    x = g.source(None, 3)
    largest = g.op("Max", [x, g.const([0])], (3,))
    again = g.op(type_, [largest, g.const([3])] if type_ == "Reshape" else [largest], (3,))
    assert analyse(g.graph, {x: 0}).layout(again) == Layout("max")


def test_batch_statistics_of_fused_batch_norm(g: Draft) -> None:
    x, scale, offset = g.source(B, 5, 5, 4), g.variable(4), g.variable(4)
    empty = g.const(np.zeros(0, np.float32))
    norm = g.op("FusedBatchNormV3", [x, scale, offset, empty, empty], (B, 5, 5, 4), (4,), (4,), (4,), (4,), (0,), name="norm",
                attrs={"is_training": True, "data_format": "NHWC"})
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(norm) == sharded(0) and axis.layout(norm + 1) == partial(1) and axis.layout(norm + 2) == partial(1)
    assert [g.graph.ops[op].name for op, _ in axis.inexact] == ["norm"]
    g.op("FusedBatchNormGradV3", [x, x, scale, norm + 3, norm + 4, norm + 5], (B, 5, 5, 4), (4,), (4,), (0,), (0,), name="back",
         attrs={"is_training": True, "data_format": "NHWC"})
    assert not analyse(g.graph, {x: 0}, options=SECTIONS).conversions, "a layer's gradient takes its own statistics"
    for name in ("norm", "back"):
        g.graph.op(name).attrs["is_training"] = False
    assert analyse(g.graph, {x: 0}).inexact == []


def test_root_of_a_mean_is_in_a_section(g: Draft) -> None:
    """The mean is one of the clones'; what follows from the root is whole; the examples' gradients are scaled by it."""
    x, w = g.source(B, 4), g.variable(4, 3)
    h = g.op("MatMul", [x, w], (B, 3))
    average = mean(g, h, (), axes=(0, 1))
    root = g.op("Sqrt", [average], ())
    double = g.op("Mul", [root, g.const(np.float32(2))], ())
    scaled = g.op("Mul", [h, double], (B, 3))
    assert analyse(g.graph, {x: 0}).inexact and not analyse(g.graph, {x: 0}).whole
    axis = analyse(g.graph, {x: 0}, options=SECTIONS)
    op = g.graph.tensors[root].op
    assert list(axis.whole) == [op] and axis.conversions == {(op, 0): (Reduce("sum", 1),)} and not axis.inexact
    assert axis.layout(root) == axis.layout(double) == replicated() and axis.layout(scaled) == sharded(0)


def test_similarities_of_all_examples_are_in_a_section(g: Draft) -> None:
    """The matrix of all pairs takes all examples; what it gives is cut into rows; what has both already joins it."""
    x, w = g.source(None, 4), g.variable(4, 3)
    z = g.op("MatMul", [x, w], (None, 3))
    pairs = g.op("MatMul", [z, z], (None, None), attrs={"transpose_b": True})
    back = g.op("MatMul", [pairs, z], (None, 3))
    gradient = g.op("MatMul", [x, back], (4, 3), attrs={"transpose_a": True})
    axis = analyse(g.graph, {x: 0}, options=SECTIONS)
    producer = [g.graph.tensors[t].op for t in (pairs, back, gradient)]
    assert axis.conversions[producer[0], 0] == axis.conversions[producer[0], 1] == (Reduce("concat"),)
    assert axis.conversions[producer[1], 1] == (Reduce("concat"),) and list(axis.whole) == producer[:2]
    assert axis.conversions[producer[2], 1] == (Slice(0),) and axis.layout(gradient) == partial()


def test_op_without_a_rule_is_in_a_section_unless_it_is_in_a_loop(g: Draft) -> None:
    x = g.source(B, 4)
    odd = g.op("PyFunc", [x], (B, 4))
    axis = analyse(g.graph, {x: 0}, options=SECTIONS)
    assert "no rule" in axis.whole[g.graph.tensors[odd].op]
    with pytest.raises(UnsupportedOpError):
        analyse(g.graph, {x: 0}).layout(odd)


def test_input_that_variables_are_applied_to_is_divided(g: Draft) -> None:
    """However undivisible its loss; the labels alone would make a batch, too."""
    x, labels = g.source(B, 4), g.source(B, dtype="int32")
    z = g.op("MatMul", [x, g.variable(4, 3)], (B, 3))
    g.op("MatMul", [z, z], (B, B), attrs={"transpose_b": True})
    g.op("OneHot", [labels, g.const(np.int32(3)), g.const(np.float32(1)), g.const(np.float32(0))], (B, 3))
    assert set(find_batch_axis(g.graph, [x, labels]).sources) == {x, labels}


def test_input_that_variables_are_applied_to_behind_a_section_is_divided(g: Draft) -> None:
    inputs = [g.source(None, dtype="int64") for _ in range(2)]
    rows = [g.op("GatherV2", [g.variable(9, 4), g.op("ReverseV2", [x, g.const([0])], (None,), dtype="int64"), g.const(0)],
                 (None, 4)) for x in inputs]
    z = g.op("MatMul", [g.op("ConcatV2", [*rows, g.const(1)], (None, 8)), g.variable(8, 3)], (None, 3))
    labels = g.source(None, 3)
    g.op("Sub", [z, labels], (None, 3))
    assert set(find_batch_axis(g.graph, [*inputs, labels]).sources) == {*inputs, labels}


def test_ragged_examples_of_a_known_number_are_divided(g: Draft) -> None:
    """Only the number of all their values is open."""
    values, splits, labels = (g.source(None, dtype="int64"), g.source(B + 1, dtype="int64"), g.source(B, 3))
    ids = g.op("RaggedTensorToTensor", [g.const([-1, -1]), values, g.const(0), splits], (B, None), dtype="int64",
               attrs={"row_partition_types": [b"ROW_SPLITS"]})
    rows = g.op("GatherV2", [g.variable(9, 4), ids, g.const(0)], (B, None, 4))
    z = g.op("MatMul", [mean(g, rows, (B, 4), axes=[1]), g.variable(4, 3)], (B, 3))
    g.op("Sub", [z, labels], (B, 3))
    axis = find_batch_axis(g.graph, [values, splits, labels])
    assert set(axis.sources) == {values, labels} and axis.batch == B
    assert analyse(g.graph, axis.sources, options=SECTIONS).layout(z) == sharded(0)


@pytest.mark.parametrize("before, dim, target, expected, blocks, localised", [
    ((B, 3, 4), 0, [B * 3, 4], 0, (3,), (3 * batch_size, 4)), ((B, 3, 4), 0, [-1, 4], 0, (3,), None),
    ((3, B, 4), 1, [3 * B, 4], 0, (1, 1, 1), (3 * batch_size, 4)), ((B, 12), 0, [B, 3, 4], 0, (1,), (batch_size, 3, 4)),
    ((3, B, 4), 1, [3, B * 4], 1, (4,), (3, 4 * batch_size)), ((B, 1, 4), 0, [1, B, 4], 1, (1,), (1, batch_size, 4)),
    ((B, 4), 0, [4 * B], 0, (4,), (4 * batch_size,)), ((B, 4), 0, [B, -1], 0, (1,), (batch_size, -1)),
])
def test_reshape_with_a_static_batch(g: Draft, before: Any, dim: int, target: Any, expected: int, blocks: Any,
                                     localised: Any) -> None:
    x = g.source(*before)
    shape = np.zeros(before).reshape(target).shape
    y = g.op("Reshape", [x, g.const(target)], shape)
    axis = analyse(g.graph, {x: dim})
    assert axis.layout(y) == sharded(expected, blocks)
    found = axis.localise.get((g.graph.tensors[y].op, 1))
    assert (found.components if found else None) == localised


@pytest.mark.parametrize("before, target, blocks", [
    ((None, 3, 4), [-1, 4], (3,)), ((None, 12), [-1, 3, 4], (1,)), ((None, 3, 4), [-1, 12], (1,))])
def test_reshape_with_a_hole_for_an_unknown_batch(g: Draft, before: Any, target: Any, blocks: Any) -> None:
    x = g.source(*before)
    y = g.op("Reshape", [x, g.const(target)], tuple(None if s == -1 else s for s in target))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(y) == sharded(0, blocks) and not axis.localise


def test_reshape_that_mixes_examples_in_front_of_an_open_batch_is_refused(g: Draft) -> None:
    """[3, b, 2] as [2, b, 3]: two thirds of what was in front."""
    x = g.source(3, None, 2)
    rows = g.op("GatherV2", [g.op("Shape", [x], (3,), dtype="int32"), g.const(1), g.const(0)], (), dtype="int32")
    y = g.op("Reshape", [x, g.op("Pack", [g.const(2), rows, g.const(3)], (3,), dtype="int32")], (2, None, 3), name="groups")
    with pytest.raises(UnsupportedOpError, match="'groups' .*the batch dimension is cut into pieces"):
        analyse(g.graph, {x: 1}).layout(y)


@pytest.mark.parametrize("type_", ["StridedSlice", "Slice", "StridedSliceGrad"])
def test_columns_cut_by_the_number_of_examples_are_refused(g: Draft, type_: str) -> None:
    x = g.source(None, 20)
    rows = g.op("GatherV2", [g.op("Shape", [x], (2,), dtype="int32"), g.const(0), g.const(0)], (), dtype="int32")
    end, zeros = g.op("Pack", [g.const(0 if "Strided" in type_ else -1), rows], (2,), dtype="int32"), g.const([0, 0])
    operands = [x, zeros, end, g.const([1, 1])][:4 if "Strided" in type_ else 3]
    y = g.op(type_, [g.op("Shape", [x], (2,), dtype="int32"), zeros, end, g.const([1, 1]), x] if "Grad" in type_ else operands,
             (None, None), attrs={"begin_mask": 3, "end_mask": 1}, name="columns")
    with pytest.raises(UnsupportedOpError, match="'columns' .*cuts another dimension than the batch by the number of examples"):
        analyse(g.graph, {x: 0}).layout(y)


def test_rounded_mean_of_a_sum_over_the_batch_is_that_of_the_whole(g: Draft) -> None:
    x = g.source(None, 3, dtype="int32")
    counts = g.op("Sum", [x, g.const([0])], (3,), dtype="int32")
    y = g.op("Mean", [counts, g.const([0])], (), dtype="int32")
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(y) == replicated() and axis.conversions == {(g.graph.tensors[y].op, 0): (Reduce("sum", 0),)}


def test_values_of_long_chains(g: Draft) -> None:
    """More ops than Python has frames for."""
    x, total = g.source(None, 4), g.const(0)
    for _ in range(2000):
        total = g.op("AddV2", [total, g.const(1)], (), dtype="int32")
    y = g.op("Reshape", [x, g.op("Pack", [g.const(-1), g.op("Sub", [total, g.const(1998)], (), dtype="int32"), g.const(2)], (3,),
                                 dtype="int32")], (None, None, 2))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(y) == sharded(0)


@pytest.mark.parametrize("before, target", [((B, 4), [2, B // 2, 4]), ((B, 4), [4, B]), ((None, 4), [-1, 3])])
def test_reshape_that_cuts_the_batch_is_refused_by_name(g: Draft, before: Any, target: Any) -> None:
    x = g.source(*before)
    y = g.op("Reshape", [x, g.const(target)], tuple(None if s == -1 else s for s in target), name="groups")
    axis = analyse(g.graph, {x: 0})
    with pytest.raises(UnsupportedOpError, match=r"'groups' \(a Reshape\) cannot be divided along the batch: .*input pipeline"):
        axis.layout(y)


def test_whole_constants_are_sliced_and_generators_made_in_part(g: Draft) -> None:
    x = g.source(B, 4)
    table = g.const(np.ones((B, 4), np.float32) * np.arange(4, dtype=np.float32))
    filled = g.op("Fill", [g.const([B, 4]), g.const(np.float32(2))], (B, 4))
    doubled = g.op("Mul", [filled, g.const(np.float32(2))], (B, 4))
    total = g.op("AddN", [x, table, doubled], (B, 4))
    axis = analyse(g.graph, {x: 0})
    op = g.graph.tensors
    assert axis.layout(total) == sharded(0)
    assert axis.conversions == {(op[total].op, 1): (Slice(0, (1,)),)}
    assert axis.localise == {(op[filled].op, 0): Localise((batch_size, 4))}
    assert axis.layout(doubled) == sharded(0) and axis.source_of([doubled]) == x


def test_generator_that_is_needed_whole_stays_whole(g: Draft) -> None:
    """B is also the width of a layer."""
    x = g.source(B, B)
    filled = g.op("Fill", [g.const([B, B]), g.const(np.float32(2))], (B, B))
    first = g.op("Add", [x, filled], (B, B))
    second = g.op("MatMul", [x, filled], (B, B))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(filled) == replicated() and not axis.localise
    assert axis.layout(first) == axis.layout(second) == sharded(0)
    assert axis.conversions == {(g.graph.tensors[first].op, 1): (Slice(0, (1,)),)}


def test_zeros_take_any_power(g: Draft) -> None:
    x = g.source(None, 4)
    gradient = g.op("RealDiv", [x, g.op("Cast", [g.op("Size", [x], (), dtype="int32")], ())], (None, 4))
    zeros = g.op("ZerosLike", [x], (None, 4))
    chosen = g.op("Select", [g.op("Greater", [x, zeros], (None, 4), dtype="bool"), gradient, zeros], (None, 4))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(chosen) == sharded(0, power=1) and not axis.conversions


@pytest.mark.parametrize("batch", [None, B])
def test_positions_move_along_the_batch(g: Draft, batch: Optional[int]) -> None:
    """BERT's masked positions: a look-up into the flattened batch is local."""
    x, i = g.source(batch, 3, 4), g.source(batch, 2, dtype="int32")
    flat = g.op("Reshape", [x, g.const([-1, 4])], (None if batch is None else 3 * batch, 4))
    shape = g.op("Shape", [x], (3,), dtype="int32")
    one = g.const([1])
    limit = g.const(batch) if batch is not None else g.op(
        "StridedSlice", [shape, g.const([0]), one, one], (), dtype="int32", attrs={"shrink_axis_mask": 1})
    rows = g.op("Range", [g.const(0), limit, g.const(1)], (batch,), dtype="int32")
    first = g.op("Reshape", [g.op("Mul", [rows, g.const(3)], (batch,), dtype="int32"), g.const([-1, 1])], (batch, 1), dtype="int32")
    index = g.op("AddV2", [i, first], (batch, 2), dtype="int32")
    found = g.op("GatherV2", [flat, index, g.const(0)], (batch, 2, 4))
    number = g.op("Square", [index], (batch, 2), dtype="int32", name="number")
    axis = analyse(g.graph, {x: 0, i: 0})
    assert axis.layout(flat) == sharded(0, (3,)) and axis.offsets[index] == 3
    assert axis.layout(found) == sharded(0)
    assert axis.conversions[g.graph.tensors[number].op, 0] == (Offset(3),)


def test_rows_of_a_variable_that_is_contracted(g: Draft) -> None:
    """The handle has no rows of its own."""
    x, handle = g.source(None, B), g.op("VarHandleOp", (), (), dtype="resource")
    y = g.op("MatMul", [x, g.op("ReadVariableOp", [handle], (B, 3))], (None, 3))
    assert analyse(g.graph, {x: 1}).layout(y) == partial()


def test_look_up_across_examples_is_refused(g: Draft) -> None:
    x, i = g.source(B, 4), g.source(B, dtype="int32")
    y = g.op("GatherV2", [x, i, g.const(0)], (B, 4), name="shuffle")
    with pytest.raises(UnsupportedOpError, match="'shuffle'.*by an index other than their own position"):
        analyse(g.graph, {x: 0, i: 0}).layout(y)


def test_rows_of_a_mean_that_is_combined_have_no_weight(g: Draft) -> None:
    x, pairs = g.source(None, 4), g.source(None, None, 4)
    rows = g.op("Reshape", [mean(g, pairs, (None, 4)), g.op("Shape", [x], (2,), dtype="int32")], (None, 4))
    axis = analyse(g.graph, {x: 0, pairs: 0}, options=SECTIONS._replace(equalities=equal(g.graph, [x, pairs])))
    assert axis.layout(rows) == sharded(0)
    assert axis.conversions[g.graph.producer(rows).id, 0] == (Reduce("sum", 1), Slice(0))


def test_joined_batches_keep_their_blocks(g: Draft) -> None:
    x, z = g.source(B, 4), g.source(B, 4)
    both = g.op("ConcatV2", [x, z, g.const(0)], (2 * B, 4))
    back = g.graph.add("back", "Split", [g.const(0), both], [((B, 4), "float32")] * 2, attrs={"num_split": 2})
    ends = [g.const(v) for v in ([B, 0], [2 * B, 4], [1, 1])]
    late = g.op("StridedSlice", [both] + ends, (B, 4), attrs={"end_mask": 2, "begin_mask": 2})
    part = g.op("Slice", [both, g.const([0, 0]), g.const([B // 2, 4])], (B // 2, 4))
    axis = analyse(g.graph, {x: 0, z: 0})
    assert axis.layout(both) == sharded(0, (1, 1))
    assert [axis.layout(t) for t in back.outputs] == [sharded(0)] * 2 and axis.layout(late) == sharded(0)
    op = g.graph.tensors[late].op
    assert axis.localise[op, 1].components[0] == batch_size and axis.localise[op, 2].components[0] == 2 * batch_size
    with pytest.raises(UnsupportedOpError, match="selects only some examples of the batch"):
        axis.layout(part)


def copies(g: Draft, *rows: Sequence[int]) -> Dict[int, int]:
    """Each op after the first one of its row -> the first one."""
    of = [[g.graph.tensors[tensor].op for tensor in row] for row in rows]
    return {op: row[0] for row in of for op in row[1:]}


def test_copies_with_equal_operands_take_the_results_of_the_first(g: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    x = g.source(B, 4)
    products = [g.op("MatMul", [x, g.variable(4, 3)], (B, 3)) for _ in range(3)]
    rows = [g.op("Reshape", [product, g.const([B * 3])], (B * 3,)) for product in products]
    sums = [g.op("Sum", [one, g.const([0])], ()) for one in rows]
    means = [g.op("RealDiv", [total, g.const(np.float32(B))], ()) for total in sums]
    mixed = [g.op("AddV2", [mean, penalty], ()) for mean, penalty in zip(means, [g.op("L2Loss", [g.variable(4)], ())] * 3)]
    alike = copies(g, products, rows, sums, means, mixed)
    visited: List[int] = []
    monkeypatch.setattr(propagate, "rule_for", lambda op, *rest: visited.append(op.id) or rule_for(op, *rest))
    axis = analyse(g.graph, {x: 0}, options=Options(alike=alike))
    assert visited and alike.keys().isdisjoint(visited)
    alone = analyse(g.graph, {x: 0})
    assert not alike.keys().isdisjoint(visited)
    for name, found in vars(alone).items():
        assert name == "graph" or repr(getattr(axis, name)) == repr(found), name
    assert axis.layout(rows[2]) == sharded(0, (3,)) and axis.localise[g.graph.tensors[rows[2]].op, 1]
    assert axis.conversions[g.graph.tensors[mixed[2]].op, 1] == (Scale(1),)


def test_copies_in_a_graph_say_nothing_about_its_functions(g: Draft) -> None:
    """Ops of a function have the same numbers as others of the graph."""
    body = Draft()
    argument = body.op("_Arg", (), (None, 4), attrs={"index": 0})
    results = [body.op(kind, [argument, body.const([0])], (4,)) for kind in ("Sum", "Max")]
    for index, result in enumerate(results):
        body.op("_Retval", [result], attrs={"index": index})
    x = g.source(None, 4)
    call = g.graph.add("call", "PartitionedCall", [x], [((4,), "float32")] * 2, body={"f": body.graph})
    axis = analyse(g.graph, {x: 0}, options=Options(alike=copies(body, results)))
    assert [axis.layout(t) for t in call.outputs] == [partial(), Layout("max")]


def test_copies_with_other_operands_are_visited_themselves(g: Draft) -> None:
    x, y = g.source(B, 4), g.source(4, B)
    products = [g.op("MatMul", [one, g.variable(4, 3)], (B, 3)) for one in (x, g.variable(B, 4))]
    turned = [g.op("Transpose", [one, g.const(order)], (B, 4)) for one, order in ((x, [0, 1]), (y, [1, 0]))]
    parts = [g.op("Reshape", [one, g.const(shape)], tuple(shape)) for one, shape in zip(products, ([B * 3], [B * 3]))]
    added = [g.op("AddV2", [x, g.const(value)], (B, 4)) for value in (np.float32(0), np.float32(1))]
    sources = {x: 0, y: 1}
    axis = analyse(g.graph, sources, options=Options(alike=copies(g, products, turned, parts, added)))
    alone = analyse(g.graph, sources)
    assert [axis.layout(t).kind for t in products] == ["sharded", "replicated"]
    assert [axis.layout(t) for t in (*products, *turned, *parts, *added)] == [
        alone.layout(t) for t in (*products, *turned, *parts, *added)]
    assert axis.localise == alone.localise and axis.conversions == alone.conversions


def test_rows_chosen_by_data_merge_but_do_not_average(g: Draft) -> None:
    x, y = g.source(None, 4), g.source(None, dtype="int32")
    kept = g.op("Where", [g.op("NotEqual", [y, g.const(1)], (None,), dtype="bool")], (None, 1), dtype="int64")
    index = g.op("Squeeze", [kept], (None,), dtype="int64", attrs={"squeeze_dims": [1]})
    rows = g.op("GatherV2", [x, index, g.const(0)], (None, 4))
    total, average = g.op("Sum", [rows, g.const([0])], (4,)), mean(g, rows, (4,))
    count = g.op("Cast", [g.op("Size", [rows], (), dtype="int32")], ())
    axis = analyse(g.graph, {x: 0, y: 0})
    assert axis.layout(rows) == sharded(0, None) and axis.layout(total) == partial()
    assert axis.layout(count) == partial(), "counts of chosen rows add up"
    assert [op for op, _ in axis.inexact] == [g.graph.tensors[average].op]


def test_random_ops_draw_their_own_part_or_are_shared(g: Draft) -> None:
    x = g.source(None, 4)
    own = g.op("RandomUniform", [g.op("Shape", [x], (2,), dtype="int32")], (None, 4))
    shared = g.op("RandomUniform", [g.const([3, 4])], (3, 4))
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(own) == sharded(0) and axis.own_seed == [g.graph.tensors[own].op]
    assert axis.layout(shared) == replicated() and axis.shared == [g.graph.tensors[shared].op]


def test_dropout_with_a_static_batch_draws_per_clone(g: Draft) -> None:
    x = g.source(B, 4)
    noise = g.op("RandomUniform", [g.const([B, 4])], (B, 4))
    mask = g.op("Cast", [g.op("GreaterEqual", [noise, g.const(np.float32(0.1))], (B, 4), dtype="bool")], (B, 4))
    axis = analyse(g.graph, {x: 0}) if g.op("Mul", [x, mask], (B, 4)) else None
    assert axis is not None and axis.own_seed == [g.graph.tensors[noise].op] and not axis.conversions
    assert axis.localise == {(g.graph.tensors[noise].op, 0): Localise((batch_size, 4))}


@pytest.mark.parametrize("type_, attrs, inputs", [
    ("Softmax", {}, 0), ("Cumsum", {}, 1), ("ReverseV2", {}, 1), ("NoSuchOp", {}, 0)])
def test_what_needs_the_whole_batch_is_refused_when_asked_for(g: Draft, type_: str, attrs: dict, inputs: int) -> None:
    x = g.source(B)
    y = g.op(type_, [x] + [g.const([0])] * inputs, (B,), name="culprit", attrs=attrs)
    z = g.op("Tanh", [y], (B,), name="victim")
    axis = analyse(g.graph, {x: 0})
    with pytest.raises(UnsupportedOpError, match="'culprit'.*needed by 'victim:0'"):
        axis.layout(z)


def test_two_batch_dimensions_are_refused(g: Draft) -> None:
    x = g.source(None, 4)
    y = g.op("MatMul", [x, x], (None, None), attrs={"transpose_b": True})
    with pytest.raises(UnsupportedOpError, match="two of its dimensions are divided along the batch"):
        analyse(g.graph, {x: 0}).layout(y)


def test_scope_leaves_the_rest_alone(g: Draft) -> None:
    x = g.source(B)
    inside = g.op("Tanh", [x], (B,))
    outside = g.op("Tanh", [inside], (B,))
    scope = {g.graph.tensors[t].op for t in (x, inside)}
    axis = analyse(g.graph, {x: 0}, scope)
    assert axis.layout(inside) == sharded(0) and axis.layout(outside) == replicated()


def test_function_bodies_are_followed(g: Draft) -> None:
    body = Draft()
    argument = body.op("_Arg", (), (None, 4), attrs={"index": 0})
    total = body.op("Mean", [argument, body.const([0])], (4,))
    body.op("_Retval", [total], attrs={"index": 0})
    x = g.source(None, 4)
    call = g.graph.add("call", "PartitionedCall", [x], [((4,), "float32")], body={"f": body.graph})
    axis = analyse(g.graph, {x: 0})
    assert axis.layout(call.outputs[0]) == partial(1)
    assert axis.bodies[call.id, "f"].layout(total) == partial(1)


class TestSources:
    def test_unknown_leading_sizes(self, g: Draft) -> None:
        x, rate, table = g.source(None, 4), g.source(), g.source(5, 4)
        assert find_batch_axis(g.graph, [x, rate, table]).sources == {x: 0}

    def test_most_common_static_size(self, g: Draft) -> None:
        table, x, y = g.source(5, 4), g.source(B, 4), g.source(B, dtype="int32")
        assert find_batch_axis(g.graph, [table, x, y]).sources == {x: 0, y: 0}

    def test_fed_table_of_the_batch_s_length_is_no_batch_input(self, g: Draft) -> None:
        weights, y = g.source(None), g.source(None, dtype="int32")
        picked = g.op("GatherV2", [weights, y, g.const(0)], (None,))
        assert find_batch_axis(g.graph, [weights, y]).sources == {y: 0}
        assert analyse(g.graph, {y: 0}).layout(picked) == sharded(0)

    def test_unsupported_op_does_not_undivide_its_input(self, g: Draft) -> None:
        x, y = g.source(B), g.source(B)
        g.op("Mul", [g.op("Softmax", [x], (B,)), y], (B,))
        assert find_batch_axis(g.graph, [x, y]).sources == {x: 0, y: 0}

    def test_unknown_rank_is_refused_by_name(self, g: Draft) -> None:
        x = g.op("Placeholder", (), None, name="images")
        with pytest.raises(UnsupportedOpError, match=r"'images:0' is not known.*images.set_shape"):
            find_batch_axis(g.graph, [x])

    @pytest.mark.parametrize("size, halves", [(None, None), (B, 2 * B)])
    def test_labels_of_two_batches_lie_in_two_blocks(self, g: Draft, size: Any, halves: Any) -> None:
        real, fake, labels = g.source(size, 4), g.source(size, 4), g.source(halves, 4)
        both = g.op("ConcatV2", [real, fake, g.const(0)], (halves, 4))
        errors = g.op("Mul", [both, labels], (halves, 4))
        axis = find_batch_axis(g.graph, [labels, real, fake])
        names = [g.graph.tensor_name(tensor) for tensor in (labels, real, fake)]
        blocks = (1, Rows(1, names[2])) if size is None else (1, 1)
        assert axis.layout(errors) == sharded(0, blocks) and {real, fake} <= axis.sources.keys()
        if size is None:
            assert axis.layout(labels) == sharded(0, blocks)
            assert axis.stated == {names[0]: sharded(0, (Rows(1, names[1]), Rows(1, names[2])))}

    def test_all_inputs_of_open_sizes_may_lie_in_blocks(self, g: Draft) -> None:
        """Both are cut in three: an example is a triple."""
        x, y = g.source(None, 4), g.source(None, 4)
        first = g.op("Split", [g.const(0), x], (None, 4), (None, 4), (None, 4))
        joined = g.op("ConcatV2", [first, first + 1, first + 2, g.const(0)], (None, 4))
        errors = g.op("Mul", [joined, y], (None, 4))
        axis = find_batch_axis(g.graph, [x, y])
        assert not axis.unknown and axis.sources == {x: 0, y: 0}
        assert {axis.layout(t) for t in (x, y, errors)} == {sharded(0, (1, 1, 1))}

    @pytest.mark.parametrize("size", [None, 3 * B])
    def test_rows_that_are_taken_together_are_examples(self, g: Draft, size: Optional[int]) -> None:
        x, y = g.source(size, 4), g.source(size, 4)
        third = None if size is None else B
        parts = [g.op("StridedSlice", [each, g.const([start]), g.const([0]), g.const([3])], (third, 4),
                      attrs={"begin_mask": int(not start), "end_mask": 1}) for each in (x, y) for start in range(3)]
        errors = g.op("Mul", [parts[0], g.op("AddV2", [parts[2], parts[5]], (third, 4))], (third, 4))
        g.op("Mul", [parts[3], parts[5]], (third, 4))
        filled = g.op("StridedSliceGrad", [g.op("Shape", [x], (2,), dtype="int32"), g.const([2]), g.const([0]), g.const([3]),
                                           errors], (size, 4), attrs={"end_mask": 1})
        g.op("MatMul", [errors, g.variable(4, 2)], (third, 2))
        axis = find_batch_axis(g.graph, [x, y])
        assert not axis.unknown and axis.batch == third
        assert {axis.layout(t) for t in (x, y, filled)} == {sharded(0, (3,))}
        assert {axis.layout(t) for t in (*parts, errors)} == {sharded(0)}

    def test_every_second_row_makes_no_examples(self, g: Draft) -> None:
        """There may be an odd number of rows."""
        x = g.source(None, 4)
        halves = [g.op("StridedSlice", [x, g.const([start]), g.const([0]), g.const([2])], (None, 4), attrs={"end_mask": 1})
                  for start in range(2)]
        g.op("AddV2", [mean(g, halves[0], (4,)), mean(g, halves[1], (4,))], (4,))
        axis = find_batch_axis(g.graph, [x])
        assert axis.layout(x) == sharded(0) and axis.unknown.keys() >= set(halves)

    def test_rows_of_a_python_function_need_a_reason_to_be_examples(self, g: Draft) -> None:
        x, labels = g.source(B), g.source(B, dtype="int32")
        pairs, weights = g.op("PyFunc", [labels], (None,), dtype="int32"), g.op("PyFunc", [labels], (None,))
        g.op("GatherV2", [x, pairs, g.const(0)], (None,))
        g.op("Mul", [x, weights], (B,))
        model = [op.id for op in g.graph.ops if op.type != "PyFunc"]
        assert find_batch_axis(g.graph, [x, labels, pairs, weights], model).sources == {x: 0, labels: 0, weights: 0}

    def test_flat_targets_have_rows_of_one_example_side_by_side(self, g: Draft) -> None:
        words, targets = g.source(None, 5), g.source(None)
        flat = g.op("Reshape", [words, g.const([-1])], (None,))
        g.op("Mul", [flat, targets], (None,))
        axis = find_batch_axis(g.graph, [words, targets])
        assert axis.layout(targets) == sharded(0, (5,)) and not axis.unknown

    def test_size_that_does_not_fit_is_refused_with_both(self, g: Draft) -> None:
        x, y, labels = g.source(None, 4), g.source(None, 4), g.op("Placeholder", (), (None, 4), name="labels")
        g.op("Mul", [g.op("Add", [x, y], (None, 4)), labels], (None, 4))
        names = [g.graph.tensor_name(t) for t in (x, y, labels)]
        shapes = dict(zip(names, [(8, 4), (8, 4), (12, 4)]))
        with pytest.raises(UnsupportedOpError, match=r"input 'labels:0' has 12 rows, but the mini-batch \('.*'\) has 8 examples"):
            find_batch_axis(g.graph, [x, y, labels], known=Known(shapes=shapes))

    def test_input_of_known_shape_beside_one_that_was_fed(self, g: Draft) -> None:
        x, y = g.source(None, 4), g.source(None, None)
        g.op("Mul", [x, y], (None, 4))
        axis = find_batch_axis(g.graph, [x, y], known=Known(shapes={g.graph.tensor_name(y): (8, 4)}))
        assert axis.sources == {x: 0, y: 0}

    def test_what_the_user_states(self, g: Draft) -> None:
        x, table = g.source(None, 4), g.source(None, 4)
        inner = g.op("SomebodysOwnOp", [x], (None, 3))
        names = {t: g.graph.tensor_name(t) for t in (x, table, inner)}
        axis = find_batch_axis(g.graph, [x, table], known=Known({names[table]: None, names[inner]: 0}))
        assert axis.sources == {x: 0} and axis.layout(inner) == sharded(0) and axis.source_of([inner]) == x
        axis = find_batch_axis(g.graph, [x, table], known=Known({names[x]: 1}))
        assert axis.sources == {x: 1, table: 0}


def test_rows_of_unknown_number_follow_a_minus_one(g: Draft) -> None:
    """Examples of unknown size, cut in rows: as many of each, whatever their number."""
    x = g.source(None, None)
    images = g.op("Reshape", [x, g.const([-1, 3, 3, 1])], (None, 3, 3, 1))
    assert analyse(g.graph, {x: 0}).layout(images) == sharded(0, (-1,))


@pytest.mark.slow
def test_time_grows_linearly(g: Draft) -> None:
    """Measured in CPU seconds, with room for a slow machine; 100,000 ops of a real model take 1 to 3."""
    seconds = []
    for layers in (700, 7000):
        draft = Draft()
        x = draft.source(B, 16)
        h, w = x, draft.variable(16, 16)
        for _ in range(layers):
            h = draft.op("Tanh", [draft.op("BiasAdd", [draft.op("MatMul", [h, w], (B, 16)), draft.variable(16)], (B, 16))], (B, 16))
            h = draft.op("Reshape", [h, draft.const([B, 16])], (B, 16))
        start = time.process_time()
        axis = analyse(draft.graph, {x: 0})
        seconds.append(time.process_time() - start)
        assert axis.layout(h) == sharded(0)
    assert seconds[1] < 10.0 and seconds[1] < 25 * seconds[0] + 0.5
