"""What ops outside of the clones read: values merged over the clones, or over those of all processes."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators import Communicator, Member
from whale_tf.emit.context import ORIGINAL, Context
from whale_tf.emit.inputs import Inputs
from whale_tf.emit.processes import Shared
from whale_tf.emit.recipes import Recipes
from whale_tf.emit.reroute import Use
from whale_tf.emit.shares import BatchShares
from whale_tf.errors import PlanError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.across import Across, is_of_rows
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.outline import UNSENT

JOINED = ("float32", "float64", "int32", "int64")  # types of sums that are sent in one message


def merge_leaving(context: Context, nodes: Nodes, inputs: Inputs, recipes: Recipes, step: TrainingStep,
                  shared: Sequence[Shared]) -> Dict[Use, str]:
    """Stages the merged value of every tensor that leaves the region, and says which uses read it.

    Args:
        shared: values over all processes, for tensors that have one in every step.  Other tensors have one only if a variable
            is computed from them, because it takes a collective.
    """
    moves: Dict[Use, str] = {}
    across = step.across
    everywhere, sent = across.uses, {scalar.tensor: scalar.value for scalar in shared}
    for tensor, uses in context.region.leaving().items():
        if context.graph.tensors[tensor].dtype in UNSENT:
            continue  # a loop's lists and handles have no merged value; readers use the original's
        for op, position in uses:
            if op in step.update.task_graph:
                moves[op, position] = recipes.for_update(tensor, step.update.task_graph[op], ORIGINAL)
            elif (op, position) in everywhere and not (op in across.twice and is_of_rows(context.region.batch.layout(tensor))):
                moves[op, position] = recipes.of_all_processes(tensor)
            elif tensor in sent:
                moves[op, position] = sent[tensor]
            else:
                moves[op, position] = recipes.whole(tensor)
    for tensor, uses in inputs.leaving().items():
        moves.update({use: inputs.concatenated(tensor) for use in uses})
    if recipes.is_larger:
        return {use: _of_unknown_shape(context, nodes, use, name) for use, name in moves.items()}
    return moves


def take_of_all_processes(context: Context, nodes: Nodes, inputs: Inputs, recipes: Recipes, sums: Communicator,
                          across: Across) -> Dict[Use, str]:
    """What ops outside of the clones read instead of inputs, where this takes the rows of all processes."""
    is_function = context.tf_graph.building_function
    if is_function and not across.decisive:
        return {}
    graph, of_all = context.graph, _inputs_of_all(context, inputs, across, sums)
    moves = {(op, position): of_all[graph.ops[op].inputs[position]] for op, position in across.uses
             if op not in across.twice and graph.ops[op].inputs[position] in of_all}
    if not is_function:
        return {use: _resized(context, nodes, use, name) for use, name in moves.items()}
    moves.update(_run_twice(context, across, recipes, of_all))
    moves.update(_added_up(context, across, sums, inputs.division))
    return moves


def _inputs_of_all(context: Context, inputs: Inputs, across: Across, sums: Communicator) -> Dict[int, str]:
    """Batch inputs of all processes that ops outside of the clones read."""
    graph = context.graph
    tensors = sorted({graph.ops[op].inputs[position] for op, position in across.uses})
    if context.processes.runs_part:  # all read the same mini-batches
        return {tensor: inputs.of_all_steps(tensor) for tensor in tensors if not context.region.contains(graph.producer(tensor))}
    return {
        tensor: sums.gather_across(
            Member(graph.tensor_name(tensor), context.host), len(context.static_shape(tensor)),
            context.name("processes", context.flat(tensor)), context.dtype(tensor), False)
        for tensor in tensors if not context.region.contains(graph.producer(tensor))}


def _run_twice(context: Context, across: Across, recipes: Recipes, inputs: Dict[int, str]) -> Dict[Use, str]:
    """Clones the ops that run on the rows of all processes; the originals run on this process's rows."""
    graph = context.graph
    entering = sorted({graph.ops[op].inputs[position] for op, position in across.uses if op in across.twice})
    names = context.edit.clone(
        [context.tf_ops[index] for index in across.twice], context.name("of_all"),
        input_map={graph.tensor_name(tensor): inputs.get(tensor) or recipes.of_all_processes(tensor) for tensor in entering})
    return {(user, position): f"{names[graph.ops[index].name]}:{graph.tensors[tensor].index}"
            for index in across.twice for tensor in graph.ops[index].outputs for user, position in graph.consumers(tensor)
            if user in across.decisive and user not in across.twice}


def _added_up(context: Context, across: Across, sums: Communicator, division: BatchShares) -> Dict[Use, str]:
    """Adds up what each process has counted on its own rows, in one message for each type.

    Raises:
        PlanError: the function was traced for one batch size, which the count may contain.
    """
    graph = context.graph
    if across.added and division.batch is not None:
        op, position = across.added[0]
        raise PlanError(
            f"{graph.tensor_name(graph.ops[op].inputs[position])!r} is counted in a mini-batch of {division.batch} examples; "
            "the function's signature prescribes this size, which may be part of the count; leave the batch size open (None) in "
            "input_signature")
    groups: Dict[Tuple[str, bool], List[Use]] = {}
    for use in across.added:
        record = graph.tensors[graph.ops[use[0]].inputs[use[1]]]
        is_fixed = record.shape is not None and None not in record.shape and record.dtype in JOINED
        groups.setdefault((record.dtype if is_fixed else f"{record.dtype} {use[0]}", is_fixed), []).append(use)
    moves: Dict[Use, str] = {}
    for (_, is_fixed), uses in groups.items():
        tensors = [graph.ops[op].inputs[position] for op, position in uses]
        members = [Member(graph.tensor_name(tensor), context.host) for tensor in tensors]
        names = [context.name("added", graph.ops[op].name) for op, _ in uses]
        if is_fixed and len(uses) > 1:
            shapes = [context.static_shape(tensor) for tensor in tensors]
            totals = sums.across_together(members, names, shapes, context.dtype(tensors[0]))
        else:
            totals = [sums.across(member, "sum", name, context.dtype(tensor))
                      for member, name, tensor in zip(members, names, tensors)]
        moves.update(zip(uses, totals))
    return moves


def _of_unknown_shape(context: Context, nodes: Nodes, use: Use, name: str) -> str:
    """The same tensor without a static shape, for when all model replicas' mini-batches together have more rows than the graph
    says: TensorFlow refuses to move an edge between different static shapes."""
    tensor = context.graph.ops[use[0]].inputs[use[1]]
    return _resized(context, nodes, use, name) if context.region.batch.layout(tensor).is_sharded else name


def _resized(context: Context, nodes: Nodes, use: Use, name: str) -> str:
    op, position = context.graph.ops[use[0]], use[1]
    tensor = op.inputs[position]
    return nodes.add("PlaceholderWithDefault", context.name("resized", op.name, str(position)), [name], context.host,
                     dtype=context.dtype(tensor), shape=tf.TensorShape(None))
