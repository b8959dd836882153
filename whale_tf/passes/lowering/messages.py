"""Messages about variables that one process updates for all (:mod:`whale_tf.passes.owners`), as primitives.

::

    gather       owner     READ ──> PACK ──> BROADCAST ··> IDENTITY          what the owner reads, once it has sent the same
                           └───────────────────────────────┘
                 others                      BROADCAST ──> UNPACK

    broadcast    owner     READ ──> PACK ──> BROADCAST                       READ waits for the updates
                 others                      BROADCAST ──> UNPACK ──> ASSIGN

    of tensors   owner     VALUE ──> PACK ──> BROADCAST ··> IDENTITY
                 others                       BROADCAST ──> UNPACK

    no value     owner     TOKEN ──> BROADCAST
                 others              BROADCAST ──> TOKEN                     the place of the update that runs elsewhere

Every process lowers its own Program.  A BROADCAST has operands only in the process that sends, but the same tensors in all.
"""

from __future__ import annotations

from typing import Dict, List, Sequence

from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.homes import find_homes
from whale_tf.passes.lowering.primitive import (
    ASSIGN,
    BROADCAST,
    IDENTITY,
    OP,
    PACK,
    READ,
    TENSOR,
    TOKEN,
    UNPACK,
    VALUE,
    Broadcast,
    Primitive,
)
from whale_tf.passes.owners import DONE, LATE, VALUES, Message, find_owners
from whale_tf.plan import Plan
from whale_tf.program import MESSAGES, ORIGINAL, UPDATE, Clone, Program


