"""Sharding rules, and the view of an op that rule builders read.

A rule is written in named factors, as in einsum (the notation of Rhino's and GSPMD's propagation): MatMul is
``mk,kn->mn``.  Every dimension of every operand and result is a tuple of factors, major to minor; an empty tuple is a
dimension of size one that broadcasts.  The same rule answers three questions: how tensors depend on the batch
(:mod:`whale_tf.ir.batch_axis`), which sharding patterns an op has, and which layouts the automatic search may choose.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from whale_tf.ir.evaluate import evaluate
from whale_tf.ir.extents import Size, Value, as_value, static_ints, vector
from whale_tf.ir.graph import Op, OpGraph, Shape
from whale_tf.ir.traits import traits
from whale_tf.ir.walk import reached

Factors = Tuple[str, ...]
Dims = Tuple[Factors, ...]

# What happens if a factor is sharded.  A factor that is not in ``Rule.kinds`` simply passes.
SUM = "sum"  # absent from the outputs: the shards' results are summed
MEAN = "mean"  # ... and each is an average over its shard
MAX, MIN, PROD, ANY, ALL = "max", "min", "prod", "any", "all"  # ... combined in these ways
LOOKUP = "lookup"  # rows are picked by an index: a shard returns zero for rows that it does not have, then as SUM
WHOLE = "whole"  # every shard needs all of it (a softmax's classes, a cumulative sum's axis)
HALO = "halo"  # shards need the borders of their neighbours (a convolution's image)
STATISTIC = "statistic"  # the op computes statistics over it, and a shard computes its own (batch normalisation)
STATISTIC_GRADIENT = "statistic gradient"  # ... and results without it are sums (that op's gradient)

# How the op depends on an operand, one letter each (``Rule.roles``).
ADDED = "a"  # linear in all such operands together (Add, Concat, Select's branches)
MULTIPLIED = "m"  # linear in this operand alone (MatMul, Mul, ReluGrad's gradient)
DIVIDED = "d"  # a divisor
NONLINEAR = "n"  # anything else, including indices


class Same:
    """The dimensions of an operand of unknown rank: input dimension ``d`` is output dimension ``d``."""

    def __repr__(self) -> str:
        return "..."


SAME = Same()
AnyDims = Union[Dims, Same, None]  # None: not divided along any dimension


class ShapeOperand(NamedTuple):
    """Operand ``position`` is a shape (Reshape's target, Fill's dims, a convolution gradient's input sizes): its element ``j`` is
    the product of the sizes of ``dims[j]`` and shrinks if one of them is sharded."""

    position: int
    dims: Dims


class Grouping(NamedTuple):
    """Elements belong to rows: operand ``ids`` has a row's number for each element (a matrix has it in its first column), factor
    ``elements`` counts them, and a row of factor ``rows`` depends on its own elements only.  A result without ``rows`` is a sum
    over the rows."""

    ids: int
    elements: str
    rows: str


class Rule(NamedTuple):
    """One op's sharding rule.

    Attributes:
        inputs, outputs: factors of each dimension of each operand and result.
        roles: one letter per operand (ADDED, MULTIPLIED, DIVIDED, NONLINEAR).
        kinds: factors that do not simply pass.
        shapes: operands that must be rewritten on a shard.
        alias: (operand, result) pairs that share storage; result -1 for an update without a result edge.
        grouping: which elements belong to which row, if operands say it.
    """

    inputs: Tuple[AnyDims, ...]
    outputs: Tuple[AnyDims, ...]
    roles: str
    kinds: Mapping[str, str] = {}
    shapes: Tuple[ShapeOperand, ...] = ()
    alias: Tuple[Tuple[int, int], ...] = ()
    grouping: Optional[Grouping] = None

    @property
    def factors(self) -> Tuple[str, ...]:
        """Every factor, in order of appearance."""
        found: Dict[str, None] = {}
        for dims in self.inputs + self.outputs:
            if isinstance(dims, tuple):
                for dim in dims:
                    found.update(dict.fromkeys(dim))
        return tuple(found)

    def kind(self, factor: str) -> str:
        return self.kinds.get(factor, "pass")


class NoRule(Exception):
    """An op has no sharding rule; the text says why."""


class View:
    """A builder's view of an op's operands; the batch axis analysis overrides ``value`` and ``shape``."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._values: Dict[int, Optional[Value]] = {}

    def shape(self, tensor: int) -> Shape:
        """The whole tensor's shape, as far as it is known.  The shape of a list's elements is not."""
        record = self.graph.tensors[tensor]
        if record.shape is None:
            value = self.graph.ops[record.op].value  # a constant in a function body may have only its value
            return None if value is None else tuple(value.shape)
        return None if record.dtype == "variant" else record.shape

    def stored(self, tensor: int) -> Shape:
        """A tensor's shape.  The handle of a resource variable has the variable's shape."""
        producer = self.graph.producer(tensor)
        return producer.attrs.get("shape") if producer.type == "VarHandleOp" else self.shape(tensor)

    def value(self, tensor: int) -> Optional[Value]:
        """An integer tensor's value, if it follows from constants and static shapes."""
        if tensor not in self._values:
            for before in sorted(reached([tensor], self._unevaluated)):  # operands first: a chain of ops may be long
                self._values[before] = None  # a cycle has no value
                self._values[before] = self._evaluate(before)
        return self._values[tensor]

    def _unevaluated(self, tensor: int) -> List[int]:
        """The operands that have to be evaluated before a tensor."""
        op = self.graph.producer(tensor)
        return [t for t in op.inputs if t not in self._values] if traits(op.type).value else []

    def fix(self, values: Mapping[int, Value]) -> None:
        """Give tensors values that are known from elsewhere."""
        self._values.update(values)

    def _evaluate(self, tensor: int) -> Optional[Value]:
        op = self.graph.producer(tensor)
        if op.type == "Const":
            return as_value(op.value) if op.value is not None and op.value.dtype.kind in "iub" else None
        if op.type in ("Shape", "ShapeN"):
            measured = op.inputs[self.graph.tensors[tensor].index]
            shape = self.shape(measured)
            return None if shape is None else vector([
                Size.of(("dim", measured, d)) if size is None else size for d, size in enumerate(shape)])
        inputs = [self.value(t) for t in op.inputs] if traits(op.type).value else []
        if not inputs or any(v is None for v in inputs):
            return None
        results = evaluate(op.type, op.attrs, [v for v in inputs if v is not None], op.name)
        return results[self.graph.tensors[tensor].index] if results else None

    def ints(self, op: Op, position: int) -> Optional[List[int]]:
        """An operand's elements; None unless all are known."""
        return static_ints(self.value(op.inputs[position]))

    def rank(self, tensor: int) -> Optional[int]:
        shape = self.shape(tensor)
        return None if shape is None else len(shape)

    def dims(self, tensor: int) -> AnyDims:
        """A factor for each dimension, as :func:`axes`; SAME if the rank is not known."""
        rank = self.rank(tensor)
        return SAME if rank is None else axes(rank)

    def need_shape(self, tensor: int) -> Tuple[Optional[int], ...]:
        shape = self.shape(tensor)
        if shape is None:
            raise NoRule(f"the rank of {self.graph.tensor_name(tensor)} is not known")
        return shape

    def need_rank(self, tensor: int) -> int:
        return len(self.need_shape(tensor))

    def need_dims(self, tensor: int) -> Dims:
        return axes(self.need_rank(tensor))

    def filled_rank(self, op: Op) -> int:
        """The rank of an op's result whose shape is the first operand."""
        rank = self.rank(op.outputs[0])
        if rank is None:
            shape = self.value(op.inputs[0])
            if shape is None:
                raise NoRule("the rank of its result is not known")
            rank = len(shape)
        return rank

    def need_ints(self, op: Op, position: int) -> List[int]:
        value = self.ints(op, position)
        if value is None:
            raise NoRule(f"its operand {self.graph.tensor_name(op.inputs[position])} is not a constant")
        return value


Builder = Callable[[Op, View], Rule]

_AXES: List[Dims] = []


def axes(rank: int) -> Dims:
    """Factors ``d0, d1, ...``, one for each dimension of a tensor."""
    while len(_AXES) <= rank:
        _AXES.append(tuple((f"d{i}",) for i in range(len(_AXES))))
    return _AXES[rank]


def named(letters: str) -> Dims:
    """``"nhwc"`` as dimensions; ``1`` is a broadcast dimension."""
    return tuple(() if letter == "1" else (letter,) for letter in letters)


def whole(dims: Sequence[int], rank: int) -> Dict[str, str]:
    """Kinds which say that the given dimensions of ``axes(rank)`` are needed whole."""
    return {f"d{d % rank}": WHOLE for d in dims} if rank else {}


def attr(op: Op, name: str, default: Any) -> Any:
    """An attribute's value, or ``default`` if it is not recorded."""
    value = op.attrs.get(name)
    return default if value is None else value
