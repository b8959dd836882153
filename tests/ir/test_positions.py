"""Ops that number or look up rows: what the analysis decides, and that clones that follow it compute the whole's values."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import numpy as np
import pytest

from tests.ir import interpreter
from tests.ir.graphs import Draft, equal
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import BatchAxis, Localise, Offset, Options, Reduce, Scale, Slice, analyse
from whale_tf.ir.extents import batch_size
from whale_tf.ir.layout import partial, sharded

B = 8
PARTS = (1, 4, 3)


class Rows(Draft):
    """A graph with values for its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.feed: Dict[int, np.ndarray] = {}
        self.sources: Dict[int, int] = {}
        self.random = np.random.RandomState(0)

    def fed(self, value: Any, dim: Optional[int] = 0, is_open: bool = True) -> int:
        """An input; ``dim``: its batch dimension, which the graph may leave open; None: it is the same for all clones."""
        value = np.asarray(value)
        shape = [None if d == dim and is_open else size for d, size in enumerate(value.shape)]
        tensor = self.source(*shape, dtype=str(value.dtype))
        self.feed[tensor] = value
        if dim is not None:
            self.sources[tensor] = dim
        return tensor

    def real(self, *shape: int, dim: Optional[int] = 0, is_open: bool = True) -> int:
        return self.fed(self.random.rand(*shape), dim, is_open)

    def labels(self, *shape: int, below: int = 3) -> int:
        return self.fed(self.random.randint(0, below, shape).astype(np.int32))

    def ints(self, type_: str, inputs: Any, *shape: Optional[int], **attrs: Any) -> int:
        return self.op(type_, inputs, shape, dtype="int32", attrs=attrs)

    def count(self, x: int, times: int = 1) -> int:
        """``times`` the number of rows of ``x``."""
        sizes, one = self.ints("Shape", [x], len(self.graph.tensors[x].shape or ())), self.const([1])
        rows = self.ints("StridedSlice", [sizes, self.const([0]), one, one], shrink_axis_mask=1)
        return rows if times == 1 else self.ints("Mul", [rows, self.const(times)])

    def rows(self, x: int, step: int = 1) -> int:
        """``step`` times the positions of examples."""
        return self.ints("Range", [self.const(0), self.count(x, step), self.const(step)], None)

    def zeros(self, *shape: int, dim: int = 0, is_open: bool = True) -> int:
        fed = self.fed(np.ones(shape, np.int32), dim, is_open)
        return self.ints("ZerosLike", [fed], *(self.graph.tensors[fed].shape or ()))

    def static_rows(self) -> int:
        """The same for B examples by the graph; it begins as a constant."""
        return self.ints("AddV2", [self.zeros(B, is_open=False), self.ints("Range", [self.const(0), self.const(B), self.const(1)], B)], B)

    def pairs(self, first: int, second: int, *more: int) -> int:
        return self.ints("Pack", [first, second, *more], None, 2 + len(more), axis=1)

    def column(self, index: int) -> int:
        return self.ints("Reshape", [index, self.const([-1, 1])], None, 1)

    def gradient(self, x: int) -> int:
        """Divided by the number of examples, so that each clone's is too large."""
        number = self.op("Cast", [self.count(x)], (), dtype="float64", attrs={"DstT": "float64"})
        return self.op("RealDiv", [x, number], self.graph.tensors[x].shape, dtype="float64")

    def chosen(self, x: int) -> int:
        """Rows chosen by data."""
        picked = self.op("Where", [self.op("Greater", [self.real(B), self.const(0.5)], (None,), dtype="bool")], (None, 1))
        index = self.op("Squeeze", [picked], (None,), dtype="int64", attrs={"squeeze_dims": [1]})
        return self.op("GatherV2", [x, index, self.const(0)], self.graph.tensors[x].shape)

    def joined(self, dtype: str = "float32") -> int:
        """The rows of two mini-batches: two blocks of examples."""
        x, z = (self.source(None, 4, dtype=dtype) for _ in range(2))
        self.sources.update({x: 0, z: 0})
        return self.op("ConcatV2", [x, z, self.const(0)], (None, 4), dtype=dtype)

    def unknown_number(self, dtype: str = "float32") -> int:
        """Rows of examples of unknown size."""
        x = self.source(None, None, dtype=dtype)
        self.sources[x] = 0
        return self.op("Reshape", [x, self.const([-1, 3])], (None, 3), dtype=dtype)

    def unknown_rank(self, dtype: str = "float32") -> int:
        x = self.op("Placeholder", (), None, dtype=dtype)
        self.sources[x] = 0
        return x

    def axis(self, *compared: int) -> BatchAxis:
        """The analysis, after a comparison of these tensors' merged values with the whole's."""
        axis = analyse(self.graph, self.sources, options=Options(equalities=equal(self.graph, self.sources)))
        if compared:
            whole = interpreter.run(self.graph, self.feed)
            merged = interpreter.run_in_clones(self.graph, axis, self.feed, PARTS)
            for tensor in compared:
                np.testing.assert_allclose(merged[tensor], whole[tensor], rtol=1e-12, err_msg=self.graph.tensor_name(tensor))
        return axis

    def number(self, tensor: int) -> int:
        return self.graph.tensors[tensor].op


