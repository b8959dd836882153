"""A step as the split executor runs an answer, played by the simulator's engine: the time it is compared with other plans by.

The search prices ring collectives and lets every device compute what is not divided.  The executor
(:mod:`whale_tf.rewrite.shard`) does neither: what is not divided runs once, on the first device, and others read it from there;
terms of a sum are sent to the first device and added up there.  Ops run on each device in the graph's order, every change of
layout is one communication between the devices concerned, and constants are everywhere::

    shard -> once       all parts go to the first device       partial -> once       as many whole terms do
    once -> shard       it sends each device its part          partial -> shard      each device gets its part of every term
    once -> everywhere  it sends the whole to each             shard -> everywhere   every device gets all parts

Ops take what the layers of a profile take (:mod:`whale_tf.profiler.op_time`), so that the time is comparable with a simulated
plan of TaskGraphs.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.ir.graph import Op, OpGraph, Shape
from whale_tf.patterns.spread import EACH, EVERYWHERE, ONCE, Spread, once
from whale_tf.patterns.strategy import LINEAR, SIZES, Sizes, stored_shape
from whale_tf.planner.rhino.scope import find_scope
from whale_tf.planner.rhino.work import item_bytes
from whale_tf.planner.sharding import Assignment
from whale_tf.profiler.op_cost import OpCost, op_costs
from whale_tf.profiler.op_time import op_seconds
from whale_tf.simulator.buffers import BufferRows
from whale_tf.simulator.engine import run
from whale_tf.simulator.execution_graph import ExecutionGraph, LinkUse, queue_of
from whale_tf.simulator.network import Network
from whale_tf.simulator.program import COMPUTATION, FEATURE
from whale_tf.simulator.simulate import Options, gamma_of
from whale_tf.simulator.transformation import SEND_RECV, Group, Pair

Tasks = Tuple[int, ...]  # one for each device; -1: there from the start
FIRST = 0


class Value(NamedTuple):
    """Where a tensor is: its spread, and the task that makes each device's part (of ``once`` a single one)."""

    spread: Spread
    tasks: Tasks


def executed_seconds(graph: OpGraph, assignment: Assignment, cluster: Cluster) -> float:
    """Seconds of a step.

    Args:
        graph: with static shapes.
        assignment: of one TaskGraph over all devices of the cluster.
    """
    return _Execution(graph, assignment, cluster).run()


