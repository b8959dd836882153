"""A Program's calls as tasks: the ops of every call, what they wait for, read and write.

Nothing is decided here.  Calls say what runs, how often, on which devices, on whose values and after what.  Costs say how long
an op takes and whether it is a task of its own; an op that is none passes on what it reads.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Hashable, Iterable, List, Sequence, Set, Tuple

from whale_tf.ir.training_step import TrainingStep
from whale_tf.plan import Plan
from whale_tf.program import ACCUMULATE, Program
from whale_tf.simulator.body_tasks import BodyTasks, Result, Task, tasks_of
from whale_tf.simulator.call_facts import OpCosts
from whale_tf.simulator.instructions import SCRATCH
from whale_tf.simulator.recipes import PlayedValue, Recipes, TensorPart, together
from whale_tf.simulator.tasks import NOTHING, START, Tasks


def add_step(tasks: Tasks, costs: OpCosts, step: TrainingStep, programs: Sequence[Tuple[Program, Plan]]) -> List[Sequence[int]]:
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
        bodies: of each call, the tasks of its body.
        first: of each call, the number of its first task, which the others follow.
    """

    def __init__(self, tasks: Tasks, costs: OpCosts, step: TrainingStep, program: Program, plan: Plan) -> None:
        super().__init__(tasks, costs, step, program, plan)
        known: Dict[Hashable, BodyTasks] = {}
        self.bodies: List[BodyTasks] = []
        for number in range(len(program.calls)):
            kind = self._kind(number)
            if kind not in known:
                known[kind] = tasks_of(self, number)
            self.bodies.append(known[kind])
        self.first: List[int] = []
        self._known: List[Dict[int, PlayedValue]] = [{} for _ in program.calls]  # of each call, by the key of its source
        self._handed_on: List[Dict[int, PlayedValue]] = [{} for _ in program.calls]  # of each call, by op without a task
        self._donated = [frozenset(body.donated) for body in program.bodies]

    def _kind(self, number: int) -> Hashable:
        """What the tasks of a call's body depend on."""
        body = self.program.calls[number].body
        shards = {piece.shard for piece in self.pieces[body].values()}
        types = [self.tasks.cluster.devices[self.device_at(number, shard)].type for shard in sorted(shards)]
        return body, self.parts[number], tuple(types), frozenset(self.sources[number])

    def allocate(self) -> None:
        """Add a task for every op that is one."""
        tasks = self.tasks
        for number, (call, body_tasks) in enumerate(zip(self.program.calls, self.bodies)):
            body = self.program.bodies[call.body]
            if body.functions:
                self.spans.add(number, len(body.functions), self.device_at(number, 0), self.about(number, body.name))
            devices = [self.device_at(number, task.piece.shard) for task in body_tasks.tasks]
            first = tasks.compute(body_tasks.names, body_tasks.blocks, body_tasks.seconds, body_tasks.limits,
                                  [(device,) for device in devices], call.clone.m)
            self.first.append(first)
            for place, (one, device) in enumerate(zip(body_tasks.tasks, devices)):
                if body.functions:
                    self.spans.run(number, one.piece.function, first + place)
                if one.kernel.matrix_flops:
                    tasks.matrix_flops[device] += one.kernel.matrix_flops
                if one.kernel.scratch:
                    tasks.buffer(one.piece.op.name + " (scratch)", SCRATCH, first + place, device, one.kernel.scratch)

    def chains(self) -> Iterable[Sequence[int]]:
        """The tasks of each call on each device, in the graph's order."""
        for first, body_tasks in zip(self.first, self.bodies):
            found: Dict[int, List[int]] = {}
            for place, one in enumerate(body_tasks.tasks):
                found.setdefault(one.piece.shard, []).append(first + place)
            yield from found.values()

    def connect(self) -> None:
        """Record what every task waits for, reads and writes."""
        ordered = {number for number, call in enumerate(self.program.calls) if call.after}
        ordered.update(*(call.after for call in self.program.calls))
        ends = [self._connect_ops(number, number in ordered or bool(self.body(number).reads))
                for number in range(len(self.program.calls))]
        for number in self.lowering.messages.calls:
            self.play_values(number)
        for number, call in enumerate(self.program.calls):
            ended = [task for other in call.after for task in sorted(ends[other][1])]
            ended += [part.task for other in call.after if self.step_of(other) == ACCUMULATE
                      for tensor, _ in self.program.calls[other].takes for part in self.recipe(other, tensor).parts]
            waiting = ends[number][0] + self.gates.get(number, [])
            if ended and waiting:
                barrier = self.tasks.add(NOTHING, 0.0, (), ended)
                for task in waiting:
                    self.tasks.wait(task, [barrier])

    def _connect_ops(self, number: int, is_ordered: bool) -> Tuple[List[int], Set[int]]:
        """Record what the tasks of a call wait for, read and write.

        Returns:
            If the call has a place in an order, the tasks that wait for no other one of the call, and those for which no other
            one waits.
        """
        first, last, mine = [], set(), set()  # type: List[int], Set[int], Set[int]
        known, body_tasks = self._known[number], self.bodies[number]
        for task, one in enumerate(body_tasks.tasks, self.first[number]):
            waits = self._operands(number, one, task)
            self.tasks.wait(task, sorted(waits))
            for result in one.results:
                if result.tensor not in known:
                    known[result.tensor] = self._result(number, result)
            if is_ordered:
                if mine.isdisjoint(waits):
                    first.append(task)
                last -= waits
                last.add(task)
                mine.add(task)
        if number not in self.spans:
            return first, last
        for repeated, before in self.body(number).waits:
            if repeated in body_tasks.places:
                task = self.first[number] + body_tasks.places[repeated]
                self.tasks.wait(task, sorted(self.after(number, before) - {task}))
        return [self.spans.first(number)], {self.spans.last(number)}

    def _operands(self, number: int, one: Task, task: int) -> Set[int]:
        """The tasks that a task waits for; also records the buffers that it reads."""
        waits: Set[int] = set()
        device, = self.tasks.devices[task]
        known, read = self._known[number], self.tasks.read
        for operand in one.operands:
            value = known.get(operand.key) or self._find(number, operand.key)
            parts = []
            for part in value.parts if value.recipe < 0 else self.here(value, device):
                here = part if part.device == device else self._send(part, device, value.waits)
                waits.add(here.task)
                if here.buffer >= 0:
                    read(task, here.buffer, here.tensor == operand.overwritten)
                parts.append(here)
            if value.waits:
                waits |= self.on(device, value.waits)
            if number in self.spans:
                is_donated = (operand.tensor, one.piece.function) in self._donated[self.program.calls[number].body]
                self.spans.take(number, one.piece.function,
                                [(part.task, -1 if is_donated else part.buffer) for part in parts])
        if one.piece.op.id in self.bodies[number].controls:
            waits |= self.on(device, self._controls(number, one.piece.op.id))
        waits.discard(START)
        waits.discard(task)
        return waits

    def _controls(self, number: int, op: int) -> FrozenSet[int]:
        """The tasks that an op waits for by control edges: ops in calls with the same coordinates."""
        found: Set[int] = set()
        for body, before in self.bodies[number].controls[op]:
            source = self.number.get((body, self.program.calls[number].clone))
            if source is not None:
                found |= self.after(source, before)
        return frozenset(found)

    def after(self, number: int, op: int) -> FrozenSet[int]:
        place = self.bodies[number].places.get(op)
        return self._of_op(number, op).tasks if place is None else frozenset([self.first[number] + place])

    def value(self, number: int, tensor: int, is_whole: bool = False) -> PlayedValue:
        key = ~tensor if is_whole else tensor
        return self._known[number].get(key) or self._find(number, key)

    def _find(self, number: int, key: int) -> PlayedValue:
        """The value with this key (see :class:`whale_tf.simulator.body_tasks.Source`), which is not known yet."""
        body_tasks = self.bodies[number]
        if key < 0:
            found = self.taken(number, ~key, True)
        elif key in body_tasks.results:
            found = self._result(number, body_tasks.results[key])
        elif self.graph.tensors[key].op in body_tasks.sources:
            found = self._of_op(number, self.graph.tensors[key].op)
        else:
            found = self.taken(number, key, False)
        self._known[number][key] = found
        return found

    def _of_op(self, number: int, op: int) -> PlayedValue:
        """Everything that an op without a task hands on."""
        found = self._handed_on[number].get(op)
        if found is None:
            known, values = self._known[number], []
            for source in self.bodies[number].sources[op]:
                value = (PlayedValue((), self._controls(number, source.key)) if source.is_wait
                         else known.get(source.key) or self._find(number, source.key))
                values += [value, value] if source.is_repeated else [value]
            found = self._handed_on[number][op] = together(values)
        return found

    def _result(self, number: int, result: Result) -> PlayedValue:
        task = START if result.task < 0 else self.first[number] + result.task
        device, buffer = self.device_at(number, result.shard), -1
        if result.shared >= 0:
            buffer = next((part.buffer for part in self.value(number, result.shared).parts
                           if part.buffer >= 0 and part.tensor == result.shared and part.device == device), -1)
        if result.category and buffer < 0:
            buffer = self.tasks.buffer(result.name, result.category, task, device, result.size + result.workspace)
        return PlayedValue((TensorPart(task, device, buffer, result.tensor, result.size, self.program.calls[number].clone.m),))
