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
clone reads and that itself reads another process's value gets a copy, which is ours.
"""

from __future__ import annotations

from typing import Collection, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.communicators.queues import Queues, flat
from whale_tf.emit.context import Context
from whale_tf.emit.order import PASSED
from whale_tf.emit.own_part import HOST, STEPS, note, process_of
from whale_tf.emit.processes import variable_ops
from whale_tf.errors import PlanError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.graph_editor.variables import assign, read
from whale_tf.ir.traits import MERGES, RANDOM, SWITCHES, VARIABLES, Role, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.partition import Before, Crossing, Node, Output, before_wait, partition, unanswered

SCOPE = "whale/part"
Fetch = Union[tf.Tensor, tf.Operation]


class Step(NamedTuple):
    """A run that trains.

    Attributes:
        writes: names of the writes of variables that some process keeps.
        results: values that all processes have after it, by name.
        closed: gates that it feeds.
        run: name of the op that makes this process's part of it.
        values: fetched tensor of another process -> the name of what has arrived here.
        seen: name of the variable with checksums of the inputs.
        inputs: names of these inputs, which all processes must have read alike.
    """

    writes: Tuple[str, ...]
    results: Tuple[str, ...]
    closed: Tuple[str, ...]
    run: str
    values: Mapping[str, str]
    seen: str
    inputs: Sequence[str]

    @property
    def text(self) -> str:
        """Equal in processes that make the same step."""
        return "\n".join([*self.writes, "", *self.results])


class SessionPart:
    """See the module's docstring.

    Args:
        context: of the rewritten graph.
        after: names of the ops outside of the clones that follow from them.
        riders: merged value, which all processes have after each of some updates -> the writes of these.
        gates: gate -> the ops for which it waits.
        sources: names of the tensors with the examples of the mini-batch.
        number: of the graph, the same in all processes, and no other graph's.

    Attributes:
        instead: fetch of a write that another process makes -> the name of what is fetched here.
    """

    def __init__(self, context: Context, after: Collection[str], riders: Mapping[str, Collection[str]],
                 gates: Mapping[str, Sequence[str]], sources: Sequence[str], number: int) -> None:
        self._graph, self._context, self._processes = context.tf_graph, context, context.processes
        self._rank, self._count = self._processes.rank, self._processes.count
        self._after, self._riders, self._gates, self._sources = frozenset(after), riders, gates, sources
        self._scope = f"{SCOPE}/{number}"
        self._queues = Queues(self._processes, self._scope)
        self._indices: Dict[str, int] = {}
        self._ops: List[tf.Operation] = []
        self._nodes: List[Node] = []
        self._own: Set[str] = set()  # ops that this class has added
        self._seen, self._version = 0, -1
        self._ours: Set[int] = set()
        self._copies: Dict[str, str] = {}  # original op -> its copy that is ours
        self._sends: Dict[Tuple[Output, int], str] = {}  # value, receiver -> op
        self._received: Dict[Output, str] = {}
        self._arrived: Dict[str, Output] = {}
        self._before_wait: Dict[int, Before] = {}
        self._ends_of_gates: Set[int] = set()
        self._steps: Dict[Tuple[Tuple[str, ...], FrozenSet[int], FrozenSet[Output], FrozenSet[int]], Step] = {}
        self._known: Dict[Tuple[str, ...], FrozenSet[int]] = {}
        self._alone: Dict[str, str] = {}
        self.instead: Dict[str, str] = {}
        self.update()

    # ------------------------------------------------------------------------------------------------------ what is ours
    def update(self) -> None:
        """Divides what has been added to the graph."""
        if self._graph.version == self._version:
            return
        self._copy_originals()
        first = len(self._ops)
        for op in self._new_ops():
            self._indices[op.name] = len(self._ops)
            if op.name.endswith(PASSED) and op.name[:-len(PASSED)] in self._gates:
                self._ends_of_gates.add(len(self._ops))
            self._ops.append(op)
        self._seen = len(self._graph.get_operations())
        self._nodes += [None] * (len(self._ops) - first)  # type: ignore[list-item]
        for index in range(first, len(self._ops)):
            self._node(index)
        ours = self._find_ours(first)
        self._check_dead(ours)
        edit = StagedEdit(self._graph)
        nodes = Nodes(edit)
        for index in sorted(ours):
            self._cut(edit, nodes, index)
        for index in range(first, len(self._ops)):
            if index not in ours:
                self._leave(edit, nodes, index)
            self._place(edit, index)
        self._ours |= ours
        self._commit(edit)
        self._version = self._graph.version

    def _new_ops(self) -> List[tf.Operation]:
        return [op for op in self._graph.get_operations()[self._seen:] if op.name not in self._own]

    def _commit(self, edit: StagedEdit) -> Dict[str, tf.Operation]:
        new = edit.commit()
        self._own.update(new)
        return new

    def _node(self, index: int) -> Node:
        if self._nodes[index] is None:
            op = self._ops[index]
            inputs = tuple((self._indices[tensor.op.name], tensor.value_index) for tensor in op.inputs)
            waits = tuple(self._indices[before.name] for before in op.control_inputs if before.name not in self._own)
            self._nodes[index] = Node(self._owner(op, ()), inputs, waits)
        return self._nodes[index]

    def _owner(self, op: tf.Operation, beside: Tuple[str, ...]) -> Optional[int]:
        """The process that runs an op; None: each that needs it."""
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
                found = self._owner(self._graph.get_operation_by_name(name), (*beside, op.name))
                if found is not None:
                    return found
        if op.type in RANDOM and op.op_def.is_stateful and not any(tensor.dtype == tf.resource for tensor in op.inputs):
            seeds = [op.get_attr(name) for name in ("seed", "seed2") if name in op.node_def.attr]
            return None if any(seeds) else 0  # the processes' generators differ
        return None

    def _find_ours(self, first: int) -> Set[int]:
        """Those of the ops from number ``first`` on that are ours."""
        new = range(first, len(self._ops))
        users = self._users(first)
        found: Set[int] = set()
        starts = {index for index in new if self._ops[index].name in self._after}
        if not first:  # what the rewrite added, and writes that take part in steps
            starts |= {self._indices[name] for name in self._riders if name in self._indices}
            before = reached(starts, lambda index: self._before(index))
            starts |= {index for index in before
                       if self._context.is_own_name(self._ops[index].name) or self._is_kept_write(index)}
        pending = list(starts) + [user for index in self._ours for user in users.get(index, ())]
        while pending:
            index = pending.pop()
            if index in found or self._ops[index].type in VARIABLES:
                continue
            found.add(index)
            if self._nodes[index].inputs or self._nodes[index].waits:
                pending += users.get(index, ())
        return found

    def _users(self, first: int) -> Dict[int, List[int]]:
        users: Dict[int, List[int]] = {}
        for index in range(first, len(self._ops)):
            for before in self._before(index):
                users.setdefault(before, []).append(index)
        return users

    def _before(self, index: int) -> Iterable[int]:
        node = self._nodes[index]
        return (*(output[0] for output in node.inputs), *node.waits)

    def _is_kept_write(self, index: int) -> bool:
        return self._nodes[index].owner is not None and traits(self._ops[index].type).is_write

    def _check_dead(self, ours: Set[int]) -> None:
        """Raises:
            PlanError: a value crosses that is missing in some steps, for which its receiver would wait forever.
        """
        users = self._users(0)
        may_miss = reached([index for index in ours if self._ops[index].type in SWITCHES], lambda index: [
            user for user in users.get(index, ()) if self._ops[user].type not in MERGES])
        for index in ours & may_miss:
            for output, sender, receiver in self._crossings(index):
                if output[0] in may_miss:
                    raise PlanError(
                        f"{self._ops[output[0]].name!r} is computed in some steps only, but process {receiver}, which reads it, "
                        f"would wait for it in every step; let process {sender} keep what reads it, or compute it in every step "
                        "(tf.where)")

    def _copy_originals(self) -> None:
        """Gives an original a copy if a clone reads it, and it reads what another process computes."""
        new = [op for op in self._new_ops() if op.name in self._after or self._context.is_own_name(op.name)]
        owners: Dict[str, Optional[int]] = {}
        needs: Dict[str, bool] = {}

        def owner(op: tf.Operation) -> Optional[int]:
            if op.name not in owners:
                owners[op.name] = self._owner(op, ())
            return owners[op.name]

        def is_original(op: tf.Operation) -> bool:
            return not (op.name in self._after or self._context.is_own_name(op.name) or op.type in VARIABLES
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
        copied = sorted((op for op in behind if needs_copy(op) and op.name not in self._copies), key=lambda op: op.name)
        readers = [op for op in new if any(tensor.op.name in self._copies or tensor.op in copied for tensor in op.inputs)]
        if not readers:
            return
        edit = StagedEdit(self._graph)
        earlier = {tensor.name: f"{name}:{tensor.value_index}" for original, name in self._copies.items()
                   for tensor in self._graph.get_operation_by_name(original).outputs}
        if copied:
            self._copies.update(edit.clone(copied, self._context.name("part"), input_map=earlier))
        for op in readers:
            for position, tensor in enumerate(op.inputs):
                if tensor.op.name in self._copies:
                    edit.move_input(op.name, position, f"{self._copies[tensor.op.name]}:{tensor.value_index}")
        edit.commit()

    # ------------------------------------------------------------------------------------------------------------ cutting
    def _crossings(self, index: int) -> List[Tuple[Output, int, int]]:
        """(value, sender, receiver) of what one of our ops reads from other processes."""
        node, found = self._nodes[index], []
        for output in node.inputs:
            sender = self._nodes[output[0]].owner
            if sender is not None and sender != node.owner:
                receivers = range(self._count) if node.owner is None else [node.owner]
                found += [(output, sender, receiver) for receiver in receivers if receiver != sender]
        return found

    def _cut(self, edit: StagedEdit, nodes: Nodes, index: int) -> None:
        """Makes one of our ops read what has arrived, and wait for nothing that does not run here."""
        for output, sender, receiver in self._crossings(index):
            self._cross(nodes, output, sender, receiver)
        op, node = self._ops[index], self._nodes[index]
        if node.owner not in (None, self._rank):
            return
        for position, output in enumerate(node.inputs):
            if output in self._received and self._nodes[output[0]].owner != self._rank:
                edit.move_input(op.name, position, self._received[output])
        gone = [wait for wait in node.waits if self._nodes[wait].owner not in (None, self._rank)]
        if gone:
            edit.move_waits(op.name, [self._ops[wait].name for wait in gone], self._instead_of(nodes, gone))

    def _instead_of(self, nodes: Nodes, waits: Sequence[int]) -> List[str]:
        """What an op waits for here instead of other processes' ops."""
        found: Set[str] = set()
        for wait in waits:
            before = self._before_wait.get(wait) or before_wait(self._nodes, wait, self._rank, self._ends_of_gates)
            self._before_wait[wait] = before
            for output, receiver in before.outputs:
                self._cross(nodes, output, self._rank, receiver)
            found.update(self._sends[each] for each in before.outputs)
            found.update(self._ops[one].name for one in before.nodes)
        return sorted(found)

    def _cross(self, nodes: Nodes, output: Output, sender: int, receiver: int) -> None:
        """Stages this process's end of a message."""
        tensor = self._ops[output[0]].outputs[output[1]]
        what = flat(tensor.name)
        if self._rank == sender and (output, receiver) not in self._sends:
            self._sends[output, receiver] = self._queues.send(nodes, tensor.name, what, tensor.dtype.base_dtype, receiver)
        elif self._rank == receiver and output not in self._received:
            self._received[output] = self._queues.receive(nodes, what, tensor.dtype.base_dtype, sender, tensor.shape)
            self._arrived[self._received[output] + ":0"] = output

    def _leave(self, edit: StagedEdit, nodes: Nodes, index: int) -> None:
        """Outside of steps, process 0 alone writes what some process keeps."""
        if self._rank == 0 or not self._is_kept_write(index):
            return
        op = self._ops[index]
        nothing = nodes.no_op(f"{self._scope}/left_out/{op.name}", HOST_OF.format(self._processes.prefix(self._rank)), ())
        self.instead[op.name] = nothing
        for tensor in op.outputs:
            if op.inputs[0].dtype._is_ref_dtype:
                self.instead[tensor.name] = op.inputs[0].name
                for user in tensor.consumers():
                    for position, one in enumerate(user.inputs):
                        if one is tensor:
                            edit.move_input(user.name, position, op.inputs[0].name)
        for user in op._control_outputs:
            if user.name not in self._own:
                edit.move_waits(user.name, [op.name], ())

    def _place(self, edit: StagedEdit, index: int) -> None:
        """Places what every process runs itself on its own devices: TensorFlow 1.15 would choose process 0's."""
        op = self._ops[index]
        beside = [group for group in op.colocation_groups() if group.decode() != "loc:@" + op.name]
        if self._nodes[index].owner is None and not beside and process_of(op.device) is None:
            edit.place(op, self._processes.prefix(self._rank) + op.device)

    def stage_start(self, left_out: Collection[str]) -> tf.Operation:
        """Adds an op that gives variables that each process has for itself process 0's values.

        Args:
            left_out: names of those that have no value.
        """
        edit = StagedEdit(self._graph)
        nodes, ends = Nodes(edit), []
        for op in variable_ops(self._graph):
            if op.name in left_out or self._nodes[self._indices[op.name]].owner is not None:
                continue
            is_resource, dtype = op.type == "VarHandleOp", op.get_attr("dtype")
            scope, what, device = f"{self._scope}/start/{op.name}", f"start/{flat(op.name)}", op.device
            if self._rank == 0:
                value = read(nodes, is_resource, op.name, scope + "/value", dtype, device)
                ends += [self._queues.send(nodes, value, what, dtype, receiver) for receiver in range(1, self._count)]
            else:
                value = self._queues.receive(nodes, what, dtype, 0, tf.TensorShape(None))
                ends.append(assign(nodes, is_resource, op.name, value, scope + "/assign", dtype, device))
        start = nodes.no_op(f"{self._scope}/start/all", self._host, ends)
        return self._commit(edit)[start]

    # ---------------------------------------------------------------------------------------------------------------- runs
    def needs(self, ops: Iterable[tf.Operation]) -> FrozenSet[int]:
        """Numbers of the ops that the local script runs for some ops."""
        names = tuple(op.name for op in ops)
        if names not in self._known:
            starts = [self._indices[name] for name in names if name in self._indices]
            self._known[names] = frozenset(reached(starts, self._before))
        return self._known[names]

    def kept_writes(self, ops: Iterable[tf.Operation]) -> List[int]:
        """Writes of variables that some process keeps."""
        return sorted(index for index in self.needs(ops) if self._is_kept_write(index))

    def writes(self, ops: Iterable[tf.Operation]) -> Set[str]:
        """Names of all writes of variables."""
        return {self._ops[index].name for index in self.needs(ops) if traits(self._ops[index].type).is_write}

    def trains(self, ops: Sequence[tf.Operation]) -> bool:
        """Whether a run of ``ops`` is a step, which all processes make.

        Raises:
            PlanError: it also writes variables otherwise.
        """
        writes = self.kept_writes(ops)
        ours = [index for index in writes if index in self._ours]
        if ours and len(ours) < len(writes):
            other = next(index for index in writes if index not in self._ours)
            raise PlanError(
                f"a run trains and also writes a variable in {self._ops[other].name!r}, which nothing in the training step waits "
                "for; make two runs")
        return bool(ours)

    def is_ours(self, op: tf.Operation) -> bool:
        return self._indices.get(op.name) in self._ours

    def as_written(self, fetch: Fetch) -> Fetch:
        """The value that another process sends, for one that has arrived; else the fetch itself."""
        output = self._arrived.get(fetch.name) if isinstance(fetch, tf.Tensor) else None
        return fetch if output is None else self._ops[output[0]].outputs[output[1]]

    def is_here(self, op: tf.Operation) -> bool:
        """Whether this process runs an op in a step."""
        index = self._indices.get(op.name)
        return index is None or index not in self._ours or self._nodes[index].owner in (None, self._rank)

    def owners(self, ops: Iterable[tf.Operation]) -> Set[int]:
        """Other processes whose devices a run by this process alone needs."""
        found = reached(list(ops), lambda op: (*(tensor.op for tensor in op.inputs), *op.control_inputs))
        owners = {self._nodes[self._indices[op.name]].owner for op in found if op.name in self._indices}
        return {owner for owner in owners if owner is not None and owner != self._rank}

    def step(self, fetches: Sequence[Fetch]) -> Step:
        """What this process runs of a step.

        Args:
            fetches: tensors and ops, with merged values in place of what clones compute.
        """
        ops = [_op_of(fetch) for fetch in fetches]
        writes = tuple(index for index in self.kept_writes(ops) if index in self._ours)
        names = {self._ops[index].name for index in writes}
        riders = [self._output(name) for name, beside in sorted(self._riders.items()) if not names.isdisjoint(beside)]
        nodes, closed = self._gated([*writes, *(output[0] for output in riders)])
        base = self._partition(nodes, writes, riders)
        results, effects = self._missing(fetches, base)
        key = (tuple(op.name for op in ops), frozenset(writes), frozenset(results), frozenset(effects))
        if key not in self._steps:
            if results or effects:
                nodes, closed = self._gated([*writes, *effects, *(output[0] for output in (*riders, *results))])
                base = self._partition(nodes, [*writes, *sorted(effects)], [*riders, *sorted(results)])
            self._steps[key] = self._staged(fetches, nodes, base, writes, sorted(results), sorted(effects), closed)
        return self._steps[key]

    def _gated(self, starts: Iterable[int]) -> Tuple[List[Node], Tuple[str, ...]]:
        """The nodes, of which gates before which an op stands that the run does not need do not wait; and these gates."""
        gates = {self._indices[name]: [self._indices[one] for one in waits] for name, waits in self._gates.items()}
        needed = reached(starts, lambda index: () if index in gates else self._before(index))
        closed = [gate for gate, waits in gates.items() if gate in needed and not needed.issuperset(waits)]
        nodes = list(self._nodes)
        for gate in closed:
            nodes[gate] = nodes[gate]._replace(waits=())
        return nodes, tuple(sorted(self._ops[gate].name for gate in closed))

    def _partition(self, nodes: List[Node], effects: Sequence[int], results: Sequence[Output]) -> "_Part":
        needed = reached([*effects, *(output[0] for output in results)], lambda index: (
            *(output[0] for output in nodes[index].inputs), *nodes[index].waits))
        common = [index for index in sorted(needed) if nodes[index].owner is None and self._has_effect(self._ops[index])]
        whole = [*nodes, Node(None, tuple(results))]
        found = partition(whole, [*effects, *common, len(nodes)], self._count)
        return _Part(whole, [set(runners) for runners in found.runs], list(found.crossings), unanswered(whole, found))

    def _has_effect(self, op: tf.Operation) -> bool:
        row = traits(op.type)
        return row.is_write or row.role is Role.PULL

    def _missing(self, fetches: Sequence[Fetch], base: "_Part") -> Tuple[Set[Output], Set[int]]:
        """(values, ops) that fetches need beyond what a step gives every process; the same whoever asks."""
        arrives: Dict[Output, int] = {}
        for crossing in base.crossings:
            arrives[crossing.output] = arrives.get(crossing.output, 0) + 1
        results: Set[Output] = set()
        effects: Set[int] = set()
        stack: List[int] = []

        def reads(output: Output) -> None:
            owner = self._nodes[output[0]].owner
            if owner is None:
                stack.append(output[0])
            elif arrives.get(output, 0) < self._count - 1:
                results.add(output)

        for fetch in fetches:
            op = _op_of(fetch)
            if not self.is_ours(op):
                continue
            index = self._indices[op.name]
            if isinstance(fetch, tf.Tensor):
                reads((index, fetch.value_index))
            elif self._nodes[index].owner is None:
                stack.append(index)
            elif not base.runs[index]:
                effects.add(index)
        seen: Set[int] = set()
        while stack:
            index = stack.pop()
            if index in seen or index not in self._ours:
                continue
            seen.add(index)
            for output in self._nodes[index].inputs:
                reads(output)
            for wait in self._nodes[index].waits:
                if self._nodes[wait].owner is None:
                    stack.append(wait)
                elif not base.runs[wait]:
                    effects.add(wait)
        return results, effects

    def _staged(self, fetches: Sequence[Fetch], nodes: Sequence[Node], found: "_Part", writes: Sequence[int],
                results: Sequence[Output], effects: Sequence[int], closed: Tuple[str, ...]) -> Step:
        """Stages the op that makes this process's part of a step."""
        edit = StagedEdit(self._graph)
        stage = Nodes(edit)
        for crossing in found.crossings:
            self._cross(stage, *crossing)
        scope = f"{self._scope}/step{len(self._steps)}"
        sent = [self._sends[crossing.output, crossing.receiver] for crossing in found.crossings if crossing.sender == self._rank]
        arrived: Dict[int, List[str]] = {}
        for crossing in found.crossings:
            if crossing.receiver == self._rank:
                arrived.setdefault(crossing.sender, []).append(self._received[crossing.output])
        ends = self._ends(found) + sent + [name for names in arrived.values() for name in names]
        for sender, receiver in found.unanswered:
            if receiver == self._rank:
                nothing = stage.const(0, scope + "/nothing", tf.int32, self._host)
                ends.append(self._queues.send(stage, nothing, scope.rpartition("/")[2] + "/answer", tf.int32, sender,
                                              arrived[sender]))
            elif sender == self._rank:
                ends.append(self._queues.receive(stage, scope.rpartition("/")[2] + "/answer", tf.int32, receiver,
                                                 tf.TensorShape([])))
        inputs = [name for name in self._sources if found.runs[self._output(name)[0]]
                  and self._graph.get_tensor_by_name(name).dtype not in (tf.variant, tf.resource)]
        if inputs:
            tensors = [self._graph.get_tensor_by_name(name) for name in inputs]
            ends.append(note(stage, tensors, scope + "/seen", scope, self._host))
        handle = stage.add("VarHandleOp", scope + "/steps", [], self._host, shared_name=STEPS, dtype=tf.int64,
                           shape=tf.TensorShape([]), container="")
        one = stage.const(1, scope + "/one", tf.int64, self._host)
        run = stage.add("AssignAddVariableOp", scope + "/count", [handle, one], self._host, sorted(set(ends)), dtype=tf.int64)
        self._commit(edit)
        values = {}
        for fetch in fetches:
            if isinstance(fetch, tf.Tensor) and self.is_ours(fetch.op):
                output = self._output(fetch.name)
                if self._nodes[output[0]].owner not in (None, self._rank):
                    values[fetch.name] = self._received[output] + ":0"
        done = tuple(sorted(self._ops[index].name for index in (*writes, *effects)))
        known = tuple(sorted(self._ops[output[0]].outputs[output[1]].name for output in results))
        return Step(done, known, closed, run, values, scope + "/seen", inputs)

    def _ends(self, found: "_Part") -> List[str]:
        """The last ops of this process's part."""
        runs = {index for index, runners in enumerate(found.runs[:-1]) if self._rank in runners}
        followed = {before for index in runs for before in self._before(index) if before in runs}
        return [self._ops[index].name for index in sorted(runs - followed)]

    @property
    def _host(self) -> str:
        return HOST_OF.format(self._processes.prefix(self._rank))

    def _output(self, name: str) -> Output:
        op, _, index = name.partition(":")
        return self._indices[op], int(index or 0)

    # ------------------------------------------------------------------------------------- runs that look but do not train
    def alone(self, fetch: Fetch) -> Fetch:
        """What is fetched instead by a run that does not train: nothing of ours, but copies that read the originals."""
        op = _op_of(fetch)
        if not self.is_ours(op):
            return fetch
        edit = StagedEdit(self._graph)
        name = self._copy_alone(edit, op)
        self._commit(edit)
        copy = self._graph.get_operation_by_name(name)
        return copy if isinstance(fetch, tf.Operation) else copy.outputs[fetch.value_index]

    def _copy_alone(self, edit: StagedEdit, last: tf.Operation) -> str:
        """The copy of an op that reads what it reads in the local script."""
        stack = [last]
        while stack:
            op = stack[-1]
            data, waits = self._in_script(op)
            before = [self._graph.get_operation_by_name(name.partition(":")[0]) for name in (*data, *waits)]
            missing = [one for one in before if self.is_ours(one) and one.name not in self._alone]
            if missing and len(stack) < len(self._ops):
                stack += missing
                continue
            stack.pop()
            if op.name not in self._alone:
                copy = edit.copy(op, f"{self._scope}/alone/{op.name}", [self._alone_edge(name) for name in data],
                                 device=self._processes.prefix(self._rank) if self._nodes[self._indices[op.name]].owner is None
                                 else op.device, control_inputs=[self._alone_edge(name) for name in waits])
                self._alone[op.name] = copy.name
        return self._alone[last.name]

    def _alone_edge(self, name: str) -> str:
        op, colon, index = name.partition(":")
        return self._alone.get(op, op) + colon + index

    def _in_script(self, op: tf.Operation) -> Tuple[List[str], List[str]]:
        """(tensors, ops) that an op reads, or waits for, in the local script."""
        graph = self._context.graph
        if op.name in graph:
            record = graph.op(op.name)
            return ([graph.tensor_name(tensor) for tensor in record.inputs],
                    [graph.ops[wait].name for wait in record.control_inputs])
        node = self._nodes[self._indices[op.name]]
        return ([self._ops[output[0]].outputs[output[1]].name for output in node.inputs],
                [self._ops[wait].name for wait in node.waits])

    def sent_before(self, receive: str) -> Set[str]:
        """The ops that send what the value of an op that receives follows from, in other processes."""
        scope = receive.rpartition("/")[0] + "/"
        output = next((output for output, name in self._received.items() if name.startswith(scope)), None)
        owner = None if output is None else self._nodes[output[0]].owner
        if output is None or owner is None:
            return set()
        outputs = before_wait(self._nodes, output[0], self._rank, self._ends_of_gates).outputs
        return {self._sends[each] for each in outputs if each in self._sends}

    # ------------------------------------------------------------------------------------------------------------- recovery
    @property
    def sizes(self) -> Mapping[str, str]:
        """Op that receives -> the op that says how many elements wait for it."""
        return self._queues.sizes


class _Part(NamedTuple):
    """A step's division; see :class:`whale_tf.passes.partition.Partition`.  The last node stands for the results."""

    nodes: Sequence[Node]
    runs: Sequence[Set[int]]
    crossings: Sequence[Crossing]
    unanswered: Sequence[Tuple[int, int]]


HOST_OF = "{}" + HOST


def _takes_reference(op: tf.Operation, position: int) -> bool:
    """Whether an op takes an operand as a reference to a variable, not its value."""
    return bool(op._input_types[position]._is_ref_dtype)


def _op_of(fetch: Fetch) -> tf.Operation:
    return fetch if isinstance(fetch, tf.Operation) else fetch.op
