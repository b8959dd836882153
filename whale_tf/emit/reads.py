"""Values of variables that every call reads again at their homes.

The call reads an Identity at the home, which no other call reads, so that TensorFlow sends the value for this call and frees it
after the call's last reader.  The Identity waits for an op of the call (:func:`whale_tf.passes.homes.reads_anew`) or, if the call
is one op, for the ops that the schedule puts before it.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf.emit.context import Clone, Context
from whale_tf.emit.order import Order, Wait
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.passes.homes import is_value_at_home
from whale_tf.program import BACKWARD, FORWARD, Body


class Reads:
    """See the module's docstring."""

    def __init__(self, context: Context, nodes: Nodes, order: Order) -> None:
        self._context, self._nodes, self._order = context, nodes, order
        self._body_of = {op: body for body in context.program.bodies if body.reads for op in body.ops}
        self._after = {(body.name, tensor): op for body in context.program.bodies for tensor, op in body.reads}
        self._staged: Dict[Tuple[str, int, Clone], str] = {}
        self._ends: Dict[Tuple[int, Clone], Wait] = {}

    def of_op(self, op: int, tensor: int, name: str, clone: Clone) -> str:
        """What an op of a clone reads instead of a value ``name``."""
        body = self._body_of.get(op)
        return name if body is None else self.of_call(body, tensor, name, clone)

    def of_call(self, body: Body, tensor: int, name: str, clone: Clone) -> str:
        """What a call reads instead of a value ``name``."""
        context = self._context
        if not body.reads or not is_value_at_home(context.graph, context.homes, tensor):
            return name
        key = body.name, tensor, clone
        if key not in self._staged:
            scope = f"{context.scope(clone)}/{body.name}/reads/{context.flat(tensor)}"
            device = context.device_of(context.graph.producer(tensor))
            waits = self._waits(body, tensor, clone)
            self._staged[key] = self._nodes.identity(name, scope, context.dtype(tensor), device, waits)
        return self._staged[key]

    def _waits(self, body: Body, tensor: int, clone: Clone) -> List[str]:
        context = self._context
        if not context.is_called:
            before, readers = self._after.get((body.name, tensor), -1), self._readers(body, tensor)
            if before >= 0:
                return self._order.after([self._ended(before, clone)], readers)
            return self._order.before(body, clone, readers)
        forward = context.program.body(body.task_graph, FORWARD) if body.step == BACKWARD else None
        return self._order.before(body, clone) + ([f"{context.scope(clone)}/{forward.name}"] if forward is not None else [])

    def _readers(self, body: Body, tensor: int) -> List[int]:
        return [op for op, _ in self._context.graph.consumers(tensor) if op in body.ops]

    def _ended(self, op: int, clone: Clone) -> Wait:
        """An op that waits for an op of a clone."""
        if (op, clone) not in self._ends:
            self._ends[op, clone] = self._order.end(self._context.graph.ops[op], clone, f"{self._context.scope(clone)}/reads")
        return self._ends[op, clone]