@pytest.fixture
def g() -> Rows:
    return Rows()


def refused(g: Rows, tensor: int, message: str) -> None:
    with pytest.raises(UnsupportedOpError, match=message):
        g.axis().layout(tensor)


OWN_POSITION = "it looks up examples by an index other than their own position"


# ---------------------------------------------------------------------------------------------------------- Range
@pytest.mark.parametrize("step", [1, 2, -1, -3])
@pytest.mark.parametrize("is_open", [True, False])
def test_range_over_the_examples(g: Rows, step: int, is_open: bool) -> None:
    i = g.fed(np.arange(B, dtype=np.int32) % 3, is_open=is_open)
    size = None if is_open else B
    rows = g.rows(i, step) if is_open else g.ints("Range", [g.const(0), g.const(B * step), g.const(step)], B)
    index = g.ints("AddV2", [i, rows], size)
    axis = g.axis(rows, index)
    assert axis.layout(rows) == axis.layout(index) == sharded(0) and axis.offsets[rows] == step
    assert axis.offsets.get(index) == (step if abs(step) > 1 else None)  # data among the rows of an example, but not among examples
    assert axis.localise == ({} if is_open else {(g.number(rows), 1): Localise((step * batch_size,))})


def test_range_with_several_positions_for_each_example(g: Rows) -> None:
    rows = g.ints("Range", [g.const(0), g.count(g.real(B), 6), g.const(2)], None)
    axis = g.axis(rows)
    assert axis.layout(rows) == sharded(0, (3,)) and axis.offsets[rows] == 6


@pytest.mark.parametrize("bounds, message", [
    (lambda g, x: [g.const(0), g.ints("Sum", [g.labels(B), g.const([0])]), g.const(1)], "its bounds are not known"),
    (lambda g, x: [g.const(1), g.count(x), g.const(1)], "its positions do not begin at the first example"),
    (lambda g, x: [g.count(x), g.const(2 * B), g.const(1)], "its positions do not begin at the first example"),
    (lambda g, x: [g.const(0), g.count(g.chosen(x)), g.const(1)], "it counts rows chosen by data"),
    (lambda g, x: [g.const(0), g.count(g.unknown_number()), g.const(1)], "the number of positions per example is not known"),
    (lambda g, x: [g.const(0), g.count(x), g.const(2)], "its positions cannot be divided into examples"),
    (lambda g, x: [g.const(0), g.count(x), g.const(-1)], "its step leads away from its limit"),
    (lambda g, x: [g.const(0), g.count(x, -1), g.const(1)], "its step leads away from its limit"),
])
def test_ranges_that_are_refused(g: Rows, bounds: Callable[[Rows, int], List[int]], message: str) -> None:
    refused(g, g.ints("Range", bounds(g, g.real(B, 4)), None), message)


