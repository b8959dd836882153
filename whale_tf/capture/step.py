"""A captured training graph as the simulator's :class:`StepGraph`."""

from __future__ import annotations

import re
from typing import Dict, List, Set, Tuple

from whale_tf.capture.annotations import SHARD_ATTR
from whale_tf.capture.captured import Captured
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import OVERWRITES, SAME_BUFFER, SHAPE_ONLY, VARIABLES
from whale_tf.profiler.graph_profile import precision_of
from whale_tf.profiler.op_cost import op_costs, tensor_bytes
from whale_tf.simulator.step_graph import (
    FOR_ALL,
    PER_MICRO_BATCH,
    PER_STEP,
    UPDATES,
    StepGraph,
    StepOp,
    StepTensor,
    StepVariable,
)

_PART = re.compile(r"^shards(_\d+)?/\d+/(?=.)")  # what ``wh.split`` puts before the names of an op's parts


def step_graph(captured: Captured, region: Region, name: str, fingerprint: str, batch: int) -> StepGraph:
    """The region's ops and the update's, with their TaskGraphs.

    Args:
        captured: the graph as it runs: divided, where the plan divides it.
        region: its graph has static shapes, those of a mini-batch of ``batch``.
        fingerprint: of the graph as the user wrote it, which plans are made for.
    """
    graph = region.graph
    homes = captured.step(region).update.task_graph
    update = {op: homes.get(op, -1) for op in _update_ops(captured, graph)}
    members = [op for op in graph.ops if region.contains(op) or op.id in update]
    home = {op.id: max(0, update.get(op.id, captured.task_graph[op.id])) for op in graph.ops}
    numbers: Dict[int, int] = {}
    costs = op_costs(graph, batch)
    rows: List[StepOp] = []
    for op in members:
        inputs = tuple(
            (numbers[graph.tensors[t].op], graph.tensors[t].index)
            for t in op.inputs
            if graph.tensors[t].op in numbers and graph.producer(t).type not in VARIABLES
        )
        numbers[op.id] = len(rows)
        if op.id in update:
            runs = FOR_ALL if update[op.id] < 0 else UPDATES
        else:
            runs = PER_MICRO_BATCH if op.id in region.batch_level else PER_STEP
        waits = (numbers[before] for before in op.control_inputs if before in numbers and before in region.batch_level)
        cost = costs[op.id]
        rows.append(StepOp(
            op.name, op.type, runs, op.id in region.late, home[op.id], _shard(op), _PART.sub("", op.name),
            _PART.sub("", graph.ops[op.forward].name) if op.forward >= 0 else "", inputs,
            tuple(_tensor(region, graph, t, runs) for t in op.outputs), cost.flops, cost.bytes, cost.is_contraction,
            _takes_over(op, graph), tuple(waits) if runs == PER_MICRO_BATCH else ()))  # fmt: skip
    pulls = any(graph.producer(t).type.startswith("Iterator") for t in captured.sources)
    gradients = tuple((graph.ops[variable].name, numbers[graph.tensors[tensor].op], graph.tensors[tensor].index)
                      for tensor, variable in captured.gradients if graph.tensors[tensor].op in numbers)  # fmt: skip
    return StepGraph(name, fingerprint, batch, precision_of(graph), pulls, tuple(rows), _variables(captured, graph, home),
                     gradients)  # fmt: skip


def _update_ops(captured: Captured, graph: OpGraph) -> Set[int]:
    """APPLY ops that lead to a write."""
    found: Set[int] = set()
    for op in reversed(graph.ops):
        if op.phase is not Phase.APPLY or op.type in VARIABLES:
            continue
        users = {user for t in op.outputs for user, _ in graph.consumers(t)}
        if op.id in captured.phases.variables.written_by or not users.isdisjoint(found):
            found.add(op.id)
    return found


def _tensor(region: Region, graph: OpGraph, tensor: int, runs: str) -> StepTensor:
    size = float(tensor_bytes(graph, tensor))
    if runs != PER_MICRO_BATCH:
        return StepTensor(size)
    layout = region.batch.layout(tensor)
    return StepTensor(size, layout.is_sharded, layout.is_partial)


def _takes_over(op: Op, graph: OpGraph) -> bool:
    if not op.inputs or not op.outputs:
        return False
    if op.type in SAME_BUFFER:
        return True
    readers = {user for user, _ in graph.consumers(op.inputs[0]) if graph.ops[user].type not in SHAPE_ONLY}
    same = tensor_bytes(graph, op.inputs[0]) == tensor_bytes(graph, op.outputs[0])
    return op.type in OVERWRITES and len(readers) == 1 and same


def _variables(captured: Captured, graph: OpGraph, home: Dict[int, int]) -> Tuple[StepVariable, ...]:
    """Variables of the region, each with its slots."""
    variables, state = captured.phases.variables, captured.state_bytes()
    return tuple(
        StepVariable(graph.ops[number].name, captured.variable_homes[number], _shard(graph.ops[number]),
                     float(variables[number].bytes + state.get(number, 0)))
        for number in captured.variable_homes if number in variables)  # fmt: skip


def _shard(op: Op) -> int:
    return max(0, int(op.attrs.get(SHARD_ATTR, 0)))
