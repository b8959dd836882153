"""Decides which of several processes updates a variable, if homes are divided over all of them (ZeRO; Rajbhandari et al. 2020).

Every process runs its own graph, with the same ops.  The process that has a variable's home owns the variable.  It alone keeps
the variable's optimizer state and runs its update, and it sends the new value to the others::

    process 0, owner of v     sum of gradients ──> clip ──> ApplyAdam(v, m) ──> value ──> broadcast ──> end of the step
                                                     ^                                        ║
    process 1                 sum of gradients ──> norm                                  v = value ──> end of the step

Values that follow from gradients and parameters alone, such as a global norm, are computed by each process, which has both.
Values that follow from an optimizer's state (such as the norm of all changes) are sent by the owner too, if something else reads
them.

Under v3 the value of a variable also lives in its owner's process alone.  In every step it travels to the others before the
forward pass, and the message after the update carries no value::

    process 0, owner of v     v ──> value ──> broadcast ──> forward, backward ──> sum ──> ApplyAdam(v, m) ──> done ──> end
                                                  ║                                                            ║
    process 1                                   value ────> forward, backward ──> sum                        done ───> end

An owner sends its values in messages.  Its variables whose gradients travel in one bucket share a message, and so do numbers that
the same ops read (such as the squares of a norm) if no other message comes between them.  With several optimizers, a run of one
of them needs all of a message or nothing of it, because the gradients in a bucket belong to one optimizer.

Under a loss scale a step may be skipped.  That follows from the sums of all gradients, so all processes know it.  Values are
sent in every step; in a skipped step these are the old ones.  A variable that forward and backward ops read is in every process
and written by each, whatever it follows from: the loss scale itself, or a moving average of weights.
"""

from __future__ import annotations

from collections import Counter
from typing import Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.training_step import TrainingStep, owned
from whale_tf.ir.traits import MERGES, SWITCHES, VARIABLES, traits
from whale_tf.ir.units import GATE_ATTR, frames, loops_of
from whale_tf.ir.walk import reached
from whale_tf.passes.homes import following, variables_at_home
from whale_tf.plan import Plan

VALUES, NEW, DONE, LATE = "values", "new", "done", "late"  # kinds of messages about variables


class Owners(NamedTuple):
    """The owners of variables.  Equal in all processes, except for ``rank`` and ``left_out``.

    Attributes:
        rank: this process.
        process: trained variable -> the process that owns it.
        state: variable that only its owner keeps -> the trained variable to which it belongs: optimizer state, and under v3 the
            trained variables themselves.
        update: op that only the owner runs (it follows from ``state``, or writes) -> trained variable.
        sent: tensor of these ops that others read -> trained variable.
        messages: the messages, in an order that is the same in all processes.
        gradients: gradient whose sum over all micro-batches and processes only the owner has -> trained variable.
        left_out: ops that this process does not run: other processes' ``update``, and ops whose results nothing else reads.
        gathered: under v3 the step-level ops that follow from the values of variables, in graph order.
    """

    rank: int = 0
    process: Mapping[int, int] = {}
    state: Mapping[int, int] = {}
    update: Mapping[int, int] = {}
    sent: Mapping[int, int] = {}
    messages: Tuple[Message, ...] = ()
    gradients: Mapping[int, int] = {}
    left_out: FrozenSet[int] = frozenset()
    gathered: Tuple[int, ...] = ()

    def is_own(self, variable: int) -> bool:
        return self.process[variable] == self.rank

    def writes(self, graph: OpGraph) -> Dict[int, Writes]:
        """Owners of all updated variables."""
        every = [op for op in self.update if traits(graph.ops[op].type).is_write]
        own = {op for op in every if target(graph, graph.ops[op]) == self.update[op]}
        follow: Set[int] = set()
        for op in graph.ops:
            if any(before in own or before in follow for before in graph.predecessors(op)):
                follow.add(op.id)
        found = {}
        for variable in sorted({self.update[op] for op in own}):
            state = [op for op in every if self.update[op] == variable and op not in own]
            found[variable] = Writes(tuple(op for op in every if op in own and self.update[op] == variable),
                                     tuple(op for op in state if op not in follow), tuple(op for op in state if op in follow))
        return found


class Message(NamedTuple):
    """A message from one process to all others.

    Attributes:
        home: the device that sends it, one of the owner's.
        task_graph: the TaskGraph to which it belongs.
        tensors: the tensors that others read; or
        variables: the variables that it is about.
        kind: what it says of these variables.  :data:`VALUES`: their values for the step that begins; :data:`NEW`: their new
            values; without a value, :data:`DONE`: they have been updated; :data:`LATE`: the optimizer state that is written after
            them has been written, too.
    """

    home: int
    task_graph: int
    tensors: Tuple[int, ...] = ()
    variables: Tuple[int, ...] = ()
    kind: str = NEW

    def reads(self, graph: OpGraph) -> Tuple[int, ...]:
        """The tensors it sends; for variables their handles or references; nothing if it carries no value."""
        if self.kind in (DONE, LATE):
            return ()
        return self.tensors or tuple(graph.ops[variable].outputs[0] for variable in self.variables)


