"""The facts about each TaskGraph that a plan needs: bytes kept, bytes transferred, order of gradients."""

from __future__ import annotations

from typing import AbstractSet, Dict, List, Mapping, Sequence, Set, Tuple

from whale_tf.ir.graph import TRAINED, OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import ENTERS
from whale_tf.planner.assemble import Crossing, StageStatistics
from whale_tf.planner.buckets import Gradient
from whale_tf.profiler.op_cost import tensor_bytes


def stage_statistics(region: Region, gradients: Sequence[Tuple[int, int]], variable_task_graph: Dict[int, int], count: int,
                     calls: Mapping[int, int], sizes: Mapping[int, Tuple[int, int]],
                     apart: AbstractSet[int]) -> List[StageStatistics]:
    """The statistics of each TaskGraph.

    Args:
        gradients: (gradient tensor, variable op) in the order in which the gradients become ready.
        calls: gradient tensor -> number of the gradient call.
        variable_task_graph: variable op -> TaskGraph.
        sizes: variable op -> its bytes, and those of its optimizer state.
        apart: variables that are also written by what cannot be copied for each of their copies.
    """
    graph = region.graph
    ops: List[List[str]] = [[] for _ in range(count)]
    kept: List[Set[int]] = [set() for _ in range(count)]
    for index in region.ops:
        op = graph.ops[index]
        task_graph = region.task_graph[index]
        if op.phase is Phase.FORWARD:
            ops[task_graph].append(op.name)
        if index in region.late:
            kept[task_graph].update(t for t in op.inputs
                                    if graph.tensors[t].op in region.batch_level and graph.tensors[t].op not in region.late)
    parameters, state, summed = [0] * count, [0] * count, [0] * count
    for variable in dict.fromkeys(variable for _, variable in gradients):
        own, kept_for_it = sizes.get(variable, (0, 0))
        parameters[variable_task_graph.get(variable, 0)] += own
        state[variable_task_graph.get(variable, 0)] += kept_for_it
    found: List[List[Gradient]] = [[] for _ in range(count)]
    for tensor, variable in gradients:
        task_graph = variable_task_graph.get(variable, 0)
        summed[task_graph] += tensor_bytes(graph, tensor)
        found[task_graph].append(_gradient(region, tensor, variable, task_graph, calls.get(tensor, -1)))
    loops = _read_in_loops(graph, variable_task_graph)
    return [
        StageStatistics(
            tuple(ops[i]), sum(tensor_bytes(graph, t) for t in kept[i]), parameters[i], state[i], tuple(found[i]),
            tuple(name for name, task_graph in loops if task_graph == i),
            tuple(graph.ops[variable].name for variable, task_graph in variable_task_graph.items()
                  if task_graph == i and variable in apart), summed[i])
        for i in range(count)]


def _read_in_loops(graph: OpGraph, variable_task_graph: Dict[int, int]) -> List[Tuple[str, int]]:
    """(variable, its TaskGraph) for variables whose handles enter the frames of the step's version 1 while loops."""
    return [
        (graph.ops[variable].name, task_graph)
        for variable, task_graph in variable_task_graph.items()
        if any(graph.ops[user].type in ENTERS and graph.ops[user].phase in TRAINED
               for user, _ in graph.consumers(graph.ops[variable].outputs[0]))]


def _gradient(region: Region, tensor: int, variable: int, task_graph: int, call: int) -> Gradient:
    """Dense gradients that their own TaskGraph computes can travel together."""
    graph = region.graph
    record = graph.tensors[tensor]
    dense = record.op in region.batch_level and region.batch.layout(tensor).is_partial
    size = tensor_bytes(graph, tensor) if dense and region.task_graph[record.op] == task_graph else 0
    return Gradient(graph.ops[variable].name, size, (record.dtype, call))


def crossings(region: Region) -> List[Crossing]:
    """Every tensor that one TaskGraph computes and another reads, once for each reading TaskGraph."""
    graph = region.graph
    found: Dict[Tuple[int, int, int], Crossing] = {}
    for index in region.ops:
        consumer = region.task_graph[index]
        for tensor in graph.ops[index].inputs:
            producer = graph.tensors[tensor].op
            task_graph = region.task_graph[producer]
            if task_graph < 0 or task_graph == consumer or not region.contains(graph.ops[producer]):
                continue
            if graph.tensors[tensor].dtype == "resource" or graph.tensors[tensor].dtype.endswith("_ref"):
                continue
            if (tensor, task_graph, consumer) not in found:
                per_batch = producer in region.batch_level
                found[tensor, task_graph, consumer] = Crossing(
                    graph.tensor_name(tensor), task_graph, consumer, region.batch.layout(tensor) if per_batch else None,
                    tensor_bytes(graph, tensor))
    return list(found.values())
