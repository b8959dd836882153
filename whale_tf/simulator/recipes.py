"""What a call takes from others, as tasks.

A value that is on another device is a message.  Recipes are the primitives to which :mod:`whale_tf.passes.lowering` lowers them:
additions, concatenations and collectives are tasks; what changes each element, or cuts rows out, goes with them.  A broadcast is
one message to each other process.
"""

from __future__ import annotations

import abc
from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Set, Tuple

from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.lowering import Lowering, Primitive, primitive
from whale_tf.passes.replicate import cuts_of, devices_of
from whale_tf.plan import Plan
from whale_tf.program import (
    ALL,
    BRIDGE,
    BROADCAST,
    DIVIDE,
    GATHER,
    MERGE,
    ONCE,
    ORIGINAL,
    SYNCHRONISE,
    UPDATE,
    WHOLE,
    Program,
)
from whale_tf.simulator.call_facts import CallFacts, OpCosts
from whale_tf.simulator.instructions import COMPUTATION, FEATURE, GRADIENT
from whale_tf.simulator.spans import Spans
from whale_tf.simulator.tasks import NOTHING, START, About, Tasks
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, SEND_RECV, Group

PASSED_ON = (primitive.SCALE, primitive.SCALE_PROCESS, primitive.SHARE, primitive.SHIFT, primitive.LESS_SURPLUS, primitive.BLOCK,
             primitive.IDENTITY, primitive.ASSIGN)  # what is no task: it is computed with what makes or reads the value
NO_VALUE_BYTES = 4.0  # size of a message which only says that something is done


class TensorPart(NamedTuple):
    """A part of a tensor in micro-batch ``m``: the task that makes it, its device, its buffer (-1: none of its own), and its
    bytes."""

    task: int
    device: int
    buffer: int
    tensor: int
    size: float
    m: int = ALL


class PlayedValue(NamedTuple):
    """The value of a tensor that an op reads: its parts, the tasks that must end before these leave their devices, and the call
    (-1: none) of the recipe by which each device that reads the parts puts them together, with the tensor that it makes: a part
    may be another tensor's, if an op passes on its operand."""

    parts: Tuple[TensorPart, ...] = ()
    waits: FrozenSet[int] = frozenset()
    recipe: int = -1
    tensor: int = -1

    @property
    def tasks(self) -> FrozenSet[int]:
        """The tasks that have ended when the value is there."""
        return self.waits.union(part.task for part in self.parts)


NOTHING_HELD = PlayedValue()


def together(values: Sequence[PlayedValue]) -> PlayedValue:
    """All parts of several values."""
    values = [value for value in values if value.parts or value.waits] if len(values) > 1 else values
    if len(values) < 2:
        return values[0] if values else NOTHING_HELD
    parts = dict.fromkeys([part for value in values for part in value.parts])
    return PlayedValue(tuple(parts), frozenset().union(*[value.waits for value in values]))