class Writes(NamedTuple):
    """Writes of a variable and of its optimizer state: those that follow from no variable's write, and the others."""

    value: Tuple[int, ...]
    state: Tuple[int, ...]
    late: Tuple[int, ...]


def target(graph: OpGraph, write: Op) -> int:
    """The variable that an op writes first."""
    return graph.tensors[write.inputs[0]].op


def waited_for(graph: OpGraph, ops: Iterable[int]) -> Set[int]:
    """The ops that some ops wait for."""
    return reached((before for index in ops for before in graph.predecessors(graph.ops[index])),
                   lambda index: graph.predecessors(graph.ops[index]))


def find_owners(step: TrainingStep, plan: Plan) -> Owners:
    """See the module's docstring.  There are no owners if one process has all homes, or each process has homes of its own.

    Raises:
        UnsupportedOpError: a value that only one process can compute is needed in another one, and cannot be sent.
    """
    return step.once(_owners, plan)


def _owners(step: TrainingStep, plan: Plan) -> Owners:
    if step.processes == 1 or not plan.processes or plan.zero == "none":
        return Owners()
    graph = step.graph
    homes = variables_at_home(graph, plan)
    process = {variable: plan.process_of(home.device) for variable, home in homes.items() if home.device < plan.num_devices}
    if not process:
        return Owners()
    itself = {variable: variable for variable in process}
    count = Counter(tensor for tensor, _ in step.gradients)  # of two, if they are added and nothing else
    gradients = {tensor: variable for tensor, variable in step.gradients if variable in process and count[tensor] == 1}
    of, variables = owned(graph, following(step, itself), itself, gradients)
    everywhere = _read_in_passes(graph).difference(process)
    variables = {variable: owner for variable, owner in variables.items() if variable not in everywhere}
    state = {variable: owner for variable, owner in variables.items() if variable not in process or plan.zero == "v3"}
    at_owner = _at_owner(step, of, gradients) if plan.adds_at_home and plan.num_micro_batch > 1 else {}
    update: Dict[int, int] = {}
    for op in graph.ops:
        is_write = traits(op.type).is_write
        if op.phase is Phase.APPLY and op.id in of and op.type not in VARIABLES and not (
                is_write and target(graph, op) in everywhere):
            follows = any(tensor in at_owner or graph.tensors[tensor].op in update or graph.tensors[tensor].op in state
                          for tensor in op.inputs)
            if follows or is_write:
                update[op.id] = of[op.id]
    _check_writes(graph, of, variables, process)
    rank = plan.process_of(plan.task_graphs[0].devices[0][0])
    _check_readers(graph, update, state)
    left_out = _left_out(graph, of, update, {variable for variable, owner in process.items() if owner != rank})
    gathered = _gathered(step, process) if plan.zero == "v3" else ()
    owners = Owners(rank, process, state, update, _sent(graph, update, process, state), (), at_owner, left_out, gathered)
    return owners._replace(messages=tuple(_messages(step, plan, owners)))


def _read_in_passes(graph: OpGraph) -> Set[int]:
    """Variables that forward and backward ops read."""
    return {op.id for op in graph.ops if op.type in VARIABLES for tensor in op.outputs for user, _ in graph.consumers(tensor)
            if graph.ops[user].phase in (Phase.FORWARD, Phase.BACKWARD)}


def _check_readers(graph: OpGraph, update: Mapping[int, int], state: Mapping[int, int]) -> None:
    """Raises:
        UnsupportedOpError: an op of the update reads what only one process has, and follows from other variables as well.
    """
    for op in graph.ops:
        read = [before for before in (graph.tensors[tensor].op for tensor in op.inputs) if before in state]
        if read and op.phase is Phase.APPLY and op.id not in update and op.type not in VARIABLES:
            raise UnsupportedOpError(
                f"zero over several processes: op {op.name!r} ({op.type}) takes variable {graph.ops[read[0]].name!r} itself, "
                "which only one process has, and follows from other variables as well; let it take the variable's value "
                "(tf.identity(variable.read_value())), or set zero to 'none'")


def _at_owner(step: TrainingStep, of: Mapping[int, int], gradients: Mapping[int, int]) -> Dict[int, int]:
    """Gradients that are sums, and that only the update of their variables reads."""
    leaving = step.region.leaving()
    return {tensor: variable for tensor, variable in gradients.items()
            if step.region.batch.layout(tensor).is_partial and tensor in leaving
            and all(of.get(op) == variable and step.graph.ops[op].phase is Phase.APPLY for op, _ in leaving[tensor])}


