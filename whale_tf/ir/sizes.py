"""The sizes of all tensors of a graph, in terms of the open ones that are met first.

A tf.function has one graph for mini-batches of any size, so that the sizes of most tensors are open.  But they follow from few
numbers, as the rules of the ops say (:mod:`whale_tf.ir.rules`)::

    x [b, 6] ──> MatMul [b, 4] ──> Reshape [2 b, 2] ──> BooleanMask [m, 2] ──> Relu [m, 2]

Here b is ``("dim", x, 0)``, the first size of x, and m is the first size of the masked rows.  What no rule says is a number of
its own: it may equal another one, but nothing is said about it.  Numbers are equal where an op demands it; and those of the
graph's inputs also where elementwise ops combine them, because all of them have the same examples.
"""
from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Tuple

from whale_tf.ir.extents import Size, SizeLike, Symbol, UnknownExtent, Value, product, replaced, vector
from whale_tf.ir.graph import Op, OpGraph, Shape, elements_of
from whale_tf.ir.rules import known_rule
from whale_tf.ir.rules.rule import Factors, Rule, View
from whale_tf.ir.traits import CONTROL_FLOW, Role, traits

MAX_NUMBERS = 64  # of an integer tensor whose elements are told from each other

Sizes = Tuple[SizeLike, ...]


class OpenSizes(View):
    """See the module's docstring.  A symbol is ``("dim", t, d)``, a size of tensor t, or ``("value", t, i)``, an element of an
    integer tensor.

    Attributes:
        taken_for: sizes of inputs -> other ones for which they are taken.  No op demands that, so whoever relies on it checks it.
    """

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self._found: Dict[int, Sizes] = {}  # of tensors with open sizes
        self._equal: Dict[Symbol, SizeLike] = {}
        self.taken_for: Dict[Symbol, Symbol] = {}
        for op in graph.ops:
            shapes = [graph.tensors[tensor].shape for tensor in op.outputs]
            if any(shape is None or None in shape for shape in shapes):
                self._find(op)

    def sizes(self, tensor: int) -> Optional[Sizes]:
        """The sizes of a tensor; None: not even its rank is known."""
        found = self._found.get(tensor)
        if found is None:
            return super().shape(tensor)  # type: ignore[return-value]
        return tuple(replaced(size, self._equal) for size in found) if self._equal else found

    @property
    def open(self) -> Dict[int, Sizes]:
        """The sizes of the tensors whose shape the graph does not know."""
        return {tensor: self.sizes(tensor) or () for tensor in self._found}

    def shape(self, tensor: int) -> Shape:
        found = self._found.get(tensor)
        return super().shape(tensor) if found is None else tuple(None if isinstance(size, Size) else size for size in found)

    def value(self, tensor: int) -> Optional[Value]:
        """An integer tensor's elements.  Those that do not follow from sizes are numbers of their own."""
        found = super().value(tensor)
        if found is None and self.graph.tensors[tensor].dtype in ("int32", "int64"):
            shape = self.shape(tensor)
            if shape is not None and 0 < elements_of(shape) <= MAX_NUMBERS:
                found = vector([Size.of(("value", tensor, i)) for i in range(elements_of(shape))]).reshape(shape)
                self.fix({tensor: found})
        return found

    def _evaluate(self, tensor: int) -> Optional[Value]:
        """As in :class:`View`, but a Shape's elements are the sizes found here."""
        op = self.graph.producer(tensor)
        if op.type in ("Shape", "ShapeN"):
            sizes = self.sizes(op.inputs[self.graph.tensors[tensor].index])
            return None if sizes is None else vector(list(sizes))
        return super()._evaluate(tensor)

    def _find(self, op: Op) -> None:
        rule = None if op.type in CONTROL_FLOW else known_rule(op, self.graph, self)
        known = {} if rule is None else self._factors(op, rule)
        for index, tensor in enumerate(op.outputs):
            shape, dims = super().shape(tensor), rule.outputs[index] if rule is not None else None
            value = self.value(tensor) if traits(op.type).value else None
            if value is not None:
                self._found[tensor] = value.shape
                continue
            if shape is None and isinstance(dims, tuple):
                shape = (None,) * len(dims)
            if shape is None or None not in shape:
                continue
            sizes: List[Optional[SizeLike]] = list(shape)
            for d, size in enumerate(shape):
                if size is None and isinstance(dims, tuple) and len(dims) == len(shape):
                    sizes[d] = _of(dims[d], known)
            if traits(op.type).rule == "shape.reshape":
                self._fill(sizes, self.sizes(op.inputs[0]))
            elif traits(op.type).rule == "shape.split":
                self._take(op, index, sizes)
            elif traits(op.type).rule == "shape.concat" and sizes.count(None) == 1:
                parts = [known.get((f"part{i}",)) for i in range(len(op.inputs) - 1)]
                if None not in parts:
                    sizes[sizes.index(None)] = sum(parts)  # type: ignore[arg-type]
            self._found[tensor] = tuple(
                Size.of(("dim", tensor, d)) if size is None else size for d, size in enumerate(sizes))

    def _factors(self, op: Op, rule: Rule) -> Mapping[Factors, Optional[SizeLike]]:
        """The sizes of the dimensions that a rule connects; None: operands differ, so that one of them may have a single element
        that is repeated."""
        known: Dict[Factors, Optional[SizeLike]] = {}
        may_repeat = traits(op.type).rule.partition(" ")[0] in _REPEATING
        for tensor, dims in zip(op.inputs, rule.inputs):
            for factors, size in zip(dims, self.sizes(tensor) or ()) if isinstance(dims, tuple) else ():
                if not factors or known.setdefault(factors, size) == size:
                    continue
                if not self._equate(known[factors], size, may_repeat) and may_repeat:
                    known[factors] = None
        for shape in rule.shapes:
            value = self.value(op.inputs[shape.position])
            for factors, size in zip(shape.dims, value if value is not None else ()):
                if factors and (isinstance(size, Size) or size >= 0):
                    known.setdefault(factors, size)
        return known

    def _equate(self, one: Optional[SizeLike], other: SizeLike, of_inputs: bool) -> bool:
        """Takes note of equal sizes if these are the same multiples of two numbers.

        Args:
            of_inputs: only if these are sizes of the graph's inputs.
        """
        if not isinstance(one, Size) or not isinstance(other, Size):
            return False
        difference = one - other
        terms = difference.terms if isinstance(difference, Size) else {}
        if sum(terms.values()) != 0 or sorted(map(len, terms)) != [1, 1]:
            return False
        first, last = sorted(symbol for symbol, in terms)
        if of_inputs and not (self._is_of_input(first) and self._is_of_input(last)):
            return False
        self._equal = {symbol: replaced(size, {last: Size.of(first)}) for symbol, size in self._equal.items()}
        self._equal[last] = Size.of(first)
        self.taken_for = {symbol: first if taken == last else taken for symbol, taken in self.taken_for.items()}
        if of_inputs:
            self.taken_for[last] = first
        return True

    def _is_of_input(self, symbol: Symbol) -> bool:
        return symbol[0] == "dim" and traits(self.graph.producer(symbol[1]).type).role in (Role.PLACEHOLDER, Role.PULL)

    @staticmethod
    def _fill(sizes: List[Optional[SizeLike]], before: Optional[Sizes]) -> None:
        """The one open size of a Reshape is what the others leave."""
        if before is None or sizes.count(None) != 1:
            return
        try:
            sizes[sizes.index(None)] = product(before) // product([size for size in sizes if size is not None])
        except (UnknownExtent, ZeroDivisionError):
            pass

    def _take(self, op: Op, index: int, sizes: List[Optional[SizeLike]]) -> None:
        """The parts of a Split have equal lengths; those of a SplitV have the lengths that its second operand says."""
        is_equal = len(op.inputs) == 2
        axis = self.ints(op, 0 if is_equal else 2)
        known = self.sizes(op.inputs[1]) if is_equal else self.value(op.inputs[1])
        if axis is None or known is None:
            return
        try:
            length = known[axis[0]] // len(op.outputs) if is_equal else known[index]
        except UnknownExtent:
            return
        if isinstance(length, Size) or length >= 0:
            sizes[axis[0]] = length


