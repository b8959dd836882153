"""The strategies of single ops, from their rules; no TensorFlow."""
from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np
import pytest

from whale_tf.ir.graph import Op, OpGraph, Shape
from whale_tf.ir.parts import even_sizes
from whale_tf.patterns import Strategy, strategies
from whale_tf.patterns.moves import gradient_bytes, moved_bytes
from whale_tf.patterns.spread import Spread, everywhere, once, partial, shard
from whale_tf.patterns.strategy import CLASSES, LOOK_UP, Sizes


def op_of(type_: str, shapes: Sequence[Any], outputs: Sequence[Shape], **attrs: Any) -> Op:
    """An op whose operands are placeholders of the given shapes, or int32 constants (lists)."""
    graph = OpGraph()
    inputs = []
    for i, shape in enumerate(shapes):
        if isinstance(shape, list):
            value = np.array(shape, "int32")
            made = graph.add(f"c{i}", "Const", (), [(value.shape, "int32")], value=value)
        else:
            made = graph.add(f"x{i}", "Placeholder", (), [(shape, "float32")])
        inputs.append(made.outputs[0])
    op = graph.add("op", type_, inputs, [(shape, "float32") for shape in outputs], attrs=attrs)
    op.attrs["graph"] = graph
    return op


def found(op: Op, count: int = 2, batch: Sequence[int] = (0,)) -> Dict[str, Strategy]:
    """By pattern; dimension 0 of the operands in ``batch`` counts examples."""
    graph = op.attrs.pop("graph")
    dims = {op.inputs[i]: 0 for i in batch}
    return {s.pattern: s for s in strategies(op, Sizes(graph), (1,) * count, dims).found if s.pattern != "linear"}


def test_column_and_row_of_a_product() -> None:
    strategy = found(op_of("MatMul", [(None, 6), (6, 10)], [(None, 10)]), 3)
    assert sorted(strategy) == ["column", "row"]  # not the rows: they are examples
    assert strategy["column"].needs == (everywhere, shard(1, (4, 3, 3)))
    assert strategy["column"].gives == (shard(1, (4, 3, 3)),)
    assert strategy["row"].needs == (shard(1, (2, 2, 2)), shard(0, (2, 2, 2))) and strategy["row"].gives == (partial,)


def test_transposed_operands() -> None:
    strategy = found(op_of("MatMul", [(None, 6), (10, 6)], [(None, 10)], transpose_b=True))
    assert strategy["column"].needs[1] == shard(0, (5, 5))


def test_too_small_or_unknown_dimensions_give_reasons() -> None:
    op = op_of("MatMul", [(None, 3), (3, 10)], [(None, 10)])
    graph = op.attrs.pop("graph")
    result = strategies(op, Sizes(graph), (1,) * 4, {op.inputs[0]: 0})
    assert [s.pattern for s in result.found if s.pattern != "linear"] == ["column"]
    assert result.reasons == ["dimension 'k' has 3 elements, fewer than 4 devices"]


def test_heads_are_the_major_factor_of_a_reshape() -> None:
    op = op_of("Reshape", [(None, 12), [-1, 3, 4]], [(None, 3, 4)])
    strategy = next(iter(found(op, 3).values()))
    assert strategy.needs[0] == shard(1, (4, 4, 4)) and strategy.gives == (shard(1, (1, 1, 1)),)
    assert [(x.position, x.element, x.sizes) for x in strategy.localise] == [(1, 1, (1, 1, 1))]


def test_leading_dimensions_of_a_reshape_stay_where_sizes_behind_them_are_not_known() -> None:
    """`[E, B, C, H]` as `[E, B C, H]`: what TF 1.15 makes of an einsum over experts."""
    op = op_of("Reshape", [(4, None, 2, 6), [4, -1, 6]], [(4, None, 6)])
    graph = op.attrs.pop("graph")
    strategy = {s.gives[0]: s for s in strategies(op, Sizes(graph), (1, 1), {op.inputs[0]: 1, op.outputs[0]: 1}).found}
    assert strategy[shard(0, (2, 2))].needs[0] == shard(0, (2, 2))
    assert [(x.element, x.sizes) for x in strategy[shard(0, (2, 2))].localise] == [(0, (2, 2))]
    assert strategy[shard(2, (3, 3))].needs[0] == shard(3, (3, 3))


