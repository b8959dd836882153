"""What a Program runs and what the simulator plays for the same step, in the same terms."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple
from typing import Counter as CounterOf

import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric import script
from tests.numeric.equality import find_case
from tests.numeric.script import Setting, Stages
from whale_tf import api
from whale_tf.bridges import crossing, cuts
from whale_tf.cluster import Cluster
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.schedule import backward_order
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    BACKWARD,
    BATCH_LEVEL,
    CLONED,
    FORWARD,
    MERGE,
    ONCE,
    RECIPES,
    SECTION,
    SYNCHRONISE,
    UPDATE,
    WEIGHT,
    WHOLE,
    Call,
    Program,
    Value,
)
from whale_tf.simulator import Simulation, Simulator, StepGraph
from whale_tf.simulator.instructions import FEATURE

COMBINED = (SYNCHRONISE, WHOLE, MERGE)  # recipes that bring together what all clones have


class Step(NamedTuple):
    plan: Plan
    program: Program
    step: TrainingStep
    graph: StepGraph


def parallelized(case: str, scopes: Sequence[Any], devices: int, config: Dict[str, Any], setting: Setting) -> Step:
    model = find_case(case)
    wh.init(dict(config, **(model.config or {})), cluster=f"cpu:{devices}")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=setting.resource):
            inputs, _ = script.source(model.examples(sum(model.sizes), setting.dtype), model.sizes, setting)
            model.build(inputs, Stages(scopes), setting.dtype)
            wh.parallelize()
            done = api._parallelized("tests", None)
            assert done is not None
            program, plan, graph = wh.current_program(), wh.current_plan(), wh.step_graph()
            assert program is not None and plan is not None
            return Step(plan, program, done.captured.step(done.region), timed(graph))
    finally:
        wh.shutdown()


def timed(graph: StepGraph) -> StepGraph:
    """Every op has a time, so that none is taken to be part of another one."""
    names = {op.origin for op in graph.ops} | {op.name for op in graph.ops}
    return graph.measured(graph.batch, dict.fromkeys(names, 1e-6))


def played(step: Step) -> Simulation:
    return Simulator(Cluster.parse(f"cpu:{step.plan.num_devices}")).run_step(step.plan, step.graph)


class Ran(NamedTuple):
    """A step in terms of the captured graph's ops and the cluster's devices.

    Attributes:
        ops: (forward or backward, op, device, micro-batch).
        once: (op, device) of what runs once a step on each copy.
        waits: (device, step, micro-batch, step, micro-batch) that the schedule puts one after the other.
        crossings: (tensor, from, to, micro-batch or -1) -> bytes.
        added: (tensor, device, micro-batch) of the gradients that are added to those before.
        summed: (gradient, devices that have it, devices that get the sum) -> bytes.
        updates: (op, device).
    """

    ops: CounterOf[Tuple[str, str, int, int]]
    once: CounterOf[Tuple[str, int]]
    waits: Set[Tuple[int, str, int, str, int]]
    crossings: Dict[Tuple[str, int, int, int], float]
    added: CounterOf[Tuple[str, int, int]]
    summed: Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float]
    updates: CounterOf[Tuple[str, int]]


def differences(one: Ran, other: Ran) -> List[str]:
    found = []
    for name, left, right in zip(Ran._fields, one, other):
        if isinstance(left, set):
            left, right = dict.fromkeys(left, 1), dict.fromkeys(right, 1)
        for key in sorted(set(left) | set(right), key=str):
            a, b = left.get(key, 0.0), right.get(key, 0.0)
            if abs(a - b) > 1e-6 * max(a, b):
                found.append(f"{name}: {key} emitted {a:g} played {b:g}")
    return found


class Emitted:
    """What a Program runs."""

    def __init__(self, of: Step) -> None:
        self.plan, self.program, self.step = of.plan, of.program, of.step
        self.graph = of.program.graph
        self.body_of = of.program.body_of()
        self.number = {(call.body, call.clone): number for number, call in enumerate(of.program.calls)}
        self.leaving = self.step.region.leaving()
        self.updated = {tensor for body in of.program.bodies if body.step == UPDATE for tensor in body.inputs}
        self.known = {op.name for op in of.graph.ops}
        self.bytes = {(op.name, place): tensor.bytes for op in of.graph.ops for place, tensor in enumerate(op.outputs)}

    def ran(self) -> Ran:
        ops: CounterOf[Tuple[str, str, int, int]] = Counter()
        once: CounterOf[Tuple[str, int]] = Counter()
        updates: CounterOf[Tuple[str, int]] = Counter()
        for call in self.program.calls:
            body = self.program.bodies[call.body]
            for op in body.ops:
                name = self.graph.ops[op].name
                if body.step in CLONED:
                    kind = body.step if body.step in (BACKWARD, WEIGHT) else FORWARD
                    ops[kind, name, self.device(call, op), call.clone.m] += 1
                elif body.step in (ONCE, SECTION):
                    once[name, self.device(call, op)] += 1
                elif name in self.known:
                    updates[name, self.device(call, op)] += 1
        return Ran(ops, once, self.waits(), self.crossings(), self.added(), self.summed(), updates)

    def device(self, call: Call, op: int) -> int:
        """Of an op in a call: a variable's home, else its replica's; what runs once for all runs on the first device."""
        if len(call.devices) < 2:
            return call.devices[0] if call.devices else 0
        return call.devices[int(self.graph.ops[op].attrs.get("_whale_shard", 0))]

    def waits(self) -> Set[Tuple[int, str, int, str, int]]:
        steps = {FORWARD: FORWARD, BACKWARD: BACKWARD, WEIGHT: WEIGHT, ACCUMULATE: BACKWARD}
        return {(device, steps[self.program.step_of(before)], before.clone.m, self.program.step_of(call), call.clone.m)
                for call in self.program.calls for number in call.after for before in [self.program.calls[number]]
                if self.program.step_of(before) in steps for device in call.devices}

    def crossings(self) -> Dict[Tuple[str, int, int, int], float]:
        found: Dict[Tuple[str, int, int, int], float] = {}
        for number, call in enumerate(self.program.calls):
            body = self.program.bodies[call.body]
            if body.is_recipe:
                self.at_once(call, found)
                continue
            for op in body.ops:
                here = self.device(call, op)
                if self.graph.ops[op].name not in self.known:
                    continue
                for tensor in self.graph.ops[op].inputs:
                    made = self.graph.tensors[tensor].op
                    if self.body_of.get(made) is None:
                        continue  # a variable
                    if body.step == UPDATE and tensor in self.leaving:
                        self.merged(tensor, here, call, found)
                        continue
                    for source in self.sources(number, tensor):
                        there = self.device(self.program.calls[source], made)
                        if there != here:
                            size = self.size(tensor, self.program.calls[source], call)
                            m = call.clone.m if tensor in dict(body.reads) else self.program.calls[source].clone.m
                            key = self.graph.tensor_name(tensor), there, here, m
                            found[key] = max(found.get(key, 0.0), size)
        return {key: size for key, size in found.items() if size}

    def at_once(self, call: Call, found: Dict[Tuple[str, int, int, int], float]) -> None:
        """Gradients that are added up at home come from every clone."""
        body = self.program.bodies[call.body]
        for tensor, terms in call.takes if body.step == ACCUMULATE and body.home is not None else ():
            for term in (self.program.calls[one] for one in terms):
                there = self.device(term, self.graph.tensors[tensor].op)
                if self.program.step_of(term) in (BACKWARD, WEIGHT) and there != body.home:
                    found[self.graph.tensor_name(tensor), there, body.home, term.clone.m] = self.size(tensor, term, term)

    def merged(self, tensor: int, here: int, call: Call, found: Dict[Tuple[str, int, int, int], float]) -> None:
        """What runs once for all takes a gradient's sum from the first device of its TaskGraph, or from the home that it is for;
        there a single clone's value is sent as it is."""
        record, name = self.graph.tensors[tensor], self.graph.tensor_name(tensor)
        size = self.bytes[self.graph.ops[record.op].name, record.index]
        maker, = (self.program.calls[source] for value in call.takes if value.tensor == tensor for source in value.calls)
        home = self.program.bodies[maker.body].home
        if home is not None:
            terms = [self.program.calls[term] for value in maker.takes if value.tensor == tensor for term in value.calls]
            if len(terms) == 1 and self.device(terms[0], record.op) != home:
                found[name, self.device(terms[0], record.op), home, terms[0].clone.m] = size
            if home != here:
                found[name, home, here, -1] = size
        elif not call.devices:
            there = self.plan.task_graphs[self.step.home(tensor)].devices[0][0]
            if there != here:
                found[name, there, here, -1] = size

    def sources(self, number: int, tensor: int) -> Sequence[int]:
        """The calls of ops that a call's value of a tensor comes from."""
        call = self.program.calls[number]
        if self.graph.tensors[tensor].op in self.program.bodies[call.body].ops:
            return [number]
        found: List[int] = []
        for value in call.takes:
            for source in value.calls if value.tensor == tensor else ():
                kind = self.program.step_of(self.program.calls[source])
                if kind == WHOLE:
                    continue
                recipe = kind in RECIPES
                found += self.sources(source, tensor) if recipe else [source]
        return found

    def size(self, tensor: int, source: Call, reader: Call) -> float:
        """Bytes of what a clone hands on."""
        record = self.graph.tensors[tensor]
        whole = self.bytes.get((self.graph.ops[record.op].name, record.index), 0.0)
        if source.clone.m < 0 or not self.step.region.batch.layout(tensor).is_sharded:
            return whole
        plan = self.plan
        if not (plan.nested_batch == "own" and self.step.is_pulled):
            whole /= plan.num_model_replicas
        tasks = [plan.task_graphs[self.program.bodies[call.body].task_graph] for call in (source, reader)]
        own, other = (cuts(task.replica_count, task.batch_slices) for task in tasks)
        part = own[source.clone.r + 1] - own[source.clone.r]
        if own != other and tasks[0] is not tasks[1]:
            met = crossing(own, other, reader.clone.r)
            if len(met.producers) == 1:  # cut off where it is; several parts are put together first
                part = other[reader.clone.r + 1] - other[reader.clone.r]
        return whole / plan.num_micro_batch * float(part)

    def added(self) -> CounterOf[Tuple[str, int, int]]:
        return Counter(
            (self.graph.tensor_name(tensor), self.device(call, self.graph.tensors[tensor].op), call.clone.m)
            for call in self.program.calls if self.program.step_of(call) == ACCUMULATE
            for tensor in self.program.bodies[call.body].outputs if tensor in self.updated)

    def summed(self) -> Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float]:
        found: Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float] = {}
        for number, call in enumerate(self.program.calls):
            if self.program.step_of(call) in COMBINED:
                for value in call.takes:
                    readers = [other for other in self.program.calls if Value(value.tensor, (number,)) in other.takes]
                    if any(self.program.step_of(other) in (*BATCH_LEVEL, UPDATE) for other in readers):
                        self._combined(call, value, readers, found)
        return found

    def _combined(self, call: Call, value: Value, readers: Sequence[Call],
                  found: Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float]) -> None:
        made, step = self.graph.tensors[value.tensor].op, self.program.step_of(call)
        terms = [self.program.calls[term] for term in value.calls]
        before = {self.device(term, made) for term in terms}
        after = set(call.devices).union(self.device(reader, made) for reader in readers if step == WHOLE)
        if self.plan.task_graphs[self.step.home(value.tensor)].strategy == "split":
            shard = int(self.graph.ops[made].attrs.get("_whale_shard", 0))
            after = {row[shard] for row in self.plan.task_graphs[self.step.home(value.tensor)].devices if after.intersection(row)}
        size = max(self.size(value.tensor, term, term) for term in terms)
        if len(terms) > 1 and len(before | after) > 1 and size:
            found[self.graph.tensor_name(value.tensor), tuple(sorted(before)), tuple(sorted(after))] = size


