"""Extents: integers that depend on the batch size, and their exact arithmetic.

``tf.shape(x)[0]``, a Reshape's target shape and a dynamic Mean's divisor are integer tensors whose elements are polynomials in
the number of examples ``b``.  A :class:`Size` is one such element.  A value is an object array of ``int`` and ``Size``, so
that NumPy's own indexing, concatenation and reductions work on it.

The symbols of a polynomial are tuples::

    BATCH            b_i in a clone, B in the whole
    ("dim", t, d)    a dimension that is unknown here but equal in all clones (a sequence length, say)
    ("rows", t, d)   a number of rows chosen by data (``tf.boolean_mask``): the whole number is the sum over the clones

Sizes are assumed to be at least one, because a dimension of extent zero would have no gradient.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from whale_tf.errors import GraphError
from whale_tf.ir.traits import traits

Symbol = Tuple[Any, ...]
Monomial = Tuple[Symbol, ...]
BATCH: Symbol = ("batch",)
MAX_ELEMENTS = 1 << 16  # larger integer constants are data, not extents


class UnknownExtent(ValueError):
    """A number that cannot be derived from what is known about the batch."""


class Size:
    """A polynomial with integer coefficients.  It is never a plain constant: those are ``int``."""

    __slots__ = ("terms",)

    def __init__(self, terms: Dict[Monomial, int]) -> None:
        self.terms = terms

    @staticmethod
    def of(symbol: Symbol) -> Size:
        return Size({(symbol,): 1})

    def __add__(self, other: SizeLike) -> SizeLike:
        terms = dict(self.terms)
        for monomial, coefficient in _terms(other).items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _make(terms)

    __radd__ = __add__

    def __neg__(self) -> SizeLike:
        return Size({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: SizeLike) -> SizeLike:
        return self + (-other)

    def __rsub__(self, other: SizeLike) -> SizeLike:
        return (-self) + other

    def __mul__(self, other: SizeLike) -> SizeLike:
        terms: Dict[Monomial, int] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in _terms(other).items():
                monomial = tuple(sorted(m1 + m2))
                terms[monomial] = terms.get(monomial, 0) + c1 * c2
        return _make(terms)

    __rmul__ = __mul__

    def __floordiv__(self, other: SizeLike) -> SizeLike:
        """Exact division; UnknownExtent if the quotient is not a polynomial."""
        return _divide(self, other)

    def __rfloordiv__(self, other: SizeLike) -> SizeLike:
        return _divide(other, self)

    def __mod__(self, other: SizeLike) -> SizeLike:
        _divide(self, other)
        return 0

    def __rmod__(self, other: SizeLike) -> SizeLike:
        _divide(other, self)
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.terms == other.terms

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __repr__(self) -> str:
        return " + ".join("*".join([str(c)] + ["/".join(map(str, s)) for s in m]) for m, c in sorted(self.terms.items()))

    @property
    def depends_on_batch(self) -> bool:
        return any(symbol[0] in ("batch", "rows") for monomial in self.terms for symbol in monomial)

    @property
    def affine(self) -> Optional[Tuple[int, int]]:
        """(c0, c1) if this is ``c0 + c1 b``, else None."""
        if set(self.terms) <= {(), (BATCH,)}:
            return self.terms.get((), 0), self.terms.get((BATCH,), 0)
        return None

    @property
    def surplus(self) -> Optional[int]:
        """The constant term, which every part of a batch has in addition to its share: c0 in ``c0 + c1 b t``, if every other term
        has examples or rows as a factor exactly once.  Else None."""
        counted = [sum(symbol[0] in ("batch", "rows") for symbol in monomial) for monomial in self.terms if monomial]
        return self.terms.get((), 0) if set(counted) == {1} else None

    def at(self, batch: int) -> SizeLike:
        """This size in a clone (or the whole) with ``batch`` examples."""
        terms: Dict[Monomial, int] = {}
        for monomial, coefficient in self.terms.items():
            rest = tuple(s for s in monomial if s != BATCH)
            terms[rest] = terms.get(rest, 0) + coefficient * batch ** (len(monomial) - len(rest))
        return _make(terms)


SizeLike = Union[int, Size]
Value = np.ndarray  # of dtype object: ints and Sizes
batch_size = Size.of(BATCH)


def _terms(value: SizeLike) -> Dict[Monomial, int]:
    return value.terms if isinstance(value, Size) else {(): int(value)}


def _make(terms: Dict[Monomial, int]) -> SizeLike:
    terms = {m: c for m, c in terms.items() if c}
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return Size(terms)


def _divide(numerator: SizeLike, denominator: SizeLike) -> SizeLike:
    if isinstance(numerator, Size) and isinstance(denominator, Size) and numerator == denominator:
        return 1
    divisor = _terms(denominator)
    if len(divisor) != 1:
        raise UnknownExtent(f"{numerator} // {denominator} is not a polynomial")
    (factors, scale), = divisor.items()
    terms: Dict[Monomial, int] = {}
    for monomial, coefficient in _terms(numerator).items():
        rest = list(monomial)
        for symbol in factors:
            if symbol not in rest:
                raise UnknownExtent(f"{numerator} // {denominator} is not a polynomial")
            rest.remove(symbol)
        if coefficient % scale:
            raise UnknownExtent(f"{numerator} // {denominator} is not exact")
        terms[tuple(rest)] = coefficient // scale
    return _make(terms)


def depends_on_batch(value: Value) -> bool:
    """Whether any element of a value changes with the number of examples."""
    return any(type(v) is Size and v.depends_on_batch for v in value.flat)


def is_static(value: Optional[Value]) -> bool:
    """Whether every element is a known integer."""
    return value is not None and not any(type(v) is Size for v in value.flat)


def static_ints(value: Optional[Value]) -> Optional[List[int]]:
    """The elements as a flat list of ints; None if one is not known."""
    if value is None or not is_static(value):
        return None
    return [int(v) for v in value.flat]


def as_value(array: Any) -> Value:
    """An object array of Python ints (and Sizes) with the shape of ``array``."""
    array = np.asarray(array)
    if array.dtype == object:
        return array
    result = np.empty(array.shape, dtype=object)
    result[...] = array.astype(object)
    return result


def vector(elements: Sequence[SizeLike]) -> Value:
    result = np.empty(len(elements), dtype=object)
    result[:] = list(elements)
    return result


def scalar(element: SizeLike) -> Value:
    result = np.empty((), dtype=object)
    result[()] = element
    return result


def product(sizes: Sequence[SizeLike]) -> SizeLike:
    result: SizeLike = 1
    for size in sizes:
        result = result * size
    return result


def maximum(a: SizeLike, b: SizeLike) -> SizeLike:
    """The larger of two sizes; UnknownExtent if that depends on the symbols' values."""
    if isinstance(a, Size) or isinstance(b, Size):
        difference = a - b
        if isinstance(difference, int):
            return a if difference >= 0 else b
        for sign, winner in ((1, a), (-1, b)):
            if all(sign * c > 0 for m, c in difference.terms.items() if m) and (
                    sign * sum(difference.terms.values()) >= 0):
                return winner  # all symbols are at least one
        raise UnknownExtent(f"max({a}, {b}) is not known")
    return max(a, b)


