"""What a call takes from others, as tasks.  Recipes follow from the layouts of their tensors, in the same way as emission lowers
them::

    plain values, bridges       a message to each device that reads them; an op puts several parts together
    accumulate                  an addition on the replica's device
    synchronise                 an addition on one device (devices take turns), or a collective between processes
    whole, merge                an addition or concatenation on the first device
    gather, broadcast           a message from one process to each other one, once the values that it sends have been written
"""

from __future__ import annotations

import abc
from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Set, Tuple

from whale_tf.bridges import crossing, cuts
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import traits
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    ALL,
    BRIDGE,
    BROADCAST,
    DIVIDE,
    GATHER,
    MERGE,
    ONCE,
    SYNCHRONISE,
    UPDATE,
    WHOLE,
    Call,
    Program,
)
from whale_tf.simulator.call_facts import MESSAGES, CallFacts, Costs
from whale_tf.simulator.instructions import COMPUTATION, FEATURE, GRADIENT
from whale_tf.simulator.spans import Spans
from whale_tf.simulator.tasks import NOTHING, START, About, Tasks
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, SEND_RECV, Group

ADDED = -2  # in place of a device: the sum of several calls
NO_VALUE_BYTES = 4.0  # size of a message which only says that something is done


class Held(NamedTuple):
    """A part of a tensor in micro-batch ``m``: the task that makes it, its device, its buffer (-1: none of its own), and its
    bytes."""

    task: int
    device: int
    buffer: int
    tensor: int
    size: float
    m: int = ALL


class Value(NamedTuple):
    """The value of a tensor that an op reads: its parts, the tasks that must end before these leave their devices, and the call
    (-1: none) of the recipe by which each device that reads the parts puts them together."""

    parts: Tuple[Held, ...] = ()
    waits: FrozenSet[int] = frozenset()
    recipe: int = -1

    @property
    def tasks(self) -> FrozenSet[int]:
        """The tasks that have ended when the value is there."""
        return self.waits.union(part.task for part in self.parts)


def together(values: Sequence[Value]) -> Value:
    """All parts of several values."""
    values = [value for value in values if value.parts or value.waits]
    if len(values) < 2:
        return values[0] if values else Value()
    parts = dict.fromkeys([part for value in values for part in value.parts])
    return Value(tuple(parts), frozenset().union(*[value.waits for value in values]))


