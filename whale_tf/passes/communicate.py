"""Brings values to the clones: parts of a mini-batch, values through bridges, and values of the whole mini-batch."""

from __future__ import annotations

from typing import Dict, List, Sequence, Set, Tuple

from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.replicate import clones, is_bridged
from whale_tf.plan import Plan
from whale_tf.program import ALL, BRIDGE, CLONED, DIVIDE, WHOLE, Body, Call, Clone, Program, Value

MICRO = "micro"  # nested_batch: micro-batches take mini-batches of their own from the input pipeline


def divide(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """Gives every clone its part of a mini-batch: one that all model replicas divide, or one that its model replica, or its
    micro-batch, took from the input pipeline."""
    own, each = takes_own(step, plan), pulls_each(plan)
    taken = [(g, m if each > 1 else ALL) for g in range(plan.num_model_replicas) for m in range(each)] if own else [(ALL, ALL)]
    bodies: List[Body] = []
    calls: List[Call] = []
    number: Dict[Tuple[int, Tuple[int, int]], int] = {}  # (TaskGraph, mini-batch) -> call
    for task_graph in range(len(plan.task_graphs)):
        readers = [body for body in program.bodies if body.task_graph == task_graph and body.step in CLONED]
        sources = tuple(sorted({t for body in readers for t in body.inputs if t in step.sources}))
        for g, m in taken if sources else ():
            number[task_graph, (g, m)] = len(program.calls) + len(calls)
            calls.append(Call(len(program.bodies) + len(bodies), Clone(g, m, ALL), ()))
        if sources:
            bodies.append(Body(f"t{task_graph}_divide", task_graph, DIVIDE, (), sources, sources))

    def fed(call: Call) -> Call:
        body = program.bodies[call.body]
        if body.step not in CLONED:
            return call
        place = (call.clone.g if own else ALL, call.clone.m if own and each > 1 else ALL)
        parts = [Value(t, (number[body.task_graph, place],)) for t in body.inputs if t in step.sources]
        return call._replace(takes=(*parts, *call.takes))

    return program._replace(calls=tuple(map(fed, program.calls))).with_calls(bodies, calls)


def takes_own(step: TrainingStep, plan: Plan) -> bool:
    """Whether every model replica, or every micro-batch of it, takes its own mini-batch from the input pipeline."""
    return plan.num_model_replicas * pulls_each(plan) > 1 and plan.nested_batch != "divide" and step.is_pulled


def pulls_each(plan: Plan) -> int:
    """Mini-batches of a model replica that takes its own."""
    return plan.num_micro_batch if plan.nested_batch == MICRO else 1


def dividing(step: TrainingStep, plan: Plan) -> float:
    """The model replicas that divide one mini-batch; a fraction if each micro-batch of one takes its own."""
    return 1 / pulls_each(plan) if takes_own(step, plan) else plan.num_model_replicas


def bridge(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """Adds bridges between TaskGraphs that cut a micro-batch at different places.  A bridge makes the parts that the consumer's
    clones read."""
    through = crossing(program, step, plan)
    numbers: Dict[Tuple[int, int], int] = {}  # (producing body, consumer) -> body of the bridge
    tensors: Dict[Tuple[int, int], Set[int]] = {}
    for (reader, tensor), source in through.items():
        key = source, program.bodies[reader].task_graph
        numbers.setdefault(key, len(program.bodies) + len(numbers))
        tensors.setdefault(key, set()).add(tensor)
    bodies = [Body(f"{program.bodies[source].name}_to_t{consumer}", consumer, BRIDGE, (),
                   tuple(sorted(tensors[source, consumer])), tuple(sorted(tensors[source, consumer])))
              for source, consumer in numbers]
    bridges: Dict[Tuple[int, Clone], int] = {}
    taken: Dict[int, Dict[int, Value]] = {}  # call of a bridge -> the values it takes
    calls: List[Call] = []
    changed = []
    for call in program.calls:
        body = program.bodies[call.body]
        values = {value.tensor: value for value in call.takes}
        for tensor in body.inputs:
            if (call.body, tensor) in through:
                number = numbers[through[call.body, tensor], body.task_graph]
                if (number, call.clone) not in bridges:
                    bridges[number, call.clone] = len(program.calls) + len(calls)
                    calls.append(Call(number, call.clone, call.devices))
                place = bridges[number, call.clone]
                taken.setdefault(place - len(program.calls), {}).update({tensor: values[tensor]} if tensor in values else {})
                values[tensor] = Value(tensor, (place,))
        changed.append(call._replace(takes=tuple(values.values())))
    calls = [call._replace(takes=tuple(taken.get(place, {}).values())) for place, call in enumerate(calls)]
    return program._replace(calls=tuple(changed)).with_calls(bodies, calls)


def crossing(program: Program, step: TrainingStep, plan: Plan) -> Dict[Tuple[int, int], int]:
    """(body, tensor) that a body reads through a bridge -> the body that computes the tensor."""
    body_of, combined = program.body_of(), combined_in(program, step)
    found: Dict[Tuple[int, int], int] = {}
    for number, body in enumerate(program.bodies):
        for tensor in body.inputs if body.step in CLONED else ():
            source = body_of.get(step.graph.tensors[tensor].op)
            if source is not None and program.bodies[source].step in CLONED and combined.get((number, tensor), True) \
                    and is_bridged(plan, program.bodies[source].task_graph, body.task_graph):
                found[number, tensor] = source
    return found


def whole(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """Combines all clones' values for ops that need the value of the whole mini-batch."""
    body_of = program.body_of()
    readers = combined_in(program, step)
    number = {(call.body, call.clone): place for place, call in enumerate(program.calls)}
    bodies: List[Body] = []
    calls: List[Call] = []
    made: Dict[int, int] = {}
    for tensor in sorted({tensor for _, tensor in readers}):
        source = body_of[step.graph.tensors[tensor].op]
        task_graph = program.bodies[source].task_graph
        made[tensor] = len(program.calls) + len(calls)
        value = Value(tensor, tuple(number[source, clone] for clone in clones(plan, task_graph)))
        first = plan.task_graphs[task_graph].devices[0][:1]
        calls.append(Call(len(program.bodies) + len(bodies), Clone(ALL, ALL, ALL), first, (value,)))
        bodies.append(Body(unique(f"t{task_graph}_whole", bodies), task_graph, WHOLE, (), (tensor,), (tensor,)))

    def fed(call: Call) -> Call:
        found = tuple(Value(tensor, (made[tensor],)) for body, tensor in readers if body == call.body)
        plain = {tensor for tensor in program.bodies[call.body].inputs if readers.get((call.body, tensor), True)}
        return call._replace(takes=tuple(value for value in call.takes if value.tensor in plain) + found)

    return program._replace(calls=tuple(map(fed, program.calls))).with_calls(bodies, calls)


def combined_in(program: Program, step: TrainingStep) -> Dict[Tuple[int, int], bool]:
    """(body, tensor) if the body reads the value of all clones together -> whether it also reads the clone's own value."""
    combined = step.region.batch.combined()
    runs = {number: frozenset(body.runs) for number, body in enumerate(program.bodies) if body.functions}  # none, if all are dead
    body_of = {op: body for op, body in program.body_of().items() if body not in runs or op in runs[body]}
    found = {(body_of[op], step.graph.ops[op].inputs[position]): False for op, position in combined if op in body_of}
    for tensor in {tensor for _, tensor in found}:
        for op, position in step.graph.consumers(tensor):
            if (body_of.get(op, -1), tensor) in found and (op, position) not in combined:
                found[body_of[op], tensor] = True
    return found


def unique(name: str, bodies: Sequence[Body]) -> str:
    """A name for an additional body, numbered from the second one on."""
    count = sum(body.name == name or body.name.startswith(name + "_") for body in bodies)
    return f"{name}_{count}" if count else name