def minimum(a: SizeLike, b: SizeLike) -> SizeLike:
    return -maximum(-a, -b)


def broadcast_gradient_args(a: Sequence[SizeLike], b: Sequence[SizeLike]) -> Tuple[List[int], List[int]]:
    """Axes over which the gradients of two broadcast operands are summed, as TensorFlow's op of that name computes them: an axis
    along which both have a single element is summed in both, but equal shapes have no such axes at all.

    Raises:
        UnknownExtent: the result depends on an unknown size in front of the batch dimension.
    """
    if len(a) == len(b) and all(x == y for x, y in zip(a, b)):
        return [], []
    rank = max(len(a), len(b))
    pairs = list(zip([1] * (rank - len(a)) + list(a), [1] * (rank - len(b)) + list(b)))
    axes: Tuple[List[int], List[int]] = ([], [])
    doubtful = False
    for axis, (x, y) in enumerate(pairs):
        if doubtful and any(isinstance(s, Size) and s.depends_on_batch for s in (x, y)):
            raise UnknownExtent("a broadcast with unknown sizes in front of the batch dimension")
        if x != y and not (_is_one(x) or _is_one(y)):
            doubtful = True  # equal, or one of them is 1: in either case the batch dimension after it may shift
        if _is_one(x):
            axes[0].append(axis)
        if _is_one(y):
            axes[1].append(axis)
    return axes


def _is_one(size: SizeLike) -> bool:
    return not isinstance(size, Size) and size == 1


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation of integer ops.  Each evaluator takes the op's attributes and operand values and returns its outputs.

Evaluator = Callable[[Dict[str, Any], Sequence[Value]], Sequence[Value]]


