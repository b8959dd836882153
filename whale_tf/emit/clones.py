"""Clone the region: step-level ops once per copy of their TaskGraph, batch-level ops once per clone."""

from __future__ import annotations

import functools
from typing import Dict, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.emit.bodies import Bodies, is_divided_inside, place_body
from whale_tf.emit.calls import Calls, control_for
from whale_tf.emit.context import ORIGINAL, Clone, Context, Coordinates
from whale_tf.emit.draws import LOCAL, take_rows
from whale_tf.emit.guard import Guard
from whale_tf.emit.loops import check_loops, enter_loops
from whale_tf.emit.operands import Operands
from whale_tf.emit.order import Order
from whale_tf.graph_editor.edges import canonical_edge
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.template import Templates
from whale_tf.ir.graph import Op
from whale_tf.ir.meetings import FUNCTIONAL
from whale_tf.program import EVERY
from whale_tf.transforms.attributes import open_shapes, own_numbers


class _Part(NamedTuple):
    """The ops of one TaskGraph on one level, and their connections to the rest of the graph."""

    templates: Templates
    boundary: Sequence[Tuple[Op, int]]  # inputs that come from elsewhere, or need a conversion
    waits: Sequence[int]  # ops elsewhere from which some op has a control edge
    random: Sequence[Op]  # ops whose clones draw their own numbers
    counted: Sequence[Op]  # ops whose clones must be told how many rows their results have
    shaped: Sequence[Op]  # ops with an attribute that contains the whole batch's size
    functional: Sequence[Op]  # ops that call functions
    pinned: Sequence[str]  # names of ops that run where their variable is
    guarded: Sequence[int]  # batch-level ops, which may read several inputs
    with_bodies: Sequence[Op]  # those of them that have bodies
    inside: Sequence[Op]  # loops whose bodies are on several devices
    kept: Sequence[Tuple[Op, Sequence[Op]]]  # ops with the ops of this part for which they still wait, though others do not


def clone_region(context: Context, operands: Operands, order: Order, guard: Guard, after: Set[int]) -> Calls:
    """Stages all clones, or all calls; if there is one clone of each op, the ops themselves stay where they are.

    Args:
        after: ops outside the region that follow from it; clones cannot wait for them (see ``reroute.deferred``).
    """
    check_loops(context)
    bodies = Bodies(context, operands.converter)
    calls = Calls(context, operands, bodies, guard, after)
    if context.is_in_place:
        _wait_in_place(context, order)
        return calls
    for task_graph in range(len(context.plan.task_graphs)):
        step = _part(operands, task_graph, batch_level=False)
        for copy in context.copies(task_graph):
            if copy != ORIGINAL:
                _clone(context, operands, bodies, order, guard, after, task_graph, step, copy)
        if not context.is_called:
            batch = _part(operands, task_graph, batch_level=True)
            for clone in context.clones(task_graph):
                _clone(context, operands, bodies, order, guard, after, task_graph, batch, clone)
        section = _part(operands, task_graph, batch_level=True, sections=True)  # one call, so never a function
        _clone(context, operands, bodies, order, guard, after, task_graph, section, EVERY)
    if context.is_called:
        calls.stage(order)
    enter_loops(context)
    return calls


def _wait_in_place(context: Context, order: Order) -> None:
    """Makes ops that are not cloned wait as the schedule says."""
    for task_graph in range(len(context.plan.task_graphs)):
        (clone,) = context.clones(task_graph)
        for name, barriers in (order.barriers(task_graph, clone) or {}).items():
            context.edit.move_waits(name, (), barriers)
        order.gate(task_graph, clone)