def _left_out(graph: OpGraph, of: Mapping[int, int], update: Mapping[int, int], away: Set[int]) -> FrozenSet[int]:
    """Other processes' updates, and the ops that lead to nothing else."""
    found = {op for op, variable in update.items() if variable in away}
    waits: Set[int] = {before for op in graph.ops if op.id not in found for before in op.control_inputs}
    for op in reversed(graph.ops):
        if op.phase is Phase.APPLY and of.get(op.id) in away and op.id not in waits:
            users = {user for tensor in op.outputs for user, _ in graph.consumers(tensor)}
            if users and users <= found:
                found.add(op.id)
    return frozenset(found)


def _gathered(step: TrainingStep, process: Mapping[int, int]) -> Tuple[int, ...]:
    """Ops of the step level that follow from variables, whole loops of them.

    Raises:
        UnsupportedOpError: an op takes a variable itself, and not its value.
    """
    graph, region = step.graph, step.region
    loops = loops_of([graph.ops[index] for index in region.ops], frames(graph))
    found: Set[int] = set()
    for index in region.ops:
        op = graph.ops[index]
        for tensor in op.inputs:
            variable = graph.tensors[tensor].op
            if variable in process and graph.tensors[tensor].dtype == "resource" and (
                    op.type != "ReadVariableOp" or index in region.batch_level):
                raise UnsupportedOpError(
                    f"zero 'v3' over several processes: op {op.name!r} ({op.type}) takes variable {graph.ops[variable].name!r} "
                    f"itself, whose value only process {process[variable]} has; let it take variable.read_value(), or set zero "
                    "to 'v2', under which every process has the value")
        if index not in region.batch_level and op.type not in VARIABLES and index not in found and any(
                before in process or before in found for before in (graph.tensors[tensor].op for tensor in op.inputs)):
            found.update({index}, *(loop for loop in loops if index in loop))
    drawn = sorted(found & region.drawn_once)
    if drawn:
        raise UnsupportedOpError(
            f"zero 'v3' over several processes: op {graph.ops[drawn[0]].name!r} ({graph.ops[drawn[0]].type}) draws random "
            "numbers that follow from a variable whose value only one process has; draw them from a static shape, or set zero to "
            "'v2'")
    return tuple(sorted(found))


def _sent(graph: OpGraph, update: Mapping[int, int], process: Mapping[int, int], state: Mapping[int, int]) -> Dict[int, int]:
    found: Dict[int, int] = {}
    for index, variable in update.items():
        for tensor in graph.ops[index].outputs:
            readers = {user for user, _ in graph.consumers(tensor) if graph.ops[user].phase is Phase.APPLY}
            if not any(update.get(user) != variable for user in readers):
                continue
            if not _is_reference(graph, tensor):
                shape = graph.tensors[tensor].shape
                if shape is None or None in shape:
                    raise UnsupportedOpError(
                        f"zero over several processes: {graph.tensor_name(tensor)!r} depends on what only process "
                        f"{process[variable]} keeps for {graph.ops[variable].name!r}, and others read it, but its shape is "
                        f"{shape}; give it a static shape, or set zero to 'none'")
                found[tensor] = variable
            elif target(graph, graph.ops[index]) != variable or variable in state:
                raise UnsupportedOpError(
                    f"zero over several processes: {graph.tensor_name(tensor)!r} refers to what only process "
                    f"{process[variable]} keeps for {graph.ops[variable].name!r}, and ops that depend on other variables read "
                    "it; read its value before it is written, or set zero to 'none'")
    return found


