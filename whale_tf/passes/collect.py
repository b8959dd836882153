"""What leaves the clones: gradients added up and synchronised for the updates, and values merged for whoever reads them."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple

from whale_tf.errors import PlanError
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import unique
from whale_tf.passes.homes import find_homes
from whale_tf.passes.outline import NO_HOME, UNSENT
from whale_tf.passes.owners import find_owners
from whale_tf.passes.replicate import clones, copies
from whale_tf.passes.schedule import backward_order
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    ALL,
    BACKWARD,
    CLONED,
    EVERY,
    MERGE,
    SECTION,
    SYNCHRONISE,
    UPDATE,
    WEIGHT,
    Body,
    Call,
    Clone,
    Program,
    Value,
)


def accumulate(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """In every replica, adds each micro-batch's gradients to those of the previous micro-batches, as soon as they are there.

    Only the last sum is used further, so that only one micro-batch's gradients are in memory at a time.  If a gradient goes to
    its variable's home at once, the gradients of all replicas are added up there, one after the other.  With several processes,
    each does so for one micro-batch, and this sum goes over all processes before the owner adds it to others.  Gradients on
    which no update depends (those of constants) are left out: they are added up only if somebody fetches them.
    """
    if plan.num_micro_batch == 1:
        return program
    outside = leaving(step, plan)
    at_once = find_homes(step, plan).tensors if plan.adds_at_home else {}
    at_owner = find_owners(step, plan).gradients
    number = {(call.body, call.clone): place for place, call in enumerate(program.calls)}
    bodies: List[Body] = []
    calls: List[Call] = []
    for task_graph in range(len(plan.task_graphs)):
        made_by = {t: index for index, body in enumerate(program.bodies)
                   if body.task_graph == task_graph and body.step in (BACKWARD, WEIGHT)
                   for t in body.outputs if t in outside and outside[t].is_applied and step.region.batch.layout(t).is_partial}
        groups: Dict[Tuple[Optional[int], bool], List[int]] = {}
        for tensor in made_by:
            groups.setdefault((at_once.get(tensor), tensor in at_owner), []).append(tensor)
        for (home, is_sent), tensors in groups.items():
            for first, *others in chains_of(plan, task_graph, home, is_sent):
                before = {tensor: number[made_by[tensor], first] for tensor in tensors}
                for clone in others:
                    takes = tuple(Value(tensor, (before[tensor], number[made_by[tensor], clone])) for tensor in tensors)
                    before = dict.fromkeys(tensors, len(program.calls) + len(calls))
                    call = program.calls[number[made_by[tensors[0]], clone]]
                    added = call._replace(body=len(program.bodies) + len(bodies), takes=takes)
                    calls.append(added if home is None else added._replace(devices=(home,)))
            name = f"t{task_graph}_accumulate" + ("_each" if is_sent else "") + ("" if home is None else f"_on{home}")
            bodies.append(Body(name, task_graph, ACCUMULATE, (), tuple(tensors), tuple(tensors), home=home))
    return program.with_calls(bodies, calls)


def chains(plan: Plan, task_graph: int, home: Optional[int] = None) -> List[List[Clone]]:
    """The clones whose gradients are added up one after the other: those of each replica or, at a variable's home, all of
    them."""
    replicas = [(g, r) for g in range(plan.num_model_replicas) for r in range(plan.task_graphs[task_graph].replica_count)]
    order = backward_order(plan, task_graph)
    if home is None:
        return [[Clone(g, m, r) for m in order] for g, r in replicas]
    return [[Clone(g, m, r) for m in order for g, r in replicas]]


def chains_of(plan: Plan, task_graph: int, home: Optional[int], is_sent: bool) -> List[List[Clone]]:
    """See :func:`chains`.  ``is_sent``: one chain for each micro-batch, whose sum is sent to the variable's owner."""
    found = chains(plan, task_graph, home)
    if not is_sent:
        return found
    chain, = found
    return [[clone for clone in chain if clone.m == m] for m in dict.fromkeys(clone.m for clone in chain)]


