"""Batch-level ops into bodies: of each TaskGraph the early, the forward and the backward ops.

::

    region      x ──> matmul ──> relu ──> loss ──> grad ──> grad_matmul          TaskGraph 0: matmul, relu, grad_matmul

    bodies      t0_forward {matmul, relu} ──> t1_forward {loss} ──> t1_backward {grad} ──> t0_backward {grad_matmul}

A backward op never comes before a forward op of its TaskGraph, and early ops come before both, so each TaskGraph's bodies follow
one another.
"""

from __future__ import annotations

from typing import Dict, List, Set

from whale_tf.ir.batch_axis import Reduce
from whale_tf.ir.graph import Op
from whale_tf.ir.region import Region
from whale_tf.program import BACKWARD, EARLY, FORWARD, STEPS, Body, Program

UNSENT = ("resource", "variant")  # nobody fetches tensors of these types


def outline(region: Region) -> Program:
    """The bodies of a region; ops that all clones share (``BatchAxis.shared``) stay outside."""
    graph = region.graph
    shared = set(region.batch.shared)
    members: Dict[int, Dict[str, List[int]]] = {}
    for index in region.ops:
        if index in region.batch_level and index not in shared:
            steps = members.setdefault(region.task_graph[index], {step: [] for step in STEPS})
            steps[step_of(region, index)].append(index)
    read_elsewhere = _read_elsewhere(region)
    bodies = []
    for task_graph in sorted(members):
        for step in STEPS:
            ops = members[task_graph][step]
            if ops:
                own = set(ops)
                inputs = dict.fromkeys(t for i in ops for t in graph.ops[i].inputs if graph.tensors[t].op not in own)
                outputs = [t for i in ops for t in graph.ops[i].outputs
                           if t in read_elsewhere or _is_result(region, graph.ops[i], t)
                           or any(user not in own and user in region.batch_level for user, _ in graph.consumers(t))]
                bodies.append(Body(f"t{task_graph}_{step}", task_graph, step, tuple(ops), tuple(inputs), tuple(outputs)))
    return Program(graph, tuple(bodies))


def step_of(region: Region, index: int) -> str:
    """The step that a batch-level op belongs to."""
    if index in region.early:
        return EARLY
    return BACKWARD if index in region.late else FORWARD


def _read_elsewhere(region: Region) -> Set[int]:
    """Tensors that ops outside the region read, and those that are combined over all clones."""
    found = set(region.leaving())
    for (op, position), conversions in region.batch.conversions.items():
        if any(isinstance(conversion, Reduce) for conversion in conversions):
            found.add(region.graph.ops[op].inputs[position])
    return found


def _is_result(region: Region, op: Op, tensor: int) -> bool:
    """What a user is likely to fetch: results that nothing reads, and scalars that no gradient function made."""
    record = region.graph.tensors[tensor]
    if record.dtype in UNSENT or record.dtype.endswith("_ref"):
        return False
    if not any(region.graph.consumers(t) for t in op.outputs):
        return True
    return record.shape == () and op.forward < 0
