"""``split`` TaskGraphs on the main path: who says how they are divided, and the graph before and after."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, capture
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.ir.batch_axis import Options, analyse
from whale_tf.ir.graph import Phase
from whale_tf.ir.verify import verify
from whale_tf.plan import Estimate, Plan
from whale_tf.planner.rhino.automatic import Automatic
from whale_tf.planner.sharding import Assignment, assign
from whale_tf.rewrite.shard import Sharded, shard
from whale_tf.rewrite.shard.automatic import as_one_split, is_automatic, planned
from whale_tf.rewrite.shard.problem import divided_dims, sharding_problem


class Division(NamedTuple):
    """A graph whose ``split`` TaskGraphs are to be divided over their devices, or have been.

    Attributes:
        local: the graph as the user wrote it.
        captured: the graph as it is.
        counts: devices of each TaskGraph that is divided.
        assignment: how; None: there is nothing to divide.
        estimate: what the search believes that divides the whole graph (``auto_parallel: "rhino"``).
        replicas: model replicas of what it divides, which take parts of the mini-batch.
    """

    local: Captured
    captured: Captured
    counts: Dict[int, int] = {}
    assignment: Optional[Assignment] = None
    estimate: Optional[Estimate] = None
    replicas: int = 1


def divide(
    graph: tf.Graph,
    local: Captured,
    cluster: Cluster,
    config: Config,
    plan: Optional[Plan],
    options: Options,
    parts: Sequence[Tuple[int, ...]],
) -> Division:
    """How ``split`` TaskGraphs are divided: by the plan, or by the cheapest patterns."""
    if plan is not None and is_automatic(plan):
        examples = divided_dims(analyse(local.graph, local.sources, local.scope, options))
        return whole_division(local, planned(graph, local, examples, cluster, config, plan), cluster)
    counts = _split_counts(local, len(parts[0]) if parts else len(cluster.devices), len(cluster.devices))
    if not counts:
        return Division(local, local)
    batch = analyse(local.graph, local.sources, local.scope, options)
    problem = sharding_problem(local, divided_dims(batch), counts)
    force, shards = (config.patterns.force, None) if plan is None else (None, plan.shards)
    return Division(local, local, counts, assign(problem, force, shards))


def whole_division(local: Captured, found: Automatic, cluster: Cluster) -> Division:
    """The graph as one TaskGraph on all devices of a model replica."""
    count = len(cluster.devices) // found.replicas
    whole = as_one_split(local, None if found.replicas == 1 else count)
    return Division(whole, whole, {0: count}, found.assignment, found.estimate, found.replicas)


def carry_out(
    graph: tf.Graph, division: Division, is_pipeline: bool, plan: Optional[Plan], sharded: Sharded
) -> Division:
    """Divide the graph; it is then captured anew."""
    assert division.assignment is not None
    shard(graph, division.local, division.assignment, division.counts, sharded)
    captured = capture(graph, is_pipeline, plan, is_sharded=True)
    verify(captured.graph, "after wh.split")
    if division.estimate is not None:
        captured = as_one_split(captured, division.local.specs[0].device_count)
        if division.replicas == 1:  # examples are divided like any other dimension: there is no batch to clone for
            captured = captured._replace(sources={})
    return division._replace(captured=captured)


def _split_counts(captured: Captured, available: int, total: int) -> Dict[int, int]:
    """Devices of each TaskGraph that is divided; ``available``: what a TaskGraph has that asks for all.  More than there are
    (``total``) are refused later, when devices are given out."""
    counts = {
        number: available if spec.device_count is None else spec.device_count
        for number, spec in enumerate(captured.specs)
        if spec.strategy == "split"
    }
    return {number: count for number, count in counts.items() if 1 < count <= total}


def of_local(plan: Plan, division: Division) -> Plan:
    """The plan in names of the graph as the user wrote it, with the choices from which the divided ops follow."""
    if division.assignment is None:
        return plan
    local = division.local
    members = [
        tuple(op.name for op in local.graph.ops if local.task_graph[op.id] == i and op.phase is Phase.FORWARD)
        for i in range(len(plan.task_graphs))
    ]
    task_graphs = tuple(task.model_copy(update={"ops": ops}) for task, ops in zip(plan.task_graphs, members))
    estimate = division.estimate or plan.estimate
    nested = "divide" if division.replicas > 1 else plan.nested_batch
    return plan.model_copy(update={
        "task_graphs": task_graphs, "shards": division.assignment.shards, "estimate": estimate, "nested_batch": nested})
