"""Handlers of shapes and of ops that regroup dimensions: Shape, Cast of an extent, Reshape, Tile, space to batch."""
from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np

from whale_tf.ir.batch_axis.blocks import Refuse, blocks_of, extent_layout, localise_vector
from whale_tf.ir.batch_axis.operands import Operands, carry_offsets
from whale_tf.ir.batch_axis.propagate import Propagation, handler
from whale_tf.ir.batch_axis.result import EXTENT
from whale_tf.ir.batch_axis.state import MAX_OPAQUE, SHAPE_ONLY, SIZED, UNIFORM, ZERO
from whale_tf.ir.extents import (
    Size,
    SizeLike,
    UnknownExtent,
    Value,
    as_value,
    batch_symbol,
    broadcast_gradient_args,
    in_part,
    is_counted,
    is_static,
    product,
    rows_of,
    scalar,
    static_ints,
    vector,
)
from whale_tf.ir.graph import Op, Shape, elements_of
from whale_tf.ir.layout import REFERENCE, Block, Blocks, Layout, batch_of, block_of, rows_each, sharded
from whale_tf.ir.rules import rule_for
from whale_tf.ir.traits import traits
from whale_tf.ir.walk import reached


@handler
def shape_of(state: Propagation, op: Op) -> None:
    """The sizes of a divided tensor are those of the clone's part."""
    for tensor, result in zip(op.inputs, op.outputs):
        sizes = state.local_shape(tensor)
        if sizes is None:
            if state.layout(tensor).is_sharded:
                raise Refuse(f"the rank of {state.graph.tensor_name(tensor)!r} is not known")
            continue
        value = {"Size": lambda: scalar(product(sizes or ())), "Rank": lambda: scalar(len(sizes or ()))}.get(
            op.type, lambda: vector(sizes or ()))()
        state.set_value(result, value, state.sources(op))


@handler
def cast(state: Propagation, op: Op) -> None:
    """The batch size as a float is a replicated value with power -1, or the whole batch's size if something is chosen by it."""
    tensor = op.inputs[0]
    value = state.value(tensor) if state.layouts.get(tensor) is EXTENT and not state.is_integer(op.outputs[0]) else None
    is_exact = value is not None and all(map(is_counted, value.flat)) and _decides(state, op.outputs[0])
    layout = None if value is None or is_exact else extent_layout(value)
    if layout is not None:
        state.set(op.outputs[0], layout, state.sources(op))
    elif tensor in state.layouts:
        state.apply(op, rule_for(op, state.graph, state))


def _decides(state: Propagation, number: int) -> bool:
    """Whether an integer, a boolean or a rounded number follows from a number, so that a rounding error may change it: how many
    examples of a share are kept, say."""
    graph = state.graph

    def users(tensor: int) -> List[Op]:
        return [graph.ops[user] for user, _ in graph.consumers(tensor) if graph.ops[user].type not in SHAPE_ONLY]

    def is_choice(op: Op) -> bool:
        return traits(op.type).jumps or any(map(state.is_integer, op.outputs))

    numbers = reached([number], lambda tensor: [t for op in users(tensor) if not is_choice(op) for t in op.outputs
                                                if 0 < elements_of(graph.tensors[t].shape) <= MAX_OPAQUE])
    return any(is_choice(op) for tensor in numbers for op in users(tensor))


