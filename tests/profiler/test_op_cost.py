"""FLOPs and bytes of single ops and loops, against counts by hand."""
from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

import pytest

from tests.ir.graphs import Draft
from whale_tf.errors import PlanError
from whale_tf.profiler.op_cost import OpCost, assumed_ops, op_costs, slot_count, tensor_bytes


def cost(type_: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Any = None) -> OpCost:
    """The cost of one op; an input is a shape or a constant's value (a list)."""
    draft = Draft()
    tensors = [draft.const(i) if isinstance(i, list) else draft.source(*i) for i in inputs]
    draft.op(type_, tensors, *outputs, attrs=attrs)
    return op_costs(draft.graph)[-1]


CONV: Dict[str, Any] = {"data_format": "NHWC", "strides": (1, 2, 2, 1)}
NCHW: Dict[str, Any] = {"data_format": "NCHW", "strides": (1, 1, 2, 2)}
X, W, Y = (8, 14, 14, 16), (3, 3, 16, 32), (8, 7, 7, 32)
CONV_FLOPS = 2 * 8 * 7 * 7 * 32 * 3 * 3 * 16


@pytest.mark.parametrize("type_,inputs,outputs,attrs,flops", [
    ("MatMul", [(4, 5), (5, 6)], [(4, 6)], None, 2 * 4 * 5 * 6),
    ("MatMul", [(5, 4), (6, 5)], [(4, 6)], {"transpose_a": True, "transpose_b": True}, 2 * 4 * 5 * 6),
    ("BatchMatMulV2", [(2, 3, 4, 5), (2, 3, 5, 6)], [(2, 3, 4, 6)], None, 2 * 6 * 4 * 5 * 6),
    ("BatchMatMulV2", [(2, 3, 4, 5), (5, 6)], [(2, 3, 4, 6)], None, 2 * 6 * 4 * 5 * 6),
    ("Einsum", [(2, 3, 4), (4, 5, 6)], [(2, 3, 5, 6)], {"equation": "abc,cde->abde"}, 2 * 2 * 3 * 4 * 5 * 6),
    ("Conv2D", [X, W], [Y], CONV, CONV_FLOPS),
    ("Conv2D", [(8, 16, 14, 14), W], [(8, 32, 7, 7)], NCHW, CONV_FLOPS),
    ("Conv2DBackpropInput", [list(X), W, Y], [X], CONV, CONV_FLOPS),
    ("Conv2DBackpropFilter", [X, list(W), Y], [W], CONV, CONV_FLOPS),
    ("DepthwiseConv2dNative", [X, (3, 3, 16, 2)], [Y], CONV, 2 * 8 * 7 * 7 * 32 * 9),
    ("Conv3D", [(2, 4, 4, 4, 3), (2, 2, 2, 3, 5)], [(2, 4, 4, 4, 5)], {"data_format": "NDHWC"}, 2 * 2 * 64 * 5 * 8 * 3),
])
def test_contractions_cost_two_flops_per_product(type_: str, inputs: Any, outputs: Any, attrs: Any, flops: int) -> None:
    found = cost(type_, inputs, outputs, attrs)
    assert found.flops == flops and found.is_contraction


def test_contraction_reads_its_operands_and_writes_its_result() -> None:
    assert cost("MatMul", [(4, 5), (5, 6)], [(4, 6)]).bytes == 4 * (20 + 30 + 24)