# Rules of ops that may repeat an operand's single element along a dimension in which another operand has more.
_REPEATING = ("elementwise.elementwise", "elementwise.quotient", "elementwise.strings", "matmul.batch_matmul", "matmul.einsum",
              "loss.softmax_cross_entropy")


def _of(factors: Factors, known: Mapping[Factors, Optional[SizeLike]]) -> Optional[SizeLike]:
    """The size of a dimension of a result."""
    if not factors:
        return 1
    if factors in known:
        return known[factors]
    parts: List[SizeLike] = []
    for factor in factors:
        size = known.get((factor,))
        if size is None:
            return None
        parts.append(size)
    return product(parts)


def nominal_shapes(graph: OpGraph, number: int) -> Mapping[int, Shape]:
    """The shapes of tensors whose shape the graph does not know, for estimates.

    Args:
        number: what every number that is not known counts, such as that of the examples.
    """
    return graph.once(_nominal_shapes, number)


def _nominal_shapes(graph: OpGraph, number: int) -> Mapping[int, Shape]:
    return {tensor: tuple(_nominal(size, number) for size in sizes) for tensor, sizes in graph.once(OpenSizes).open.items()}


def _nominal(size: SizeLike, number: int) -> int:
    terms = size.terms if isinstance(size, Size) else {(): size}
    return max(0, sum(count * number ** len(monomial) for monomial, count in terms.items()))
