"""Which plan an un-annotated model gets: candidates of several searches, scored by one estimator.

Every candidate becomes a Plan, and every Plan is played by the simulator on the described cluster; the fastest that fits in
memory is taken, of those within 1% the one with the fewest stages.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError
from whale_tf.planner.auto.partition import auto_partition, respecting_blocks
from whale_tf.planner.candidate import Candidate, Stage, kind_of, no_candidate
from whale_tf.planner.joint import Joint, Layers
from whale_tf.planner.measures import Allowed, Measures
from whale_tf.planner.search import searched
from whale_tf.profiler.model_profile import ModelProfile

MOST_PER_STAGE = 8  # micro-batches per stage beyond which the bubble is below 1 / 8 of the step
SEARCHES: Mapping[str, Tuple[str, ...]] = {  # of a profile, by method
    "all": ("data-parallel", "dapple", "amp"), "auto": ("data-parallel",), "rhino": ("data-parallel",)}
PLAYED = 6  # candidates of a graph, by layers the fastest, that are played
ALWAYS = ("undivided", "data-parallel")
SCORED = 3  # candidates of each number of stages that are simulated


class Request(NamedTuple):
    """What is to be searched.

    Attributes:
        method: ``auto`` (stages of one device each), ``dapple``, ``amp``, ``rhino`` (whose pipelines are given), or ``all`` of
            them and data parallelism.
        num_stages: None: chosen.
        micro_batches: of one model replica; None: chosen.
        global_batch: examples of one step.
        balance: a key of :data:`whale_tf.balance.SOLVERS`, for replicas on unequal devices.
        allowed: what may be done about memory.
    """

    method: str
    num_stages: Optional[int]
    micro_batches: Optional[int]
    global_batch: int
    balance: str = "exact"
    allowed: Allowed = Allowed("none")


def choose(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request) -> Candidate:
    """The best plan for a model, as played with the times of its layers; see :func:`candidates`."""
    began = time.perf_counter()

    def under(measures: Measures) -> List[Candidate]:
        return candidates(measures.of(layers, cluster), measures.of(pieces, cluster), cluster, request, measures)

    found = Joint(Layers(layers, cluster, under, request.balance, request.micro_batches)).best(request.allowed)
    return replace(found, search_seconds=time.perf_counter() - began)


def candidates(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request, measures: Measures,
               more: Sequence[Candidate] = ()) -> List[Candidate]:
    """Plans for a model under measures.

    Args:
        layers: the model cut between repeated blocks.
        pieces: the same model cut finer.
        more: candidates that others found.

    Raises:
        InfeasibleError: no search finds a plan, or there are more stages than ops.
        PlanError: the request fits no cluster of this size.
    """
    if request.num_stages is not None and request.num_stages > len(pieces.layers):
        raise InfeasibleError(f"num_task_graph is {request.num_stages}, but {pieces.name!r} can be cut into at most "
                              f"{len(pieces.layers)} parts; use at most that many")
    return _distinct([*more, *_candidates(layers, pieces, cluster, request, measures)])


def to_play(found: Sequence[Candidate]) -> List[Candidate]:
    """Those worth playing op by op: the fastest by layers, data parallelism and the undivided graph, and reasons for none."""
    kept = [one for one in found if one.why_not or one.search in ALWAYS]
    return kept + [one for one in found if one not in kept][:PLAYED]


def undivided(profile: ModelProfile, cluster: Cluster, request: Request) -> Candidate:
    """The local script: the whole model on the first device."""
    stages = (Stage(first_layer=0, last_layer=len(profile.layers) - 1, devices=((0,),)),)
    return Candidate(
        "undivided", "one device", profile.name, cluster.name, request.global_batch, len(cluster), kind_of(stages), stages,
        request.micro_batches or 1, peak_memory_bytes=(0,) * len(cluster), profile=profile)


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
        found.append(undivided(layers, cluster, request))
        for name in SEARCHES.get(request.method, ("data-parallel", request.method)):
            try:
                found += _searched(layers, cluster, request, name, measures)
            except InfeasibleError as error:
                found.append(no_candidate(name, error))
    return found


def _distinct(found: Sequence[Candidate]) -> List[Candidate]:
    """Without plans that an earlier search has found as well."""
    kept: Dict[object, Candidate] = {}
    for one in found:
        layers = tuple((layer.ops[:1], len(layer.ops)) for layer in (one.profile.layers if one.profile else ()))
        kept.setdefault((one.stages, one.micro_batches, layers, one.why_not), one)
    return list(kept.values())


def _searched(layers: ModelProfile, cluster: Cluster, request: Request, name: str, measures: Measures) -> List[Candidate]:
    """What a search hands over, without plans of more replicas than a micro-batch has examples.  TaskGraphs of a graph are
    replicated, so nothing of one is split there."""
    whole = tuple(replace(layer, tensor_parallel_bytes=None) for layer in layers.layers)
    found = searched(replace(layers, layers=whole) if layers.graph else layers, cluster, request.global_batch, name,
                     measures, micro_batches=request.micro_batches)
    fine = [one for one in found if _samples(one, request) >= max(map(_replicas, one.stages))]
    if not fine:
        raise InfeasibleError(
            f"the plan of {name!r} has micro-batches of {_samples(found[0], request)} examples for more replicas; use a larger "
            "mini-batch")
    return [replace(one, profile=layers) for one in fine]


def _samples(found: Candidate, request: Request) -> int:
    """Of one micro-batch of a model replica."""
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
    """The best numbers of micro-batches for ``count`` stages, the cuts between blocks unless finer ones are worth it."""
    if count == 1:
        return _searched(layers, cluster, request, "data-parallel", measures)
    profile = layers if count <= len(layers.layers) else pieces
    found: List[Candidate] = []
    error: Optional[InfeasibleError] = None
    for micro_batches in _micro_batch_counts(cluster, request, count):
        try:
            found.append(auto_partition(profile, cluster, request.global_batch, count, micro_batches, measures))
        except InfeasibleError as failed:
            error = failed
    if not found:
        return [_finer(pieces, cluster, request, count, measures, error)]
    choices = []
    for result in sorted(found, key=lambda r: r.latency_s)[:SCORED]:
        finer = auto_partition(pieces, cluster, request.global_batch, count, result.micro_batches, measures)
        taken = respecting_blocks(result, finer)
        choices.append(replace(taken, profile=pieces if taken is finer else profile))
    return choices


def _finer(pieces: ModelProfile, cluster: Cluster, request: Request, count: int, measures: Measures,
           error: Optional[InfeasibleError]) -> Candidate:
    """Where no cut between blocks fits in memory, a finer one may."""
    most = max(_micro_batch_counts(cluster, request, count))
    try:
        return replace(auto_partition(pieces, cluster, request.global_batch, count, most, measures), profile=pieces)
    except InfeasibleError:
        raise error or InfeasibleError(f"no partition of {pieces.name!r} fits") from None


def _micro_batch_counts(cluster: Cluster, request: Request, count: int) -> List[int]:
    replicas = max(1, len(cluster.devices) // count)
    if request.micro_batches is not None:
        return [request.micro_batches]
    each = request.global_batch // replicas
    if each * replicas != request.global_batch or each < 1:
        raise InfeasibleError(
            f"a mini-batch of {request.global_batch} examples does not divide over {replicas} model replicas of "
            f"{count} TaskGraphs; use a multiple of {replicas}")
    return [m for m in range(1, min(each, MOST_PER_STAGE * count) + 1) if each % m == 0]
