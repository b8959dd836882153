"""Matches the dimensions of slots whose shape differs from their variable's, such as Adafactor's row and column means.

Shapes cannot tell (the rows and columns of a square matrix have one size), but the update can: every dimension is followed from
the variable's gradient through the ops of the update, by their rules, to the value that is written to the slot.
"""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.rules import NoRule, Rule, View
from whale_tf.ir.rules.rule import LOOKUP
from whale_tf.patterns.spread import Spread, shard
from whale_tf.patterns.strategy import sharding_rule

Dims = Tuple[Optional[int], ...]


class Factored(NamedTuple):
    """A slot of variable op ``variable``.  ``dims`` has the variable's dimension for each dimension of the slot, or None."""

    variable: int
    dims: Dims

    def spread(self, variable: Spread) -> Optional[Spread]:
        """The slot's spread if the variable has the given one; None if the slot lacks the divided dimension."""
        if not variable.is_shard or self.dims.count(variable.dim) != 1:
            return None
        return shard(self.dims.index(variable.dim), variable.sizes)


def factored_slots(graph: OpGraph, view: View, gradients: Mapping[int, int], rows: Mapping[int, int],
                   slots: Set[int]) -> Dict[int, Factored]:
    """Slot -> the variable's dimensions to which its dimensions belong.

    Args:
        gradients: gradient tensor -> the variable op it updates.
        rows: values of a sparse gradient -> the variable op; they count the variable's rows only after summing for each row.
        slots: variable ops that might be slots.
    """
    origins = {tensor: _whole(variable, tensor, view) for tensor, variable in gradients.items()}
    for tensor, variable in rows.items():
        origins[tensor] = Factored(variable, (None,) + _whole(variable, tensor, view).dims[1:])
    found: Dict[int, Factored] = {}
    for op in graph.ops:
        known = {origins[t].variable for t in op.inputs if t in origins} if op.phase is Phase.APPLY else ()
        if len(known) != 1:
            continue
        try:
            rule = sharding_rule(op, view)
        except NoRule:
            continue
        variable, where = next(iter(known)), _where(op, rule, origins)
        for tensor, dims in zip(op.outputs, rule.outputs):
            if isinstance(dims, tuple):
                origins[tensor] = Factored(variable, tuple(where.get(f[0]) if len(f) == 1 else None for f in dims))
            if op.type == "UnsortedSegmentSum" and view.shape(tensor) == graph.ops[variable].attrs.get("shape"):
                origins[tensor] = _whole(variable, tensor, view)
        written = graph.tensors[op.inputs[0]].op
        if rule.alias and written in slots and isinstance(rule.inputs[0], tuple):
            found[written] = Factored(variable, tuple(where.get(f[0]) if len(f) == 1 else None for f in rule.inputs[0]))
            shape = graph.ops[variable].attrs.get("shape")
            if LOOKUP in rule.kinds.values() and graph.ops[written].attrs.get("shape") == shape:
                found[written] = Factored(variable, tuple(range(len(shape or ()))))  # rows of the gradient are rows of both
    return found


def _whole(variable: int, tensor: int, view: View) -> Factored:
    """A tensor with the variable's own dimensions."""
    return Factored(variable, tuple(range(len(view.shape(tensor) or ()))))


def _where(op: Op, rule: Rule, origins: Mapping[int, Factored]) -> Dict[str, int]:
    """Factor -> the variable's dimension."""
    where: Dict[str, int] = {}
    for tensor, dims in zip(op.inputs, rule.inputs):
        if tensor in origins and isinstance(dims, tuple) and len(dims) == len(origins[tensor].dims):
            for factors, dim in zip(dims, origins[tensor].dims):
                if len(factors) == 1 and dim is not None:
                    where[factors[0]] = dim
    return where
