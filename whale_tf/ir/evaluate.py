"""Values of integer ops whose operands are known, exactly or as extents (:mod:`whale_tf.ir.extents`)."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from whale_tf.errors import GraphError
from whale_tf.ir.extents import (
    Size,
    SizeLike,
    UnknownExtent,
    Value,
    as_value,
    broadcast_gradient_args,
    maximum,
    minimum,
    scalar,
    static_ints,
    vector,
)
from whale_tf.ir.traits import traits

MAX_ELEMENTS = 1 << 16  # larger integer constants are data, not extents
Attrs = Dict[str, Any]
Evaluator = Callable[[Attrs, Sequence[Value]], Sequence[Value]]  # an op's attributes and operands -> its results


def evaluate(op_type: str, attrs: Attrs, inputs: Sequence[Value], name: str = "") -> Optional[List[Value]]:
    """Outputs of an integer op; None if they cannot be derived from the operands' values.

    Args:
        name: the op's name, for messages.

    Raises:
        GraphError: the op cannot have these operands or attributes.
    """
    evaluator = EVALUATORS.get(traits(op_type).value)
    if evaluator is None:
        return None
    try:
        results = list(evaluator(attrs, inputs))
    except (UnknownExtent, ZeroDivisionError, IndexError):  # what cannot run may be in a branch that never does
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise GraphError("op {!r} ({}) cannot be evaluated for operands {} and attributes {}: {}: {}; check its inputs".format(
            name, op_type, [value.tolist() for value in inputs], attrs, type(error).__name__, error)) from error
    return results if all(r.size <= MAX_ELEMENTS for r in results) else None


def strided_index(attrs: Attrs, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> List[Any]:
    """A StridedSlice as the equivalent NumPy index."""
    index: List[Any] = []
    for i in range(len(begin)):
        bit = 1 << i
        if attrs.get("ellipsis_mask", 0) & bit:
            index.append(Ellipsis)
        elif attrs.get("new_axis_mask", 0) & bit:
            index.append(None)
        elif attrs.get("shrink_axis_mask", 0) & bit:
            index.append(int(begin[i]))
        else:
            index.append(slice(None if attrs.get("begin_mask", 0) & bit else int(begin[i]),
                               None if attrs.get("end_mask", 0) & bit else int(end[i]), int(strides[i])))
    return index


def _array(result: Any) -> Value:
    return result if isinstance(result, np.ndarray) else scalar(result)


def _ints(value: Value) -> List[int]:
    result = static_ints(value)
    if result is None:
        raise UnknownExtent("an axis or index that is not known")
    return result


def _int(value: Value) -> int:
    return _ints(value)[0]


def _of(function: Callable[..., Any]) -> Evaluator:
    """An op whose one result is a function of its operands."""
    return lambda attrs, inputs: [_array(function(*inputs))]


def _elementwise(function: Callable[[Any, Any], Any]) -> Evaluator:
    return _of(np.frompyfunc(function, 2, 1))


def _compare(function: Callable[[int], bool]) -> Evaluator:
    def decide(a: SizeLike, b: SizeLike) -> int:
        difference = a - b
        if isinstance(difference, Size):
            signs = {coefficient > 0 for coefficient in difference.terms.values()}
            if difference.counts is not None and len(signs) == 1 and not difference.may_be_zero:  # of c b + c' b' with c, c' > 0
                return int(function(1 if signs.pop() else -1))
            raise UnknownExtent("a comparison that depends on the batch")
        return int(function(difference))
    compare = _elementwise(decide)

    def evaluator(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
        if not attrs.get("incompatible_shape_error", True) and not _broadcast(*inputs):
            return [scalar(int(function(1)))]  # they differ
        return compare(attrs, inputs)
    return evaluator


def _broadcast(a: Value, b: Value) -> bool:
    """Whether operands of these shapes have a common one."""
    return all(x == y or 1 in (x, y) for x, y in zip(a.shape[::-1], b.shape[::-1]))


def _cast(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    """The same numbers; as booleans, whether they are not zero."""
    return EVALUATORS["not_equal"]({}, [inputs[0], scalar(0)]) if attrs.get("DstT") == "bool" else inputs[:1]


def _condition(value: Value, rank: int) -> np.ndarray:
    """Booleans that choose rows of operands of a rank."""
    return np.array(_ints(value), dtype=bool).reshape(value.shape + (1,) * (rank - value.ndim))


def _reduce(function: Callable[[Any, Any], Any], start: Optional[int]) -> Evaluator:
    def evaluator(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
        data = inputs[0]
        axes = sorted(a % max(data.ndim, 1) for a in _ints(inputs[1])) if data.ndim else []
        moved = np.moveaxis(data, axes, range(len(axes))) if axes else data
        rest = moved.shape[len(axes):]
        flat = moved.reshape((-1,) + rest) if axes else moved[None]
        if flat.shape[0] == 0 and start is None:
            raise UnknownExtent("an empty reduction")
        result = np.empty(rest, dtype=object)
        for index in np.ndindex(*rest):
            column = list(flat[(slice(None),) + index])
            total = column[0] if column else start
            for element in column[1:]:
                total = function(total, element)
            result[index] = total
        if attrs.get("keep_dims", False):
            result = result.reshape([1 if a in axes else n for a, n in enumerate(data.shape)])
        return [result]
    return evaluator


def _strided_slice(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    return [_array(inputs[0][tuple(strided_index(attrs, *map(_ints, inputs[1:4])))])]


def _slice(x: Value, begin: Value, size: Value) -> Value:
    return x[tuple(slice(b, None if s < 0 else b + s) for b, s in zip(_ints(begin), _ints(size)))]


def _squeeze(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    return [np.squeeze(inputs[0], axis=tuple(attrs.get("squeeze_dims") or ()) or None)]


def _split_sizes(x: Value, lengths: Value, axis: Value) -> Sequence[Value]:
    """Parts of the given lengths; -1 stands for what the others leave."""
    sizes, at = _ints(lengths), _int(axis)
    rest = x.shape[at] - sum(size for size in sizes if size >= 0)
    return np.split(x, np.cumsum([size if size >= 0 else rest for size in sizes])[:-1], axis=at)


def _range(start: Value, limit: Value, delta: Value) -> Value:
    numbers = range(_int(start), _int(limit), _int(delta))
    if len(numbers) > MAX_ELEMENTS:
        raise UnknownExtent("a range too long to be an extent")
    return vector(list(numbers))


def _fill(shape: Value, element: Value) -> Value:
    sizes = _ints(shape)
    if int(np.prod(sizes, dtype=np.int64)) > MAX_ELEMENTS:
        raise UnknownExtent("too large to be an extent")
    result = np.empty(sizes, dtype=object)
    result[...] = element[()]
    return result


def _dynamic_stitch(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    half = len(inputs) // 2
    if any(index.shape != data.shape for index, data in zip(inputs[:half], inputs[half:])):
        raise UnknownExtent("rows are not extents")
    indices = [_ints(v) for v in inputs[:half]]
    result = np.empty(1 + max([i for part in indices for i in part] or [-1]), dtype=object)
    for part, data in zip(indices, inputs[half:]):
        for position, element in zip(part, data.flat):
            result[position] = element
    if None in result.tolist():
        raise UnknownExtent("elements that no operand provides")
    return [result]


def _gather(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    axis = _int(inputs[2]) if len(inputs) > 2 else 0
    if attrs.get("batch_dims", 0):
        raise UnknownExtent("a batched gather of extents")
    return [_array(np.take(inputs[0], np.array(_ints(inputs[1]), dtype=int).reshape(inputs[1].shape), axis=axis))]


def _concat(axis: Value, parts: Sequence[Value]) -> Sequence[Value]:
    return [np.concatenate(list(parts), axis=_int(axis))]


def _concat_offset(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    axis = _int(inputs[0]) % len(inputs[1])
    results, offset = [], 0  # type: List[Value], SizeLike
    for shape in inputs[1:]:
        begin = vector([0] * len(shape))
        begin[axis] = offset
        offset = offset + shape[axis]
        results.append(begin)
    return results


def _broadcast_args(a: Value, b: Value) -> Value:
    rank = max(len(a), len(b))
    pairs = zip([1] * (rank - len(a)) + list(a), [1] * (rank - len(b)) + list(b))
    return vector([y if not isinstance(x, Size) and x == 1 else x for x, y in pairs])


def _list_diff(attrs: Attrs, inputs: Sequence[Value]) -> Sequence[Value]:
    drop = set(_ints(inputs[1]))
    kept = [(i, v) for i, v in enumerate(_ints(inputs[0])) if v not in drop]
    return [vector([v for _, v in kept]), vector([i for i, _ in kept])]


def _pad(x: Value, widths: Value) -> Value:
    pairs = np.array(_ints(widths)).reshape(-1, 2)
    return np.pad(x, [tuple(pair) for pair in pairs], "constant", constant_values=0)


# By name: ``value`` in the rows of :mod:`whale_tf.ir.traits`.
EVALUATORS: Dict[str, Evaluator] = {
    "first": lambda attrs, inputs: inputs[:1], "cast": _cast,
    "add": _elementwise(lambda a, b: a + b), "subtract": _elementwise(lambda a, b: a - b),
    "multiply": _elementwise(lambda a, b: a * b), "floor_divide": _elementwise(lambda a, b: a // b),
    "remainder": _elementwise(lambda a, b: a % b), "maximum": _elementwise(maximum), "minimum": _elementwise(minimum),
    "negative": _of(lambda x: -x),
    "equal": _compare(lambda d: d == 0), "not_equal": _compare(lambda d: d != 0), "less": _compare(lambda d: d < 0),
    "less_equal": _compare(lambda d: d <= 0), "greater": _compare(lambda d: d > 0),
    "greater_equal": _compare(lambda d: d >= 0),
    "logical_and": _elementwise(lambda a, b: int(a and b)), "logical_or": _elementwise(lambda a, b: int(a or b)),
    "select": _of(lambda condition, x, y: np.where(_condition(condition, condition.ndim), x, y)),
    "select_rows": _of(lambda condition, x, y: np.where(_condition(condition, x.ndim), x, y)),
    "product": _reduce(lambda a, b: a * b, 1), "sum": _reduce(lambda a, b: a + b, 0),
    "max": _reduce(maximum, None), "min": _reduce(minimum, None),
    "all": _reduce(lambda a, b: int(a and b), 1), "any": _reduce(lambda a, b: int(a or b), 0),
    "strided_slice": _strided_slice, "slice": _of(_slice), "squeeze": _squeeze,
    "reshape": _of(lambda x, shape: x.reshape(_ints(shape))),
    "expand_dims": _of(lambda x, axis: np.expand_dims(x, _int(axis))),
    "transpose": _of(lambda x, order: np.transpose(x, _ints(order))),
    "pack": lambda attrs, inputs: [np.stack(list(inputs), axis=attrs.get("axis", 0))],
    "unpack": lambda attrs, inputs: [_array(part) for part in np.moveaxis(inputs[0], attrs.get("axis", 0), 0)],
    "split": lambda attrs, inputs: np.split(inputs[1], attrs["num_split"], axis=_int(inputs[0])),
    "split_sizes": lambda attrs, inputs: _split_sizes(*inputs),
    "concat": lambda attrs, inputs: _concat(inputs[-1], inputs[:-1]),
    "concat_axis_first": lambda attrs, inputs: _concat(inputs[0], inputs[1:]),
    "pad": _of(_pad), "tile": _of(lambda x, counts: np.tile(x, _ints(counts))),
    "range": _of(_range), "fill": _of(_fill),
    "dynamic_stitch": _dynamic_stitch, "gather": _gather, "concat_offset": _concat_offset,
    "broadcast_gradient_args": lambda attrs, inputs: [
        as_value(axes) for axes in broadcast_gradient_args(list(inputs[0]), list(inputs[1]))],
    "broadcast_args": _of(_broadcast_args),
    "invert_permutation": _of(lambda order: as_value(np.argsort(_ints(order)))), "list_diff": _list_diff,
    "zeros_like": _of(lambda x: as_value(np.zeros(x.shape, dtype=int))),
    "ones_like": _of(lambda x: as_value(np.ones(x.shape, dtype=int))),
}
