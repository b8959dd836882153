"""The schedule's order as control edges.

A call that the program puts after another waits for a barrier, which waits for that other call::

    F0 ──> barrier ──> F1 ──> barrier ──> B0 ──> barrier ──> F2 ...        (backward first, two forwards ahead)

If bodies are functions, the op that calls one waits, and the barrier waits for it.  If bodies are clones of each op, a body's
first ops wait, and the barrier waits for its last ops.

TensorFlow's graph optimizer does not fuse ops with control edges: a Conv2D would run separately from its bias and activation (on
CPU 6% to 38% longer in total).  So an Identity before the first op waits instead, and the barrier waits for an Identity after the
last op.  The optimizer removes these after fusing, and gives their edges to the fused ops.

Where an input is a part of the mini-batch, an EnsureShape of any size waits in front of it.  If the same elementwise op (or an
Identity, or what the optimizer takes for one, as a Reshape to the same shape) reads each part, the optimizer computes it before
the Split, with the control edges of all parts, and such a graph has a cycle, which stops all optimization::

    Split ──┬──> Square ──> F0 ──> barrier ──> ...          ┌──────────────────────────┐
            └──> Square (waits for the barrier)     =>      └──> Square ──> Split ──┬──> F0 ──> barrier

A run that makes only some of the updates must not wait for ops that only the others need (:mod:`whale_tf.ir.demand`).  Such ops
stand before a gate, a constant that a Session feeds in these runs, which cuts the edge::

    B0 of the discriminator ──> gate ──> Switch ──> Merge ──┬──> barrier ──> F1 of the generator
    B0 of the generator ────────────────────────────────────┘

An Identity would not do: the optimizer makes a control edge of it, which feeding does not cut.  Nor would the edge from B0 of the
generator remain if a longer path led through the gate: the optimizer takes it for superfluous, and then feeding cuts the path.
It looks for no path through a Merge.
"""

from __future__ import annotations

from typing import AbstractSet, Container, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.emit.context import Context, Copy
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.demand import Demand, find_demand
from whale_tf.ir.graph import Op
from whale_tf.ir.units import frame_of_outputs, frames, may_miss
from whale_tf.ir.walk import reached
from whale_tf.passes.lowering.primitive import sum_scope
from whale_tf.program import ACCUMULATE, BROADCAST, Body, Call, Clone

PASSED = "/passed"  # behind a gate's name: the op that runs once the gate is open or fed


class Wait(NamedTuple):
    """What a barrier waits for.

    Attributes:
        op: of the op graph; -1: every run needs it.
        name: of the op that the barrier waits for.
        runs: name of the op that has to run anyway.
    """

    op: int
    name: str
    runs: str


