"""Calls into the order of each replica's schedule (``whale_tf.schedule``).

A step waits for the last step before it of another micro-batch.  Data edges put the forward and the backward step of one
micro-batch in order, so no edge is needed between these::

    F0 ──> F1 ──> B0 ──> F2 ──> B1 ...        (backward first, two forwards ahead)

Early calls are not ordered: they run ahead of the schedule.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import networkx as nx

from whale_tf.errors import PlanError
from whale_tf.plan import Plan
from whale_tf.program import BACKWARD, FORWARD, Call, Clone, Program
from whale_tf.schedule import Step, schedule


def order_calls(program: Program, plan: Plan) -> Program:
    """The same calls, those of one replica in the order of its schedule, each after the one the schedule puts before it.

    Raises:
        PlanError: the steps would wait for each other.
    """
    if plan.num_micro_batch == 1:
        return program
    orders = [_order(program, plan, task_graph) for task_graph in range(len(plan.task_graphs))]
    _check_acyclic(program, plan, orders)
    bodies = [(body.task_graph, body.step) for body in program.bodies]
    old = {(*bodies[call.body], call.clone): number for number, call in enumerate(program.calls)}
    before: Dict[int, int] = {}
    sequence: List[int] = [number for number, call in enumerate(program.calls) if not _is_ordered(program, call)]
    for task_graph, order in enumerate(orders):
        for g in range(plan.num_model_replicas):
            for r in range(plan.task_graphs[task_graph].replica_count):
                call_of = {step: old[task_graph, step.kind, Clone(g, step.micro_batch, r)] for step in order}
                sequence += [call_of[step] for step in order]
                before.update({call_of[after]: call_of[first] for first, after in pairs(order)})
    new = {number: place for place, number in enumerate(sequence)}
    calls = []
    for number in sequence:
        call = program.calls[number]
        takes = tuple(value._replace(calls=tuple(new[source] for source in value.calls)) for value in call.takes)
        calls.append(call._replace(takes=takes, after=(new[before[number]],) if number in before else ()))
    return program._replace(calls=tuple(calls))


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


def _is_ordered(program: Program, call: Call) -> bool:
    return program.bodies[call.body].step in (FORWARD, BACKWARD)


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


def body_graph(program: Program) -> nx.DiGraph:
    """Bodies, and an edge from each to those that wait for an op of it, by data or control.  Early bodies are left out: a value
    over all clones comes between them and the others."""
    body_of = {op: number for op, number in program.body_of().items() if program.bodies[number].step in (FORWARD, BACKWARD)}
    result = nx.DiGraph()
    result.add_nodes_from(set(body_of.values()))
    for op, number in body_of.items():
        for before in program.graph.predecessors(program.graph.ops[op]):
            if body_of.get(before, number) != number:
                result.add_edge(body_of[before], number)
    return result
