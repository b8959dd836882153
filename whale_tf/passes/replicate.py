"""Bodies into calls: one for each model replica, micro-batch and replica, on the Plan's devices.

A call takes a tensor of its own TaskGraph from the call with the same coordinates.  Between TaskGraphs with different numbers of
replicas it takes the parts that overlap its own (``whale_tf.bridges``).
"""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from whale_tf.bridges import Cuts, crossing, cuts
from whale_tf.ir.batch_axis import Reduce
from whale_tf.ir.region import Region
from whale_tf.plan import Plan, TaskGraphPlan
from whale_tf.program import Call, Clone, Program, Value


def replicate(program: Program, region: Region, plan: Plan) -> Program:
    """The calls of every body, in the order of the examples they work on."""
    body_of = program.body_of()
    number: Dict[Tuple[int, Clone], int] = {}
    places: List[Tuple[int, Clone]] = []
    for index, body in enumerate(program.bodies):
        for clone in clones(plan, body.task_graph):
            number[index, clone] = len(places)
            places.append((index, clone))
    combined = combined_in(program, region)
    calls = []
    for index, clone in places:
        task_graph = program.bodies[index].task_graph
        takes = []
        for tensor in program.bodies[index].inputs:
            source = body_of.get(program.graph.tensors[tensor].op)
            if source is not None:
                producer = program.bodies[source].task_graph
                is_combined = (index, tensor) in combined
                pieces = clones(plan, producer) if is_combined else pieces_of(plan, producer, task_graph, clone)
                takes.append(Value(tensor, tuple(number[source, piece] for piece in pieces)))
        calls.append(Call(index, clone, devices_of(plan.task_graphs[task_graph], clone), tuple(takes)))
    return program._replace(calls=tuple(calls))


def combined_in(program: Program, region: Region) -> Set[Tuple[int, int]]:
    """(body, tensor) where the body reads the value of all clones together."""
    body_of = program.body_of()
    return {(body_of[op], region.graph.ops[op].inputs[position])
            for (op, position), conversions in region.batch.conversions.items()
            if op in body_of and any(isinstance(conversion, Reduce) for conversion in conversions)}


def clones(plan: Plan, task_graph: int) -> List[Clone]:
    """All clones of a TaskGraph, in the order of their examples."""
    count = plan.task_graphs[task_graph].replica_count
    return [Clone(g, m, r) for g in range(plan.num_model_replicas) for m in range(plan.num_micro_batch) for r in range(count)]


def devices_of(task: TaskGraphPlan, clone: Clone) -> Tuple[int, ...]:
    """The devices of a clone: under ``split`` all of the replica's, which share its ops."""
    row = task.devices[clone.g]
    return row if task.strategy == "split" else (row[clone.r],)


def pieces_of(plan: Plan, producer: int, consumer: int, clone: Clone) -> List[Clone]:
    """Clones of the producer that overlap a clone of the consumer."""
    own, others = _cuts(plan.task_graphs[consumer]), _cuts(plan.task_graphs[producer])
    if own == others:
        return [clone]
    return [clone._replace(r=r) for r in crossing(others, own, clone.r).producers]


def _cuts(task: TaskGraphPlan) -> Cuts:
    return cuts(task.replica_count, task.batch_slices)