def test_leading_dimensions_of_other_sizes_are_not_the_same() -> None:
    op = op_of("Reshape", [(4, None, 6), [2, -1, 6]], [(2, None, 6)])
    assert {s.gives[0] for s in found(op, 2, ()).values()} == {shard(2, (3, 3))}


def test_rank_of_a_sum_follows_from_its_axes() -> None:
    """As in the gradient of a broadcasting product, whose axes follow from shapes: its result has no static rank."""
    op = op_of("Sum", [(4, None, 6), [1]], [None], keep_dims=False)
    assert Sizes(op.attrs.pop("graph")).shape(op.outputs[0]) == (4, 6)


def test_reduction_over_the_divided_dimension() -> None:
    op = op_of("Sum", [(None, 6), [1]], [(None,)], keep_dims=False)
    assert found(op)["shard:d1"].gives == (partial,)
    mean = found(op_of("Mean", [(None, 5), [1]], [(None,)], keep_dims=False))["shard:d1"]
    assert mean.gives == (partial,) and mean.weights == pytest.approx((0.6, 0.4))


def test_classes_of_a_loss() -> None:
    strategy = found(op_of("SparseSoftmaxCrossEntropyWithLogits", [(None, 10), (None,)], [(None,), (None, 10)]))
    assert strategy["class_sharded"].how == CLASSES
    assert strategy["class_sharded"].gives == (once, shard(1, (5, 5)))


def test_rows_and_columns_of_an_embedding() -> None:
    strategy = found(op_of("GatherV2", [(11, 6), (None,), [0]], [(None, 6)], batch_dims=0), batch=(1,))
    assert strategy["embedding"].how == LOOK_UP and strategy["embedding"].needs[0] == shard(0, (6, 5))
    assert strategy["embedding"].gives == (partial,)
    assert strategy["embedding_column"].gives == (shard(1, (3, 3)),)


def test_convolution_by_channel() -> None:
    strategy = found(op_of("Conv2D", [(None, 8, 8, 4), (3, 3, 4, 6)], [(None, 8, 8, 6)], data_format="NHWC"))
    assert strategy["output_channel"].gives == (shard(3, (3, 3)),)
    assert strategy["input_channel"].gives == (partial,)


def test_nothing_of_an_op_without_a_rule() -> None:
    op = op_of("NeverHeardOf", [(4, 4)], [(4, 4)])
    result = strategies(op, Sizes(op.attrs.pop("graph")), (1, 1), {})
    assert not result.found and "no rule" in result.reasons[0]


def test_even_sizes() -> None:
    assert even_sizes(10, 3) == (4, 3, 3) and even_sizes(4, 4) == (1, 1, 1, 1) and sum(even_sizes(29, 8)) == 29


# -- prices ------------------------------------------------------------------------------------------------------------

HALVES, OTHER = shard(1, (5, 5)), shard(0, (3, 3))


@pytest.mark.parametrize("have,need,forward,backward", [
    (once, everywhere, 100, 100),  # a column: broadcast x, add up its gradient
    (partial, once, 100, 100),  # a row: add up y, broadcast its gradient
    (HALVES, once, 50, 50), (once, HALVES, 50, 50), (HALVES, OTHER, 50, 50), (HALVES, everywhere, 100, 100),
    (partial, HALVES, 100, 100), (HALVES, HALVES, 0, 0), (partial, everywhere, 200, 200),
])
def test_bytes_of_a_conversion_and_its_gradient(have: Spread, need: Spread, forward: float, backward: float) -> None:
    assert moved_bytes(have, need, 100, 2) == forward
    assert gradient_bytes(have, need, 100, 2) == backward
