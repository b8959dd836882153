"""Shapes on one device after the mesh dimensions that have been decided; the next dimension divides these (Rhino section 4)."""

from __future__ import annotations

from typing import Dict, Mapping, Optional, Tuple

from whale_tf.ir.extents import Value
from whale_tf.ir.graph import Op, OpGraph, Shape
from whale_tf.patterns.spread import Spread
from whale_tf.patterns.strategy import Sizes


class LocalShapes:
    """The whole shapes, until :meth:`divide` is called."""

    def __init__(self, graph: OpGraph) -> None:
        self._whole = Sizes(graph)
        self._made: Dict[int, Shape] = {}
        self._needed: Dict[Tuple[int, int], Shape] = {}
        self._begun: Dict[int, Shape] = {}

    def view(self, op: Op) -> Sizes:
        """The shapes of its operands and results that the op sees."""
        if not self._made and not self._needed:
            return self._whole
        shapes = {t: self._needed.get((op.id, t), self._made.get(t)) for t in op.inputs}
        shapes.update({t: self._made.get(t) for t in op.outputs})
        return _LocalView(self._whole, {t: shape for t, shape in shapes.items() if shape is not None})

    def stored(self, tensor: int) -> Shape:
        """Shape of a tensor as it is made; for a handle, the variable's shape."""
        return self._made[tensor] if tensor in self._made else self._whole.stored(tensor)

    def begun(self) -> LocalShapes:
        """The same shapes; from now on :meth:`part` is relative to them."""
        other = self.divided({}, {})
        other._begun = dict(self._made)
        return other

    def part(self, tensor: int, shape: Shape) -> float:
        """The part of a tensor that ``shape`` is."""
        whole = self._begun[tensor] if tensor in self._begun else self._whole.stored(tensor)
        found = 1.0
        for size, of in zip(shape or (), whole or ()):
            if size is not None and of:
                found *= size / of
        return found

    def divided(self, made: Mapping[int, Spread], needed: Mapping[Tuple[int, int], Spread]) -> LocalShapes:
        """The shapes after another mesh dimension; the devices with the largest parts count.

        Args:
            made: tensor -> its spread over that dimension.
            needed: (op, tensor) -> the spread in which the op takes it.
        """
        other = LocalShapes(self._whole.graph)
        other._whole, other._begun = self._whole, self._begun
        other._made = dict(self._made)
        other._needed = {(op, t): _part(self._needed.get((op, t), self.stored(t)), spread) for (op, t), spread in needed.items()}
        other._made.update({t: _part(self.stored(t), spread) for t, spread in made.items()})
        return other


def _part(shape: Shape, spread: Spread) -> Shape:
    """The largest share of a shape."""
    size = shape[spread.dim] if shape is not None and spread.is_shard else None
    if shape is None or size is None:
        return shape
    share = -(-size * max(spread.sizes) // sum(spread.sizes))
    return shape[:spread.dim] + (share,) + shape[spread.dim + 1:]


class _LocalView(Sizes):
    """``local`` shapes instead of the whole ones.  Values (axes, permutations) are those of the whole tensors."""

    def __init__(self, whole: Sizes, local: Mapping[int, Shape]) -> None:
        super().__init__(whole.graph)
        self._whole, self._local = whole, local

    def shape(self, tensor: int) -> Shape:
        return self._local[tensor] if tensor in self._local else self._whole.shape(tensor)

    def stored(self, tensor: int) -> Shape:
        return self._local[tensor] if tensor in self._local else self._whole.stored(tensor)

    def value(self, tensor: int) -> Optional[Value]:
        return self._whole.value(tensor)
