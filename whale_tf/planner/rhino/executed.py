"""A step as the split executor runs an answer, played by the simulator's engine: the time it is compared with other plans by.

The search prices ring collectives and lets every device compute what is not divided.  The executor
(:mod:`whale_tf.emit.shard`) does neither: what is not divided runs once, on the first device, and others read it from there;
terms of a sum are sent to the first device and added up there.  Ops run on each device in the graph's order, every change of
layout is one communication between the devices concerned, and constants are everywhere::

    shard -> once       all parts go to the first device       partial -> once       as many whole terms do
    once -> shard       it sends each device its part          partial -> shard      each device gets its part of every term
    once -> everywhere  it sends the whole to each             shard -> everywhere   every device gets all parts

Model replicas do so side by side, each with its part of the mini-batch; a gradient is summed over them on one device, in turns.

Ops take what the layers of a profile take (:mod:`whale_tf.profiler.op_time`), so that the time is comparable with a simulated
plan of TaskGraphs.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.ir.graph import Op, OpGraph, Shape
from whale_tf.patterns.spread import EACH, EVERYWHERE, ONCE, Spread, once
from whale_tf.patterns.strategy import LINEAR, SIZES, Sizes, stored_shape
from whale_tf.planner.rhino.scope import find_scope
from whale_tf.planner.rhino.tasks import START, Tasks
from whale_tf.planner.rhino.work import item_bytes
from whale_tf.planner.sharding import Assignment
from whale_tf.profiler.op_cost import OpCost, op_costs
from whale_tf.profiler.op_time import op_seconds

Parts = Tuple[int, ...]  # the task that makes each device's part
FIRST = 0


class Value(NamedTuple):
    """Where a tensor is: its spread, and the task that makes each device's part (of ``once`` a single one)."""

    spread: Spread
    tasks: Parts


def executed_seconds(graph: OpGraph, assignment: Assignment, cluster: Cluster, replicas: int = 1) -> float:
    """Seconds of a step.

    Args:
        graph: with the static shapes of one model replica's part of a mini-batch.
        assignment: of one TaskGraph over the devices of a model replica.
        replicas: model replicas, on neighbouring devices each.
    """
    tasks, count = Tasks(cluster), len(cluster) // replicas
    rows = [list(range(r * count, (r + 1) * count)) for r in range(replicas)]
    costs = op_costs(graph)
    executions = [_Execution(graph, costs, assignment, tasks, row) for row in rows]
    turn = 0
    for op in executions[0].scope.ops:
        for execution in executions:
            execution.op(graph.ops[op])
        for tensor in graph.ops[op].outputs if replicas > 1 else ():
            if tensor in assignment.settled:
                _sum_over_replicas(tensor, executions, turn % replicas)
                turn += 1
    return tasks.makespan()


def _sum_over_replicas(tensor: int, executions: Sequence[_Execution], turn: int) -> None:
    """Every part of a gradient is sent to the device of one replica, added up, and sent back."""
    spread = executions[0].values[tensor].spread
    size, tasks = executions[0].bytes(tensor), executions[0].tasks
    made: List[List[int]] = [list(execution.values[tensor].tasks) for execution in executions]
    for part in range(len(made[0])):
        amount = size * _share(spread, part)
        devices = [execution.row[part] for execution in executions]
        root = devices[turn]
        there = tasks.send(amount, [(device, root, 1.0) for device in devices if device != root], [row[part] for row in made])
        total = tasks.compute(root, executions[turn].adding(part, amount * (len(devices) + 1)), [there])
        back = tasks.send(amount, [(root, device, 1.0) for device in devices if device != root], [total])
        for number, row in enumerate(made):
            row[part] = total if number == turn else back
    for execution, row in zip(executions, made):
        execution.values[tensor] = Value(spread, tuple(row))


