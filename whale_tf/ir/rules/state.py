"""Variables and optimizers: an update is elementwise over the variable and its slots, which are sharded like it.

A resource handle stands for its variable, so it has the variable's dimensions.  Letters describe operands: ``v`` is a
variable or slot that is updated in place, ``x`` one that is only read, ``g`` a value with the variable's shape, ``s`` a scalar,
``r`` rows and ``i`` their numbers (sparse updates), ``z`` anything else.
"""
from __future__ import annotations

from typing import Dict, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import LOOKUP, SAME, WHOLE, AnyDims, Dims, Rule, View, axes


def update(op: Op, view: View, letters: str) -> Rule:
    """An update with the operands that ``letters`` describe."""
    rank = _rank(op, view, letters)
    full = axes(rank)
    position = letters.index("i") if "i" in letters else -1
    index_rank = view.rank(op.inputs[position]) if position >= 0 else None
    numbers: Dims = tuple((f"i{d}",) for d in range(1 if index_rank is None else index_rank))
    dims: Dict[str, AnyDims] = {"v": full, "x": full, "g": full, "s": (), "r": numbers + full[1:], "i": numbers, "z": None}
    kinds = {**{f[0]: WHOLE for f in numbers}, "d0": LOOKUP} if position >= 0 else {}
    alias = tuple((i, 0 if op.outputs and i == 0 else -1) for i, letter in enumerate(letters) if letter == "v")
    operands = tuple(dims[letter] for letter in letters)
    return Rule(operands, (full,) * len(op.outputs), "n" * len(letters), kinds, (), alias)


def _rank(op: Op, view: View, letters: str) -> int:
    """The variable's rank: from a gradient, from rows, or from the reference itself."""
    for letter, extra in (("g", 0), ("r", None), ("v", 0)):
        if letter in letters:
            rank = view.rank(op.inputs[letters.index(letter)])
            if rank is not None:
                if extra is None:
                    return rank - (view.rank(op.inputs[letters.index("i")]) or 1) + 1
                return rank
    return 0


def read(op: Op, view: View) -> Rule:
    """ReadVariableOp: the result has the variable's dimensions."""
    dims = view.dims(op.outputs[0])
    return Rule((dims,), (dims,), "m")


def source(op: Op, view: View) -> Rule:
    """A value without operands: every dimension may be divided."""
    outputs: Tuple[AnyDims, ...] = tuple(
        SAME if view.rank(t) is None else tuple((f"o{i}d{d}",) for d in range(view.rank(t) or 0))
        for i, t in enumerate(op.outputs))
    return Rule((None,) * len(op.inputs), outputs, "n" * len(op.inputs))


def undivided(op: Op, view: View) -> Rule:
    """Neither operands nor results are divided."""
    return Rule((None,) * len(op.inputs), (None,) * len(op.outputs), "n" * len(op.inputs))
