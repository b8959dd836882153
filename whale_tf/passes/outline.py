"""Puts ops into bodies: for each TaskGraph its once, early, forward and backward ops, and the optimizer's ops.

::

    region      x ──> matmul ──> relu ──> loss ──> grad ──> grad_matmul          TaskGraph 0: matmul, relu, grad_matmul

    bodies      t0_forward {matmul, relu} ──> t1_forward {loss} ──> t1_backward {grad} ──> t0_backward {grad_matmul}

A backward op never comes before a forward op of its TaskGraph, and early ops come before both, so each TaskGraph's bodies follow
one another.  If the schedule separates gradients of weights, the backward ops that no other TaskGraph waits for are another body,
after the others.  The optimizer's ops are in several bodies if they go back and forth between a TaskGraph and ops that run once.
"""

from __future__ import annotations

from typing import AbstractSet, Dict, FrozenSet, Iterable, List, Mapping, Sequence, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import Region, inseparable, returning, without_groups
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import VARIABLES
from whale_tf.ir.units import frames, loops_of
from whale_tf.ir.walk import reached
from whale_tf.passes.homes import Homes, find_homes, reads_anew
from whale_tf.passes.owners import find_owners
from whale_tf.plan import Plan
from whale_tf.program import ALL, BACKWARD, BATCH_LEVEL, CLONED, EARLY, FORWARD, ONCE, SECTION, UPDATE, WEIGHT, Body, Program
from whale_tf.schedule import schedule_of

UNSENT = ("resource", "variant")  # handles and a loop's lists: nobody fetches them, and the clones' have no merged value
NO_HOME = -1  # instead of a device