class Played:
    """What the simulator plays."""

    def __init__(self, of: Step, simulation: Simulation) -> None:
        self.of, self.graph, self.instructions = of, simulation.graph, simulation.program.instructions
        self.names = {op.name for op in of.graph.ops}
        self.before: Dict[int, List[int]] = {}
        self.after: Dict[int, List[int]] = {}
        first = self.graph.first_successor
        for task in range(len(self.graph.lane)):
            self.after[task] = self.graph.successors[first[task]:first[task + 1]]
            for later in self.after[task]:
                self.before.setdefault(later, []).append(task)

    def ran(self) -> Ran:
        ops: CounterOf[Tuple[str, str, int, int]] = Counter()
        once: CounterOf[Tuple[str, int]] = Counter()
        updates: CounterOf[Tuple[str, int]] = Counter()
        added: CounterOf[Tuple[str, int, int]] = Counter()
        crossings: Dict[Tuple[str, int, int, int], float] = {}
        summed: Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float] = {}
        everywhere: Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float] = {}
        for task, instruction in enumerate(self.instructions):
            if instruction.lane < 0:
                continue
            name, m = instruction.name, self.graph.micro_batch[task]
            if instruction.lane == FEATURE:
                (sender, receiver, fraction), = instruction.groups[0].pairs
                from_recipe = {self.recipe(made) for made in self.before[task]}
                if from_recipe.isdisjoint((SYNCHRONISE, WHOLE)) and not any(
                        self.recipe(later) in COMBINED for later in self.after[task]):
                    key = tensor_name(name), sender, receiver, m
                    crossings[key] = max(crossings.get(key, 0.0), fraction * instruction.size_bytes)
                continue
            device, recipe = self.device(task), self.recipe(task)
            if recipe in COMBINED:
                self.combined(task, everywhere if recipe == SYNCHRONISE else summed)
            elif recipe == ACCUMULATE:
                added[tensor_name(name.rpartition(" ")[0]), device, m] += 1
            elif name in self.names and instruction.label == UPDATE:
                updates[name, device] += 1
            elif name in self.names and m < 0:
                once[name, device] += 1
            elif name in self.names:
                ops[instruction.label, name, device, m] += 1
        if self.of.plan.num_micro_batch > 1:  # what is added last is added where the copies' sum is made, together with that
            last = backward_order(self.of.plan, 0)[-1]
            for task in (task for task in range(len(self.instructions)) if self.recipe(task) in (SYNCHRONISE, MERGE)):
                name = tensor_name(self.instructions[task].name.rpartition(" ")[0])
                if any(key[0] == name for key in added) and self.device(task) != self.of.plan.host:
                    added[name, self.device(task), last] = 1
        return Ran(ops, once, self.waits(), crossings, added, {**summed, **everywhere}, updates)

    def device(self, task: int) -> int:
        slot, = self.graph.slots[task]
        return self.graph.devices[slot]

    def recipe(self, task: int) -> str:
        """The step of a task that is no op of the graph, "" of any other."""
        name = self.instructions[task].name
        return name[:-1].rpartition("(")[2] if name.endswith(")") else ""

    def combined(self, task: int, found: Dict[Tuple[str, Tuple[int, ...], Tuple[int, ...]], float]) -> None:
        """What brings clones' values together, and who gets the result; of examples' parts every copy does so for itself."""
        here, recipe = self.device(task), self.recipe(task)
        arriving, leaving = ([self.instructions[one] for one in others if self.instructions[one].lane == FEATURE]
                             for others in (self.before.get(task, ()), self.after[task]))
        senders = {sender for one in arriving for group in one.groups for sender, _, _ in group.pairs}
        receivers = {receiver for one in leaving for group in one.groups for _, receiver, _ in group.pairs}
        after = {here} if recipe == MERGE else {here, *receivers}
        name = tensor_name(self.instructions[task].name.rpartition(" ")[0])
        for key in [key for key in found if key[0] == name and recipe == SYNCHRONISE]:  # of parts of examples each copy's
            after |= set(key[2])
            del found[key]
        before = senders if here == self.of.plan.host else {here, *senders}
        if len(before | after) > 1:
            size = max([one.size_bytes for one in arriving] or [one.size_bytes for one in leaving])
            found[name, tuple(sorted(before)), tuple(sorted(after))] = size

    def waits(self) -> Set[Tuple[int, str, int, str, int]]:
        """Tasks of no duration stand between the steps of a replica (and within one, before a variable is read anew)."""
        found = set()
        for task, instruction in enumerate(self.instructions):
            if instruction.lane < 0:
                steps = [{(self.instructions[one].label, self.graph.micro_batch[one]) for one in others}
                         for others in (self.before[task], self.after[task])]
                found.update((self.device(one), *first, *then)
                             for one in self.after[task] if self.instructions[one].lane != FEATURE
                             for first in steps[0] for then in steps[1] if first != then and first[1] >= 0)
        return found


def tensor_name(name: str) -> str:
    return name if ":" in name else name + ":0"