@pytest.mark.parametrize("use", [
    lambda g, x, table: g.ints("ConcatV2", [g.fed(np.arange(B, dtype=np.int32) % 3, is_open=False), table, g.const(0)], 2 * B),
    lambda g, x, table: g.ints("Slice", [table, g.const([0]), g.ints("Pack", [g.count(x)], 1)], None),
    lambda g, x, table: g.ints("Reshape", [table, g.ints("Pack", [g.count(x), g.const(1)], 2)], None, 1),
    lambda g, x, table: g.op("Cast", [g.rows(x)], (None,), dtype="bool", attrs={"DstT": "bool"}),
    lambda g, x, table: g.op("Where", [g.rows(x)], (None, 1), dtype="int64"),
    lambda g, x, table: 7 + g.op("DynamicPartition", [x, g.rows(x)], *[(None, 4)] * B, dtype="float64", attrs={"num_partitions": B}),
], ids=["joined", "cut", "reshaped", "boolean", "true elements", "part"])
def test_ops_that_pass_on_no_positions_read_those_of_the_mini_batch(g: Rows, use: Callable[[Rows, int, int], int]) -> None:
    """Also the rows of a constant table that looks like positions."""
    found = use(g, g.real(B, 4), g.const(np.arange(B)))
    assert not g.axis(found).layout(found).is_replicated


@pytest.mark.parametrize("use", [
    lambda g, table, count: g.op("Fill", [g.ints("Pack", [count], 1), g.const(1.5)], (None,), dtype="float64"),
    lambda g, table, count: g.op("Tile", [table, g.ints("Pack", [count], 1)], (None,), dtype="float64"),
    lambda g, table, count: g.op("Slice", [table, g.const([0]), g.ints("Pack", [count], 1)], (None,), dtype="float64"),
    lambda g, table, count: g.op("StridedSlice", [table, g.const([0]), g.ints("Pack", [count], 1), g.const([1])], (None,),
                                 dtype="float64", attrs={"begin_mask": 1}),
    lambda g, table, count: g.op("StridedSlice", [g.real(B, 40), g.const([0, 0]), g.ints("Pack", [g.const(0), count], 2), g.const([1, 1])],
                                 (None, None), dtype="float64", attrs={"begin_mask": 3, "end_mask": 1}),
], ids=["fill", "tile", "slice", "cut", "columns"])
def test_sizes_that_follow_from_examples_are_those_of_all(g: Rows, use: Callable[[Rows, int, int], int]) -> None:
    found = use(g, g.const(np.arange(40.0)), g.ints("Sum", [g.labels(B), g.const([0])]))
    assert [step for steps in g.axis(found).conversions.values() for step in steps] == [Reduce("sum")]


# --------------------------------------------------------------------------------------------------------- Gather
@pytest.mark.parametrize("type_, axis", [("Gather", []), ("GatherV2", [0]), ("GatherV2", [-2])])
def test_each_example_looks_up_its_own_rows(g: Rows, type_: str, axis: List[int]) -> None:
    x = g.real(B, 4)
    found = g.op(type_, [x, g.rows(x), *map(g.const, axis)], (None, 4))
    result = g.axis(found)
    assert result.layout(found) == sharded(0) and found not in result.offsets and not result.conversions


def test_look_up_in_columns_follows_its_rule(g: Rows) -> None:
    found = g.op("GatherV2", [g.real(B, 4), g.const([0, 2]), g.const(1)], (None, 2))
    assert g.axis(found).layout(found) == sharded(0)


