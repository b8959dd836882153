"""One interface for all searches over a model profile: ``search(profile, cluster, global_batch, method=...)``."""
from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import List, Mapping, Optional, Sequence, Tuple, Union

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError, did_you_mean, memory_text
from whale_tf.planner.amp import search as amp
from whale_tf.planner.amp.cost import Costs as AmpCosts
from whale_tf.planner.candidate import RUNNERS_UP, Candidate, Stage, kind_of
from whale_tf.planner.dapple import search as dapple
from whale_tf.planner.joint import Joint
from whale_tf.planner.layers import Layers
from whale_tf.planner.measures import Allowed, Measures
from whale_tf.profiler.model_profile import ModelProfile

SMALL = 32  # devices; for a cluster of at most this size, the least memory is computed before a search
HANDED_OVER = 8  # number of DAPPLE's plans to play
OF_EACH = 2  # number of AMP's plans to play for each combination of degrees of parallelism

METHODS: Mapping[str, str] = {
    "dapple": "pipeline and data parallelism, exact (DAPPLE)",
    "data-parallel": "every device holds the model",
    "two-stages": "the best plan of two stages",
    "amp": "pipeline, data and tensor parallelism (AMP)",
}

# Searches that need more than a profile: summary.
ON_GRAPHS: Mapping[str, str] = {
    "rhino": "every op divided, or a pipeline, on the op graph of a script, .pb or .meta (Rhino)",
    "auto": "runs all searches, scores them by one simulation, and keeps the best",
}


def search(profile: Union[ModelProfile, str], cluster: Union[Cluster, str], global_batch: int, method: str = "dapple",
           allowed: Allowed = Allowed(), micro_batches: Optional[int] = None) -> Candidate:
    """Among the plans that ``method`` finds under the ``allowed`` memory measures, the one that is fastest in the simulation.

    See :func:`searched`."""
    profile, cluster, start = ModelProfile.parse(profile), Cluster.parse(cluster), time.perf_counter()

    def under(measures: Measures) -> List[Candidate]:
        layers = measures.of(profile, cluster)
        return [replace(one, profile=layers)
                for one in searched(layers, cluster, global_batch, method, measures, micro_batches)]

    found = Joint(Layers(profile, cluster, under, micro_batches=micro_batches)).best(allowed)
    return replace(found, search_seconds=time.perf_counter() - start)


def searched(profile: Union[ModelProfile, str], cluster: Union[Cluster, str], global_batch: int, method: str = "dapple",
             measures: Measures = Measures(), micro_batches: Optional[int] = None) -> List[Candidate]:
    """The plans that ``method`` returns, best first by its own costs, of enough different kinds to include the one that is
    fastest in the simulation.

    Args:
        profile: a profile, its file, or a built-in name.
        cluster: any form that :meth:`Cluster.parse` takes.
        global_batch: samples of one step.
        method: a key of :data:`METHODS`.
        measures: the memory measures; the profile is in their precision already.
        micro_batches: number of micro-batches of one model replica; None lets the search choose.

    Raises:
        PlanError: the method or profile is unknown, or the profile has no batch granularity.
        ClusterError: there is no such cluster, or its devices are not connected.
        InfeasibleError: nothing fits; the message gives the smallest memory that would suffice.
    """
    profile, cluster = ModelProfile.parse(profile), Cluster.parse(cluster)
    if method in ON_GRAPHS:
        raise PlanError(f"search {method!r} ({ON_GRAPHS[method]}) needs more than a profile; use `whale plan`, or "
                        f"auto.auto_parallel")
    if method not in METHODS:
        names = [*METHODS, *ON_GRAPHS]
        raise PlanError(f"there is no search {method!r}; there are {', '.join(names)}.{did_you_mean(method, names)}")
    if global_batch < 1:
        raise PlanError(f"global_batch is {global_batch}, expected at least 1")
    if profile.batch_granularity is None:
        raise PlanError(
            f"profile {profile.name!r} does not say its batch granularity, so micro-batches cannot be sized; add "
            "\"batch_granularity\": the number of samples it was measured with, or the smallest a device computes efficiently")
    start = time.perf_counter()
    if method == "amp":
        return _amp(profile, cluster, global_batch, measures, start, micro_batches)
    return _dapple(profile, cluster, global_batch, method, measures, start, micro_batches)


def _dapple(profile: ModelProfile, cluster: Cluster, global_batch: int, method: str, measures: Measures, start: float,
            micro_batches: Optional[int]) -> List[Candidate]:
    solver = "exact" if method == "dapple" else method
    counts = None if micro_batches is None else [micro_batches]
    largest = max(measures.limit(device.usable_bytes) for device in cluster.devices)
    is_hopeless = len(cluster) <= SMALL and dapple.least_memory(profile, cluster, global_batch, measures) > largest
    found = [] if is_hopeless else dapple.search(profile, cluster, global_batch, solver, measures, counts)
    if not found:
        least = dapple.least_memory(profile, cluster, global_batch, measures)
        raise InfeasibleError(_too_large(profile, cluster, method, least, measures), least)
    seconds = time.perf_counter() - start
    return [dapple_result(method, found[number:], seconds) for number in range(min(HANDED_OVER, len(found)))]


