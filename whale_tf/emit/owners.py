"""What processes send each other after an update that one of them runs for all (see :mod:`whale_tf.passes.owners`).

::

    owner       ApplyAdam(v, m) ──> value ──> CollectiveBcastSend ──> what waited for ApplyAdam
    others      CollectiveBcastRecv ──> Assign(v) ──> what waited for ApplyAdam
                   what ApplyAdam would have waited for ─┘

The value that is received replaces a variable only when all that the update would have waited for is done, so that whoever reads
the variable before its update in the local script does so here.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators import Member, ProcessCommunicator
from whale_tf.emit.context import Context
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op
from whale_tf.ir.traits import VARIABLES
from whale_tf.passes.owners import Owners, ancestors


class Kept(NamedTuple):
    """A variable of an optimizer's state that another process keeps.

    Attributes:
        name: of its op.
        device: where it is in this process, and takes no memory while training.
        home: the device of its owner.
    """

    name: str
    device: str
    home: str


class Sent(NamedTuple):
    """What a Session has to know.

    Attributes:
        ends: updates that one process runs for all -> what ends one in this process: the others have the new value, or this one
            has got it.
        follow: collectives that follow from a write, where all others lead to one.
        kept: what other processes keep.
        replaced: fetched ops and tensors of updates -> what is fetched in their place.
    """

    ends: Mapping[str, str] = {}
    follow: Tuple[str, ...] = ()
    kept: Tuple[Kept, ...] = ()
    replaced: Mapping[str, Any] = {}


def send_updates(context: Context, nodes: Nodes, sums: ProcessCommunicator, owners: Owners) -> Sent:
    """Stage the messages, and move what waits for an update, or reads of one.  To be called when all other edges have moved."""
    messages = _Messages(context, nodes, sums, owners)
    for tensor, variable in sorted(owners.sent.items()):
        _send_tensor(context, nodes, sums, owners, tensor, variable)
    first = len(sums.collectives)
    for variable in messages.writes:
        messages.send(variable)
    for op in context.graph.ops:
        messages.wait(op)
    replaced: Dict[str, Any] = {}
    for variable in messages.writes:
        replaced.update(messages.fetched(variable))
    ends = {context.graph.ops[write].name: messages.ends[variable][0]
            for variable, writes in messages.writes.items() for write in writes.value}
    kept = tuple(_kept(context, owners, variable) for variable, owner in sorted(owners.state.items()) if not owners.is_own(owner))
    return Sent(ends, tuple(sums.collectives[first:]), kept, replaced)


class _Messages:
    """Attributes:
    writes: of each variable that is updated.
    ends: trained variable -> what ends its update here: its value has been sent, or has arrived; and, where some of its state is
        written after that, the message that it is.
    """

    def __init__(self, context: Context, nodes: Nodes, sums: ProcessCommunicator, owners: Owners) -> None:
        self._context, self._nodes, self._sums, self._owners = context, nodes, sums, owners
        graph = context.graph
        self.writes = owners.writes(graph)
        self.ends: Dict[int, List[str]] = {}
        self._variable_of = {write: variable for variable, found in self.writes.items() for write in sum(found, ())}
        self._before = {variable: ancestors(graph, found.value) for variable, found in self.writes.items()}
        self._inside = ancestors(graph, self._variable_of)

    def send(self, variable: int) -> None:
        """Stage a variable's way to the other processes."""
        context, nodes, owners, writes = self._context, self._nodes, self._owners, self.writes[variable]
        op, root = context.graph.ops[variable], owners.process[variable]
        scope, device = context.name("sent", op.name), context.device_of(op)
        dtype, shape = tf.as_dtype(op.attrs["dtype"]).base_dtype, list(op.attrs["shape"])
        is_resource, is_own, value = op.type == "VarHandleOp", owners.is_own(variable), op.name
        if is_own:
            kind, attrs = ("ReadVariableOp", {"dtype": dtype}) if is_resource else ("Identity", {"T": dtype})
            value = nodes.add(kind, scope + "/value", [op.name], device, self._names(writes.value + writes.state), **attrs)
        value = self._sums.broadcast(Member(value, device), shape, scope, dtype, root)
        if not is_own:
            kind, attrs = ("AssignVariableOp", {"dtype": dtype}) if is_resource else ("Assign", {"T": dtype})
            value = nodes.add(kind, scope + "/assign", [op.name, value], device, self._waits(variable), **attrs)
        self.ends[variable] = [value]
        if writes.late:
            done = nodes.add("Identity", scope + "/late", [nodes.const(0, scope + "/nothing", tf.int32, device)], device,
                             self._names(writes.late) if is_own else (), T=tf.int32)
            self.ends[variable].append(self._sums.broadcast(Member(done, device), [], scope + "/done", tf.int32, root))

    def _names(self, ops: Iterable[int]) -> List[str]:
        return [self._context.graph.ops[op].name for op in ops]

    def _waits(self, variable: int) -> List[str]:
        """What a variable's update would have waited for in this process, which does not run it."""
        graph, edit = self._context.graph, self._context.edit
        left_out = set(self._names(self._owners.left_out))
        variables = {op.name for op in graph.ops if op.type in VARIABLES}
        stack = self._names(sum(self.writes[variable], ()))
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
        """Let an op that waits for an update, or reads its result, wait for what ends it here; what leads to another update does
        not wait for state."""
        graph, owners, edit = self._context.graph, self._owners, self._context.edit
        if op.id in owners.left_out:
            return
        gone, waits = [], set()  # type: List[str], Set[str]
        for write in set(graph.predecessors(op)).intersection(self._variable_of):
            variable = self._variable_of[write]
            if owners.update.get(op.id) == variable:
                continue
            if write in owners.left_out:
                gone.append(graph.ops[write].name)
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
        """What is fetched in the place of a variable's update."""
        context, graph, ends = self._context, self._context.graph, self.ends[variable]
        found: Dict[str, Any] = {}
        for write in sum(self.writes[variable], ()):
            op = graph.ops[write]
            found[op.name] = tuple(ends)
            for tensor in op.outputs:
                if self._owners.is_own(variable):
                    found[graph.tensor_name(tensor)] = self._nodes.identity(
                        graph.tensor_name(tensor), context.name("sent", context.flat(tensor), "own"), context.dtype(tensor),
                        context.device_of(op), ends) + ":0"  # fmt: skip
                elif write in self.writes[variable].value:
                    found[graph.tensor_name(tensor)] = ends[0] + ":0"
        return found


def _send_tensor(
    context: Context, nodes: Nodes, sums: ProcessCommunicator, owners: Owners, tensor: int, variable: int
) -> None:
    """Let whoever reads a tensor that only the owner can compute read what the owner sent."""
    graph = context.graph
    record, device = graph.tensors[tensor], context.device_of(graph.ops[variable])
    scope, dtype = context.name("sent", context.flat(tensor)), context.dtype(tensor)
    member, root = Member(graph.tensor_name(tensor), device), owners.process[variable]
    value = sums.broadcast(member, list(record.shape or ()), scope, dtype, root)  # type: ignore[arg-type]
    if owners.is_own(variable):
        value = nodes.identity(graph.tensor_name(tensor), scope + "/own", dtype, device, [value])
    for user, position in graph.consumers(tensor):
        if owners.update.get(user) != variable:
            context.edit.move_input(graph.ops[user].name, position, value)


def _kept(context: Context, owners: Owners, variable: int) -> Kept:
    op, trained = context.graph.ops[variable], context.graph.ops[owners.state[variable]].name
    home = next(task.homes[trained] for task in context.plan.task_graphs if trained in task.homes)
    return Kept(op.name, context.device_of(op), context.devices[home])
