"""Divides a Session's graph, which is written for the devices of all processes, into the parts that the processes run.

Every process has the whole graph, and divides it in the same way.  Two kinds of runs differ.  A run that trains is made by all
processes, each with its own ops, and values cross in messages (:mod:`whale_tf.communicators.queues`).  All other runs are
TensorFlow's: it executes each op where it is placed, also on devices of other processes, for whichever process asks::

    as written       variable (process 0) ──> clone (process 1) ──> update (process 1)
                                   └───────> original (process 1)
    in process 0     variable ──> send
    in process 1     receive ──> clone ──> update
                     variable (of process 0) ──> original        when fetched, in runs that do not train

So only *ours* are cut off from other processes' ops: clones, what is computed from them, and updates.  An original op that a
clone reads and that itself reads another process's value gets a copy, which is ours.  Conditions that update variables of several
processes become pieces, one or more for each (:mod:`whale_tf.emit.effects`).
"""

from __future__ import annotations

from typing import Any, Collection, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.cluster import process_of
from whale_tf.communicators.queues import Queues, flat
from whale_tf.emit.branches import repeat_in_branches
from whale_tf.emit.context import Context
from whale_tf.emit.effects import divide_ops, writes_inside
from whale_tf.emit.order import PASSED
from whale_tf.emit.own_part import HOST, crosses_in_loop, missing_in_some_steps, takes_of_several
from whale_tf.emit.processes import variable_ops
from whale_tf.emit.repeats import repeat_where_read
from whale_tf.errors import PlanError
from whale_tf.graph_editor.control_flow import frame_of_ops, is_inside, whole_loops
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.graph_editor.variables import assign, read
from whale_tf.ir.traits import ASSIGNS, ENTERS, MERGES, RANDOM, SWITCHES, VARIABLES, traits
from whale_tf.ir.units import in_branches
from whale_tf.ir.walk import reached
from whale_tf.ir.writes import is_write
from whale_tf.passes.partition import Before, Node, Output, before_wait, begun_before

SCOPE = "whale/part"
BEGUN = "begun"  # name of messages that say that their sender makes the step, and no longer reads what the last one has left
Fetch = Union[tf.Tensor, tf.Operation]


