"""Handlers of ops that cut or join along a dimension that may be the batch: Slice, StridedSlice, Concat, Split."""
from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence, Tuple

from whale_tf.ir.batch_axis.blocks import Refuse, blocks_of
from whale_tf.ir.batch_axis.operands import Operands, carry_offsets
from whale_tf.ir.batch_axis.propagate import Propagation, handler
from whale_tf.ir.batch_axis.residues import are_groups
from whale_tf.ir.batch_axis.result import EXTENT
from whale_tf.ir.extents import Size, SizeLike, UnknownExtent, Value, batch_size, rows_of, vector
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import (
    Block,
    Blocks,
    Layout,
    Rows,
    batch_of,
    block_of,
    is_grouped,
    is_measured,
    rows_each,
    sharded,
)
from whale_tf.ir.rules import rule_for
from whale_tf.ir.rules.shape import Stride, strided_terms


def position(state: Propagation, element: SizeLike) -> SizeLike:
    """A position along a batch dimension, in numbers of examples: constants that hold the mini-batch's size are multiples of it.

    Raises:
        Refuse: it is not known how the position follows from the examples.
    """
    if isinstance(element, Size):
        if is_measured(blocks_of(element)):
            raise Refuse("it is not known where it cuts the batch")
        return element
    if element == 0:
        return 0
    if state.batch is None or element % state.batch:
        raise Refuse("it selects only some examples of the batch")
    return element // state.batch * batch_size


def cut_blocks(blocks: Blocks, begin: SizeLike, end: Optional[SizeLike]) -> Tuple[Block, ...]:
    """The blocks between two positions, which must be block boundaries."""
    ends: List[SizeLike] = [0]
    for block in () if blocks is None or is_measured(blocks) else blocks:
        ends.append(ends[-1] + rows_of((block,)))
    if blocks is None or begin not in ends or end not in ends or ends.index(begin) >= ends.index(end):
        raise Refuse("it selects only some examples of the batch")
    return blocks[ends.index(begin):ends.index(end)]


def _check_others(state: Propagation, op: Op, positions: Sequence[int], place: int) -> None:
    """Refuse bounds and sizes in other dimensions than the batch that follow from the number of examples: a clone has its own.

    Args:
        place: of the batch among the elements of the operands at ``positions``; -1: none of them is about it.
    """
    for position in positions:
        value = state.value(op.inputs[position]) if state.layouts.get(op.inputs[position]) is EXTENT else None
        if value is not None and any(j != place and isinstance(s, Size) and s.depends_on_batch for j, s in enumerate(value)):
            raise Refuse("it cuts another dimension than the batch by the number of examples")


def _whole_extent(blocks: Blocks) -> Optional[SizeLike]:
    return None if blocks is None or is_measured(blocks) else rows_of(blocks)


def _localised(size: SizeLike) -> Blocks:
    """Blocks that hold a number of examples, for a constant that is localised."""
    return blocks_of(size) if isinstance(size, Size) else (0,)


@handler
def slice_(state: Propagation, op: Op) -> None:
    layout = state.data_layout(op.inputs[0])
    if not layout.is_sharded:
        _slice_of_whole(state, op, layout)
        return
    begin, size = state.value(op.inputs[1]), state.value(op.inputs[2])
    if begin is None or size is None:
        raise Refuse("it is not known where it cuts the batch")
    d, blocks = layout.dim, layout.blocks
    _check_others(state, op, (1, 2), d)
    start, extent = position(state, begin[d]), _whole_extent(blocks)
    if not isinstance(size[d], Size) and size[d] == -1:
        stop = extent
    else:
        length = position(state, size[d])
        stop = start + length if extent is not None else None
    if (start, stop) != (0, extent):
        blocks = cut_blocks(blocks, start, stop)
    if start != 0:
        state.localise_elements(op, 1, {d: _localised(start)})
    state.localise_elements(op, 2, {d: blocks})
    plan = Operands(state, op, "mnn", [layout] + [state.layout(t) for t in op.inputs[1:]])
    carry_offsets(state, op, plan)
    state.set(op.outputs[0], sharded(d, blocks, layout.power), state.sources(op), plan.zero(0))
    state.learn_sizes(op)
    plan.record()


