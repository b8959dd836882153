"""A captured training graph as the simulator's :class:`StepGraph`."""

from __future__ import annotations

import re
from typing import Dict, List, Set, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import OVERWRITES, VARIABLES
from whale_tf.passes.outline import step_of
from whale_tf.profiler.chain import shares_buffer
from whale_tf.profiler.graph_profile import precision_of
from whale_tf.profiler.op_cost import op_costs, tensor_bytes
from whale_tf.program import ONCE, UPDATE
from whale_tf.simulator.step_graph import StepGraph, StepOp, StepTensor, StepVariable

_PART = re.compile(r"^shards(_\d+)?/\d+/(?=.)")  # prefix of the names of an op's parts


def part_of(name: str) -> str:
    """The op of which the op of this name is a part; empty: it is not a part."""
    found = _PART.match(name)
    return name[found.end():] if found else ""


def step_graph(captured: Captured, region: Region, name: str, fingerprint: str, batch: int) -> StepGraph:
    """The region's ops and the update's, with their TaskGraphs.

    Args:
        captured: the graph as it runs: divided if the plan divides it.
        region: its graph has static shapes, those of a mini-batch of ``batch``.
        fingerprint: that of the graph as the user wrote it, for which plans are made.
    """
    graph = region.graph
    update = _update_ops(captured, graph)
    used = {graph.tensors[t].op for op in graph.ops if region.contains(op) or op.id in update for t in op.inputs}
    members = [op for op in graph.ops if region.contains(op) or op.id in update or (op.type in VARIABLES and op.id in used)]
    numbers: Dict[int, int] = {}
    costs, combined = op_costs(graph, batch), region.batch.combined()
    rows: List[StepOp] = []
    for op in members:
        inputs = [(t, at) for at, t in enumerate(op.inputs) if graph.tensors[t].op in numbers]
        whole = (place for place, (_, at) in enumerate(inputs) if (op.id, at) in combined)
        numbers[op.id] = len(rows)
        is_cloned = op.id in region.batch_level
        step = step_of(region, op.id) if is_cloned else ONCE if region.contains(op) else UPDATE
        waits = (numbers[before] for before in op.control_inputs if before in numbers and before in region.batch_level)
        cost = costs[op.id]
        rows.append(StepOp(
            op.name, op.type, step, max(0, captured.task_graph[op.id]), op.shard, _PART.sub("", op.name),
            _PART.sub("", graph.ops[op.forward].name) if op.forward >= 0 else "",
            tuple((numbers[graph.tensors[t].op], graph.tensors[t].index) for t, _ in inputs),
            tuple(_tensor(region, graph, t, is_cloned) for t in op.outputs), cost.flops, cost.bytes, cost.is_contraction,
            shares_buffer(op), tuple(waits) if is_cloned else (), tuple(whole), op.type in OVERWRITES))  # fmt: skip
    pulls = any(graph.producer(t).type.startswith("Iterator") for t in captured.sources)
    gradients = tuple((graph.ops[variable].name, numbers[graph.tensors[tensor].op], graph.tensors[tensor].index)
                      for tensor, variable in captured.gradients if graph.tensors[tensor].op in numbers)  # fmt: skip
    return StepGraph(name, fingerprint, batch, precision_of(graph), pulls, tuple(rows), _variables(captured, graph), gradients)


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


def _tensor(region: Region, graph: OpGraph, tensor: int, is_cloned: bool) -> StepTensor:
    size = float(tensor_bytes(graph, tensor))
    return StepTensor(size, region.batch.layout(tensor).kind) if is_cloned else StepTensor(size)


def _variables(captured: Captured, graph: OpGraph) -> Tuple[StepVariable, ...]:
    """Variables of the region, each with its slots."""
    variables, state = captured.phases.variables, captured.state_bytes()
    return tuple(
        StepVariable(graph.ops[number].name, captured.variable_task_graph[number], graph.ops[number].shard,
                     float(variables[number].bytes + state.get(number, 0)), float(state.get(number, 0)))
        for number in captured.variable_task_graph if number in variables)  # fmt: skip
