"""The schedule's order as control edges.

A call that the program puts after another waits for a barrier, which waits for that other call::

    F0 ──> barrier ──> F1 ──> barrier ──> B0 ──> barrier ──> F2 ...        (backward first, two forwards ahead)

Where bodies are functions, the op that calls one waits and is waited for.  Where they are clones of each op, the first ops of a
body wait, and its last ops are waited for.

An op that waits, or is waited for, TensorFlow's graph optimizer fuses with no other: a Conv2D would run apart from its bias and
its activation (on CPU 6% to 38% longer in all).  So an Identity in front of it waits in its place, and one behind it is waited
for.  The optimizer takes these away again once it has fused, and gives their edges to the fused ops.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.emit.context import Context, Copy
from whale_tf.graph_editor.nodes import Nodes, set_input
from whale_tf.ir.graph import Op
from whale_tf.ir.units import frame_of_outputs, frames
from whale_tf.program import ACCUMULATE, BROADCAST, Body, Call, Clone


class Order:
    """Barriers of every clone: staged on construction, looked up by ``barriers``."""

    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context = context
        self._nodes = nodes
        self._frames = frames(context.graph)
        self._barriers: Dict[Tuple[int, Clone], Dict[str, List[str]]] = {}
        self._gated: Dict[Tuple[int, Clone], Dict[Tuple[Op, int], List[str]]] = {}
        self._ends: Dict[str, Tuple[List[Op], List[Op]]] = {}
        self._before: Dict[Tuple[str, Clone], str] = {}
        for call in context.program.calls:
            if call.after and context.program.step_of(call) != BROADCAST:  # which waits for single ops, the variables' writes
                self._stage([context.program.calls[before] for before in call.after], call)

    def barriers(self, task_graph: int, place: Union[Clone, Copy]) -> Optional[Mapping[str, List[str]]]:
        """Control inputs to add to those of a clone's ops that :meth:`gate` does not hold back, by original op name; for a
        called body by the body's name."""
        return self._barriers.get((task_graph, place)) if isinstance(place, Clone) else None

    def before(self, body: Body, clone: Clone) -> List[str]:
        """The barrier that a call waits for, if it waits."""
        return [self._before[body.name, clone]] if (body.name, clone) in self._before else []

    def gate(self, task_graph: int, place: Clone) -> None:
        """Lets the other first ops of a clone's steps wait: through an Identity of their input, so once the inputs are set."""
        context = self._context
        for (op, position), barriers in self._gated.get((task_graph, place), {}).items():
            name = f"{context.scope(place)}/{op.name}"
            node, dtype = context.edit.node(name), context.dtype(op.inputs[position])
            scope = context.name("order", "into", context.scope(place).rpartition("/")[2], op.name)
            gate = self._nodes.identity(node.input[position], scope, dtype, node.device, barriers)
            set_input(context.edit, name, position, gate)

    def _stage(self, before: Sequence[Call], after: Call) -> None:
        """A barrier between calls of one replica."""
        context = self._context
        then = context.program.bodies[after.body]
        task_graph, copy = then.task_graph, Copy(after.clone.g, after.clone.r)
        scope = context.name("order", "t{}_g{}_r{}".format(task_graph, *copy), f"before_{then.step}{after.clone.m}")
        waits = [name for call in before for name in self._exits(context.program.bodies[call.body], call.clone, scope)]
        barrier = self._nodes.no_op(scope, context.device(task_graph, copy), waits)
        key = (task_graph, after.clone)
        self._before[then.name, after.clone] = barrier
        if context.is_called:
            self._barriers.setdefault(key, {}).setdefault(then.name, []).append(barrier)
            return
        for op in self._ends_of(then)[0]:
            position = self._first_floating(op.inputs)
            if position is None or self._first_floating(op.outputs) is None or op.id in self._frames:
                self._barriers.setdefault(key, {}).setdefault(op.name, []).append(barrier)
            else:
                self._gated.setdefault(key, {}).setdefault((op, position), []).append(barrier)

    def _exits(self, body: Body, clone: Clone, scope: str) -> List[str]:
        """What is waited for where a call is.

        Additions of gradients are waited for so that these are freed, and so that TensorFlow's graph optimizer does not fuse the
        chain of additions into one AddN, which would keep all gradients alive.
        """
        context = self._context
        if body.step == ACCUMULATE:
            return [context.sum_name(tensor, Copy(clone.g, clone.r), clone.m) for tensor in body.outputs]
        if context.is_called:
            return [f"{context.scope(clone)}/{body.name}"]
        return [self.end(op, clone, scope) for op in self._ends_of(body)[1]]

    def _ends_of(self, body: Body) -> Tuple[List[Op], List[Op]]:
        if body.name not in self._ends:
            self._ends[body.name] = _ends(self._context, [self._context.graph.ops[i] for i in body.ops], self._frames)
        return self._ends[body.name]

    def end(self, op: Op, place: Clone, scope: str) -> str:
        """What is waited for in place of a clone of ``op``."""
        position = self._first_floating(op.outputs)
        name = f"{self._context.scope(place)}/{op.name}"
        if position is None:
            return name
        tensor, shard = op.outputs[position], self._context.shard(op)
        device = self._context.device(self._context.home(op), place, shard)
        return self._nodes.identity(
            self._context.tensor_in(tensor, place), scope + "/after/" + op.name, self._context.dtype(tensor), device
        )

    def _first_floating(self, tensors: Sequence[int]) -> Optional[int]:
        """Position of the first one of floating point numbers that is no reference to a variable: what the optimizer fuses
        computes these."""
        for position, tensor in enumerate(tensors):
            dtype = tf.as_dtype(self._context.graph.tensors[tensor].dtype)
            if dtype.is_floating and dtype == dtype.base_dtype:
                return position
        return None


def _ends(context: Context, ops: List[Op], frames_of: Mapping[int, Tuple[str, ...]]) -> Tuple[List[Op], List[Op]]:
    """(entries, exits) of a step: ops that no op of the step comes before, and ops outside of loops that none follows."""
    members = {op.id for op in ops}
    entries: List[Op] = []
    followed: Set[int] = set()
    for op in ops:
        before = [p for p in context.graph.predecessors(op) if p in members]
        followed.update(before)
        if not before:
            entries.append(op)
    return entries, [op for op in ops if op.id not in followed and not frame_of_outputs(op, frames_of)]