class Recipes(CallFacts, abc.ABC):
    """The values that the calls of one process take.

    Attributes:
        peers: the same of all processes, including this one.
        spans: the functions of called bodies.
        gates: call -> tasks before values that are read anew for it.
    """

    def __init__(self, tasks: Tasks, costs: OpCosts, step: TrainingStep, program: Program, plan: Plan) -> None:
        super().__init__(costs, step, program, plan)
        self.tasks, self.spans = tasks, Spans(tasks)
        self.peers: Sequence[Recipes] = [self]
        self.gates: Dict[int, List[int]] = {}
        self.lowering = Lowering(step, plan, program)
        self._passes_results = [not (body.is_recipe or body.functions or body.step == UPDATE or body.home is not None)
                                for body in self._bodies]
        self._made: Dict[Primitive, PlayedValue] = {}
        self._unpacked: Dict[Primitive, TensorPart] = {}
        self._sent: Dict[Tuple[int, int, int, FrozenSet[int]], TensorPart] = {}

    @abc.abstractmethod
    def value(self, number: int, tensor: int, is_whole: bool = False) -> PlayedValue:
        """The value of a tensor that a call reads or makes; values that exist from the start, as variables do, have no parts."""

    @abc.abstractmethod
    def after(self, number: int, op: int) -> FrozenSet[int]:
        """The tasks that have ended when an op of a call has."""

    def on(self, device: int, tasks: Iterable[int]) -> Set[int]:
        """Those of ``tasks`` that run on a device."""
        return {task for task in tasks if task != START and self.tasks.devices[task] == (device,)}

    def taken(self, number: int, tensor: int, is_whole: bool) -> PlayedValue:
        """The value of a tensor that a call takes from other calls."""
        sources = self.sources[number].get((tensor, is_whole)) or self.sources[number].get((tensor, not is_whole), ())
        if len(sources) == 1 and self._passes_results[sources[0]]:
            return self.value(sources[0], tensor)
        if len(sources) > 1 and self.step_of(sources[0]) == SYNCHRONISE:
            total = self.lowering.synchronised(tensor, self.body(sources[0]).task_graph, ORIGINAL)
            return self._played(total, sources[0])
        return together([self._from(source, tensor, number) for source in sources])

    def _from(self, source: int, tensor: int, reader: int) -> PlayedValue:
        """The value that a call passes to another one."""
        body = self.body(source)
        if body.step == UPDATE and self.step_of(reader) not in (UPDATE, BROADCAST):
            return PlayedValue()  # the value of the previous step
        if body.step == ONCE and body.home is not None and self.body(reader).reads:
            return self._read_anew(self.value(source, tensor), tensor, reader)
        if body.step == DIVIDE:
            m = self.program.calls[reader].clone.m
            return PlayedValue((TensorPart(START, self.host, -1, tensor, self.size_of(reader, tensor), m),))
        if source in self.spans:
            return self._returned(source, tensor)
        return self.recipe(source, tensor) if body.is_recipe else self.value(source, tensor)

    def _returned(self, source: int, tensor: int) -> PlayedValue:
        """The value that a function of a call returns when it ends."""
        value = self.value(source, tensor)
        end = self.spans.end(source, self.pieces[self.program.calls[source].body][self.graph.tensors[tensor].op].function)
        return value._replace(parts=tuple(
            part._replace(task=end) if part.task != START and self.tasks.devices[end] == (part.device,) else part
            for part in value.parts))

    def _read_anew(self, value: PlayedValue, tensor: int, reader: int) -> PlayedValue:
        """A variable's value for one call, which its home sends after an op of that call."""
        call = self.program.calls[reader]
        before = dict(self.body(reader).reads).get(tensor, -1)
        waits = {part.task for part in value.parts}
        if before >= 0 and reader not in self.spans:
            waits |= self.after(reader, before)  # which may have no result
        gate = self.tasks.add(NOTHING, 0.0, (), sorted(waits))
        if reader in self.spans:  # sent after the calls that the schedule puts before this one
            self.gates.setdefault(reader, []).append(gate)
        return PlayedValue(tuple(part._replace(task=gate, m=call.clone.m) for part in value.parts), value.waits)

    def here(self, value: PlayedValue, device: int) -> List[TensorPart]:
        """A value's parts on a device."""
        if value.recipe >= 0:
            value = self._played(self._lowered_on(value.recipe, value.tensor, device), value.recipe)
        return [part if part.device == device else self._send(part, device, value.waits) for part in value.parts]

    def _send(self, part: TensorPart, device: int, waits: FrozenSet[int]) -> TensorPart:
        if not part.size:
            return part._replace(device=device)
        waits = frozenset(self.on(part.device, waits) | {part.task})
        key = part.tensor, part.m, device, waits
        if key not in self._sent:
            task_graph = self.tasks.blocks[part.task][0] if part.task != START else 0
            about = About(self._name(part.tensor), SEND_RECV, task_graph, part.m)
            group = Group(tuple(sorted((part.device, device))), ((part.device, device, 1.0),))
            task = self.tasks.communicate(SEND_RECV, group, part.size, FEATURE, sorted(waits), about)
            buffer = part.buffer
            if not self._shares_memory(part.device, device):
                self.tasks.read(task, part.buffer)
                buffer = self._new_buffer("activations", task, device, part.size)
            self._sent[key] = part._replace(task=task, device=device, buffer=buffer)
        return self._sent[key]

    def _name(self, tensor: int) -> str:
        """The tensor's name in TensorFlow, without the ``:0`` of an op's first result."""
        name = self.graph.tensor_name(tensor)
        return name[:-2] if name.endswith(":0") else name

    def _new_buffer(self, category: str, task: int, device: int, size: float) -> int:
        return self.tasks.buffer(self.tasks.names[task], category, task, device, size)

    def _shares_memory(self, one: int, other: int) -> bool:
        """Whether devices pass tensors without copying them, as the CPU devices of one process do."""
        devices = [self.tasks.cluster.devices[device] for device in (one, other)]
        return devices[0].node == devices[1].node and all(device.kind == "CPU" for device in devices)

    def recipe(self, number: int, tensor: int) -> PlayedValue:
        """The value that a recipe makes of a tensor; if each device that reads it makes its own, the parts that they read."""
        each = {self._lowered_on(number, tensor, device) for device in self._readers_of(number)}
        if len(each) == 1:
            return self._played(each.pop(), number)
        first = self._lowered_on(number, tensor, self._readers_of(number)[0])
        while first.kind in PASSED_ON:
            first = first.operands[0]
        value = together([self._played(operand, number) for operand in first.operands])
        return value._replace(recipe=number if value.parts else -1, tensor=tensor)

    def play_values(self, number: int) -> None:
        """Plays all values that a recipe's call makes."""
        for made in self.lowering.values_of(number):
            self._played(made, number)

    def _readers_of(self, number: int) -> Sequence[int]:
        """The devices for which a recipe's call makes values."""
        call, body = self.program.calls[number], self.body(number)
        if body.step == BRIDGE:
            return devices_of(self.plan, body.task_graph, call.clone)
        return call.devices or (self.host,)

    def _lowered_on(self, number: int, tensor: int, device: int) -> Primitive:
        """What a recipe's call makes of a tensor for a device."""
        if self.step_of(number) == BRIDGE:
            devices = self._readers_of(number)
            shard = devices.index(device) if len(devices) > 1 and device in devices else 0
            return self.lowering.bridges.bridged(tensor, self.body(number).task_graph, self.program.calls[number].clone, shard)
        made = self.lowering.of_call(number, tensor)
        if isinstance(made, Primitive):
            return made
        return next((each for each in made.values() if each.device == device), made[ORIGINAL])

    def _played(self, made: Primitive, number: int) -> PlayedValue:
        """The value of a primitive that belongs to a call, or to an earlier one."""
        stack = [made]
        while stack:
            last = stack[-1]
            its_call = number if last.call == primitive.FETCHED else last.call
            operands = [] if last in self._made else self._operands_of(last, its_call)
            before = [each for each in (*operands, *last.waits) if each not in self._made]
            if before:
                stack.extend(reversed(before))
                continue
            stack.pop()
            if last not in self._made:  # collectives make those of all processes
                self._made[last] = self._play(last, its_call, operands)
        return self._made[made]

    def _operands_of(self, made: Primitive, number: int) -> List[Primitive]:
        """What a primitive reads.  If the last addition over micro-batches is on the device where the copies are added up,
        TensorFlow's graph optimizer merges the two additions."""
        if made.kind not in primitive.ADDITIONS or self.step_of(number) not in (SYNCHRONISE, MERGE):
            return list(made.operands)
        found: List[Primitive] = []
        for operand in made.operands:
            last = operand
            while last.kind in PASSED_ON:
                last = last.operands[0]
            is_merged = (last.kind == primitive.ADD and last.device == made.device and last.call != number
                         and self.readers.get((last.call, made.tensor)) == 1 < len(made.operands))
            found += last.operands if is_merged else [operand]
        return found

    def _play(self, made: Primitive, number: int, operands: Sequence[Primitive]) -> PlayedValue:
        values = [self._made[operand] for operand in operands]
        if made.kind == primitive.VALUE:
            op = self.graph.tensors[made.tensor].op
            return self._main(self.number[self.body_of[op], made.clone], made.tensor, number)
        if made.kind == primitive.IDENTITY:
            m = self.program.calls[number].clone.m
            waits = values[0].waits.union(*[self._made[wait].tasks for wait in made.waits]) - {START}
            return PlayedValue(tuple(part._replace(m=m) for part in self.here(values[0], made.device)), waits)
        if made.kind in PASSED_ON:
            return values[0]
        if made.kind == primitive.OP:
            source = self.number.get((self.body_of.get(made.detail, -1), made.clone))
            return PlayedValue((), frozenset() if source is None else self.after(source, made.detail) - {START})
        if made.kind in (primitive.READ, primitive.TOKEN):
            parts = [TensorPart(START, made.device, -1, made.tensor, self.costs.bytes(made.tensor))]
            done: FrozenSet[int] = frozenset().union(*[self._made[each].tasks for each in (*operands, *made.waits)])
            return PlayedValue(tuple(parts) if made.kind == primitive.READ else (), done)
        if made.kind == primitive.BROADCAST:
            return self._sent_to_all(made, number)
        if made.kind == primitive.CUT:
            return self._cut(made, values[0])
        if made.kind == primitive.PACK:
            return self._packed(made, number, values)
        if made.kind == primitive.UNPACK:
            return self._taken_out(made, number)
        if made.kind == primitive.TAKE:
            return values[0]._replace(parts=tuple(part for part in values[0].parts if part.device == made.device))
        if made.kind in primitive.COLLECTIVES:
            return self._exchanged(made, number, values)
        return self._combined(made, number, values) if values else PlayedValue()

    def _main(self, source: int, tensor: int, reader: int) -> PlayedValue:
        """A call's value as one part; if ops that are no tasks read several parts, the largest of them."""
        value = self._from(source, tensor, reader)
        if not value.parts:
            return value
        part = max(value.parts, key=lambda one: one.size)
        if not self.body(source).is_recipe:
            part = part._replace(size=self.size_of(source, tensor))
        return PlayedValue((part,), value.tasks)

    def _cut(self, made: Primitive, value: PlayedValue) -> PlayedValue:
        """A clone's rows of another one's value, cut off where this is; those of several are sent whole."""
        cut = made.detail
        if len(cut.pieces) > 1:
            return value
        own, other = cuts_of(self.plan, cut.task_graph), cuts_of(self.plan, made.task_graph)
        r, one = made.clone.r, cut.pieces[0].r
        kept = float((other[r + 1] - other[r]) / (own[one + 1] - own[one]))
        return value._replace(parts=tuple(part._replace(size=part.size * kept) for part in value.parts))

    def _combined(self, made: Primitive, number: int, values: Sequence[PlayedValue]) -> PlayedValue:
        """Values added up or put together on a device."""
        parts = [part for value in values for part in self.here(value, made.device)]
        waits = together(values).waits
        size = sum(part.size for part in parts)
        if len(parts) < 2 or not size:
            return PlayedValue(tuple(part._replace(m=self.program.calls[number].clone.m) for part in parts), waits)
        is_sum = made.kind in primitive.ADDITIONS
        result = max(part.size for part in parts) if is_sum else size
        step, home = self.step_of(number), self.body(number).home
        is_written_over = is_sum and step != WHOLE and (home is None or self._is_on(parts[0].buffer, made.device))
        what = "total" if made.kind == primitive.ADD and step == SYNCHRONISE else step  # of micro-batches at their owner
        about = self.about(number, f"{self._name(made.tensor)} ({what})")
        return PlayedValue((self._op(about, made.device, parts, waits, size + result, result, is_written_over),))

    def _is_on(self, buffer: int, device: int) -> bool:
        return buffer >= 0 and self.tasks.buffer_devices[buffer] == device

    def _op(self, about: About, device: int, parts: Sequence[TensorPart], waits: Iterable[int], moved: float, made: float,
           is_written_over: bool = False) -> TensorPart:
        """Add an op that is in no body; its result is in the buffer of its first operand, or in its own.

        Args:
            moved: bytes that it reads and writes.
            made: bytes of its result.
        """
        before = {part.task for part in parts} | self.on(device, waits)
        task = self.tasks.add(COMPUTATION, self.costs.moving(device, moved), (device,), sorted(before), about)
        for part in parts:
            self.tasks.read(task, part.buffer)
        category = "gradient buckets" if about.label == UPDATE else "activations"
        buffer = parts[0].buffer if is_written_over else self._new_buffer(category, task, device, made)
        return TensorPart(task, device, buffer, parts[0].tensor, made, about.micro_batch)

    def _exchanged(self, made: Primitive, number: int, values: Sequence[PlayedValue]) -> PlayedValue:
        """What a collective makes: between the devices of a process, or of all processes at once."""
        if made.kind == primitive.ALL_REDUCE and made.detail.devices:
            return self._reduced_here(made, number, values)
        if len(self.peers) == 1 or made.call == primitive.FETCHED:
            return values[0]
        place = self.lowering.collectives(made.call).index(made)
        same = [peer.lowering.collectives(number)[place] for peer in self.peers]
        taken = [peer._played(each.operands[0], number) for peer, each in zip(self.peers, same)]
        if not all(value.parts for value in taken):
            return values[0]
        parts = [max(value.parts, key=lambda part: part.size) for value in taken]
        size, is_sum = max(part.size for part in parts), made.kind == primitive.ALL_REDUCE
        kind, result = (ALL_REDUCE, size) if is_sum else (ALL_GATHER, size * len(parts))
        about = self.about(number, kind.replace("_", "-"))._replace(label=kind)
        group = Group(tuple(sorted(part.device for part in parts)))
        task = self.tasks.communicate(kind, group, result, GRADIENT, [part.task for part in parts], about)
        for peer, each, part in zip(self.peers, same, parts):
            self.tasks.read(task, part.buffer)
            buffer = self.tasks.buffer("summed gradients", "gradient buckets", task, part.device, result)
            peer._made[each] = PlayedValue((TensorPart(task, part.device, buffer, each.tensor, result),))
        return self._made[made]

    def _reduced_here(self, made: Primitive, number: int, values: Sequence[PlayedValue]) -> PlayedValue:
        """The sum over devices of one process, on each of them."""
        parts = [part for value, device in zip(values, made.detail.devices) for part in self.here(value, device)]
        if len(parts) < 2:
            return together(values)
        size, waits = max(part.size for part in parts), {part.task for part in parts} | together(values).waits
        about = self.about(number, "all-reduce")._replace(label=ALL_REDUCE)
        task = self.tasks.communicate(ALL_REDUCE, Group(tuple(sorted(made.detail.devices))), size, GRADIENT, sorted(waits), about)
        found = []
        for part in parts:
            self.tasks.read(task, part.buffer)
            buffer = self.tasks.buffer("summed gradients", "gradient buckets", task, part.device, size)
            found.append(TensorPart(task, part.device, buffer, made.tensor, size))
        return PlayedValue(tuple(found))

    def _taken_out(self, made: Primitive, number: int) -> PlayedValue:
        """A tensor's value out of a vector of several."""
        total, = made.operands
        if total not in self._unpacked:
            arrived, = self._made[total].parts
            size = sum(map(self.costs.bytes, primitive.contents(total)))
            about = self.about(number, "out of bucket")
            self._unpacked[total] = self._op(about, arrived.device, [arrived], (), 2.0 * size, size)
        return PlayedValue((self._unpacked[total]._replace(tensor=made.tensor, size=self.costs.bytes(made.tensor)),))

    def _sent_to_all(self, made: Primitive, number: int) -> PlayedValue:
        """A message from the process that has its value to each other one."""
        place = self.lowering.messages.calls.index(number)
        numbers = [peer.lowering.messages.calls[place] for peer in self.peers]
        same = [peer.lowering.messages.sent(each) for peer, each in zip(self.peers, numbers)]
        sender = next(rank for rank, each in enumerate(same) if each.operands)
        value = self.peers[sender]._played(same[sender].operands[0], numbers[sender])
        size = sum(part.size for part in value.parts) or NO_VALUE_BYTES
        pairs = tuple((same[sender].device, each.device, 1.0) for each in same if each is not same[sender])
        kind, tensors = self.step_of(number), made.detail.tensors
        task = self.tasks.communicate(
            SEND_RECV, Group(tuple(sorted(each.device for each in same)), pairs), size, FEATURE if kind == GATHER else GRADIENT,
            sorted(value.tasks), self.peers[sender].about(numbers[sender], kind)._replace(label=kind))
        category = "gathered parameters" if kind == GATHER else "gradient buckets"
        for rank, (peer, each) in enumerate(zip(self.peers, same)):
            if rank == sender or not tensors:
                peer._made[each] = PlayedValue((), frozenset([task]))
            else:
                buffer = peer._new_buffer(category, task, each.device, size)
                peer._made[each] = PlayedValue((TensorPart(task, each.device, buffer, tensors[0], size),))
        return self._made[made]

    def _packed(self, made: Primitive, number: int, values: Sequence[PlayedValue]) -> PlayedValue:
        """Values of one device, packed into one tensor; those of variables once all of them have been written."""
        parts, waits = [part for value in values for part in value.parts], together(values).waits
        if len(parts) == 1:
            return PlayedValue((parts[0],), waits)
        size = sum(part.size for part in parts)
        packed = self._op(self.about(number, "into bucket"), parts[0].device, parts, waits, 2.0 * size, size)
        if made.operands[0].kind == primitive.READ:
            self.tasks.wait(packed.task, sorted(waits))
        return PlayedValue((packed,), waits)
