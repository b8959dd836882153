"""Extents: integers that depend on the batch size, and their exact arithmetic.  Ops on them: :mod:`whale_tf.ir.evaluate`.

``tf.shape(x)[0]``, a Reshape's target shape and a dynamic Mean's divisor are integer tensors whose elements are polynomials in
numbers of examples ``b``.  A :class:`Size` is one such element.  A value is an object array of ``int`` and ``Size``, so
that NumPy's own indexing, concatenation and reductions work on it.

The symbols of a polynomial are tuples::

    BATCH            b_i in a clone, B in the whole, of the reference batch (:mod:`whale_tf.ir.layout`)
    ("batch", x)     the same of the batch that input x names
    ("dim", t, d)    a dimension that is unknown here but equal in all clones (a sequence length, say)
    ("rows", t, d)   a number of rows chosen by data (``tf.boolean_mask``): the whole number is the sum over the clones
    ("whole", x)     B of a batch, where all clones have this same number: in an op that runs once, on all examples

Sizes are assumed to be at least one, because a dimension of extent zero would have no gradient.  A clone may have none of the
elements of rows, though (:attr:`Size.may_be_zero`).
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np

from whale_tf.ir.layout import REFERENCE, Block, batch_of, is_grouped_batch, rows_each

Symbol = Tuple[Any, ...]
Monomial = Tuple[Symbol, ...]
BATCH: Symbol = ("batch",)


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
    def symbols(self) -> Set[Symbol]:
        return {symbol for monomial in self.terms for symbol in monomial}

    @property
    def depends_on_batch(self) -> bool:
        return any(symbol[0] in ("batch", "rows") for monomial in self.terms for symbol in monomial)

    @property
    def counts(self) -> Optional[Dict[str, int]]:
        """Batch -> how often this counts its examples, if it is a sum of these and a number (:attr:`constant`).  Else None."""
        found: Dict[str, int] = {}
        for monomial, coefficient in self.terms.items():
            if len(monomial) == 1 and monomial[0][0] == "batch":
                found[batch_named(monomial[0])] = coefficient
            elif monomial:
                return None
        return found

    @property
    def may_be_zero(self) -> bool:
        """Whether this depends on the elements of rows, of which a clone may have none."""
        return any(symbol[0] in ("batch", "whole") and is_grouped_batch(batch_named(symbol))
                   for monomial in self.terms for symbol in monomial)

    @property
    def constant(self) -> int:
        return self.terms.get((), 0)

    @property
    def surplus(self) -> Optional[int]:
        """The constant term, which every part of a batch has in addition to its share: c0 in ``c0 + c1 b t``, if every other term
        has examples or rows as a factor exactly once.  Else None."""
        counted = [sum(symbol[0] in ("batch", "rows") for symbol in monomial) for monomial in self.terms if monomial]
        return self.terms.get((), 0) if set(counted) == {1} else None

    def at(self, batch: int, others: Mapping[str, int] = {}) -> SizeLike:
        """This size in a clone (or the whole) with ``batch`` examples of the reference batch, and ``others`` of others."""
        numbers = {BATCH: batch, **{batch_symbol(each): number for each, number in others.items()}}
        terms: Dict[Monomial, int] = {}
        for monomial, coefficient in self.terms.items():
            rest = tuple(s for s in monomial if s not in numbers)
            for symbol in monomial:
                coefficient *= numbers.get(symbol, 1)
            terms[rest] = terms.get(rest, 0) + coefficient
        return _make(terms)


SizeLike = Union[int, Size]
Value = np.ndarray  # of dtype object: ints and Sizes
batch_size = Size.of(BATCH)


def batch_symbol(batch: str) -> Symbol:
    return BATCH if batch == REFERENCE else ("batch", batch)


def batch_named(symbol: Symbol) -> str:
    """The batch whose examples a symbol counts."""
    return symbol[1] if len(symbol) > 1 else REFERENCE


def in_whole(size: SizeLike) -> SizeLike:
    """What a clone's size is in the whole mini-batch, as a number that all clones have.

    Raises:
        UnknownExtent: it counts rows chosen by data.
    """
    if not isinstance(size, Size):
        return size
    if any(symbol[0] == "rows" for monomial in size.terms for symbol in monomial):
        raise UnknownExtent(f"{size} counts rows chosen by data")
    return _renamed(size, lambda symbol: ("whole", batch_named(symbol)) if symbol[0] == "batch" else symbol)


def in_part(size: SizeLike) -> SizeLike:
    """The clone's share of a size in the whole mini-batch: the inverse of :func:`in_whole`."""
    if not isinstance(size, Size):
        return size
    return _renamed(size, lambda symbol: batch_symbol(symbol[1]) if symbol[0] == "whole" else symbol)


def replaced(size: SizeLike, found: Mapping[Symbol, SizeLike]) -> SizeLike:
    """A size in which other sizes stand for some symbols."""
    if not isinstance(size, Size) or not any(symbol in found for monomial in size.terms for symbol in monomial):
        return size
    total: SizeLike = 0
    for monomial, coefficient in size.terms.items():
        term: SizeLike = coefficient
        for symbol in monomial:
            term = term * found.get(symbol, Size.of(symbol))
        total = total + term
    return total


def _renamed(size: Size, rename: Callable[[Symbol], Symbol]) -> Size:
    return Size({tuple(sorted(map(rename, monomial))): count for monomial, count in size.terms.items()})


@lru_cache(maxsize=None)  # few kinds of blocks occur, each in most tensors
def rows_of(blocks: Tuple[Block, ...]) -> SizeLike:
    """The number of rows of blocks whose lengths are known."""
    total: SizeLike = 0
    for block in blocks:
        total = total + rows_each(block) * Size.of(batch_symbol(batch_of(block)))
    return total


def is_counted(size: SizeLike) -> bool:
    """Whether a size is known once numbers of examples are: a sum of these and a number."""
    return not isinstance(size, Size) or size.counts is not None


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
        if difference.may_be_zero:
            raise UnknownExtent(f"max({a}, {b}) is not known")
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
