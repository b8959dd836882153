"""Which ops are low: small graphs, and the lists of op types."""
from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import pytest

from whale_tf.ir.graph import OpGraph
from whale_tf.ir.precision import Typed, low_ops
from whale_tf.ir.traits import traits
from whale_tf.ir.traits.row import Precision

pytestmark = pytest.mark.once


def low(lines: Sequence[str], without: Tuple[str, ...] = ()) -> List[str]:
    """Names of the low ops of a graph given as ``name Type operands``; all tensors are float32."""
    graph = OpGraph()
    typed: Dict[int, Typed] = {}
    for line in lines:
        name, kind, *operands = line.split()
        op = graph.add(name, kind, [graph.tensor(operand) for operand in operands], [((8,), "float32")])
        if traits(kind).precision is not Precision.FIXED:
            typed[op.id] = Typed("T", tuple(range(len(operands))), (0,))
    return [graph.ops[op].name for op in sorted(low_ops(graph, typed, lambda kind: kind not in without))]


LAYER = ["x Placeholder", "w VarHandleOp", "a MatMul x w", "b Tanh a", "c MatMul b w"]


def test_what_is_between_low_ops_is_low() -> None:
    assert low(LAYER) == ["a", "b", "c"]


def test_what_follows_alone_stays() -> None:
    assert low([*LAYER, "d Sigmoid c"]) == ["a", "b", "c"]


def test_moves_beside_low_ops_are_low_on_both_sides() -> None:
    assert low(["x Placeholder", "r Reshape x x", "a MatMul r r", "t Transpose a a", "m Mean t t"]) == ["r", "a", "t"]


def test_behind_an_op_that_needs_float32_inferred_ops_do_too() -> None:
    """A layer norm between products."""
    lines = ["x Placeholder", "a MatMul x x", "m Mean a x", "s Sub a m", "g Mul s x", "r Relu g", "b MatMul r x"]
    assert low(lines) == ["a", "r", "b"]


def test_moves_between_ops_that_need_float32_stay() -> None:
    assert low(["x Placeholder", "a MatMul x x", "m Mean a x", "r Reshape m x", "e Exp r"]) == ["a"]


def test_ops_without_kernels_and_unknown_ones_are_borders() -> None:
    assert low(LAYER, without=("Tanh",)) == ["a", "c"]
    assert low(["x Placeholder", "a MatMul x x", "u Unheard a", "b MatMul u x"]) == ["a", "b"]


def test_sizes_are_read_off_what_is_low_anyway() -> None:
    assert low(["x Placeholder", "n Exp x", "s Shape n", "a MatMul n n"]) == ["s", "a"]


def test_no_type_that_loses_range_is_low() -> None:
    assert {traits(kind).precision for kind in ("Exp", "Sum", "Mean", "Pow", "SoftmaxCrossEntropyWithLogits")} == {Precision.HIGH}
    assert traits("ResourceApplyAdam").precision is traits("ReadVariableOp").precision is Precision.FIXED