@pytest.mark.parametrize("shared, dim", [(0, 2), (1, 1), (-1, 1)])
def test_examples_of_a_look_up_lie_where_those_of_the_index_do(g: Rows, shared: int, dim: int) -> None:
    x = g.real(3, B, 4, dim=1)
    index = g.ints("AddV2", [g.zeros(3, B, dim=1), g.rows(g.real(B))], 3, None)
    shape = (3, None, 4) if shared else (3, 3, None, 4)
    found = g.op("GatherV2", [x, index, g.const(1)], shape, attrs={"batch_dims": shared})
    assert g.axis(found).layout(found) == sharded(dim)


def test_look_up_needs_the_rank_for_a_negative_axis_only(g: Rows) -> None:
    x = g.unknown_rank()
    g.feed[x] = g.random.rand(B, 4)
    found = g.op("GatherV2", [x, g.rows(g.real(B)), g.const(0)], None)
    assert g.axis(found).layout(found) == sharded(0)
    refused(g, g.op("GatherV2", [x, g.rows(g.real(B)), g.const(-2)], None, name="back"), "'back'")


def test_looking_up_positions(g: Rows) -> None:
    """They remain positions, unless each of several columns has an offset of its own."""
    x = g.real(B)
    rows, twice = g.rows(x), g.rows(x, 2)
    found = g.ints("GatherV2", [twice, rows, g.const(0)], None)
    several = g.ints("GatherV2", [g.pairs(rows, g.labels(B)), rows, g.const(0)], None, 2)
    axis = g.axis(found, several)
    assert axis.offsets[found] == 2 and several not in axis.offsets
    assert axis.conversions == {(g.number(several), 0): (Offset((1, 0)),)}


@pytest.mark.parametrize("look_up", [
    lambda g, x: [x, g.labels(B), g.const(0)],
    lambda g, x: [x, g.const([0, 1]), g.const(0)],
    lambda g, x: [x, g.ints("AddV2", [g.op("Reshape", [g.chosen(g.rows(x)), g.const([-1])], (None,), dtype="int32"), g.const(1)],
                            None), g.const(0)],
    lambda g, x: [x, g.ints("AddV2", [g.rows(x), g.labels(B)], None), g.const(0)],
    lambda g, x: [g.joined(), g.rows(x), g.const(0)],
    lambda g, x: [g.unknown_number(), g.ints("Sub", [g.const(0), g.rows(x)], None), g.const(0)],
    lambda g, x: [g.op("Reshape", [g.real(B, 2, 4), g.const([-1, 4])], (None, 4)), g.rows(x), g.const(0)],
], ids=["no positions", "constants", "next example", "some example", "two blocks", "unknown blocks", "two rows an example"])
def test_look_ups_of_other_examples_are_refused(g: Rows, look_up: Callable[[Rows, int], List[int]]) -> None:
    refused(g, g.op("GatherV2", look_up(g, g.real(B, 4)), (None, 4)), OWN_POSITION)


def test_look_up_along_an_axis_that_is_fed_is_refused(g: Rows) -> None:
    x = g.real(B, 4)
    refused(g, g.op("GatherV2", [x, g.rows(x), g.fed(np.int32(0), None)], (None, 4), name="fed"), "'fed'")


def test_variables_row_is_looked_up_by_example(g: Rows) -> None:
    handle = g.op("VarHandleOp", (), (), dtype="resource", attrs={"shape": (3, 4), "dtype": "float32"})
    y = g.labels(B)
    found = g.op("ResourceGather", [handle, y], (None, 4))
    assert g.axis().layout(found) == sharded(0)
    refused(g, g.op("ResourceGather", [handle, g.count(y)], (4,)), "it looks up a row by the batch size")


# ------------------------------------------------------------------------------------------------------- GatherNd
def test_each_example_picks_from_its_own_row(g: Rows) -> None:
    x, y = g.real(B, 3), g.labels(B)
    one = g.op("GatherNd", [x, g.pairs(g.rows(x), y)], (None,))
    row = g.op("GatherNd", [x, g.column(g.rows(x))], (None, 3))
    across = g.op("GatherNd", [g.real(3, B, dim=1), g.pairs(y, g.rows(x))], (None,))
    axis = g.axis(one, row, across)
    assert axis.layout(one) == axis.layout(row) == axis.layout(across) == sharded(0) and not axis.conversions