class Leaving(NamedTuple):
    """How a tensor of the clones leaves them.

    Attributes:
        synchronised: TaskGraphs whose copies get the value over all copies and processes.
        is_merged: whether anything reads the local script's value of the tensor.
        is_applied: whether an update depends on it, so that every step needs it.
    """

    synchronised: Tuple[int, ...]
    is_merged: bool
    is_applied: bool


def leaving(step: TrainingStep, plan: Plan) -> Dict[int, Leaving]:
    """The tensors of the clones that outside ops read, in the order of the graph."""
    found: Dict[int, Leaving] = {}
    at_home = find_homes(step, plan).tensors
    everywhere, twice = step.across.uses, step.across.twice
    for tensor, uses in step.region.leaving().items():
        if step.graph.tensors[tensor].dtype in UNSENT:
            continue
        targets: Set[int] = set()
        is_merged = False
        for op, position in uses:
            target = step.update.task_graph.get(op, ALL)
            if target != ALL and tensor not in at_home and _is_synchronised(step, plan, tensor, target):
                targets.add(target)
            elif op in twice:
                targets.add(step.task_graph_of(tensor))
                is_merged = True
            elif (op, position) in everywhere:
                targets.add(step.task_graph_of(tensor))
            else:
                is_merged = True
        is_applied = any(step.graph.ops[op].phase is Phase.APPLY for op, _ in uses)
        found[tensor] = Leaving(tuple(sorted(targets)), is_merged, is_applied)
    return found


def _is_synchronised(step: TrainingStep, plan: Plan, tensor: int, target: int) -> bool:
    """Whether each copy of a TaskGraph gets its own value, and not one that was merged for all."""
    layout, is_home = step.region.batch.layout(tensor), target == step.task_graph_of(tensor)
    if len(copies(plan, target)) > 1 or not is_home:
        return (layout.is_partial and is_home) or (layout.is_sharded and step.processes == 1)
    return False


