"""Predicted is executed: the simulator's tasks are those of the calls that are emitted."""
from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any, Iterator, List, NamedTuple, Tuple

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.cases import CASES
from tests.numeric.plans import SCHEDULES, SHAPES, Parallel
from tests.numeric.script import BATCH, Setting, Stages, source
from whale_tf.cluster import Cluster
from whale_tf.ir.traits import VARIABLES
from whale_tf.plan import Plan
from whale_tf.program import ACCUMULATE, ALL, BACKWARD, BRIDGE, CLONED, FORWARD, MERGE, SYNCHRONISE, UPDATE, Program
from whale_tf.simulator import Simulation, Simulator, StepGraph
from whale_tf.simulator.program import COMPUTATION, FEATURE

PLANS = [Parallel(SHAPES[shape], *rest) for shape, rest in itertools.product(
    SHAPES, [(1, "backward_first")] + [(count, schedule) for count in (2, 4) for schedule in SCHEDULES])]
HOST = 0  # device of ops that belong to no TaskGraph
Where = Tuple[str, int, int]  # op, device, micro-batch (-1: once a step)


class Both(NamedTuple):
    """A step as it is emitted, and as it is simulated."""

    program: Program
    plan: Plan
    step: StepGraph
    played: Simulation

    def tasks(self) -> Iterator[Tuple[Any, int, int]]:
        """(instruction, first device, micro-batch) of every task that computes."""
        graph = self.played.graph
        for number, lane, slots, batch in zip(graph.instruction, graph.lane, graph.slots, graph.micro_batch):
            if lane == COMPUTATION:
                yield self.played.program.instructions[number], graph.devices[slots[0]], batch

    def name_of(self, tensor: int) -> str:
        return self.program.graph.producer(tensor).name


def both(case: str, parallel: Parallel) -> Both:
    chosen = CASES[case]
    wh.init(dict(parallel.config(), **(chosen.config or {})), cluster=f"cpu:{parallel.shape.devices}")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            scopes = [functools.partial(wh.replicate, count) for count in parallel.shape.counts]
            size = BATCH * parallel.shape.model_replicas
            inputs, _ = source(chosen.examples(size, "float32"), [size], Setting("float32"))
            chosen.build(inputs, Stages(scopes, parallel.cuts), "float32")
            return played(wh.parallelize(), parallel.shape.devices)
    finally:
        wh.shutdown()


def played(plan: Plan, devices: int) -> Both:
    """Of the graph that was rewritten last; every op has a time, so that none is left out as fused."""
    step, program = wh.step_graph(), wh.current_program()
    assert program is not None
    timed = step.measured(step.batch, {op.origin: 1e-4 for op in step.ops})
    return Both(program, plan, step, Simulator(Cluster.parse(f"cpu:{devices}")).run_step(plan, timed))


def executed(found: Both) -> "Counter[Where]":
    """Every op of every call; variables themselves are read by calls, and belong to none."""
    shard = {op.name: op.shard for op in found.step.ops}
    where: "Counter[Where]" = Counter()
    for call in found.program.calls:
        body = found.program.bodies[call.body]
        for op in body.ops:
            name = found.program.graph.ops[op].name
            if name in shard:
                device = call.devices[shard[name] if len(call.devices) > 1 else 0] if call.devices else HOST
                where[name, device, -1 if call.clone.m == ALL else call.clone.m] += 1
    return where


def check_tasks(found: Both) -> None:
    names = {op.name for op in found.step.ops if op.type not in VARIABLES}
    predicted = Counter((one.name, device, batch) for one, device, batch in found.tasks() if one.name in names)
    emitted = executed(found)
    assert predicted == emitted, (sorted((predicted - emitted).items())[:8], sorted((emitted - predicted).items())[:8])


def check_order(found: Both) -> None:
    """Of every replica, the micro-batches of its forward and backward steps."""
    graph = found.played.graph
    for number, stage in enumerate(found.played.program.strategy.stages):
        begins = sorted((offset, phase, batch) for phase in (FORWARD, BACKWARD)
                        for batch, offset in enumerate(graph.blocks[number, phase][0].tolist()))
        predicted = [(phase, batch) for _, phase, batch in begins]
        for device in stage.devices:
            emitted = [(step, call.clone.m) for call in found.program.calls for step in [found.program.step_of(call)]
                       if step in (FORWARD, BACKWARD) and device in call.devices]
            if found.plan.num_micro_batch > 1 and emitted:
                assert emitted == [one for one in predicted if one in emitted], (device, emitted, predicted)


