"""Chooses how a Program is emitted: every op of every call inlined into the graph, or each call as one op that calls a function.

Calls keep a large step small: its size grows with the number of calls, and not with calls times ops.  They are an advantage at
the start, because TensorFlow's start takes longer for larger graphs.  An inlined step needs a little less time, and less memory
if gradients of weights fill it: a function's arguments live until it ends, and its results appear all at once (see also
``spare``).  So ``emit: auto`` calls large steps, unless only the inlined one fits in memory
(``whale_tf.planner.play.called_too_large``).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Optional

import networkx as nx

from whale_tf.errors import PlanError, memory_text
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.demand import find_demand
from whale_tf.ir.graph import Op
from whale_tf.ir.region import Region
from whale_tf.ir.traits import ENTERS, SWITCHES
from whale_tf.passes.replicate import clones
from whale_tf.passes.schedule import body_graph
from whale_tf.plan import Plan
from whale_tf.program import BATCH_LEVEL, CLONED, Program

INLINE, CALL, AUTO = "inline", "call", "auto"
MOST_INLINED_OPS = 20_000  # larger steps are called under emit: auto; see "Emission" in benchmarks/README.md


class Form(NamedTuple):
    """``kind`` is :data:`INLINE` or :data:`CALL`, and ``reason`` the explanation that ``wh.explain()`` prints."""

    kind: str
    reason: str

    @property
    def is_called(self) -> bool:
        return self.kind == CALL


def choose_form(program: Program, region: Region, plan: Plan) -> Form:
    """The form that the plan asks for, or the better one; inlined if calls are not possible.

    Raises:
        PlanError: XLA shall compile calls, but they are not possible or not wanted.
    """
    size = inlined_ops(region, plan)
    xla = any(task.xla for task in plan.task_graphs)
    if plan.emit == INLINE and not xla:
        return Form(INLINE, "set by emit")
    if plan.emit != CALL and not xla and not is_large(region, plan):
        return Form(INLINE, f"the step has {size} ops in its calls, and up to {MOST_INLINED_OPS} are inlined")
    peaks = plan.estimate.called_peak_memory_bytes
    if plan.emit == AUTO and not xla and peaks:
        most = memory_text(max(peaks))
        return Form(INLINE, f"inlined, the step fits in memory; called, it does not (up to {most} on a device)")
    obstacle = why_not_called(program, region, plan)
    if not obstacle and plan.emit != CALL and not xla and has_reference_variables(program):
        obstacle = ("reference variables are updated in place, so a tensor that is fetched beside an update cannot be computed "
                    "again; use resource variables, or set emit to 'call' and fetch results only")
    if xla and (obstacle or plan.emit == INLINE):
        raise PlanError(f"xla compiles called functions, but {obstacle or 'emit is inline'}; set xla to false")
    if xla:
        return Form(CALL, "XLA compiles calls")
    if obstacle:
        return Form(INLINE, f"not called: {obstacle}")
    return Form(CALL, "set by emit" if plan.emit == CALL else f"the step would have {size} ops inlined")


def inlined_ops(region: Region, plan: Plan) -> int:
    """The number of ops in all clones of an inlined step."""
    once = region.sections | region.drawn_once
    homes = Counter(region.task_graph[index] for index in region.ops if index in region.batch_level and index not in once)
    return sum(count * len(clones(plan, task_graph)) for task_graph, count in homes.items())


def is_large(region: Region, plan: Plan) -> bool:
    """Whether ``emit: auto`` calls a step of this size."""
    return inlined_ops(region, plan) > MOST_INLINED_OPS


def has_reference_variables(program: Program) -> bool:
    """Whether a body reads a reference variable (TensorFlow 1)."""
    graph = program.graph
    return any(graph.tensors[tensor].dtype.endswith("_ref") or any(
        graph.tensors[source].dtype.endswith("_ref") for source in graph.producer(tensor).inputs)
        for body in program.bodies if body.step in CLONED for tensor in body.inputs)


def _seeded_by_operand(axis: BatchAxis) -> Optional[Op]:
    """A random op, here or in a function body, of which each clone draws its own part, and which has no seed attribute."""
    found = (axis.graph.ops[index] for index in axis.own_seed if "seed" not in axis.graph.ops[index].attrs)
    return next(found, None) or next((op for op in map(_seeded_by_operand, axis.bodies.values()) if op is not None), None)


def _drawn_in_bodies(axis: BatchAxis) -> Optional[Op]:
    """A random op in a function body, whose numbers all clones share."""
    found = (body.graph.ops[index] for body in axis.bodies.values() for index in body.shared)
    return next(found, None) or next((op for op in map(_drawn_in_bodies, axis.bodies.values()) if op is not None), None)


def why_not_called(program: Program, region: Region, plan: Plan) -> str:
    """The reason why calls are not possible; empty if they are."""
    graph = region.graph
    for task in plan.task_graphs:
        if task.strategy == "split":
            return f"TaskGraph {task.name!r} divides its ops over devices"
    for body in program.bodies:
        for index in body.ops if body.step in CLONED else ():
            if graph.ops[index].type in ENTERS | SWITCHES:
                return f"op {graph.ops[index].name!r} belongs to a loop or condition of TensorFlow 1"
    if plan.random == "local" and region.batch.own_seed:
        return f"op {graph.ops[region.batch.own_seed[0]].name!r} draws once for the whole mini-batch (random: local)"
    seeded = _seeded_by_operand(region.batch)
    if seeded is not None:
        return f"op {seeded.name!r} is seeded by an operand, which would have to be different in each call"
    drawn = _drawn_in_bodies(region.batch) if plan.num_micro_batch > 1 else None
    if drawn is not None:
        return f"op {drawn.name!r} draws in a loop, condition or function, and would draw other numbers for each micro-batch"
    if region.rereads:
        return f"op {graph.ops[min(region.rereads)].name!r} reads a variable after its update in the same step"
    if not nx.is_directed_acyclic_graph(body_graph(program, BATCH_LEVEL)):
        return "TaskGraphs, or clones and ops that need all examples, need each other's results back and forth"
    if not region.once(find_demand).is_single:
        return "a run of one of the updates may need only some of the inputs, but a call takes them all"
    return ""
