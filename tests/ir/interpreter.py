"""A NumPy interpreter of op graphs, whole and in clones: the reference that needs no TensorFlow."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Set, Union

import numpy as np

from tests.ir.merging import Parts, merge
from whale_tf.ir.batch_axis import BatchAxis, Offset, Reduce, Scale, Slice, Whole
from whale_tf.ir.evaluate import strided_index
from whale_tf.ir.extents import broadcast_gradient_args
from whale_tf.ir.graph import Op, OpGraph

Arrays = List[np.ndarray]


def _reduction(function: Callable[..., Any]) -> Callable[[Op, Sequence[Any]], Arrays]:
    def run(op: Op, x: Sequence[Any]) -> Arrays:
        axes = tuple(int(a) for a in np.reshape(x[1], -1))
        return [function(x[0], axis=axes, keepdims=op.attrs.get("keep_dims", False))]
    return run


def _slice(op: Op, x: Sequence[Any]) -> Arrays:
    return [x[0][tuple(slice(b, None if s < 0 else b + s) for b, s in zip(x[1], x[2]))]]


def _strided_slice(op: Op, x: Sequence[Any]) -> Arrays:
    return [np.asarray(x[0][tuple(strided_index(op.attrs, x[1], x[2], x[3]))])]


def _strided_slice_grad(op: Op, x: Sequence[Any]) -> Arrays:
    result = np.zeros(x[0], x[4].dtype)
    result[tuple(strided_index(op.attrs, x[1], x[2], x[3]))] = x[4]
    return [result]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _cross_entropy(op: Op, x: Sequence[Any]) -> Arrays:
    p = _softmax(x[0])
    labels = np.eye(x[0].shape[-1])[x[1]]
    return [-np.sum(labels * np.log(p), -1), p - labels]


def _segment_sum(op: Op, x: Sequence[Any]) -> Arrays:
    result = np.zeros((int(x[2]),) + x[0].shape[x[1].ndim:], x[0].dtype)
    np.add.at(result, x[1].reshape(-1), x[0].reshape((-1,) + x[0].shape[x[1].ndim:]))
    return [result]


def _matmul(op: Op, x: Sequence[Any]) -> Arrays:
    a = np.swapaxes(x[0], -1, -2) if op.attrs.get("transpose_a") or op.attrs.get("adj_x") else x[0]
    b = np.swapaxes(x[1], -1, -2) if op.attrs.get("transpose_b") or op.attrs.get("adj_y") else x[1]
    return [a @ b]


def _divide_no_nan(op: Op, x: Sequence[Any]) -> Arrays:
    safe = np.where(x[1] == 0, 1.0, x[1])
    return [np.where(x[1] == 0, 0.0, x[0] / safe)]


def _select(op: Op, x: Sequence[Any]) -> Arrays:
    condition = x[0].reshape(x[0].shape + (1,) * (x[1].ndim - x[0].ndim)) if x[0].ndim == 1 else x[0]
    return [np.where(condition, x[1], x[2])]


def _gather(op: Op, x: Sequence[Any]) -> Arrays:
    shared = op.attrs.get("batch_dims", 0)
    return [_take(x[0], x[1], int(x[2]) if len(x) > 2 else 0, shared if shared >= 0 else shared + x[1].ndim)]


def _take(params: Any, indices: Any, axis: int, shared: int) -> np.ndarray:
    if not shared:
        return np.take(params, indices, axis)
    return np.stack([_take(one, own, axis - 1, shared - 1) for one, own in zip(params, indices)])


def _scatter_nd(op: Op, x: Sequence[Any]) -> Arrays:
    result = np.zeros(x[2], x[1].dtype)
    np.add.at(result, tuple(np.moveaxis(x[0], -1, 0)), x[1])
    return [result]


def _stitch(op: Op, x: Sequence[Any]) -> Arrays:
    indices, data = x[:len(x) // 2], x[len(x) // 2:]
    result = np.zeros((1 + max(i.max() for i in indices if i.size),) + data[0].shape[indices[0].ndim:], data[0].dtype)
    for index, rows in zip(indices, data):
        result[index] = rows
    return [result]


_NUMPY: Dict[str, Callable[..., Any]] = {
    "Neg": np.negative, "Square": np.square, "Tanh": np.tanh, "Exp": np.exp, "Abs": np.abs, "Relu": lambda x: np.maximum(x, 0),
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "RealDiv": np.divide, "Maximum": np.maximum,
    "SquaredDifference": lambda x, y: np.square(x - y), "Greater": np.greater, "FloorDiv": np.floor_divide,
    "FloorMod": np.mod, "Identity": lambda x: x, "StopGradient": lambda x: x, "ZerosLike": np.zeros_like,
    "OnesLike": np.ones_like, "AddN": lambda *x: sum(x), "BiasAdd": np.add, "ReluGrad": lambda g, x: g * (x > 0),
    "TanhGrad": lambda y, g: g * (1 - y * y), "Softmax": _softmax, "Sqrt": np.sqrt,
}
OPS: Dict[str, Callable[[Op, Sequence[Any]], Arrays]] = {
    "Sum": _reduction(np.sum), "Mean": _reduction(np.mean), "Max": _reduction(np.max), "Min": _reduction(np.min),
    "Prod": _reduction(np.prod), "All": _reduction(np.all), "Any": _reduction(np.any),
    "MatMul": _matmul, "BatchMatMulV2": _matmul, "BatchMatMul": _matmul, "DivNoNan": _divide_no_nan, "Select": _select,
    "SelectV2": lambda op, x: [np.where(x[0], x[1], x[2])],
    "L2Loss": lambda op, x: [np.sum(np.square(x[0])) / 2],
    "Reshape": lambda op, x: [np.reshape(x[0], x[1])], "Transpose": lambda op, x: [np.transpose(x[0], x[1])],
    "ExpandDims": lambda op, x: [np.expand_dims(x[0], int(x[1]))],
    "Squeeze": lambda op, x: [np.squeeze(x[0], tuple(op.attrs["squeeze_dims"]))],
    "ConcatV2": lambda op, x: [np.concatenate(x[:-1], int(x[-1]))],
    "Split": lambda op, x: np.split(x[1], op.attrs["num_split"], int(x[0])),
    "Pack": lambda op, x: [np.stack(x, op.attrs.get("axis", 0))],
    "Unpack": lambda op, x: list(np.moveaxis(x[0], op.attrs["axis"], 0)),
    "Slice": _slice, "StridedSlice": _strided_slice, "StridedSliceGrad": _strided_slice_grad,
    "Tile": lambda op, x: [np.tile(x[0], x[1])], "Fill": lambda op, x: [np.full(x[0], x[1])],
    "BroadcastTo": lambda op, x: [np.broadcast_to(x[0], x[1])], "Range": lambda op, x: [np.arange(*x)],
    "Gather": _gather, "GatherV2": _gather, "ScatterNd": _scatter_nd, "DynamicStitch": _stitch,
    "DynamicPartition": lambda op, x: [x[0][x[1] == part] for part in range(op.attrs["num_partitions"])],
    "GatherNd": lambda op, x: [x[0][tuple(np.moveaxis(x[1], -1, 0))]],
    "OneHot": lambda op, x: [np.where(np.arange(int(x[1])) == x[0][..., None], x[2], x[3])],
    "UnsortedSegmentSum": _segment_sum, "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "BiasAddGrad": lambda op, x: [x[0].reshape(-1, x[0].shape[-1]).sum(0)],
    "Shape": lambda op, x: [np.array(x[0].shape, np.int32)], "Size": lambda op, x: [np.int32(x[0].size)],
    "Cast": lambda op, x: [np.asarray(x[0]).astype(op.attrs["DstT"])], "Const": lambda op, x: [op.value],
    "BroadcastGradientArgs": lambda op, x: [np.array(a, np.int32) for a in broadcast_gradient_args(list(x[0]), list(x[1]))],
    "Where": lambda op, x: [np.argwhere(x[0])],
    **{name: (lambda op, x, f=f: [f(*x)]) for name, f in _NUMPY.items()},
}


def run(graph: OpGraph, feed: Mapping[int, np.ndarray]) -> Dict[int, np.ndarray]:
    """Values of all tensors of the whole program."""
    values = dict(feed)
    for op in graph.ops:
        if op.outputs and op.outputs[0] not in values:
            values.update(zip(op.outputs, OPS[op.type](op, [values[t] for t in op.inputs])))
    return values


def run_in_clones(graph: OpGraph, axis: BatchAxis, feed: Mapping[int, np.ndarray],
                  parts_of: Union[Sequence[int], Mapping[str, Sequence[int]]]) -> Dict[int, Any]:
    """Merged values of all tensors that have a layout, from clones that work on so many examples each; see :class:`Parts`.

    Clones run op by op side by side, so that a Reduce finds all their values.
    """
    parts = Parts(parts_of)
    count = len(parts)
    clones: List[Dict[int, np.ndarray]] = [{} for _ in range(count)]
    for tensor, value in feed.items():
        for i, clone in enumerate(clones):
            clone[tensor] = _rows(value, Slice(axis.sources[tensor], axis.layout(tensor).blocks or (1,)), parts, i) if (
                tensor in axis.sources) else value
    for op in graph.ops:
        if not op.outputs or op.outputs[0] in clones[0] or any(t not in clones[0] for t in op.inputs):
            continue
        if any(t in axis.unknown for t in op.outputs):
            continue
        results = []
        for i in range(count):
            operands = [_operand(axis, op, position, clones, parts, i) for position in range(len(op.inputs))]
            results.append(OPS[op.type](op, operands))
        for i in range(count):
            clones[i].update(zip(op.outputs, results[i]))
    inexact = beyond_inexact(graph, axis)
    return {t: merge(axis, t, [clone[t] for clone in clones], parts) for t in clones[0]
            if t not in axis.unknown and t not in inexact}


def beyond_inexact(graph: OpGraph, axis: BatchAxis) -> Set[int]:
    """Tensors that an inexact op has a part in."""
    ops = {op for op, _ in axis.inexact}
    found: Set[int] = set()
    for op in graph.ops:
        if op.id in ops or any(t in found for t in op.inputs):
            found.update(op.outputs)
    return found


def _rows(value: np.ndarray, step: Slice, parts: Parts, i: int) -> np.ndarray:
    assert value.shape[step.dim] == parts.total(step.blocks), (value.shape, step)
    return np.take(value, parts.rows(step.blocks, i), axis=step.dim)


def _operand(axis: BatchAxis, op: Op, position: int, clones: Sequence[Dict[int, np.ndarray]], parts: Parts,
             i: int) -> Any:
    tensor = op.inputs[position]
    value = clones[i][tensor]
    localise = axis.localise.get((op.id, position))
    if localise is not None:
        old = np.reshape(value, -1)
        new = [old[j] if size is None else parts.at(size, i) for j, size in enumerate(localise.components)]
        return np.reshape(np.array(new, old.dtype), np.shape(value))
    for step in axis.conversions.get((op.id, position), ()):
        if isinstance(step, Slice):
            value = _rows(value, step, parts, i)
        elif isinstance(step, Scale):
            value = value * parts.weight(step.power, i)
        elif isinstance(step, Offset):
            value = value + parts.shift(step.coefficient, i).astype(np.asarray(value).dtype)
        elif isinstance(step, Whole):
            value = np.reshape([parts.at(size) for size in step.components], np.shape(value))
        elif isinstance(step, Reduce):
            all_values = [clone[tensor] * parts.weight(step.power, j) if step.power else clone[tensor]
                          for j, clone in enumerate(clones)]
            value = sum(all_values) if step.kind == "sum" else getattr(np, step.kind)(np.stack(all_values), axis=0)
    return value
