"""Reductions, and ops that need one axis whole (softmax, cumulative sums, sorting)."""
from __future__ import annotations

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import MEAN, SUM, WHOLE, Dims, NoRule, Rule, View, attr, axes, whole


def reduction(op: Op, view: View, kind: str) -> Rule:
    """Sum, Mean, Max ... over the axes of operand 1."""
    if kind == MEAN and view.graph.tensors[op.outputs[0]].dtype.startswith(("int", "uint")):
        kind = WHOLE  # it is rounded
    role = "m" if kind in (SUM, MEAN) else "n"
    rank = view.need_rank(op.inputs[0])
    reduced = {a % rank for a in view.need_ints(op, 1)} if rank else set()
    full = axes(rank)
    if attr(op, "keep_dims", False):
        result: Dims = tuple(() if d in reduced else f for d, f in enumerate(full))
    else:
        result = tuple(f for d, f in enumerate(full) if d not in reduced)
    return Rule((full, None), (result,), role + "n", {f"d{d}": kind for d in reduced})


def total(op: Op, view: View) -> Rule:
    """A sum over all elements (L2Loss)."""
    full = view.need_dims(op.inputs[0])
    return Rule((full,), ((),), "n", {f[0]: SUM for f in full})


def along_last(op: Op, view: View, count: int = 1) -> Rule:
    """Each row along the last axis (or each part of the last ``count`` axes) is independent: softmax.  Further operands are
    parameters."""
    full, others = view.need_dims(op.inputs[0]), len(op.inputs) - 1
    return Rule((full,) + (None,) * others, (full,) * len(op.outputs), "n" * (1 + others), whole(range(-count, 0), len(full)))


def spectrum(op: Op, view: View, count: int) -> Rule:
    """Fourier transforms along the last ``count`` axes, of which the last may become another size."""
    full, others = view.need_dims(op.inputs[0]), len(op.inputs) - 1
    made = tuple((f"frequency{d}",) for d in range(count))
    kinds = {**whole(range(-count, 0), len(full)), **{f[0]: WHOLE for f in made}}
    return Rule((full,) + (None,) * others, (full[:-count] + made,), "m" + "n" * others, kinds)


def along_axis(op: Op, view: View, role: str) -> Rule:
    """Cumulative sums and reversals: operand 1 gives the axes that are needed whole."""
    full = view.need_dims(op.inputs[0])
    return Rule((full, None), (full,), role + "n", whole(view.need_ints(op, 1), len(full)))


def roll(op: Op, view: View) -> Rule:
    """Roll: operand 2 gives the axes that are needed whole."""
    full = view.need_dims(op.inputs[0])
    return Rule((full, None, None), (full,), "mnn", whole(view.need_ints(op, 2), len(full)))


def arg_extreme(op: Op, view: View) -> Rule:
    """ArgMax: the axis in operand 1 is needed whole and is removed."""
    rank = view.need_rank(op.inputs[0])
    axis = view.need_ints(op, 1)[0] % rank
    full = axes(rank)
    return Rule((full, None), (full[:axis] + full[axis + 1:],), "nn", whole([axis], rank))


def top_k(op: Op, view: View) -> Rule:
    """TopK: the last axis becomes ``k``."""
    full = view.need_dims(op.inputs[0])
    result = full[:-1] + (("k",),)
    others = (None,) * (len(op.inputs) - 1)
    return Rule((full, *others), (result, result), "n" * len(op.inputs), {**whole([-1], len(full)), "k": WHOLE})


def in_top_k(op: Op, view: View) -> Rule:
    return Rule(((("b",), ("c",)), (("b",),)) + (None,) * (len(op.inputs) - 2), ((("b",),),), "n" * len(op.inputs),
                {"c": WHOLE})


def dense_bincount(op: Op, view: View) -> Rule:
    """Rows of bins that are counted (or weighted) row by row; a flat operand counts all examples in one row of bins."""
    if view.need_rank(op.inputs[0]) != 2:
        raise NoRule("it counts over all examples")
    rows: Dims = (("b",), ("n",))
    has_weights = view.need_rank(op.inputs[2]) == 2
    return Rule((rows, (), rows if has_weights else None), ((("b",), ("bin",)),), "nn" + ("m" if has_weights else "n"),
                {"n": WHOLE, "bin": WHOLE})


def reverse_sequence(op: Op, view: View) -> Rule:
    """Rows along ``batch_dim``, each reversed along ``seq_dim`` up to its own length."""
    full = view.need_dims(op.inputs[0])
    row = attr(op, "batch_dim", 0) % len(full)
    return Rule((full, (full[row],)), (full,), "mn", whole([attr(op, "seq_dim", 0)], len(full)))