def outline(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The bodies of a step.  Variables, and ops that all clones share (``Region.drawn_once``), stay outside."""
    homes = find_homes(step, plan)
    cloned = step.region.once(_cloned, splits_backward(plan))
    if plan.reads_anew:
        cloned = [body._replace(reads=reads_anew(step.graph, homes, body.ops) if body.step in CLONED else ()) for body in cloned]
    return program.with_calls(_once(step, homes) + cloned + _updates(step, homes, find_owners(step, plan).left_out), ())


def _once(step: TrainingStep, homes: Homes) -> List[Body]:
    region, outside = step.region, {*step.update.variables, *step.region.drawn_once}
    ops = [region.graph.ops[i] for i in region.ops if i not in region.batch_level and i not in outside]
    owner = {op.id: (homes.ops.get(op.id, NO_HOME),) for op in ops}
    members: Dict[Tuple[int, int, int], List[int]] = {}
    for (number, (home,)), found in _in_rounds(region.graph, ops, owner).items():
        for index in found:
            members.setdefault((region.task_graph[index], number, home), []).append(index)
    return [_body(region.graph, f"t{task_graph}_once" + (f"_{number}" if number else ""), task_graph, ONCE,
                  members[task_graph, number, home], home=home) for task_graph, number, home in sorted(members)]


def _cloned(region: Region, is_split: bool) -> List[Body]:
    """``is_split``: whether gradients of weights are separate bodies."""
    graph, shared, weight = region.graph, region.drawn_once, _weight(region) if is_split else frozenset()
    rounds = _rounds(region)
    members: Dict[Tuple[int, int, int], List[int]] = {}
    for index in region.ops:
        if index in region.batch_level and index not in shared:
            kind = WEIGHT if index in weight else step_of(region, index)
            key = region.task_graph[index], BATCH_LEVEL.index(kind), rounds.get(index, 0)
            members.setdefault(key, []).append(index)
    body_of = {index: key for key, ops in members.items() for index in ops}
    read = read_elsewhere(region).union(
        t for index in region.batch_level for t in graph.ops[index].inputs
        if body_of.get(graph.tensors[t].op) != body_of.get(index))
    bodies = []
    for task_graph, place, number in sorted(members):
        ops, kind = members[task_graph, place, number], BATCH_LEVEL[place]
        outputs = [t for i in ops for t in graph.ops[i].outputs if t in read or is_result(region, t)]
        name = f"t{task_graph}_{kind}" + (f"_{number}" if number else "")
        bodies.append(_body(graph, name, task_graph, kind, ops, outputs))
    return bodies


def splits_backward(plan: Plan) -> bool:
    """Whether gradients of weights are separate bodies."""
    return plan.num_micro_batch > 1 and schedule_of(plan.schedule).splits


def parted(step: TrainingStep, plan: Plan) -> TrainingStep:
    """The step as passes and emission see it.  If gradients of weights are separate, nothing that is sent waits for them."""
    return step.once(_without_groups) if splits_backward(plan) else step


def _without_groups(step: TrainingStep) -> TrainingStep:
    region = without_groups(step.region, _weight(without_groups(step.region)))
    return step if region is step.region else step._replace(region=region)


def _weight(region: Region) -> Set[int]:
    """Backward ops for which neither another TaskGraph waits, nor a loop for which one waits.  There are none in a TaskGraph for
    which no other one waits."""
    graph, task_graph = region.graph, region.task_graph
    late = {index for index in region.late if step_of(region, index) == BACKWARD}
    units = inseparable(region)
    crossing = {before for op in graph.ops if region.contains(op) for before in graph.predecessors(op)
                if task_graph[before] != task_graph[op.id]}
    sent = reached(crossing & late, lambda index: late.intersection(graph.predecessors(graph.ops[index])).union(
        *(unit for unit in units if index in unit)))
    waited = {task_graph[index] for index in sent}
    return {index for index in late - sent if task_graph[index] in waited}


def _rounds(region: Region) -> Dict[int, int]:
    """Early op, or op of a section -> length of the chain of whole-mini-batch values and updates from which it follows."""
    combined = region.batch.combined()
    if not region.early and not region.sections:
        return {}
    returned = returning(region.graph, region.batch_level)
    loops = loops_of([region.graph.ops[index] for index in region.ops], frames(region.graph))
    raising = {op for op, _ in combined}.union(region.rereads, region.sections)
    least: Dict[int, int] = {}  # for the ops of a loop, which are in one body
    while True:
        rounds: Dict[int, int] = {}
        for op in region.graph.ops[min(raising.union(returned, least), default=0):]:
            number = least.get(op.id, 0)
            for source in region.graph.predecessors(op):
                if source in rounds or source in returned:  # few are
                    number = max(number, rounds.get(source, 0) + (source in returned and op.id not in region.batch_level))
            if op.id in raising:
                number = max(number, _raised(region, combined, op, rounds))
            if number:
                rounds[op.id] = number
        uneven = [loop for loop in loops if len({rounds.get(index, 0) for index in loop}) > 1]
        if not uneven:
            break
        for loop in uneven:
            least.update(dict.fromkeys(loop, max(rounds[index] for index in loop if index in rounds)))
    return {index: number for index, number in rounds.items() if index in region.early or index in region.sections}


def _raised(region: Region, combined: AbstractSet[Tuple[int, int]], op: Op, rounds: Mapping[int, int]) -> int:
    """The round of an op that combines values over the whole mini-batch, or waits for an update."""
    waits, is_whole = region.rereads.get(op.id, ()), op.id in region.sections
    before = [rounds.get(source, 0) + ((op.id, position) in combined or (is_whole and source in region.early))
              for position, source in enumerate(region.graph.tensors[tensor].op for tensor in op.inputs)]
    return max([*before, *(rounds.get(control, 0) + (control in waits) for control in op.control_inputs)], default=0)


def _updates(step: TrainingStep, homes: Homes, left_out: AbstractSet[int]) -> List[Body]:
    """The optimizer's ops by TaskGraph and home, without those that only other processes run."""
    ops = [op for op in step.graph.ops if op.phase is Phase.APPLY and op.type not in VARIABLES and op.id not in left_out]
    owner = {op.id: (step.update.task_graph.get(op.id, ALL), homes.ops.get(op.id, NO_HOME)) for op in ops}
    bodies = []
    for (number, (task_graph, home)), members in sorted(_in_rounds(step.graph, ops, owner).items()):
        name = ("update" if task_graph == ALL else f"t{task_graph}_update") + (f"_{number}" if number else "")
        bodies.append(_body(step.graph, name, task_graph, UPDATE, members, home=home))
    return bodies


def _in_rounds(graph: OpGraph, ops: Iterable[Op],
               owner: Mapping[int, Tuple[int, ...]]) -> Dict[Tuple[int, Tuple[int, ...]], List[int]]:
    """Ops by round and owner.  An op that follows from another owner's op comes in a later round."""
    rounds: Dict[int, int] = {}
    members: Dict[Tuple[int, Tuple[int, ...]], List[int]] = {}
    for op in ops:
        own = owner[op.id]
        rounds[op.id] = max([rounds[before] + (owner[before] != own) for before in graph.predecessors(op) if before in rounds],
                            default=0)
        members.setdefault((rounds[op.id], own), []).append(op.id)
    return members


def _body(graph: OpGraph, name: str, task_graph: int, kind: str, ops: Sequence[int], outputs: Iterable[int] = (),
          home: int = NO_HOME) -> Body:
    if home != NO_HOME:
        name += f"_on{home}"
    own = set(ops)
    inputs = dict.fromkeys(t for i in ops for t in graph.ops[i].inputs if graph.tensors[t].op not in own)
    if not outputs:
        outputs = [t for i in ops for t in graph.ops[i].outputs if any(user not in own for user, _ in graph.consumers(t))]
    return Body(name, task_graph, kind, tuple(ops), tuple(inputs), tuple(outputs), home=None if home == NO_HOME else home)


def step_of(region: Region, index: int) -> str:
    """The step to which a batch-level op belongs."""
    if index in region.sections:
        return SECTION
    if index in region.early:
        return EARLY
    return BACKWARD if index in region.late else FORWARD


def read_elsewhere(region: Region) -> FrozenSet[int]:
    """Tensors that ops outside the region or in sections read, and those that are combined over all clones."""
    return region.once(_read_elsewhere)


def _read_elsewhere(region: Region) -> FrozenSet[int]:
    return frozenset(region.leaving()).union(*(region.graph.ops[index].inputs for index in region.sections), (
        region.graph.ops[op].inputs[position] for op, position in region.batch.combined()))


def reads_by_handle(graph: OpGraph, tensor: int) -> bool:
    """Whether an op makes a tensor of a variable's handle, as a lookup does."""
    return any(graph.tensors[t].dtype == "resource" for t in graph.producer(tensor).inputs)


def is_result(region: Region, tensor: int) -> bool:
    """The tensors that a user is likely to fetch: results that nothing reads, and scalars that no gradient function made.
    Tensors that are read through a variable's handle are included, since a fetch through another read could see the updated
    variable."""
    record, op = region.graph.tensors[tensor], region.graph.producer(tensor)
    if record.dtype in UNSENT or record.dtype.endswith("_ref"):
        return False
    if (record.shape == () and op.forward < 0) or reads_by_handle(region.graph, tensor):
        return True
    return not any(region.graph.consumers(t) for t in op.outputs)
