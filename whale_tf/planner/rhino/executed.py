"""A step as the split executor runs an answer, played by the simulator's engine: the time it is compared with other plans by.

What is not divided runs once, on the first device, and others read it from there.  Ops run on each device in the graph's order,
constants are everywhere, and every change of layout is its recipe's messages and sums (:mod:`whale_tf.patterns.moves`).  The
search minimises the same prices, as if all of it came one after the other; here devices work side by side.

Model replicas do so side by side, each with its part of the mini-batch; a gradient is summed over them on one device, in turns.

Ops take what the layers of a profile take (:mod:`whale_tf.profiler.op_time`), so that the time is comparable with a simulated
plan of TaskGraphs.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.patterns.moves import FIRST, all_sum, exchange, moves, share
from whale_tf.patterns.spread import EACH, EVERYWHERE, ONCE, Spread, once
from whale_tf.patterns.strategy import LINEAR, SIZES
from whale_tf.planner.rhino.op_price import OpPrices
from whale_tf.planner.rhino.scope import find_scope
from whale_tf.planner.sharding import Assignment
from whale_tf.simulator.network import Network
from whale_tf.simulator.tasks import START, Tasks

Parts = Tuple[int, ...]  # the task that makes each device's part


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
    tasks, count = Tasks(cluster, Network(cluster)), len(cluster) // replicas
    rows = [list(range(r * count, (r + 1) * count)) for r in range(replicas)]
    prices = OpPrices(graph, find_scope(graph, gradients=frozenset(assignment.settled)))
    executions = [_Execution(prices, assignment, tasks, row) for row in rows]
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
    first = executions[0]
    spread, size = first.values[tensor].spread, first.prices.bytes(tensor)
    recipe = all_sum(len(executions), turn)
    rows = [execution.values[tensor].tasks for execution in executions]
    summed = [first.tasks.carry_out(recipe, size * share(spread, part), [execution.row[part] for execution in executions],
                                    [row[part] for row in rows]) for part in range(len(rows[0]))]
    for number, execution in enumerate(executions):
        execution.values[tensor] = Value(spread, tuple(parts[number] for parts in summed))


class _Execution:
    """One model replica: its ops in the graph's order, on the devices ``row``."""

    def __init__(self, prices: OpPrices, assignment: Assignment, tasks: Tasks, row: Sequence[int]) -> None:
        self.graph, self.scope, self.prices = prices.graph, prices.scope, prices
        self.assignment, self.tasks, self.row, self.count = assignment, tasks, row, len(row)
        self.values: Dict[int, Value] = {}
        self._made: Dict[Tuple[int, Spread], Parts] = {}
        for variable, spread in assignment.variables.items():
            self.values[self.graph.ops[variable].outputs[0]] = Value(spread, (START,) * self.count)

    # -- ops ----------------------------------------------------------------------------------------------------------
    def op(self, op: Op) -> None:
        strategy = self.assignment.strategies.get(op.id)
        if strategy is not None and strategy.how == SIZES:
            return
        if strategy is None:
            operands = [self._parts(t, once)[FIRST] for t in op.inputs]
            task = self._compute(FIRST, op, 1.0, (1.0,) * len(op.inputs + op.outputs), operands)
            for tensor in op.outputs:
                self.values[tensor] = Value(once, (task,))
        else:
            parts = [self._parts(t, need) for t, need in zip(op.inputs, strategy.needs)]
            spreads = list(strategy.needs) + list(strategy.gives)
            tasks = []
            for device in range(self.count):
                shares = [share(spread, device) for spread in spreads]
                part = 1.0 if strategy.how == LINEAR else min(shares, default=1.0)
                tasks.append(self._compute(device, op, part, shares, [row[device] for row in parts]))
            if strategy.exchanged:
                tasks = [self._exchange(strategy.exchanged, tasks)] * self.count
            for tensor, give in zip(op.outputs, strategy.gives):
                self.values[tensor] = Value(give, (tasks[FIRST],) if give == once else tuple(tasks))
        for tensor in op.outputs:
            if tensor in self.assignment.settled:
                spread = self.assignment.settled[tensor]
                self.values[tensor] = Value(spread, self._parts(tensor, spread)[:1 if spread == once else self.count])

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
        recipe = moves(value.spread, need, self.count)
        assert recipe is not None, "the answer has no conversion that cannot be"
        tasks = value.tasks * self.count if len(value.tasks) == 1 else value.tasks
        done = self.tasks.carry_out(recipe, self.prices.bytes(tensor), self.row, tasks)
        return (done[FIRST],) * self.count if need.kind == ONCE else tuple(done)

    def _exchange(self, elements: float, tasks: Sequence[int]) -> int:
        """Inside a recipe: that many elements change devices, by way of the first one."""
        return self.tasks.join(self.tasks.carry_out(exchange(self.count), 4.0 * elements, self.row, tasks))

    def _compute(self, device: int, op: Op, part: float, shares: Sequence[float], operands: Sequence[int]) -> int:
        where = self.row[device]
        return self.tasks.compute(where, self.prices.seconds(op, part, shares, self.tasks.cluster.devices[where]), operands)


def describe(assignment: Assignment, graph: OpGraph, mesh: Sequence[int]) -> str:
    """``mesh 4, 12 of 20 products, look-ups and losses divided, 3 of 8 variables in shards``."""
    patterns = assignment.shards
    divided = sum(pattern != "once" for pattern in patterns.values())
    return "mesh {}, {} of {} products, look-ups and losses divided, {} of {} variables in shards".format(
        "x".join(map(str, mesh)), divided, len(patterns), len(assignment.variables), len(find_scope(graph).variables))