class Gates:
    """Says which gates a run closes.

    Args:
        waits: gate -> the ops for which it waits.
    """

    def __init__(self, waits: Mapping[str, Sequence[str]]) -> None:
        self._waits = waits
        self._known: Dict[Tuple[str, ...], Tuple[str, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._waits)

    def closed(self, ops: Iterable[tf.Operation]) -> Tuple[str, ...]:
        """Gates before which an op stands that a run of ``ops`` does not need; found only once, because a training loop asks in
        every step."""
        ops = list(ops)
        key = tuple(op.name for op in ops)
        if key not in self._known:
            needed = {op.name for op in reached(ops, self._before)}
            self._known[key] = tuple(gate for gate, waits in self._waits.items()
                                     if gate in needed and not needed.issuperset(waits))
        return self._known[key]

    def _before(self, op: tf.Operation) -> Iterable[tf.Operation]:
        return () if op.name in self._waits else (*(tensor.op for tensor in op.inputs), *op.control_inputs)


class Order:
    """Barriers of every clone: staged on construction, looked up by ``barriers``.

    Args:
        sources: batch input tensors, of which clones get parts.

    Attributes:
        gates: gate -> the ops for which it waits.
    """

    def __init__(self, context: Context, nodes: Nodes, sources: Container[int] = ()) -> None:
        self._context, self._nodes, self._sources = context, nodes, sources
        self._frames, self._missing = frames(context.graph), may_miss(context.graph)
        self._barriers: Dict[Tuple[int, Clone], Dict[str, List[str]]] = {}
        self._gated: Dict[Tuple[int, Clone], Dict[Tuple[Op, int], List[str]]] = {}
        self._ends: Dict[str, Tuple[List[Op], List[Op]]] = {}
        self._waits: Dict[Tuple[str, Clone], Tuple[str, List[Wait]]] = {}  # of each call: a name scope, and what it waits for
        self._made: Dict[Tuple[str, Tuple[str, ...]], str] = {}  # name scope, and waits -> the barrier
        self._of_gates: Dict[Tuple[str, ...], str] = {}
        self.gates: Dict[str, Tuple[str, ...]] = {}
        for call in context.program.calls:
            if call.after and context.program.step_of(call) != BROADCAST:  # which waits for the variables' writes
                self._stage([context.program.calls[before] for before in call.after], call)

    @property
    def _demand(self) -> Demand:
        return self._context.region.once(find_demand)  # many programs have no calls to order, which alone ask for it

    def barriers(self, task_graph: int, at: Union[Clone, Copy]) -> Optional[Mapping[str, List[str]]]:
        """Further control inputs for those of a clone's ops that :meth:`gate` does not delay, by original op name; for a called
        body by the body's name."""
        return self._barriers.get((task_graph, at)) if isinstance(at, Clone) else None

    def before(self, body: Body, clone: Clone, ops: Optional[Sequence[int]] = None) -> List[str]:
        """The barrier that a call waits for, if any, or that some of its ops wait for."""
        return [self._barrier(body, clone, ops)] if (body.name, clone) in self._waits else []

    def gate(self, task_graph: int, clone: Clone) -> None:
        """Makes the other first ops of a clone's steps wait by an op before an input; call it once the inputs are set."""
        context = self._context
        for (op, position), barriers in self._gated.get((task_graph, clone), {}).items():
            name, dtype = context.op_in(op, clone), context.dtype(op.inputs[position])
            device = context.device(task_graph, clone, op.shard)
            scope = context.name("order", "into", context.scope(clone).rpartition("/")[2], op.name)
            edge, shape = context.edit.change(name).input[position], context.graph.tensors[op.inputs[position]].shape
            if op.inputs[position] in self._sources and shape is not None:
                any_size = tf.TensorShape([None] * len(shape))
                gate = self._nodes.add("EnsureShape", scope, [edge], device, barriers, T=dtype, shape=any_size)
            else:
                gate = self._nodes.identity(edge, scope, dtype, device, barriers)
            context.edit.move_input(name, position, gate)

    def _stage(self, before: Sequence[Call], after: Call) -> None:
        """Stages a barrier between calls of one replica."""
        context = self._context
        then = context.program.bodies[after.body]
        task_graph, copy = then.task_graph, Copy(after.clone.g, after.clone.r)
        scope = context.name("order", "t{}_g{}_r{}".format(task_graph, *copy), f"before_{then.step}{after.clone.m}")
        waits = list(dict.fromkeys(wait for call in before for wait in self._ended(call, scope)))
        key = (task_graph, after.clone)
        self._waits[then.name, after.clone] = scope, waits
        if context.is_called:
            barrier = self._barrier(then, after.clone)
            self._barriers.setdefault(key, {}).setdefault(then.name, []).append(barrier)
            return
        for op in self._ends_of(then)[0]:
            barrier, position = self._barrier(then, after.clone, [op.id]), self._first_floating(op.inputs)
            if position is None or self._first_floating(op.outputs) is None:  # the optimizer fuses it with none, but may move it
                position = next((index for index, tensor in enumerate(op.inputs) if tensor in self._sources), None)
            if position is None or op.id in self._frames:
                self._barriers.setdefault(key, {}).setdefault(op.name, []).append(barrier)
            else:
                self._gated.setdefault(key, {}).setdefault((op, position), []).append(barrier)

    def _ended(self, call: Call, scope: str) -> List[Wait]:
        """What a barrier waits for if it waits for a call.  A run that needs none of its exits must still wait for what the call
        itself waits for."""
        body = self._context.program.bodies[call.body]
        exits = self._exits(body, call.clone, scope)
        if any(wait.op < 0 or self._demand.implies(self._demand.every, wait.op) for wait in exits):
            return exits
        return [*exits, *self._waits.get((body.name, call.clone), ("", []))[1]]

    def _barrier(self, body: Body, clone: Clone, ops: Optional[Sequence[int]] = None) -> str:
        """The barrier before a call, or before some of its ops."""
        scope, waits = self._waits[body.name, clone]
        names = self.after(waits, ops)
        key = scope, tuple(names)
        if key not in self._made:
            number = sum(1 for known, _ in self._made if known == scope)
            device = self._context.device(body.task_graph, Copy(clone.g, clone.r))
            self._made[key] = self._nodes.no_op(f"{scope}/{number}" if number else scope, device, names)
        return self._made[key]

    def after(self, waits: Sequence[Wait], ops: Optional[Sequence[int]]) -> List[str]:
        """What ``ops`` (None: every run needs them) wait for if they come after ``waits``: those that each run of the ops needs,
        and gates of the others."""
        groups, names = 0 if ops is None else self._demand.of(ops), []
        others: Dict[int, List[Wait]] = {}
        for wait in waits:
            if wait.op < 0 or self._demand.implies(groups, wait.op):
                names.append(wait.name)
            else:
                others.setdefault(self._demand.of([wait.op]), []).append(wait)
        return names + [self._gate(found) for found in others.values()]

    def _gate(self, waits: Sequence[Wait]) -> str:
        """An op that waits for all of ``waits``, unless the gate is fed."""
        context, names = self._context, tuple(wait.name for wait in waits)
        if names not in self._of_gates:
            scope = context.name("order", "gate", str(len(self.gates)))
            gate = context.edit.const(False, scope, dtype=tf.bool, device=context.host, control_inputs=names)
            self.gates[gate] = tuple(wait.runs for wait in waits)
            anything = self._nodes.const(True, scope + "/anything", tf.bool, context.host)  # nothing reads the Switch's results
            switch = self._nodes.add("Switch", scope + "/open", [anything, gate], context.host, T=tf.bool)
            self._of_gates[names] = self._nodes.add("Merge", scope + PASSED, [switch + ":0", switch + ":1"], context.host,
                                                    T=tf.bool, N=2)
        return self._of_gates[names]

    def _exits(self, body: Body, clone: Clone, scope: str) -> List[Wait]:
        """The ops for which a barrier waits if it waits for a call.

        It also waits for additions of gradients, so that these are freed, and so that TensorFlow's graph optimizer does not fuse
        the chain of additions into one AddN, which would keep all gradients alive.
        """
        context = self._context
        if body.step == ACCUMULATE:
            sums = {tensor: context.scoped(sum_scope(clone), tensor) for tensor in body.outputs}
            return [Wait(context.graph.tensors[tensor].op, name, name) for tensor, name in sums.items()]
        if context.is_called:
            name = f"{context.scope(clone)}/{body.name}"
            return [Wait(-1, name, name)]
        return [self.end(op, clone, scope) for op in self._ends_of(body)[1]]

    def _ends_of(self, body: Body) -> Tuple[List[Op], List[Op]]:
        if body.name not in self._ends:
            self._ends[body.name] = _ends(
                self._context, [self._context.graph.ops[i] for i in body.ops], self._frames, self._missing, self._demand)
        return self._ends[body.name]

    def end(self, op: Op, clone: Clone, scope: str) -> Wait:
        """What barriers wait for instead of a clone of ``op``."""
        position, name = self._first_floating(op.outputs), self._context.op_in(op, clone)
        if position is None:
            return Wait(op.id, name, name)
        tensor, shard = op.outputs[position], op.shard
        device = self._context.device(self._context.task_graph_of(op), clone, shard)
        end = self._nodes.identity(
            self._context.tensor_in(tensor, clone), scope + "/after/" + op.name, self._context.dtype(tensor), device)
        return Wait(op.id, end, name)

    def _first_floating(self, tensors: Sequence[int]) -> Optional[int]:
        """Position of the first tensor of floating point numbers that is not a reference to a variable: the optimizer fuses ops
        that compute such tensors."""
        for position, tensor in enumerate(tensors):
            dtype = tf.as_dtype(self._context.graph.tensors[tensor].dtype)
            if dtype.is_floating and dtype == dtype.base_dtype:
                return position
        return None


def _ends(context: Context, ops: List[Op], frames_of: Mapping[int, Tuple[str, ...]], missing: AbstractSet[int],
          demand: Demand) -> Tuple[List[Op], List[Op]]:
    """(entries, exits) of a step: ops without predecessors in the step, and ops outside of loops and branches without successors
    in it that run whenever they do.

    Args:
        missing: ops of branches, which may not be taken.
    """
    members = {op.id for op in ops}
    before = {op.id: [p for p in context.graph.predecessors(op) if p in members] for op in ops}
    followed: Set[int] = set()
    for op in reversed(ops):
        if op.id not in missing or op.id in followed:
            followed.update(p for p in before[op.id] if demand.follows(p, op.id))
    exits = [op for op in ops if op.id not in followed and op.id not in missing and not frame_of_outputs(op, frames_of)]
    return [op for op in ops if not before[op.id]], exits