@pytest.mark.parametrize("type_,inputs,outputs,attrs,flops", [
    ("AddV2", [(4, 5), (5,)], [(4, 5)], None, 20),
    ("AddN", [(4, 5)] * 3, [(4, 5)], None, 40),
    ("Tanh", [(4, 5)], [(4, 5)], None, 20),
    ("SparseTensorDenseMatMul", [(30, 2), (30,), [4, 9], (9, 5)], [(4, 5)], None, 2 * 30 * 5),
    ("SparseTensorDenseMatMul", [(None, 2), (None,), [4, 9], (4, 5)], [(9, 5)], {"adjoint_a": True}, 2 * 9 * 5),
    ("Softmax", [(4, 5)], [(4, 5)], None, 100),
    ("Sum", [(4, 5), [0]], [(5,)], None, 20),
    ("BiasAddGrad", [(4, 5)], [(5,)], None, 20),
    ("Transpose", [(4, 5), [1, 0]], [(5, 4)], None, 0),
    ("MaxPool", [(2, 8, 8, 3)], [(2, 4, 4, 3)], {"ksize": (1, 2, 2, 1)}, 4 * 96),
    ("Reshape", [(4, 5), [20]], [(20,)], None, 0),
    ("FusedBatchNormV3", [(2, 4, 4, 3), (3,), (3,), (0,), (0,)], [(2, 4, 4, 3)] + [(3,)] * 5, None, 8 * 96),
])
def test_other_ops_cost_a_few_flops_per_element(type_: str, inputs: Any, outputs: Any, attrs: Any, flops: int) -> None:
    found = cost(type_, inputs, outputs, attrs)
    assert found.flops == flops and not found.is_contraction


def test_what_hands_its_buffer_on_is_free() -> None:
    assert cost("Reshape", [(4, 5), [20]], [(20,)]) == cost("Identity", [(4, 5)], [(4, 5)]) == OpCost(0.0, 0.0)


def test_look_up_reads_the_rows_it_returns() -> None:
    assert cost("GatherV2", [(1000, 16), (8,), [0]], [(8, 16)]).bytes == 2 * 4 * 8 * 16 + 4 * 8


@pytest.mark.parametrize("type_,handles,slots,per_element", [
    ("ApplyGradientDescent", 1, 0, 2), ("ApplyMomentum", 2, 1, 4), ("ApplyAdam", 3, 2, 12), ("ApplyRMSProp", 3, 2, 9)])
def test_updates(type_: str, handles: int, slots: int, per_element: int) -> None:
    draft = Draft()
    variables = [draft.op("VariableV2", (), (6, 7), dtype="float32_ref") for _ in range(handles)]
    draft.op(type_, variables + [draft.const(0.1), draft.source(6, 7)], (6, 7), dtype="float32_ref")
    assert slot_count(draft.graph.ops[-1], draft.graph) == slots
    found = op_costs(draft.graph)[-1]
    assert found.flops == per_element * 42 and found.bytes == (3 + 2 * slots) * 42 * 4


def test_unknown_sizes_count_as_the_batch() -> None:
    draft = Draft()
    product = draft.op("MatMul", [draft.source(None, 5), draft.source(5, 6)], (None, 6))
    assert op_costs(draft.graph, batch=7)[-1].flops == 2 * 7 * 5 * 6
    assert tensor_bytes(draft.graph, product) == 0
    with pytest.raises(PlanError, match=r"FLOPs of op 'matmul_2' \(MatMul\) are not known: .* give a batch size"):
        op_costs(draft.graph)


def test_product_of_unknown_rank_costs_its_weights_once_for_each_example() -> None:
    draft = Draft()
    draft.op("MatMul", [draft.source(None, 5), draft.source(5, 6)], (None, 6))
    product = draft.graph.op("matmul_2")
    graph = draft.graph.with_shapes({product.inputs[0]: None, product.outputs[0]: None})
    assert op_costs(graph, batch=7)[-1].flops == 2 * 7 * 5 * 6
    assert assumed_ops(graph, [product.id]) == ["matmul_2"] and not assumed_ops(draft.graph, [product.id])