@handler
def broadcast_args(state: Propagation, op: Op) -> None:
    """One operand's shape may be a constant with the whole batch's size while the other's is the clone's.  If one shape has a
    size that is known only at run time, of a tensor that covers all examples, whole shapes are compared."""
    if op.forward in state.whole:
        raise Refuse("it compares the shapes of operands that cover all examples")
    values = [state.value(t) for t in op.inputs]
    if values[0] is None or values[1] is None:
        raise Refuse("the shapes it compares are not known")
    a, b = list(values[0]), list(values[1])
    for position, sizes in enumerate((a, b)):
        _take_elements(state, op, position, sizes)
    _harmonise(state, op, 0, a, b)
    _harmonise(state, op, 1, b, a)
    if any(_depends(x) != _depends(y) and isinstance(x, Size) and isinstance(y, Size) for x, y in zip(a[::-1], b[::-1])):
        plan = Operands(state, op, "mm", [state.layout(t) for t in op.inputs])
        for i, layout in enumerate(plan.layouts):
            if layout is EXTENT:
                plan.make_whole(i)
        plan.record()
    if op.type == "BroadcastGradientArgs":
        try:
            results: Sequence[Value] = [as_value(x) for x in broadcast_gradient_args(a, b)]
        except UnknownExtent as reason:
            raise Refuse(f"it is {reason}")
    else:
        rank = max(len(a), len(b))
        pairs = zip([1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b)
        results = [vector([y if x == 1 else x for x, y in pairs])]
    for tensor, value in zip(op.outputs, results):
        state.set_value(tensor, value, state.sources(op))
        if op.type == "BroadcastGradientArgs" and any(map(_depends, a + b)):
            state.flags[tensor] |= SIZED


def _take_elements(state: Propagation, op: Op, position: int, sizes: List[SizeLike]) -> None:
    """Give a shape of all elements of rows the number of the clone's."""
    places = {j: blocks_of(size) for j, size in ((j, in_part(size)) for j, size in enumerate(sizes))
              if isinstance(size, Size) and size.may_be_zero and size != sizes[j]}
    if places:
        state.localise_elements(op, position, places)
        sizes[:] = [in_part(size) if j in places else size for j, size in enumerate(sizes)]


def _depends(size: SizeLike) -> bool:
    return isinstance(size, Size) and size.depends_on_batch


def _harmonise(state: Propagation, op: Op, position: int, mine: List[SizeLike], other: Sequence[SizeLike]) -> None:
    """Localise constants in one shape that correspond to a batch size in the other."""
    places = {}
    for k in range(1, 1 + min(len(mine), len(other))):
        own, theirs = mine[-k], other[-k]
        if isinstance(theirs, Size) and theirs.depends_on_batch and not isinstance(own, Size) and own != 1:
            places[len(mine) - k] = blocks_of(theirs)
            state.check_baked(own, blocks_of(theirs))
    if places:
        state.result.localise[op.id, position] = localise_vector(mine, places)
        for j in places:
            mine[j] = other[j - len(mine) + len(other)]


@handler
def reshape(state: Propagation, op: Op) -> None:
    """View the data as ``(major, batch, minor)`` and find the target dimension that holds the batch."""
    data, target = op.inputs
    layout = state.data_layout(data)
    target_value = state.value(target)
    bounds = Operands(state, op, "mn", [layout, state.layout(target)])
    bounds.combine_bounds(0)
    bounds.record()
    if not layout.is_sharded:
        if state.layouts.get(target) is EXTENT and target_value is not None:
            layout = _slice_before(state, op, layout, list(target_value))
        else:
            _move(state, op, layout)
            return
    before = state.local_shape(data)
    if before is None:
        raise Refuse("the rank of its operand is not known")
    if not state.layout(data).is_sharded:  # it has just been sliced
        before = before[:layout.dim] + (rows_of(layout.blocks or ()),) + before[layout.dim + 1:]
    after = _in_clone(_target(state, op, target_value), product(before[:layout.dim]))
    dim, blocks = _place(state, op, layout, before, after)
    if target_value is not None:
        state.localise_elements(op, 1, {dim: blocks})
    if data in state.offsets:
        plan = Operands(state, op, "mn", [layout, state.layout(target)])
        carry_offsets(state, op, plan)
        plan.record()
    state.set(op.outputs[0], sharded(dim, blocks, layout.power), state.sources(op))
    if state.lacks_sizes(op.outputs[0]):
        state.set_sizes(op.outputs[0], after)
    state.flags[op.outputs[0]] |= state.flags[data] & (UNIFORM | ZERO)


def _in_clone(after: List[SizeLike], prefix: SizeLike) -> List[SizeLike]:
    """The target shape in a clone.  Its size of the batch may come from a section, which has it whole; that of other dimensions
    stays whole.

    Args:
        prefix: the product of the sizes in front of the batch.
    """
    places = [] if any(map(_depends, after)) else [j for j, size in enumerate(after) if in_part(size) != size]
    if len(places) > 1:
        places = [j for j in places if product(after[:j]) == prefix][:1]
    return [in_part(size) if j in places else size for j, size in enumerate(after)]


def _move(state: Propagation, op: Op, layout: Layout) -> None:
    value = state.value(op.inputs[1])
    if value is not None and state.lacks_sizes(op.outputs[0]):
        state.set_sizes(op.outputs[0], [Size.of(("dim", op.outputs[0], j)) if isinstance(s, int) and s < 0 else s
                                        for j, s in enumerate(value)])
    zero = Operands(state, op, "mn", [layout, layout]).zero(0)
    state.set(op.outputs[0], layout, state.sources(op), zero)


def _slice_before(state: Propagation, op: Op, layout: Layout, target: List[SizeLike]) -> Layout:
    """Take the clone's rows of a whole tensor before it is reshaped to a clone's shape, if the dimension is kept."""
    shape = state.shape(op.inputs[0])
    dim = next(j for j, s in enumerate(target) if isinstance(s, Size) and s.depends_on_batch)
    size = target[dim]
    blocks = blocks_of(size) if isinstance(size, Size) else None
    dim = _kept(shape, target, dim)
    if shape is None or dim < 0:
        raise Refuse("a whole tensor is given the shape of a part of the batch")
    plan = Operands(state, op, "mn", [layout, layout])
    plan.slice(0, dim, blocks)
    plan.record()
    return sharded(dim, blocks, plan.layouts[0].power)  # terms of a sum are added up before rows are taken


def _kept(shape: Shape, target: Sequence[SizeLike], dim: int) -> int:
    """The dimension of a tensor that becomes ``dim`` in its new shape, apart from sizes of one; -1: it is not kept, or that is
    not known.  Open sizes after it may have whatever size the known ones leave, except one."""
    sizes, leading = shape or (), [size for size in target[:dim] if size != 1]
    place = next((j for j, size in enumerate(sizes) if size != 1 and [s for s in sizes[:j] if s != 1] == leading), -1)
    rest, after = [s for s in sizes[place + 1:] if s != 1], [s for s in target[dim + 1:] if s != 1]
    known = [size for size in after if not isinstance(size, Size) and size >= 0]
    if None not in rest and len(known) == len(after):
        is_kept = product(rest) == product(known)  # type: ignore[arg-type]
    elif len(rest) == len(after):
        is_kept = True
    else:
        is_kept = None not in rest and product(rest) != product(known)  # type: ignore[arg-type]
    return place if is_kept else -1


def _target(state: Propagation, op: Op, value: Optional[Value]) -> List[SizeLike]:
    """The target shape: the operand's value, keeping -1, or the graph's static result shape."""
    if value is not None:
        return list(value)
    shape = state.graph.tensors[op.outputs[0]].shape
    if shape is None:
        raise Refuse("the shape it asks for is not known")
    return [Size.of(("dim", op.outputs[0], d)) if s is None else s for d, s in enumerate(shape)]


def _place(state: Propagation, op: Op, layout: Layout, before: Sequence[SizeLike],
           after: List[SizeLike]) -> Tuple[int, Blocks]:
    """Dimension and blocks of the batch in the target shape; fills in the -1 of ``after``."""
    blocks = layout.blocks
    prefix = product(before[:layout.dim])
    if blocks is None or len(set(blocks)) != 1:
        return _keep_whole(layout, prefix, before, after)
    rest, batch = prefix * product(before[layout.dim + 1:]), batch_of(blocks[0])
    examples = Size.of(batch_symbol(batch))
    per_example = rest * _divide(before[layout.dim], examples)
    following = [j for j, s in enumerate(after) if isinstance(s, Size) and s.depends_on_batch]
    if len(following) > 1:
        raise Refuse("two of its dimensions are divided along the batch")
    groups = _groups(prefix, per_example, after)
    if -1 in after:
        hole = after.index(-1)
        others = product([s for j, s in enumerate(after) if j != hole])
        if not following and state.batch is not None and batch == REFERENCE and is_static(vector([per_example, others])):
            after[hole] = _divide(per_example * state.batch, others)  # the sizes determine where the batch is
        else:
            following = following or _baked(state, prefix * len(blocks), after, hole) or [hole]
            total = per_example * (examples if following[0] == hole or isinstance(after[following[0]], Size)
                                   else state.batch or 1)
            leads = following[0] == hole and isinstance(per_example, Size) and product(after[:hole]) == prefix * len(blocks)
            after[hole] = _rows(op, total, others, leads, examples, groups)
    if not following and batch != REFERENCE:
        raise Refuse("the constant shape it asks for does not say where the examples of another batch than the first are")
    if not following:
        return _place_baked(state, prefix * len(blocks), per_example, after, groups)
    dim = following[0]
    return dim, _regroup(state, _divide(prefix * len(blocks), product(after[:dim])), after[dim])


def _groups(prefix: SizeLike, per_example: SizeLike, after: Sequence[SizeLike]) -> int:
    """How many examples a reshape puts into a group, as that of ``[B, 16]`` to ``[-1, 4, 16]`` does; else 1."""
    sizes = static_ints(vector([per_example, *after[1:]]))
    if sizes is None or -1 in sizes or prefix != 1:
        return 1
    count, rest = divmod(elements_of(tuple(sizes[1:])) or 1, sizes[0])
    return 1 if rest else max(1, count)


def _rows(op: Op, total: SizeLike, others: SizeLike, leads: bool, examples: Size, groups: int) -> SizeLike:
    """The size for which a -1 stands; ``leads``: it is the batch, nothing has moved in front of it, and examples have an unknown
    size.

    Raises:
        Refuse: it is not the batch; perhaps it counts groups of so many examples.
    """
    try:
        return total // others
    except (UnknownExtent, ZeroDivisionError):
        if not leads:
            raise Refuse("the batch dimension is cut into pieces", groups=groups)
        return examples * Size.of(("dim", op.outputs[0], -1))  # every example has the same unknown number of rows


def _baked(state: Propagation, prefix: SizeLike, after: Sequence[SizeLike], hole: int) -> List[int]:
    """The position of a constant before the target's hole that is the batch: the product of the sizes in front of it is
    ``prefix`` (that of the sizes in front of the batch), and it is a multiple of the batch size."""
    for dim, size in enumerate(after[:hole]):
        if state.batch is not None and not isinstance(size, Size) and size % state.batch == 0 and (
                product(after[:dim]) == prefix):
            return [dim]
    return []


def _regroup(state: Propagation, majors: SizeLike, size: SizeLike) -> Blocks:
    """Blocks of a batch dimension of the given size behind ``majors`` repetitions."""
    if not isinstance(majors, int) or majors < 1:
        raise Refuse("the sizes in front of the batch dimension are not known")
    if isinstance(size, Size):
        found = blocks_of(size)
    else:
        found = (size // state.batch,) if state.batch is not None and size % state.batch == 0 else None
    if found is None or len(found) != 1:
        raise Refuse("the batch dimension is cut into pieces")
    each, batch = rows_each(found[0]), batch_of(found[0])
    if each == -1 and majors == 1:
        return found
    if each == -1 or each % majors or not each:
        raise Refuse("the batch dimension is cut into pieces")
    return (block_of(each // majors, batch),) * majors


def _place_baked(state: Propagation, prefix: SizeLike, per_example: SizeLike, after: Sequence[SizeLike],
                 groups: int) -> Tuple[int, Blocks]:
    """Find the dimension of a constant target that contains the batch, by comparing cumulative products.

    Raises:
        Refuse: there is none; perhaps one counts groups of so many examples.
    """
    sizes = static_ints(vector(after))
    if sizes is None or isinstance(per_example, Size) or isinstance(prefix, Size):
        raise Refuse("the constant shape it asks for cannot be compared with its operand's")
    total = elements_of(tuple(sizes))
    batch = state.batch if state.batch is not None else total // per_example
    if batch * per_example != total:
        raise Refuse(f"the constant shape it asks for does not hold {per_example} elements per example")
    lead, start, end = 1, prefix, prefix * batch
    for dim, size in enumerate(sizes):
        if lead * size >= end:
            if start % lead or (lead * size) % end:
                break
            return dim, (lead * size // end,) * (start // lead)
        lead *= size
    raise Refuse("the batch dimension is cut into pieces", groups=groups)


def _keep_whole(layout: Layout, prefix: SizeLike, before: Sequence[SizeLike], after: List[SizeLike]) -> Tuple[int, Blocks]:
    """A dimension of several or unknown blocks must stay as it is."""
    for dim in range(len(after)):
        if product(after[:dim]) == prefix:
            rest_before, rest_after = product(before[layout.dim + 1:]), product(after[dim + 1:])
            if rest_before == rest_after and (after[dim] == -1 or after[dim] == before[layout.dim]
                                              or not _is_one(after[dim])):
                return dim, layout.blocks
    raise Refuse("rows that are chosen by data or are in several blocks are regrouped")


def _is_one(size: SizeLike) -> bool:
    return not isinstance(size, Size) and size == 1


def _divide(a: SizeLike, b: SizeLike) -> SizeLike:
    try:
        if a % b == 0:
            return a // b
    except (UnknownExtent, ZeroDivisionError):
        pass
    raise Refuse("the batch dimension is cut into pieces")


@handler
def tile(state: Propagation, op: Op) -> None:
    """Repeating a batch dimension ``k`` times repeats its blocks; a dimension of size one may be repeated per example."""
    layout = state.data_layout(op.inputs[0])
    counts = state.value(op.inputs[1])
    if not layout.is_sharded:
        rule = rule_for(op, state.graph, state)
        spread = [j for j, s in enumerate(counts if counts is not None else ()) if isinstance(s, Size) and s.depends_on_batch]
        if spread and len(rule.outputs[0][spread[0]]) != 1:  # type: ignore[index,arg-type]
            raise Refuse("it repeats elements as often as there are examples")
        state.apply(op, rule)
        return
    if counts is None or isinstance(counts[layout.dim], Size):
        raise Refuse("it is not known how often the batch is repeated")
    if any(isinstance(s, Size) and s.depends_on_batch for s in counts):
        raise Refuse("two of its dimensions are divided along the batch")
    repeats = int(counts[layout.dim])
    if layout.blocks is None and repeats != 1:
        raise Refuse("rows chosen by data are repeated")
    blocks = layout.blocks if repeats == 1 or layout.blocks is None else layout.blocks * repeats
    plan = Operands(state, op, "mn", [layout, state.layout(op.inputs[1])])
    carry_offsets(state, op, plan)
    state.set(op.outputs[0], sharded(layout.dim, blocks, layout.power), state.sources(op), plan.zero(0))
    state.learn_sizes(op)
    plan.record()


@handler
def space_to_batch(state: Propagation, op: Op) -> None:
    """Offsets within a block of pixels become major factors of the batch dimension, and vice versa."""
    layout = state.data_layout(op.inputs[0])
    sizes = state.ints(op, 1)
    if not layout.is_sharded or layout.dim != 0 or sizes is None:
        raise Refuse("a dimension of pixels is divided along the batch")
    first: Optional[Block] = layout.blocks[0] if layout.blocks else None
    wide = (first,) * int(np.prod(sizes))
    if op.type == "SpaceToBatchND" and first is not None and rows_each(first) == 1 and layout.blocks == (first,):
        blocks: Blocks = wide  # type: ignore[assignment]
    elif op.type == "BatchToSpaceND" and first is not None and rows_each(first) == 1 and layout.blocks == wide:
        blocks = (first,)
    else:
        raise Refuse("its batch dimension consists of other blocks")
    plan = Operands(state, op, "mnn", [layout, *(state.layout(tensor) for tensor in op.inputs[1:])])
    carry_offsets(state, op, plan)
    state.set(op.outputs[0], sharded(0, blocks, layout.power), state.sources(op))
    plan.record()
