"""A Program's calls as tasks: the ops of every call, the values that they take from other calls, and the recipes for these.

Nothing is decided here.  Calls say what runs, how often, on which devices, on whose values and after what.  Recipes follow from
the layouts of their tensors, in the same way as emission lowers them::

    plain values, bridges       a message to each device that reads them; an op puts several parts together
    accumulate                  an addition on the replica's device
    synchronise                 an addition on one device (devices take turns), or a collective between processes
    whole, merge                an addition or concatenation on the first device
    gather, broadcast           a message from one process to each other one, once the values that it sends have been written

Costs say how long an op takes and whether it is a task of its own; an op that is none passes on what it reads.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Set, Tuple

from whale_tf.bridges import crossing, cuts
from whale_tf.ir.graph import Op
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import READS, VARIABLES, traits
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    ALL,
    BACKWARD,
    BATCH_LEVEL,
    BRIDGE,
    BROADCAST,
    DIVIDE,
    GATHER,
    MERGE,
    ONCE,
    SYNCHRONISE,
    UPDATE,
    WEIGHT,
    WHOLE,
    Call,
    Program,
)
from whale_tf.simulator.call_facts import MESSAGES, CallFacts, Costs, Kernel, Piece
from whale_tf.simulator.program import COMPUTATION, FEATURE, GRADIENT, SCRATCH
from whale_tf.simulator.spans import Spans
from whale_tf.simulator.tasks import NOTHING, START, About, Tasks
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, SEND_RECV, Group

ADDED = -2  # in place of a device: the sum of several calls
NOBODY: FrozenSet[int] = frozenset()  # nothing to wait for
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


def add_step(tasks: Tasks, costs: Costs, step: TrainingStep, programs: Sequence[Tuple[Program, Plan]]) -> List[Sequence[int]]:
    """Add the tasks of a step; ``programs``: one for each process, with its Plan.

    Returns:
        The ops of each call on each device, in the graph's order.
    """
    readers = [_Reader(tasks, costs, step, program, plan) for program, plan in programs]
    for reader in readers:
        reader.peers = readers
        reader.allocate()
    for reader in readers:
        reader.connect()
    chains = [chain for reader in readers for chain in reader.chains()]
    for reader in readers:
        reader.peers = []  # otherwise this cycle keeps readers in memory until garbage is collected
    return chains


class _Reader(CallFacts):
    """The reader of one process' Program.

    Attributes:
        peers: the readers of all processes, including this one.
        ran: (call, piece) -> its task; missing: it is no task of its own.
    """

    def __init__(self, tasks: Tasks, costs: Costs, step: TrainingStep, program: Program, plan: Plan) -> None:
        super().__init__(costs, step, program, plan)
        self.tasks, self.peers = tasks, [self]
        self.ran: Dict[Tuple[int, int], int] = {}
        self.spans = Spans(tasks)
        self._donated = [frozenset(body.donated) for body in program.bodies]
        self._gates: Dict[int, List[int]] = {}  # call -> tasks before values that are read anew for it
        self._known: Dict[Tuple[int, int, bool], Value] = {}
        self._made: Dict[Tuple[int, int, int], Value] = {}  # (call of a recipe, tensor, device that reads it or ALL)
        self._sent: Dict[Tuple[int, int, int, FrozenSet[int]], Held] = {}
        self._kernels: Dict[Tuple[int, int, float, str], Kernel] = {}

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Add a task for every piece that is one."""
        tasks = self.tasks
        for number, call in enumerate(self.program.calls):
            body = self.program.bodies[call.body]
            if body.functions:
                self.spans.add(number, len(body.functions), self.device_at(call, 0), self.about(number, body.name))
            devices: Dict[int, int] = {}  # by shard
            for place, piece in enumerate(self.pieces[call.body]):
                if piece.shard not in devices:
                    devices[piece.shard] = self.device_at(call, piece.shard)
                device, name = devices[piece.shard], piece.op.name
                kernel = self._kernel(number, place, device)
                if kernel.seconds:
                    task = tasks.add(COMPUTATION, kernel.seconds, (device,), (), self.about(number, name), kernel.limit)
                    self.ran[number, place] = task
                    self.spans.run(number, piece.function, task)
                    tasks.matrix_flops[device] += kernel.matrix_flops
                    tasks.buffer(name + " (scratch)", SCRATCH, task, device, kernel.scratch)

    def chains(self) -> Iterable[Sequence[int]]:
        """The tasks of each call on each device, in the graph's order."""
        for number, call in enumerate(self.program.calls):
            found: Dict[int, List[int]] = {}
            for place, piece in enumerate(self.pieces[call.body]):
                if (number, place) in self.ran:
                    found.setdefault(piece.shard, []).append(self.ran[number, place])
            yield from found.values()

    def _kernel(self, number: int, place: int, device: int) -> Kernel:
        body, part = self.program.calls[number].body, self.parts[number]
        key = (body, place, part, self.tasks.cluster.devices[device].type)
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self.costs.kernel(self.pieces[body][place].op, part, device)
        return found

    def connect(self) -> None:
        """Record what every task waits for, reads and writes."""
        first: Dict[int, List[int]] = {}
        last: Dict[int, Set[int]] = {}
        for number, call in enumerate(self.program.calls):
            mine: Set[int] = set()
            first[number], last[number] = [], set()
            for place, piece in enumerate(self.pieces[call.body]):
                task = self.ran.get((number, place), START)
                if task != START:
                    waits = self._operands(number, piece, task)
                    self.tasks.wait(task, sorted(waits))
                    for tensor in piece.op.outputs:
                        self._value(number, tensor)
                    if mine.isdisjoint(waits):
                        first[number].append(task)
                    last[number] -= waits
                    last[number].add(task)
                    mine.add(task)
            if number in self.spans:
                first[number], last[number] = [self.spans.first(number)], {self.spans.last(number)}
                for repeated, before in self.program.bodies[call.body].waits:
                    if (number, self.piece_of[call.body][repeated]) in self.ran:
                        task = self.ran[number, self.piece_of[call.body][repeated]]
                        self.tasks.wait(task, sorted(self._after(number, before) - {START, task}))
        for number in self.messages:
            self._broadcast(number)
        for number, call in enumerate(self.program.calls):
            ended = [task for other in call.after for task in sorted(last[other])]
            ended += [part.task for other in call.after if self.step_of(other) == ACCUMULATE
                      for tensor, _ in self.program.calls[other].takes for part in self._recipe(other, tensor).parts]
            waiting = first[number] + self._gates.get(number, [])
            if ended and waiting:
                barrier = self.tasks.add(NOTHING, 0.0, (), ended)
                for task in waiting:
                    self.tasks.wait(task, [barrier])

    def _operands(self, number: int, piece: Piece, task: int) -> Set[int]:
        """The tasks that a task waits for; also records the buffers that it reads."""
        waits: Set[int] = set()
        device, = self.tasks.devices[task]
        overwrites = self._kernel(number, self.piece_of[self.program.calls[number].body][piece.op.id], device).overwrites
        for tensor, is_whole in piece.inputs:
            value = self._value(number, tensor, is_whole)
            parts = self._here(value, device)
            for part in parts:
                waits.add(part.task)
                self.tasks.read(task, part.buffer, overwrites and part.tensor == self._passed_on(number, tensor))
            if value.waits:
                waits |= self._on(device, value.waits)
            if number in self.spans:
                is_donated = (tensor, piece.function) in self._donated[self.program.calls[number].body]
                self.spans.take(number, piece.function, [(part.task, -1 if is_donated else part.buffer) for part in parts])
        if piece.op.control_inputs:
            waits |= self._on(device, self._controls(number, piece))
        waits.discard(START)
        waits.discard(task)
        return waits

    def _on(self, device: int, tasks: Iterable[int]) -> Set[int]:
        return {task for task in tasks if task != START and self.tasks.devices[task] == (device,)}

    def _controls(self, number: int, piece: Piece) -> FrozenSet[int]:
        """The tasks that an op waits for by control edges: ops in calls of the same TaskGraph with the same coordinates."""
        if not piece.op.control_inputs:
            return NOBODY
        call, found = self.program.calls[number], set()  # type: Call, Set[int]
        for op in piece.op.control_inputs:
            body = self.body_of.get(op, -1)
            source = self.number.get((body, call.clone))
            if source is not None and self.program.bodies[body].task_graph == self.program.bodies[call.body].task_graph:
                if op in self.piece_of[body]:  # a called body leaves out what nobody needs
                    found |= self._after(source, op)
        return frozenset(found)

    def _after(self, number: int, op: int) -> FrozenSet[int]:
        """The tasks that have ended when an op of a call has."""
        body = self.program.calls[number].body
        place = self.piece_of[body][op]
        if (number, place) in self.ran:
            return frozenset([self.ran[number, place]])
        handed_on = self._handed_on(number, self.pieces[body][place])
        return handed_on.waits.union(part.task for part in handed_on.parts)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _value(self, number: int, tensor: int, is_whole: bool = False) -> Value:
        """The value of a tensor that a call reads or makes; values that exist from the start, as variables do, have no parts."""
        key = number, tensor, is_whole
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._read(number, tensor, is_whole)
        return found

    def _read(self, number: int, tensor: int, is_whole: bool) -> Value:
        call, op = self.program.calls[number], self.graph.producer(tensor)
        if is_whole or op.id not in self.piece_of[call.body]:
            sources = self.sources[number].get((tensor, is_whole)) or self.sources[number].get((tensor, not is_whole), ())
            if len(sources) > 1 and self.step_of(sources[0]) == SYNCHRONISE:
                return self._added(sources, tensor)
            return _together([self._from(source, tensor, number) for source in sources])
        place = self.piece_of[call.body][op.id]
        task = self.ran.get((number, place), START)
        is_variable = any(self.graph.producer(t).type in VARIABLES and (t, False) not in self.sources[number] for t in op.inputs)
        if task == START and not is_variable:
            return self._handed_on(number, self.pieces[call.body][place])
        # a variable's value exists from the start, on the variable's device; an op that only reads it returns that very memory
        device = self.device_of(number, tensor)
        buffer = -1 if is_variable and op.type in READS else self._buffer(number, tensor, op, task)
        return Value((Held(task, device, buffer, tensor, self.size_of(number, tensor), call.clone.m),))

    def _handed_on(self, number: int, piece: Piece) -> Value:
        """Everything that is read by an op without a task of its own."""
        read = [self._value(number, *one) for one in piece.inputs]
        controls = self._controls(number, piece)
        return _together([*read, Value((), controls)] if controls else read)

    def _buffer(self, number: int, tensor: int, op: Op, task: int) -> int:
        """The buffer to which an op of a clone or section writes a result: its operand's, if it shares that, or its own."""
        if self.step_of(number) not in (ONCE, *BATCH_LEVEL) or task == START:
            return -1
        device, = self.tasks.devices[task]
        place = self.piece_of[self.program.calls[number].body][op.id]
        if op.outputs[0] == tensor and op.inputs and self._kernel(number, place, device).shares:
            operand = self._passed_on(number, op.inputs[0])
            for part in self._value(number, operand).parts:
                if part.buffer >= 0 and part.tensor == operand and part.device == device:
                    return part.buffer
        category = "gradients of activations" if self.step_of(number) in (BACKWARD, WEIGHT) else "activations"
        category = "gradients" if tensor in self.gradients else category
        return self.tasks.buffer(op.name, category, task, device, self.size_of(number, tensor))

    def _passed_on(self, number: int, tensor: int) -> int:
        """The tensor whose buffer ops that are no tasks pass on, one after another."""
        op, body = self.graph.producer(tensor), self.program.calls[number].body
        place = self.piece_of[body].get(op.id)
        if place is None or (number, place) in self.ran or not op.inputs:
            return tensor
        kernel = self._kernel(number, place, self.device_of(number, tensor))
        return self._passed_on(number, op.inputs[0]) if kernel.shares or kernel.overwrites else tensor

    def _from(self, source: int, tensor: int, reader: int) -> Value:
        """The value that a call passes to another one."""
        body = self.program.bodies[self.program.calls[source].body]
        if body.step == UPDATE and self.step_of(reader) not in (UPDATE, BROADCAST):
            return Value()  # the value of the previous step
        if body.step == ONCE and body.home is not None and self.program.bodies[self.program.calls[reader].body].reads:
            return self._read_anew(self._value(source, tensor), tensor, reader)
        if body.step == DIVIDE:
            m = self.program.calls[reader].clone.m
            return Value((Held(START, self.host, -1, tensor, self.size_of(reader, tensor), m),))
        if source in self.spans:
            return self._returned(source, tensor)
        return self._recipe(source, tensor) if body.is_recipe else self._value(source, tensor)

    def _returned(self, source: int, tensor: int) -> Value:
        """The value that a function of a call returns when it ends."""
        body, value = self.program.calls[source].body, self._value(source, tensor)
        end = self.spans.end(source, self.pieces[body][self.piece_of[body][self.graph.tensors[tensor].op]].function)
        return value._replace(parts=tuple(
            part._replace(task=end) if part.task != START and self.tasks.devices[end] == (part.device,) else part
            for part in value.parts))

    def _read_anew(self, value: Value, tensor: int, reader: int) -> Value:
        """A variable's value for one call, which its home sends after an op of that call."""
        call = self.program.calls[reader]
        before = dict(self.program.bodies[call.body].reads).get(tensor, -1)
        waits = {START}
        if before >= 0 and reader not in self.spans:
            made = self._value(reader, self.graph.ops[before].outputs[0])
            waits |= made.waits.union(part.task for part in made.parts)
        gate = self.tasks.add(NOTHING, 0.0, (), sorted(waits.union(part.task for part in value.parts)))
        if reader in self.spans:  # sent after the calls that the schedule puts before this one
            self._gates.setdefault(reader, []).append(gate)
        return Value(tuple(part._replace(task=gate, m=call.clone.m) for part in value.parts), value.waits)

    def _here(self, value: Value, device: int) -> List[Held]:
        """A value's parts on a device."""
        if value.recipe >= 0:
            key = value.recipe, value.parts[0].tensor, device
            if key not in self._made:
                self._made[key] = self._combined(value.recipe, key[1], [value._replace(recipe=-1)], device)
            return list(self._made[key].parts)
        parts = value.parts
        if len(parts) == 1 and parts[0].device == device:
            return [parts[0]]
        return [part if part.device == device else self._send(part, device, value.waits) for part in parts]

    def _send(self, part: Held, device: int, waits: FrozenSet[int]) -> Held:
        if not part.size:
            return part._replace(device=device)
        waits = frozenset(self._on(part.device, waits) | {part.task})
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

    # ---- recipes -----------------------------------------------------------------------------------------------------

    def _recipe(self, number: int, tensor: int) -> Value:
        """The value that a recipe makes of a tensor."""
        is_divided, step = self.batch.layout(tensor).is_sharded, self.step_of(number)
        is_own = is_divided and (step == BRIDGE or (step == SYNCHRONISE and len(self.peers) == 1))
        key = number, tensor, ALL
        if key not in self._made:
            if step in MESSAGES:
                self._broadcast(number)
            elif step == SYNCHRONISE and not is_own:
                self._synchronise(number)
            else:
                values = self._terms(number, tensor, self.device_of(number, tensor))
                if step == BRIDGE and is_divided:
                    values = self._cut(self.program.calls[number], values)
                if is_own:
                    together = _together(values)
                    parts = tuple(part._replace(tensor=tensor) for part in together.parts)
                    self._made[key] = Value(parts, together.waits, number if parts else -1)
                else:
                    self._made[key] = self._combined(number, tensor, values, self.device_of(number, tensor))
        return self._made[key]

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

    def _total(self, number: int, tensor: int) -> Value:
        device = self.sums.get((number, tensor), self.device_of(number, tensor))
        return self._combined(number, tensor, self._terms(number, tensor, device), device)

    def _main(self, source: int, tensor: int, reader: int) -> Value:
        """A call's value as one part; if ops that are no tasks read several parts, the largest of them."""
        value = self._from(source, tensor, reader)
        if not value.parts:
            return value
        part = max(value.parts, key=lambda one: one.size)
        if not self.program.bodies[self.program.calls[source].body].is_recipe:
            part = part._replace(size=self.size_of(source, tensor))
        return Value((part,), value.waits.union(one.task for one in value.parts))

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
        parts = [part for value in values for part in self._here(value, device)]
        waits = _together(values).waits
        size = sum(part.size for part in parts)
        if len(parts) < 2 or not size:
            return Value(tuple(part._replace(m=self.program.calls[number].clone.m) for part in parts), waits)
        made = max(part.size for part in parts) if is_sum else size
        step = self.step_of(number)
        about = self.about(number, f"{self._name(tensor)} ({step})")
        is_written_over = is_sum and step != WHOLE
        if self.program.bodies[self.program.calls[number].body].home is not None:  # not on the device it came from
            is_written_over = is_written_over and self._is_on(parts[0].buffer, device)
        total = self._op(about, device, parts, waits, size + made, made, is_written_over)
        return Value((total,))

    def _is_on(self, buffer: int, device: int) -> bool:
        return buffer >= 0 and self.tasks.buffers[buffer].parts[0] == (device,)

    def _op(self, about: About, device: int, parts: Sequence[Held], waits: Iterable[int], moved: float, made: float,
            is_written_over: bool = False) -> Held:
        """Add an op that is in no body; its result is in the buffer of its first operand, or in its own."""
        before = {part.task for part in parts} | self._on(device, waits)
        task = self.tasks.add(COMPUTATION, self.costs.moving(device, moved), (device,), sorted(before), about)
        for part in parts:
            self.tasks.read(task, part.buffer)
        category = "gradient buckets" if about.label == UPDATE else "activations"
        buffer = parts[0].buffer if is_written_over else self._new_buffer(category, task, device, made)
        return Held(task, device, buffer, parts[0].tensor, made, about.micro_batch)

    # ---- gradients ---------------------------------------------------------------------------------------------------

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
            arrived = Held(task, part.device, buffer, tensors[0], made)
            if len(tensors) > 1:
                arrived = self._op(self.about(number, "out of bucket"), part.device, [arrived], (), 2.0 * size, size)
            peer._made.update(((number, tensor, ALL), Value((arrived._replace(tensor=tensor, size=self.costs.bytes(tensor)),)))
                              for tensor in tensors)

    # ---- messages of one process to the others -----------------------------------------------------------------------

    def _broadcast(self, number: int) -> None:
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
            size, waits = packed.size, _together(values).waits | {packed.task}
        pairs = tuple((devices[owner], device, 1.0) for device in devices if device != devices[owner])
        about = sender.about(number, kind)._replace(label=kind)
        task = self.tasks.communicate(
            SEND_RECV, Group(tuple(sorted(devices)), pairs), size, FEATURE if kind == GATHER else GRADIENT,
            sorted(waits - {START}), about)
        for value, tensor in zip(values, bodies[owner].outputs):
            sender._made[number, tensor, ALL] = value._replace(waits=value.waits | {task})
        for rank, peer in enumerate(self.peers):
            if rank != owner and tensors:
                peer._arrived(peer.messages[place], task, tensors, size)

    def _written(self, call: Call) -> FrozenSet[int]:
        """The tasks after which a call's message leaves: those that write the values that it sends."""
        tensors, found = set(self.program.bodies[call.body].inputs), set()  # type: Set[int], Set[int]
        for number in call.after:
            for place, piece in enumerate(self.pieces[self.program.calls[number].body]):
                if traits(piece.op.type).is_write and (not tensors or not tensors.isdisjoint(piece.op.inputs)):
                    value = self._handed_on(number, piece)
                    task = self.ran.get((number, place), START)
                    found |= {task} if task != START else value.waits.union(part.task for part in value.parts)
        return frozenset(found - {START})

    def _arrived(self, number: int, task: int, tensors: Sequence[int], size: float) -> None:
        """Record the values that a message brings."""
        device = self.program.calls[number].devices[0]
        category = "gathered parameters" if self.step_of(number) == GATHER else "gradient buckets"
        arrived = Held(task, device, self._new_buffer(category, task, device, size), tensors[0], size)
        if len(tensors) > 1:
            arrived = self._op(self.about(number, "out of message"), device, [arrived], (), 2.0 * size, size)
        for tensor in tensors:
            part = arrived._replace(tensor=tensor, size=self.costs.bytes(tensor))
            self._made[number, tensor, ALL] = Value((part,))

    def _added(self, sources: Sequence[int], tensor: int) -> Value:
        """The sums over processes of all micro-batches, which an owner adds up."""
        key = sources[0], tensor, ADDED
        if key not in self._made:
            device = self.program.calls[sources[0]].devices[0]
            values = [self._recipe(source, tensor) for source in sources]
            parts = [part for value in values for part in self._here(value, device)]
            size = self.costs.bytes(tensor)
            about = self.about(sources[0], f"{self._name(tensor)} (total)")
            total = self._op(about, device, parts, _together(values).waits, (len(parts) + 1) * size, size, True)
            self._made[key] = Value((total,))
        return self._made[key]

    def _packed(self, number: int, values: Sequence[Value]) -> Held:
        """Values of one device, packed into one tensor."""
        parts = [part for value in values for part in value.parts]
        if len(parts) == 1:
            return parts[0]
        size = sum(part.size for part in parts)
        return self._op(self.about(number, "into bucket"), parts[0].device, parts, _together(values).waits, 2.0 * size, size)


def _together(values: Sequence[Value]) -> Value:
    values = [value for value in values if value.parts or value.waits]
    if len(values) < 2:
        return values[0] if values else Value()
    parts = dict.fromkeys([part for value in values for part in value.parts])
    return Value(tuple(parts), NOBODY.union(*[value.waits for value in values]))