def check_crossings(found: Both) -> None:
    """(tensor's op, from, to) of what clones take from other devices, directly or through a bridge.

    Values of the whole mini-batch are not simulated: a few numbers that run ahead of the schedule.
    """
    program, emitted = found.program, set()

    def makers(tensor: int, calls: Any) -> Iterator[int]:
        for number in calls:
            call = program.calls[number]
            if program.step_of(call) == BRIDGE:
                yield from makers(tensor, [n for value in call.takes if value.tensor == tensor for n in value.calls])
            elif program.step_of(call) in CLONED:
                yield number

    for call in program.calls:
        if program.step_of(call) in CLONED:
            for tensor, calls in call.takes:
                emitted.update((found.name_of(tensor), program.calls[maker].devices[0], call.devices[0])
                               for maker in makers(tensor, calls) if program.calls[maker].devices != call.devices)
    cloned = {program.graph.ops[op].name for body in program.bodies if body.step in CLONED for op in body.ops}
    cloned -= {found.name_of(tensor) for body in program.bodies if body.step == UPDATE for tensor in body.inputs}  # see sums
    predicted = {(one.name, sender, receiver) for one in found.played.program.instructions
                 if one.lane == FEATURE and one.name in cloned and one.block[1] in (FORWARD, BACKWARD)
                 for group in one.groups for sender, receiver, _ in group.pairs}
    assert predicted == emitted, (sorted(predicted - emitted)[:8], sorted(emitted - predicted)[:8])


def check_sums(found: Both) -> None:
    """Which gradients are added over micro-batches, where and for which of them; which over copies.

    The Program also has values that are merged for whoever fetches them; a step that fetches nothing does not run these calls.
    """
    program, updated, summed = found.program, set(), set()
    for call in program.calls:
        if program.step_of(call) == UPDATE:
            for tensor, makers in call.takes:
                for maker in makers:
                    if program.step_of(program.calls[maker]) in (SYNCHRONISE, MERGE):
                        updated.add(tensor)
                        terms = dict(program.calls[maker].takes)[tensor]
                        copies = {program.calls[term].devices for term in terms}
                        summed.update([found.name_of(tensor)] if len(copies) > 1 else [])
    added = Counter((found.name_of(tensor) + " (sum)", call.devices[0], call.clone.m) for call in program.calls
                    if program.step_of(call) == ACCUMULATE for tensor, _ in call.takes if tensor in updated)
    first = {device: next(batch for step, batch in order(found, device) if step == BACKWARD) for _, device, _ in added}
    predicted = Counter((one.name, device, batch) for one, device, batch in found.tasks()
                        if one.is_running_sum and batch != first.get(device))
    assert predicted == added, (sorted(predicted - added)[:8], sorted(added - predicted)[:8])
    over_copies = {one.name.split(" (")[0] for one in found.played.program.instructions if one.name.endswith(" (copies)")}
    assert over_copies == summed, (sorted(over_copies - summed)[:8], sorted(summed - over_copies)[:8])


def order(found: Both, device: int) -> List[Tuple[str, int]]:
    program = found.program
    return [(program.step_of(call), call.clone.m) for call in program.calls
            if program.step_of(call) in (FORWARD, BACKWARD) and device in call.devices]


CHECKS = (check_tasks, check_order, check_crossings, check_sums)


def name_of(parallel: Parallel) -> str:
    shape = next(name for name, one in SHAPES.items() if one == parallel.shape)
    return f"{shape}-m{parallel.micro_batches}-{parallel.schedule}"


@pytest.mark.parametrize("parallel", PLANS, ids=name_of)
def test_predicted_is_executed(parallel: Parallel) -> None:
    found = both("mlp_mean", parallel)
    for check in CHECKS:
        check(found)


OTHERS = [(case, parallel._replace(extra=(("variables", variables),)))
          for number, (case, variables) in enumerate(itertools.product(
              ("clipped_adam", "momentum", "weighted_loss", "convolution", "sparse_embedding", "gan"), ("shared", "mirrored")))
          for parallel in PLANS[number % 5::7]]


@pytest.mark.slow
@pytest.mark.parametrize("case, parallel", OTHERS, ids=lambda one: one if isinstance(one, str) else name_of(one))
def test_other_models(case: str, parallel: Parallel) -> None:
    """Norms over all gradients, slots, values of the whole mini-batch, rows of sparse gradients; variables shared or not."""
    found = both(case, parallel)
    for check in CHECKS:
        check(found)


@pytest.mark.parametrize("micro_batches, devices", [(1, 2), (1, 4), (2, 4)])
def test_a_divided_layer(micro_batches: int, devices: int) -> None:
    """Every part of a divided op is on its device."""
    wh.init({"num_micro_batch": micro_batches}, cluster=f"cpu:{devices}")
    try:
        with tf.Graph().as_default():
            hidden = tf.placeholder(tf.float32, [8, 4])
            for number, scope in enumerate((functools.partial(wh.replicate, 2), functools.partial(wh.split, 2))):
                with scope():
                    weight = tf.get_variable(f"w{number}", [4, 4], use_resource=True)
                    hidden = tf.tanh(tf.matmul(hidden, weight))
                    loss = tf.reduce_mean(hidden * hidden)
            tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            check_tasks(played(wh.parallelize(), devices))
    finally:
        wh.shutdown()
