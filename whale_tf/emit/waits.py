"""What waits for ops of the update, some of which only one of several processes runs (:mod:`whale_tf.passes.owners`).

In that process it waits for the ops.  If a loss scale skips the step, these are dead, and a Merge lets what waits go on::

    ApplyAdam(v, m) ──> done ──┐
                               ├──> Merge ──> what waits
    skipped ───────────────────┘

In the others it waits for everything that the ops would have waited for.
"""

from __future__ import annotations

from typing import FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.context import Context
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.traits import READS, VARIABLES
from whale_tf.ir.units import GATE_ATTR


class _Facts(NamedTuple):
    """Attributes:
    left_out: ops that this process does not run.
    variables: variables, and reads of those of which other processes have the value.
    gates: of each loss scale, the numbers of two ops, of which the first is dead in steps that are skipped, and the second in all
        others.
    """

    left_out: FrozenSet[str]
    variables: FrozenSet[str]
    gates: Sequence[Tuple[int, int]]


class Waits:
    """See the module's docstring."""

    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context, self._nodes = context, nodes
        self._found: Optional[_Facts] = None

    def behind(self, ops: Sequence[int], scope: str, device: str) -> List[str]:
        """Names of the ops for which something waits that comes after ops of the update.  Call this when all other edges of the
        update have moved."""
        if not ops:
            return []
        left_out = self._context.owners.left_out
        return self._done([op for op in ops if op not in left_out], scope, device) + self._before(left_out.intersection(ops))

    def _done(self, ops: Sequence[int], scope: str, device: str) -> List[str]:
        """Ops that run when ops of this process are done, or are skipped with the whole step."""
        graph = self._context.graph
        gate = next((one for one in self._known().gates if any(one[0] in graph.ops[op].control_inputs for op in ops)), None)
        if gate is None:
            return self._names(ops)
        taken, skipped = (graph.ops[op].name for op in gate)
        done = self._nodes.identity(taken, scope + "/done", tf.bool, device, self._names(ops))
        return [self._nodes.add("Merge", scope + "/done_or_skipped", [done, skipped], device, T=tf.bool, N=2)]

    def _before(self, ops: Iterable[int]) -> List[str]:
        """What ops would have waited for if this process ran them."""
        left_out, variables, _ = self._known()
        stack = self._names(ops)
        seen: Set[str] = set()
        found: Set[str] = set()
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                sources = {edge.lstrip("^").partition(":")[0] for edge in self._context.edit.change(name).input}
                stack.extend(sources & left_out)
                found |= sources - left_out - variables
        return sorted(found)

    def _names(self, ops: Iterable[int]) -> List[str]:
        return [self._context.graph.ops[op].name for op in ops]

    def _known(self) -> _Facts:
        """What is the same for all waits, and is found once, because there are as many as variables."""
        if self._found is None:
            graph, owners = self._context.graph, self._context.owners
            away = {variable for variable, owner in owners.state.items() if not owners.is_own(owner)}
            variables = [op.name for op in graph.ops
                         if op.type in VARIABLES or (op.type in READS and graph.tensors[op.inputs[0]].op in away)]
            gates = [(graph.consumers(op.outputs[1])[0][0], graph.consumers(op.outputs[0])[0][0])
                     for op in graph.ops if GATE_ATTR in op.attrs]
            self._found = _Facts(frozenset(self._names(owners.left_out)), frozenset(variables), gates)
        return self._found
