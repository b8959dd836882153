"""Divides every op of a graph over all devices.  The search's answers are candidates, with the search's objective as their time
until their Programs are played."""

from __future__ import annotations

import time
from typing import AbstractSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, MissingPackageError
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.plan import InputPlan, Plan, TaskGraphPlan
from whale_tf.planner.candidate import Candidate, Stage, kind_of, no_candidate
from whale_tf.planner.rhino.assignment import assignment_of
from whale_tf.planner.rhino.mesh import Mesh, meshes
from whale_tf.planner.rhino.near import near_answer
from whale_tf.planner.rhino.problem import MeshProblem
from whale_tf.planner.rhino.search import Answer, search
from whale_tf.planner.scope import find_scope
from whale_tf.planner.sharding import Assignment

NAME = "rhino"
OBSTACLE = 0.1  # an op that cannot be divided is named if it takes at least this part of the time on one device
SHOWN = 3


class Question(NamedTuple):
    """Attributes:
    graph: the graph to divide; dimensions of unknown size are not divided.
    known: the same ops with the sizes of a mini-batch of ``batch`` examples.
    inputs: batch inputs, by name, and their batch dimension; ``examples``: the same for every tensor, by number.
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


def divisions(question: Question, cluster: Cluster, shapes: Optional[Sequence[Mesh]] = None,
              with_near: bool = False) -> List[Candidate]:
    """The search's division for each mesh (of one dimension, or of model replicas and devices, as the executor runs them), or the
    reason why there is none.

    Times are the search's objective, and memory is what the search counts.  Both stand in for the results of playing the plan's
    Program.

    Args:
        shapes: the meshes to try; None means all.
        with_near: also return a division of nearly the same objective (:func:`near_answer`), for a caller that plays them.

    Raises:
        ConfigError: see :func:`whale_tf.planner.rhino.search.search`.
    """
    found: List[Candidate] = []
    for mesh in _executable(question, cluster) if shapes is None else shapes:
        try:
            found += _on_mesh(question, cluster, mesh, with_near)
        except (InfeasibleError, MissingPackageError) as error:
            found.append(no_candidate("{} on mesh {}".format(NAME, "x".join(map(str, mesh))), error))
    return found


def _executable(question: Question, cluster: Cluster) -> List[Mesh]:
    """One dimension, or model replicas that divide the mini-batch evenly."""
    return [mesh for mesh in meshes(len(cluster))
            if len(mesh) == 1 or (question.examples and question.batch % mesh[0] == 0 and cluster.is_homogeneous)]


def _on_mesh(question: Question, cluster: Cluster, mesh: Mesh, with_near: bool) -> List[Candidate]:
    replicas, began = (mesh[0] if len(mesh) > 1 else 1), time.perf_counter()
    answer = search(question.graph, cluster, pins=question.pins, shapes=[mesh], divisible=question.divisible,
                    gradients=question.gradients, batch=question.examples if replicas > 1 else None, known=question.known)
    answers = [answer] if replicas > 1 or question.pins or assignment_of(answer).strategies else []
    near = near_answer(answer, min(device.usable_bytes for device in cluster.devices)) if with_near else None
    answers += [near] if near is not None else []
    if not answers:
        return [no_candidate(f"{NAME} on mesh {mesh[0]}", InfeasibleError(_nothing_divided(answer.levels[0].problem)))]
    seconds = time.perf_counter() - began
    return [_candidate(question, cluster, replicas, one, seconds) for one in answers]


def _candidate(question: Question, cluster: Cluster, replicas: int, answer: Answer, search_seconds: float) -> Candidate:
    assignment = assignment_of(answer)
    stages = (Stage(first_layer=0, last_layer=0, devices=_rows(len(cluster), replicas), strategy="split"),)
    return Candidate(
        NAME, describe(assignment, question.graph, answer.mesh), "", cluster.name, question.batch, len(cluster),
        kind_of(stages), stages, model_replicas=replicas, latency_s=answer.seconds,
        peak_memory_bytes=(int(answer.peak_bytes),) * len(cluster), search_seconds=search_seconds, assignment=assignment)


def _nothing_divided(problem: MeshProblem) -> str:
    """The reason why dividing gains nothing: the ops that cannot be divided, if these take the time."""
    obstacles = problem.undivided(OBSTACLE)
    if not obstacles:
        return "nothing is worth dividing"
    texts = [f"{op.name!r} ({op.type}, {100 * part:.0f}% of the time on one device: {reason})" for op, part, reason in obstacles]
    return "it does not pay to divide the other ops while these cannot be divided: " + ", ".join(texts[:SHOWN])


def describe(assignment: Assignment, graph: OpGraph, mesh: Sequence[int]) -> str:
    """``mesh 4, 12 of 20 products, look-ups and losses divided, 3 of 8 variables in shards``."""
    patterns = assignment.shards
    divided = sum(pattern != "once" for pattern in patterns.values())
    return "mesh {}, {} of {} products, look-ups and losses divided, {} of {} variables in shards".format(
        "x".join(map(str, mesh)), divided, len(patterns), len(assignment.variables), len(find_scope(graph).variables))


def plan_of(graph: OpGraph, found: Candidate, inputs: Mapping[str, int], init: str = "exact") -> Plan:
    """The plan: one TaskGraph with everything, and the patterns from which the rest follows."""
    assert found.assignment is not None, "every op is divided"
    ops = tuple(op.name for op in graph.ops if op.phase is Phase.FORWARD)
    task = TaskGraphPlan(name=NAME, strategy="split", ops=ops, devices=found.stages[0].devices)
    is_nested = found.model_replicas > 1
    return Plan(
        graph=graph.fingerprint(), num_devices=found.num_devices, num_model_replicas=found.model_replicas,
        nested_batch="divide" if is_nested else "own", init=init, task_graphs=(task,), shards=found.assignment.shards,
        inputs=tuple(InputPlan(tensor=name, dim=dim) for name, dim in inputs.items()) if is_nested else (),
        estimate=found.estimate)


def _rows(devices: int, replicas: int) -> Tuple[Tuple[int, ...], ...]:
    """The devices of every model replica."""
    count = devices // replicas
    return tuple(tuple(range(r * count, (r + 1) * count)) for r in range(replicas))