def _part(operands: Operands, task_graph: int, batch_level: bool, sections: bool = False) -> _Part:
    context = operands.context
    region, graph = context.region, context.graph
    once = set(context.variables) | region.drawn_once
    ops = [op for op in region.of_task_graph(task_graph, batch_level)
           if op.id not in once and (op.id in region.sections) == sections]
    members = {op.id for op in ops}
    changed = set(region.batch.conversions) | set(region.batch.localise) | operands.converter.division.rescaled
    boundary = [(op, position) for op in ops for position, tensor in enumerate(op.inputs)
                if graph.tensors[tensor].op not in members or (op.id, position) in changed]
    waits = sorted({control for op in ops for control in op.control_inputs if control not in members})
    batch = region.batch
    random, counted, shaped, functional = (
        [op for op in ops if op.id in chosen and not sections]  # a section is as the script wrote it
        for chosen in (set(batch.own_seed), batch.counted_rows.keys(), {index for index, _ in batch.attributes},
                       {index for index, _ in batch.bodies}))
    templates = context.edit.templates(context.tf_ops[op.id] for op in ops)
    pinned = [op.name for op in ops if op.name in context.pinned]
    guarded = ops if batch_level else []
    with_bodies = [op for op in guarded if op.type in FUNCTIONAL]
    inside = [op for op in ops if is_divided_inside(op)]
    kept = [(op, [graph.ops[wait] for wait in op.control_inputs if wait in context.dropped and wait in members]) for op in ops]
    return _Part(templates, boundary, waits, random, counted, shaped, functional, pinned, [op.id for op in guarded], with_bodies,
                 inside, [(op, waited) for op, waited in kept if waited])


def _clone(context: Context, operands: Operands, bodies: Bodies, order: Order, guard: Guard, after: Set[int], task_graph: int,
           part: _Part, at: Coordinates) -> None:
    if not part.templates:
        return
    controls: Dict[str, Optional[str]] = {}
    for wait in part.waits:
        of_all = at == EVERY and wait in context.region.batch_level
        controls[context.graph.ops[wait].name] = _all_clones(context, operands, wait) if of_all else control_for(
            context, wait, task_graph, at, after)
    controls.update((context.graph.ops[wait].name, None) for wait in context.dropped)
    scope = context.scope(at)
    is_split = context.plan.task_graphs[task_graph].strategy == "split"
    device = context.placement(task_graph, at) if is_split else context.device(task_graph, at)
    context.edit.clone(
        part.templates, scope, device=device, control_map=controls, control_inputs=order.barriers(task_graph, at))
    for op, waited in part.kept:
        context.edit.move_waits(f"{scope}/{op.name}", (), [f"{scope}/{other.name}" for other in waited])
    for name, checks in guard.waits_of_each(part.guarded, at).items():
        context.edit.move_waits(f"{scope}/{name}", (), checks)
    for name in part.pinned:
        context.edit.place(context.edit.node(f"{scope}/{name}"), context.pinned[name])
    for op, position in part.boundary:
        name = operands.of(op, position, at)
        context.edit.move_input(f"{scope}/{op.name}", position, name)
    for op in part.with_bodies:
        _delay(context, operands.converter.nodes, guard, op, task_graph, at)
    if isinstance(at, Clone):
        order.gate(task_graph, at)
        for op in part.random:
            node = context.edit.node(f"{scope}/{op.name}")
            if context.plan.random == LOCAL:
                take_rows(context, operands.converter, op, at)
            else:
                own_numbers(Nodes(context.edit), node, op, context.graph, context.seed(at), context.host)
        for op in part.shaped:
            open_shapes(context.edit.node(f"{scope}/{op.name}"), op, context.region.batch)
        for op in part.counted:
            operands.converter.tell_rows(op, context.edit.node(f"{scope}/{op.name}"), at, canonical_edge)
        for op in part.functional:
            bodies.localise(op, at)
    for op in part.inside if is_split else ():
        place_body(context, context.edit.node(f"{scope}/{op.name}"), op, functools.partial(context.device, task_graph, at))


def _delay(context: Context, nodes: Nodes, guard: Guard, op: Op, task_graph: int, at: Coordinates) -> None:
    """Makes the bodies of a functional op wait for the op's checks."""
    positions = guard.positions(op)
    checks = guard.waits([op.id], at) if positions else []
    for position in positions:
        name, dtype = f"{context.scope(at)}/{op.name}", context.dtype(op.inputs[position])
        scope = context.name("guard", "into", context.scope(at).rpartition("/")[2], op.name, str(position))
        delayed = nodes.identity(context.edit.node(name).input[position], scope, dtype, context.device(task_graph, at), checks)
        context.edit.move_input(name, position, delayed)


def _all_clones(context: Context, operands: Operands, wait: int) -> str:
    """What a section waits for if the original waits for a cloned op, or for an op of another section."""
    op = context.graph.ops[wait]
    if wait in context.region.sections:
        return context.op_in(op, EVERY)
    task_graph = context.task_graph_of(op)
    names = [context.op_in(op, clone) for clone in context.clones(task_graph)]
    return operands.converter.nodes.no_op(context.name("section_waits", op.name), context.device(task_graph, EVERY), names)
