"""Ops that move, cut, join or repeat elements without computing anything."""
from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import WHOLE, AnyDims, Dims, Factors, NoRule, Rule, ShapeOperand, View, attr, axes, whole


def refine(before: Sequence[Optional[int]], after: Sequence[Optional[int]]) -> Tuple[Dims, Dims, Dict[str, str]]:
    """Factors of a reshape: the common refinement of two row-major shapes, major to minor.

    If sizes have no common refinement (``[4, 6]`` as ``[6, 4]``) or are not known, the dimensions are needed whole.
    """
    left: List[List[str]] = [[] for _ in before]
    right: List[List[str]] = [[] for _ in after]
    kinds: Dict[str, str] = {}
    i = j = count = 0
    a: Optional[int] = None
    b: Optional[int] = None
    while i < len(before) and j < len(after):
        a = before[i] if a is None else a
        b = after[j] if b is None else b
        if a == 1 or b == 1:
            i, a = (i + 1, None) if a == 1 else (i, a)
            j, b = (j + 1, None) if b == 1 else (j, b)
            continue
        unknown = a is None or b is None
        if (unknown and not (a is b and list(before[i:]) == list(after[j:]))) or (
                not unknown and max(a or 0, b or 0) % max(min(a or 0, b or 0), 1)):
            break
        name = f"f{count}"
        count += 1
        left[i].append(name)
        right[j].append(name)
        if unknown or a == b:
            i, j, a, b = i + 1, j + 1, None, None
        elif (a or 0) > (b or 0):
            a, j, b = (a or 0) // (b or 1), j + 1, None
        else:
            b, i, a = (b or 0) // (a or 1), i + 1, None
    for lists, sizes, start, side in ((left, before, i, "x"), (right, after, j, "y")):
        for d in range(start, len(sizes)):
            if sizes[d] != 1:
                lists[d].append(f"{side}{d}")
                kinds[f"{side}{d}"] = WHOLE
    return tuple(map(tuple, left)), tuple(map(tuple, right)), kinds


def reshape(op: Op, view: View) -> Rule:
    left, right, kinds = refine(view.need_shape(op.inputs[0]), view.need_shape(op.outputs[0]))
    return Rule((left, None), (right,), "mn", kinds, (ShapeOperand(1, right),))


def expand_dims(op: Op, view: View) -> Rule:
    full = view.need_dims(op.inputs[0])
    axis = view.need_ints(op, 1)[0] % (len(full) + 1)
    return Rule((full, None), (full[:axis] + ((),) + full[axis:],), "mn")


def squeeze(op: Op, view: View) -> Rule:
    shape, named = view.need_shape(op.inputs[0]), attr(op, "squeeze_dims", ())
    dims = [d % len(shape) for d in named] or [d for d, size in enumerate(shape) if size == 1]
    if None in shape and not named:
        raise NoRule("it is not known which dimensions have size one; name them in tf.squeeze(axis=...)")
    full = axes(len(shape))
    return Rule((tuple(() if d in dims else f for d, f in enumerate(full)),),
                (tuple(f for d, f in enumerate(full) if d not in dims),), "m")


def transpose(op: Op, view: View) -> Rule:
    perm = view.need_ints(op, 1)
    full = axes(len(perm))
    return Rule((full, None), (tuple(full[p] for p in perm),), "mn")


def _rank_of_any(view: View, tensors: Sequence[int]) -> int:
    """The rank of tensors that all have the same one."""
    rank = next((r for r in map(view.rank, tensors) if r is not None), None)
    if rank is None:
        raise NoRule("the rank of its operands is not known")
    return rank


def pack(op: Op, view: View) -> Rule:
    rank = _rank_of_any(view, op.inputs)
    full, axis = axes(rank), attr(op, "axis", 0) % (rank + 1)
    return Rule((full,) * len(op.inputs), (full[:axis] + (("new",),) + full[axis:],), "a" * len(op.inputs), {"new": WHOLE})


def unpack(op: Op, view: View) -> Rule:
    rank = view.need_rank(op.inputs[0])
    full, axis = axes(rank), attr(op, "axis", 0) % rank
    return Rule((full,), (full[:axis] + full[axis + 1:],) * len(op.outputs), "m", whole([axis], rank))


def concat(op: Op, view: View) -> Rule:
    """The joined axis is needed whole; along the batch, it yields blocks (see :mod:`whale_tf.ir.batch_axis.cutting`)."""
    first = op.type == "Concat"
    parts = op.inputs[1:] if first else op.inputs[:-1]
    rank = _rank_of_any(view, parts)
    axis = view.need_ints(op, 0 if first else len(op.inputs) - 1)[0] % rank
    full = axes(rank)
    inputs: Tuple[AnyDims, ...] = tuple(full[:axis] + ((f"part{i}",),) + full[axis + 1:] for i in range(len(parts)))
    kinds = {f"part{i}": WHOLE for i in range(len(parts))}
    inputs, roles = ((None,) + inputs, "n" + "a" * len(parts)) if first else (inputs + (None,), "a" * len(parts) + "n")
    return Rule(inputs, (full,), roles, {**kinds, f"d{axis}": WHOLE})


