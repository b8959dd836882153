"""Slots of another shape than their variable's, such as Adafactor's row and column means: which dimension is which.

Shapes do not say it (a square matrix has rows and columns of one size), the update does: from a variable's gradient every
dimension is followed through the ops of the update, by their rules, to what is written to the slot.
"""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.rules import NoRule, Rule, View
from whale_tf.patterns.spread import Spread, shard
from whale_tf.patterns.strategy import sharding_rule

Dims = Tuple[Optional[int], ...]


class Factored(NamedTuple):
    """A slot of variable op ``variable``; ``dims``: the variable's dimension behind each of the slot's, None: none."""

    variable: int
    dims: Dims

    def spread(self, variable: Spread) -> Optional[Spread]:
        """How the slot lies where the variable is spread like that; None: it lacks the dimension that is divided."""
        if not variable.is_shard or self.dims.count(variable.dim) != 1:
            return None
        return shard(self.dims.index(variable.dim), variable.sizes)


def factored_slots(
    graph: OpGraph, view: View, gradients: Mapping[int, int], rows: Mapping[int, int], slots: Set[int]
) -> Dict[int, Factored]:
    """Slot -> what its dimensions are of.

    Args:
        gradients: gradient tensor -> the variable op it updates.
        rows: values of a sparse gradient -> the variable op; they count rows of the variable only when summed up for each.
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
    return found


def _whole(variable: int, tensor: int, view: View) -> Factored:
    """A tensor of the variable's own dimensions."""
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
