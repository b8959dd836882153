"""A Program's calls as tasks: the ops of every call, what they wait for, read and write.

Nothing is decided here.  Calls say what runs, how often, on which devices, on whose values and after what.  Costs say how long an
op takes and whether it is a task of its own; an op that is none passes on what it reads.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, Sequence, Set, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import READS
from whale_tf.plan import Plan
from whale_tf.program import ACCUMULATE, BACKWARD, BATCH_LEVEL, ONCE, WEIGHT, Program
from whale_tf.simulator.call_facts import Costs, Kernel, Piece
from whale_tf.simulator.instructions import COMPUTATION, SCRATCH
from whale_tf.simulator.recipes import Held, Recipes, Value, together
from whale_tf.simulator.tasks import NOTHING, START, Tasks

WITH_BUFFERS = (ONCE, *BATCH_LEVEL)


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


class _Reader(Recipes):
    """The reader of one process' Program.

    Attributes:
        ran: of each call, op -> its task; missing: it is no task of its own.
    """

    def __init__(self, tasks: Tasks, costs: Costs, step: TrainingStep, program: Program, plan: Plan) -> None:
        super().__init__(tasks, costs, step, program, plan)
        self.ran: List[Dict[int, int]] = [{} for _ in program.calls]
        self._known: List[Dict[int, Value]] = [{} for _ in program.calls]  # of each call, by tensor
        self._known_whole: Dict[Tuple[int, int], Value] = {}  # the same of values of the whole mini-batch
        self._kernels: Dict[Tuple[float, str], Dict[int, Kernel]] = {}
        self._kernels_of: Dict[Tuple[int, int], Dict[int, Kernel]] = {}  # (call, device) -> those of the call's size
        self._donated = [frozenset(body.donated) for body in program.bodies]

    def allocate(self) -> None:
        """Add a task for every op that is one."""
        tasks = self.tasks
        for number, call in enumerate(self.program.calls):
            body = self.program.bodies[call.body]
            if body.functions:
                self.spans.add(number, len(body.functions), self.device_at(number, 0), self.about(number, body.name))
            for piece in self.pieces[call.body].values():
                name, device = piece.op.name, self.device_at(number, piece.shard)
                kernel = self._kernel(number, piece.op, device)
                if kernel.seconds:
                    about = self.about(number, name, self.step_of_op(number, piece.op))
                    task = tasks.add(COMPUTATION, kernel.seconds, (device,), (), about, kernel.limit)
                    self.ran[number][piece.op.id] = task
                    self.spans.run(number, piece.function, task)
                    tasks.matrix_flops[device] += kernel.matrix_flops
                    tasks.buffer(name + " (scratch)", SCRATCH, task, device, kernel.scratch)

    def chains(self) -> Iterable[Sequence[int]]:
        """The tasks of each call on each device, in the graph's order."""
        for number, call in enumerate(self.program.calls):
            found: Dict[int, List[int]] = {}
            for op, piece in self.pieces[call.body].items():
                if op in self.ran[number]:
                    found.setdefault(piece.shard, []).append(self.ran[number][op])
            yield from found.values()

    def connect(self) -> None:
        """Record what every task waits for, reads and writes."""
        ends = [self._connect_ops(number) for number in range(len(self.program.calls))]
        for number in self.messages:
            self.send_to_all(number)
        for number, call in enumerate(self.program.calls):
            ended = [task for other in call.after for task in sorted(ends[other][1])]
            ended += [part.task for other in call.after if self.step_of(other) == ACCUMULATE
                      for tensor, _ in self.program.calls[other].takes for part in self.recipe(other, tensor).parts]
            waiting = ends[number][0] + self.gates.get(number, [])
            if ended and waiting:
                barrier = self.tasks.add(NOTHING, 0.0, (), ended)
                for task in waiting:
                    self.tasks.wait(task, [barrier])

    def _connect_ops(self, number: int) -> Tuple[List[int], Set[int]]:
        """Record what the tasks of a call wait for, read and write.

        Returns:
            The tasks that wait for no other one of the call, and those for which no other one waits.
        """
        first, last, mine = [], set(), set()  # type: List[int], Set[int], Set[int]
        ran = self.ran[number]
        for op, piece in self.pieces[self.program.calls[number].body].items():
            if op in ran:
                task = ran[op]
                waits = self._operands(number, piece, task)
                self.tasks.wait(task, sorted(waits))
                for tensor in piece.op.outputs:
                    self.value(number, tensor)
                if mine.isdisjoint(waits):
                    first.append(task)
                last -= waits
                last.add(task)
                mine.add(task)
        if number not in self.spans:
            return first, last
        for repeated, before in self.body(number).waits:
            if repeated in ran:
                task = ran[repeated]
                self.tasks.wait(task, sorted(self.after(number, before) - {task}))
        return [self.spans.first(number)], {self.spans.last(number)}

    def _operands(self, number: int, piece: Piece, task: int) -> Set[int]:
        """The tasks that a task waits for; also records the buffers that it reads."""
        waits: Set[int] = set()
        device, = self.tasks.devices[task]
        overwrites = self._kernel(number, piece.op, device).overwrites
        is_called = number in self.spans
        for tensor, is_whole in piece.inputs:
            value = self.value(number, tensor, is_whole)
            parts = self.here(value, device)
            for part in parts:
                waits.add(part.task)
                if part.buffer >= 0:
                    self.tasks.read(task, part.buffer, overwrites and part.tensor == self._passed_on(number, tensor))
            if value.waits:
                waits |= self.on(device, value.waits)
            if is_called:
                is_donated = (tensor, piece.function) in self._donated[self.program.calls[number].body]
                self.spans.take(number, piece.function, [(part.task, -1 if is_donated else part.buffer) for part in parts])
        if piece.op.control_inputs:
            waits |= self.on(device, self._controls(number, piece))
        waits.discard(START)
        waits.discard(task)
        return waits

    def _kernel(self, number: int, op: Op, device: int) -> Kernel:
        """The cost of an op of a call on a device."""
        kernels = self._kernels_of.get((number, device))
        if kernels is None:
            size = self.parts[number], self.tasks.cluster.devices[device].type
            kernels = self._kernels_of[number, device] = self._kernels.setdefault(size, {})
        found = kernels.get(op.id)
        if found is None:
            found = kernels[op.id] = self.costs.kernel(op, self.parts[number], device)
        return found

    def _controls(self, number: int, piece: Piece) -> FrozenSet[int]:
        """The tasks that an op waits for by control edges: ops in calls of the same TaskGraph with the same coordinates."""
        if not piece.op.control_inputs:
            return frozenset()
        task_graph, clone = self.body(number).task_graph, self.program.calls[number].clone
        found: Set[int] = set()
        for op in piece.op.control_inputs:
            body = self.body_of.get(op, -1)
            source = self.number.get((body, clone))
            if source is not None and self.program.bodies[body].task_graph == task_graph:
                if op in self.pieces[body]:  # a called body leaves out what nobody needs
                    found |= self.after(source, op)
        return frozenset(found)

    def after(self, number: int, op: int) -> FrozenSet[int]:
        if op in self.ran[number]:
            return frozenset([self.ran[number][op]])
        return self._handed_on(number, self.pieces[self.program.calls[number].body][op]).tasks

    def value(self, number: int, tensor: int, is_whole: bool = False) -> Value:
        found = self._known_whole.get((number, tensor)) if is_whole else self._known[number].get(tensor)
        if found is None and is_whole:
            found = self._known_whole[number, tensor] = self.taken(number, tensor, True)
        elif found is None:
            piece = self.pieces[self.program.calls[number].body].get(self.graph.tensors[tensor].op)
            found = self.taken(number, tensor, False) if piece is None else self._result(number, piece, tensor)
            self._known[number][tensor] = found
        return found

    def _result(self, number: int, piece: Piece, tensor: int) -> Value:
        op, task = piece.op, self.ran[number].get(piece.op.id, START)
        is_variable = bool(piece.variables) and any((t, False) not in self.sources[number] for t in piece.variables)
        if task == START and not is_variable:
            return self._handed_on(number, piece)
        # a variable's value exists from the start, on the variable's device; an op that only reads it returns that very memory
        device = self.device_at(number, piece.shard)
        buffer = -1 if is_variable and op.type in READS else self._buffer(number, tensor, op, task)
        return Value((Held(task, device, buffer, tensor, self.size_of(number, tensor), self.program.calls[number].clone.m),))

    def _handed_on(self, number: int, piece: Piece) -> Value:
        """Everything that is read by an op without a task of its own."""
        values = [self.value(number, tensor, is_whole) for tensor, is_whole in piece.inputs]
        if piece.op.control_inputs:
            values.append(Value((), self._controls(number, piece)))
        return together(values)

    def _buffer(self, number: int, tensor: int, op: Op, task: int) -> int:
        """The buffer to which an op of a clone or section writes a result: its operand's, if it shares that, or its own."""
        if task == START or self.step_of(number) not in WITH_BUFFERS:
            return -1
        device, = self.tasks.devices[task]
        if op.outputs[0] == tensor and op.inputs and self._kernel(number, op, device).shares:
            operand = self._passed_on(number, op.inputs[0])
            for part in self.value(number, operand).parts:
                if part.buffer >= 0 and part.tensor == operand and part.device == device:
                    return part.buffer
        category = "gradients of activations" if self.step_of_op(number, op) in (BACKWARD, WEIGHT) else "activations"
        category = "gradients" if tensor in self.gradients else category
        return self.tasks.buffer(op.name, category, task, device, self.size_of(number, tensor))

    def _passed_on(self, number: int, tensor: int) -> int:
        """The tensor whose buffer ops that are no tasks pass on, one after another."""
        op = self.graph.producer(tensor)
        if op.id not in self.pieces[self.program.calls[number].body] or op.id in self.ran[number] or not op.inputs:
            return tensor
        kernel = self._kernel(number, op, self.device_of(number, tensor))
        return self._passed_on(number, op.inputs[0]) if kernel.shares or kernel.overwrites else tensor
