"""The blocks that make up a batch dimension, and how a rule's factor maps them."""
from __future__ import annotations

from typing import List, Mapping, Optional, Sequence, Tuple

from whale_tf.ir.batch_axis.result import EXTREMES, Localise
from whale_tf.ir.extents import BATCH, Size, SizeLike, Value
from whale_tf.ir.layout import Layout, partial, replicated, sharded
from whale_tf.ir.rules.rule import MEAN, SAME, STATISTIC, STATISTIC_GRADIENT, SUM, AnyDims

Blocks = Optional[Tuple[int, ...]]
REPLICATED_0 = replicated()


class Refuse(Exception):
    """The batch axis cannot pass through an op; the text gives the reason.

    Attributes:
        met: blocks in which some operand has its examples, or would have to have them.
    """

    def __init__(self, reason: str, *met: Blocks) -> None:
        super().__init__(reason)
        self.met = {blocks for blocks in met if blocks is not None and -1 not in blocks}


def factor_at(dims: AnyDims, dim: int) -> Optional[str]:
    """The factor of one dimension; None if it cannot be divided."""
    if dims is SAME:
        return f"dim{dim}"
    if not isinstance(dims, tuple) or dim >= len(dims) or len(dims[dim]) != 1:
        return None
    return dims[dim][0]


def unify(a: Blocks, b: Blocks, a_is_uniform: bool = False, b_is_uniform: bool = False) -> Blocks:
    """The common blocks of two operands along the same dimension."""
    if a == b:
        return a
    if a is not None and b is not None and -1 not in a + b and sum(a) == sum(b) and (a_is_uniform or b_is_uniform):
        return b if a_is_uniform else a
    for one, other in ((a, b), (b, a)):
        if one == (-1,) and other is not None and len(other) == 1:
            return other
    raise Refuse(f"its operands arrange their examples in different blocks ({a} and {b} per example)", a, b)


def blocks_of(element: Size) -> Blocks:
    """Blocks of a dimension of the given extent."""
    if element.affine is not None:
        if element.affine[0]:
            raise Refuse(f"a dimension of {element} elements cannot be divided into examples")
        return (element.affine[1],)
    if len(element.terms) == 1:
        (monomial, _), = element.terms.items()
        if sum(1 for s in monomial if s == BATCH) == 1 and not any(s[0] == "rows" for s in monomial):
            return (-1,)
        if BATCH not in monomial and sum(1 for s in monomial if s[0] == "rows") == 1:
            return None
    raise Refuse(f"a dimension of {element} elements cannot be divided into examples")


def localise_vector(flat: Sequence[SizeLike], places: Mapping[int, Blocks]) -> Localise:
    components: List[Optional[Tuple[int, int]]] = []
    for j, element in enumerate(flat):
        if j in places and not isinstance(element, Size) and element != -1:
            components.append((0, sum(places[j] or ())))
        elif isinstance(element, Size):
            components.append(element.affine)
        else:
            components.append((int(element), 0))
    return Localise(tuple(components))


def extent_layout(value: Optional[Value]) -> Optional[Layout]:
    """Layout of an extent whose elements are multiples of one power of the batch size; None if their powers differ."""
    layouts = {_element_layout(v) for v in value.flat} if value is not None else set()
    return layouts.pop() if len(layouts) == 1 else None


def _element_layout(element: SizeLike) -> Optional[Layout]:
    if not isinstance(element, Size) or not element.depends_on_batch:
        return REPLICATED_0
    degrees = {(sum(1 for s in m if s == BATCH), sum(1 for s in m if s[0] == "rows")) for m in element.terms}
    if len(degrees) != 1:
        return None
    batches, rows = next(iter(degrees))
    return replicated(-batches) if not rows else partial() if (batches, rows) == (0, 1) else None


def result_layout(dims: AnyDims, factor: Optional[str], blocks: Blocks, kind: str, power: int, is_partial: bool,
                  extreme: Optional[str]) -> Layout:
    """Layout of one of a rule's results."""
    if factor is not None:
        if dims is SAME:
            return sharded(int(factor[3:]), blocks, power)
        if isinstance(dims, tuple) and (factor,) in dims:
            return sharded(dims.index((factor,)), blocks, power)
        if kind in (SUM, STATISTIC_GRADIENT):
            return partial(power)
        if kind in (MEAN, STATISTIC):
            return partial(power + 1)
        if kind in EXTREMES:
            return Layout(kind)
        return replicated(power) if dims is not None else REPLICATED_0  # it does not depend on the factor
    if extreme is not None:
        return Layout(extreme)
    return partial(power) if is_partial else replicated(power)


