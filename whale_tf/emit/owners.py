"""Edges around the messages about an update that one of several processes runs for all.

Which messages there are and what they carry: :mod:`whale_tf.passes.lowering.messages`.

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

from typing import Any, Dict, List, Mapping, NamedTuple, Set, Tuple

from whale_tf.communicators import ProcessCommunicator
from whale_tf.emit.context import Context
from whale_tf.emit.recipes import Recipes
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op
from whale_tf.ir.traits import traits
from whale_tf.passes.homes import variables_at_home
from whale_tf.passes.lowering import Primitive, primitive
from whale_tf.passes.owners import waited_for
from whale_tf.program import BROADCAST

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
        kept: variables that one process keeps, this one or another.
        replaced: fetched ops and tensors of updates -> what is fetched instead.
    """

    ends: Mapping[str, str] = {}
    follow: Tuple[str, ...] = ()
    stand_ins: Tuple[str, ...] = ()
    kept: Tuple[Kept, ...] = ()
    replaced: Mapping[str, Any] = {}


def send_updates(context: Context, nodes: Nodes, recipes: Recipes, sums: ProcessCommunicator) -> Sent:
    """Stages the messages, and moves ops that wait for an update or read its results.  Call this when all other edges have
    moved."""
    program, lowered = context.program, recipes.lowering.messages
    messages, follow = _Messages(context, nodes, recipes), []  # type: _Messages, List[str]
    for number in lowered.calls:
        body, first = program.bodies[program.calls[number].body], len(sums.collectives)
        if body.step == BROADCAST and body.outputs:
            messages.take_tensors(lowered.values(number))
        elif body.step == BROADCAST:
            messages.end_updates(lowered.values(number))
            follow += sums.collectives[first:]
    for op in context.graph.ops:
        messages.wait(op)
    replaced: Dict[str, Any] = {}
    for variable in messages.writes:
        replaced.update(messages.fetched(variable))
    ends = {context.graph.ops[write].name: messages.ends[variable][0]
            for variable, writes in messages.writes.items() for write in writes.value}
    return Sent(ends, tuple(follow), tuple(messages.stand_ins), tuple(kept_variables(context)), replaced)


class _Messages:
    """Attributes:
    writes: of each variable that is updated.
    ends: trained variable -> the ops after which its update is over here: its value has been sent or has arrived, and, if some of
        its state is written after that, so has the message about this.
    stand_ins: see :class:`Sent`.
    """

    def __init__(self, context: Context, nodes: Nodes, recipes: Recipes) -> None:
        self._context, self._nodes, self._recipes, self._owners = context, nodes, recipes, context.owners
        graph = context.graph
        self.writes = self._owners.writes(graph)
        self.ends: Dict[int, List[str]] = {}
        self.stand_ins: List[str] = []
        self._variable_of = {write: variable for variable, found in self.writes.items() for write in sum(found, ())}
        self._before = {variable: waited_for(graph, found.value) for variable, found in self.writes.items()}
        self._inside = waited_for(graph, self._variable_of).union(self._variable_of)

    def take_tensors(self, values: Mapping[int, Primitive]) -> None:
        """Makes readers of tensors that only the owner can compute read what the owner sent."""
        graph = self._context.graph
        for tensor, made in values.items():
            value = self._recipes.of(made)
            for user, position in graph.consumers(tensor):
                if self._owners.update.get(user) != self._owners.sent[tensor]:
                    self._context.edit.move_input(graph.ops[user].name, position, value)

    def end_updates(self, values: Mapping[int, Primitive]) -> None:
        """Stages what ends the updates of variables."""
        graph, edit = self._context.graph, self._context.edit
        for tensor, made in values.items():
            end, variable = self._recipes.of(made), graph.tensors[tensor].op
            self.ends.setdefault(variable, []).append(end)
            if made.kind == primitive.TOKEN:
                self.stand_ins.append(end)
            if made.kind in (primitive.ASSIGN, primitive.TOKEN):  # it counts as an optimizer's step where the update does
                if any(traits(graph.ops[op].type).is_update for op in self.writes[variable].value):
                    edit.node(end).attr[UPDATES_ATTR].b = True

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


def kept_variables(context: Context) -> List[Kept]:
    """In an order that is the same in all processes."""
    graph, owners, homes = context.graph, context.owners, variables_at_home(context.graph, context.plan)
    return [Kept(graph.ops[variable].name, context.device_of(graph.ops[variable]), context.devices[homes[owner].device],
                 owners.is_own(owner)) for variable, owner in sorted(owners.state.items())]
