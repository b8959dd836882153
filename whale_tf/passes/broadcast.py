"""Makes calls of the messages that an owner sends to the other processes (:mod:`whale_tf.passes.owners`).

::

    process 0    t0_merge ──> t0_update_on0 ──> t0_broadcast            the new values of all variables at home on device 0
    process 1                                   t0_broadcast            the same message, which depends on nothing here

All processes have every message, in the same order.  Readers of a sent tensor take it from the message's call, except for the
owner's update.
"""

from __future__ import annotations

from typing import Dict, List

from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import unique
from whale_tf.passes.owners import Message, find_owners
from whale_tf.plan import Plan
from whale_tf.program import BROADCAST, EVERY, UPDATE, Body, Call, Program, Value


def broadcast(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """A body and a call for each message."""
    graph, owners = step.graph, find_owners(step, plan)
    writes = owners.writes(graph) if owners.messages else {}
    number = {op: place for place, call in enumerate(program.calls) for op in program.bodies[call.body].ops
              if program.step_of(call) == UPDATE}
    bodies: List[Body] = []
    calls: List[Call] = []
    made: Dict[int, int] = {}  # tensor -> the call from which others take it

    def written(message: Message) -> List[int]:
        found = [writes[variable] for variable in message.variables]
        ops = [op for one in found for op in (one.late if message.is_late else one.value + one.state)]
        return sorted({number[op] for op in ops if op in number})

    for message in owners.messages:
        made.update(dict.fromkeys(message.tensors, len(program.calls) + len(calls)))
        takes = tuple(Value(tensor, (number[graph.tensors[tensor].op],)) for tensor in message.tensors
                      if graph.tensors[tensor].op in number)
        home = plan.here(message.home)
        calls.append(Call(len(program.bodies) + len(bodies), EVERY, (home,), takes, tuple(written(message))))
        name = unique(f"t{message.task_graph}_broadcast", bodies)
        bodies.append(Body(name, message.task_graph, BROADCAST, (), message.reads(graph), message.tensors, home=home))

    def fed(call: Call) -> Call:
        body = program.bodies[call.body]
        sent = [tensor for tensor in body.inputs if tensor in made]
        if body.step != UPDATE or not sent:
            return call
        kept = tuple(value for value in call.takes if value.tensor not in made)
        return call._replace(takes=kept + tuple(Value(tensor, (made[tensor],)) for tensor in sent))

    return program._replace(calls=tuple(map(fed, program.calls))).with_calls(bodies, calls)