def split(op: Op, view: View) -> Rule:
    data, axis_at = (1, 0) if op.type == "Split" else (0, 2)
    rank = view.need_rank(op.inputs[data])
    full, axis = axes(rank), view.need_ints(op, axis_at)[0]
    inputs: List[AnyDims] = [None] * len(op.inputs)
    inputs[data] = full
    roles = "nm" if data else "mnn"
    parts = [f"part{i}" for i in range(len(op.outputs))]
    outputs = tuple(full[:axis % rank] + ((part,),) + full[axis % rank + 1:] for part in parts)
    return Rule(tuple(inputs), outputs, roles, {**whole([axis], rank), **dict.fromkeys(parts, WHOLE)})


def slice_(op: Op, view: View) -> Rule:
    """Dimensions that are taken in full pass; the others are needed whole."""
    shape, rank = view.shape(op.inputs[0]), view.need_rank(op.inputs[0])
    begin, size = view.value(op.inputs[1]), view.value(op.inputs[2])
    full = axes(rank)
    result: List[Factors] = []
    kinds: Dict[str, str] = {}
    for d in range(rank):
        at, extent = (v[d] if v is not None else None for v in (begin, size))
        known = shape[d] if shape is not None else None
        if at == 0 and (extent == -1 or (known is not None and extent == known)):
            result.append(full[d])
        else:
            kinds[f"d{d}"] = WHOLE
            kinds[f"cut{d}"] = WHOLE
            result.append((f"cut{d}",))
    return Rule((full, None, None), (tuple(result),), "mnn", kinds, (ShapeOperand(2, tuple(result)),))


class Stride:
    """The effect of one StridedSlice term on input dimension ``dim`` (-1: a new axis)."""

    def __init__(self, dim: int, term: int, keeps: bool, full: bool) -> None:
        self.dim, self.term, self.keeps, self.full = dim, term, keeps, full


