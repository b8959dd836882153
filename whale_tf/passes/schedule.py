"""Puts calls into the order of each replica's schedule (``whale_tf.schedule``).

There is one order for each device, over all TaskGraphs that it runs.  A step waits for the last preceding step of another
micro-batch, and for the gradients of that step to be added up.  Data edges order the forward and the backward steps of one
micro-batch, so no edge is needed between these, unless the backward step recomputes what it reads, or gradients of weights are
separate: it could end, and variables be updated, before the forward step has read them (a score whose gradient does not depend on
its value).  Gradients of weights, if separate, wait for whatever step comes before::

    F0 ──> F1 ──> B0 ──> F2 ──> B1 ...               (backward first, two forwards ahead)
    F0 ──> F1 ──> B0 ──> W0 ──> F2 ──> B1 ...        (zero bubble)

Early calls are not ordered: they run ahead of the schedule.
"""

from __future__ import annotations

from typing import AbstractSet, Dict, List, Sequence, Tuple

import networkx as nx

from whale_tf.errors import PlanError
from whale_tf.ir.training_step import TrainingStep
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    BACKWARD,
    BRIDGE,
    BROADCAST,
    DIVIDE,
    EARLY,
    FORWARD,
    GATHER,
    MERGE,
    ONCE,
    SECTION,
    SYNCHRONISE,
    UPDATE,
    WEIGHT,
    WHOLE,
    Program,
)
from whale_tf.schedule import Step, in_flight, orders, positions_of, schedule_of

BEFORE = (GATHER, DIVIDE, ONCE, EARLY, WHOLE, SECTION)
STEPS = (FORWARD, BACKWARD, WEIGHT)
SCHEDULED, AFTER = (BRIDGE, *STEPS, ACCUMULATE), (SYNCHRONISE, MERGE, UPDATE, BROADCAST)


