"""The main path: a tf.Graph in, the same graph out, training on many devices."""

from __future__ import annotations

import collections
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, capture
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.ir.batch_axis import BatchAxis, Options, analyse
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.verify import verify
from whale_tf.optimizations.batch_norm import Decomposition, decompose
from whale_tf.plan import Plan
from whale_tf.planner.annotated import TaskGraphSpec, annotated_plan, check_plan
from whale_tf.planner.sharding import Assignment, assign
from whale_tf.planner.statistics import crossings, stage_statistics
from whale_tf.rewrite.passes import Rewritten, rewrite
from whale_tf.rewrite.shard import Sharded, shard
from whale_tf.rewrite.shard.automatic import as_one_split, automatic, check_automatic, is_automatic
from whale_tf.rewrite.shard.problem import divided_dims, sharding_problem
from whale_tf.rewrite.shard.variables import DividedVariables


class Parallelized(NamedTuple):
    """A graph after the main path: what was captured, analysed, decided, and done."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    rewritten: Optional[Rewritten]  # None: the plan is the local script itself
    replaced: Mapping[str, Any] = {}  # tensors and ops of the local script -> what is computed in their place
    assignment: Optional[Assignment] = None  # how ``split`` TaskGraphs are divided
    variables: Optional[DividedVariables] = None


def parallelize(
    graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan] = None
) -> Optional[Parallelized]:
    """Rewrite a graph in place.

    Args:
        plan: run this plan; None: the one the annotations ask for.

    Returns:
        None when the graph has no optimizer's update yet.

    Raises:
        WhaleError: the graph cannot be parallelized as asked; the graph is then as it was.
    """
    sync = (config if plan is None else plan).sync_batch_norm
    decomposition = decompose(graph) if sync else Decomposition()
    sharded = Sharded()
    done = None
    try:
        done = _parallelize(graph, cluster, config, plan, Options(sync=lambda op: True) if sync else Options(), sharded)
    finally:
        if done is None or done.rewritten is None:
            sharded.undo()
            decomposition.undo()
    if done is None:
        return None
    return done._replace(
        replaced=collections.ChainMap(sharded.replaced, decomposition.replaced),  # type: ignore[arg-type]
        variables=sharded.variables,
    )


def _parallelize(
    graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan], options: Options, sharded: Sharded
) -> Optional[Parallelized]:
    is_pipeline = (plan.num_micro_batch if plan is not None else config.pipeline.num_micro_batch or 1) > 1
    local = captured = capture(graph, is_pipeline, plan)
    if not captured.updates:
        return None
    verify(captured.graph)
    found = None
    if is_automatic(config, plan) and len(cluster) > 1:
        if plan is None:
            check_automatic(graph, captured, config)
        found = automatic(captured, cluster, config, plan)
        local = captured = as_one_split(captured)
    counts = _split_counts(captured, cluster)
    assignment = found.assignment if found is not None else None
    if counts:
        if assignment is None:
            analysed = analyse(captured.graph, captured.sources, captured.scope, options)
            problem = sharding_problem(captured, divided_dims(analysed), counts)
            force, shards = (config.patterns.force, None) if plan is None else (None, plan.shards)
            assignment = assign(problem, force, shards)
        shard(graph, captured, assignment, counts, sharded)
        captured = capture(graph, is_pipeline, plan, is_sharded=True)
        verify(captured.graph, "after wh.split")
        if found is not None:  # examples are divided like any other dimension: there is no batch to clone for
            captured = as_one_split(captured)._replace(sources={})
    batch = analyse(captured.graph, captured.sources, captured.scope, options)
    region = find_region(captured.graph, captured.task_graph, batch, list(captured.sources))
    if plan is None:
        plan = _plan(captured, region, cluster, config, local, assignment)
        if found is not None:
            plan = plan.model_copy(update={"estimate": found.estimate})
    check_plan(plan, cluster)
    if is_local(plan):
        return Parallelized(captured, batch, region, plan, None)
    backend = plan.gradients[0].backend if plan.gradients else "local"
    rewritten = rewrite(graph, captured, region, plan, backend, device_names(cluster))
    return Parallelized(captured, batch, region, plan, rewritten, {}, assignment)


def _split_counts(captured: Captured, cluster: Cluster) -> Dict[int, int]:
    """Devices of each TaskGraph that is divided."""
    counts = {
        number: len(cluster.devices) if spec.device_count is None else spec.device_count
        for number, spec in enumerate(captured.specs)
        if spec.strategy == "split"
    }
    return {number: count for number, count in counts.items() if 1 < count <= len(cluster.devices)}


def _plan(
    captured: Captured, region: Region, cluster: Cluster, config: Config, local: Captured, assignment: Optional[Assignment]
) -> Plan:
    """Args:
    local: the graph as the user wrote it, whose names the plan uses.
    """
    specs = [TaskGraphSpec(*spec) for spec in captured.specs]
    stages = stage_statistics(region, captured.gradients, captured.variable_homes, len(specs))
    if assignment is not None:
        members = [
            tuple(op.name for op in local.graph.ops if local.task_graph[op.id] == i and op.phase is Phase.FORWARD)
            for i in range(len(specs))
        ]
        stages = [stage._replace(ops=names) for stage, names in zip(stages, members)]
    inputs = {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
    plan = annotated_plan(local.graph, specs, stages, crossings(region), inputs, cluster, config)
    return plan if assignment is None else plan.model_copy(update={"shards": assignment.shards})


def is_local(plan: Plan) -> bool:
    """One device, one micro-batch: nothing to rewrite."""
    return (
        plan.num_micro_batch == 1
        and plan.num_model_replicas == 1
        and {d for t in plan.task_graphs for row in t.devices for d in row} == {0}
    )


def device_names(cluster: Cluster) -> Sequence[str]:
    return [device.tf_name() for device in cluster.devices]