def dapple_result(method: str, found: Sequence[dapple.Candidate], search_seconds: float) -> Candidate:
    """The first candidate, with the next ones as its runners-up."""
    best = found[0]
    costs, servers = best.costs, best.costs.servers
    stages = tuple(Stage(first_layer=stage.first, last_layer=stage.end - 1, warmup=depth,
                         devices=(servers.devices(stage.used, stage.taken),))
                   for stage, depth in zip(best.stages, best.depths))
    return Candidate(
        search=method, model=costs.profile.name, cluster=servers.cluster.name, global_batch=costs.global_batch,
        num_devices=servers.num_devices, kind=kind_of(stages), stages=stages, micro_batches=best.micro_batches,
        latency_s=best.latency_s, formula_latency_s=best.formula_s, peak_memory_bytes=tuple(best.peak_bytes()),
        measures=costs.measures, activation_communication_ratio=best.ratio, warmup_policy=best.policy,
        search_seconds=search_seconds, description=best.describe(),
        runners_up=tuple(f"{method}: {c.describe()}, {c.latency_s:.4g} s" for c in found[1:1 + RUNNERS_UP]))


def _amp(profile: ModelProfile, cluster: Cluster, global_batch: int, measures: Measures, start: float,
         micro_batches: Optional[int]) -> List[Candidate]:
    costs = AmpCosts(profile, cluster, global_batch, measures=measures)
    found = amp.search(costs)
    if micro_batches is not None:
        found = [c for c in found if costs.accumulation(c.strategy.degrees, c.strategy.micro_batch) == micro_batches]
    if not found:
        raise InfeasibleError(
            "'amp' finds no strategy for {!r} on the {} devices of {!r}: no pipeline of at most {} stages divides a "
            "batch of {}{}; use a batch that more devices divide".format(
                profile.name, len(cluster), cluster.name, len(profile.layers), global_batch,
                "" if micro_batches is None else f" into {micro_batches} micro-batches"))
    if not found[0].estimate.fits:
        least = min(found, key=lambda c: max(c.estimate.peak_bytes))
        size = float(max(least.estimate.peak_bytes))
        raise InfeasibleError(_too_large(profile, cluster, "amp", size, measures), size)
    seconds = time.perf_counter() - start
    seen: Counter = Counter()
    kept = []
    for number, one in enumerate(found):
        seen[one.strategy.degrees] += 1
        if seen[one.strategy.degrees] <= OF_EACH:
            kept.append(amp_result("amp", costs, found[number:], seconds))
    return kept


def amp_result(method: str, costs: AmpCosts, found: Sequence[amp.Candidate], search_seconds: float) -> Candidate:
    """The first candidate, with the next ones as its runners-up."""
    best, cluster = found[0], costs.cluster
    degrees, placement, cuts = best.strategy.degrees, best.strategy.placement, best.strategy.cuts
    gas = costs.accumulation(degrees, best.strategy.micro_batch)
    stages = tuple(_amp_stage(placement[p].tolist(), cuts[p], cuts[p + 1] - 1, degrees.pp, degrees.tmp,
                              min(gas, degrees.pp - p)) for p in range(degrees.pp))
    return Candidate(
        search=method, model=costs.profile.name, cluster=cluster.name, global_batch=costs.global_batch, num_devices=len(cluster),
        kind=kind_of(stages), stages=stages, micro_batches=gas, model_replicas=len(stages[0].devices),
        latency_s=best.seconds, formula_latency_s=best.estimate.seconds, peak_memory_bytes=best.estimate.peak_bytes,
        search_seconds=search_seconds, description=best.describe(),
        runners_up=tuple(f"{method}: {c.describe()}, {c.seconds:.4g} s" for c in found[1:1 + RUNNERS_UP]))


def _amp_stage(rows: Sequence[Sequence[int]], first: int, last: int, stages: int, tmp: int, warmup: int) -> Stage:
    """Pure data parallelism is one replicated stage; otherwise each pipeline is a model replica."""
    devices: Tuple[Tuple[int, ...], ...] = tuple(tuple(int(device) for device in row) for row in rows)
    if stages == 1 and tmp == 1:
        devices = (tuple(device for row in devices for device in row),)
    return Stage(first_layer=first, last_layer=last, devices=devices, strategy="split" if tmp > 1 else "replicate",
                 warmup=warmup)


def _too_large(profile: ModelProfile, cluster: Cluster, method: str, least_bytes: float, measures: Measures) -> str:
    smallest = min(cluster.devices, key=lambda device: device.usable_bytes)
    return ("no plan of {!r} fits the {} devices of {!r} ({} has {}, {} for a step){}: the smallest plan of {!r} "
            "needs {} on its fullest device; use larger devices, more of them, or a smaller batch".format(
                profile.name, len(cluster), cluster.name, smallest.type, memory_text(smallest.memory_bytes),
                memory_text(smallest.usable_bytes),
                ", even " + ", ".join(measures.described()) if measures.described() else "", method, memory_text(least_bytes)))
