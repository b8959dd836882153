"""Messages between processes after an update that one of them runs for all (see :mod:`whale_tf.passes.owners`).

::

    owner       ApplyAdam(v, m) ──> value ──┐
                ApplyAdam(w, n) ──> value ──┴─> CollectiveBcastSend ──> what waited for ApplyAdam
    others      CollectiveBcastRecv ─┬─> Assign(v) ──> what waited for ApplyAdam
                                     └─> Assign(w)
                   what ApplyAdam would have waited for ─┘

The received value replaces a variable only after everything that the update would have waited for.  So an op that reads the
variable before its update in the local script does so here, too.

Under v3, values are sent before the forward pass (:mod:`whale_tf.emit.gathered`), and the messages here say only that an update
is done::

    owner       ApplyAdam(v, m) ──> CollectiveBcastSend(0) ──> what waited for ApplyAdam
    others      CollectiveBcastRecv ──> end ──> what waited for ApplyAdam
                   what ApplyAdam would have waited for ─┘
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators import Member, ProcessCommunicator
from whale_tf.emit.context import Context
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.variables import assign, read
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.traits import READS, VARIABLES, traits
from whale_tf.ir.units import GATE_ATTR
from whale_tf.passes.homes import variables_at_home
from whale_tf.passes.owners import DONE, LATE, NEW, Message, Owners, waited_for

UPDATES_ATTR = "_whale_updates"  # of an op that stands for an optimizer's update


class Kept(NamedTuple):
    """A variable that one process keeps: an optimizer's or, under v3, a trained one.

    Attributes:
        name: of its op.
        device: its device in this process; if another one keeps it, it takes no memory there while training.
        home: its device in the process that owns it.
        is_own: whether this process owns it.
    """

    name: str
    device: str
    home: str
    is_own: bool


class Sent(NamedTuple):
    """What a Session has to know.

    Attributes:
        ends: updates that one process runs for all -> the op after which the update is over in this process: the others have the
            new value, or this one has received it.
        follow: collectives after a write; all other collectives come before one.
        stand_ins: ops that stand for an update here and write nothing.
        kept: variables that other processes keep.
        replaced: fetched ops and tensors of updates -> what is fetched instead.
    """

    ends: Mapping[str, str] = {}
    follow: Tuple[str, ...] = ()
    stand_ins: Tuple[str, ...] = ()
    kept: Tuple[Kept, ...] = ()
    replaced: Mapping[str, Any] = {}


def send_updates(context: Context, nodes: Nodes, sums: ProcessCommunicator, owners: Owners) -> Sent:
    """Stages the messages, and moves ops that wait for an update or read its results.  Call this when all other edges have
    moved."""
    messages = _Messages(context, nodes, sums, owners)
    for message in owners.messages:
        if message.tensors:
            messages.send_tensors(message)
    first = len(sums.collectives)
    for message in owners.messages:
        if message.kind in (DONE, LATE):
            messages.send_end(message)
        elif message.kind == NEW and message.variables:
            messages.send(message)
    for op in context.graph.ops:
        messages.wait(op)
    replaced: Dict[str, Any] = {}
    for variable in messages.writes:
        replaced.update(messages.fetched(variable))
    ends = {context.graph.ops[write].name: messages.ends[variable][0]
            for variable, writes in messages.writes.items() for write in writes.value}
    kept = tuple(one for one in kept_variables(context) if not one.is_own)
    return Sent(ends, tuple(sums.collectives[first:]), tuple(messages.stand_ins), kept, replaced)


class _Messages:
    """Attributes:
    writes: of each variable that is updated.
    ends: trained variable -> the ops after which its update is over here: its value has been sent or has arrived, and, if some of
        its state is written after that, so has the message about this.
    stand_ins: see :class:`Sent`.
    """

    def __init__(self, context: Context, nodes: Nodes, sums: ProcessCommunicator, owners: Owners) -> None:
        self._context, self._nodes, self._sums, self._owners = context, nodes, sums, owners
        graph = context.graph
        self.writes = owners.writes(graph)
        self.ends: Dict[int, List[str]] = {}
        self.stand_ins: List[str] = []
        self._variable_of = {write: variable for variable, found in self.writes.items() for write in sum(found, ())}
        self._before = {variable: waited_for(graph, found.value) for variable, found in self.writes.items()}
        self._inside = waited_for(graph, self._variable_of).union(self._variable_of)
        self._gate = _gate(graph)

    def send_tensors(self, message: Message) -> None:
        """Makes readers of tensors that only the owner can compute read what the owner sent."""
        context, nodes, graph = self._context, self._nodes, self._context.graph
        shapes = [context.static_shape(tensor) for tensor in message.tensors]
        scopes = [context.name("sent", context.flat(tensor)) for tensor in message.tensors]
        members = [Member(graph.tensor_name(tensor), context.device_of(graph.ops[self._owners.sent[tensor]]))
                   for tensor in message.tensors]
        dtype = context.dtype(message.tensors[0])
        waits = () if self._is_own(message) else self._waits({graph.tensors[tensor].op for tensor in message.tensors})
        sent = self._sums.broadcast_together(members, shapes, scopes, dtype, self._root(message), waits)
        for tensor, scope, member, value in zip(message.tensors, scopes, members, sent):
            if self._is_own(message):
                value = nodes.identity(member.value, scope + "/own", dtype, member.device, [value])
            for user, position in graph.consumers(tensor):
                if self._owners.update.get(user) != self._owners.sent[tensor]:
                    context.edit.move_input(graph.ops[user].name, position, value)

    def send(self, message: Message) -> None:
        """Stages the transfer of variables' new values to the other processes."""
        context, nodes = self._context, self._nodes
        ops = [context.graph.ops[variable] for variable in message.variables]
        scopes, devices = [context.name("sent", op.name) for op in ops], [context.device_of(op) for op in ops]
        dtype = tf.as_dtype(ops[0].attrs["dtype"]).base_dtype
        members = [Member(op.name, device) for op, device in zip(ops, devices)]
        if self._is_own(message):
            members = [Member(self._value(op, scope, device), device) for op, scope, device in zip(ops, scopes, devices)]
        shapes = [list(op.attrs["shape"]) for op in ops]
        values = self._sums.broadcast_together(members, shapes, scopes, dtype, self._root(message))
        for op, scope, device, value in zip(ops, scopes, devices, values):
            if not self._is_own(message):
                value = assign(nodes, op.type == "VarHandleOp", op.name, value, scope + "/assign", dtype, device,
                               self._waits(sum(self.writes[op.id], ())), **self._counts(op.id))
            self.ends[op.id] = [value]

    def _value(self, op: Op, scope: str, device: str) -> str:
        """A variable's value after its update."""
        dtype, writes = tf.as_dtype(op.attrs["dtype"]).base_dtype, self.writes[op.id]
        waits = self._done(writes.value + writes.state, scope, device)
        return read(self._nodes, op.type == "VarHandleOp", op.name, scope + "/value", dtype, device, waits)

    def _done(self, writes: Sequence[int], scope: str, device: str) -> List[str]:
        """Ops that run when writes are done, or are skipped with the whole step."""
        gate = self._gate
        if gate is None or not any(gate.taken in self._context.graph.ops[write].control_inputs for write in writes):
            return self._names(writes)
        taken, skipped = self._names([gate.taken, gate.skipped])
        done = self._nodes.identity(taken, scope + "/done", tf.bool, device, self._names(writes))
        return [self._nodes.add("Merge", scope + "/done_or_skipped", [done, skipped], device, T=tf.bool, N=2)]

    def send_end(self, message: Message) -> None:
        """Stages a message which says that variables' updates, or the writes after these, are done."""
        context, nodes, is_own = self._context, self._nodes, self._is_own(message)
        op = context.graph.ops[message.variables[0]]
        scope, device = context.name("sent", op.name, message.kind), context.device_of(op)
        found = [self.writes[variable] for variable in message.variables]
        writes = [write for one in found for write in (one.late if message.kind == LATE else one.value + one.state)]
        done = nodes.identity(nodes.const(0, scope + "/nothing", tf.int32, device), scope, tf.int32, device,
                              self._done(writes, scope, device) if is_own else ())
        value = self._sums.broadcast(Member(done, device), [], scope + "/message", tf.int32, self._root(message))
        for variable in message.variables:
            end = value if is_own or message.kind == LATE else self._stand_in(variable, value)
            self.ends.setdefault(variable, []).append(end)

    def _stand_in(self, variable: int, arrived: str) -> str:
        """An op that stands for an update that only the owner runs: it waits until the update is done, and for everything that
        the update waits for here."""
        context = self._context
        op = context.graph.ops[variable]
        name = self._nodes.add(
            "Identity", context.name("sent", op.name, "end"), [arrived], context.device_of(op),
            self._waits(sum(self.writes[variable], ())), T=tf.int32, **self._counts(variable))
        self.stand_ins.append(name)
        return name

    def _counts(self, variable: int) -> Dict[str, Any]:
        """Attributes of an op that stands for an update: whether it counts as an optimizer's step."""
        graph = self._context.graph
        return {UPDATES_ATTR: True} if any(traits(graph.ops[op].type).is_update for op in self.writes[variable].value) else {}

    def _root(self, message: Message) -> int:
        return self._context.plan.process_of(message.home)

    def _is_own(self, message: Message) -> bool:
        return self._root(message) == self._owners.rank

    def _names(self, ops: Iterable[int]) -> List[str]:
        return [self._context.graph.ops[op].name for op in ops]

    def _waits(self, ops: Iterable[int]) -> List[str]:
        """What ops would have waited for if this process ran them."""
        graph, edit = self._context.graph, self._context.edit
        left_out = set(self._names(self._owners.left_out))
        away = {variable for variable, owner in self._owners.state.items() if not self._owners.is_own(owner)}
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

    def wait(self, op: Op) -> None:
        """Makes an op that waits for an update, or reads its result, wait for the op that ends the update here; ops before
        another update do not wait for state."""
        graph, owners, edit = self._context.graph, self._owners, self._context.edit
        if op.id in owners.left_out:
            return
        gone = [graph.ops[before].name for before in op.control_inputs if before in owners.left_out]
        waits: Set[str] = set()
        for write in set(graph.predecessors(op)).intersection(self._variable_of):
            variable = self._variable_of[write]
            if owners.update.get(op.id) == variable:
                continue
            if write in self.writes[variable].value and op.id not in self._before[variable]:
                waits.add(self.ends[variable][0])
            if op.id not in self._inside:
                waits.update(self.ends[variable])
        if gone or waits:
            edit.move_waits(op.name, gone, sorted(waits))
        for position, tensor in enumerate(op.inputs):
            write = graph.tensors[tensor].op
            if write in owners.left_out and write in self._variable_of and graph.tensors[tensor].dtype.endswith("_ref"):
                edit.move_input(op.name, position, self.ends[self._variable_of[write]][0])

    def fetched(self, variable: int) -> Dict[str, Any]:
        """What is fetched instead of a variable's update."""
        context, graph, ends = self._context, self._context.graph, self.ends[variable]
        found: Dict[str, Any] = {}
        for write in sum(self.writes[variable], ()):
            op = graph.ops[write]
            found[op.name] = tuple(ends)
            for tensor in op.outputs:
                if self._owners.is_own(variable):
                    found[graph.tensor_name(tensor)] = self._nodes.identity(
                        graph.tensor_name(tensor), context.name("sent", context.flat(tensor), "own"), context.dtype(tensor),
                        context.device_of(op), ends) + ":0"
                elif write in self.writes[variable].value and variable not in self._owners.state:
                    found[graph.tensor_name(tensor)] = ends[0] + ":0"
        return found


class _Gate(NamedTuple):
    """Ops of a loss scale: one is dead in steps that are skipped, and one in all other steps."""

    taken: int
    skipped: int


def _gate(graph: OpGraph) -> Optional[_Gate]:
    for op in graph.ops:
        if GATE_ATTR in op.attrs:
            (taken, _), (skipped, _) = (graph.consumers(op.outputs[index])[0] for index in (1, 0))
            return _Gate(taken, skipped)
    return None


def kept_variables(context: Context) -> List[Kept]:
    """In an order that is the same in all processes."""
    graph, owners, homes = context.graph, context.owners, variables_at_home(context.graph, context.plan)
    return [Kept(graph.ops[variable].name, context.device_of(graph.ops[variable]), context.devices[homes[owner].device],
                 owners.is_own(owner)) for variable, owner in sorted(owners.state.items())]