def _messages(step: TrainingStep, plan: Plan, owners: Owners) -> List[Message]:
    """First values for the step, then tensors, then variables in the order in which their gradients become ready, then late
    messages."""
    graph, writes = step.graph, owners.writes(step.graph)
    home = variables_at_home(graph, plan)
    of_op = {op: variable for variable, found in writes.items() for op in found.value}
    after = _after(graph, list(of_op))
    before = {variable: {of_op[op] for write in found.value for op in after[write]} - {variable}
              for variable, found in writes.items()}
    alone = {variable for variable, found in before.items() if found}.union(*before.values())
    bucket = {name: (sync.task_graph, place) for sync in plan.gradients for place, names in enumerate(sync.buckets)
              if len(names) > 1 for name in names}
    groups: Dict[Tuple, List[int]] = {}
    rounds = _rounds(graph, owners.sent)
    for tensor, variable in sorted(owners.sent.items(), key=lambda one: (rounds[graph.tensors[one[0]].op], one[0])):
        op, record = graph.tensors[tensor].op, graph.tensors[tensor]
        readers = {user for user, _ in graph.consumers(tensor) if owners.update.get(user) != variable}
        together = frozenset(readers) if record.shape == () and not after[op] else tensor
        key = rounds[op], owners.process[variable], home[variable].task_graph, record.dtype, together
        groups.setdefault(key, []).append(tensor)
    found = [Message(*home[owners.sent[tensors[0]]], tensors=tuple(tensors)) for tensors in groups.values()]
    order = {variable: place for place, (_, variable) in enumerate(step.gradients)}

    def grouped(variables: Iterable[int], kind: str) -> List[Message]:
        groups: Dict[Tuple, List[int]] = {}
        for variable in sorted(variables, key=lambda one: (order.get(one, len(order)), one)):
            op, by_itself = graph.ops[variable], (home[variable].task_graph, -1 - variable)
            together: Tuple = (bucket.get(op.name, by_itself), "" if kind in (DONE, LATE) else op.attrs.get("dtype"))
            if variable in alone and kind in (NEW, DONE):
                together = by_itself
            groups.setdefault((owners.process[variable], together), []).append(variable)
        return [Message(*home[variables[0]], variables=tuple(variables), kind=kind) for variables in groups.values()]

    if plan.zero == "v3":
        found = grouped(_read_in_passes(graph).intersection(owners.process), VALUES) + found + grouped(writes, DONE)
    else:
        found += grouped(writes, NEW)
    return found + grouped((variable for variable in writes if writes[variable].late), LATE)


def _rounds(graph: OpGraph, sent: Mapping[int, int]) -> Dict[int, int]:
    """Op -> length of the chain of sent tensors from which it follows."""
    found: Dict[int, int] = {}
    for op in graph.ops:
        steps = [found.get(graph.tensors[tensor].op, 0) + (tensor in sent) for tensor in op.inputs]
        found[op.id] = max([*steps, *(found.get(wait, 0) for wait in op.control_inputs)], default=0)
    return found


def _check_writes(graph: OpGraph, of: Mapping[int, int], variables: Mapping[int, int], process: Mapping[int, int]) -> None:
    """Raises:
        UnsupportedOpError: a variable's update depends on several variables, has alternatives, or runs in some steps only.
    """
    written: Dict[int, List[Op]] = {}
    for op in graph.ops:
        if op.phase is not Phase.APPLY or not (traits(op.type).is_write or op.body):
            continue
        targets = [source for source in (graph.tensors[tensor].op for tensor in op.inputs) if source in variables]
        if targets and (op.id not in of or op.body):
            raise UnsupportedOpError(
                f"zero over several processes: op {op.name!r} ({op.type}) writes {graph.ops[targets[0]].name!r} and also depends "
                "on other variables, or is a function, so that no single process can run it; set zero to 'none'")
        for target in targets[:1]:
            written.setdefault(target, []).append(op)
    after = _after(graph, [op.id for ops in written.values() for op in ops])
    for target, ops in written.items():
        for one, other in zip(ops, ops[1:]):
            if target in process and one.id not in after[other.id]:
                raise UnsupportedOpError(
                    f"zero over several processes: variable {graph.ops[target].name!r} has two updates ({one.name!r} and "
                    f"{other.name!r}) in no fixed order, but its new value is sent once a step; train it with one optimizer, or "
                    "set zero to 'none'")
        for op in ops:
            switch = _switch(graph, op)
            if switch is not None:
                raise UnsupportedOpError(
                    f"zero over several processes: op {op.name!r} updates {graph.ops[target].name!r} in some steps only "
                    f"({switch.name!r} decides), but its new value is sent in every step; update it in every step, or set zero "
                    "to 'none'")


def _after(graph: OpGraph, writes: List[int]) -> Dict[int, Set[int]]:
    """Op -> the writes from which it follows."""
    found: Dict[int, Set[int]] = {}
    own = set(writes)
    for op in graph.ops:
        before = list(graph.predecessors(op))
        found[op.id] = {write for index in before for write in found.get(index, ())}.union(own.intersection(before))
    return found


def _switch(graph: OpGraph, write: Op) -> Optional[Op]:
    """The op that decides whether a write runs, apart from the op that decides about all writes."""
    stack, seen = [write.id], set()  # type: List[int], Set[int]
    while stack:
        op = graph.ops[stack.pop()]
        if op.id in seen or op.phase is not Phase.APPLY:
            continue
        seen.add(op.id)
        if op.type in SWITCHES and GATE_ATTR not in op.attrs:
            return op
        if op.type not in MERGES:
            stack.extend(graph.predecessors(op))
    return None


def _is_reference(graph: OpGraph, tensor: int) -> bool:
    dtype = graph.tensors[tensor].dtype
    return dtype == "resource" or dtype.endswith("_ref")
