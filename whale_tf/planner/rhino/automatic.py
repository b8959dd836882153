"""Dividing every op of a graph over all devices: the answer as a plan that runs, with time and memory of what is executed."""

from __future__ import annotations

from dataclasses import replace
from typing import AbstractSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, MissingPackageError
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.plan import Estimate, InputPlan, Plan, TaskGraphPlan
from whale_tf.planner.result import SearchResult, Stage, kind_of, no_candidate
from whale_tf.planner.rhino.assignment import assignment_of
from whale_tf.planner.rhino.executed import describe, executed_seconds
from whale_tf.planner.rhino.mesh import Mesh, meshes
from whale_tf.planner.rhino.replicas import replica_graph
from whale_tf.planner.rhino.search import search
from whale_tf.planner.sharding import Assignment

NAME = "rhino"


class Question(NamedTuple):
    """Attributes:
    graph: what is to be divided; sizes that it does not know are not.
    known: the same ops with the sizes of a mini-batch of ``batch`` examples.
    inputs: batch inputs, by name, and their batch dimension; ``examples``: the same of every tensor, by number.
    divisible, gradients, pins: see :func:`whale_tf.planner.rhino.search.search`.
    """

    graph: OpGraph
    known: OpGraph
    batch: int
    inputs: Mapping[str, int] = {}
    examples: Mapping[int, int] = {}
    divisible: Optional[AbstractSet[int]] = None
    gradients: AbstractSet[int] = frozenset()
    pins: Optional[Mapping[str, str]] = None


class Automatic(NamedTuple):
    """How a graph is divided, and what the search believes of it.

    Attributes:
        mesh: devices; or model replicas, which divide the examples, and devices of each.
        description: in words, for comparisons.
    """

    assignment: Assignment
    estimate: Estimate
    description: str
    mesh: Mesh

    @property
    def replicas(self) -> int:
        return self.mesh[0] if len(self.mesh) > 1 else 1


def automatic(question: Question, cluster: Cluster, shapes: Optional[Sequence[Mesh]] = None) -> Automatic:
    """The fastest plan that fits every device: on a mesh of one dimension, or of model replicas and devices, as the executor runs
    them; the others are runners-up.

    Estimates are of what is executed (:mod:`whale_tf.planner.rhino.executed`).

    Args:
        shapes: the meshes to try; None: all.

    Raises:
        ConfigError, InfeasibleError: see :func:`whale_tf.planner.rhino.search.search`.
        MissingPackageError: no mesh was solved without the integer program, and there is no ortools.
    """
    found, errors, unsolved = [], [], []  # type: List[Automatic], List[Exception], List[str]
    for mesh in _executable(question, cluster) if shapes is None else shapes:
        try:
            found.append(_on_mesh(question, cluster, mesh))
        except InfeasibleError as error:
            errors.append(error)
        except MissingPackageError as error:
            errors.append(error)
            unsolved.append(no_candidate("{} on mesh {}".format(NAME, "x".join(map(str, mesh))), error))
    if not found:
        raise errors[0]
    found.sort(key=lambda one: (one.estimate.latency_s or 0.0, len(one.mesh)))
    others = tuple(one.description for one in found[1:]) + tuple(unsolved)
    return found[0]._replace(estimate=replace(found[0].estimate, runners_up=others))


def _executable(question: Question, cluster: Cluster) -> List[Mesh]:
    """One dimension, or model replicas that divide the mini-batch evenly."""
    return [mesh for mesh in meshes(len(cluster))
            if len(mesh) == 1 or (question.examples and question.batch % mesh[0] == 0 and cluster.is_homogeneous)]


def _on_mesh(question: Question, cluster: Cluster, mesh: Mesh) -> Automatic:
    is_nested = len(mesh) > 1
    answer = search(question.graph, cluster, pins=question.pins, shapes=[mesh], divisible=question.divisible,
                    gradients=question.gradients, batch=question.examples if is_nested else None, known=question.known)
    assignment, known = assignment_of(answer), question.known
    if is_nested:
        known = replica_graph(known, question.examples, mesh[0])
    seconds = executed_seconds(known, assignment, cluster, mesh[0] if is_nested else 1)
    peak = answer.peak_bytes
    estimate = Estimate(search=NAME, global_batch=question.batch, latency_s=seconds,
                        peak_memory_bytes=(int(peak),) * len(cluster))
    return Automatic(assignment, estimate, describe(assignment, question.graph, mesh, seconds), mesh)


def plan_of(graph: OpGraph, found: Automatic, cluster: Cluster, inputs: Mapping[str, int], init: str = "exact") -> Plan:
    """The plan: one TaskGraph of everything, and the patterns from which the rest follows."""
    ops = tuple(op.name for op in graph.ops if op.phase is Phase.FORWARD)
    task = TaskGraphPlan(name=NAME, strategy="split", ops=ops, devices=_rows(found, cluster))
    is_nested = found.replicas > 1
    return Plan(
        graph=graph.fingerprint(), num_devices=len(cluster), num_model_replicas=found.replicas,
        nested_batch="divide" if is_nested else "own", init=init, task_graphs=(task,), shards=found.assignment.shards,
        inputs=tuple(InputPlan(tensor=name, dim=dim) for name, dim in inputs.items()) if is_nested else (),
        estimate=found.estimate)


def _rows(found: Automatic, cluster: Cluster) -> Tuple[Tuple[int, ...], ...]:
    """Devices of every model replica."""
    count = len(cluster) // found.replicas
    return tuple(tuple(range(r * count, (r + 1) * count)) for r in range(found.replicas))


def result_of(found: Automatic, model: str, cluster: Cluster, search_seconds: float) -> SearchResult:
    """The plan as other searches tell theirs: one stage on all devices, whose only layer is the model."""
    estimate = found.estimate
    assert estimate.latency_s is not None and estimate.global_batch is not None
    stages = (Stage(first_layer=0, last_layer=0, devices=_rows(found, cluster), strategy="split"),)
    return SearchResult(
        search=NAME, model=model, cluster=cluster.name, global_batch=estimate.global_batch, num_devices=len(cluster),
        kind=kind_of(stages), stages=stages, micro_batches=1, model_replicas=found.replicas, latency_s=estimate.latency_s,
        formula_latency_s=estimate.latency_s, peak_memory_bytes=estimate.peak_memory_bytes, search_seconds=search_seconds,
        description=found.description, runners_up=estimate.runners_up)
