"""The blocks that make up a batch dimension, and how a rule's factor maps them."""
from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from whale_tf.ir.batch_axis.result import EXTREMES, Equality, Localise
from whale_tf.ir.extents import Size, SizeLike, Value, batch_named, in_part, is_counted, rows_of
from whale_tf.ir.layout import (
    REFERENCE,
    Block,
    Blocks,
    Exponent,
    Layout,
    Rows,
    batch_of,
    block_of,
    is_grouped,
    is_measured,
    partial,
    replicated,
    rows_each,
    sharded,
    weight_of,
    weight_of_blocks,
)
from whale_tf.ir.rules.rule import MEAN, SAME, STATISTIC, STATISTIC_GRADIENT, SUM, AnyDims

REPLICATED_0 = replicated()


class Refuse(Exception):
    """The batch axis cannot pass through an op; the text gives the reason.

    Attributes:
        met: blocks in which some operand has its examples, or would have to have them.
        groups: rows that would have to be one example.
    """

    def __init__(self, reason: str, *met: Blocks, groups: int = 1) -> None:
        super().__init__(reason)
        self.groups = {groups} - {1}
        self.met = {blocks for blocks in met if blocks is not None and not is_measured(blocks)}


class Batches:
    """The batches of a graph: which inputs have as many examples as another, or as the reference batch.

    Equal numbers are never assumed.  They follow from equal static sizes, and from ops that combine examples one by one.  Whoever
    finds the latter begins the analysis again, so that no tensor keeps the name of a batch that is another one.

    Attributes:
        reference: the input that names the reference batch; empty: there is none.
        equalities: what was found out, in order.
    """

    def __init__(self, reference: str, equalities: Sequence[Equality] = ()) -> None:
        self.reference = reference
        self.equalities = list(equalities)
        self._same: Dict[str, str] = {}  # input -> another one with as many examples
        for equality in equalities:
            self.join(*equality)

    def of(self, name: str) -> str:
        """The batch that an input belongs to."""
        while name in self._same:
            name = self._same[name]
        return REFERENCE if name == self.reference else name

    def input_of(self, batch: str) -> str:
        return self.reference if batch == REFERENCE else batch

    def join(self, a: str, b: str) -> None:
        """Let two inputs have equally many examples."""
        one, other = (self.input_of(self.of(name)) for name in (a, b))
        if one != other:
            first = self.reference if self.reference in (one, other) else min(one, other)
            self._same[other if first == one else one] = first

    def current(self, blocks: Blocks) -> Blocks:
        """The same blocks, each by the name that its batch has now."""
        if blocks is None or not any(isinstance(block, Rows) for block in blocks):
            return blocks
        return tuple(block_of(rows_each(block), self.of(self.input_of(batch_of(block)))) for block in blocks)


def factor_at(dims: AnyDims, dim: int) -> Optional[str]:
    """The factor of one dimension; None if it cannot be divided."""
    if dims is SAME:
        return f"dim{dim}"
    if not isinstance(dims, tuple) or dim >= len(dims) or len(dims[dim]) != 1:
        return None
    return dims[dim][0]


def common(a: Blocks, b: Blocks, a_is_uniform: bool = False, b_is_uniform: bool = False) -> Tuple[Blocks, Set[Tuple[str, str]]]:
    """The common blocks of two operands along the same dimension, and the batches that must have equally many examples for this.

    Raises:
        Refuse: the operands arrange their examples differently.
    """
    if a == b:
        return a, set()
    if a is not None and b is not None and not is_measured(a + b) and (a_is_uniform or b_is_uniform) and rows_of(a) == rows_of(b):
        return b if a_is_uniform else a, set()
    if is_grouped(a) or is_grouped(b):
        raise Refuse("the elements of rows meet others", a if is_grouped(b) else b)
    different = [pair for pair in zip(a or (), b or ()) if pair[0] != pair[1]] if len(a or ()) == len(b or ()) else []
    if len(different) == 1:  # all rows are equally many, so these blocks are
        (one, other), = different
        if rows_each(one) == rows_each(other) != -1:
            return a, {(batch_of(one), batch_of(other))}
        if batch_of(one) == batch_of(other) and -1 in (rows_each(one), rows_each(other)):
            return b if rows_each(one) == -1 else a, set()
    raise Refuse("its operands arrange their examples in different blocks ({} and {} per example)".format(
        blocks_text(a), blocks_text(b)), a, b)


