"""The rule table without TensorFlow: factors of a reshape, broadcasting, values, what is missing."""

from __future__ import annotations

from typing import List

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.ir.graphs import Draft
from whale_tf.ir.rules import RULES, NoRule, rule_for
from whale_tf.ir.rules.rule import SUM, WHOLE, ShapeOperand
from whale_tf.ir.rules.shape import refine


@st.composite
def two_shapes(draw: st.DrawFn) -> List[List[int]]:
    """Two row-major shapes of the same number of elements, regrouped from common factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=6))
    shapes = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
        shapes.append([int(np.prod(factors[low:high], dtype=int)) for low, high in zip([0] + cuts, cuts)])
    return shapes


@hypothesis.given(two_shapes())
def test_reshape_factors_move_elements_as_numpy_does(shapes: List[List[int]]) -> None:
    """One dimension per factor, in the same order and of the same sizes, is the same array on both sides."""
    before, after = shapes
    left, right, kinds = refine(before, after)
    assert len(left) == len(before) and len(right) == len(after)
    if kinds:
        return
    order = [f for dim in left for f in dim]
    assert order == [f for dim in right for f in dim]
    sizes = {f: size for dims, shape in ((left, before), (right, after)) for (f,), size in (
        (factors, size) for factors, size in zip(dims, shape) if len(factors) == 1)}
    pairs = list(zip(left, before)) + list(zip(right, after))
    for factors, size in pairs * 4:  # a factor's size may follow from its neighbours' only
        unknown = [f for f in factors if f not in sizes]
        if len(unknown) == 1:
            sizes[unknown[0]] = size // int(np.prod([sizes[f] for f in factors if f in sizes], dtype=int))
    for factors, size in pairs:
        assert bool(factors) == (size != 1)
        assert int(np.prod([sizes[f] for f in factors], dtype=int)) == size


@pytest.mark.parametrize("before, after, shared", [
    ([4, 6], [24], 2), ([4, 6], [6, 4], 0), ([2, 3, 4], [6, 4], 3), ([8, 4], [2, 4, 4], 3), ([None, 4], [None, 2, 2], 0),
    ([3, 1, 4], [12], 2)])
def test_refinement_examples(before: list, after: list, shared: int) -> None:
    left, right, kinds = refine(before, after)
    passing = {f for dim in left for f in dim} - set(kinds)
    assert len(passing) == shared
    assert set(kinds.values()) <= {WHOLE}


def test_broadcasting_leaves_out_the_stretched_operand() -> None:
    g = Draft()
    y = g.op("Add", [g.source(3, 1, 4), g.source(2, 4)], (3, 2, 4))
    rule = rule_for(g.graph.producer(y), g.graph)
    assert rule.inputs == ((("d0",), (), ("d2",)), (("d1",), ("d2",)))
    assert rule.outputs == ((("d0",), ("d1",), ("d2",)),) and rule.roles == "aa" and rule.kind("d1") == "pass"


def test_shape_operands_name_the_factors_of_their_elements() -> None:
    g = Draft()
    y = g.op("Fill", [g.const([3, 4]), g.const(np.float32(1))], (3, 4))
    assert rule_for(g.graph.producer(y), g.graph).shapes == (ShapeOperand(0, (("d0",), ("d1",))),)


def test_permutations_are_evaluated_through_their_producers() -> None:
    g = Draft()
    inverse = g.op("InvertPermutation", [g.const([2, 0, 1])], (3,), dtype="int32")
    y = g.op("Transpose", [g.source(2, 3, 4), inverse], (3, 4, 2))
    assert rule_for(g.graph.producer(y), g.graph).outputs == ((("d1",), ("d2",), ("d0",)),)


@pytest.mark.parametrize("type_", ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"])
@pytest.mark.parametrize("each, divided", [(4, {"n", "i", "o"}), (2, {"n"})], ids=["one group", "two groups"])
def test_channels_in_groups_are_whole(type_: str, each: int, divided: set) -> None:
    """A part of the channels would be divided into other groups."""
    g = Draft()
    x, kernel, result = (None, 6, 6, 4), (3, 3, each, 8), (None, 6, 6, 8)
    sizes = g.op("Shape", [g.source(*x)], (4,), dtype="int32") if type_.endswith("Input") else g.const(kernel)
    operands = {"Conv2D": [g.source(*x), g.source(*kernel)], "Conv2DBackpropInput": [sizes, g.source(*kernel), g.source(*result)],
                "Conv2DBackpropFilter": [g.source(*x), sizes, g.source(*result)]}[type_]
    made = {"Conv2D": result, "Conv2DBackpropInput": (None,) * 4, "Conv2DBackpropFilter": kernel}[type_]
    rule = rule_for(g.graph.producer(g.op(type_, operands, made)), g.graph)
    assert {factor for factor in rule.factors if rule.kind(factor) in ("pass", SUM)} == divided


def test_missing_knowledge_is_said() -> None:
    g = Draft()
    strange = g.op("Strange", [g.source(3)], (3,))
    moved = g.op("Transpose", [g.source(2, 3), g.source(2, dtype="int32")], (None, None))
    with pytest.raises(NoRule, match="no rule for the op type Strange"):
        rule_for(g.graph.producer(strange), g.graph)
    with pytest.raises(NoRule, match="not a constant"):
        rule_for(g.graph.producer(moved), g.graph)


@pytest.mark.parametrize("type_", ["ApplyAdam", "ResourceApplyMomentum", "ResourceSparseApplyAdagrad", "ScatterAdd"])
def test_updates_alias_their_variables(type_: str) -> None:
    letters = {"ApplyAdam": "vvvssssssg", "ResourceApplyMomentum": "vvsgs", "ResourceSparseApplyAdagrad": "vvsri",
               "ScatterAdd": "vir"}[type_]
    g = Draft()
    shapes = {"v": (5, 4), "g": (5, 4), "s": (), "r": (2, 4), "i": (2,)}
    inputs = [g.source(*shapes[letter]) for letter in letters]
    op = g.graph.add("update", type_, inputs, [] if type_.startswith("Resource") else [((5, 4), "float32_ref")])
    rule = rule_for(op, g.graph)
    slots = [i for i, letter in enumerate(letters) if letter == "v"]
    assert [pair[0] for pair in rule.alias] == slots
    assert all(rule.inputs[i] == (("d0",), ("d1",)) for i in slots)
    assert len(rule.roles) == len(letters)


def test_table_is_large_enough() -> None:
    assert len(RULES) > 250
