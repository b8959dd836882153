"""What waits for ops of the update, some of which only one of several processes runs (:mod:`whale_tf.passes.owners`).

In that process it waits for the ops.  If a loss scale skips the step, these are dead, and a Merge lets what waits go on::

    ApplyAdam(v, m) ──> done ──┐
                               ├──> Merge ──> what waits
    skipped ───────────────────┘

In the others it waits for everything that the ops would have waited for.
"""

from __future__ import annotations

from typing import Iterable, List, NamedTuple, Optional, Sequence, Set

from whale_tf._tf_compat import tf
from whale_tf.emit.context import Context
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.traits import READS, VARIABLES
from whale_tf.ir.units import GATE_ATTR


class _Gate(NamedTuple):
    """Ops of a loss scale: one is dead in steps that are skipped, and one in all other steps."""

    taken: int
    skipped: int


class Waits:
    """See the module's docstring."""

    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context, self._nodes = context, nodes

    def behind(self, ops: Sequence[int], scope: str, device: str) -> List[str]:
        """Names of the ops for which something waits that comes after ops of the update.  Call this when all other edges of the
        update have moved."""
        left_out = self._context.owners.left_out
        others = left_out.intersection(ops)
        return self._done([op for op in ops if op not in left_out], scope, device) + (self._before(others) if others else [])

    def _done(self, ops: Sequence[int], scope: str, device: str) -> List[str]:
        """Ops that run when ops of this process are done, or are skipped with the whole step."""
        gate = _gate(self._context.graph)
        if gate is None or not any(gate.taken in self._context.graph.ops[op].control_inputs for op in ops):
            return self._names(ops)
        taken, skipped = self._names([gate.taken, gate.skipped])
        done = self._nodes.identity(taken, scope + "/done", tf.bool, device, self._names(ops))
        return [self._nodes.add("Merge", scope + "/done_or_skipped", [done, skipped], device, T=tf.bool, N=2)]

    def _before(self, ops: Iterable[int]) -> List[str]:
        """What ops would have waited for if this process ran them."""
        graph, edit, owners = self._context.graph, self._context.edit, self._context.owners
        left_out = set(self._names(owners.left_out))
        away = {variable for variable, owner in owners.state.items() if not owners.is_own(owner)}
        variables = {op.name for op in graph.ops if op.type in VARIABLES}
        variables.update(op.name for op in graph.ops if op.type in READS and graph.tensors[op.inputs[0]].op in away)
        stack = self._names(ops)
        seen: Set[str] = set()
        found: Set[str] = set()
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                sources = {edge.lstrip("^").partition(":")[0] for edge in edit.change(name).input}
                stack.extend(sources & left_out)
                found |= sources - left_out - variables
        return sorted(found)

    def _names(self, ops: Iterable[int]) -> List[str]:
        return [self._context.graph.ops[op].name for op in ops]


def _gate(graph: OpGraph) -> Optional[_Gate]:
    for op in graph.ops:
        if GATE_ATTR in op.attrs:
            (taken, _), (skipped, _) = (graph.consumers(op.outputs[index])[0] for index in (1, 0))
            return _Gate(taken, skipped)
    return None
