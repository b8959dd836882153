"""The schedule's order as control edges.

A call that the program puts after another waits for a barrier, which waits for that other call::

    F0 ──> barrier ──> F1 ──> barrier ──> B0 ──> barrier ──> F2 ...        (backward first, two forwards ahead)

If bodies are functions, the op that calls one waits, and the barrier waits for it.  If bodies are clones of each op, a body's
first ops wait, and the barrier waits for its last ops.

TensorFlow's graph optimizer does not fuse ops with control edges: a Conv2D would run separately from its bias and activation (on
CPU 6% to 38% longer in total).  So an Identity before the first op waits instead, and the barrier waits for an Identity after the
last op.  The optimizer removes these after fusing, and gives their edges to the fused ops.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.emit.context import Context, Copy
from whale_tf.graph_editor.nodes import Nodes
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
            if call.after and context.program.step_of(call) != BROADCAST:  # which waits for the variables' writes
                self._stage([context.program.calls[before] for before in call.after], call)

    def barriers(self, task_graph: int, place: Union[Clone, Copy]) -> Optional[Mapping[str, List[str]]]:
        """Further control inputs for those of a clone's ops that :meth:`gate` does not delay, by original op name; for a called
        body by the body's name."""
        return self._barriers.get((task_graph, place)) if isinstance(place, Clone) else None

    def before(self, body: Body, clone: Clone) -> List[str]:
        """The barrier that a call waits for, if any."""
        return [self._before[body.name, clone]] if (body.name, clone) in self._before else []

    def gate(self, task_graph: int, place: Clone) -> None:
        """Makes the other first ops of a clone's steps wait by means of an Identity before an input; call it once the inputs are
        set."""
        context = self._context
        for (op, position), barriers in self._gated.get((task_graph, place), {}).items():
            name, dtype = context.op_in(op, place), context.dtype(op.inputs[position])
            device = context.device(task_graph, place, op.shard)
            scope = context.name("order", "into", context.scope(place).rpartition("/")[2], op.name)
            gate = self._nodes.identity(context.edit.change(name).input[position], scope, dtype, device, barriers)
            context.edit.move_input(name, position, gate)

    def _stage(self, before: Sequence[Call], after: Call) -> None:
        """Stages a barrier between calls of one replica."""
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
        """The ops for which a barrier waits if it waits for a call.

        It also waits for additions of gradients, so that these are freed, and so that TensorFlow's graph optimizer does not fuse
        the chain of additions into one AddN, which would keep all gradients alive.
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
        """What barriers wait for instead of a clone of ``op``."""
        position = self._first_floating(op.outputs)
        if position is None:
            return self._context.op_in(op, place)
        tensor, shard = op.outputs[position], op.shard
        device = self._context.device(self._context.home(op), place, shard)
        return self._nodes.identity(
            self._context.tensor_in(tensor, place), scope + "/after/" + op.name, self._context.dtype(tensor), device)

    def _first_floating(self, tensors: Sequence[int]) -> Optional[int]:
        """Position of the first tensor of floating point numbers that is not a reference to a variable: the optimizer fuses ops
        that compute such tensors."""
        for position, tensor in enumerate(tensors):
            dtype = tf.as_dtype(self._context.graph.tensors[tensor].dtype)
            if dtype.is_floating and dtype == dtype.base_dtype:
                return position
        return None


def _ends(context: Context, ops: List[Op], frames_of: Mapping[int, Tuple[str, ...]]) -> Tuple[List[Op], List[Op]]:
    """(entries, exits) of a step: ops without predecessors in the step, and ops outside of loops without successors in it."""
    members = {op.id for op in ops}
    entries: List[Op] = []
    followed: Set[int] = set()
    for op in ops:
        before = [p for p in context.graph.predecessors(op) if p in members]
        followed.update(before)
        if not before:
            entries.append(op)
    return entries, [op for op in ops if op.id not in followed and not frame_of_outputs(op, frames_of)]

