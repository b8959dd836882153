"""Joins a called forward and backward body where the schedule runs each backward step right after its own forward step.

The last stage of a pipeline does, and a model without stages::

    two calls    forward { relu; loss } -> relu, loss           one call    backward { relu; loss; grad } -> loss, grad
                 backward(relu) { grad } -> grad

What the forward ops leave then stays inside one function: it is not returned, held as an argument, or put into an array.  The
joined body is a backward body, because gradients follow from it.  Programs as text say "with forward".

Forward bodies that draw random numbers stay apart.  What they return shows the step's own draws to a user who fetches a tensor
inside; a joined body returns too little for that.  So do bodies that XLA shall compile: if it cannot compile one of them, it may
still compile the other.
"""

from __future__ import annotations

from typing import Iterator, Sequence, Tuple

from whale_tf.ir.graph import OpGraph
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.walk import reached
from whale_tf.passes.schedule import STEPS, orders_of
from whale_tf.plan import Plan
from whale_tf.program import BACKWARD, FORWARD, WEIGHT, Body
from whale_tf.schedule import Step


def joinable(bodies: Sequence[Body], step: TrainingStep, plan: Plan) -> Iterator[Tuple[Body, Body, Body]]:
    """Each forward and backward body that can be one, and that one."""
    found = {(body.task_graph, body.step): body for body in bodies if body.step in STEPS}
    orders = [[one for one in order if (one.task_graph, one.kind) in found] for order in orders_of(plan)]
    drawn = set(step.region.batch.own_seed)
    for number, task in enumerate(plan.task_graphs):
        forward, backward = found.get((number, FORWARD)), found.get((number, BACKWARD))
        if forward is None or backward is None or (number, WEIGHT) in found or task.kept is not None or task.xla:
            continue
        if forward.reads or backward.reads or not drawn.isdisjoint(forward.ops):  # read anew: a value is sent for one call
            continue
        if all(_is_back_to_back(order, number) for order in orders) and not _comes_between(step, forward, backward):
            yield forward, backward, _join(step.graph, forward, backward)


def _is_back_to_back(order: Sequence[Step], task_graph: int) -> bool:
    """Whether each backward step of a TaskGraph follows its own forward step at once."""
    following = dict(zip(order, order[1:]))
    return all(following.get(one) == one._replace(kind=BACKWARD) for one in order
               if (one.task_graph, one.kind) == (task_graph, FORWARD))


def _comes_between(step: TrainingStep, forward: Body, backward: Body) -> bool:
    """Whether the backward body needs what is made elsewhere from results of the forward body."""
    graph, combined = step.graph, step.region.batch.combined()
    own = {*forward.ops, *backward.ops}
    starts = {before for index in backward.ops for before in graph.predecessors(graph.ops[index])} - own
    for index in backward.ops:
        starts.update(graph.tensors[tensor].op for position, tensor in enumerate(graph.ops[index].inputs)
                      if (index, position) in combined)
    return not reached(starts, lambda index: graph.predecessors(graph.ops[index])).isdisjoint(forward.ops)


def _join(graph: OpGraph, forward: Body, backward: Body) -> Body:
    ops, runs = tuple(sorted(forward.ops + backward.ops)), forward.runs + backward.runs
    own = set(runs)
    inputs = dict.fromkeys(t for i in runs for t in graph.ops[i].inputs if graph.tensors[t].op not in own)
    outputs = forward.outputs + backward.outputs
    return backward._replace(ops=ops, functions=(runs,), inputs=tuple(inputs), outputs=outputs, with_forward=True)
