"""Values, at the start of a step, of variables that only one process has (ZeRO v3; see :mod:`whale_tf.passes.owners`).

Ops that depend only on variables (reads, casts, weight decay) exist twice: as the script wrote them, on the variables
themselves, for runs by themselves such as an evaluation; and as a copy on values that were sent, which training reads::

    owner       v ──> value ──> Switch ──> CollectiveBcastSend ──> Merge ·····> value ──> cast ──> clones
    others            Switch ··> CollectiveBcastRecv ──> Merge ──> cast ──> clones
                         └─────> v ──> value ─────────────┘

``together`` controls the Switches: a run in which no other process takes part reads this process's variables, which get their
owners' values before the run (:mod:`whale_tf.processes.state`).  All processes call a tf.function, or none does, so it needs no
Switch, and everything in it reads the copy.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators import Member, ProcessCommunicator
from whale_tf.emit.calls import control_for
from whale_tf.emit.context import ORIGINAL, Context, Gathered
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.variables import read
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import groups
from whale_tf.passes.owners import VALUES, Message


def gather_values(context: Context, nodes: Nodes, sums: ProcessCommunicator, after: Set[int]) -> Gathered:
    """Stages the messages, and the copy of the ops that depend only on variables.

    Args:
        after: ops outside the region that follow from it; the copy does not wait for them.
    """
    graph, owners = context.graph, context.owners
    values: Dict[int, str] = {}
    alone: Dict[str, Tuple[str, ...]] = {}
    for message in owners.messages:
        if message.kind == VALUES and message.variables:
            values.update(_Values(context, nodes, sums, message, alone).stage())
    tensors = {graph.ops[variable].outputs[0]: value for variable, value in values.items()}
    reads = [graph.ops[index] for index in owners.gathered if graph.ops[index].type == "ReadVariableOp"]
    for op in reads:
        tensors[op.outputs[0]] = values[graph.tensors[op.inputs[0]].op]
    ops = {op.id: tensors[op.outputs[0]].partition(":")[0] for op in reads}
    copied = [graph.ops[index] for index in owners.gathered if index not in ops]
    members, scope = {op.id for op in copied}, context.name("gathered")
    grouped = groups(context.region.graph)  # these may also wait for what the script reads of the variables themselves
    for op in (graph.ops[index] for index in context.region.ops if index not in context.region.batch_level):
        context.edit.move_waits(op.name, [graph.ops[wait].name for wait in op.control_inputs if wait in grouped], ())
    waits = {wait: control_for(context, wait, context.task_graph_of(op), ORIGINAL, after)
             for op in copied for wait in op.control_inputs if wait not in members and wait not in grouped}
    names = context.edit.clone(
        [context.tf_ops[op.id] for op in copied], scope, input_map={graph.tensor_name(t): value for t, value in tensors.items()},
        control_map={**{graph.ops[wait].name: ops.get(wait, name) for wait, name in waits.items()},
                     **{graph.ops[wait].name: None for wait in grouped}},
        device=lambda tf_op: context.device_of(graph.op(tf_op.name)))
    for op in copied:
        ops[op.id] = names[op.name]
        tensors.update((tensor, f"{names[op.name]}:{graph.tensors[tensor].index}") for tensor in op.outputs)
    return Gathered(tensors, ops, alone)


def read_gathered(context: Context) -> None:
    """Makes the update read the copy; in a tf.function all ops outside of the region.  Call this when all other edges have
    moved."""
    gathered, graph = context.gathered, context.graph
    phases = (Phase.APPLY, Phase.OTHER) if context.tf_graph.building_function else (Phase.APPLY,)
    for op in graph.ops:
        if op.phase not in phases:
            continue
        for position, tensor in enumerate(op.inputs):
            if tensor in gathered.tensors and graph.tensors[tensor].op in gathered.ops:
                context.edit.move_input(op.name, position, gathered.tensors[tensor])
        waits = [wait for wait in op.control_inputs if wait in gathered.ops]
        if waits:
            context.edit.move_waits(op.name, [graph.ops[wait].name for wait in waits], [gathered.ops[wait] for wait in waits])


class _Values:
    """Stages one message; ``alone``: see :class:`Gathered`."""

    def __init__(self, context: Context, nodes: Nodes, sums: ProcessCommunicator, message: Message,
                 alone: Dict[str, Tuple[str, ...]]) -> None:
        self._context, self._nodes, self._sums, self._message, self._alone = context, nodes, sums, message, alone
        self._ops = [context.graph.ops[variable] for variable in message.variables]
        self._scopes = [context.name("values", op.name) for op in self._ops]
        self._devices = [context.device_of(op) for op in self._ops]
        self._dtype = tf.as_dtype(self._ops[0].attrs["dtype"]).base_dtype

    def stage(self) -> Dict[int, str]:
        """Variable -> the tensor that training reads."""
        context, nodes, scope, host = self._context, self._nodes, self._scopes[0], self._context.host
        root = context.plan.process_of(self._message.home)
        is_own = root == context.owners.rank
        if self._sums.is_always_together:
            return {op.id: value + ":0" for op, value in zip(self._ops, self._in_all(root, is_own))}
        true = nodes.const(True, scope + "/default", tf.bool, host)
        together = nodes.add("PlaceholderWithDefault", scope + "/together", [true], host, dtype=tf.bool, shape=tf.TensorShape([]))
        first = len(self._sums.collectives)
        values = self._own(together, root) if is_own else self._received(together, root)
        self._sums.together.update(dict.fromkeys(self._sums.collectives[first:], together))
        self._alone[together] = () if is_own else tuple(op.name for op in self._ops)
        return {op.id: value + ":0" for op, value in zip(self._ops, values)}

    def _shapes(self) -> List[List[int]]:
        return [list(op.attrs["shape"]) for op in self._ops]

    def _in_all(self, root: int, is_own: bool) -> List[str]:
        """What each process reads in a step that all of them run together."""
        reads = [self._read(op, op.name, place, ()) if is_own else "" for place, op in enumerate(self._ops)]
        members = [Member(read, device) for read, device in zip(reads, self._devices)]
        sent = self._sums.broadcast_together(members, self._shapes(), self._scopes, self._dtype, root)
        if not is_own:
            return sent
        return [self._nodes.identity(read, where + "/value", self._dtype, device, sorted(set(sent)))
                for read, where, device in zip(reads, self._scopes, self._devices)]

    def _own(self, together: str, root: int) -> List[str]:
        """What the variables' owner reads: the values, after sending them."""
        nodes, scope = self._nodes, self._scopes[0]
        reads = [self._read(op, op.name, place, ()) for place, op in enumerate(self._ops)]
        taken = [nodes.add("Switch", where + "/taken", [read, together], device, T=self._dtype)
                 for read, where, device in zip(reads, self._scopes, self._devices)]
        members = [Member(name + ":1", device) for name, device in zip(taken, self._devices)]
        sent = self._sums.broadcast_together(members, self._shapes(), self._scopes, self._dtype, root)
        device = self._devices[0]
        branch = nodes.add("Switch", scope + "/done", [together, together], device, T=tf.bool)
        done = nodes.identity(branch + ":1", scope + "/sent", tf.bool, device, sorted(set(sent)))
        ended = nodes.add("Merge", scope + "/ended", [branch + ":0", done], device, T=tf.bool, N=2)
        return [nodes.identity(read, where + "/value", self._dtype, place, [ended])
                for read, where, place in zip(reads, self._scopes, self._devices)]

    def _received(self, together: str, root: int) -> List[str]:
        """What the other processes read: the received values or, in a run by itself, the variables."""
        nodes, scope, device = self._nodes, self._scopes[0], self._devices[0]
        branch = nodes.add("Switch", scope + "/branch", [together, together], device, T=tf.bool)
        waits = nodes.identity(branch + ":1", scope + "/is_together", tf.bool, device)
        members = [Member("", where) for where in self._devices]
        arrived = self._sums.broadcast_together(members, self._shapes(), self._scopes, self._dtype, root, [waits])
        found = []
        for place, (op, value) in enumerate(zip(self._ops, arrived)):
            alone = nodes.identity(branch + ":0", f"{self._scopes[place]}/is_alone", tf.bool, self._devices[place])
            read = self._read(op, self._same(op, place), place, [alone])
            found.append(nodes.add("Merge", self._scopes[place] + "/merged", [read, value], self._devices[place],
                                   T=self._dtype, N=2))
        return found

    def _same(self, op: Op, place: int) -> str:
        """The same variable under another name, so that a run that trains does not reach the variable's own op."""
        def shared(node: Any, original: Any) -> None:
            node.attr["shared_name"].s = node.attr["shared_name"].s or op.name.encode()
        names = self._context.edit.clone([self._context.tf_ops[op.id]], self._context.name("same"), device=self._devices[place],
                                         edit=shared)
        return names[op.name]

    def _read(self, op: Op, name: str, place: int, waits: Sequence[str]) -> str:
        is_resource, scope = op.type == "VarHandleOp", self._scopes[place] + "/read"
        return read(self._nodes, is_resource, name, scope, self._dtype, self._devices[place], waits)
