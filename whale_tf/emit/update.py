"""The optimizer's ops on every copy of the variables (see :class:`whale_tf.ir.training_step.Update`)."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Tuple

from whale_tf.emit.context import ORIGINAL, Context, Copy
from whale_tf.emit.mirror import VariableCopy
from whale_tf.emit.operands import Operands
from whale_tf.emit.recipes import Recipes
from whale_tf.graph_editor.attrs import NodeDef
from whale_tf.ir.traits import traits
from whale_tf.program import UPDATE


def copy_variables(context: Context, variables: Mapping[int, int]) -> Dict[Tuple[int, Copy], str]:
    """Stages a copy of each variable for every copy of its TaskGraph; returns the tensor name of each."""
    names: Dict[Tuple[int, Copy], str] = {}
    for number in range(len(context.plan.task_graphs)):
        own = [index for index, task_graph in variables.items() if task_graph == number]
        waits: Dict[str, Optional[str]] = {
            context.graph.ops[c].name: None for index in own for c in context.graph.ops[index].control_inputs}
        for copy in context.copies(number):
            names.update({(index, copy): context.tensor_in(context.graph.ops[index].outputs[0], copy) for index in own})
            if copy != ORIGINAL and own:
                context.edit.clone([context.tf_ops[index] for index in own], context.scope(copy), control_map=waits,
                                   device=context.placement(number, copy), edit=_share_nothing)
    return names


def _share_nothing(node: NodeDef, _: object) -> None:
    """Makes the node a variable of its own, not another handle of the original."""
    node.attr["shared_name"].s = node.name.encode()


def clone_update(context: Context, operands: Operands, recipes: Recipes) -> Dict[int, List[str]]:
    """Stages the APPLY ops of every copy except the original.

    Returns:
        Names of the clones of each original write.
    """
    clones: Dict[int, List[str]] = {}
    for task_graph in range(len(context.plan.task_graphs)):
        bodies = [body for body in context.program.bodies if body.task_graph == task_graph and body.step == UPDATE]
        ops = [context.graph.ops[i] for i in sorted(i for body in bodies for i in body.ops)]
        members = {op.id for op in ops}
        for copy in context.copies(task_graph):
            if copy == ORIGINAL or not ops:
                continue
            scope = context.scope(copy)
            context.edit.clone([context.tf_ops[op.id] for op in ops], scope, device=context.placement(task_graph, copy))
            for op in ops:
                for position, tensor in enumerate(op.inputs):
                    producer = context.graph.producer(tensor)
                    variable = operands.variable(producer, copy)
                    if variable is not None:
                        context.edit.move_input(f"{scope}/{op.name}", position, variable)
                    elif producer.id in context.region.batch_level:
                        context.edit.move_input(f"{scope}/{op.name}", position, recipes.for_update(tensor, task_graph, copy))
                    elif producer.id not in members and context.region.contains(producer):
                        context.edit.move_input(f"{scope}/{op.name}", position, operands.value(tensor, task_graph, copy))
                if traits(op.type).is_write:
                    clones.setdefault(op.id, []).append(f"{scope}/{op.name}")
    return clones


def variable_copies(context: Context, copies: Dict[Tuple[int, Copy], str]) -> Dict[str, Dict[str, VariableCopy]]:
    """Scope of each copy but the first -> variable -> its copy there."""
    result: Dict[str, Dict[str, VariableCopy]] = {}
    for (index, copy), tensor in copies.items():
        if copy != ORIGINAL:
            op = context.graph.ops[index]
            device = context.device(context.variables[index], copy, op.shard)
            result.setdefault(context.scope(copy), {})[op.name] = VariableCopy(tensor, device)
    return result
