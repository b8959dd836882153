"""Ops into bodies: of each TaskGraph what runs once, the early, the forward and the backward ops, and the optimizer's.

::

    region      x ──> matmul ──> relu ──> loss ──> grad ──> grad_matmul          TaskGraph 0: matmul, relu, grad_matmul

    bodies      t0_forward {matmul, relu} ──> t1_forward {loss} ──> t1_backward {grad} ──> t0_backward {grad_matmul}

A backward op never comes before a forward op of its TaskGraph, and early ops come before both, so each TaskGraph's bodies follow
one another.  The optimizer's ops are in several bodies where they go back and forth between a TaskGraph and what runs once.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Sequence, Set, Tuple

from whale_tf.ir.batch_axis import Reduce
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import VARIABLES
from whale_tf.plan import Plan
from whale_tf.program import ALL, BACKWARD, BATCH_LEVEL, EARLY, FORWARD, ONCE, SECTION, UPDATE, Body, Program

UNSENT = ("resource", "variant")  # nobody fetches tensors of these types


def outline(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The bodies of a step.  Variables, and ops that all clones share (``BatchAxis.shared``), stay outside."""
    return program.with_calls(_once(step) + _cloned(step.region) + _updates(step), ())


def _once(step: TrainingStep) -> List[Body]:
    region, outside = step.region, {*step.update.variables, *step.region.batch.shared}
    members: Dict[int, List[int]] = {}
    for index in region.ops:
        if index not in region.batch_level and index not in outside:
            members.setdefault(region.task_graph[index], []).append(index)
    return [_body(region.graph, f"t{task_graph}_once", task_graph, ONCE, members[task_graph]) for task_graph in sorted(members)]


def _cloned(region: Region) -> List[Body]:
    graph, shared = region.graph, set(region.batch.shared)
    rounds = _rounds(region)
    members: Dict[Tuple[int, int, int], List[int]] = {}
    for index in region.ops:
        if index in region.batch_level and index not in shared:
            key = region.task_graph[index], BATCH_LEVEL.index(step_of(region, index)), rounds.get(index, 0)
            members.setdefault(key, []).append(index)
    leaving = read_elsewhere(region)
    bodies = []
    for task_graph, place, number in sorted(members):
        ops, kind = members[task_graph, place, number], BATCH_LEVEL[place]
        own = set(ops)
        outputs = [t for i in ops for t in graph.ops[i].outputs
                   if t in leaving or _is_result(region, graph.ops[i], t)
                   or any(user not in own and user in region.batch_level for user, _ in graph.consumers(t))]
        name = f"t{task_graph}_{kind}" + (f"_{number}" if number else "")
        bodies.append(_body(graph, name, task_graph, kind, ops, outputs))
    return bodies


def _rounds(region: Region) -> Dict[int, int]:
    """Early op, or op of a section -> how many values of the whole mini-batch, or updates, it follows from, one after another."""
    combined = {key for key, conversions in region.batch.conversions.items()
                if any(isinstance(conversion, Reduce) for conversion in conversions)}
    rounds: Dict[int, int] = {}
    for op in region.graph.ops if combined or region.rereads or region.sections else ():
        waits, is_whole = region.rereads.get(op.id, ()), op.id in region.sections
        before = [rounds.get(source, 0) + ((op.id, position) in combined or (is_whole and source in region.early))
                  for position, source in enumerate(region.graph.tensors[tensor].op for tensor in op.inputs)]
        rounds[op.id] = max(before + [rounds.get(control, 0) + (control in waits) for control in op.control_inputs], default=0)
    return {index: number for index, number in rounds.items() if index in region.early or index in region.sections}


def _updates(step: TrainingStep) -> List[Body]:
    """The optimizer's ops by TaskGraph, in rounds: what follows from another's round comes in a later one."""
    graph, home = step.graph, step.update.task_graph
    rounds: Dict[int, int] = {}
    members: Dict[Tuple[int, int], List[int]] = {}
    for op in graph.ops:
        if op.phase is Phase.APPLY and op.type not in VARIABLES:
            own = home.get(op.id, ALL)
            rounds[op.id] = max([rounds[before] + (home.get(before, ALL) != own)
                                 for before in graph.predecessors(op) if before in rounds], default=0)
            members.setdefault((rounds[op.id], own), []).append(op.id)
    bodies = []
    for number, task_graph in sorted(members):
        name = "update" if task_graph == ALL else f"t{task_graph}_update"
        bodies.append(_body(graph, name + (f"_{number}" if number else ""), task_graph, UPDATE, members[number, task_graph]))
    return bodies


def _body(graph: OpGraph, name: str, task_graph: int, kind: str, ops: Sequence[int], outputs: Iterable[int] = ()) -> Body:
    own = set(ops)
    inputs = dict.fromkeys(t for i in ops for t in graph.ops[i].inputs if graph.tensors[t].op not in own)
    if not outputs:
        outputs = [t for i in ops for t in graph.ops[i].outputs if any(user not in own for user, _ in graph.consumers(t))]
    return Body(name, task_graph, kind, tuple(ops), tuple(inputs), tuple(outputs))


def step_of(region: Region, index: int) -> str:
    """The step that a batch-level op belongs to."""
    if index in region.sections:
        return SECTION
    if index in region.early:
        return EARLY
    return BACKWARD if index in region.late else FORWARD


def read_elsewhere(region: Region) -> Set[int]:
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
