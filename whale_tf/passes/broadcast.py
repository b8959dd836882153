"""Makes calls of the messages that an owner sends to the other processes (:mod:`whale_tf.passes.owners`).

::

    process 0    t0_merge ──> t0_update_on0 ──> t0_broadcast            the new values of all variables at home on device 0
    process 1                                   t0_broadcast            the same message, which depends on nothing here

Under v3 the values of variables are gathered before the calls that read them::

    process 0    t0_gather ──> t0_once_on0 ──> t0_forward
    process 1    t0_gather ──> t0_once_on0 ──> t0_forward

All processes have every message, in the same order.  Readers of a sent tensor take it from the message's call, except for the
owner's update.
"""

from __future__ import annotations

from typing import Dict, List

from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import unique
from whale_tf.passes.owners import LATE, VALUES, Message, find_owners
from whale_tf.plan import Plan
from whale_tf.program import BROADCAST, EVERY, GATHER, UPDATE, Body, Call, Program, Value


def broadcast(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """A body and a call for each message."""
    graph, owners = step.graph, find_owners(step, plan)
    writes = owners.writes(graph) if owners.messages else {}
    number = {op: place for place, call in enumerate(program.calls) for op in program.bodies[call.body].ops
              if program.step_of(call) == UPDATE}
    bodies: List[Body] = []
    calls: List[Call] = []
    made: Dict[int, int] = {}  # tensor -> the call from which updates take it
    gathered: Dict[int, int] = {}  # handle or reference -> the call from which others take the variable's value

    def written(message: Message) -> List[int]:
        found = [writes[variable] for variable in message.variables]
        ops = [op for one in found for op in (one.late if message.kind == LATE else one.value + one.state)]
        return sorted({number[op] for op in ops if op in number})

    for message in owners.messages:
        home, kind, reads, gives = plan.here(message.home), BROADCAST, message.reads(graph), message.tensors
        takes = tuple(Value(tensor, (number[graph.tensors[tensor].op],)) for tensor in message.tensors
                      if graph.tensors[tensor].op in number)
        after = tuple(written(message))
        if message.kind == VALUES:
            kind, after, gives = GATHER, (), reads
            reads = reads if plan.process_of(message.home) == owners.rank else ()
        given = gathered if kind == GATHER else made
        given.update(dict.fromkeys(gives, len(program.calls) + len(calls)))
        calls.append(Call(len(program.bodies) + len(bodies), EVERY, (home,), takes, after))
        name = unique(f"t{message.task_graph}_{kind}", bodies)
        bodies.append(Body(name, message.task_graph, kind, (), reads, gives, home=home))

    def fed(call: Call) -> Call:
        body = program.bodies[call.body]
        given = made if body.step == UPDATE else gathered
        sent = [tensor for tensor in body.inputs if tensor in given]
        if not sent:
            return call
        kept = tuple(value for value in call.takes if value.tensor not in given)
        return call._replace(takes=kept + tuple(Value(tensor, (given[tensor],)) for tensor in sent))

    own = {tensor for tensor in made if graph.tensors[tensor].op in number}

    def giving(body: Body) -> Body:
        """What is sent leaves its body, even where all that reads it here is in the same one."""
        more = [tensor for op in body.ops for tensor in graph.ops[op].outputs if tensor in own and tensor not in body.outputs]
        return body._replace(outputs=body.outputs + tuple(more))

    program = program._replace(bodies=tuple(map(giving, program.bodies)), calls=tuple(map(fed, program.calls)))
    return program.with_calls(bodies, calls)
