"""Calls into the order of each replica's schedule (``whale_tf.schedule``).

A step waits for the last step before it of another micro-batch, and for the gradients of that step to be added up.  Data edges
put the forward and the backward step of one micro-batch in order, so no edge is needed between these::

    F0 ──> F1 ──> B0 ──> F2 ──> B1 ...        (backward first, two forwards ahead)

Early calls are not ordered: they run ahead of the schedule.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import networkx as nx

from whale_tf.errors import PlanError
from whale_tf.ir.training_step import TrainingStep
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    BACKWARD,
    BRIDGE,
    DIVIDE,
    EARLY,
    FORWARD,
    MERGE,
    ONCE,
    SECTION,
    SYNCHRONISE,
    UPDATE,
    WHOLE,
    Program,
)
from whale_tf.schedule import Step, schedule

BEFORE = (DIVIDE, ONCE, EARLY, WHOLE, SECTION)
SCHEDULED, AFTER = (BRIDGE, FORWARD, BACKWARD, ACCUMULATE), (SYNCHRONISE, MERGE, UPDATE)


def order_calls(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The same calls, those of one replica in the order of its schedule, each after the one the schedule puts before it.

    Raises:
        PlanError: the steps would wait for each other.
    """
    orders = [_order(program, plan, task_graph) for task_graph in range(len(plan.task_graphs))]
    if plan.num_micro_batch > 1:
        _check_acyclic(program, plan, orders)
        program = _waiting(program, orders)
    return program.in_order(_sequence(program, orders))


def _waiting(program: Program, orders: Sequence[Sequence[Step]]) -> Program:
    """Each call after those that the schedule puts before it."""
    place: Dict[Tuple[int, str, int, int, int], int] = {}
    for number, call in enumerate(program.calls):
        body = program.bodies[call.body]
        place[(body.task_graph, body.step) + call.clone] = number
    before = [{following: first for first, following in pairs(order)} for order in orders]
    calls = []
    for call in program.calls:
        body, (g, m, r) = program.bodies[call.body], call.clone
        after: List[int] = []
        if body.step in (FORWARD, BACKWARD) and Step(body.step, m) in before[body.task_graph]:
            first = before[body.task_graph][Step(body.step, m)]
            kinds = [first.kind, ACCUMULATE] if first.kind == BACKWARD else [first.kind]
            keys = [(body.task_graph, kind, g, first.micro_batch, r) for kind in kinds]
            after = [place[key] for key in keys if key in place]
        calls.append(call._replace(after=tuple(after)))
    return program._replace(calls=tuple(calls))


def _sequence(program: Program, orders: Sequence[Sequence[Step]]) -> List[int]:
    """Call numbers: what comes before the schedule, each replica's schedule with its bridges and sums, what comes after."""
    places = [{step: place for place, step in enumerate(order)} for order in orders]
    is_pipeline = any(order[0].micro_batch != order[-1].micro_batch for order in orders if order)
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
        step = BACKWARD if body.step == ACCUMULATE else program.step_of(reader)
        place = places[body.task_graph].get(Step(step, call.clone.m), -1)
        where = (call.clone.g, call.clone.r, place) if is_pipeline else (place, call.clone.g, call.clone.r)
        return (1, body.task_graph, *where, rank(body.step), number)

    return sorted(range(len(program.calls)), key=key)


def backward_order(plan: Plan, task_graph: int) -> List[int]:
    """Micro-batches in the order in which a TaskGraph's gradients become ready."""
    warmup = plan.task_graphs[task_graph].warmup
    steps = schedule(plan.schedule, task_graph, len(plan.task_graphs), plan.num_micro_batch, warmup)
    return [step.micro_batch for step in steps if step.kind == BACKWARD]


def pairs(order: Sequence[Step]) -> List[Tuple[Step, Step]]:
    """(step, next step) of different micro-batches; a step after its own micro-batch's waits for the one before that."""
    found = []
    for i, after in enumerate(order):
        for before in reversed(order[:i]):
            if before.micro_batch != after.micro_batch:
                found.append((before, after))
                break
    return found


def _order(program: Program, plan: Plan, task_graph: int) -> List[Step]:
    """A stage's steps, without those it has no ops in."""
    warmup = plan.task_graphs[task_graph].warmup
    steps = schedule(plan.schedule, task_graph, len(plan.task_graphs), plan.num_micro_batch, warmup)
    return [step for step in steps if program.body(task_graph, step.kind) is not None]


def _check_acyclic(program: Program, plan: Plan, orders: Sequence[Sequence[Step]]) -> None:
    """Refuse a schedule that would wait for itself (gradients of gradients that cross stages back and forth).

    Steps of one micro-batch that depend on each other both ways count as one.
    """
    data = body_graph(program)
    group = {body: number for number, component in enumerate(nx.strongly_connected_components(data)) for body in component}
    whole = nx.DiGraph()
    for m in range(plan.num_micro_batch):
        whole.add_edges_from(((group[a], m), (group[b], m)) for a, b in data.edges if group[a] != group[b])
    number = {(body.task_graph, body.step): index for index, body in enumerate(program.bodies)}
    for task_graph, order in enumerate(orders):
        for step, following in pairs(order):
            whole.add_edge((group[number[task_graph, step.kind]], step.micro_batch),
                           (group[number[task_graph, following.kind]], following.micro_batch))
    if not nx.is_directed_acyclic_graph(whole):
        raise PlanError(
            f"schedule {plan.schedule!r} cannot order this graph: its stages wait for each other's gradients within a "
            "micro-batch (gradients of gradients across TaskGraphs); use pipeline.schedule = 'gpipe', one micro-batch, or one "
            "TaskGraph for the part that is differentiated twice"
        )


def body_graph(program: Program, steps: Sequence[str] = (FORWARD, BACKWARD)) -> nx.DiGraph:
    """Bodies of some steps, and an edge from each to those that wait for an op of it, by data or control.  The schedule leaves
    early bodies out: a value over all clones comes between them and the others."""
    body_of = {op: number for op, number in program.body_of().items() if program.bodies[number].step in steps}
    result = nx.DiGraph()
    result.add_nodes_from(set(body_of.values()))
    for op, number in body_of.items():
        for before in program.graph.predecessors(program.graph.ops[op]):
            if body_of.get(before, number) != number:
                result.add_edge(body_of[before], number)
    return result
