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

from typing import Any, Dict, List, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators import ProcessCommunicator
from whale_tf.emit.calls import control_for
from whale_tf.emit.context import ORIGINAL, Context, Gathered
from whale_tf.emit.recipes import Recipes
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.variables import read
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import groups
from whale_tf.passes.lowering import in_order, primitive
from whale_tf.program import GATHER


def gather_values(context: Context, nodes: Nodes, recipes: Recipes, sums: ProcessCommunicator, after: Set[int]) -> Gathered:
    """Stages the messages, and the copy of the ops that depend only on variables.

    Args:
        after: ops outside the region that follow from it; the copy does not wait for them.
    """
    graph, owners = context.graph, context.owners
    tensors: Dict[int, str] = {}
    alone: Dict[str, Tuple[str, ...]] = {}
    for number in recipes.lowering.messages.calls:
        if context.program.step_of(context.program.calls[number]) == GATHER:
            tensors.update(_Values(context, nodes, recipes, sums, number, alone).stage())
    reads = [graph.ops[index] for index in owners.gathered if graph.ops[index].type == "ReadVariableOp"]
    for op in reads:
        tensors[op.outputs[0]] = tensors[op.inputs[0]]
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

    def __init__(self, context: Context, nodes: Nodes, recipes: Recipes, sums: ProcessCommunicator, number: int,
                 alone: Dict[str, Tuple[str, ...]]) -> None:
        self._context, self._nodes, self._recipes, self._sums, self._alone = context, nodes, recipes, sums, alone
        self._sent, self._values = recipes.lowering.messages.sent(number), recipes.lowering.messages.values(number)
        self._ops = [context.graph.producer(tensor) for tensor in self._values]
        self._scopes = [context.name("values", op.name) for op in self._ops]
        self._devices = [context.device_of(op) for op in self._ops]
        self._dtype = tf.as_dtype(self._ops[0].attrs["dtype"]).base_dtype

    def stage(self) -> Dict[int, str]:
        """Handle or reference of a variable -> the tensor that training reads."""
        nodes, scope, host = self._nodes, self._scopes[0], self._context.host
        if self._sums.is_always_together:
            return {tensor: self._recipes.of(made) + ":0" for tensor, made in self._values.items()}
        true = nodes.const(True, scope + "/default", tf.bool, host)
        together = nodes.add("PlaceholderWithDefault", scope + "/together", [true], host, dtype=tf.bool, shape=tf.TensorShape([]))
        first, is_own = len(self._sums.collectives), bool(self._sent.operands)
        values = self._own(together) if is_own else self._received(together)
        self._sums.together.update(dict.fromkeys(self._sums.collectives[first:], together))
        self._alone[together] = () if is_own else tuple(op.name for op in self._ops)
        return {tensor: value + ":0" for tensor, value in zip(self._values, values)}

    def _own(self, together: str) -> List[str]:
        """What the variables' owner reads: the values, after sending them."""
        nodes, recipes, scope, device = self._nodes, self._recipes, self._scopes[0], self._devices[0]
        reads = [each for each in in_order([self._sent], {}) if each.kind == primitive.READ]
        taken = {each: nodes.add("Switch", where + "/taken", [recipes.of(each), together], on, T=self._dtype) + ":1"
                 for each, where, on in zip(reads, self._scopes, self._devices)}
        sent = recipes.of(self._sent, taken)
        branch = nodes.add("Switch", scope + "/done", [together, together], device, T=tf.bool)
        done = nodes.identity(branch + ":1", scope + "/sent", tf.bool, device, [sent])
        ended = nodes.add("Merge", scope + "/ended", [branch + ":0", done], device, T=tf.bool, N=2)
        return [recipes.of(made, {self._sent: ended}) for made in self._values.values()]

    def _received(self, together: str) -> List[str]:
        """What the other processes read: the received values or, in a run by itself, the variables."""
        nodes, recipes, scope, device = self._nodes, self._recipes, self._scopes[0], self._devices[0]
        branch = nodes.add("Switch", scope + "/branch", [together, together], device, T=tf.bool)
        recipes.of(self._sent, waits=[nodes.identity(branch + ":1", scope + "/is_together", tf.bool, device)])
        found = []
        for index, (op, made) in enumerate(zip(self._ops, self._values.values())):
            alone = nodes.identity(branch + ":0", f"{self._scopes[index]}/is_alone", tf.bool, self._devices[index])
            value = read(nodes, op.type == "VarHandleOp", self._same(op, index), self._scopes[index] + "/alone", self._dtype,
                         self._devices[index], [alone])
            found.append(nodes.add("Merge", self._scopes[index] + "/merged", [value, recipes.of(made)], self._devices[index],
                                   T=self._dtype, N=2))
        return found

    def _same(self, op: Op, index: int) -> str:
        """The same variable under another name, so that a run that trains does not reach the variable's own op."""
        def shared(node: Any, original: Any) -> None:
            node.attr["shared_name"].s = node.attr["shared_name"].s or op.name.encode()
        names = self._context.edit.clone([self._context.tf_ops[op.id]], self._context.name("same"), device=self._devices[index],
                                         edit=shared)
        return names[op.name]