def order_calls(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The same calls, with those of one replica in the order of its schedule, each after its predecessor in the schedule.

    Raises:
        PlanError: the steps would wait for each other.
    """
    found = [[step for step in order if program.body(step.task_graph, step.kind) is not None] for order in orders_of(plan)]
    splits = schedule_of(plan.schedule).splits
    early = {number for number, task in enumerate(plan.task_graphs) if splits or task.kept is not None}
    _check_acyclic(program, plan, found)
    program = _waiting(program, found, early)
    return program.in_order(_sequence(program, found, plan.num_micro_batch > 1))


def orders_of(plan: Plan) -> List[Sequence[Step]]:
    """The steps of each device, or of each TaskGraph's devices, in order.  A TaskGraph that holds the batch part of another one
    has the order of that TaskGraph."""
    whole = [task for task in plan.task_graphs if task.batch_of is None]
    positions = positions_of([task.devices for task in whole]) if schedule_of(plan.schedule).folding else None
    found: List[Sequence[Step]] = list(orders(plan.schedule, plan.num_micro_batch, [task.warmup for task in whole], positions))
    for number, task in enumerate(plan.task_graphs):
        if task.batch_of is not None:
            order = next(order for order in found if any(step.task_graph == task.batch_of for step in order))
            found.append([step._replace(task_graph=number) for step in order if step.task_graph == task.batch_of])
    return found


def held(plan: Plan) -> Tuple[int, ...]:
    """For each TaskGraph, the largest number of micro-batches whose activations it holds."""
    return in_flight(orders_of(plan), len(plan.task_graphs))


def _waiting(program: Program, found: Sequence[Sequence[Step]], early: AbstractSet[int]) -> Program:
    """Puts each call after its predecessors in the schedule."""
    places: Dict[Tuple[int, str, int, int, int], List[int]] = {}
    for number, call in enumerate(program.calls):
        body = program.bodies[call.body]
        places.setdefault((body.task_graph, body.step) + call.clone, []).append(number)
        for source in call.takes[0].calls if body.step == ACCUMULATE else ():  # the first replica's gradients, at home
            of, m = program.step_of(program.calls[source]), program.calls[source].clone.m
            if of in (BACKWARD, WEIGHT) and m == call.clone.m and program.calls[source].clone != call.clone:
                places.setdefault((body.task_graph, body.step) + program.calls[source].clone, []).append(number)
    before = {following: first for order in found for first, following in pairs(order, early)}
    calls = []
    for call in program.calls:
        body, (g, m, r) = program.bodies[call.body], call.clone
        first = before.get(Step(body.step, m, body.task_graph))
        after: List[int] = []
        if first is not None:
            last = BACKWARD if program.body(first.task_graph, WEIGHT) is None else WEIGHT
            kinds = [first.kind, ACCUMULATE] if first.kind == last else [first.kind]
            keys = [(first.task_graph, kind, g, first.micro_batch, r) for kind in kinds]
            after = [place for key in keys for place in places.get(key, ())]
        calls.append(call._replace(after=call.after + tuple(after)))
    return program._replace(calls=tuple(calls))


def _sequence(program: Program, found: Sequence[Sequence[Step]], is_pipeline: bool) -> List[int]:
    """Call numbers in order: calls before the schedule, each replica's schedule with its bridges and sums, calls after it.

    Args:
        is_pipeline: whether to list one replica after the other, rather than one step after the other.
    """
    places = {step: (number, place) for number, order in enumerate(found) for place, step in enumerate(order)}
    first = {step.task_graph: (number, -1) for step, (number, _) in places.items()}
    readers: Dict[int, int] = {}
    for number, call in enumerate(program.calls):
        for value in call.takes:
            for source in value.calls:
                readers.setdefault(source, number)

    def key(number: int) -> Tuple[int, ...]:
        call = program.calls[number]
        body, rank = program.bodies[call.body], SCHEDULED.index
        if body.step in BEFORE:
            return 0, BEFORE.index(body.step), number
        if body.step in AFTER:
            return 2, AFTER.index(body.step), number
        reader = program.calls[readers.get(number, number)] if body.step == BRIDGE else call
        kinds = (WEIGHT, BACKWARD) if body.step == ACCUMULATE else (program.step_of(reader),)
        steps = [Step(kind, call.clone.m, body.task_graph) for kind in kinds]
        order, place = next((places[step] for step in steps if step in places), first.get(body.task_graph, (body.task_graph, -1)))
        where = (call.clone.g, call.clone.r, place) if is_pipeline else (place, call.clone.g, call.clone.r)
        return (1, order, *where, rank(body.step), number)

    return sorted(range(len(program.calls)), key=key)


def backward_order(plan: Plan, task_graph: int) -> List[int]:
    """Micro-batches in the order in which a TaskGraph's gradients become ready."""
    kind = WEIGHT if schedule_of(plan.schedule).splits else BACKWARD
    return [step.micro_batch for order in orders_of(plan) for step in order if (step.kind, step.task_graph) == (kind, task_graph)]


def pairs(order: Sequence[Step], early: AbstractSet[int] = frozenset()) -> List[Tuple[Step, Step]]:
    """Pairs (step, next step).  The first is the preceding step or, if that has the same micro-batch and so is ordered by data,
    the one before it.

    Args:
        early: TaskGraphs whose backward steps data need not order behind their own forward steps.
    """
    found = []
    for i, after in enumerate(order):
        for before in reversed(order[:i]):
            by_data = before.micro_batch == after.micro_batch and WEIGHT not in (before.kind, after.kind)
            is_own = (before.kind, after.kind) == (FORWARD, BACKWARD) and before.task_graph == after.task_graph
            if not by_data or (is_own and after.task_graph in early):
                found.append((before, after))
                break
    return found


def _check_acyclic(program: Program, plan: Plan, found: Sequence[Sequence[Step]]) -> None:
    """Refuse a schedule that would wait for itself (gradients of gradients that cross stages back and forth).

    Steps of one micro-batch that depend on each other both ways count as one.
    """
    data = body_graph(program)
    group = {body: number for number, component in enumerate(nx.strongly_connected_components(data)) for body in component}
    whole = nx.DiGraph()
    for m in range(plan.num_micro_batch):
        whole.add_edges_from(((group[a], m), (group[b], m)) for a, b in data.edges if group[a] != group[b])
    number = {(body.task_graph, body.step): index for index, body in enumerate(program.bodies)}
    for order in found:
        for step, following in pairs(order):
            whole.add_edge((group[number[step.task_graph, step.kind]], step.micro_batch),
                           (group[number[following.task_graph, following.kind]], following.micro_batch))
    if not nx.is_directed_acyclic_graph(whole):
        raise PlanError(
            f"schedule {plan.schedule!r} cannot order this graph: its stages wait for each other's gradients within a "
            "micro-batch (gradients of gradients across TaskGraphs); use pipeline.schedule = 'gpipe', one micro-batch, or one "
            "TaskGraph for the part that is differentiated twice"
        )


def body_graph(program: Program, steps: Sequence[str] = STEPS) -> nx.DiGraph:
    """Bodies of some steps, with an edge from each to the bodies that wait for one of its ops, by data or control.  The schedule
    leaves out early bodies, because a value over all clones comes between them and the others."""
    body_of = {op: number for op, number in program.body_of().items() if program.bodies[number].step in steps}
    result = nx.DiGraph()
    result.add_nodes_from(set(body_of.values()))
    for op, number in body_of.items():
        for before in program.graph.predecessors(program.graph.ops[op]):
            if body_of.get(before, number) != number:
                result.add_edge(body_of[before], number)
    return result
