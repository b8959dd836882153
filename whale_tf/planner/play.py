"""A Program played on a cluster: the time of a step, by which plans of TaskGraphs are compared.

Each device runs its calls one after the other, in the order of the Program, and their ops in the graph's order; an op waits for
what it takes from other devices.  Gradients and other recipes are sent and added up beside that.  Prices are those of
:mod:`whale_tf.planner.rhino.executed`, which plays divided ops.
"""

from __future__ import annotations

import collections
from typing import Deque, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Set, Tuple

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.ir.graph import Op
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program
from whale_tf.passes.communicate import takes_own
from whale_tf.patterns.moves import Step
from whale_tf.plan import Plan
from whale_tf.planner.rhino.op_price import OpPrices
from whale_tf.planner.rhino.scope import find_scope
from whale_tf.planner.tasks import START, Tasks
from whale_tf.program import ACCUMULATE, ALL, DIVIDE, RECIPES, Call, Clone, Program

FIRST = 0  # the device that inputs come from


def played_seconds(step: TrainingStep, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a step.

    Args:
        step: with the static shapes of a mini-batch of all model replicas, and the plan's TaskGraphs.
        plan: divides no ops.

    Raises:
        PlanError: the plan's schedule cannot order this graph.
    """
    player = _Player(compile_program(step, plan), step, plan, cluster)
    player.run()
    return player.tasks.makespan()


class _Piece(NamedTuple):
    """Ops of a body one after the other: their seconds, what the first one takes from elsewhere, and what goes elsewhere of the
    last one's results."""

    seconds: float
    takes: Tuple[int, ...]
    leaving: Tuple[int, ...]


class _Player:
    """Attributes:
    made: (call, tensor) -> the task that makes it.
    sent: (call, tensor, device, micro-batch, of inputs) -> the task after which it is there.
    """

    def __init__(self, program: Program, step: TrainingStep, plan: Plan, cluster: Cluster) -> None:
        self.program, self.step, self.plan, self.tasks = program, step, plan, Tasks(cluster)
        gradients = frozenset(tensor for tensor, _ in step.gradients)
        self.prices = OpPrices(step.graph, find_scope(step.graph, gradients=gradients))
        self.made: Dict[Tuple[int, int], int] = {}
        self.sent: Dict[Tuple[int, int, int, int], int] = {}
        self.recipes: Dict[Tuple[int, int], Dict[int, int]] = {}
        self.turns: Dict[Tuple[int, ...], int] = {}
        self.own = takes_own(step, plan)
        self._needed = set(self.prices.scope.ops)
        self._bodies: Dict[Tuple[int, float, str], List[_Piece]] = {}
        self._leaving = self._find_leaving()

    def run(self) -> None:
        """Every device's calls in order, those first that wait for none that is still to come."""
        waiting: Dict[int, Deque[int]] = collections.OrderedDict()
        for number, call in enumerate(self.program.calls):
            if not self._is_recipe(number):
                waiting.setdefault(self._device(call), collections.deque()).append(number)
        sources = self._sources()
        played: Set[int] = set()
        while any(waiting.values()):
            before = len(played)
            for calls in waiting.values():
                while calls and sources[calls[0]] <= played:
                    played.add(calls[0])
                    self._play(calls.popleft())
            if len(played) == before:  # bodies that need each other's results: in the order they are listed
                calls = min((row for row in waiting.values() if row), key=lambda row: row[0])
                played.add(calls[0])
                self._play(calls.popleft())

    # -- what there is ------------------------------------------------------------------------------------------------
    def _is_recipe(self, number: int) -> bool:
        return self.program.step_of(self.program.calls[number]) in RECIPES

    @staticmethod
    def _device(call: Call) -> int:
        return call.devices[0] if call.devices else FIRST

    def _sources(self) -> List[FrozenSet[int]]:
        """Calls of ops that each call waits for, by way of recipes or not."""
        found: List[FrozenSet[int]] = [frozenset()] * len(self.program.calls)
        order = sorted(range(len(found)), key=lambda number: not self._is_recipe(number))
        for _ in range(len(found)):  # recipes of recipes: sums of sums
            before = list(found)
            for number in order:
                taken = {source for value in self.program.calls[number].takes for source in value.calls} - {number}
                found[number] = frozenset(c for source in taken for c in (found[source] if self._is_recipe(source) else [source]))
            if found == before:
                return found
        return found

    def _find_leaving(self) -> Mapping[int, Set[int]]:
        """Body -> its tensors that recipes or other devices take."""
        found: Dict[int, Set[int]] = {}
        for number, call in enumerate(self.program.calls):
            for tensor, sources in call.takes:
                for source in sources:
                    other = self.program.calls[source]
                    if self._is_recipe(number) or other.devices != call.devices:
                        found.setdefault(other.body, set()).add(tensor)
        return found

    def _part(self, clone: Clone) -> float:
        """Which part of a mini-batch a clone works on."""
        return 1.0 / (1 if self.own else self.plan.num_model_replicas) / self.plan.num_micro_batch if clone.m != ALL else 1.0

    def _fraction(self, number: int, tensor: int) -> float:
        """Which part of a tensor a call has or takes."""
        call = self.program.calls[number]
        if call.clone.m == ALL or not self.step.region.batch.layout(tensor).is_sharded:
            return 1.0
        return self._part(call.clone) * self._slice(call)

    def _slice(self, call: Call) -> float:
        task = self.plan.task_graphs[self.program.bodies[call.body].task_graph]
        sizes = task.batch_slices or (1,) * task.replica_count
        return sizes[call.clone.r] / sum(sizes)

    # -- ops ----------------------------------------------------------------------------------------------------------
    def _play(self, number: int) -> None:
        call = self.program.calls[number]
        device = self._device(call)
        part = 1.0 if call.clone.m == ALL else self._part(call.clone) * self._slice(call)
        sources = {value.tensor: value.calls for value in call.takes}
        for piece in self._pieces(call.body, part, self.tasks.cluster.devices[device]):
            arrived = [self._at(source, tensor, device, number) for tensor in piece.takes for source in sources.get(tensor, ())]
            task = self.tasks.compute(device, piece.seconds, arrived)
            self.made.update({(number, tensor): task for tensor in piece.leaving})

    def _pieces(self, number: int, part: float, device: Device) -> List[_Piece]:
        key = (number, part, device.type)
        if key not in self._bodies:
            graph, body = self.step.graph, self.program.bodies[number]
            own, known, leaving = set(body.ops), set(), self._leaving.get(number, set())  # type: ignore[var-annotated]
            rows: List[_Piece] = []
            for op in (graph.ops[index] for index in body.ops):
                takes = tuple(t for t in op.inputs if graph.tensors[t].op not in own and t not in known)
                known.update(takes)
                piece = _Piece(self._seconds(op, part, device), takes, tuple(t for t in op.outputs if t in leaving))
                if rows and not takes and not rows[-1].leaving:
                    piece = piece._replace(seconds=rows[-1].seconds + piece.seconds, takes=rows.pop().takes)
                rows.append(piece)
            self._bodies[key] = rows
        return self._bodies[key]

    def _seconds(self, op: Op, part: float, device: Device) -> float:
        batch = self.step.region.batch
        if op.id not in self._needed:
            return 0.0  # a variable's value is the variable, and nobody asks for the rest
        shares = [part if part < 1.0 and batch.layout(t).is_sharded else 1.0 for t in op.inputs + op.outputs]
        return self.prices.seconds(op, min(shares, default=1.0), shares, device)

    # -- values where they are needed ---------------------------------------------------------------------------------
    def _at(self, source: int, tensor: int, device: int, reader: int) -> int:
        """The task after which a call's tensor is on a device."""
        if self._is_recipe(source):
            places = self._recipe(source, tensor, device, self.program.calls[reader].clone.m)
            if device in places:
                return places[device]
            home = next(iter(places))
            return self._send(source, tensor, home, device, self.prices.bytes(tensor), places[home])
        home, task = self._device(self.program.calls[source]), self.made.get((source, tensor), START)
        if home == device:
            return task
        size = self.prices.bytes(tensor) * min(self._fraction(source, tensor), self._fraction(reader, tensor))
        return self._send(source, tensor, home, device, size, task)

    def _send(self, source: int, tensor: int, home: int, device: int, size: float, task: int, m: int = ALL) -> int:
        key = (source, tensor, device, m)
        if key not in self.sent:
            is_handle = self.step.graph.tensors[tensor].dtype in ("resource", "variant")
            self.sent[key] = task if is_handle else self.tasks.send(size, [(home, device, 1.0)], [task])
        return self.sent[key]

    def _recipe(self, number: int, tensor: int, device: int, m: int) -> Dict[int, int]:
        """Where the result of a recipe is: device -> task; of a division, micro-batch ``m``'s part."""
        call = self.program.calls[number]
        step = self.program.step_of(call)
        if step == DIVIDE:  # of inputs, every device gets its part
            parts = self.plan.num_micro_batch * (1 if self.own else self.plan.num_model_replicas)
            task = self.plan.task_graphs[self.program.bodies[call.body].task_graph]
            size = self.prices.bytes(tensor) / parts / task.replica_count
            return {device: START if device == FIRST else self._send(number, tensor, FIRST, device, size, START, m)}
        key = (number, tensor)
        if key not in self.recipes:
            sources = [source for value in call.takes if value.tensor == tensor for source in value.calls]
            if step == ACCUMULATE:
                self.recipes[key] = self._added(call.devices[0], tensor, [self._at(s, tensor, call.devices[0], number)
                                                                        for s in sources])
            else:
                self.recipes[key] = self._combined(number, tensor, sources)
        return self.recipes[key]

    def _added(self, device: int, tensor: int, terms: Sequence[int]) -> Dict[int, int]:
        return {device: self.tasks.add_up(device, (len(terms) + 1) * self.prices.bytes(tensor), terms)}

    def _combined(self, number: int, tensor: int, sources: Sequence[int]) -> Dict[int, int]:
        """Values of clones, brought together on one device (in turns, where all want the result) and sent to the others."""
        call, layout = self.program.calls[number], self.step.region.batch.layout(tensor)
        size, targets = self.prices.bytes(tensor), call.devices or (FIRST,)
        homes: Dict[int, List[int]] = {}
        for source in sources:
            place = self._device(self.program.calls[source])
            homes.setdefault(place, []).append(self._at(source, tensor, place, number))
        turn = self.turns.get(targets, 0)
        if len(homes) > 1:
            self.turns[targets] = turn + 1
        devices = sorted(set(homes) | set(targets))
        root = devices.index(targets[turn % len(targets)])
        ready = [self.tasks.join(homes.get(device, ())) for device in devices]
        part = 1.0 / len(sources) if layout.is_sharded else 1.0
        messages = tuple((j, root, part * len(homes[place])) for j, place in enumerate(devices) if place in homes and j != root)
        arrive = Step(len(homes), messages, 0.0, ((root, 1.0),) if layout.is_partial and len(homes) > 1 else ())
        leave = Step(len(devices), tuple((root, j, 1.0) for j, place in enumerate(devices) if place in targets and j != root))
        done = self.tasks.carry_out((arrive, leave) if leave.listed else (arrive,), size, devices, ready, beside=True)
        return {device: task for device, task in zip(devices, done) if device in targets}