def test_picking_from_dimensions_before_the_examples_follows_its_rule(g: Rows) -> None:
    before = g.op("GatherNd", [g.real(3, B, 4, dim=1), g.const([[0], [2]])], (2, None, 4))
    table = g.op("GatherNd", [g.real(3, 4, dim=None), g.column(g.labels(B))], (None, 4))
    axis = g.axis(before, table)
    assert axis.layout(before) == sharded(1) and axis.layout(table) == sharded(0)


@pytest.mark.parametrize("index", [
    lambda g, rows, y: g.column(y), lambda g, rows, y: g.const([[0], [1]]), lambda g, rows, y: g.pairs(y, rows),
    lambda g, rows, y: g.pairs(rows, rows), lambda g, rows, y: g.pairs(rows, y, rows)])
def test_picking_from_other_examples_is_refused(g: Rows, index: Callable[[Rows, int, int], int]) -> None:
    x = g.real(B, B, B)
    refused(g, g.op("GatherNd", [x, index(g, g.rows(x), g.labels(B))], None), OWN_POSITION)


# ---------------------------------------------------------------------------------------------------------- Where
@pytest.mark.parametrize("shape, offset", [((B,), 1), ((B, 3), (1, 0)), ((B, 3, 2), (1, 0, 0))])
def test_true_elements_are_numbered_by_example(g: Rows, shape: Any, offset: Any) -> None:
    condition = g.op("Greater", [g.real(*shape), g.const(0.4)], (None, *shape[1:]), dtype="bool")
    found = g.op("Where", [condition], (None, len(shape)), dtype="int64")
    axis = g.axis(found)
    assert axis.layout(found) == sharded(0, None) and axis.offsets[found] == offset


def test_true_elements_of_several_rows_an_example(g: Rows) -> None:
    flat = g.op("Reshape", [g.real(B, 3), g.const([-1])], (None,))
    found = g.op("Where", [g.op("Greater", [flat, g.const(0.4)], (None,), dtype="bool")], (None, 1), dtype="int64")
    assert g.axis(found).offsets[found] == 3


@pytest.mark.parametrize("condition", [
    lambda g: g.fed(np.ones((3, B), bool), 1), lambda g: g.joined("bool"), lambda g: g.unknown_number("bool"),
    lambda g: g.unknown_rank("bool")], ids=["columns", "two blocks", "unknown blocks", "unknown rank"])
def test_true_elements_in_another_order_are_refused(g: Rows, condition: Callable[[Rows], int]) -> None:
    refused(g, g.op("Where", [condition(g)], (None, 2), dtype="int64"), "of one part do not all come before those of the next")


# ------------------------------------------------------------------------------------------------------- segments
def segments(g: Rows, data: int, ids: int, count: int, type_: str = "UnsortedSegmentSum") -> int:
    return g.op(type_, [data, ids, count], (None, *(g.graph.tensors[data].shape or ())[len(g.graph.tensors[ids].shape or ()):]))


def test_sums_by_label_are_sums_over_the_batch(g: Rows) -> None:
    x, y = g.real(B, 4), g.labels(B)
    found = [segments(g, x, y, count) for count in (g.const(3), g.fed(np.int32(3), None))]
    axis = g.axis(*found)
    assert [axis.layout(tensor) for tensor in found] == [partial()] * 2


def test_sums_into_the_examples_own_rows(g: Rows) -> None:
    x = g.real(B, 2, 4)
    ids = g.ints("AddV2", [g.zeros(B, 2), g.column(g.rows(x))], None, 2)
    found = segments(g, x, ids, g.count(x))
    axis = g.axis(found)
    assert axis.layout(found) == sharded(0) and not axis.conversions and not axis.localise