def blocks_text(blocks: Blocks) -> str:
    """Blocks in words."""
    if blocks is None:
        return "rows chosen by data"
    if {batch_of(block) for block in blocks} <= {REFERENCE}:
        return str(blocks)
    return "({})".format(", ".join(f"{rows_each(block)} of {batch_of(block) or 'the first batch'}" for block in blocks))


def blocks_of(element: Size) -> Blocks:
    """Blocks of a dimension of the given extent.  Those of several batches are in the order of the batches; any order is right
    for rows that are the same for all examples, and for rows that are taken from a whole tensor."""
    counts = element.counts
    if counts is not None:
        if element.constant or (len(counts) > 1 and min(counts.values()) < 1):
            raise Refuse(f"a dimension of {element} elements cannot be divided into examples")
        return tuple(block_of(count, batch) for batch, count in sorted(counts.items()))
    if len(element.terms) == 1:
        (monomial, _), = element.terms.items()
        batches = [symbol for symbol in monomial if symbol[0] == "batch"]
        rows = [symbol for symbol in monomial if symbol[0] == "rows"]
        if len(batches) == 1 and not rows:
            return (block_of(-1, batch_named(batches[0])),)
        if not batches and len(rows) == 1:
            return None
    raise Refuse(f"a dimension of {element} elements cannot be divided into examples")


def offset_of(blocks: Blocks) -> Optional[Block]:
    """The number of rows of an example, which is the offset of its position; None if it is not known or there are several
    blocks."""
    only = blocks[0] if blocks is not None and len(blocks) == 1 else None
    return only if only is not None and rows_each(only) > 0 else None


def localise_vector(flat: Sequence[SizeLike], places: Mapping[int, Blocks]) -> Localise:
    components: List[Optional[SizeLike]] = []
    for j, element in enumerate(flat):
        if j in places and element != -1 and not (isinstance(element, Size) and element.depends_on_batch):
            components.append(rows_of(places[j] or ()))
        else:
            components.append(element if is_counted(element) else None)
    of_section = any(isinstance(flat[j], Size) and in_part(flat[j]) != flat[j] for j in places)
    return Localise(tuple(components), of_section)


def extent_layout(value: Optional[Value]) -> Optional[Layout]:
    """Layout of an extent whose elements are multiples of one power of the batch size; None if their powers differ."""
    layouts = {_element_layout(v) for v in value.flat} if value is not None else set()
    return layouts.pop() if len(layouts) == 1 else None


def _element_layout(element: SizeLike) -> Optional[Layout]:
    if not isinstance(element, Size) or not element.depends_on_batch:
        return REPLICATED_0
    if element.may_be_zero:
        return None
    counts = element.counts
    if counts is not None:
        return None if element.constant or min(counts.values()) < 1 else replicated(-weight_of(counts.items()))
    counted = {tuple(symbol for symbol in monomial if symbol[0] in ("batch", "rows")) for monomial in element.terms}
    if len(counted) != 1:
        return None
    symbols = next(iter(counted))
    if [symbol[0] for symbol in symbols] == ["rows"]:
        return partial()
    power: Exponent = 0
    for symbol in symbols:
        if symbol[0] == "rows":
            return None
        power = power - weight_of([(batch_named(symbol), 1)])
    return replicated(power)


def result_layout(dims: AnyDims, factor: Optional[str], blocks: Blocks, kind: str, power: Exponent, is_partial: bool,
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
            return partial(power + weight_of_blocks(blocks))
        if kind in EXTREMES:
            return Layout(kind)
        return replicated(power) if dims is not None else REPLICATED_0  # it does not depend on the factor
    if extreme is not None:
        return Layout(extreme)
    return partial(power) if is_partial else replicated(power)


