"""Whether model replicas of several processes run as steps side by side, or all in one step.

If a model replica has devices in several processes, these run the parts of one step.  Several model replicas may all be in that
step.  Then every process emits the devices of all of them, and merges and sends what each of them computes.  But groups of
processes that do the same, each with model replicas of its own, can also run a step each, with sums between the steps by
collectives.  So what a process emits does not grow with the number of model replicas::

    process 0, 1     mini-batch ──> first half  ──> stage 0 ──> stage 1 ──> gradients ──┐
                                                                                   all-reduce by stage
    process 2, 3     mini-batch ──> second half ──> stage 0 ──> stage 1 ──> gradients ──┘

The processes read the same mini-batch either way, and each step takes its rows of it.  If model replicas take mini-batches of
their own from an input pipeline, all processes read those of all steps, in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Processes
from whale_tf.emit.draws import LOCAL
from whale_tf.emit.processes import draws_anew
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep, pulls_behind
from whale_tf.passes.communicate import takes_own
from whale_tf.passes.side_by_side import find_steps
from whale_tf.plan import Plan


def own_step(captured: Captured, region: Region, plan: Plan, processes: Processes) -> Tuple[Plan, Processes]:
    """The plan of the step of which this process runs a part, and all processes, with those that run its parts.

    Args:
        plan: it spans processes.
    """
    steps = find_steps(plan)
    count, number = len(steps.processes), steps.number(processes.rank)
    step = captured.step(region, count, True)
    own = takes_own(step, plan)
    if count > 1 and _is_divisible(captured, step, plan, own):
        here = steps.plan_of(number)
        return here if own else replace(here, nested_batch="divide"), replace(processes, steps=tuple(steps.processes))
    return plan, replace(processes, steps=(tuple(range(processes.count)),))


def _is_divisible(captured: Captured, step: TrainingStep, plan: Plan, own: bool) -> bool:
    """Whether a step can take its rows of the mini-batch and be computed without the others' examples.

    Args:
        own: model replicas take mini-batches of their own from an input pipeline, and not rows of one.
    """
    graph, region, batch = captured.graph, step.region, step.region.batch
    if len(batch.batches) != 1:
        return False
    shapes = {tensor: graph.tensors[tensor].shape for tensor in {*captured.sources, *captured.inputs_beside}}
    if plan.random == LOCAL or draws_anew(region) or own and not all(pulls_behind(graph, tensor) for tensor in captured.sources):
        return False
    if any((shapes[tensor] or (None,))[0] is None for tensor in captured.inputs_beside):
        return False  # read whole, with the rows of all steps
    for tensor, dim in captured.sources.items():
        shape = shapes[tensor]
        if shape is None or (batch.layout(tensor).blocks or (1,)) != (1,):
            return False
        if shape[dim] is not None and not own:
            return False  # a static size may be part of the computation
    return step.across.own <= captured.sources.keys()
