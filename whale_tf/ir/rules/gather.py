"""Ops that look up, add or store rows by index."""
from __future__ import annotations

from typing import Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import LOOKUP, SUM, WHOLE, AnyDims, Dims, Grouping, NoRule, Rule, ShapeOperand, View, attr, axes


def _letters(prefix: str, count: int) -> Dims:
    return tuple((f"{prefix}{d}",) for d in range(count))


def _depth(view: View, indices: int, rank: int) -> int:
    """How many dimensions, of ``rank``, the last dimension of the indices names."""
    depth = view.need_shape(indices)[-1]
    if depth is None or depth > rank:  # a search takes an open size for that of the batch
        raise NoRule("it is not known how many dimensions its indices name")
    return depth


def batch_dims(op: Op, view: View) -> int:
    """How many leading dimensions the parameters and the indices have in common; a negative number leaves so many dimensions of
    the indices."""
    shared: int = attr(op, "batch_dims", 0)
    return shared if shared >= 0 else shared + view.need_rank(op.inputs[1])


def gather(op: Op, view: View) -> Rule:
    """``params[..., row, ...], indices -> params[..., indices, ...]``, with common leading dimensions (batch_dims)."""
    params, indices = view.need_dims(op.inputs[0]), _letters("i", view.need_rank(op.inputs[1]))
    axis = view.need_ints(op, 2)[0] % len(params) if op.type == "GatherV2" else 0
    shared = batch_dims(op, view)
    indices = params[:shared] + indices[shared:]
    result = params[:axis] + indices[shared:] + params[axis + 1:]
    inputs: Tuple[AnyDims, ...] = (params, indices) + (None,) * (len(op.inputs) - 2)
    return Rule(inputs, (result,), "m" + "n" * (len(op.inputs) - 1), {params[axis][0]: LOOKUP})


def resource_gather(op: Op, view: View) -> Rule:
    """Rows of a variable that is read through its handle, which has the variable's dimensions."""
    if attr(op, "batch_dims", 0):
        raise NoRule("a batched look-up in a variable")
    indices = _letters("i", view.need_rank(op.inputs[1]))
    rows: Dims = (("row",),) + _letters("c", view.need_rank(op.outputs[0]) - len(indices))
    return Rule((rows, indices), (indices + rows[1:],), "mn", {"row": LOOKUP})


def gather_nd(op: Op, view: View) -> Rule:
    """The last dimension of the indices holds positions in the first dimensions of the parameters."""
    params, indices = axes(view.need_rank(op.inputs[0])), _letters("i", view.need_rank(op.inputs[1]))
    depth = _depth(view, op.inputs[1], len(params))
    kinds = {**{params[d][0]: LOOKUP for d in range(depth)}, indices[-1][0]: WHOLE}
    return Rule((params, indices), (indices[:-1] + params[depth:],), "mn", kinds)


def resource_gather_nd(op: Op, view: View) -> Rule:
    """As :func:`gather_nd`, from a variable that is read through its handle."""
    indices = _letters("i", view.need_rank(op.inputs[1]))
    depth = view.need_shape(op.inputs[1])[-1]
    if depth is None:
        raise NoRule("it is not known how many dimensions of the variable are looked up")
    found, rest = _letters("row", depth), _letters("c", view.need_rank(op.outputs[0]) - len(indices) + 1)
    kinds = {**{factor: LOOKUP for factor, in found}, indices[-1][0]: WHOLE}
    return Rule((found + rest, indices), (indices[:-1] + rest,), "mn", kinds)


def scatter_nd(op: Op, view: View) -> Rule:
    """(indices, updates, shape) -> sums of updates."""
    indices, target = _letters("i", view.need_rank(op.inputs[0])), view.value(op.inputs[2])
    result = axes(len(target) if target is not None else view.need_rank(op.outputs[0]))
    depth = _depth(view, op.inputs[0], len(result))
    kinds = {**{result[d][0]: WHOLE for d in range(depth)}, **{f[0]: SUM for f in indices[:-1]}, indices[-1][0]: WHOLE}
    return Rule((indices, indices[:-1] + result[depth:], None), (result,), "nmn", kinds, (ShapeOperand(2, result),))


def tensor_scatter(op: Op, view: View) -> Rule:
    """(tensor, indices, updates): each factor that is written by index is needed whole."""
    result, indices = view.need_dims(op.inputs[0]), _letters("i", view.need_rank(op.inputs[1]))
    depth = _depth(view, op.inputs[1], len(result))
    kinds = {**{result[d][0]: WHOLE for d in range(depth)}, **{f[0]: WHOLE for f in indices}}
    return Rule((result, indices, indices[:-1] + result[depth:]), (result,), "ana", kinds)