class _Execution:
    """Tasks in the graph's order."""

    def __init__(self, graph: OpGraph, assignment: Assignment, cluster: Cluster) -> None:
        self.graph, self.assignment, self.cluster = graph, assignment, cluster
        self.count = len(cluster)
        self.scope = find_scope(graph, gradients=frozenset(assignment.settled))
        self.costs = op_costs(graph)
        self.view = Sizes(graph)
        self.network = Network(cluster)
        self.values: Dict[int, Value] = {}
        self._made: Dict[Tuple[int, Spread], Tasks] = {}
        self.seconds: List[float] = []
        self.lane: List[int] = []
        self.slots: List[Tuple[int, ...]] = []
        self.queues: Dict[int, Tuple[int, ...]] = {}
        self.links: Dict[int, Tuple[LinkUse, ...]] = {}
        self.edges: List[Tuple[int, int]] = []
        self.last = [-1] * self.count  # computation of each device
        for variable, spread in assignment.variables.items():
            self.values[graph.ops[variable].outputs[0]] = Value(spread, (-1,) * self.count)

    def run(self) -> float:
        for op in self.scope.ops:
            self._op(self.graph.ops[op])
        total = len(self.seconds)
        pairs = np.array(sorted(set(self.edges)), np.int64).reshape(-1, 2)
        first = np.zeros(total + 1, np.int64)
        np.cumsum(np.bincount(pairs[:, 0], minlength=total), out=first[1:])
        empty = BufferRows().unfold({}, 0)
        tasks = ExecutionGraph(
            self.seconds, self.lane, list(range(total)), [0] * total, self.slots, self.queues, self.links, pairs[:, 1].tolist(),
            first.tolist(), np.bincount(pairs[:, 1], minlength=total).tolist(), tuple(range(self.count)), {}, empty)
        gammas = [gamma_of(self.cluster, device, Options()) for device in range(self.count)]
        return run(tasks, self.network.bandwidths, gammas).makespan

    # -- ops ----------------------------------------------------------------------------------------------------------
    def _op(self, op: Op) -> None:
        strategy = self.assignment.strategies.get(op.id)
        if strategy is not None and strategy.how == SIZES:
            return
        if strategy is None:
            operands = [self._parts(t, once)[FIRST] for t in op.inputs]
            whole = (1.0,) * len(op.inputs + op.outputs)
            task = self._compute(FIRST, self._seconds(op, FIRST, 1.0, whole), operands)
            for tensor in op.outputs:
                self.values[tensor] = Value(once, (task,))
        else:
            parts = [self._parts(t, need) for t, need in zip(op.inputs, strategy.needs)]
            spreads = list(strategy.needs) + list(strategy.gives)
            tasks = []
            for device in range(self.count):
                shares = [_share(spread, device) for spread in spreads]
                share = 1.0 if strategy.how == LINEAR else min(shares, default=1.0)
                tasks.append(self._compute(device, self._seconds(op, device, share, shares), [row[device] for row in parts]))
            if strategy.exchanged:
                tasks = [self._exchange(strategy.exchanged, tasks)] * self.count
            for tensor, give in zip(op.outputs, strategy.gives):
                self.values[tensor] = Value(give, (tasks[FIRST],) if give == once else tuple(tasks))
        for tensor in op.outputs:
            if tensor in self.assignment.settled:
                spread = self.assignment.settled[tensor]
                self.values[tensor] = Value(spread, self._parts(tensor, spread)[:1 if spread == once else self.count])

    def _seconds(self, op: Op, device: int, share: float, shares: Sequence[float]) -> float:
        """Args:
        share: of the op's arithmetic.
        shares: of each operand and result.
        """
        cost, tensors = self.costs[op.id], op.inputs + op.outputs
        sizes = [self._bytes(t) * part for t, part in zip(tensors, shares)]
        total = sum(map(self._bytes, tensors))
        moved = cost.bytes * sum(sizes) / total if total else cost.bytes
        parameters = sum(size for t, size in zip(tensors, sizes) if t in self.scope.roots or t in self.scope.gradients)
        dtype = self.graph.tensors[op.outputs[0]].dtype.replace("_ref", "") if op.outputs else "float32"
        part = OpCost(cost.flops * share, moved, cost.is_contraction)
        return op_seconds(part, self.cluster.devices[device], dtype, parameters)

    # -- operands -----------------------------------------------------------------------------------------------------
    def _parts(self, tensor: int, need: Spread) -> Tasks:
        """The task that each device has to wait for; of ``once`` the first one's counts."""
        tensor = self.scope.roots.get(tensor, tensor)
        value = self.values.get(tensor)
        if value is None:  # from outside: on the first device
            if self.graph.producer(tensor).type == "Const":
                return (-1,) * self.count
            value = Value(once, (-1,))
        have = value.spread
        if have == need or have.kind in (EVERYWHERE, EACH):
            return value.tasks * self.count if len(value.tasks) == 1 else value.tasks
        key = (tensor, need)
        if key not in self._made:
            self._made[key] = self._convert(tensor, value, need)
        return self._made[key]

    def _convert(self, tensor: int, value: Value, need: Spread) -> Tasks:
        size, devices = self._bytes(tensor), range(self.count)
        have = value.spread
        if have.is_partial and not need.is_shard:
            total = self._add_up(size, value.tasks)
            if need.kind == ONCE:
                return (total,) * self.count
            return self._whole_everywhere(size, total)
        if have.kind == ONCE:
            if not need.is_shard:
                return self._whole_everywhere(size, value.tasks[FIRST])
            pairs = [(FIRST, i, _share(need, i)) for i in devices if i != FIRST]
        elif have.is_partial:
            pairs = [(j, i, _share(need, i)) for j in devices for i in devices if i != j]
        elif need.is_shard:
            pairs = [(j, i, _share(have, j) * (_share(need, i) if have.dim != need.dim else _overlap(have, need, j, i)))
                     for j in devices for i in devices if i != j]
        else:
            receivers = devices if need.kind == EVERYWHERE else (FIRST,)
            pairs = [(j, i, _share(have, j)) for j in devices for i in receivers if i != j]
        sent = self._send(size, pairs, value.tasks)
        if not have.is_partial:
            return (sent,) * self.count
        parts = [size * _share(need, i) * (self.count + 1) for i in devices]
        return tuple(self._compute(i, self._add_seconds(i, part), [sent]) for i, part in zip(devices, parts))

    def _add_up(self, size: float, terms: Tasks) -> int:
        sent = self._send(size, [(j, FIRST, 1.0) for j in range(1, self.count)], terms)
        return self._compute(FIRST, self._add_seconds(FIRST, size * (self.count + 1)), [sent])

    def _add_seconds(self, device: int, moved: float) -> float:
        return op_seconds(OpCost(0.0, moved), self.cluster.devices[device], "float32")

    def _whole_everywhere(self, size: float, task: int) -> Tasks:
        sent = self._send(size, [(FIRST, i, 1.0) for i in range(1, self.count)], [task])
        return (task,) + (sent,) * (self.count - 1)

    def _exchange(self, elements: float, tasks: Sequence[int]) -> int:
        """Inside a recipe: that many elements change devices, by way of the first one."""
        others = range(1, self.count)
        pairs = [(j, FIRST, 0.5 / len(others)) for j in others] + [(FIRST, j, 0.5 / len(others)) for j in others]
        return self._send(4.0 * elements, pairs, tasks)

    def _bytes(self, tensor: int) -> float:
        return _size(stored_shape(self.view, tensor)) * item_bytes(self.graph.tensors[tensor].dtype)

    # -- tasks --------------------------------------------------------------------------------------------------------
    def _compute(self, device: int, seconds: float, operands: Sequence[int]) -> int:
        """What takes no time is no task: whoever reads it waits for what it waits for."""
        waits = sorted({task for task in operands if task >= 0})
        if not seconds and len(waits) < 2:
            return waits[0] if waits else -1
        task = self._add(COMPUTATION, seconds, (device,), waits + [self.last[device]])
        self.last[device] = task
        return task

    def _send(self, size: float, pairs: Sequence[Pair], sources: Sequence[int]) -> int:
        pairs = [pair for pair in pairs if pair[2] > 0.0]
        waits = [task for task in set(sources) if task >= 0]
        if not pairs or not size:
            return self._compute(FIRST, 0.0, waits)
        devices = tuple(sorted({end for pair in pairs for end in pair[:2]}))
        best = self.network.best(SEND_RECV, Group(devices, tuple(pairs)), size)
        seconds = best.latency_s + size * best.seconds_per_byte
        task = self._add(FEATURE, seconds, devices, waits)
        sending = {queue_of(j, FEATURE) for j, _, _ in pairs}
        receiving = {queue_of(i, FEATURE, incoming=True) for _, i, _ in pairs}
        self.queues[task] = tuple(sorted(sending | receiving))
        if seconds > 0:
            self.links[task] = tuple((link, load * size / seconds, 1) for link, load in best.loads)
        return task

    def _add(self, lane: int, seconds: float, slots: Tuple[int, ...], waits: Sequence[int]) -> int:
        task = len(self.seconds)
        self.seconds.append(seconds)
        self.lane.append(lane)
        self.slots.append(slots)
        self.edges.extend((source, task) for source in waits if source >= 0)
        return task