def _slice_of_whole(state: Propagation, op: Op, layout: Layout) -> None:
    """A slice of a whole tensor.  If a bound is an extent, the result consists of the clone's rows only if the slice takes the
    whole dimension."""
    size = state.value(op.inputs[2])
    rows = [d for d, s in enumerate(size if size is not None else ()) if isinstance(s, Size) and s.depends_on_batch]
    if not rows and any(state.layouts.get(t) is EXTENT for t in op.inputs[1:]):
        raise Refuse("it takes rows of a whole tensor from a position that depends on the number of examples")
    plan = Operands(state, op, "mnn", [layout] + [state.layout(t) for t in op.inputs[1:]])
    plan.combine_bounds(0)
    if rows and size is not None:
        begin = state.ints(op, 1)
        if begin is None or begin[rows[0]] or len(rows) > 1:
            raise Refuse("it takes only some rows of a whole tensor")
        blocks = blocks_of(size[rows[0]])
        plan.slice(0, rows[0], blocks)
        layout = sharded(rows[0], blocks, plan.layouts[0].power)
    state.set(op.outputs[0], layout, state.sources(op), plan.zero(0))
    plan.record()


@handler
def strided_slice(state: Propagation, op: Op) -> None:
    layout = state.data_layout(op.inputs[0])
    if not layout.is_sharded:
        if any(state.layouts.get(t) is EXTENT for t in op.inputs[1:]):
            raise Refuse("it takes as many rows of a whole tensor as there are examples")
        plan = Operands(state, op, "mnnn", [layout] + [state.layout(t) for t in op.inputs[1:]])
        plan.combine_bounds(0)
        state.set(op.outputs[0], layout, state.sources(op), plan.zero(0))
        plan.record()
        return
    shape = state.shape(op.inputs[0])
    if shape is None:
        raise Refuse("the rank of its operand is not known")
    terms = strided_terms(op, len(shape), state, shape)
    batch = next(term for term in terms if term.dim == layout.dim)
    _check_others(state, op, (1, 2, 3), batch.term)
    step = _step(state, op, batch)
    if step > 1:
        blocks = _each(layout.blocks, step, state.batch is not None or are_groups(state, op, batch.term, step))
    else:
        blocks = _strided_cut(state, op, layout.blocks, batch)
    plan = Operands(state, op, "mnnn", [layout] + [state.layout(t) for t in op.inputs[1:]])
    plan.combine_bounds(0)
    carry_offsets(state, op, plan)
    state.set(op.outputs[0], sharded(_result_dim(terms, batch), blocks, layout.power), state.sources(op), plan.zero(0))
    state.learn_sizes(op)
    plan.record()


def _step(state: Propagation, op: Op, term: Stride) -> int:
    """The stride of a term that takes one of every so many rows of the whole dimension, as ``x[1::2]`` does; else 1."""
    begin, strides = state.ints(op, 1), state.ints(op, 3)
    if term.term < 0 or not term.keeps or strides is None or strides[term.term] < 2:
        return 1
    start = 0 if op.attrs.get("begin_mask", 0) >> term.term & 1 else -1 if begin is None else begin[term.term]
    ends = op.attrs.get("end_mask", 0) >> term.term & 1
    return strides[term.term] if ends and 0 <= start < strides[term.term] else 1


