"""Inputs with numbers of examples of their own: sizes, blocks and weights of several batches."""

from __future__ import annotations

from typing import Any, Dict, List

import numpy as np
import pytest

from tests.ir import interpreter
from tests.ir.graphs import Draft
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import EXTENT, BatchAxis, Options, Reduce, Scale, analyse, find_batch_axis
from whale_tf.ir.extents import Size, batch_size, batch_symbol
from whale_tf.ir.layout import Power, Rows, partial, sharded, weight_of

PARTS = {"": (1, 4, 3), "z:0": (2, 2, 1), "y:0": (3, 1, 2)}
Z = Size.of(batch_symbol("z:0"))


class Batches(Draft):
    """Inputs ``x`` (the reference), ``z`` and ``y`` of open sizes, and values for them."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.RandomState(0)
        self.feed: Dict[int, np.ndarray] = {}
        for name, batch in (("x", ""), ("z", "z:0"), ("y", "y:0")):
            tensor = self.source(None, 3, dtype="float64", name=name)
            self.feed[tensor] = random.rand(sum(PARTS[batch]), 3)
            setattr(self, name, tensor)
        self.x: int
        self.z: int
        self.y: int

    def real(self, type_: str, inputs: List[int], *shape: Any, **attrs: Any) -> int:
        return self.op(type_, inputs, shape, dtype="float64", attrs=attrs)

    def joined(self, *tensors: int) -> int:
        return self.real("ConcatV2", [*tensors, self.const(0)], None, 3)

    def count(self, tensor: int) -> int:
        sizes, one = self.op("Shape", [tensor], (2,), dtype="int32"), self.const([1])
        return self.op("StridedSlice", [sizes, self.const([0]), one, one], (), dtype="int32", attrs={"shrink_axis_mask": 1})

    def mean(self, tensor: int) -> int:
        return self.real("Mean", [tensor, self.const([0])], 3)

    def up_to(self, tensor: int, end: int) -> int:
        begin, ends, strides = self.const([0]), self.op("Pack", [end], (1,), dtype="int32"), self.const([1])
        return self.real("StridedSlice", [tensor, begin, ends, strides], None, 3, begin_mask=1)

    def axis(self, *compared: int, **options: Any) -> BatchAxis:
        """The analysis, after a comparison of these tensors' merged values with the whole's."""
        axis = analyse(self.graph, dict.fromkeys(self.feed, 0), options=Options(**options))
        whole = interpreter.run(self.graph, self.feed)
        merged = interpreter.run_in_clones(self.graph, axis, self.feed, PARTS)
        for tensor in compared:
            np.testing.assert_allclose(merged[tensor], whole[tensor], rtol=1e-12, err_msg=self.graph.tensor_name(tensor))
        return axis


@pytest.fixture
def g() -> Batches:
    return Batches()


def test_concatenation_has_the_blocks_of_its_batches(g: Batches) -> None:
    both = g.joined(g.x, g.z)
    size = g.count(both)
    first = g.up_to(both, g.count(g.x))
    axis = g.axis(both, first)
    assert axis.layout(both) == sharded(0, (1, Rows(1, "z:0"))) and axis.layout(first) == sharded(0)
    assert axis.layout(size) is EXTENT and axis.extents[size][()] == batch_size + Z
    assert list(axis.batches) == ["", "z:0", "y:0"]


def test_means_have_the_weight_of_the_examples_that_they_count(g: Batches) -> None:
    of_both, of_z, of_twice = g.mean(g.joined(g.x, g.z)), g.mean(g.z), g.mean(g.joined(g.z, g.x, g.z))
    axis = g.axis(of_both, of_z, of_twice)
    assert axis.layout(of_z) == partial(Power({(("z:0", 1),): 1}))
    assert axis.layout(of_both) == partial(Power({(("", 1), ("z:0", 1)): 1}))
    assert axis.layout(of_twice) == partial(weight_of([("", 1), ("z:0", 2)]))


def test_terms_of_different_batches_are_brought_to_one_weight(g: Batches) -> None:
    total = g.real("AddV2", [g.mean(g.x), g.mean(g.z)], 3)
    axis = g.axis(total)
    (_, steps), = axis.conversions.items()
    of_z = Power({(("z:0", 1),): 1})
    power = axis.layout(total).power
    assert axis.layout(total).is_partial and power in (1, of_z)
    assert steps == (Scale((of_z if power == 1 else 1) - power),)


def test_what_does_not_end_with_an_input_is_no_block(g: Batches) -> None:
    both = g.joined(g.x, g.z)
    other, twice = g.up_to(both, g.count(g.z)), g.real("Split", [g.const(0), both], None, 3, num_split=1)
    axis = g.axis(twice)
    with pytest.raises(UnsupportedOpError, match="selects only some examples"):
        axis.layout(other)
    axis = analyse(g.graph, dict.fromkeys(g.feed, 0), options=Options(sections=True))
    op = g.graph.tensors[other].op
    assert op in axis.whole and axis.conversions[op, 0] == (Reduce("concat"),)


@pytest.mark.parametrize("combine", ["AddV2", "Select"])
def test_op_on_single_examples_makes_two_batches_one(g: Batches, combine: str) -> None:
    """The analysis begins again: a concatenation before the op has the blocks of one batch, too."""
    both = g.joined(g.x, g.z)
    chosen = g.op("Greater", [g.z, g.const(0.5)], (None, 3), dtype="bool")
    g.real(combine, [chosen, g.x, g.z] if combine == "Select" else [g.x, g.z], None, 3)
    axis = analyse(g.graph, dict.fromkeys(g.feed, 0))
    assert axis.layout(both) == sharded(0, (1, 1)) and axis.batches[""] == [g.x, g.z] and list(axis.batches) == ["", "y:0"]
    assert set(map(frozenset, axis.equalities)) == {frozenset(("x:0", "z:0"))}


def test_input_may_have_the_examples_of_two_batches(g: Batches) -> None:
    g.real("Mul", [g.joined(g.x, g.z), g.y], None, 3)
    axis = find_batch_axis(g.graph, [g.x, g.z, g.y])
    assert axis.layout(g.y) == sharded(0, (1, Rows(1, "z:0"))) and list(axis.batches) == ["", "z:0"]


def test_numbers_of_a_draw_belong_to_examples_in_the_blocks_that_they_meet(g: Batches) -> None:
    both = g.joined(g.x, g.z, g.x)
    drawn = g.real("RandomUniform", [g.op("Shape", [both], (2,), dtype="int32")], None, 3)
    g.real("Mul", [both, drawn], None, 3)
    axis = analyse(g.graph, dict.fromkeys(g.feed, 0))
    assert axis.layout(drawn) == sharded(0, (1, Rows(1, "z:0"), 1))


def test_positions_count_the_examples_of_their_batch(g: Batches) -> None:
    numbers = g.op("Range", [g.const(0), g.count(g.z), g.const(1)], (None,), dtype="int32")
    rows = g.real("GatherV2", [g.z, numbers, g.const(0)], None, 3)
    axis = g.axis(numbers, rows)
    assert axis.offsets[numbers] == Rows(1, "z:0") and axis.layout(rows) == sharded(0, (Rows(1, "z:0"),))


def test_rows_of_another_batch_are_looked_up_whole(g: Batches) -> None:
    """The positions of one input's examples may be those of the first rows of the other."""
    numbers = g.op("Range", [g.const(0), g.count(g.z), g.const(1)], (None,), dtype="int32")
    rows = g.real("GatherV2", [g.x, numbers, g.const(0)], None, 3)
    with pytest.raises(UnsupportedOpError, match="other than their own position"):
        g.axis().layout(rows)


def test_sizes_of_several_batches() -> None:
    size = 2 * batch_size + Z + 1
    assert size.counts == {"": 2, "z:0": 1} and size.constant == 1 and size.at(5, {"z:0": 3}) == 14
    assert size.at(5) == Z + 11 and size.depends_on_batch and (Z * Z).counts is None
