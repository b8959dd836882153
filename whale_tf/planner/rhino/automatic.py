"""Dividing every op of a graph over all devices: the answer as a plan that runs, with time and memory of what is executed."""

from __future__ import annotations

from typing import AbstractSet, Mapping, NamedTuple, Optional

from whale_tf.cluster import Cluster
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.plan import Estimate, Plan, TaskGraphPlan
from whale_tf.planner.result import SearchResult, Stage, kind_of
from whale_tf.planner.rhino.assignment import assignment_of
from whale_tf.planner.rhino.executed import describe, executed_seconds
from whale_tf.planner.rhino.liveness import peak_bytes
from whale_tf.planner.rhino.local_shapes import LocalShapes
from whale_tf.planner.rhino.search import search
from whale_tf.planner.sharding import Assignment

NAME = "rhino"


class Question(NamedTuple):
    """Attributes:
    graph: what is to be divided; sizes that it does not know are not.
    known: the same ops with the sizes of a mini-batch of ``batch`` examples.
    divisible, gradients, pins: see :func:`whale_tf.planner.rhino.search.search`.
    """

    graph: OpGraph
    known: OpGraph
    batch: int
    divisible: Optional[AbstractSet[int]] = None
    gradients: AbstractSet[int] = frozenset()
    pins: Optional[Mapping[str, str]] = None


class Automatic(NamedTuple):
    """How a graph is divided, and what the search believes of it; ``description``: in words, for comparisons."""

    assignment: Assignment
    estimate: Estimate
    description: str


def automatic(question: Question, cluster: Cluster) -> Automatic:
    """Search on a mesh of one dimension, which the executor runs, for the fastest plan that fits every device.

    The estimate is of what is executed (:mod:`whale_tf.planner.rhino.executed`).

    Raises:
        ConfigError, InfeasibleError: see :func:`whale_tf.planner.rhino.search.search`.
    """
    answer = search(question.graph, cluster, pins=question.pins, shapes=[(len(cluster),)], divisible=question.divisible,
                    gradients=question.gradients)
    assignment = assignment_of(answer)
    seconds = executed_seconds(question.known, assignment, cluster)
    level = answer.levels[0]
    peak = peak_bytes(level.problem, level.solution.choice, LocalShapes(question.known))
    estimate = Estimate(search=NAME, global_batch=question.batch, latency_s=seconds,
                        peak_memory_bytes=(int(peak),) * len(cluster))
    return Automatic(assignment, estimate, describe(assignment, question.graph, answer.mesh, seconds))


def plan_of(graph: OpGraph, found: Automatic, cluster: Cluster) -> Plan:
    """The plan: one TaskGraph of everything, and the patterns from which the rest follows."""
    ops = tuple(op.name for op in graph.ops if op.phase is Phase.FORWARD)
    task = TaskGraphPlan(name=NAME, strategy="split", ops=ops, devices=(tuple(range(len(cluster))),))
    return Plan(graph=graph.fingerprint(), num_devices=len(cluster), task_graphs=(task,), shards=found.assignment.shards,
                estimate=found.estimate)


def result_of(found: Automatic, model: str, cluster: Cluster, search_seconds: float) -> SearchResult:
    """The plan as other searches tell theirs: one stage on all devices, whose only layer is the model."""
    estimate = found.estimate
    assert estimate.latency_s is not None and estimate.global_batch is not None
    stages = (Stage(first_layer=0, last_layer=0, devices=(tuple(range(len(cluster))),), strategy="split"),)
    return SearchResult(
        search=NAME, model=model, cluster=cluster.name, global_batch=estimate.global_batch, num_devices=len(cluster),
        kind=kind_of(stages), stages=stages, micro_batches=1, latency_s=estimate.latency_s,
        formula_latency_s=estimate.latency_s, peak_memory_bytes=estimate.peak_memory_bytes, search_seconds=search_seconds,
        description=found.description, runners_up=estimate.runners_up)