class _Execution:
    """One model replica: its ops in the graph's order, on the devices ``row``."""

    def __init__(self, graph: OpGraph, costs: Sequence[OpCost], assignment: Assignment, tasks: Tasks, row: Sequence[int]) -> None:
        self.graph, self.assignment, self.tasks, self.row = graph, assignment, tasks, row
        self.count = len(row)
        self.scope = find_scope(graph, gradients=frozenset(assignment.settled))
        self.costs = costs
        self.view = Sizes(graph)
        self.values: Dict[int, Value] = {}
        self._made: Dict[Tuple[int, Spread], Parts] = {}
        for variable, spread in assignment.variables.items():
            self.values[graph.ops[variable].outputs[0]] = Value(spread, (START,) * self.count)

    # -- ops ----------------------------------------------------------------------------------------------------------
    def op(self, op: Op) -> None:
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
        sizes = [self.bytes(t) * part for t, part in zip(tensors, shares)]
        total = sum(map(self.bytes, tensors))
        moved = cost.bytes * sum(sizes) / total if total else cost.bytes
        parameters = sum(size for t, size in zip(tensors, sizes) if t in self.scope.roots or t in self.scope.gradients)
        dtype = self.graph.tensors[op.outputs[0]].dtype.replace("_ref", "") if op.outputs else "float32"
        part = OpCost(cost.flops * share, moved, cost.is_contraction)
        return op_seconds(part, self.tasks.cluster.devices[self.row[device]], dtype, parameters)

    # -- operands -----------------------------------------------------------------------------------------------------
    def _parts(self, tensor: int, need: Spread) -> Parts:
        """The task that each device has to wait for; of ``once`` the first one's counts."""
        tensor = self.scope.roots.get(tensor, tensor)
        value = self.values.get(tensor)
        if value is None:  # from outside: on the first device
            if self.graph.producer(tensor).type == "Const":
                return (START,) * self.count
            value = Value(once, (START,))
        have = value.spread
        if have == need or have.kind in (EVERYWHERE, EACH):
            return value.tasks * self.count if len(value.tasks) == 1 else value.tasks
        key = (tensor, need)
        if key not in self._made:
            self._made[key] = self._convert(tensor, value, need)
        return self._made[key]

    def _convert(self, tensor: int, value: Value, need: Spread) -> Parts:
        size, devices = self.bytes(tensor), range(self.count)
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
        return tuple(self._compute(i, self.adding(i, part), [sent]) for i, part in zip(devices, parts))

    def _add_up(self, size: float, terms: Parts) -> int:
        sent = self._send(size, [(j, FIRST, 1.0) for j in range(1, self.count)], terms)
        return self._compute(FIRST, self.adding(FIRST, size * (self.count + 1)), [sent])

    def adding(self, device: int, moved: float) -> float:
        return op_seconds(OpCost(0.0, moved), self.tasks.cluster.devices[self.row[device]], "float32")

    def _whole_everywhere(self, size: float, task: int) -> Parts:
        sent = self._send(size, [(FIRST, i, 1.0) for i in range(1, self.count)], [task])
        return (task,) + (sent,) * (self.count - 1)

    def _exchange(self, elements: float, tasks: Sequence[int]) -> int:
        """Inside a recipe: that many elements change devices, by way of the first one."""
        others = range(1, self.count)
        pairs = [(j, FIRST, 0.5 / len(others)) for j in others] + [(FIRST, j, 0.5 / len(others)) for j in others]
        return self._send(4.0 * elements, pairs, tasks)

    def bytes(self, tensor: int) -> float:
        return _size(stored_shape(self.view, tensor)) * item_bytes(self.graph.tensors[tensor].dtype)

    def _compute(self, device: int, seconds: float, operands: Sequence[int]) -> int:
        return self.tasks.compute(self.row[device], seconds, operands)

    def _send(self, size: float, pairs: Sequence[Tuple[int, int, float]], sources: Sequence[int]) -> int:
        return self.tasks.send(size, [(self.row[j], self.row[i], part) for j, i, part in pairs], sources)


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
    return text if seconds is None else f"{text}, simulated {seconds:.4g} s"