def _size(shape: Shape) -> float:
    total = 1.0
    for size in shape or ():
        total *= size or 1
    return total


def _share(spread: Spread, device: int) -> float:
    """A device's part of a tensor; what is whole or a term of a sum is whole."""
    return spread.sizes[device] / sum(spread.sizes) if spread.is_shard else 1.0


def _overlap(have: Spread, need: Spread, source: int, target: int) -> float:
    """Part of shard ``source`` that lies in shard ``target`` of another division of the same dimension."""
    begin = max(have.starts[source], need.starts[target])
    end = min(have.starts[source] + have.sizes[source], need.starts[target] + need.sizes[target])
    return max(0, end - begin) / max(have.sizes[source], 1)


def describe(assignment: Assignment, graph: OpGraph, mesh: Sequence[int], seconds: Optional[float] = None) -> str:
    """``rhino: mesh 4, 12 of 20 ops divided, simulated 0.1 s``."""
    patterns = assignment.shards
    divided = sum(pattern != "once" for pattern in patterns.values())
    text = "rhino: mesh {}, {} of {} products, look-ups and losses divided, {} of {} variables in shards".format(
        "x".join(map(str, mesh)), divided, len(patterns), len(assignment.variables), len(find_scope(graph).variables))
    return text if seconds is None else "{}, simulated {:.4g} s".format(text, seconds)