class Messages:
    """Lowers messages, each once.

    Attributes:
        calls: numbers of their calls in the Program, in an order that is the same in all processes.
    """

    def __init__(self, step: TrainingStep, plan: Plan, program: Program) -> None:
        self._plan, self._program, self._graph = plan, program, step.graph
        self._owners, self._homes = find_owners(step, plan), find_homes(step, plan).ops
        bodies = [number for number, body in enumerate(program.bodies) if body.step in MESSAGES]
        self._messages: Dict[int, Message] = dict(zip(bodies, self._owners.messages))
        self._writes = self._owners.writes(step.graph) if bodies else {}
        self.calls = [number for number, call in enumerate(program.calls) if call.body in self._messages]
        self._clone_of: Dict[int, Clone] = {
            op: call.clone for call in program.calls if program.step_of(call) == UPDATE for op in program.bodies[call.body].ops}
        self._sent: Dict[int, Primitive] = {}
        self._values: Dict[int, Dict[int, Primitive]] = {}

    def sent(self, number: int) -> Primitive:
        """A call's broadcast."""
        self.values(number)
        return self._sent[number]

    def values(self, number: int) -> Dict[int, Primitive]:
        """What a call's message means in this process: sent tensor -> its value; handle or reference of a variable -> its value
        for the step that begins, or what ends its update."""
        if number not in self._values:
            self._values[number] = self._lower(number, self._messages[self._program.calls[number].body])
        return self._values[number]

    def _lower(self, number: int, message: Message) -> Dict[int, Primitive]:
        if message.kind in (DONE, LATE):
            return self._without_value(number, message)
        tensors = message.reads(self._graph)
        scope = f"values/{TENSOR}" if message.kind == VALUES else f"sent/{TENSOR}"
        if not self._is_own(message):
            waits = self._ops([self._graph.tensors[tensor].op for tensor in message.tensors])
            arrived = self._received(number, message, tensors, scope, waits)
            if message.tensors or message.kind == VALUES:
                return arrived
            return {tensor: Primitive(ASSIGN, tensor, self._device(tensor), (value,), scope + "/assign", call=number,
                                      waits=self._every_write(self._variable(tensor)))
                    for tensor, value in arrived.items()}
        own = [self._value(number, message, tensor, scope) for tensor in tensors]
        sent = self._broadcast(number, message, tensors, scope, own)
        if message.tensors or message.kind == VALUES:
            last = "own" if message.tensors else "value"
            return {value.tensor: Primitive(IDENTITY, value.tensor, value.device, (value,), f"{scope}/{last}", waits=(sent,),
                                            call=number) for value in own}
        return dict.fromkeys(tensors, sent)

    def _value(self, number: int, message: Message, tensor: int, scope: str) -> Primitive:
        """What the owner sends of a tensor or variable."""
        device = self._device(tensor)
        if message.tensors:
            return Primitive(VALUE, tensor, device, clone=self._clone_of[self._graph.tensors[tensor].op], call=number)
        if message.kind == VALUES:
            return Primitive(READ, tensor, device, (), scope + "/read", call=number)
        writes = self._writes[self._variable(tensor)]
        return Primitive(READ, tensor, device, (), scope + "/value", waits=self._ops(writes.value + writes.state), call=number)

    def _received(self, number: int, message: Message, tensors: Sequence[int], scope: str,
                  waits: Sequence[Primitive]) -> Dict[int, Primitive]:
        """Tensor, or handle or reference of a variable -> its value from the owner."""
        arrived = self._broadcast(number, message, tensors, scope, (), waits)
        if len(tensors) == 1:
            return {tensors[0]: arrived}
        return {tensor: Primitive(UNPACK, tensor, arrived.device, (arrived,), scope, detail=place, call=number)
                for place, tensor in enumerate(tensors)}

    def _broadcast(self, number: int, message: Message, tensors: Sequence[int], scope: str, own: Sequence[Primitive],
                   waits: Sequence[Primitive] = ()) -> Primitive:
        device, name = self._device(tensors[0]), scope
        if len(tensors) > 1:
            name += "/bucket"
            own = own and [Primitive(PACK, tensors[0], device, own, scope, call=number)]
        return self._made(number, tensors[0], device, own, name, Broadcast(self._root(message), tuple(tensors)), waits)

    def _without_value(self, number: int, message: Message) -> Dict[int, Primitive]:
        """A message which says that updates, or the writes after these, are done."""
        handles = [self._graph.ops[variable].outputs[0] for variable in message.variables]
        first, device, scope = handles[0], self._device(handles[0]), f"sent/{TENSOR}/{message.kind}"
        own: List[Primitive] = []
        if self._is_own(message):
            found = [self._writes[variable] for variable in message.variables]
            writes = [op for one in found for op in (one.late if message.kind == LATE else one.value + one.state)]
            own = [Primitive(TOKEN, first, device, (), scope, waits=self._ops(writes), call=number)]
        sent = self._made(number, first, device, own, scope + "/message", Broadcast(self._root(message)))
        if own or message.kind == LATE:
            return dict.fromkeys(handles, sent)
        return {handle: Primitive(TOKEN, handle, self._device(handle), (sent,), f"sent/{TENSOR}/end", call=number,
                                  waits=self._every_write(self._variable(handle))) for handle in handles}

    def _made(self, number: int, tensor: int, device: int, own: Sequence[Primitive], scope: str, detail: Broadcast,
              waits: Sequence[Primitive] = ()) -> Primitive:
        made = self._sent[number] = Primitive(BROADCAST, tensor, device, own, scope, detail=detail, waits=waits, call=number)
        return made

    def _every_write(self, variable: int) -> List[Primitive]:
        return self._ops(sum(self._writes[variable], ()))

    def _ops(self, ops: Sequence[int]) -> List[Primitive]:
        return [Primitive(OP, self._graph.ops[self._owners.update[op]].outputs[0], self._homes[self._owners.update[op]],
                          clone=self._clone_of.get(op, ORIGINAL.clone), detail=op) for op in ops]

    def _variable(self, tensor: int) -> int:
        """The variable whose handle or reference a tensor is, or to whose update it belongs."""
        op = self._graph.tensors[tensor].op
        return self._owners.sent.get(tensor, op)

    def _device(self, tensor: int) -> int:
        return self._homes[self._variable(tensor)]

    def _root(self, message: Message) -> int:
        return self._plan.process_of(message.home)

    def _is_own(self, message: Message) -> bool:
        return self._root(message) == self._owners.rank
