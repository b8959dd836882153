"""Handlers of ops that number or look up rows: Range, Gather, GatherNd, Where, scatters and segment sums.

Positions in the batch are an index tensor with an *offset* ``c``: the whole value is the clone's plus ``c o_i``, where
``o_i`` is the number of examples before clone ``i``.  A look-up along the batch dimension is local if and only if the index
has the matching offset.
"""
from __future__ import annotations

from typing import Any, List

from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Refuse, blocks_of, offset_of
from whale_tf.ir.batch_axis.groups import divided_index
from whale_tf.ir.batch_axis.operands import Operands
from whale_tf.ir.batch_axis.propagate import Propagation, handler
from whale_tf.ir.batch_axis.result import EXTENT, Localise, Offset, Offsets, columns, negative
from whale_tf.ir.extents import Size, is_static, rows_of
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import Blocks, Layout, Rows, batch_of, block_of, rows_each, sharded
from whale_tf.ir.rules import Rule, rule_for
from whale_tf.ir.rules.gather import batch_dims
from whale_tf.ir.rules.rule import named

_ELSEWHERE = "it looks up examples by an index other than their own position"


@handler
def range_(state: Propagation, op: Op) -> None:
    """``range(0, c b, d)`` gives positions, ``c / d`` per example; they may count down (``c`` and ``d`` negative)."""
    values = [state.value(t) for t in op.inputs]
    if any(v is None for v in values):
        raise Refuse("its bounds are not known")
    bounds: List[Any] = [v[()] for v in values if v is not None]
    start, limit, delta = bounds
    promoted = state.promoted.get(op.outputs[0])
    if promoted is not None:
        if len(promoted[1]) != 1:
            raise Refuse("it numbers the examples of several blocks")
        found: Blocks = promoted[1]
        span, batch = rows_each(promoted[1][0]) * delta, batch_of(promoted[1][0])
        state.result.localise[op.id, 1] = Localise((rows_of(promoted[1]) * delta,))
    else:
        if start != 0 or isinstance(delta, Size) or not isinstance(limit, Size):
            raise Refuse("its positions do not begin at the first example")
        found = blocks_of(limit)
        if found is None:
            raise Refuse("it counts rows chosen by data")
        if limit.counts is None:
            raise Refuse("the number of positions per example is not known")
        if len(found) != 1:
            raise Refuse("it numbers examples of several batches")
        span, batch = rows_each(found[0]), batch_of(found[0])
        if span * delta < 0:
            raise Refuse("it has no positions, because its step leads away from its limit")
    if span % delta:
        raise Refuse("its positions cannot be divided into examples")
    state.offsets[op.outputs[0]] = block_of(span, batch)
    state.set(op.outputs[0], sharded(0, (block_of(span // delta, batch),)), state.sources(op))


@handler
def gather(state: Propagation, op: Op) -> None:
    params, indices = op.inputs[:2]
    layout, index = state.data_layout(params), state.data_layout(indices)
    rank = state.rank(params)
    axes = state.ints(op, 2) if op.type == "GatherV2" else [0]
    axis = axes[0] if axes else None
    if axis is not None and rank:
        axis %= rank
    if not layout.is_sharded or axis is None or layout.dim != axis:
        state.apply(op, rule_for(op, state.graph, state))
        return
    elements = divided_index(state, indices, layout.blocks) if axis == 0 and not index.is_sharded else None
    if elements is not None:
        plan = Operands(state, op, "mnn"[:len(op.inputs)], [layout, REPLICATED_0, REPLICATED_0][:len(op.inputs)])
        plan.slice(1, 0, elements)
        plan.steps[1].append(Offset(negative(offset_of(layout.blocks) or 0)))
        _take_positions(state, op, plan)
        state.set(op.outputs[0], sharded(0, elements, layout.power), state.sources(op))
        state.learn_sizes(op)
        plan.record()
        return
    if not index.is_sharded or index.power or not _follows(state, state.offsets.get(indices, 0), index, layout.blocks):
        raise Refuse(_ELSEWHERE)
    plan = Operands(state, op, "mnn"[:len(op.inputs)], [layout, index, REPLICATED_0][:len(op.inputs)])
    _take_positions(state, op, plan)
    dim = axis + index.dim - batch_dims(op, state)
    state.set(op.outputs[0], sharded(dim, index.blocks, layout.power), state.sources(op))
    state.learn_sizes(op)
    plan.record()


@handler
def crops(state: Propagation, op: Op) -> None:
    """Crops of images are divided with these if each is of an image at its own position."""
    rule = rule_for(op, state.graph, state)
    image = rule.inputs.index(named("bhwc"))
    layouts = [state.data_layout(t) for t in op.inputs[:-1]] + [state.layout(op.inputs[-1])]
    if not layouts[image].is_sharded or layouts[image].dim != 0:
        state.apply(op, rule)
        return
    plan = Operands(state, op, rule.roles, layouts)
    rows = _divide_crops(state, plan, rule, layouts[image].blocks)
    power, _ = plan.settle(True)
    state.set(op.outputs[0], sharded(0, rows, power), state.sources(op), plan.is_zero)
    state.learn_sizes(op)
    plan.record()


@handler
def crops_gradient(state: Propagation, op: Op) -> None:
    """The gradient of images by crops, each of an image at its own position."""
    rule, sizes = rule_for(op, state.graph, state), op.inputs[-1]
    value, offset = state.value(sizes), state.offsets.get(op.inputs[rule.inputs.index(named("n"))], 0)
    size = value[0] if value is not None else None
    if not offset and not (isinstance(size, Size) and size.depends_on_batch):
        state.apply(op, rule)
        return
    blocks: Blocks = blocks_of(size) if isinstance(size, Size) else (offset,)  # type: ignore[assignment]
    plan = Operands(state, op, rule.roles, [state.data_layout(t) for t in op.inputs[:-1]] + [REPLICATED_0])
    _divide_crops(state, plan, rule, blocks)
    power, _ = plan.settle(True)
    state.localise_elements(op, len(op.inputs) - 1, {0: blocks})
    state.set(op.outputs[0], sharded(0, blocks, power), state.sources(op), plan.is_zero)
    state.learn_sizes(op)
    plan.record()


def _divide_crops(state: Propagation, plan: Operands, rule: Rule, images: Blocks) -> Blocks:
    """Divide all operands that have a row for each crop, if each crop is of an image at its own position; returns its blocks."""
    index = rule.inputs.index(named("n"))
    tensor, layout, expected = plan.op.inputs[index], plan.layouts[index], offset_of(images)
    rows = layout.blocks
    if not layout.is_sharded and expected is not None:  # it may be a constant that counts the examples of a static batch
        rows = images
        plan.slice(index, 0, rows)
    elif not layout.is_sharded or not _follows(state, state.offsets.get(tensor, 0), layout, images):
        raise Refuse(_ELSEWHERE)
    if not layout.is_sharded and plan.offset(index) != expected:
        raise Refuse(_ELSEWHERE)
    plan.count_from_own(index)
    for i, dims in enumerate(rule.inputs):
        if i == index or not isinstance(dims, tuple) or dims[0] != ("n",):
            continue
        if not plan.layouts[i].is_sharded:
            plan.slice(i, 0, rows)
        elif plan.layouts[i].dim != 0 or state.unify(rows, plan.layouts[i].blocks) != rows:
            raise Refuse(_ELSEWHERE)
    return rows


@handler
def gather_nd(state: Propagation, op: Op) -> None:
    params, indices = op.inputs
    layout, index = state.data_layout(params), state.data_layout(indices)
    shape = state.shape(indices)
    depth = shape[-1] if shape else None
    if not layout.is_sharded or depth is None or layout.dim >= depth:
        state.apply(op, rule_for(op, state.graph, state))
        return
    _check_columns(state, indices, index, depth, layout.dim, layout.blocks)
    plan = Operands(state, op, "mn", [layout, index])
    _take_positions(state, op, plan)
    state.set(op.outputs[0], sharded(index.dim, index.blocks, layout.power), state.sources(op))
    state.learn_sizes(op)
    plan.record()


def _take_positions(state: Propagation, op: Op, plan: Operands) -> None:
    """The data that are looked up may be positions themselves."""
    offset = state.offsets.get(op.inputs[0], 0)
    if isinstance(offset, (int, Rows)):
        if offset:
            state.offsets[op.outputs[0]] = offset
    else:
        plan.count_from_first(0)


def _check_columns(state: Propagation, indices: int, index: Layout, depth: int, column: int, blocks: Blocks) -> None:
    """Check that column ``column`` of the indices moves along with the batch and that the others do not."""
    steps = columns(state.offsets.get(indices, 0), depth)
    if not index.is_sharded or not _follows(state, steps[column], index, blocks) or any(
            step for number, step in enumerate(steps) if number != column):
        raise Refuse(_ELSEWHERE)


def _follows(state: Propagation, offset: Offsets, index: Layout, blocks: Blocks) -> bool:
    """Whether positions move along with the examples of the rows that are looked up.

    A mask of one batch that picks rows of another tells that both have equally many examples; positions without a choice may be
    those of the first rows only."""
    expected = offset_of(blocks)
    if expected is None or not isinstance(offset, (int, Rows)):
        return False
    if offset != expected and index.blocks is None and rows_each(offset) == rows_each(expected):
        state.met.add((batch_of(offset), batch_of(expected)))
    return offset == expected


@handler
def where(state: Propagation, op: Op) -> None:
    """The positions of the true elements within the clone's own part."""
    layout = state.data_layout(op.inputs[0])
    rank = state.rank(op.inputs[0])
    if not layout.is_sharded:
        state.apply(op, rule_for(op, state.graph, state))
        return
    step = offset_of(layout.blocks)
    if layout.dim != 0 or step is None or rank is None:
        raise Refuse("the true elements of one part do not all come before those of the next")
    plan = Operands(state, op, "n", [layout])
    plan.count_from_first(0)
    state.offsets[op.outputs[0]] = step if rank == 1 else (step,) + (0,) * (rank - 1)
    state.set(op.outputs[0], sharded(0, None), state.sources(op))
    plan.record()


@handler
def segment(state: Propagation, op: Op) -> None:
    """Sums into rows of the batch are local if the ids move along with the batch; otherwise they are sums over the batch."""
    data, ids, count = op.inputs
    layout, index = state.data_layout(data), state.data_layout(ids)
    offset = state.offsets.get(ids, 0)
    value = state.value(count)
    rows = value[()] if value is not None else None
    is_constant = state.batch is None and isinstance(rows, int)  # so it counts no examples
    if isinstance(rows, Size) and rows.depends_on_batch or (offset and isinstance(offset, (int, Rows)) and not is_constant):
        blocks: Blocks = blocks_of(rows) if isinstance(rows, Size) else (offset,)  # type: ignore[assignment]
        if not index.is_sharded or index.dim != 0 or offset != offset_of(blocks):
            raise Refuse("it adds up rows by an index other than the example's own position")
        plan = Operands(state, op, "mnn" if op.type.endswith("Sum") else "nnn", [layout, index, index])
        if not layout.is_sharded:
            plan.slice(0, 0, index.blocks)
        plan.count_from_first(0)
        power, _ = plan.settle(True)
        state.localise_elements(op, 2, {0: blocks})
        state.set(op.outputs[0], sharded(0, blocks, power), state.sources(op))
        state.learn_sizes(op)
        plan.record()
        return
    state.apply(op, rule_for(op, state.graph, state))


@handler
def scatter_nd(state: Propagation, op: Op) -> None:
    """Scatter into rows of the batch, by positions that move along with it."""
    indices, updates, target = op.inputs
    index, layout = state.data_layout(indices), state.data_layout(updates)
    steps = columns(state.offsets.get(indices, 0), 1)
    value = state.value(target)
    rows = [d for d, s in enumerate(value if value is not None else ()) if isinstance(s, Size) and s.depends_on_batch]
    is_constant = state.batch is None and value is not None and is_static(value)  # so it counts no examples
    if is_constant or (not any(steps) and not rows):
        state.apply(op, rule_for(op, state.graph, state))
        return
    shape = state.shape(indices)
    depth = shape[-1] if shape else None
    dim = rows[0] if rows else next(c for c, o in enumerate(steps) if o)
    if value is None or depth is None:
        raise Refuse("the shape it fills is not known")
    if len(rows) > 1:
        raise Refuse("two dimensions of its result have the size of the batch")
    size = value[dim]
    blocks: Blocks = blocks_of(size) if isinstance(size, Size) else (steps[dim],)
    _check_columns(state, indices, index, depth, dim, blocks)
    plan = Operands(state, op, "nmn", [index, layout, index])
    if not layout.is_sharded:
        plan.slice(1, index.dim, index.blocks)
    plan.count_from_first(1)
    power, _ = plan.settle(True)
    state.localise_elements(op, 2, {dim: blocks})
    state.set(op.outputs[0], sharded(dim, blocks, power), state.sources(op))
    state.learn_sizes(op)
    plan.record()


@handler
def dynamic_partition(state: Propagation, op: Op) -> None:
    """Data decide to which part a row goes; each part keeps the order of the examples."""
    layout, parts = state.data_layout(op.inputs[0]), state.data_layout(op.inputs[1])
    rank = state.rank(op.inputs[1])
    if not parts.is_sharded:
        state.apply(op, rule_for(op, state.graph, state))
        return
    plan = Operands(state, op, "mn", [layout, parts])
    if not layout.is_sharded:
        plan.slice(0, 0, parts.blocks)
        layout = sharded(0, parts.blocks, plan.layouts[0].power)
    if layout.dim != 0 or rank != 1 or layout.blocks is None or len(layout.blocks) != 1:
        raise Refuse("the rows of one part do not all come before those of the next")
    offset = plan.offset(0)
    plan.count_from_own(0)
    plan.count_from_first(1)
    plan.record()
    for result in op.outputs:
        if offset:
            state.offsets[result] = offset
        state.set(result, sharded(0, None, layout.power), state.sources(op))


@handler
def dynamic_stitch(state: Propagation, op: Op) -> None:
    """Rows are put back at positions that move along with the batch."""
    half = len(op.inputs) // 2
    indices, data = op.inputs[:half], op.inputs[half:]
    offsets = {state.offsets.get(t, 0) for t in indices}
    layouts = [state.data_layout(t) for t in data]
    if not all(layout.is_sharded and layout.dim == 0 for layout in layouts) or len({x.power for x in layouts}) != 1 or (
            len(offsets) != 1):
        raise Refuse("it places rows that are not divided like the examples")
    offset = offsets.pop()
    if not isinstance(offset, (int, Rows)) or rows_each(offset) <= 0:
        raise Refuse("it places rows by an index other than the example's own position")
    blocks = [block for t in indices for block in state.data_layout(t).blocks or (None,)]
    if None not in blocks and sum(rows_each(block) for block in blocks if block is not None) != rows_each(offset):
        raise Refuse("it places more or fewer rows than its positions tell")
    plan = Operands(state, op, "n" * half + "m" * half, [state.data_layout(t) for t in op.inputs])
    for i in range(half, 2 * half):
        plan.count_from_first(i)
    state.set(op.outputs[0], sharded(0, (offset,), layouts[0].power), state.sources(op))
    plan.record()


@handler
def resource_gather(state: Propagation, op: Op) -> None:
    if any(state.layouts.get(t) is EXTENT for t in op.inputs):
        raise Refuse("it looks up a row by the batch size")
    state.apply(op, rule_for(op, state.graph, state))