def test_constant_number_of_rows_becomes_the_clones(g: Rows) -> None:
    found = segments(g, g.real(B, 4, is_open=False), g.static_rows(), g.const(B))
    axis = g.axis(found)
    assert axis.layout(found) == sharded(0) and axis.localise[g.number(found), 2] == Localise((batch_size,))


def test_sums_of_a_whole_table_and_of_positions(g: Rows) -> None:
    """The clone takes its own rows; positions count from the first example of the mini-batch, as they do in the whole."""
    x = g.real(B)
    table = segments(g, g.const(g.random.rand(B, 4)), g.rows(x), g.count(x))
    positions = segments(g, g.rows(x, 2), g.rows(x), g.count(x))
    axis = g.axis(table, positions)
    assert axis.conversions == {(g.number(table), 0): (Slice(0, (1,)),), (g.number(positions), 0): (Offset(2),)}


def test_sums_into_a_table_that_counts_no_examples(g: Rows) -> None:
    """Its rows may be more than the examples, whose number is open."""
    x = g.real(B, 4)
    found = segments(g, x, g.rows(x), g.const(B + 2))
    scattered = g.op("ScatterNd", [g.column(g.rows(x)), x, g.const([B + 2, 4])], (B + 2, 4), dtype="float64")
    axis = g.axis(found, scattered)
    assert axis.layout(found) == axis.layout(scattered) == partial()
    assert axis.conversions == {(g.number(found), 1): (Offset(1),), (g.number(scattered), 0): (Offset(1),)}


def test_sums_by_several_columns_of_positions(g: Rows) -> None:
    found = segments(g, g.real(B, 2), g.pairs(g.rows(g.real(B)), g.labels(B)), g.const(B))
    axis = g.axis(found)
    assert axis.layout(found) == partial() and axis.conversions == {(g.number(found), 1): (Offset((1, 0)),)}


def test_sum_keeps_the_weight_of_its_data_and_a_maximum_does_not(g: Rows) -> None:
    x = g.real(B, 4)
    total, largest = (segments(g, g.gradient(x), g.rows(x), g.count(x), type_)
                      for type_ in ("UnsortedSegmentSum", "UnsortedSegmentMax"))
    axis = analyse(g.graph, g.sources)
    assert axis.layout(total) == sharded(0, power=1) and axis.layout(largest) == sharded(0)
    assert axis.conversions == {(g.number(largest), 0): (Scale(1),)}


@pytest.mark.parametrize("ids, times", [
    (lambda g: g.labels(B), 1), (lambda g: g.rows(g.real(B)), 2), (lambda g: g.ints("Sub", [g.rows(g.real(B)), g.labels(B)], None), 1),
    (lambda g: g.const(np.zeros(B, np.int32)), 1)])
def test_sums_into_rows_of_other_examples_are_refused(g: Rows, ids: Callable[[Rows], int], times: int) -> None:
    x = g.real(B, 4)
    refused(g, segments(g, x, ids(g), g.count(x, times)), "it adds up rows by an index other than the example's own position")


# ------------------------------------------------------------------------------------------------------ ScatterNd
def test_scattering_into_the_examples_own_rows_or_columns(g: Rows) -> None:
    x, y = g.real(B), g.labels(B)
    rows, three = g.rows(x), g.const(3)
    found = g.op("ScatterNd", [g.pairs(rows, y), x, g.ints("Pack", [g.count(x), three], 2)], (None, 3))
    across = g.op("ScatterNd", [g.pairs(y, rows), x, g.ints("Pack", [three, g.count(x)], 2)], (3, None))
    axis = g.axis(found, across)
    assert axis.layout(found) == sharded(0) and axis.layout(across) == sharded(1)
    assert not axis.conversions and not axis.localise


