"""Chooses the plan of an un-annotated model among candidates of several searches, scored by one estimator.

Every candidate becomes a Plan, and the simulator plays every Plan on the described cluster.  The fastest that fits in memory is
chosen; among plans within 1% of it, the one with the fewest stages.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError
from whale_tf.planner.candidate import Candidate, Stage, no_candidate, of_stages
from whale_tf.planner.joint import Progress
from whale_tf.planner.measures import Allowed, Measures
from whale_tf.planner.micro_batches import micro_batch_counts
from whale_tf.planner.partition import auto_partition, respecting_blocks
from whale_tf.planner.search import searched
from whale_tf.planner.settle import LayersOf, settled
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Source

SEARCHES: Mapping[str, Tuple[str, ...]] = {  # searches over a profile, by method
    "all": ("data-parallel", "dapple", "amp", "replicate-split"), "auto": ("data-parallel",), "rhino": ("data-parallel",)}
PLAYED = 6  # number of candidates of a graph to play, the fastest by layers
ALWAYS = ("undivided", "data-parallel")
SCORED = 3  # number of candidates to simulate for each number of stages


class Request(NamedTuple):
    """The request to a search.

    Attributes:
        method: ``auto`` (stages of one device each), ``dapple``, ``amp``, ``rhino`` (whose pipelines are given), or ``all`` of
            them and data parallelism.
        num_stages: number of stages; None lets the search choose.
        micro_batches: micro-batches of one model replica; None lets the search choose.
        global_batch: examples of one step.
        balance: a key of :data:`whale_tf.balance.SOLVERS`, for replicas on unequal devices.
        allowed: the allowed memory measures.
    """

    method: str
    num_stages: Optional[int]
    micro_batches: Optional[int]
    global_batch: int
    balance: str = "exact"
    allowed: Allowed = Allowed("none")


def choose(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request,
           source: Optional[Source] = None, progress: Optional[Progress] = None) -> Candidate:
    """The best plan for a model in simulation, with the times of its layers.  See :func:`candidates`.

    Args:
        source: the model, if it is more than its layers, which ``pieces`` has too; prices the answer.
        progress: see :class:`~whale_tf.planner.joint.Joint`.
    """
    began = time.perf_counter()
    coarse, fine = (LayersOf(one, cluster, request.global_batch, source) for one in (layers, pieces))

    def under(measures: Measures, room: Cluster) -> List[Candidate]:
        return candidates(coarse.under(measures), fine.under(measures), room, request, measures)

    found = settled(coarse, under, request.allowed, request.micro_batches, request.balance, progress)
    return replace(found, search_seconds=time.perf_counter() - began)


def candidates(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request, measures: Measures,
               more: Sequence[Candidate] = ()) -> List[Candidate]:
    """Plans for a model under measures.

    Args:
        layers: the model cut between repeated blocks.
        pieces: the same model in finer pieces.
        more: candidates of other searches.

    Raises:
        InfeasibleError: no search finds a plan, or there are more stages than ops.
        PlanError: the request does not fit a cluster of this size.
    """
    if request.num_stages is not None and request.num_stages > len(pieces.layers):
        raise InfeasibleError(f"num_task_graph is {request.num_stages}, but {pieces.name!r} can be cut into at most "
                              f"{len(pieces.layers)} parts; use at most that many")
    return _distinct([*more, *_candidates(layers, pieces, cluster, request, measures)])


def to_play(found: Sequence[Candidate]) -> List[Candidate]:
    """The candidates worth playing op by op: the fastest by layers, data parallelism and the undivided graph, and also the
    reasons why searches found none."""
    kept = [one for one in found if one.why_not or one.search in ALWAYS]
    return kept + [one for one in found if one not in kept][:PLAYED]


def undivided(costs: StageCosts, request: Request) -> Candidate:
    """The local script: the whole model on the first device."""
    stages = (Stage(first_layer=0, last_layer=costs.num_layers - 1, devices=((0,),)),)
    return of_stages("undivided", "one device", costs, stages, request.global_batch, request.micro_batches or 1)


def _candidates(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request,
                measures: Measures) -> List[Candidate]:
    found: List[Candidate] = []
    for count in _stage_counts(pieces, cluster, request):
        try:
            found += _partitions(layers, pieces, cluster, request, count, measures)
        except InfeasibleError as error:
            if request.num_stages is not None:
                raise
            found.append(no_candidate(f"pipelines of {count} stages", error))
    if request.num_stages is None:
        found.append(undivided(StageCosts(layers, cluster, measures), request))
        for name in SEARCHES.get(request.method, ("data-parallel", request.method)):
            if name == "replicate-split" and layers.graph:  # a graph's TaskGraphs are not split by its layers
                continue
            try:
                found += _searched(layers, cluster, request, name, measures)
            except InfeasibleError as error:
                found.append(no_candidate(name, error))
    return found


def _distinct(found: Sequence[Candidate]) -> List[Candidate]:
    """The candidates without plans that an earlier search has also found."""
    kept: Dict[object, Candidate] = {}
    for one in found:
        layers = tuple((layer.ops[:1], len(layer.ops)) for layer in (one.profile.layers if one.profile else ()))
        kept.setdefault((one.stages, one.micro_batches, layers, one.why_not), one)
    return list(kept.values())


def _searched(layers: ModelProfile, cluster: Cluster, request: Request, name: str, measures: Measures) -> List[Candidate]:
    """The plans of a search, without those that have more replicas than a micro-batch has examples.  TaskGraphs of a graph are
    replicated, so none is split there."""
    whole = tuple(replace(layer, tensor_parallel_bytes=None) for layer in layers.layers)
    found = searched(replace(layers, layers=whole) if layers.graph else layers, cluster, request.global_batch, name,
                     measures, micro_batches=request.micro_batches)
    fine = [one for one in found if _samples(one, request) >= max(map(_replicas, one.stages))]
    if found and not fine:
        raise InfeasibleError(
            f"the plan of {name!r} has micro-batches of {_samples(found[0], request)} examples for more replicas; use a larger "
            "mini-batch")
    return [replace(one, profile=layers) for one in fine]


def _samples(found: Candidate, request: Request) -> int:
    """Number of examples in one micro-batch of a model replica."""
    return request.global_batch // (found.micro_batches * found.model_replicas)


def _replicas(stage: Stage) -> int:
    return 1 if stage.strategy == "split" else len(stage.devices[0])


def _stage_counts(pieces: ModelProfile, cluster: Cluster, request: Request) -> List[int]:
    if request.num_stages is not None:
        return [request.num_stages]
    if request.method not in ("all", "auto"):
        return []
    total = len(cluster.devices)
    return [count for count in range(2, min(total, len(pieces.layers)) + 1) if total % count == 0]


def _partitions(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request, count: int,
                measures: Measures) -> List[Candidate]:
    """The best numbers of micro-batches for ``count`` stages.  Cuts are between blocks, unless finer cuts gain enough."""
    if count == 1:
        return _searched(layers, cluster, request, "data-parallel", measures)
    fine = StageCosts(pieces, cluster, measures)
    coarse = StageCosts(layers, cluster, measures) if count <= len(layers.layers) else fine
    found: List[Candidate] = []
    error: Optional[InfeasibleError] = None
    for micro_batches in _micro_batch_counts(cluster, request, count):
        try:
            found.append(auto_partition(coarse, request.global_batch, count, micro_batches))
        except InfeasibleError as failed:
            error = failed
    if not found:
        return [_finer(fine, request, count, error)]
    choices = []
    for result in sorted(found, key=lambda r: r.latency_s)[:SCORED]:
        try:
            result = respecting_blocks(result, auto_partition(fine, request.global_batch, count, result.micro_batches))
        except InfeasibleError:
            pass  # pieces need not begin where layers do
        choices.append(result)
    return choices


def _finer(pieces: StageCosts, request: Request, count: int, error: Optional[InfeasibleError]) -> Candidate:
    """Tries finer cuts if no cut between blocks fits in memory."""
    most = max(_micro_batch_counts(pieces.cluster, request, count))
    try:
        return auto_partition(pieces, request.global_batch, count, most)
    except InfeasibleError:
        raise error or InfeasibleError(f"no partition of {pieces.profile.name!r} fits") from None


def _micro_batch_counts(cluster: Cluster, request: Request, count: int) -> List[int]:
    if request.micro_batches is not None:
        return [request.micro_batches]
    replicas = max(1, len(cluster.devices) // count)
    counts = micro_batch_counts(request.global_batch, replicas, count)
    if not counts:
        raise InfeasibleError(
            f"a mini-batch of {request.global_batch} examples does not divide over {replicas} model replicas of "
            f"{count} TaskGraphs; use a multiple of {replicas}")
    return counts