def segments(op: Op, view: View, kind: str) -> Rule:
    """(data, segment ids, [count]) -> one row per segment: the sum, maximum ... of its rows."""
    full = view.need_dims(op.inputs[0])
    ids = 1 if op.type.startswith("Segment") else view.need_rank(op.inputs[1])
    result: Dims = (("segment",),) + full[ids:]
    # without a count, the number of results depends on the ids, which differ between shards
    how = kind if len(op.inputs) > 2 else WHOLE
    inputs: Tuple[AnyDims, ...] = (full, full[:ids]) + ((),) * (len(op.inputs) - 2)
    roles = ("m" if kind == SUM else "n") + "n" * (len(op.inputs) - 1)
    grouping = Grouping(1, full[0][0], "segment") if op.type == "SegmentSum" else None
    return Rule(inputs, (result,), roles, {**{f[0]: how for f in full[:ids]}, "segment": WHOLE}, grouping=grouping)


def one_hot(op: Op, view: View) -> Rule:
    indices = view.need_dims(op.inputs[0])
    axis = attr(op, "axis", -1) % (len(indices) + 1)
    return Rule((indices, None, (), ()), (indices[:axis] + (("class",),) + indices[axis:],), "nnnn", {"class": WHOLE})


def dynamic_stitch(op: Op, view: View) -> Rule:
    """(indices ..., data ...) -> rows placed by index; the dimension of the rows does not pass."""
    half = len(op.inputs) // 2
    tail = _letters("c", view.need_rank(op.inputs[half]) - view.need_rank(op.inputs[0]))
    inputs = tuple(_letters(f"k{k}d", view.need_rank(op.inputs[k])) for k in range(half))
    kinds = {f[0]: WHOLE for dims in inputs for f in dims}
    operands = inputs + tuple(dims + tail for dims in inputs)
    return Rule(operands, ((("row",),) + tail,), "n" * half + "a" * half, {**kinds, "row": WHOLE})


def row_join(op: Op, view: View, adds: str = "") -> Rule:
    """(data, indices, segment ids) of sparse segment sums and means: rows are picked, then added up by segment.  ``adds``: parts
    of the picked rows have terms of the result, which has a given number of rows."""
    full = view.need_dims(op.inputs[0])
    return Rule((full, (("i",),), (("i",),)) + ((),) * (len(op.inputs) - 3), ((("segment",),) + full[1:],),
                "m" + "n" * (len(op.inputs) - 1), {"d0": LOOKUP, "i": SUM if adds else WHOLE, "segment": WHOLE},
                grouping=Grouping(2, "i", "segment"))


def row_join_gradient(op: Op, view: View) -> Rule:
    """(gradient of the segments, indices, segment ids, count of rows) -> gradient of the rows that were picked."""
    full = view.need_dims(op.inputs[0])
    return Rule(((("segment",),) + full[1:], (("i",),), (("i",),), ()), ((("row",),) + full[1:],), "mnnn",
                {"segment": WHOLE, "i": WHOLE, "row": WHOLE}, grouping=Grouping(2, "i", "segment"))


def sparse_product(op: Op, view: View) -> Rule:
    """(indices, values, shape, dense) -> the product of a sparse matrix, or of its adjoint, with a dense one."""
    is_adjoint = bool(attr(op, "adjoint_a", False))
    dense: Dims = (("row" if is_adjoint else "column",), ("k",))
    result: Dims = (("column" if is_adjoint else "row",), ("k",))
    inputs: Tuple[AnyDims, ...] = ((("e",), ("which",)), (("e",),), None, dense[::-1] if attr(op, "adjoint_b", False) else dense)
    return Rule(inputs, (result,), "nmnm", {"e": WHOLE, "which": WHOLE, "row": WHOLE, "column": WHOLE},
                (ShapeOperand(2, (("row",), ("column",))),), grouping=Grouping(0, "e", "row"))


def dynamic_partition(op: Op, view: View) -> Rule:
    full, parts = view.need_dims(op.inputs[0]), view.need_rank(op.inputs[1])
    rows = [f"row{i}" for i in range(len(op.outputs))]
    return Rule((full, full[:parts]), tuple(((row,),) + full[parts:] for row in rows), "mn",
                dict.fromkeys([f[0] for f in full[:parts]] + rows, WHOLE))


def where(op: Op, view: View) -> Rule:
    """Positions of the true elements, which are rows chosen by data."""
    full = view.need_dims(op.inputs[0])
    return Rule((full,), ((("row",), ("which",)),), "n", {**{f[0]: WHOLE for f in full}, "row": WHOLE, "which": WHOLE})


def in_table(op: Op, view: View) -> Rule:
    """``table, keys, default -> values``: elementwise in the keys; values that are vectors have further dimensions."""
    keys, values = view.need_dims(op.inputs[1]), view.rank(op.outputs[0])
    more = _letters("v", max(0, len(keys) if values is None else values) - len(keys))
    return Rule((None, keys, None), (keys + more,), "nnn")