def _elementwise(function: Callable[[Any, Any], Any]) -> Evaluator:
    universal = np.frompyfunc(function, 2, 1)

    def evaluate(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
        return [_array(universal(inputs[0], inputs[1]))]
    return evaluate


def _array(result: Any) -> Value:
    return result if isinstance(result, np.ndarray) else scalar(result)


def _ints(value: Value) -> List[int]:
    result = static_ints(value)
    if result is None:
        raise UnknownExtent("an axis or index that is not known")
    return result


def _int(value: Value) -> int:
    return _ints(value)[0]


def _reduce(function: Callable[[Any, Any], Any], start: Optional[int]) -> Evaluator:
    def evaluate(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
        data = inputs[0]
        axes = sorted(a % max(data.ndim, 1) for a in _ints(inputs[1])) if data.ndim else []
        keep = attrs.get("keep_dims", False)
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
        if keep:
            result = result.reshape([1 if a in axes else n for a, n in enumerate(data.shape)])
        return [result]
    return evaluate


def _strided_slice(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    index = strided_index(attrs, _ints(inputs[1]), _ints(inputs[2]), _ints(inputs[3]))
    result = inputs[0][tuple(index)]
    return [_array(result)]


def strided_index(attrs: Dict[str, Any], begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> List[Any]:
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


def _slice(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    begin, size = _ints(inputs[1]), _ints(inputs[2])
    return [inputs[0][tuple(slice(b, None if s < 0 else b + s) for b, s in zip(begin, size))]]


def _reshape(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return [inputs[0].reshape(_ints(inputs[1]))]


def _squeeze(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    axes = tuple(attrs.get("squeeze_dims") or ())
    return [np.squeeze(inputs[0], axis=axes or None)]


def _range(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    start, limit, delta = (_int(v) for v in inputs)
    count = len(range(start, limit, delta))
    if count > MAX_ELEMENTS:
        raise UnknownExtent("a range too long to be an extent")
    return [vector(list(range(start, limit, delta)))]


def _fill(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    shape = _ints(inputs[0])
    if int(np.prod(shape, dtype=np.int64)) > MAX_ELEMENTS:
        raise UnknownExtent("too large to be an extent")
    result = np.empty(shape, dtype=object)
    result[...] = inputs[1][()]
    return [result]


def _dynamic_stitch(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    half = len(inputs) // 2
    indices = [_ints(v) for v in inputs[:half]]
    result = np.empty(1 + max([i for part in indices for i in part] or [-1]), dtype=object)
    for part, data in zip(indices, inputs[half:]):
        if data.ndim > 1:
            raise UnknownExtent("rows are not extents")
        for position, element in zip(part, data.flat):
            result[position] = element
    if None in result.tolist():
        raise UnknownExtent("elements that no operand provides")
    return [result]


def _gather(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    axis = _int(inputs[2]) if len(inputs) > 2 else 0
    if attrs.get("batch_dims", 0):
        raise UnknownExtent("a batched gather of extents")
    return [_array(np.take(inputs[0], np.array(_ints(inputs[1]), dtype=int).reshape(inputs[1].shape), axis=axis))]


def _concat_offset(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    axis = _int(inputs[0]) % len(inputs[1])
    results, offset = [], 0  # type: List[Value], SizeLike
    for shape in inputs[1:]:
        begin = vector([0] * len(shape))
        begin[axis] = offset
        offset = offset + shape[axis]
        results.append(begin)
    return results


def _broadcast_gradient_args(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return [as_value(axes) for axes in broadcast_gradient_args(list(inputs[0]), list(inputs[1]))]


def _broadcast_args(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    a, b = list(inputs[0]), list(inputs[1])
    rank = max(len(a), len(b))
    pairs = zip([1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b)
    return [vector([y if _is_one(x) else x for x, y in pairs])]


def _invert_permutation(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return [as_value(np.argsort(_ints(inputs[0])))]


def _list_diff(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    drop = set(_ints(inputs[1]))
    kept = [(i, v) for i, v in enumerate(_ints(inputs[0])) if v not in drop]
    return [vector([v for _, v in kept]), vector([i for i, _ in kept])]


def _concat(axis: Value, parts: Sequence[Value]) -> Sequence[Value]:
    return [np.concatenate(list(parts), axis=_int(axis))]


def _split(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return np.split(inputs[1], attrs["num_split"], axis=_int(inputs[0]))


def _split_v(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return np.split(inputs[0], np.cumsum(_ints(inputs[1]))[:-1], axis=_int(inputs[2]))


def _unpack(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return [_array(part) for part in np.moveaxis(inputs[0], attrs.get("axis", 0), 0)]


def _pad(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    widths = np.array(_ints(inputs[1])).reshape(-1, 2)
    return [np.pad(inputs[0], [tuple(w) for w in widths], "constant", constant_values=0)]


def _compare(function: Callable[[int], bool]) -> Evaluator:
    def decide(a: SizeLike, b: SizeLike) -> int:
        difference = a - b
        if isinstance(difference, Size):
            if difference.affine is not None and difference.affine[0] == 0:  # the sign of c b is that of c
                return int(function(difference.affine[1]))
            raise UnknownExtent("a comparison that depends on the batch")
        return int(function(difference))
    return _elementwise(decide)


def _first(attrs: Dict[str, Any], inputs: Sequence[Value]) -> Sequence[Value]:
    return [inputs[0]]


# By name: ``value`` in the rows of :mod:`whale_tf.ir.traits`.
EVALUATORS: Dict[str, Evaluator] = {
    "first": _first,
    "add": _elementwise(lambda a, b: a + b), "subtract": _elementwise(lambda a, b: a - b),
    "multiply": _elementwise(lambda a, b: a * b), "floor_divide": _elementwise(lambda a, b: a // b),
    "remainder": _elementwise(lambda a, b: a % b), "maximum": _elementwise(maximum), "minimum": _elementwise(minimum),
    "negative": lambda attrs, inputs: [_array(-inputs[0])],
    "equal": _compare(lambda d: d == 0), "not_equal": _compare(lambda d: d != 0), "less": _compare(lambda d: d < 0),
    "less_equal": _compare(lambda d: d <= 0), "greater": _compare(lambda d: d > 0),
    "greater_equal": _compare(lambda d: d >= 0),
    "logical_and": _elementwise(lambda a, b: int(a and b)), "logical_or": _elementwise(lambda a, b: int(a or b)),
    "select": lambda attrs, inputs: [np.where(as_value(inputs[0]).astype(bool), inputs[1], inputs[2])],
    "product": _reduce(lambda a, b: a * b, 1), "sum": _reduce(lambda a, b: a + b, 0),
    "max": _reduce(maximum, None), "min": _reduce(minimum, None),
    "all": _reduce(lambda a, b: int(a and b), 1), "any": _reduce(lambda a, b: int(a or b), 0),
    "strided_slice": _strided_slice, "slice": _slice, "reshape": _reshape, "squeeze": _squeeze,
    "expand_dims": lambda attrs, inputs: [np.expand_dims(inputs[0], _int(inputs[1]))],
    "transpose": lambda attrs, inputs: [np.transpose(inputs[0], _ints(inputs[1]))],
    "pack": lambda attrs, inputs: [np.stack(list(inputs), axis=attrs.get("axis", 0))],
    "unpack": _unpack, "pad": _pad, "split": _split, "split_sizes": _split_v,
    "concat": lambda attrs, inputs: _concat(inputs[-1], inputs[:-1]),
    "concat_axis_first": lambda attrs, inputs: _concat(inputs[0], inputs[1:]),
    "tile": lambda attrs, inputs: [np.tile(inputs[0], _ints(inputs[1]))],
    "range": _range, "fill": _fill, "dynamic_stitch": _dynamic_stitch, "gather": _gather, "concat_offset": _concat_offset,
    "broadcast_gradient_args": _broadcast_gradient_args, "broadcast_args": _broadcast_args,
    "invert_permutation": _invert_permutation, "list_diff": _list_diff,
    "zeros_like": lambda attrs, inputs: [as_value(np.zeros(inputs[0].shape, dtype=int))],
    "ones_like": lambda attrs, inputs: [as_value(np.ones(inputs[0].shape, dtype=int))],
}


def evaluate(op_type: str, attrs: Dict[str, Any], inputs: Sequence[Value], name: str = "") -> Optional[List[Value]]:
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
    except (UnknownExtent, ZeroDivisionError):  # a division by zero may be in a branch that never runs
        return None
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise GraphError("op {!r} ({}) cannot be evaluated for operands {} and attributes {}: {}: {}; check its inputs".format(
            name, op_type, [value.tolist() for value in inputs], attrs, type(error).__name__, error)) from error
    return results if all(r.size <= MAX_ELEMENTS for r in results) else None