class SessionPart:
    """See the module's docstring.

    Args:
        context: of the rewritten graph.
        after: names of the ops outside of the clones that follow from them.
        merged: names of merged values that all processes have after steps.
        gates: names of gates that a run may close.
        number: of the graph, the same in all processes, and no other graph's.

    Attributes:
        processes: all, and which of them run the parts of this one's step.
        rank, members: this process, and those.
        number: of the part that this process runs.
        scope: name scope of all ops that are added, and of the queues.
        added: names of these ops.
        host: this process's device for small arithmetic.
        ops, nodes: the graph as written; what is added here is not in it.
        indices: name of an op -> its number.
        ours: numbers of the ops that only steps run.
        instead: fetch of a write that another process makes -> the name of what is fetched here.
        divided: op that was divided -> its pieces.
        replaced: the same, and name of its result -> that of a piece's.
        sends: (value, receiver) -> the op that sends it.
        received: value of another process -> the name of what has arrived.
        early: write that could run before other processes have begun the step -> these processes, which tell when they have.
    """

    def __init__(self, context: Context, after: Collection[str], merged: Collection[str], gates: Collection[str],
                 number: int) -> None:
        self.graph, self.context, self.processes = context.tf_graph, context, context.processes
        self.rank, self.members = self.processes.rank, self.processes.members
        self.number = self.members.index(self.rank)
        self._after, self._merged, self._gates = frozenset(after), frozenset(merged), frozenset(gates)
        self.scope, self.host = f"{SCOPE}/{number}", self.processes.prefix(self.processes.rank) + HOST
        self.queues = Queues(self.processes, self.scope)
        self.indices: Dict[str, int] = {}
        self.ops: List[tf.Operation] = []
        self.nodes: List[Node] = []
        self.added: Set[str] = set()
        self._seen, self._version = 0, -1
        self.ours: Set[int] = set()
        self.early: Dict[int, Set[int]] = {}
        self._told: Dict[int, str] = {}  # process -> what has arrived when it has begun the step
        self._may_miss: Set[int] = set()  # those of ours that some steps leave out
        self._copies: Dict[str, str] = {}  # original op -> its copy that is ours
        self.sends: Dict[Tuple[Output, int], str] = {}
        self.received: Dict[Output, str] = {}
        self._arrived: Dict[str, Output] = {}
        self._before_wait: Dict[int, Before] = {}
        self._ends_of_gates: Set[int] = set()
        self.instead: Dict[str, str] = {}
        self.divided: Dict[str, Tuple[str, ...]] = {}
        self.replaced: Dict[str, Any] = {}
        self._writes: Dict[str, bool] = {}  # whether a piece writes variables
        self._loops: List[Set[tf.Operation]] = []  # with what shares their stacks and tensor arrays
        self._runners: Dict[tf.Operation, Optional[int]] = {}  # of the ops of loops that run in one process
        self.update()

    # ------------------------------------------------------------------------------------------------------ what is ours
    def update(self) -> None:
        """Divides what has been added to the graph."""
        if self.graph.version == self._version:
            return
        self._find_loops()
        self._divide_conditions()
        self._copy_originals()
        self._find_loops()
        readers = [op for op in self._new_ops() if op.name in self._after or self.context.is_own_name(op.name)]

        def owner(op: tf.Operation) -> Optional[int]:
            return self._owner(op, ())

        repeat_in_branches(self.graph, readers, owner, self.context.name("branch"))
        written = [op for op in self.graph.get_operations() if op.name not in self.added]
        computing = [op for op in readers if op.type not in ASSIGNS]  # ``load`` feeds what others assign
        repeat_where_read(self.graph, written, computing, owner, self.members, self.context.name("repeated"))
        first = len(self.ops)
        for op in self._new_ops():
            self.indices[op.name] = len(self.ops)
            if op.name.endswith(PASSED) and op.name[:-len(PASSED)] in self._gates:
                self._ends_of_gates.add(len(self.ops))
            self.ops.append(op)
        self._seen = len(self.graph.get_operations())
        self.nodes += [None] * (len(self.ops) - first)  # type: ignore[list-item]
        for index in range(first, len(self.ops)):
            self._node(index)
        ours = self._find_ours(first)
        self._check(ours)
        edit = StagedEdit(self.graph)
        nodes = Nodes(edit)
        for index in sorted(ours):
            self._cut(edit, nodes, index)
        self._hold_early(edit, nodes, ours)
        for index in range(first, len(self.ops)):
            if index not in ours:
                self._leave(edit, nodes, index)
            self._place(edit, index)
        self.ours |= ours
        self.commit(edit)
        self._version = self.graph.version

    def _new_ops(self) -> List[tf.Operation]:
        return [op for op in self.graph.get_operations()[self._seen:] if op.name not in self.added]

    def _divide_conditions(self) -> None:
        """Divides conditions and calls of steps that update variables of several processes."""
        new = self._new_ops()
        late = [(op, position, tensor) for op in new for position, tensor in enumerate(op.inputs) if tensor.name in self.replaced]
        if late:
            edit = StagedEdit(self.graph)
            for op, position, tensor in late:
                edit.move_input(op.name, position, self.replaced[tensor.name])
            edit.commit()
        owners = {op.name: self._owner(op, ()) for op in self.graph.get_operations() if op.type == "VarHandleOp"}
        ours = [op for op in new if op.name in self._after or self.context.is_own_name(op.name)]
        found = divide_ops(self.graph, ours, owners, self.members,
                           lambda owner: "" if owner is None else self.processes.prefix(owner))
        self.divided.update((name, tuple(pieces)) for name, pieces in found.pieces.items())
        self.replaced.update({**self.divided, **found.results})
        self._writes.update((name, writes_inside(self.graph, self.graph.get_operation_by_name(name).node_def))
                            for name in found.owners)

    def commit(self, edit: StagedEdit) -> Dict[str, tf.Operation]:
        """Commits an edit with ops that are no part of the graph as written."""
        new = edit.commit()
        self.added.update(new)
        return new

    def _node(self, index: int) -> Node:
        if self.nodes[index] is None:
            op = self.ops[index]
            inputs = tuple((self.indices[tensor.op.name], tensor.value_index) for tensor in op.inputs)
            waits = tuple(self.indices[before.name] for before in op.control_inputs if before.name not in self.added)
            self.nodes[index] = Node(self._owner(op, ()), inputs, waits)
        return self.nodes[index]

    def _find_loops(self) -> None:
        """A loop of version 1 runs whole in the process where any of its ops runs: a message cannot enter an iteration."""
        self._runners = {}
        self._loops = whole_loops(self.graph)
        for ops in self._loops:
            runners = {self._owner(op, ()) for op in ops} - {None}
            if len(runners) == 1:
                self._runners.update(dict.fromkeys(ops, runners.pop()))

    def _owner(self, op: tf.Operation, beside: Tuple[str, ...]) -> Optional[int]:
        """The process that runs an op; None: each that needs it."""
        if op in self._runners:
            return self._runners[op]
        for position, tensor in enumerate(op.inputs):
            if tensor.dtype == tf.resource or (tensor.dtype._is_ref_dtype and _takes_reference(op, position)):
                found = self._owner(tensor.op, ())
                if found is not None:
                    return found
        found = process_of(op.device)
        if found is not None:
            return found
        for group in op.colocation_groups():
            name = group.decode().partition("loc:@")[2]
            if name and name != op.name and name not in beside:
                found = self._owner(self.graph.get_operation_by_name(name), (*beside, op.name))
                if found is not None:
                    return found
        if op.type in RANDOM and op.op_def.is_stateful and not any(tensor.dtype == tf.resource for tensor in op.inputs):
            seeds = [op.get_attr(name) for name in ("seed", "seed2") if name in op.node_def.attr]
            return None if any(seeds) else self.members[0]  # the processes' generators differ
        return None

    def _find_ours(self, first: int) -> Set[int]:
        """Those of the ops from number ``first`` on that are ours."""
        new = range(first, len(self.ops))
        users = self._users(first)
        found: Set[int] = set()
        starts = {index for index in new if self.ops[index].name in self._after}
        if not first:  # what the rewrite added, and writes that take part in steps
            starts |= {self.indices[name] for name in self._merged}
            before = reached(starts, lambda index: self.before(index))
            starts |= {index for index in before
                       if self.context.is_own_name(self.ops[index].name) or self.is_kept_write(index)}
        pending = list(starts) + [user for index in self.ours for user in users.get(index, ())]
        while pending:
            index = pending.pop()
            if index in found or self.ops[index].type in VARIABLES or self.ops[index].name in self.divided:
                continue
            found.add(index)
            if self.nodes[index].inputs or self.nodes[index].waits:
                pending += users.get(index, ())
        return found

    def _users(self, first: int) -> Dict[int, List[int]]:
        users: Dict[int, List[int]] = {}
        for index in range(first, len(self.ops)):
            for before in self.before(index):
                users.setdefault(before, []).append(index)
        return users

    def before(self, index: int) -> Iterable[int]:
        """What an op reads and waits for."""
        node = self.nodes[index]
        return (*(output[0] for output in node.inputs), *node.waits)

    def is_write(self, index: int) -> bool:
        """Whether an op, or one in a function that it calls, writes a variable."""
        op, graph = self.ops[index], self.context.graph
        if op.name in self._writes:
            return self._writes[op.name]
        return traits(op.type).is_write or (op.name in graph and is_write(graph.op(op.name)))

    def pieces(self, name: str) -> Sequence[str]:
        """Names of the ops that stand for an op."""
        return self.divided.get(name, (name,))

    def is_kept_write(self, index: int) -> bool:
        """Whether an op writes a variable that some process keeps."""
        return self.nodes[index].owner is not None and self.is_write(index)

    def _check(self, ours: Set[int]) -> None:
        """Raises:
            PlanError: an op takes variables of several processes, or a value crosses that is missing in some steps, for which its
                receiver would wait forever.
        """
        for op in map(self.ops.__getitem__, sorted(ours)):
            kept = {self._owner(tensor.op, ()) for tensor in op.inputs if tensor.dtype == tf.resource}
            if len(kept - {None}) > 1:
                raise takes_of_several(op.node_def)
        self._check_loops(ours)
        may_miss = self._find_may_miss()
        for index in ours & may_miss:
            for output, sender, receiver in self._crossings(index):
                if output[0] in may_miss:
                    raise missing_in_some_steps(self.ops[output[0]].name, sender, receiver)
        self._may_miss |= may_miss

    def _find_may_miss(self) -> Set[int]:
        """The ops that some steps leave out."""
        if not any(op.type in SWITCHES for op in self.ops):
            return set()
        in_loop = {self.indices[op.name] for op in frame_of_ops(self.graph) if op.name in self.indices} if self._loops else set()
        return in_branches(range(len(self.ops)), self.before, lambda index: self.ops[index].type, in_loop)

    def _check_loops(self, ours: Set[int]) -> None:
        """Raises:
            PlanError: a value crosses inside of a loop of version 1.
        """
        found = frame_of_ops(self.graph) if self._loops else {}
        for index in sorted(ours):
            op = self.ops[index]
            if op in found and is_inside(op, found[op]):
                for output, sender, receiver in self._crossings(index):
                    raise crosses_in_loop(found[op].name, op.name, self.ops[output[0]].name, sender, receiver)

    def _hold_early(self, edit: StagedEdit, nodes: Nodes, ours: Set[int]) -> None:
        """Makes writes wait for processes that may still read, in runs of their own, what the last step has left.  Most writes
        follow anyway from what all processes compute; one in the forward pass, such as that of a moving average, does not."""
        writes = sorted(filter(self.is_kept_write, ours))
        for index, begun in begun_before(self.nodes, writes, self._ends_of_branches() if writes else ()).items():
            late = set(self.members) - begun
            if not late:
                continue
            self.early[index] = late
            if self.nodes[index].owner != self.rank:
                continue
            for rank in sorted(late - self._told.keys()):
                self._told[rank] = self.queues.receive(nodes, BEGUN, tf.int32, rank, tf.TensorShape([]))
            for op in self._entrance(index):
                edit.move_waits(op.name, [], [self._told[rank] for rank in sorted(late)])

    def _entrance(self, index: int) -> List[tf.Operation]:
        """An op, or those by which values enter the loop of version 1 around it: its other ops can wait for nothing outside."""
        op = self.ops[index]
        found = frame_of_ops(self.graph) if self._loops else {}
        frame = found.get(op)
        if frame is None:
            return [op]
        by_name = {one.name: one for one in found.values()}
        while frame.parent is not None:
            frame = by_name[frame.parent]
        return [one for one in frame.ops if one.type in ENTERS]

    def _ends_of_branches(self) -> Set[int]:
        """Those of ours that run whichever branch is taken, or whether a gate is closed or not: perhaps before what they read or
        wait for."""
        in_loop = frame_of_ops(self.graph) if self._loops else {}
        return {index for index in self.ours
                if self.ops[index].name in self._gates or (self.ops[index].type in MERGES and self.ops[index] not in in_loop)}

    def in_every_step(self, index: int) -> int:
        """An op, or the Merge behind it if some steps leave the op out.

        Raises:
            PlanError: there is none.
        """
        if index not in self._may_miss:
            return index
        users = self._users(0)
        behind = reached([index], lambda one: () if self._is_merge(one) else users.get(one, ()))
        merges = sorted(filter(self._is_merge, behind))
        if not merges:
            raise PlanError(f"{self.ops[index].name!r} runs in some steps only, and nothing says when a step without it is over; "
                            "fetch the result of its condition (tf.cond) together with the step")
        return merges[0]

    def _is_merge(self, index: int) -> bool:
        """Whether an op ends a condition that is in no other one."""
        return self.ops[index].type in MERGES and self.ops[index]._get_control_flow_context() is None

    def _copy_originals(self) -> None:
        """Gives an original a copy if a clone reads it, and it reads what another process computes."""
        new = [op for op in self._new_ops() if op.name in self._after or self.context.is_own_name(op.name)]
        owners: Dict[str, Optional[int]] = {}
        needs: Dict[str, bool] = {}

        def owner(op: tf.Operation) -> Optional[int]:
            if op.name not in owners:
                owners[op.name] = self._owner(op, ())
            return owners[op.name]

        def is_original(op: tf.Operation) -> bool:
            return not (op.name in self._after or self.context.is_own_name(op.name) or op.type in VARIABLES
                        or traits(op.type).is_write)

        def needs_copy(op: tf.Operation) -> bool:
            stack = [op]
            while stack:
                current = stack[-1]
                before = [tensor.op for tensor in current.inputs if is_original(tensor.op) and tensor.op.name not in needs]
                if before and current.name not in needs:
                    needs[current.name] = False  # a loop
                    stack += before
                    continue
                stack.pop()
                here = owner(current)
                needs[current.name] = any(
                    needs.get(tensor.op.name, False) if is_original(tensor.op) and owner(tensor.op) in (None, here)
                    else owner(tensor.op) not in (None, here) for tensor in current.inputs if tensor.dtype != tf.resource)
            return needs[op.name]

        starts = {tensor.op for op in new for tensor in op.inputs if is_original(tensor.op)}
        behind = reached(starts, lambda op: [tensor.op for tensor in op.inputs if is_original(tensor.op)])
        found = {op for op in behind if needs_copy(op) and op.name not in self._copies}
        for loop in self._loops:  # a loop and its copy share nothing
            if not found.isdisjoint(loop):
                found.update(op for op in loop if is_original(op) and op.name not in self._copies)
        copied = sorted(found, key=lambda op: op.name)
        readers = [op for op in new if any(tensor.op.name in self._copies or tensor.op in copied for tensor in op.inputs)]
        if not readers:
            return
        edit = StagedEdit(self.graph)
        earlier = {tensor.name: f"{name}:{tensor.value_index}" for original, name in self._copies.items()
                   for tensor in self.graph.get_operation_by_name(original).outputs}
        if copied:
            self._copies.update(edit.clone(copied, self.context.name("part"), input_map=earlier))
        for op in readers:
            for position, tensor in enumerate(op.inputs):
                if tensor.op.name in self._copies:
                    edit.move_input(op.name, position, f"{self._copies[tensor.op.name]}:{tensor.value_index}")
        edit.commit()

    # ------------------------------------------------------------------------------------------------------------ cutting
    def _crossings(self, index: int) -> List[Tuple[Output, int, int]]:
        """(value, sender, receiver) of what one of our ops reads from other processes."""
        node, found = self.nodes[index], []
        for output in node.inputs:
            sender = self.nodes[output[0]].owner
            if sender is not None and sender != node.owner:
                receivers = self.members if node.owner is None else [node.owner]
                found += [(output, sender, receiver) for receiver in receivers if receiver != sender]
        return found

    def _cut(self, edit: StagedEdit, nodes: Nodes, index: int) -> None:
        """Makes one of our ops read what has arrived, and wait for nothing that does not run here."""
        for output, sender, receiver in self._crossings(index):
            self.cross(nodes, output, sender, receiver)
        op, node = self.ops[index], self.nodes[index]
        if node.owner not in (None, self.rank):
            return
        for position, output in enumerate(node.inputs):
            if output in self.received and self.nodes[output[0]].owner != self.rank:
                edit.move_input(op.name, position, self.received[output])
        gone = [wait for wait in node.waits if self.nodes[wait].owner not in (None, self.rank)]
        if gone:
            edit.move_waits(op.name, [self.ops[wait].name for wait in gone], self._instead_of(nodes, gone))

    def _instead_of(self, nodes: Nodes, waits: Sequence[int]) -> List[str]:
        """What an op waits for here instead of other processes' ops."""
        found: Set[str] = set()
        for wait in waits:
            before = self._before_wait.get(wait) or before_wait(self.nodes, wait, self.rank, self._ends_of_gates)
            self._before_wait[wait] = before
            for output, receiver in before.outputs:
                self.cross(nodes, output, self.rank, receiver)
            found.update(self.sends[each] for each in before.outputs)
            found.update(self.ops[one].name for one in before.nodes)
        return sorted(found)

    def cross(self, nodes: Nodes, output: Output, sender: int, receiver: int) -> None:
        """Stages this process's end of a message."""
        tensor = self.ops[output[0]].outputs[output[1]]
        what = flat(tensor.name)
        if self.rank == sender and (output, receiver) not in self.sends:
            self.sends[output, receiver] = self.queues.send(nodes, tensor.name, what, tensor.dtype.base_dtype, receiver)
        elif self.rank == receiver and output not in self.received:
            self.received[output] = self.queues.receive(nodes, what, tensor.dtype.base_dtype, sender, tensor.shape)
            self._arrived[self.received[output] + ":0"] = output

    def _leave(self, edit: StagedEdit, nodes: Nodes, index: int) -> None:
        """Outside of steps, the first process of a step alone writes what some process keeps."""
        if self.processes.leads or not self.is_kept_write(index):
            return
        op = self.ops[index]
        nothing = nodes.no_op(f"{self.scope}/left_out/{op.name}", self.host, ())
        self.instead[op.name] = nothing
        for tensor in op.outputs:
            if op.inputs[0].dtype._is_ref_dtype:
                self.instead[tensor.name] = op.inputs[0].name
                for user in tensor.consumers():
                    for position, one in enumerate(user.inputs):
                        if one is tensor:
                            edit.move_input(user.name, position, op.inputs[0].name)
        for user in op._control_outputs:
            if user.name not in self.added:
                edit.move_waits(user.name, [op.name], ())

    def _place(self, edit: StagedEdit, index: int) -> None:
        """Places what every process runs itself on its own devices: TensorFlow 1.15 would choose process 0's.  What one process
        runs, such as a tensor array, need not be beside that."""
        op, owner = self.ops[index], self.nodes[index].owner
        beside = [group.decode().partition("loc:@")[2] for group in op.colocation_groups()]
        beside = [name for name in beside if name != op.name]
        if owner is None and not beside and process_of(op.device) is None:
            edit.place(op, self.processes.prefix(self.rank) + op.device)
        elif owner is not None and any(self.nodes[self.indices[name]].owner is None for name in beside if name in self.indices):
            device = op.device if process_of(op.device) is not None else self.processes.prefix(owner) + op.device
            edit.place(op, device, alone=True)

    def stage_start(self, left_out: Collection[str]) -> Tuple[tf.Operation, tf.Operation]:
        """Adds an op that makes variables equal where several processes have one for themselves: all of them, if no device is
        named, or those that run the same part of steps side by side.  They take the first one's value, which each passes on to
        two others.  Also returns an op that does nothing.

        Args:
            left_out: names of those that have no value.
        """
        edit = StagedEdit(self.graph)
        nodes, ends = Nodes(edit), []
        kept = {op.name: op for op in (*variable_ops(self.graph), *(op for op in self.ops if self._is_part_or_copy(op)))}
        for op in (op for name, op in kept.items() if name not in left_out):
            owner = self.nodes[self.indices[op.name]].owner
            if owner not in (None, self.rank):
                continue
            equal = range(self.processes.count) if owner is None else self._peers
            if len(equal) < 2:
                continue
            number = equal.index(self.rank)
            is_resource, dtype = op.type == "VarHandleOp", op.get_attr("dtype")
            scope, what, device = f"{self.scope}/start/{op.name}", f"start/{flat(op.name)}", op.device
            if number:
                value = self.queues.receive(nodes, what, dtype, equal[(number - 1) // 2], tf.TensorShape(None))
                ends.append(assign(nodes, is_resource, op.name, value, scope + "/assign", dtype, device))
            else:
                value = read(nodes, is_resource, op.name, scope + "/value", dtype, device)
            ends += [self.queues.send(nodes, value, what, dtype, receiver) for receiver in equal[2 * number + 1:2 * number + 3]]
        start = nodes.no_op(f"{self.scope}/start/all", self.host, ends)
        nothing = nodes.no_op(f"{self.scope}/nothing", self.host, ())
        new = self.commit(edit)
        return new[start], new[nothing]

    @property
    def _peers(self) -> Tuple[int, ...]:
        """The processes that run the same part as this one."""
        return self.processes.peers[self.number]

    def _is_part_or_copy(self, op: tf.Operation) -> bool:
        """Whether an op is a part or a copy of a variable of the script."""
        return op.type in VARIABLES and self.context.is_own_name(op.name)

    # ------------------------------------------------------------------------------------------------------------ questions
    def is_ours(self, op: tf.Operation) -> bool:
        return self.indices.get(op.name) in self.ours

    def is_here(self, op: tf.Operation) -> bool:
        """Whether this process runs an op in a step."""
        return not self.is_ours(op) or self.nodes[self.indices[op.name]].owner in (None, self.rank)

    def as_written(self, fetch: Fetch) -> Fetch:
        """The value that another process sends, for one that has arrived; else the fetch itself."""
        output = self._arrived.get(fetch.name) if isinstance(fetch, tf.Tensor) else None
        return fetch if output is None else self.ops[output[0]].outputs[output[1]]

    def edges(self, op: tf.Operation) -> Tuple[List[str], List[str]]:
        """(tensors, ops) that an op reads, or waits for, in the graph as written."""
        node = self.nodes[self.indices[op.name]]
        return ([self.ops[index].outputs[number].name for index, number in node.inputs],
                [self.ops[wait].name for wait in node.waits])

    def output(self, name: str) -> Output:
        """A tensor of the graph as written."""
        op, _, index = name.partition(":")
        return self.indices[op], int(index or 0)

    def owners(self, ops: Iterable[tf.Operation]) -> Set[int]:
        """Other processes whose devices a run by this process alone needs."""
        found = reached(list(ops), lambda op: (*(tensor.op for tensor in op.inputs), *op.control_inputs))
        owners = {self.nodes[self.indices[op.name]].owner for op in found if op.name in self.indices}
        return {owner for owner in owners if owner is not None and owner != self.rank}

    def sent_before(self, receive: str) -> Set[str]:
        """The ops that send what the value of an op that receives follows from, in other processes."""
        scope = receive.rpartition("/")[0] + "/"
        output = next((output for output, name in self.received.items() if name.startswith(scope)), None)
        owner = None if output is None else self.nodes[output[0]].owner
        if output is None or owner is None:
            return set()
        outputs = before_wait(self.nodes, output[0], self.rank, self._ends_of_gates).outputs
        return {self.sends[each] for each in outputs if each in self.sends}


def _takes_reference(op: tf.Operation, position: int) -> bool:
    """Whether an op takes an operand as a reference to a variable, not its value."""
    return bool(op._input_types[position]._is_ref_dtype)


def op_of(fetch: Fetch) -> tf.Operation:
    return fetch if isinstance(fetch, tf.Operation) else fetch.op