def _each(blocks: Blocks, step: int, is_grouping: bool = False) -> Blocks:
    """The blocks of one of every ``step`` rows.

    Args:
        is_grouping: it may be that several such examples are one.

    Raises:
        Refuse: these rows are of several examples.
    """
    only = blocks[0] if blocks is not None and len(blocks) == 1 else None
    if only is None or is_measured(blocks) or is_grouped(blocks):
        raise Refuse(f"it takes one of every {step} rows, which are in several blocks or chosen by data")
    each, batch = rows_each(only), batch_of(only)
    if each % step:
        raise Refuse(f"it takes one of every {step} examples", groups=step // math.gcd(each, step) if is_grouping else 1)
    return (block_of(each // step, batch),)


def _result_dim(terms: Sequence[Stride], batch: Stride) -> int:
    return sum(1 for term in terms[:terms.index(batch)] if term.keeps)


def _bounds(state: Propagation, op: Op, term: Stride, extent: Optional[SizeLike]) -> Tuple[SizeLike, Optional[SizeLike]]:
    """Begin and end, in examples, of a strided slice's term on the batch dimension."""
    if term.term < 0:
        return 0, extent
    begin, end, strides = (state.value(t) for t in op.inputs[1:4])
    masks = {name: op.attrs.get(name + "_mask", 0) >> term.term & 1 for name in ("begin", "end")}
    if not term.keeps:
        raise Refuse("it selects a single example of the batch")
    if strides is None or strides[term.term] != 1:
        raise Refuse("its stride along the batch is not 1, or not known")
    if (begin is None and not masks["begin"]) or (end is None and not masks["end"]):
        raise Refuse("it is not known where it cuts the batch")
    start = 0 if masks["begin"] or begin is None else position(state, begin[term.term])
    if masks["end"] or end is None:
        return start, extent
    return start, position(state, end[term.term])


def _strided_cut(state: Propagation, op: Op, blocks: Blocks, batch: Stride) -> Blocks:
    """Blocks of a strided slice of a batch dimension.  Localises constants among its bounds."""
    start, stop = _bounds(state, op, batch, _whole_extent(blocks))
    if (start, stop) != (0, _whole_extent(blocks)):
        blocks = cut_blocks(blocks, start, stop)
    _localise_bounds(state, op, batch, start, stop)
    return blocks


def _localise_bounds(state: Propagation, op: Op, term: Stride, start: SizeLike, stop: Optional[SizeLike]) -> None:
    if term.term < 0:
        return
    if start != 0 and not op.attrs.get("begin_mask", 0) >> term.term & 1:
        state.localise_elements(op, 1, {term.term: _localised(start)})
    if stop is not None and not op.attrs.get("end_mask", 0) >> term.term & 1:
        state.localise_elements(op, 2, {term.term: _localised(stop)})


@handler
def strided_slice_grad(state: Propagation, op: Op) -> None:
    """The gradient's rows are put back among zeros; the filled shape must become the clone's."""
    gradient = op.inputs[4]
    layout = state.data_layout(gradient)
    shape = state.value(op.inputs[0])
    if shape is None:
        raise Refuse("the shape it fills is not known")
    terms = strided_terms(op, len(shape), state, list(shape))
    plan = Operands(state, op, "nnnnm", [state.layout(t) for t in op.inputs[:4]] + [layout])
    plan.combine_bounds(4)
    if layout.is_sharded:
        batch = _kept(terms, layout.dim)
        dim, blocks = batch.dim, layout.blocks
        _check_others(state, op, (0,), dim)
        _check_others(state, op, (1, 2, 3), batch.term)
        size, step = shape[dim], _step(state, op, batch)
        if step > 1:
            _fill_each(state, op, plan, layout, dim, step)
            return
        if isinstance(size, Size):
            extent = _whole_extent(blocks_of(size))
        else:
            extent = position(state, size) if state.batch is not None else _whole_extent(blocks)
        start, stop = _bounds(state, op, batch, extent)
        if (start, stop) != (0, extent):
            if stop is None or extent is None or _whole_extent(blocks) != stop - start:
                raise Refuse("it fills only some examples of the batch")
            blocks = _filled(state, op, (*_zeros(start), *(blocks or ()), *_zeros(extent - stop)))
        state.localise_elements(op, 0, {dim: blocks})
        _localise_bounds(state, op, batch, start, stop)
        layout = sharded(dim, blocks, layout.power)
    else:
        rows = [d for d, s in enumerate(shape) if isinstance(s, Size) and s.depends_on_batch]
        if rows:
            term = next(t for t in terms if t.dim == rows[0])
            _check_others(state, op, (0,), rows[0])
            _check_others(state, op, (1, 2, 3), term.term)
            blocks, step = blocks_of(shape[rows[0]]), _step(state, op, term)
            if step > 1:
                cut = _result_dim(terms, term)
                plan.slice(4, cut, _each(blocks, step))
                _fill_each(state, op, plan, sharded(cut, _each(blocks, step), plan.layouts[4].power), rows[0], step)
                return
            extent = _whole_extent(blocks)
            if not term.full and not (term.keeps and _bounds(state, op, term, extent) == (0, extent)):
                raise Refuse("it fills only some examples of the batch")
            plan.slice(4, _result_dim(terms, term), blocks)
            layout = sharded(rows[0], blocks, plan.layouts[4].power)
    if state.lacks_sizes(op.outputs[0]):
        state.set_sizes(op.outputs[0], list(shape))
    state.set(op.outputs[0], layout, state.sources(op), plan.zero(4))
    plan.record()


def _fill_each(state: Propagation, op: Op, plan: Operands, layout: Layout, dim: int, step: int) -> None:
    """The gradient of one of every ``step`` rows: they are among rows of zeros, in each example."""
    shape = state.value(op.inputs[0])
    blocks = layout.blocks
    if shape is None or blocks is None or len(blocks) != 1 or is_measured(blocks) or is_grouped(blocks):
        raise Refuse("rows that are chosen by data or are in several blocks are put among others")
    blocks = (block_of(rows_each(blocks[0]) * step, batch_of(blocks[0])),)
    if isinstance(shape[dim], Size) and shape[dim] != rows_of(blocks):
        raise Refuse("it fills only some examples of the batch")
    state.localise_elements(op, 0, {dim: blocks})
    if state.lacks_sizes(op.outputs[0]):
        state.set_sizes(op.outputs[0], list(shape))
    state.set(op.outputs[0], sharded(dim, blocks, layout.power), state.sources(op), plan.zero(4))
    plan.record()


def _zeros(rows: SizeLike) -> Tuple[Block, ...]:
    """Blocks of a number of rows in front of or behind those that a gradient fills."""
    return tuple(blocks_of(rows) or ()) if isinstance(rows, Size) else ()


def _filled(state: Propagation, op: Op, blocks: Blocks) -> Blocks:
    """The blocks of a gradient of which some rows are filled: those of the tensor that was cut, if it is known."""
    data = state.graph.ops[op.forward].inputs[0] if op.forward >= 0 else None
    layout = state.layout(data) if data is not None else None
    if layout is None or not layout.is_sharded or _whole_extent(layout.blocks) != _whole_extent(blocks):
        return blocks
    return layout.blocks


def _kept(terms: Sequence[Stride], dim: int) -> Stride:
    """The term that produces result dimension ``dim``."""
    kept = [term for term in terms if term.keeps]
    if kept[dim].dim < 0:
        raise Refuse("a dimension that it inserts is divided along the batch")
    return kept[dim]


@handler
def concat(state: Propagation, op: Op) -> None:
    """Along the batch dimension, the blocks of the parts are concatenated."""
    rule = rule_for(op, state.graph, state)
    first = op.type == "Concat"
    parts = list(range(1, len(op.inputs))) if first else list(range(len(op.inputs) - 1))
    axis = next(d for d, factors in enumerate(rule.outputs[0]) if rule.kind(factors[0]) != "pass")  # type: ignore
    layouts = [state.data_layout(t) for t in op.inputs]
    if not any(layouts[i].is_sharded and layouts[i].dim == axis for i in parts):
        state.apply(op, rule)
        return
    plan = Operands(state, op, rule.roles, layouts)
    blocks: List[Block] = []
    for i in parts:
        part: Blocks
        if layouts[i].is_sharded:
            if layouts[i].dim != axis:
                raise Refuse("two of its dimensions are divided along the batch")
            part = layouts[i].blocks
        else:
            shape = state.shape(op.inputs[i])
            size = shape[axis] if shape is not None else None
            if size is None or state.batch is None or size % state.batch:
                raise Refuse("rows that are not examples are concatenated with the batch")
            part = (size // state.batch,)
            plan.slice(i, axis, part)
        if part is None or is_measured(part) or is_grouped(part):
            raise Refuse("rows chosen by data are concatenated")
        blocks.extend(part)
    _join_offsets(state, op, parts, plan)
    power, _ = plan.settle(True)
    state.set(op.outputs[0], sharded(axis, tuple(blocks), power), state.sources(op), plan.is_zero)
    state.learn_sizes(op)
    plan.record()


def _join_offsets(state: Propagation, op: Op, parts: Sequence[int], plan: Operands) -> None:
    offsets = {state.offsets.get(op.inputs[i], 0) for i in parts}
    offset = offsets.pop()
    if not offsets and isinstance(offset, (int, Rows)):
        if offset:
            state.offsets[op.outputs[0]] = offset
    else:
        carry_offsets(state, op, plan)


@handler
def split(state: Propagation, op: Op) -> None:
    """Along the batch dimension, parts must end at block boundaries."""
    data, axis_at = (op.inputs[1], 0) if op.type == "Split" else (op.inputs[0], 2)
    layout = state.data_layout(data)
    axis = state.ints(op, axis_at)
    rank = state.rank(data)
    if not layout.is_sharded or axis is None or rank is None or axis[0] % rank != layout.dim:
        state.apply(op, rule_for(op, state.graph, state))
        return
    extent = _whole_extent(layout.blocks)
    if extent is None or layout.blocks is None:
        raise Refuse("rows chosen by data are split")
    lengths = _part_lengths(state, op, layout.blocks, extent)
    start: SizeLike = 0
    for tensor, length in zip(op.outputs, lengths):
        blocks = cut_blocks(layout.blocks, start, start + length)
        if data in state.offsets:
            state.offsets[tensor] = state.offsets[data]
        state.set(tensor, sharded(layout.dim, blocks, layout.power), state.sources(op))
        start = start + length
    state.learn_sizes(op)
    if op.type == "SplitV":
        state.localise_elements(op, 1, {j: _localised(length) for j, length in enumerate(lengths)})


def _part_lengths(state: Propagation, op: Op, blocks: Tuple[Block, ...], extent: SizeLike) -> List[SizeLike]:
    count = len(op.outputs)
    if op.type == "Split":
        try:
            return [extent // count] * count
        except UnknownExtent:
            batches = {batch_of(block) for block in blocks}
            met = (block_of(1, batches.pop()),) * count if len(batches) == 1 else None
            raise Refuse("the batch dimension is cut into pieces", met)
    sizes: Optional[Value] = state.value(op.inputs[1])
    if sizes is None:
        raise Refuse("it is not known where it cuts the batch")
    known: Dict[int, SizeLike] = {j: position(state, s) for j, s in enumerate(sizes) if isinstance(s, Size) or s != -1}
    rest = extent
    for length in known.values():
        rest = rest - length
    return [known.get(j, rest) for j in range(count)]


@handler
def concat_offset(state: Propagation, op: Op) -> None:
    """The start of each part of a Concat.  Constants that hold the whole batch's size are localised if other shapes are those
    of the clone."""
    axis = state.ints(op, 0)
    shapes = [state.value(t) for t in op.inputs[1:]]
    if axis is None or any(s is None for s in shapes):
        raise Refuse("the shapes it concatenates are not known")
    known = [list(s) for s in shapes if s is not None]
    rows = {d for s in known for d, e in enumerate(s) if isinstance(e, Size) and e.depends_on_batch}
    for i, elements in enumerate(known, 1):
        places = {}
        for d in rows:
            element = elements[d]
            if isinstance(element, Size) and not element.depends_on_batch:
                raise Refuse("it compares the shapes in a clone with that of a tensor that covers all examples")
            if not isinstance(element, Size):
                elements[d] = position(state, element)
                places[d] = _localised(elements[d])
        if places:
            state.localise_elements(op, i, places)
    at, offset = axis[0] % len(known[0]), 0  # type: int, SizeLike
    for tensor, elements in zip(op.outputs, known):
        begin: List[SizeLike] = [0] * len(elements)
        begin[at] = offset
        offset = offset + elements[at]
        state.set_value(tensor, vector(begin), state.sources(op))