def synchronise(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """Sums gradients over all copies of their TaskGraph, those of one bucket together.  Updates take the result."""
    found = leaving(step, plan)
    groups: List[Tuple[int, Tuple[int, ...]]] = []
    bucket_of = {tensor: bucket for bucket in _buckets(step, plan) for tensor in bucket}
    for tensor, how in found.items():
        for target in how.synchronised:
            group = (target, bucket_of.get(tensor, (tensor,)) if target == step.task_graph_of(tensor) else (tensor,))
            if group not in groups:
                groups.append(group)
    sources = _sources(program, plan, step)
    bodies: List[Body] = []
    calls: List[Call] = []
    made: Dict[Tuple[int, int], Tuple[int, ...]] = {}
    at_owner = find_owners(step, plan).gradients
    for target, tensors in groups:
        devices = tuple(d for row in plan.task_graphs[target].devices for d in row)
        if plan.task_graphs[target].variables == "shared":
            devices = devices[:1]
        parts = [(ALL, {tensor: sources[tensor] for tensor in tensors})]
        if at_owner.keys() >= set(tensors):  # each micro-batch separately
            order = backward_order(plan, target)
            parts = [(m, {tensor: (sources[tensor][place],) for tensor in tensors}) for place, m in enumerate(order)]
        for m, of in parts:
            for tensor in tensors:
                made[target, tensor] = made.get((target, tensor), ()) + (len(program.calls) + len(calls),)
            takes = tuple(Value(tensor, of[tensor]) for tensor in tensors)
            calls.append(Call(len(program.bodies) + len(bodies), Clone(ALL, m, ALL), devices, takes))
        bodies.append(Body(unique(f"t{target}_synchronise", bodies), target, SYNCHRONISE, (), tensors, tensors))
    at_home = find_homes(step, plan).tensors
    merges: Dict[Tuple[int, int], List[int]] = {}
    for tensor, how in found.items():
        if how.is_merged:
            merges.setdefault((step.task_graph_of(tensor), at_home.get(tensor, NO_HOME)), []).append(tensor)
    for (task_graph, home), merged in sorted(merges.items()):
        made.update({(ALL, tensor): (len(program.calls) + len(calls),) for tensor in merged})
        takes = tuple(Value(tensor, sources[tensor]) for tensor in merged)
        name, devices = f"t{task_graph}_merge", plan.task_graphs[task_graph].devices[0][:1]
        if home != NO_HOME:
            name, devices = f"{name}_on{home}", (home,)
        calls.append(Call(len(program.bodies) + len(bodies), Clone(ALL, ALL, ALL), devices, takes))
        bodies.append(Body(name, task_graph, MERGE, (), tuple(merged), tuple(merged), home=None if home == NO_HOME else home))

    def fed(call: Call) -> Call:
        body = program.bodies[call.body]
        if body.step != UPDATE:
            return call
        return call._replace(takes=tuple(
            Value(tensor, _makers(made, tensor, body.task_graph, step)) if tensor in found else Value(tensor, calls)
            for tensor, calls in call.takes))

    return program._replace(calls=tuple(map(fed, program.calls))).with_calls(bodies, calls)


def _makers(made: Mapping[Tuple[int, int], Tuple[int, ...]], tensor: int, target: int, step: TrainingStep) -> Tuple[int, ...]:
    """The calls whose values of a tensor the updates of a TaskGraph read; with several processes never one process's value."""
    keys = [(target, tensor)] * (target != ALL) + [(step.task_graph_of(tensor), tensor)] * (step.processes > 1) + [(ALL, tensor)]
    return next(made[key] for key in keys if key in made)


def _sources(program: Program, plan: Plan, step: TrainingStep) -> Dict[int, Tuple[int, ...]]:
    """Tensor -> the calls whose values are combined: those of all clones, or each replica's last sum."""
    found: Dict[int, Tuple[int, ...]] = {}
    at_owner = find_owners(step, plan).gradients
    number = {(call.body, call.clone): place for place, call in enumerate(program.calls)}
    before: Dict[Tuple[int, Clone], int] = {}  # (tensor, clone) -> the call that makes it
    for index, body in enumerate(program.bodies):
        if body.step in CLONED:
            before.update({(tensor, clone): number[index, clone] for tensor in body.outputs
                           for clone in clones(plan, body.task_graph)})
            found.update(dict.fromkeys(body.outputs, tuple(number[index, clone] for clone in clones(plan, body.task_graph))))
        elif body.step == SECTION:
            found.update(dict.fromkeys(body.outputs, (number[index, EVERY],)))
    for index, body in enumerate(program.bodies):
        if body.step == ACCUMULATE:
            is_sent = at_owner.keys() >= set(body.outputs)
            for tensor in body.outputs:
                ends = [chain[-1] for chain in chains_of(plan, body.task_graph, body.home, is_sent)]
                found[tensor] = tuple(number.get((index, end), before[tensor, end]) for end in ends)
    return found


def _buckets(step: TrainingStep, plan: Plan) -> List[Tuple[int, ...]]:
    """Gradient tensors that travel together according to the plan.

    Raises:
        PlanError: some of them cannot: a gradient is sparse or of unknown size, or their types differ.
    """
    graph = step.graph
    gradient_of = {graph.ops[variable].name: tensor for tensor, variable in step.gradients}
    named = [name for sync in plan.gradients for bucket in sync.buckets for name in bucket if name in gradient_of]
    tensors = {name: tensor for tensor, name in {gradient_of[name]: name for name in reversed(named)}.items()}
    found = []
    for sync in plan.gradients:
        for bucket in sync.buckets:
            names = [name for name in bucket if name in tensors]
            gradients = [tensors[name] for name in names]
            for tensor, name in zip(gradients, names):
                record = graph.tensors[tensor]
                dense = step.region.batch.layout(tensor).is_partial and record.shape is not None and None not in record.shape
                if len(gradients) > 1 and (not dense or record.dtype != graph.tensors[gradients[0]].dtype):
                    raise PlanError(
                        f"the gradient of {name!r} cannot travel in a bucket with {names[0]!r}: buckets hold dense "
                        "gradients of one type; give it a bucket of its own")
            found.append(tuple(gradients))
    return found


def compressed(step: TrainingStep, plan: Plan) -> FrozenSet[int]:
    """Gradient tensors that travel as float16 according to the plan."""
    names = {name for sync in plan.gradients if sync.fp16 for bucket in sync.buckets for name in bucket}
    return frozenset(tensor for tensor, variable in step.gradients if step.graph.ops[variable].name in names)