def strided_terms(op: Op, rank: int, view: View, shape: Sequence[object]) -> List[Stride]:
    """The terms of a StridedSlice (or its gradient), one per input dimension.

    ``full``: the whole dimension is taken in order; ``keeps``: the result has a dimension for it.  ``term`` is the
    position in begin/end/strides; -1 for dimensions that an ellipsis covers (or that are left out at the end).
    """
    begin, end, strides = (view.value(op.inputs[1 + i]) for i in range(3))
    sizes = [len(v) for v in (begin, end, strides) if v is not None]
    if not sizes:
        length = next((view.shape(op.inputs[1 + i]) for i in range(3)), None)
        if not length or length[0] is None:
            raise NoRule("the number of its slice terms is not known")
        sizes = [length[0]]
    masks = {name: attr(op, name + "_mask", 0) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    count = sizes[0]
    new_axes = sum(1 for i in range(count) if masks["new_axis"] >> i & 1 and not masks["ellipsis"] >> i & 1)
    spread = rank - (count - new_axes - (1 if masks["ellipsis"] else 0))
    terms: List[Stride] = []
    dim = 0
    for i in range(count):
        if masks["ellipsis"] >> i & 1:
            terms.extend(Stride(dim + k, -1, True, True) for k in range(spread))
            dim += spread
        elif masks["new_axis"] >> i & 1:
            terms.append(Stride(-1, i, True, True))
        else:
            shrink = bool(masks["shrink_axis"] >> i & 1)
            starts = masks["begin"] >> i & 1 or (begin is not None and begin[i] == 0)
            size = shape[dim] if dim < len(shape) else None
            ends = masks["end"] >> i & 1 or (end is not None and size is not None and end[i] == size)
            forward = strides is not None and strides[i] == 1
            terms.append(Stride(dim, i, not shrink, bool(not shrink and starts and ends and forward)))
            dim += 1
    terms.extend(Stride(d, -1, True, True) for d in range(dim, rank))
    return terms


def strided_dims(terms: Sequence[Stride], rank: int) -> Tuple[Dims, Dims, Dict[str, str]]:
    """Factors of a StridedSlice's operand and result."""
    full, kinds = axes(rank), {}  # type: Dims, Dict[str, str]
    result: List[Factors] = []
    for term in terms:
        if term.dim < 0:
            result.append(())
        elif term.full:
            result.append(full[term.dim])
        else:
            kinds[f"d{term.dim}"] = WHOLE
            if term.keeps:
                kinds[f"cut{term.dim}"] = WHOLE
                result.append((f"cut{term.dim}",))
    return full, tuple(result), kinds


def strided_slice(op: Op, view: View) -> Rule:
    shape = view.need_shape(op.inputs[0])
    full, result, kinds = strided_dims(strided_terms(op, len(shape), view, shape), len(shape))
    return Rule((full, None, None, None), (result,), "mnnn", kinds)


def strided_slice_grad(op: Op, view: View) -> Rule:
    """Operand 0 is the shape of the sliced tensor, operand 4 the gradient of the slice."""
    value = view.value(op.inputs[0])
    if value is None:
        raise NoRule("the shape it fills is not known")
    full, cut, kinds = strided_dims(strided_terms(op, len(value), view, list(value)), len(value))
    return Rule((None, None, None, None, cut), (full,), "nnnnm", kinds, (ShapeOperand(0, full),))


def pad(op: Op, view: View) -> Rule:
    full = view.need_dims(op.inputs[0])
    widths = view.need_ints(op, 1)
    padded = [d for d in range(len(full)) if widths[2 * d] or widths[2 * d + 1]]
    result = tuple((f"cut{d}",) if d in padded else f for d, f in enumerate(full))
    inputs, roles = ((full, None, ()), "ana") if op.type == "PadV2" else ((full, None), "mn")  # type: Tuple[AnyDims, ...], str
    return Rule(inputs, (result,), roles, {**whole(padded, len(full)), **{f"cut{d}": WHOLE for d in padded}})


def tile(op: Op, view: View) -> Rule:
    """A repeated dimension has factors (repeats, elements); a dimension of size one becomes a new factor."""
    shape, value = view.need_shape(op.inputs[0]), view.value(op.inputs[1])
    inputs: List[Factors] = []
    result: List[Factors] = []
    for d, size in enumerate(shape):
        element: Factors = () if size == 1 else (f"d{d}",)
        repeats = value[d] if value is not None else None
        inputs.append(element)
        result.append(element if repeats == 1 else (f"r{d}",) + element)
    counts = tuple(tuple(f for f in factors if f[0] == "r") for factors in result)
    return Rule((tuple(inputs), None), (tuple(result),), "mn", {}, (ShapeOperand(1, counts),))


def broadcast_to(op: Op, view: View) -> Rule:
    before, after = view.need_shape(op.inputs[0]), view.need_shape(op.outputs[0])
    full, offset = axes(len(after)), len(after) - len(before)
    dims = tuple(() if size == 1 and after[d] != 1 else full[d] for d, size in enumerate(before, offset))
    return Rule((dims, None), (full,), "mn", {}, (ShapeOperand(1, full),))


def fill(op: Op, view: View) -> Rule:
    full = axes(view.filled_rank(op))
    return Rule((None, ()), (full,), "nm", {}, (ShapeOperand(0, full),))


def range_(op: Op, view: View) -> Rule:
    """Positions; each shard has its own start."""
    return Rule((None, None, None), ((("d0",),),), "nnn", {"d0": WHOLE})


def matrix_part(op: Op, view: View, role: str, padding: int = 0) -> Rule:
    """Ops on the last two dimensions of a stack of matrices.

    Args:
        padding: the operand with the value of elements that the first operand does not have; 0: there is none.
    """
    rank = view.need_rank(op.inputs[0])
    out = view.need_rank(op.outputs[0])
    full = axes(rank)
    lead = min(rank, out) - (1 if out < rank else 2 if out == rank else 1)
    kinds = whole(range(lead, rank), rank)
    tail = tuple((f"out{d}",) for d in range(lead, out))
    result = full if out == rank and not padding else full[:lead] + tail  # several diagonals have a row each
    kinds.update({f[0]: WHOLE for f in tail})
    count = len(op.inputs) - 1
    inputs, roles = [full, *[None] * count], [role, *"n" * count]  # type: List[AnyDims], List[str]
    if padding:
        inputs[padding], roles[padding] = (), role
    return Rule(tuple(inputs), (result,) * len(op.outputs), "".join(roles), kinds)


def space_to_batch(op: Op, view: View) -> Rule:
    """The batch gets block offsets as major factors: ``bhwc -> (hw-offsets b)h'w'c``."""
    full = view.need_dims(op.inputs[0])
    count = len(view.need_ints(op, 1))
    tail = tuple((f"cut{d}",) for d in range(1, count + 1)) + full[count + 1:]
    kinds = {**whole(range(1, count + 1), len(full)), **{f"cut{d}": WHOLE for d in range(1, count + 1)}, "block": WHOLE}
    wide, narrow = (("block", "d0"),) + tail, full
    before, after = (narrow, wide) if op.type.startswith("Space") else (wide, narrow)
    return Rule((before,) + (None,) * (len(op.inputs) - 1), (after,), "m" + "n" * (len(op.inputs) - 1), kinds)


def depth_space(op: Op, view: View) -> Rule:
    full = axes(4)
    result = (full[0],) + tuple((f"out{d}",) for d in (1, 2, 3))
    return Rule((full,), (result,), "m", {**whole([1, 2, 3], 4), **{f"out{d}": WHOLE for d in (1, 2, 3)}})


def shape_of(op: Op, view: View) -> Rule:
    """Sizes, which do not depend on the operands' elements."""
    return Rule(tuple(map(view.dims, op.inputs)), (None,) * len(op.outputs), "n" * len(op.inputs))