@pytest.mark.parametrize("dim, target, localised", [(0, [B, 3], (batch_size, 3)), (1, [3, B], (3, batch_size))])
def test_constant_shape_becomes_the_clones(g: Rows, dim: int, target: List[int], localised: Any) -> None:
    columns = [g.labels(B), g.static_rows()]
    index = g.pairs(*(columns if dim else columns[::-1]))
    found = g.op("ScatterNd", [index, g.real(B, is_open=False), g.const(target)], tuple(target))
    axis = g.axis(found)
    assert axis.layout(found) == sharded(dim) and axis.localise[g.number(found), 2] == Localise(localised)


def test_scattering_a_whole_table_and_positions(g: Rows) -> None:
    x = g.real(B)
    index, target = g.column(g.rows(x)), g.ints("Pack", [g.count(x)], 1)
    table = g.op("ScatterNd", [index, g.const(g.random.rand(B)), target], (None,))
    positions = g.ints("ScatterNd", [index, g.rows(x, 2), target], None)
    axis = g.axis(table, positions)
    assert axis.conversions == {(g.number(table), 1): (Slice(0, (1,)),), (g.number(positions), 1): (Offset(2),)}


def test_scattering_by_label_is_a_sum_over_the_batch(g: Rows) -> None:
    x, index = g.real(B, 4), g.column(g.labels(B))
    targets = [g.const([3, 4]), g.ints("Pack", [g.fed(np.int32(3), None), g.const(4)], 2)]
    found = [g.op("ScatterNd", [index, x, target], (None, 4)) for target in targets]
    axis = g.axis(*found)
    assert [axis.layout(tensor) for tensor in found] == [partial()] * 2


def test_scattering_into_rows_of_other_examples_is_refused(g: Rows) -> None:
    x = g.real(B, 4)
    target = g.ints("Pack", [g.count(x), g.const(4)], 2)
    refused(g, g.op("ScatterNd", [g.column(g.labels(B)), x, target], (None, 4)), OWN_POSITION)


def test_scattering_into_what_is_not_known_is_refused(g: Rows) -> None:
    x = g.real(B, 4)
    rows, open_shape = g.column(g.rows(x)), g.source(None, dtype="int32")
    refused(g, g.op("ScatterNd", [rows, x, open_shape], None), "the shape it fills is not known")
    index = g.source(None, None, dtype="int32")
    g.sources[index] = 0
    index = g.ints("AddV2", [index, rows], None, None)
    refused(g, g.op("ScatterNd", [index, x, g.ints("Pack", [g.count(x), g.const(4)], 2)], None), "the shape it fills is not known")


# ---------------------------------------------------------------------------- DynamicPartition and DynamicStitch
def partition(g: Rows, data: int, parts: int, dtype: str = "float64") -> List[int]:
    shape = (None, *(g.graph.tensors[data].shape or ())[1:])
    first = g.op("DynamicPartition", [data, parts], shape, shape, dtype=dtype, attrs={"num_partitions": 2})
    return [first, first + 1]


def test_parts_keep_the_order_of_the_examples(g: Rows) -> None:
    x, y = g.real(B, 4), g.labels(B, below=2)
    found, positions = partition(g, x, y), partition(g, g.rows(x), y, "int32")
    axis = g.axis(*found, *positions)
    assert {axis.layout(tensor) for tensor in found + positions} == {sharded(0, None)} and not axis.conversions
    assert [axis.offsets.get(tensor) for tensor in found + positions] == [None, None, 1, 1]


def test_whole_table_is_cut_before_it_is_partitioned(g: Rows) -> None:
    """A table of positions gives positions, and one that counts examples keeps its weight."""
    x, y = g.real(B), g.labels(B, below=2)
    numbers = partition(g, g.const(3 * np.arange(B, dtype=np.int32)), y, "int32")
    count = g.op("Cast", [g.count(x)], (), dtype="float64", attrs={"DstT": "float64"})
    weighted = partition(g, g.op("Mul", [g.const(g.random.rand(B, 4)), count], (B, 4), dtype="float64"), y)
    axis = g.axis(*numbers, *weighted)
    assert axis.conversions == {(g.number(numbers[0]), 0): (Slice(0, (1,)), Offset(-3)),
                                (g.number(weighted[0]), 0): (Slice(0, (1,)),)}
    assert [axis.offsets.get(tensor) for tensor in numbers + weighted] == [3, 3, None, None]
    assert axis.layout(weighted[0]) == sharded(0, None, -1)


