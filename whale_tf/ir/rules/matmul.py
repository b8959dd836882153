"""Contractions: MatMul, BatchMatMul, Einsum and the bias gradient."""
from __future__ import annotations

from typing import Any, List, Optional, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import SUM, Dims, NoRule, Rule, View, attr, axes, named


def matmul(op: Op, view: View) -> Rule:
    """``mk,kn->mn``; either operand may be transposed."""
    a, b = "km" if attr(op, "transpose_a", False) else "mk", "nk" if attr(op, "transpose_b", False) else "kn"
    return _MATMUL[a, b]


_MATMUL = {(a, b): Rule((named(a), named(b)), (named("mn"),), "mm", {"k": SUM}) for a in ("mk", "km") for b in ("kn", "nk")}


def batch_matmul(op: Op, view: View) -> Rule:
    """``...mk,...kn->...mn`` with leading dimensions that broadcast (version 2)."""
    shapes = [view.shape(t) for t in op.inputs]
    rank = max(view.need_rank(t) for t in op.inputs) - 2
    lead: List[Tuple[Optional[int], ...]] = [(1,) * (rank + 2 - len(s or ())) + (s or ())[:-2] for s in shapes]
    full = axes(rank)
    parts: List[Dims] = []
    for i, (mine, other) in enumerate(((lead[0], lead[1]), (lead[1], lead[0]))):
        dims = tuple(() if x == 1 and y != 1 else full[d] for d, (x, y) in enumerate(zip(mine, other)))
        parts.append(dims[rank - (len(shapes[i] or ()) - 2):])
    a = named("km" if attr(op, "adj_x", False) else "mk")
    b = named("nk" if attr(op, "adj_y", False) else "kn")
    return Rule((parts[0] + a, parts[1] + b), (full + named("mn"),), "mm", {"k": SUM})


def parse_equation(equation: str, ranks: List[int]) -> Tuple[List[List[str]], List[str]]:
    """Labels of an einsum's operands and result; an ellipsis becomes ``e0, e1, ...``, counted from the last dimension."""
    left, _, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    widest = max([r - len(o.replace("...", "")) for o, r in zip(operands, ranks) if "..." in o] or [0])

    def labels(text: str, hidden: int) -> List[str]:
        head, dots, tail = text.partition("...")
        return list(head) + ([f"e{i}" for i in range(hidden - 1, -1, -1)] if dots else []) + list(tail)
    hidden = [r - len(o.replace("...", "")) for o, r in zip(operands, ranks)]
    return [labels(o, h) for o, h in zip(operands, hidden)], labels(right, widest)


def einsum(op: Op, view: View) -> Rule:
    """Einsum: the equation is the rule."""
    ranks = [view.need_rank(t) for t in op.inputs]
    inputs, output = parse_equation(attr(op, "equation", ""), ranks)
    if any(len(set(labels)) != len(labels) for labels in inputs):
        raise NoRule("a label occurs twice in one operand of {!r}".format(op.attrs.get("equation")))
    dims = []
    for labels, tensor in zip(inputs, op.inputs):
        shape: Any = view.shape(tensor)
        dims.append(tuple(() if label[0] == "e" and len(label) > 1 and size == 1 else (label,)
                          for label, size in zip(labels, shape)))
    contracted = {label: SUM for labels in inputs for label in labels if label not in output}
    return Rule(tuple(dims), (tuple((label,) for label in output),), "m" * len(inputs), contracted)


def bias_add_grad(op: Op, view: View) -> Rule:
    """BiasAddGrad ``...c->c``."""
    full = view.need_dims(op.inputs[0])
    channel = full[1 if op.attrs.get("data_format") == "NCHW" else -1]
    return Rule((full,), ((channel,),), "m", {f[0]: SUM for f in full if f != channel})
