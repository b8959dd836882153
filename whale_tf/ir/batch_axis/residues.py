"""Slices that take one of every ``k`` rows, such as ``x[0::2]`` and ``x[1::2]``: whether they have equally many rows.

There are ``ceil((n - i) / k)`` rows in ``x[i::k]``.  So the first of these slices has as many as the last if and only if ``k``
divides ``n``, and then ``k`` neighbouring rows are a group.  That both have as many is never assumed: some op combines their rows
one by one.
"""
from __future__ import annotations

from typing import Dict, List, Optional, Set

from whale_tf.ir.batch_axis.state import BatchState
from whale_tf.ir.graph import Op
from whale_tf.ir.rules import known_rule
from whale_tf.ir.rules.rule import Factors
from whale_tf.ir.walk import reached


def are_groups(state: BatchState, op: Op, term: int, step: int) -> bool:
    """Whether the rows of a strided slice's operand are in groups of ``step`` rows.

    Args:
        term: the position of the rows' dimension in begin, end and strides.
    """
    slices = _slices(state, op, term, step)
    if 0 not in slices or step - 1 not in slices:
        return False
    rows = {start: reached([tensor], lambda tensor: _behind(state, tensor)) for start, tensor in slices.items()}
    met = {0}
    while True:
        more = {start for start in rows.keys() - met for other in met if _meet(state, rows[start], rows[other])}
        if not more:
            return step - 1 in met
        met |= more


def _slices(state: BatchState, op: Op, term: int, step: int) -> Dict[int, int]:
    """The slices with this stride, by their first rows."""
    found: Dict[int, int] = {}
    for user, position in state.graph.consumers(op.inputs[0]):
        other = state.graph.ops[user]
        begin, strides = (state.ints(other, i) if other.type == op.type and position == 0 else None for i in (1, 3))
        if begin is not None and strides is not None and len(strides) > term and strides[term] == step:
            found[0 if other.attrs.get("begin_mask", 0) >> term & 1 else begin[term]] = other.outputs[0]
    return found


def _rows(dims: object) -> Optional[Factors]:
    """The factor of the first dimension."""
    return dims[0] if isinstance(dims, tuple) and dims and len(dims[0]) == 1 else None


def _behind(state: BatchState, tensor: int) -> List[int]:
    """Results that have the rows of a tensor."""
    found = []
    for user, position in state.graph.consumers(tensor):
        op = state.graph.ops[user]
        rule = known_rule(op, state.graph, state)
        rows = _rows(rule.inputs[position]) if rule is not None and position < len(rule.inputs) else None
        if rule is not None and rows is not None and rule.kind(rows[0]) == "pass":
            found += [t for t, dims in zip(op.outputs, rule.outputs) if _rows(dims) == rows]
    return found


def _meet(state: BatchState, one: Set[int], other: Set[int]) -> bool:
    """Whether an op combines rows of both one by one."""
    for tensor in one:
        for user, position in state.graph.consumers(tensor):
            op = state.graph.ops[user]
            others = [i for i, t in enumerate(op.inputs) if t in other and i != position]
            rule = known_rule(op, state.graph, state) if others else None
            if rule is not None and any(_rows(rule.inputs[i]) == _rows(rule.inputs[position]) is not None for i in others):
                return True
    return False
