"""Which plan an un-annotated model gets: candidates of several searches, scored by one estimator.

Every candidate becomes a Plan, and every Plan is played by the simulator on the described cluster; the fastest that fits in
memory is taken, of those within 1% the one with the fewest stages.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.plan import Plan
from whale_tf.planner.auto.partition import auto_partition, respecting_blocks
from whale_tf.planner.result import SearchResult
from whale_tf.planner.search import RUNNERS_UP, search
from whale_tf.planner.slices import replica_slices
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import (
    LayerEstimator,
    Options,
    Simulator,
    layer_names,
    layered_model,
    micro_batch_size,
    strategy_from_plan,
)

MOST_PER_STAGE = 8  # micro-batches per stage beyond which the bubble is below 1 / 8 of the step
SEARCHES: Mapping[str, Tuple[str, ...]] = {  # of a profile, by method
    "all": ("data-parallel", "dapple", "amp"), "auto": ("data-parallel",), "rhino": ()}
SCORED = 3  # candidates of each number of stages that are simulated
TIE = 1.01


class Request(NamedTuple):
    """What is to be searched.

    Attributes:
        method: ``auto`` (stages of one device each), ``dapple``, ``amp``, ``rhino`` (whose pipelines are given), or ``all`` of
            them and data parallelism.
        num_stages: None: chosen.
        micro_batches: of one model replica; None: chosen.
        global_batch: examples of one step.
        balance: a key of :data:`whale_tf.balance.SOLVERS`, for replicas on unequal devices.
    """

    method: str
    num_stages: Optional[int]
    micro_batches: Optional[int]
    global_batch: int
    balance: str = "exact"


class Choice(NamedTuple):
    """A plan and the layers it is told in."""

    result: SearchResult
    profile: ModelProfile


def choose(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request, more: Sequence[Choice] = ()) -> Choice:
    """The best plan for a model.

    Args:
        layers: the model cut between repeated blocks.
        pieces: the same model cut finer.
        more: candidates that others found.

    Raises:
        InfeasibleError: nothing fits in memory, or there are more stages than ops.
        PlanError: the request fits no cluster of this size.
    """
    began = time.perf_counter()
    if request.num_stages is not None and request.num_stages > len(pieces.layers):
        raise InfeasibleError(f"num_task_graph is {request.num_stages}, but {pieces.name!r} can be cut into at most "
                              f"{len(pieces.layers)} parts; use at most that many")
    found = list(more) + _candidates(layers, pieces, cluster, request, bool(more))
    scored = ranked([simulated(choice, cluster, request.balance) for choice in _distinct(found)])
    best = scored[0]
    if not best.result.fits:
        raise InfeasibleError(_too_large(scored, cluster))
    result = replace(
        best.result, search_seconds=time.perf_counter() - began,
        runners_up=tuple(choice.result.description for choice in scored[1:1 + RUNNERS_UP]))
    return Choice(result, best.profile)


def _candidates(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request, has_more: bool) -> List[Choice]:
    found: List[Choice] = []
    errors: List[PlanError] = []
    for count in _stage_counts(pieces, cluster, request):
        try:
            found += _partitions(layers, pieces, cluster, request, count)
        except InfeasibleError as error:
            errors.append(error)
    if request.num_stages is None:
        names = SEARCHES.get(request.method, (request.method,))
        for name in names:
            try:
                found.append(Choice(_searched(layers, cluster, request, name), layers))
            except InfeasibleError as error:
                errors.append(error)
    if not found and not has_more:
        raise errors[0] if errors else InfeasibleError(
            f"{request.method!r} finds no pipeline of {layers.name!r} on {len(cluster)} devices with mini-batches of "
            f"{request.global_batch} examples; use a number of devices and a batch "
            "with common divisors")
    return found


def _distinct(choices: Sequence[Choice]) -> List[Choice]:
    """Without plans that an earlier search has found as well."""
    found: Dict[object, Choice] = {}
    for choice in choices:
        result = choice.result
        layers = tuple((layer.ops[:1], len(layer.ops)) for layer in choice.profile.layers)
        found.setdefault((result.stages, result.micro_batches, layers), choice)
    return list(found.values())


def _searched(layers: ModelProfile, cluster: Cluster, request: Request, name: str) -> SearchResult:
    result = search(layers, cluster, request.global_batch, name, recompute=False, micro_batches=request.micro_batches)
    if any(stage.strategy == "split" for stage in result.stages):
        raise InfeasibleError(f"{name!r} finds only plans with tensor parallelism, which automatic plans do not run")
    samples = request.global_batch // (result.micro_batches * result.model_replicas)
    if samples < max(len(stage.devices[0]) for stage in result.stages):
        raise InfeasibleError(
            f"the plan of {name!r} has micro-batches of {samples} examples for more replicas; use a larger mini-batch")
    return result


def _stage_counts(pieces: ModelProfile, cluster: Cluster, request: Request) -> List[int]:
    if request.num_stages is not None:
        return [request.num_stages]
    if request.method not in ("all", "auto"):
        return []
    total = len(cluster.devices)
    return [count for count in range(2, min(total, len(pieces.layers)) + 1) if total % count == 0]


def _partitions(layers: ModelProfile, pieces: ModelProfile, cluster: Cluster, request: Request, count: int) -> List[Choice]:
    """The best numbers of micro-batches for ``count`` stages, the cuts between blocks unless finer ones are worth it."""
    if count == 1:
        return [Choice(_searched(layers, cluster, request, "data-parallel"), layers)]
    profile = layers if count <= len(layers.layers) else pieces
    found: List[SearchResult] = []
    error: Optional[InfeasibleError] = None
    for micro_batches in _micro_batch_counts(cluster, request, count):
        try:
            found.append(auto_partition(profile, cluster, request.global_batch, count, micro_batches))
        except InfeasibleError as failed:
            error = failed
    if not found:
        return [_finer(pieces, cluster, request, count, error)]
    choices = []
    for result in sorted(found, key=lambda r: r.latency_s)[:SCORED]:
        finer = auto_partition(pieces, cluster, request.global_batch, count, result.micro_batches)
        best = respecting_blocks(result, finer)
        choices.append(Choice(best, pieces if best is finer else profile))
    return choices


def _finer(pieces: ModelProfile, cluster: Cluster, request: Request, count: int, error: Optional[InfeasibleError]) -> Choice:
    """Where no cut between blocks fits in memory, a finer one may."""
    most = max(_micro_batch_counts(cluster, request, count))
    try:
        return Choice(auto_partition(pieces, cluster, request.global_batch, count, most), pieces)
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


def ranked(choices: Sequence[Choice]) -> List[Choice]:
    """Those that fit first, then fast ones; of nearly equal ones the simplest."""
    ordered = sorted(choices, key=lambda c: (not c.result.fits, c.result.latency_s, len(c.result.stages)))
    best = ordered[0].result
    near = [c for c in ordered if c.result.fits == best.fits and c.result.latency_s <= best.latency_s * TIE]
    first = min(near, key=lambda c: (len(c.result.stages), c.result.micro_batches, c.result.latency_s))
    return [first] + [c for c in ordered if c is not first]


def simulated(choice: Choice, cluster: Cluster, balance: str = "exact") -> Choice:
    """The candidate with the simulator's time and memory in place of its own search's."""
    result, profile = choice
    plan = with_slices(result, profile, cluster, balance)
    size = micro_batch_size(result.global_batch, result.micro_batches, 1)
    model = layered_model(profile, size)
    strategy = strategy_from_plan(plan, model, layer_names(profile))
    played = Simulator(cluster, Options(steady_state=True)).run(strategy, LayerEstimator(model, profile))
    peaks = tuple(int(size) for size in played.peak_memory_bytes)
    return Choice(replace(
        result, latency_s=played.step_time_s, peak_memory_bytes=peaks, fits=not played.oom,
        description=f"{result.search}: {result.description}, simulated {played.step_time_s:.4g} s"), profile)


def with_slices(result: SearchResult, profile: ModelProfile, cluster: Cluster, balance: str) -> Plan:
    """The plan with uneven parts of a micro-batch where a stage's devices are unequal, or its replicas do not divide it.

    A stage for which no division fits in memory keeps equal parts: the simulator says then that it does not fit.
    """
    plan = result.to_plan(profile)
    samples = result.global_batch // (result.micro_batches * result.model_replicas)
    tasks = []
    for stage, task in zip(result.stages, plan.task_graphs):
        kept = sum(layer.activation_bytes for layer in profile.layers[stage.first_layer:stage.last_layer + 1])
        fixed = profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1) * profile.bytes_per_parameter_byte
        load = float(stage.warmup * kept * samples)
        try:
            slices = replica_slices(task.name, task.devices, cluster, samples, load, fixed, balance)
        except InfeasibleError:
            slices = None
        tasks.append(replace(task, slices=slices))
    return replace(plan, task_graphs=tuple(tasks))


def _too_large(scored: Sequence[Choice], cluster: Cluster) -> str:
    least = min(scored, key=lambda c: max(c.result.peak_memory_bytes))
    return (f"no plan fits in memory: the best of {len(scored)} candidates needs "
            f"{max(least.result.peak_memory_bytes) / 2.0**30:.3g} GiB on its fullest device, the smallest of the "
            f"{len(cluster.devices)} "
            f"devices of {cluster.name!r} has {min(device.memory_bytes for device in cluster.devices) / 2.0**30:.3g} "
            f"GiB; use larger devices, more of them, or a smaller mini-batch")

