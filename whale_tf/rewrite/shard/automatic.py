"""``auto.auto_parallel: "rhino"``: the whole graph as one ``split`` TaskGraph, divided as the search says."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import annotations_of
from whale_tf.capture.captured import Captured, Spec
from whale_tf.capture.sizes import sized
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError, InfeasibleError, UnsupportedOpError
from whale_tf.ir.batch_axis import static_batch
from whale_tf.plan import Estimate, Plan
from whale_tf.planner.auto.settings import batch_to_plan_for
from whale_tf.planner.rhino.assignment import assignment_of
from whale_tf.planner.rhino.executed import describe, executed_seconds
from whale_tf.planner.rhino.liveness import peak_bytes
from whale_tf.planner.rhino.local_shapes import LocalShapes
from whale_tf.planner.rhino.search import search
from whale_tf.planner.sharding import Assignment
from whale_tf.planner.sharding.problem import CONTROL_FLOW
from whale_tf.rewrite.shard.problem import sharding_problem

NAME = "rhino"


class Automatic(NamedTuple):
    """How the graph is divided, and what the search believes of it; ``description``: in words, for comparisons."""

    assignment: Assignment
    estimate: Estimate
    description: str = ""


def is_automatic(config: Config, plan: Optional[Plan]) -> bool:
    """Whether the search decides, now or when the plan was made."""
    return config.auto.auto_parallel == NAME if plan is None else plan.estimate.search == NAME


def check_automatic(graph: tf.Graph, captured: Captured, config: Config) -> None:
    """Refuse what does not go together with the search.

    Raises:
        ConfigError: annotations, micro-batches, or one pattern for all ops.
        UnsupportedOpError: control flow.
    """
    names = [item.name for item in annotations_of(graph).items]
    if names:
        raise ConfigError("auto.auto_parallel is 'rhino', which divides the whole graph, but the script has annotations ({}); "
                          "remove them, or leave auto_parallel out; patterns.force pins single ops".format(
                              ", ".join(map(repr, names))))
    if config.pipeline.num_stages is not None:
        raise ConfigError("pipeline.num_stages is {} under auto_parallel 'rhino', which makes no pipelines; leave it out"
                          .format(config.pipeline.num_stages))
    if (config.pipeline.num_micro_batch or 1) > 1:
        raise ConfigError("pipeline.num_micro_batch is {} under auto_parallel 'rhino', which makes no pipelines; leave it out"
                          .format(config.pipeline.num_micro_batch))
    if isinstance(config.patterns.force, str):
        raise ConfigError("patterns.force is {!r} under auto_parallel 'rhino', expected {{op: pattern}}".format(
            config.patterns.force))
    for index in sorted(captured.scope):
        op = captured.graph.ops[index]
        if op.type in CONTROL_FLOW:
            raise UnsupportedOpError("op {!r} ({}) is control flow, which auto_parallel 'rhino' does not divide; use wh.replicate"
                                     .format(op.name, op.type))


def as_one_split(captured: Captured) -> Captured:
    """The graph as one TaskGraph that is divided over all devices."""
    return captured._replace(specs=(Spec(NAME, "split", None),))


def automatic(graph: tf.Graph, captured: Captured, cluster: Cluster, config: Config, plan: Optional[Plan]) -> Automatic:
    """Search on a mesh of one dimension, which the executor runs, for the fastest plan that fits every device.

    The estimate is of what is executed (:mod:`whale_tf.planner.rhino.executed`), for the mini-batches that other automatic plans
    are estimated for.

    Args:
        plan: take its patterns, and its estimate.

    Raises:
        ConfigError, InfeasibleError: see :func:`whale_tf.planner.rhino.search.search`.
    """
    force = config.patterns.force if plan is None else dict(plan.shards)
    assert not isinstance(force, str), "check_automatic refuses one pattern for all ops"
    divisible = frozenset(sharding_problem(captured, {}, {0: len(cluster)}).variables)
    gradients = frozenset(target.tensors[0] for target in captured.phases.targets if not target.is_sparse)
    answer = search(captured.graph, cluster, pins=force, shapes=[(len(cluster),)], divisible=divisible, gradients=gradients)
    assignment = assignment_of(answer)
    if plan is not None:
        return Automatic(assignment, plan.estimate)
    batch = batch_to_plan_for(config, cluster, static_batch(captured.graph, captured.sources))
    known = sized(graph, captured.graph, captured.sources, batch)
    seconds = executed_seconds(known, assignment, cluster)
    peak = peak_bytes(answer.levels[0].problem, answer.levels[0].solution.choice, LocalShapes(known))
    estimate = Estimate(
        search=NAME, global_batch=batch, latency_s=seconds, peak_memory_bytes=(int(peak),) * len(cluster))
    return Automatic(assignment, estimate, describe(assignment, captured.graph, answer.mesh, seconds))


def contender(graph: tf.Graph, captured: Captured, cluster: Cluster, config: Config) -> Union[Automatic, str]:
    """The answer as one candidate among others; where there is none, the reason."""
    try:
        check_automatic(graph, captured, config)
        return automatic(graph, captured, cluster, config, None)
    except (ConfigError, InfeasibleError, UnsupportedOpError) as error:
        return "rhino: no candidate: {}".format(error)
