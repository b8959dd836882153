"""Edits of existing ops: edges that leave the region move to merged values."""

from __future__ import annotations

import functools
from typing import Dict, List, Mapping, Sequence, Set, Tuple

from whale_tf.emit.bodies import is_divided_inside, place_body
from whale_tf.emit.context import ORIGINAL, Context
from whale_tf.graph_editor.edges import COLOCATE
from whale_tf.ir.graph import SHARD_ATTR, Op, OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.units import frame_of_outputs, frames
from whale_tf.ir.writes import is_write

Use = Tuple[int, int]  # (op number, input position)


def outside_after(graph: OpGraph, region: Region) -> Set[int]:
    """Ops outside the region that follow from a batch-level op, by data or control; but what follows inside of a loop of such
    ops stays with the original loop (see :meth:`~whale_tf.ir.region.Region.leaving`)."""
    members, tensors, in_loops = set(region.ops), graph.tensors, frames(graph)
    found = {index for index in region.batch_level if not frame_of_outputs(graph.ops[index], in_loops)}
    before = -1
    while before < len(found):  # a second round only for the back edges of while loops
        before = len(found) if in_loops else len(graph.ops)
        for op in graph.ops:
            if op.id not in members and not (found.isdisjoint([tensors[t].op for t in op.inputs])
                                             and found.isdisjoint(op.control_inputs)):
                found.add(op.id)
    return found - region.batch_level


def deferred_waits(graph: OpGraph, region: Region, after: Set[int]) -> Dict[int, List[str]]:
    """Writes of variables -> names of the ops that they wait for on behalf of the region's ops before them.

    With ``tf.control_dependencies(update_ops)`` around ``minimize``, backward ops wait for updates (moving averages) that
    need merged values of all micro-batches. A clone that waited for them would wait for itself.  The variables' writes wait for
    them instead, which keeps the order that the user asked for: updates before the step ends.
    """
    holders: Dict[int, Set[int]] = {}
    for index in region.ops:
        for control in graph.ops[index].control_inputs:
            if control in after and control not in region.rereads.get(index, ()):
                holders.setdefault(control, set()).add(index)
    waits: Dict[int, List[str]] = {}
    for control, seeds in holders.items():
        reached = set(seeds)
        for op in graph.ops:
            if op.id not in reached and any(graph.tensors[t].op in reached for t in op.inputs):
                reached.add(op.id)
                if op.phase is Phase.APPLY and is_write(op):
                    waits.setdefault(op.id, []).append(graph.ops[control].name)
    return waits


def move_edges(context: Context, moves: Mapping[Use, str]) -> None:
    """Makes uses outside the region read merged values."""
    for (index, position), name in moves.items():
        context.edit.move_input(context.graph.ops[index].name, position, name)


def move_controls(context: Context, after: Set[int]) -> None:
    """Makes ops outside that wait for a batch-level op wait for all its clones.  Step-level originals do not wait for outside ops
    that follow from the region, except updates of variables that they read.  Unused ops stay as they are."""
    graph, region = context.graph, context.region
    for op in graph.ops:
        inside = region.contains(op)
        if not op.control_inputs or op.phase is Phase.UNUSED or (inside and op.id in region.batch_level):
            continue
        kept = region.rereads.get(op.id, ())
        moved = [graph.ops[c] for c in op.control_inputs if c in region.batch_level or (inside and c in after and c not in kept)]
        if moved:
            clones = [] if inside else [
                context.op_in(waited, clone) for waited in moved for clone in context.clones(context.task_graph_of(waited))]
            context.edit.move_waits(op.name, [waited.name for waited in moved], clones)


def update_writes(graph: OpGraph) -> List[int]:
    """Ops of the update that write variables."""
    return [op.id for op in graph.ops if op.phase is Phase.APPLY and is_write(op)]


def add_waits(context: Context, waits: Mapping[int, Sequence[str]]) -> None:
    for index, befores in waits.items():
        context.edit.move_waits(context.graph.ops[index].name, (), befores)


def _beside(op: Op) -> List[str]:
    """Names of the ops that an op is colocated with."""
    return [group.partition(COLOCATE.decode())[2] for group in op.attrs.get("_class", ())]


def _place_at_home(context: Context, op: Op) -> None:
    """Places an op of the update.  Ops that clip a gradient are colocated with the original op that computes it, which must be
    undone."""
    at, graph = context.homes.ops, context.graph
    groups = _beside(op)
    if groups and any(name not in graph or at.get(graph.op(name).id) != at[op.id] for name in groups):
        context.edit.place(context.tf_ops[op.id], context.device_of(op), alone=True)
    elif not groups:
        context.edit.place(context.tf_ops[op.id], context.device_of(op))


def place_originals(context: Context, homes: Mapping[int, int]) -> None:
    """Places the original ops on the first device of their TaskGraph: variables, and ops that a fetch without an update needs.

    Ops that are colocated with another op follow it, unless that op is in another TaskGraph (TensorFlow puts a write to a tensor
    array next to the value that it writes) or has been divided.
    """
    graph, edit, ops = context.graph, context.edit, set(context.region.ops).difference(homes)
    for index in list(context.region.ops) + [i for i in homes if not context.region.contains(graph.ops[i])]:
        op = graph.ops[index]
        if is_divided_inside(op):
            place_body(context, edit.node(op.name), op, functools.partial(context.device, context.task_graph_of(op), ORIGINAL))
        moves_away = "_class" in op.attrs and index not in homes
        if moves_away:
            others = [graph.op(name) if name in graph else None for name in _beside(op)]
            if all(other is not None and (other.id not in ops or context.device_of(other) == context.device_of(op))
                   for other in others):
                continue
        edit.place(context.tf_ops[index], context.device_of(op), alone=moves_away)
    for op in graph.ops:
        if op.phase is Phase.APPLY and op.id in context.homes.ops and op.id not in homes:
            _place_at_home(context, op)
            continue
        if op.phase in (Phase.APPLY, Phase.INIT) and SHARD_ATTR in op.attrs and op.id not in homes:
            edit.place(context.tf_ops[op.id], context.device(op.task_graph, ORIGINAL, op.shard))
