"""The optimizer's ops on every copy of the variables.

APPLY ops that follow from the gradients of one TaskGraph alone (clip by value, Adam, its slots) run on each of its copies;
those that follow from several TaskGraphs or from none (a global norm, the learning rate, ``global_step``) run once.

::

    gradient (sum of clones) ─┬─> clip ──> ApplyAdam(v)            gradient ──> clip' ──> ApplyAdam(v') on replica 1
                              └─> L2Loss ─┐                                      ^
    other TaskGraphs' ... ────────────────┴─> global norm (once) ──> scale ──────┘
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple

from whale_tf.emit.context import ORIGINAL, Context, Copy
from whale_tf.emit.merge import Merge
from whale_tf.emit.operands import Operands
from whale_tf.graph_editor.attrs import NodeDef
from whale_tf.graph_editor.nodes import set_input
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.traits import VARIABLES, traits


class Update(NamedTuple):
    """Attributes:
    task_graph: TaskGraph whose copies run an APPLY op, by op number; ops not listed run once.
    needed: those of them that lead to a write.
    variables: home TaskGraph of every variable that has copies, by op number: the region's and their slots.
    """

    task_graph: Dict[int, int]
    needed: Set[int]
    variables: Dict[int, int]


def find_update(
    graph: OpGraph, task_graph: Dict[int, int], variables: Dict[int, int], gradient_home: Dict[int, int]
) -> Update:
    """Which APPLY ops belong to one TaskGraph.

    Args:
        task_graph: TaskGraph of the region's ops.
        variables: home TaskGraph of the region's variables.
        gradient_home: home TaskGraph of the variable that a gradient tensor belongs to.
    """
    apply_ops = [op for op in graph.ops if op.phase is Phase.APPLY]
    homes = dict(variables)
    nothing: FrozenSet[int] = frozenset()
    while True:
        classes: Dict[int, FrozenSet[int]] = {}
        for op in apply_ops:
            found: Set[int] = set()
            for tensor in op.inputs:
                producer = graph.tensors[tensor].op
                if tensor in gradient_home:
                    found.add(gradient_home[tensor])
                elif producer in homes:
                    found.add(homes[producer])
                elif producer in task_graph:
                    found.add(task_graph[producer])
                elif len(classes.get(producer, nothing)) == 1:
                    found |= classes[producer]
            classes[op.id] = frozenset(found)
        slots = {
            graph.tensors[t].op: next(iter(classes[op.id]))
            for op in apply_ops
            if len(classes[op.id]) == 1 and traits(op.type).is_write
            for t in op.inputs
            if graph.producer(t).type in VARIABLES
        }
        if all(slot in homes for slot in slots):
            break
        homes = {**slots, **homes}
    single = {index: next(iter(found)) for index, found in classes.items() if len(found) == 1}
    needed: Set[int] = set()
    for op in reversed(apply_ops):
        leads = (
            any(user in needed and single[user] == single[op.id] for t in op.outputs for user, _ in graph.consumers(t))
            if op.id in single
            else False
        )
        if op.id in single and (leads or traits(op.type).is_write):
            needed.add(op.id)
    return Update(single, needed, homes)


def copy_variables(context: Context, variables: Dict[int, int]) -> Dict[Tuple[int, Copy], str]:
    """Stage a copy of each variable for every copy of its home TaskGraph; returns the tensor name of each."""
    names: Dict[Tuple[int, Copy], str] = {}
    for home in range(len(context.plan.task_graphs)):
        own = [index for index, task_graph in variables.items() if task_graph == home]
        waits: Dict[str, Optional[str]] = {
            context.graph.ops[c].name: None for index in own for c in context.graph.ops[index].control_inputs
        }
        for copy in context.copies(home):
            names.update({(index, copy): context.tensor_in(context.graph.ops[index].outputs[0], copy) for index in own})
            if copy != ORIGINAL and own:
                context.edit.clone(
                    [context.tf_ops[index] for index in own],
                    context.scope(copy),
                    device=context.placement(home, copy),
                    edit=_share_nothing,
                    control_map=waits,
                )
    return names


def _share_nothing(node: NodeDef, _: object) -> None:
    """A variable of its own, not one more handle to the original's."""
    node.attr["shared_name"].s = node.name.encode()


def clone_update(
    context: Context, operands: Operands, merge: Merge, update: Update, gradient_home: Dict[int, int]
) -> Dict[int, List[str]]:
    """Stage the APPLY ops of every copy but the original.

    Returns:
        Names of the clones of each original write.
    """
    clones: Dict[int, List[str]] = {}
    for index in range(len(context.plan.task_graphs)):
        ops = [context.graph.ops[i] for i in sorted(update.needed) if update.task_graph[i] == index]
        members = {op.id for op in ops}
        for copy in context.copies(index):
            if copy == ORIGINAL or not ops:
                continue
            scope = context.scope(copy)
            context.edit.clone([context.tf_ops[op.id] for op in ops], scope, device=context.placement(index, copy))
            for op in ops:
                for position, tensor in enumerate(op.inputs):
                    producer = context.graph.producer(tensor)
                    if producer.id in members:
                        continue
                    variable = operands.variable(producer, copy)
                    if variable is not None:
                        name = variable
                    elif producer.id in context.region.batch_level:
                        name = merge.everywhere(tensor, index)[copy]
                    elif context.region.contains(producer):
                        name = operands.value(tensor, index, copy)
                    else:
                        continue
                    set_input(context.edit, f"{scope}/{op.name}", position, name)
                if traits(op.type).is_write:
                    clones.setdefault(op.id, []).append(f"{scope}/{op.name}")
    return clones