@pytest.mark.parametrize("data, shape", [
    (lambda g: g.real(B, 2), (B, 2)), (lambda g: g.real(B, B, dim=1), (B,)), (lambda g: g.joined(), (B,)),
    (lambda g: g.chosen(g.real(B, 4)), (B,))], ids=["matrix of parts", "columns", "two blocks", "chosen rows"])
def test_partitions_in_another_order_are_refused(g: Rows, data: Callable[[Rows], int], shape: Any) -> None:
    refused(g, partition(g, data(g), g.labels(*shape, below=2))[0], "the rows of one part do not all come before those of the next")


def stitch(g: Rows, *inputs: int) -> int:
    return g.op("DynamicStitch", inputs, (None, *(g.graph.tensors[inputs[-1]].shape or ())[1:]))


def test_stitching_puts_rows_back(g: Rows) -> None:
    x, y = g.real(B, 4), g.labels(B, below=2)
    positions = partition(g, g.rows(x), y, "int32")
    parts = stitch(g, *positions, *partition(g, x, y))
    one = stitch(g, g.rows(x), x)
    flat = g.op("Reshape", [g.real(B, 2, 4), g.const([-1, 4])], (None, 4))
    several = stitch(g, g.ints("Range", [g.const(0), g.count(x, 2), g.const(1)], None), flat)
    numbers = stitch(g, *positions, *partition(g, g.rows(x, 2), y, "int32"))
    axis = g.axis(parts, one, several, numbers)
    assert [axis.layout(tensor) for tensor in (parts, one, several, numbers)] == [
        sharded(0), sharded(0), sharded(0, (2,)), sharded(0)]
    assert axis.conversions == {(g.number(numbers), position): (Offset(2),) for position in (2, 3)}
    assert numbers not in axis.offsets


@pytest.mark.parametrize("second, data", [
    (lambda g, x: g.rows(x), lambda g, x: g.const(np.ones((B, 8)))),
    (lambda g, x: g.rows(x), lambda g, x: g.real(B, 8, dim=1)),
    (lambda g, x: g.rows(x), lambda g, x: g.gradient(x)),
    (lambda g, x: g.rows(x, 2), lambda g, x: x),
    (lambda g, x: g.labels(B), lambda g, x: x),
    (lambda g, x: g.ints("AddV2", [g.count(x), g.rows(x)], None), lambda g, x: x),
], ids=["whole", "columns", "weight", "offset", "no offset", "behind all examples"])
def test_stitching_rows_that_lie_differently_is_refused(g: Rows, second: Any, data: Any) -> None:
    x = g.real(B, 8)
    refused(g, stitch(g, g.rows(x), second(g, x), x, data(g, x)), "it places rows that are not divided like the examples")


def test_stitching_twice_to_one_place_is_refused(g: Rows) -> None:
    x = g.real(B, 8)
    refused(g, stitch(g, g.rows(x), g.rows(x), x, x), "it places more or fewer rows than its positions tell")


@pytest.mark.parametrize("index", [lambda g, x: g.labels(B), lambda g, x: g.pairs(g.rows(x), g.labels(B)),
                                   lambda g, x: g.ints("Sub", [g.const(0), g.rows(x)], None)])
def test_stitching_rows_of_other_examples_is_refused(g: Rows, index: Callable[[Rows, int], int]) -> None:
    x = g.real(B, 2)
    refused(g, stitch(g, index(g, x), x), "it places rows by an index other than the example's own position")