def loop(start: int, limit: int, comparison: str = "Less", through: str = "", step: int = 1) -> Tuple[Draft, int]:
    """A v1 loop around a product, the limit behind an op of type ``through``; returns the loop's exit."""
    draft = Draft()
    frame = {"frame_name": "loop"}
    enter = draft.op("Enter", [draft.const(start)], (), dtype="int32", attrs=frame)
    merge = draft.op("Merge", [enter], (), (), dtype="int32", name="counter")
    following = draft.op("AddV2", [draft.const(step), merge], (), dtype="int32")
    draft.graph.op("counter").inputs = (enter, draft.op("NextIteration", [following], (), dtype="int32"))
    constant = draft.const(limit)
    limit_in = draft.op("Enter", [draft.op(through, [constant], (), dtype="int32") if through else constant], (), dtype="int32",
                        attrs=frame)
    draft.op("LoopCond", [draft.op(comparison, [merge, limit_in], (), dtype="bool")], (), dtype="bool")
    x, w = (draft.op("Enter", [draft.source(*shape)], shape, attrs=frame) for shape in ((4, 5), (5, 6)))
    draft.op("MatMul", [x, w], (4, 6), name="product")
    return draft, draft.op("Exit", [merge], (), dtype="int32")


@pytest.mark.parametrize("start,limit,comparison,step,count", [
    (0, 7, "Less", 1, 7), (2, 7, "Less", 1, 5), (1, 7, "LessEqual", 1, 7), (0, 7, "Less", 3, 3), (1, 7, "LessEqual", 3, 3),
    (7, 1, "Greater", -2, 3)])
def test_loops_ops_run_as_often_as_its_counter_says(start: int, limit: int, comparison: str, step: int, count: int) -> None:
    graph = loop(start, limit, comparison, step=step)[0].graph
    assert op_costs(graph)[graph.op("product").id].flops == count * 2 * 4 * 5 * 6


@pytest.mark.parametrize("through", ["Identity", "PreventGradient", "EnsureShape", "Reshape", "ExpandDims", "Cast"])
def test_limit_is_known_behind_what_hands_it_on(through: str) -> None:
    graph = loop(0, 7, "Less", through)[0].graph
    assert op_costs(graph)[graph.op("product").id].flops == 7 * 2 * 4 * 5 * 6


def test_gradients_loop_runs_as_often_as_the_forward_loop() -> None:
    draft, exit_ = loop(0, 7)
    frame = {"frame_name": "gradient"}
    merge = draft.op("Merge", [draft.op("Enter", [exit_], (), dtype="int32", attrs=frame)], (), (), dtype="int32")
    one = draft.op("Enter", [draft.const(1)], (), dtype="int32", attrs=frame)
    # the forward loop's counter starts at zero, so its limit is its count
    draft.op("LoopCond", [draft.op("GreaterEqual", [merge, one], (), dtype="bool")], (), dtype="bool")
    x, w = (draft.op("Enter", [draft.source(*shape)], shape, attrs=frame) for shape in ((4, 5), (5, 6)))
    draft.op("MatMul", [x, w], (4, 6), name="backward")
    assert op_costs(draft.graph)[draft.graph.op("backward").id].flops == 7 * 2 * 4 * 5 * 6


@pytest.mark.parametrize("step, count", [(1, 3), (2, 2)])
def test_functional_loop_costs_its_body_each_time(step: int, count: int) -> None:
    condition, body, draft = Draft(), Draft(), Draft()
    counter = condition.op("_Arg", (), (), dtype="int32", attrs={"index": 0})
    condition.op("_Retval", [condition.op("Less", [counter, condition.const(3)], (), dtype="bool")], attrs={"index": 0})
    body.op("MatMul", [body.source(4, 5), body.source(5, 6)], (4, 6))
    own = body.op("_Arg", (), (), dtype="int32", attrs={"index": 0})
    body.op("_Retval", [body.op("AddV2", [own, body.const(step)], (), dtype="int32")], attrs={"index": 0})
    draft.graph.add("while", "While", [draft.const(0)], [((), "int32")],
                    body={"cond": condition.graph, "body": body.graph})
    assert op_costs(draft.graph)[-1].flops == count * 2 * 4 * 5 * 6