class Recipes(CallFacts, abc.ABC):
    """The values that the calls of one process take.

    Attributes:
        peers: the same of all processes, including this one.
        spans: the functions of called bodies.
        gates: call -> tasks before values that are read anew for it.
    """

    def __init__(self, tasks: Tasks, costs: Costs, step: TrainingStep, program: Program, plan: Plan) -> None:
        super().__init__(costs, step, program, plan)
        self.tasks, self.spans = tasks, Spans(tasks)
        self.peers: Sequence[Recipes] = [self]
        self.gates: Dict[int, List[int]] = {}
        self._made: Dict[Tuple[int, int, int], Value] = {}  # (call of a recipe, tensor, device that reads it or ALL)
        self._sent: Dict[Tuple[int, int, int, FrozenSet[int]], Held] = {}

    @abc.abstractmethod
    def value(self, number: int, tensor: int, is_whole: bool = False) -> Value:
        """The value of a tensor that a call reads or makes; values that exist from the start, as variables do, have no parts."""

    @abc.abstractmethod
    def after(self, number: int, op: int) -> FrozenSet[int]:
        """The tasks that have ended when an op of a call has."""

    def on(self, device: int, tasks: Iterable[int]) -> Set[int]:
        """Those of ``tasks`` that run on a device."""
        return {task for task in tasks if task != START and self.tasks.devices[task] == (device,)}

    def taken(self, number: int, tensor: int, is_whole: bool) -> Value:
        """The value of a tensor that a call takes from other calls."""
        sources = self.sources[number].get((tensor, is_whole)) or self.sources[number].get((tensor, not is_whole), ())
        if len(sources) > 1 and self.step_of(sources[0]) == SYNCHRONISE:
            return self._added(sources, tensor)
        return together([self._from(source, tensor, number) for source in sources])

    def _from(self, source: int, tensor: int, reader: int) -> Value:
        """The value that a call passes to another one."""
        body = self.body(source)
        if body.step == UPDATE and self.step_of(reader) not in (UPDATE, BROADCAST):
            return Value()  # the value of the previous step
        if body.step == ONCE and body.home is not None and self.body(reader).reads:
            return self._read_anew(self.value(source, tensor), tensor, reader)
        if body.step == DIVIDE:
            m = self.program.calls[reader].clone.m
            return Value((Held(START, self.host, -1, tensor, self.size_of(reader, tensor), m),))
        if source in self.spans:
            return self._returned(source, tensor)
        return self.recipe(source, tensor) if body.is_recipe else self.value(source, tensor)

    def _returned(self, source: int, tensor: int) -> Value:
        """The value that a function of a call returns when it ends."""
        value = self.value(source, tensor)
        end = self.spans.end(source, self.pieces[self.program.calls[source].body][self.graph.tensors[tensor].op].function)
        return value._replace(parts=tuple(
            part._replace(task=end) if part.task != START and self.tasks.devices[end] == (part.device,) else part
            for part in value.parts))

    def _read_anew(self, value: Value, tensor: int, reader: int) -> Value:
        """A variable's value for one call, which its home sends after an op of that call."""
        call = self.program.calls[reader]
        before = dict(self.body(reader).reads).get(tensor, -1)
        waits = {part.task for part in value.parts}
        if before >= 0 and reader not in self.spans:
            waits |= self.value(reader, self.graph.ops[before].outputs[0]).tasks
        gate = self.tasks.add(NOTHING, 0.0, (), sorted(waits))
        if reader in self.spans:  # sent after the calls that the schedule puts before this one
            self.gates.setdefault(reader, []).append(gate)
        return Value(tuple(part._replace(task=gate, m=call.clone.m) for part in value.parts), value.waits)

    def here(self, value: Value, device: int) -> List[Held]:
        """A value's parts on a device."""
        if value.recipe >= 0:
            key = value.recipe, value.parts[0].tensor, device
            if key not in self._made:
                self._made[key] = self._combined(value.recipe, key[1], [value._replace(recipe=-1)], device)
            return list(self._made[key].parts)
        return [part if part.device == device else self._send(part, device, value.waits) for part in value.parts]

    def _send(self, part: Held, device: int, waits: FrozenSet[int]) -> Held:
        if not part.size:
            return part._replace(device=device)
        waits = frozenset(self.on(part.device, waits) | {part.task})
        key = part.tensor, part.m, device, waits
        if key not in self._sent:
            home = self.tasks.instructions[part.task].block[0] if part.task != START else 0
            about = About(self._name(part.tensor), SEND_RECV, home, part.m)
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
        return self.tasks.buffer(self.tasks.instructions[task].name, category, task, device, size)

    def _shares_memory(self, one: int, other: int) -> bool:
        """Whether devices pass tensors without copying them, as the CPU devices of one process do."""
        devices = [self.tasks.cluster.devices[device] for device in (one, other)]
        return devices[0].node == devices[1].node and all(device.kind == "CPU" for device in devices)

    def recipe(self, number: int, tensor: int) -> Value:
        """The value that a recipe makes of a tensor."""
        key = number, tensor, ALL
        if key not in self._made:
            step, is_divided = self.step_of(number), self.batch.layout(tensor).is_sharded
            if is_divided and (step == BRIDGE or (step == SYNCHRONISE and len(self.peers) == 1)):
                values = self._terms(number, tensor, self.device_of(number, tensor))
                value = together(self._cut(self.program.calls[number], values) if step == BRIDGE else values)
                parts = tuple(part._replace(tensor=tensor) for part in value.parts)
                self._made[key] = Value(parts, value.waits, number if parts else -1)
            elif step in MESSAGES:
                self.send_to_all(number)
            elif step == SYNCHRONISE:
                self._synchronise(number)
            else:
                self._made[key] = self._total(number, tensor)
        return self._made[key]

    def _total(self, number: int, tensor: int) -> Value:
        """The values of this process' clones, combined."""
        device = self.sums.get((number, tensor), self.device_of(number, tensor))
        return self._combined(number, tensor, self._terms(number, tensor, device), device)

    def _terms(self, number: int, tensor: int, device: int) -> List[Value]:
        """The values that a recipe combines.  If the last addition over micro-batches is on the device where the copies are added
        up, TensorFlow's graph optimizer merges the two additions."""
        sources, is_last = self.sources[number].get((tensor, False), ()), self.step_of(number) in (SYNCHRONISE, MERGE)
        values = []
        for source in sources:
            is_here = self.step_of(source) == ACCUMULATE and self.device_of(source, tensor) == device
            if is_last and is_here and self.readers[source, tensor] == 1 < len(sources):
                values += [self._main(before, tensor, source) for before in self.sources[source][tensor, False]]
            else:
                values.append(self._main(source, tensor, number))
        return values

    def _main(self, source: int, tensor: int, reader: int) -> Value:
        """A call's value as one part; if ops that are no tasks read several parts, the largest of them."""
        value = self._from(source, tensor, reader)
        if not value.parts:
            return value
        part = max(value.parts, key=lambda one: one.size)
        if not self.body(source).is_recipe:
            part = part._replace(size=self.size_of(source, tensor))
        return Value((part,), value.tasks)

    def _cut(self, call: Call, values: List[Value]) -> List[Value]:
        """Cut what a clone takes: only its own part of one other clone's value, but all of it if several have its rows."""
        bridge = self.program.bodies[call.body]
        tasks = [self.plan.task_graphs[one] for one in (self.step.home(bridge.inputs[0]), bridge.task_graph)]
        own, other = (cuts(task.replica_count, task.batch_slices) for task in tasks)
        met = crossing(own, other, call.clone.r)
        if len(met.producers) > 1 or met.covers:
            return values
        one, = met.producers
        kept = float((other[call.clone.r + 1] - other[call.clone.r]) / (own[one + 1] - own[one]))
        return [value._replace(parts=tuple(part._replace(size=part.size * kept) for part in value.parts)) for value in values]

    def _combined(self, number: int, tensor: int, values: Sequence[Value], device: int) -> Value:
        """The clones' values combined into one on a device: their sum, their concatenation, or the first one if all are equal."""
        is_sum = self.is_sum(tensor)
        if not is_sum and not self.batch.layout(tensor).is_sharded:
            values = values[:1]
        parts = [part for value in values for part in self.here(value, device)]
        waits = together(values).waits
        size = sum(part.size for part in parts)
        if len(parts) < 2 or not size:
            return Value(tuple(part._replace(m=self.program.calls[number].clone.m) for part in parts), waits)
        made = max(part.size for part in parts) if is_sum else size
        step, home = self.step_of(number), self.body(number).home
        is_written_over = is_sum and step != WHOLE and (home is None or self._is_on(parts[0].buffer, device))
        about = self.about(number, f"{self._name(tensor)} ({step})")
        return Value((self._op(about, device, parts, waits, size + made, made, is_written_over),))

    def _is_on(self, buffer: int, device: int) -> bool:
        return buffer >= 0 and self.tasks.buffers[buffer].parts[0] == (device,)

    def _added(self, sources: Sequence[int], tensor: int) -> Value:
        """The sums over processes of all micro-batches, which an owner adds up."""
        key = sources[0], tensor, ADDED
        if key not in self._made:
            device = self.program.calls[sources[0]].devices[0]
            values = [self.recipe(source, tensor) for source in sources]
            parts = [part for value in values for part in self.here(value, device)]
            size, about = self.costs.bytes(tensor), self.about(sources[0], f"{self._name(tensor)} (total)")
            total = self._op(about, device, parts, together(values).waits, (len(parts) + 1) * size, size, True)
            self._made[key] = Value((total,))
        return self._made[key]

    def _op(self, about: About, device: int, parts: Sequence[Held], waits: Iterable[int], moved: float, made: float,
           is_written_over: bool = False) -> Held:
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
        return Held(task, device, buffer, parts[0].tensor, made, about.micro_batch)

    def _synchronise(self, number: int) -> None:
        """Combine the values of all copies; between processes, one collective does so for a bucket."""
        tensors = [tensor for tensor, _ in self.program.calls[number].takes]
        is_sum, is_divided = self.is_sum(tensors[0]), self.batch.layout(tensors[0]).is_sharded
        totals = [[peer._total(number, tensor) for tensor in tensors] for peer in self.peers]  # of each process' copies
        if len(self.peers) == 1 or not (is_sum or is_divided):
            for peer, values in zip(self.peers, totals):
                peer._made.update(((number, tensor, ALL), value) for tensor, value in zip(tensors, values))
            return
        packed = [peer._packed(number, values) for peer, values in zip(self.peers, totals)]
        size = max(part.size for part in packed)
        kind, made = (ALL_REDUCE, size) if is_sum else (ALL_GATHER, size * len(packed))
        about = self.about(number, kind.replace("_", "-"))._replace(label=kind)
        group = Group(tuple(sorted(part.device for part in packed)))
        task = self.tasks.communicate(kind, group, made, GRADIENT, [part.task for part in packed], about)
        for peer, part in zip(self.peers, packed):
            self.tasks.read(task, part.buffer)
            buffer = self.tasks.buffer("summed gradients", "gradient buckets", task, part.device, made)
            peer._unpack(number, tensors, Held(task, part.device, buffer, tensors[0], made), size, "out of bucket")

    def send_to_all(self, number: int) -> None:
        """Add a message to each other process, and the values that it brings there."""
        if (number, ALL, ALL) in self._made:
            return
        place = self.messages.index(number)
        calls = [peer.program.calls[peer.messages[place]] for peer in self.peers]
        bodies = [peer.program.bodies[call.body] for peer, call in zip(self.peers, calls)]
        owner = next(rank for rank, (call, body) in enumerate(zip(calls, bodies))
                     if call.takes or call.after or (body.step == GATHER and body.inputs))
        for peer in self.peers:
            peer._made[peer.messages[place], ALL, ALL] = Value()
        sender, tensors, kind = self.peers[owner], bodies[owner].inputs, bodies[owner].step
        number, devices = sender.messages[place], [call.devices[0] for call in calls]
        values = [sender._main(source, tensor, number) for tensor, (source,) in calls[owner].takes]
        written = sender._written(calls[owner])
        taken = {tensor for tensor, _ in calls[owner].takes}
        values += [Value((Held(START, devices[owner], -1, tensor, sender.costs.bytes(tensor)),), written)
                   for tensor in tensors if tensor not in taken]
        size, waits = NO_VALUE_BYTES, written
        if any(value.parts for value in values):
            packed = sender._packed(number, values)
            if packed.task != START:
                self.tasks.wait(packed.task, sorted(written))
            size, waits = packed.size, together(values).waits | {packed.task}
        pairs = tuple((devices[owner], device, 1.0) for device in devices if device != devices[owner])
        task = self.tasks.communicate(
            SEND_RECV, Group(tuple(sorted(devices)), pairs), size, FEATURE if kind == GATHER else GRADIENT, sorted(waits),
            sender.about(number, kind)._replace(label=kind))
        for value, tensor in zip(values, bodies[owner].outputs):
            sender._made[number, tensor, ALL] = value._replace(waits=value.waits | {task})
        category = "gathered parameters" if kind == GATHER else "gradient buckets"
        for peer, device in zip(self.peers, devices):
            if peer is not sender and tensors:
                arrived = Held(task, device, self._new_buffer(category, task, device, size), tensors[0], size)
                peer._unpack(peer.messages[place], tensors, arrived, size, "out of message")

    def _written(self, call: Call) -> FrozenSet[int]:
        """The tasks after which a call's message leaves: those that write the values that it sends."""
        tensors, found = set(self.program.bodies[call.body].inputs), set()  # type: Set[int], Set[int]
        for number in call.after:
            for op in (piece.op for piece in self.pieces[self.program.calls[number].body].values()):
                if traits(op.type).is_write and (not tensors or not tensors.isdisjoint(op.inputs)):
                    found |= self.after(number, op.id)
        return frozenset(found - {START})

    def _packed(self, number: int, values: Sequence[Value]) -> Held:
        """Values of one device, packed into one tensor."""
        parts = [part for value in values for part in value.parts]
        if len(parts) == 1:
            return parts[0]
        size = sum(part.size for part in parts)
        return self._op(self.about(number, "into bucket"), parts[0].device, parts, together(values).waits, 2.0 * size, size)

    def _unpack(self, number: int, tensors: Sequence[int], arrived: Held, size: float, name: str) -> None:
        """Take the values of a call, of ``size`` bytes together, out of what has arrived; ``name``: of the op that does so."""
        if len(tensors) > 1:
            arrived = self._op(self.about(number, name), arrived.device, [arrived], (), 2.0 * size, size)
        for tensor in tensors:
            self._made[number, tensor, ALL] = Value((arrived._replace(tensor=tensor, size=self.costs.bytes(tensor)),))
