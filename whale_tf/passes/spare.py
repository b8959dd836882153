"""Trims bodies that are emitted as functions.  A call's arguments live until it ends, so tensors that cross cost memory.

A TaskGraph's forward body does not pass two kinds of tensors to its backward body:

- tensors that only dead ops read (the gradient of a product is made for both operands, even if one of them is a constant, and in
  TensorFlow 1 each of the two gradients waits for both);
- tensors that cheap ops can compute again (``whale_tf.passes.redo``).

Where the schedule lets a TaskGraph run its backward step right after its own forward step, nothing crosses: one body does both
(``whale_tf.passes.fuse``).  What does cross is donated where that is possible (``whale_tf.passes.donate``): the backward body
frees or overwrites it.

A call's results live until it ends, so a backward body with large gradients becomes several functions
(``whale_tf.passes.functions``).
"""

from __future__ import annotations

from typing import Optional, Sequence, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import Region, groups
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import Buffer, Cost, Role, VariableUse, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.donate import donatable, donate
from whale_tf.passes.form import choose_form
from whale_tf.passes.functions import fits_in_one, in_functions, taken_bytes
from whale_tf.passes.fuse import joinable
from whale_tf.passes.outline import UNSENT, is_result, read_elsewhere, reads_by_handle
from whale_tf.passes.redo import Redo, in_order, one_example, waits
from whale_tf.plan import Plan
from whale_tf.profiler.op_cost import tensor_bytes
from whale_tf.program import BACKWARD, CLONED, FORWARD, WEIGHT, Body, Program

REDO = 0.25  # bytes that must be saved for each recomputed byte
MOST_FLOPS = 1.0  # FLOPs per element; an op that takes more is not repeated


def spare(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The same bodies without dead ops, and with fewer bytes that live.  Inlined bodies do not change."""
    region = step.region
    if not choose_form(program, region, plan).is_called:
        return program
    live = _live(program, region)
    bodies = [_with_runs(region, body, [index for index in body.ops if index in live]) if body.step in CLONED else body
              for body in program.bodies]
    sizes = one_example(region.graph)
    for forward, backward, both in joinable(bodies, step, plan):
        if fits_in_one(step, plan, sizes, backward, both):
            bodies[bodies.index(backward)] = both
            bodies.remove(forward)
    for number, body in enumerate(bodies):
        if body.step in (BACKWARD, WEIGHT) and not body.with_forward:
            before = next((b for b in bodies if b.task_graph == body.task_graph and b.step == FORWARD), None)
            bodies[number] = _in_backward(step, plan, sizes, before, body)
    read = read_elsewhere(region).union(*(body.inputs for body in bodies))
    return program._replace(bodies=tuple(
        body._replace(outputs=tuple(
            t for i in body.ops if i in live for t in region.graph.ops[i].outputs if t in read or _is_shown(region, t)))
        if body.step in CLONED else body for body in bodies))


def _live(program: Program, region: Region) -> Set[int]:
    """Ops of called bodies that outside ops or a user may need.

    A gradient that only a group waits for is not needed.  A call ends when all its ops have ended, so the order inside it does
    not matter to whatever waits for the call.
    """
    graph, ordering = region.graph, groups(region.graph)
    members = {index for body in program.bodies if body.step in CLONED for index in body.ops}
    elsewhere = read_elsewhere(region)
    waited = {c for op in graph.ops if op.id not in members and op.phase is not Phase.UNUSED for c in op.control_inputs}
    needed = (index for index in members
              if index in waited or not (graph.ops[index].outputs or index in ordering)
              or any(t in elsewhere or _is_shown(region, t) for t in graph.ops[index].outputs))
    return reached(needed, lambda index: members.intersection(graph.predecessors(graph.ops[index])).difference(ordering))


def _is_shown(region: Region, tensor: int) -> bool:
    """Whether a body returns a tensor only for the user.  It does not if a gradient function made the tensor and nothing reads
    it."""
    return is_result(region, tensor) and (region.graph.producer(tensor).forward < 0 or reads_by_handle(region.graph, tensor))


def _with_runs(region: Region, body: Body, runs: Sequence[int], waits: Sequence[Tuple[int, int]] = ()) -> Body:
    """The body as one function of other ops.

    Args:
        runs: the ops, in an order in which they can run.
    """
    graph, own = region.graph, set(runs)
    inputs = dict.fromkeys(t for i in sorted(own) for t in graph.ops[i].inputs if graph.tensors[t].op not in own)
    return body._replace(functions=(tuple(runs),), inputs=tuple(inputs), waits=tuple(waits))


def _in_backward(step: TrainingStep, plan: Plan, sizes: OpGraph, forward: Optional[Body], backward: Body) -> Body:
    """The backward body with the ops that it repeats, in functions, which own what the forward body donates."""
    if forward is None:
        return in_functions(step, plan, sizes, backward, backward)
    called = _repeating(step.region, sizes, forward, backward)
    taken = taken_bytes(step, plan, sizes, called)
    donated = donatable(step.graph, plan.task_graphs[backward.task_graph], forward, taken)
    return donate(step.region, in_functions(step, plan, sizes, backward, called, donated), donated)


def _repeating(region: Region, sizes: OpGraph, forward: Body, backward: Body) -> Body:
    """The backward body with the ops that it repeats."""
    graph, batch, members = region.graph, region.batch, set(forward.runs)
    refused = {op for op, _ in (*batch.combined(), *batch.attributes, *batch.bodies)}.union(batch.own_seed)

    def may(op: Op) -> bool:
        return op.id in members and op.id not in refused and _is_cheap(graph, op)

    def work(op: Op) -> int:
        return 0 if traits(op.type).cost is Cost.FREE else int(REDO * sum(tensor_bytes(sizes, t) for t in op.outputs))

    wanted = [t for t in backward.inputs if graph.tensors[t].op in members]
    redone, own = Redo(region, may, work, local=batch.localise.keys()).ops(wanted), set(backward.runs)
    return _with_runs(region, backward, in_order(graph, redone, own), sorted(waits(graph, redone, own).items()))


def _is_cheap(graph: OpGraph, op: Op) -> bool:
    """Whether an op gives the same result again, at little cost."""
    row = traits(op.type)
    if row.role is not Role.COMPUTE or row.state is not VariableUse.NONE or op.control_inputs:
        return False
    if any(graph.tensors[t].dtype in UNSENT or graph.tensors[t].dtype.endswith("_ref")
           or graph.tensors[t].shape is None for t in (*op.inputs, *op.outputs)):
        return False
    if row.cost is Cost.RESULT:
        return row.buffer is Buffer.OVERWRITES and row.flops <= MOST_FLOPS and not row.is_dear
    return row.cost in (Cost.FREE, Cost.MOVE, Cost.ADDS) and bool(row.rule)
