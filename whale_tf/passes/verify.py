"""The properties that hold for a Program after each pass."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Set, Tuple

import networkx as nx

from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import combined_in, crossing
from whale_tf.passes.replicate import copies
from whale_tf.plan import Plan
from whale_tf.program import ACCUMULATE, ALL, BRIDGE, BROADCAST, CLONED, DIVIDE, UPDATE, WHOLE, Body, Program


class Pass(NamedTuple):
    """One step of the compilation.

    Attributes:
        requires: property of the program that the pass takes (a key of :data:`PROPERTIES`).
        ensures: property of the program that it returns.
    """

    name: str
    run: Callable[[Program, TrainingStep, Plan], Program]
    requires: str = ""
    ensures: str = ""


def verify(program: Program, step: TrainingStep, plan: Plan, done: Pass) -> None:
    """Check what a pass ensures, and what all passes before it ensure.

    Raises:
        AssertionError: something does not hold; the message lists everything.
    """
    for name, check in PROPERTIES.items():
        wrong = check(program, step, plan)
        if wrong:
            raise AssertionError(f"after pass {done.name!r}: " + "; ".join(wrong[:10]))
        if name == done.ensures:
            break


def _bodies(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    wrong: List[str] = []
    seen: Set[int] = set()
    for body in program.bodies:
        twice = seen.intersection(body.ops)
        wrong += [f"op {program.graph.ops[op].name!r} is in two bodies" for op in twice]
        seen.update(body.ops)
        own = {tensor for op in body.ops for tensor in program.graph.ops[op].outputs}
        if not body.is_recipe and not own.issuperset(body.outputs):
            wrong.append(f"{body.name} gives what it does not compute")
        if any(tensor not in body.inputs or place >= len(body.functions) for tensor, place in body.donated):
            wrong.append(f"{body.name} owns what it does not take")
    names = [body.name for body in program.bodies]
    wrong += [f"two bodies are called {name!r}" for name in set(names) if names.count(name) > 1]
    missing = set(step.region.batch_level).difference(seen, step.region.drawn_once)
    return wrong + [f"op {program.graph.ops[op].name!r} is in no body" for op in sorted(missing)]


def _calls(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    wrong: List[str] = []
    places: Dict[Tuple, int] = {}
    read, given = [set(body.inputs) for body in program.bodies], [set(body.outputs) for body in program.bodies]
    for number, call in enumerate(program.calls):
        body = program.bodies[call.body]
        if places.setdefault((call.body, call.clone), number) != number:
            wrong.append(f"{body.name} is called twice at {call.clone}")
        known = plan.hosts.stop if plan.offload != "none" else plan.num_devices
        if any(not 0 <= device < known for device in call.devices):
            wrong.append(f"#{number} is on unknown devices {call.devices}")
        for value in call.takes:
            if value.tensor not in read[call.body]:
                wrong.append(f"#{number} takes {program.graph.tensor_name(value.tensor)}, which {body.name} does not read")
            for source in value.calls:
                if not 0 <= source < len(program.calls):
                    wrong.append(f"#{number} takes from #{source}, which is no call")
                elif value.tensor not in given[program.calls[source].body]:
                    name = program.graph.tensor_name(value.tensor)
                    wrong.append(f"#{number} takes {name} from #{source}, which does not give it")
    for body in program.bodies:
        if body.step == UPDATE and body.task_graph != ALL:
            count = sum(1 for call in program.calls if program.bodies[call.body] is body)
            if count != len(copies(plan, body.task_graph)):
                wrong.append(f"{body.name} updates {count} of {len(copies(plan, body.task_graph))} copies")
    return wrong


def _divided(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    return _takers(program, lambda body, tensor: tensor in step.sources and body.step in CLONED, DIVIDE)


def _bridged(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    through = {(program.bodies[reader].name, tensor) for reader, tensor in crossing(program, step, plan)}
    return _takers(program, lambda body, tensor: (body.name, tensor) in through, BRIDGE)


def _whole(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    combined = combined_in(program, step)
    wrong = []
    tensors: Dict[int, List[int]] = {}
    for body, tensor in combined:
        tensors.setdefault(body, []).append(tensor)
    for number, call in enumerate(program.calls):
        for tensor in tensors.get(call.body, ()):
            sources = (program.calls[value.calls[0]] for value in call.takes if value.tensor == tensor)
            if not any(program.step_of(source) == WHOLE for source in sources):
                wrong.append(f"#{number} takes no value of the whole mini-batch of {program.graph.tensor_name(tensor)}")
    return wrong


def _accumulated(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    return [f"#{number} adds {len(value.calls)} values" for number, call in enumerate(program.calls)
            if program.step_of(call) == ACCUMULATE for value in call.takes if len(value.calls) != 2]


def _synchronised(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    wrong = []
    for number, call in enumerate(program.calls):
        for value in call.takes if program.step_of(call) == UPDATE else ():
            source = program.bodies[program.calls[value.calls[0]].body]
            if source.step in CLONED + (ACCUMULATE,):
                wrong.append(f"#{number} takes one clone's {program.graph.tensor_name(value.tensor)} from {source.name}")
    return wrong


def _sent(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    """Checks that values which another process computes, or which others read too, come from a message."""
    sent = {tensor for body in program.bodies if body.step == BROADCAST for tensor in body.outputs}
    wrong = []
    for number, call in enumerate(program.calls):
        body, taken = program.bodies[call.body], {value.tensor: value.calls for value in call.takes}
        for tensor in sent.intersection(body.inputs) if body.step == UPDATE else ():
            if {program.step_of(program.calls[source]) for source in taken.get(tensor, ())} != {BROADCAST}:
                wrong.append(f"#{number} takes {program.graph.tensor_name(tensor)} from no broadcast")
    return wrong


def _ordered(program: Program, step: TrainingStep, plan: Plan) -> List[str]:
    waits = nx.DiGraph()
    for number, call in enumerate(program.calls):
        waits.add_edges_from((before, number) for before in call.after)
    return [] if nx.is_directed_acyclic_graph(waits) else ["calls wait for each other"]


def _takers(program: Program, applies: Callable[[Body, int], bool], kind: str) -> List[str]:
    """Calls that read a tensor from a call of the wrong kind, although only calls of one kind may provide it."""
    wrong = []
    asked = [[tensor for tensor in body.inputs if applies(body, tensor)] for body in program.bodies]
    for number, call in enumerate(program.calls):
        if asked[call.body]:
            sources = {value.tensor: value.calls for value in call.takes}
            for tensor in asked[call.body]:
                if not any(program.step_of(program.calls[source]) in (kind, WHOLE) for source in sources.get(tensor, ())):
                    wrong.append(f"#{number} takes {program.graph.tensor_name(tensor)} from no {kind}")
    return wrong


PROPERTIES: Dict[str, Callable[[Program, TrainingStep, Plan], List[str]]] = {
    "bodies": _bodies,
    "calls": _calls,
    "divided": _divided,
    "bridged": _bridged,
    "whole": _whole,
    "accumulated": _accumulated,
    "synchronised": _synchronised,
    "sent": _sent,
    "ordered": _ordered,
}
