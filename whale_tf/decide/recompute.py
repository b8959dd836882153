"""What backward passes compute again instead of keeping it."""

from __future__ import annotations

import warnings
from dataclasses import replace

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Decision, Request
from whale_tf.decide.facts import analysed, sized_region, trained_variables
from whale_tf.errors import ConfigError
from whale_tf.ir.region import Region
from whale_tf.ir.verify import verify_pass
from whale_tf.passes.communicate import dividing
from whale_tf.plan import Plan
from whale_tf.planner.homes import has_one_memory, resident_of_task_graphs
from whale_tf.planner.measures import AUTO
from whale_tf.planner.recompute import NONE, Readers, kept_tensors, marked_tensors, redone
from whale_tf.transforms.recompute import recompute

_NO_ACTIVATIONS = {
    True: "this plan divides examples like any other dimension, so that no activation belongs to one micro-batch; use "
          "wh.replicate or wh.split, or set recompute to 'none'",
    False: "no op of this step follows from an input that has a dimension of examples, so that there are no activations to "
           "compute again; feed the mini-batch through a placeholder or dataset, say with wh.batch_axis(tensor, dim) which "
           "dimension of an input is the batch, or set recompute to 'none'",
}


def with_recomputation(decision: Decision, request: Request) -> Decision:
    """The decision with recomputation in the backward pass.

    Raises:
        ConfigError: it is asked for, but no activation belongs to one micro-batch.
    """
    captured, region, plan, division, config, is_measured = decision
    if not is_measured and config.recompute != NONE:
        is_divided = division.assignment is not None
        if region.batch_level:
            plan = _keeping(captured, region, plan, request.cluster, config)
        elif is_divided or config.recompute != AUTO:
            raise ConfigError(f"recompute is {config.recompute!r}, but {_NO_ACTIVATIONS[is_divided]}")
    if all(task.kept is None for task in plan.task_graphs):
        return decision
    captured = recompute(captured, region, plan)
    verify_pass(captured.graph, "after recompute")
    return decision._replace(captured=captured, region=analysed(captured, request.options), plan=plan)


def _keeping(captured: Captured, region: Region, plan: Plan, cluster: Cluster, config: Config) -> Plan:
    """The plan with the tensors that its TaskGraphs keep: those that the script marks, otherwise those that the configuration
    asks for."""
    assert captured.recording is not None
    marked = captured.recording.annotations.checkpoints
    if marked:
        kept = marked_tensors(region, len(plan.task_graphs), marked)
    else:
        known, batch = sized_region(captured, region, plan, cluster, config)
        needed = resident_of_task_graphs(plan, trained_variables(captured), has_one_memory(cluster))
        replicas = dividing(captured.step(known), plan)
        kept = kept_tensors(known, plan, cluster, config.recompute, batch, needed, replicas)
    readers = Readers(region)
    kept = {number: tensors for number, tensors in kept.items() if redone(readers, number, set(tensors)).waits}
    if not kept and (marked or config.recompute != AUTO):
        warnings.warn(f"recompute is {config.recompute!r}, but the backward pass reads nothing that forward ops could compute "
                      "again, so this step keeps all that it reads, as without it; set recompute to 'none'")
    names = {number: tuple(captured.graph.tensor_name(t) for t in tensors) for number, tensors in kept.items()}
    return replace(plan, task_graphs=tuple(
        replace(task, kept=names[number]) if number in names else task for number, task in enumerate(plan.task_graphs)))
