"""Ops that do the same with each of many matrices, vectors, images or numbers: the dimensions in front of these pass."""
from __future__ import annotations

from typing import Dict, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import SUM, WHOLE, AnyDims, Dims, NoRule, Rule, View, attr, axes

SHARED = "-"  # an operand that is the same for all
RANKS = {"s": 0, "v": 1, "m": 2, "i": 3, "c": 4}  # scalar, vector, matrix, image with channels, cube with channels


def each(op: Op, view: View, inputs: str, outputs: str, roles: str) -> Rule:
    """Solvers, decompositions, determinants: ``...mn,...mk->...nk`` is ``each mm m nm``.  What is in front of the matrices may
    broadcast.

    Args:
        inputs, outputs: what each operand and result has many of, a letter of ``RANKS``; all of it is needed whole.
        roles: of the operands.
    """
    fronts = [() if kind == SHARED else _front(view, tensor, RANKS[kind]) for kind, tensor in zip(inputs, op.inputs)]
    rank = max(map(len, fronts))
    full = axes(rank)
    aligned = [(1,) * (rank - len(front)) + front for front in fronts]
    kinds: Dict[str, str] = {}

    def inner(name: str, kind: str) -> Dims:
        factors = tuple(f"{name}_{index}" for index in range(RANKS[kind]))
        kinds.update(dict.fromkeys(factors, WHOLE))
        return tuple((factor,) for factor in factors)

    def operand(place: int, kind: str) -> AnyDims:
        if kind == SHARED:
            return None
        front = tuple(() if size == 1 and any(other[d] != 1 for other in aligned) else full[d]
                      for d, size in enumerate(aligned[place]))
        return (*front[rank - len(fronts[place]):], *inner(f"in{place}", kind))

    def result(place: int, kind: str) -> AnyDims:
        is_made = view.need_rank(op.outputs[place]) == rank + RANKS[kind]  # Svd need not compute the vectors
        return (*full, *inner(f"out{place}", kind)) if is_made else None

    return Rule(tuple(operand(place, kind) for place, kind in enumerate(inputs)),
                tuple(result(place, kind) for place, kind in enumerate(outputs)), roles, kinds)


def _front(view: View, tensor: int, rank: int) -> Tuple:
    shape = view.need_shape(tensor)
    return shape[:len(shape) - rank]


def set_diagonal(op: Op, view: View) -> Rule:
    """MatrixSetDiag: one diagonal, or a band of several."""
    is_band = view.need_rank(op.inputs[1]) == view.need_rank(op.inputs[0])
    others = len(op.inputs) - 2
    return each(op, view, ("mm" if is_band else "mv") + SHARED * others, "m", "aa" + "n" * others)


def pooled_with_positions(op: Op, view: View) -> Rule:
    """MaxPoolWithArgmax and its gradient: positions count within an image, unless ``include_batch_in_index``."""
    if attr(op, "include_batch_in_index", False):
        raise NoRule("its positions count over all images")
    return each(op, view, "i", "ii", "n") if len(op.inputs) == 1 else each(op, view, "iii", "i", "nmn")


def quantized(op: Op, view: View) -> Rule:
    """Numbers in a range of two operands, which is the same for all: FakeQuantWithMinMaxVars, QuantizeAndDequantize."""
    if not attr(op, "range_given", True) or attr(op, "axis", -1) != -1:
        raise NoRule("its range is that of its operand, or each channel has its own")
    full = view.need_dims(op.inputs[0])
    return Rule((full, None, None), (full,), "nnn")


def quantized_gradient(op: Op, view: View) -> Rule:
    """By the numbers, and by the two ends of the range, to which all numbers outside contribute."""
    if attr(op, "axis", -1) != -1:
        raise NoRule("each channel has its own range")
    full = view.need_dims(op.inputs[0])
    return Rule((full, full, None, None), (full, (), ()), "mnnn", {factor: SUM for factor, in full})
