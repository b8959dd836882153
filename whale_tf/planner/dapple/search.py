"""DAPPLE's planner from profile to plan: micro-batch counts, plans, and the choice among them.

The planner tries every number of micro-batches M that divides the batch into whole micro-batches of at least the profile's
granularity.  For each M the exact planner gives the least L.  Other candidates are the best two-stage plan, and data parallelism
with and without overlap of its all-reduce.  All are then played (:mod:`whale_tf.planner.dapple.rehearse`) under both warm-up
policies.  The cuts of the fastest are moved while that makes them faster still, and the fastest wins.
"""
from __future__ import annotations

from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import seconds_text
from whale_tf.planner.candidate import RUNNERS_UP, Candidate, Stage, of_stages, smallest_too_large
from whale_tf.planner.dapple import exact, restricted
from whale_tf.planner.dapple.cost import DappleCosts, Stages
from whale_tf.planner.dapple.device_sets import servers_of
from whale_tf.planner.dapple.rehearse import depths_of, rehearse
from whale_tf.planner.measures import Measures
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile

Solver = Callable[[DappleCosts], Optional[Stages]]

SOLVERS: Mapping[str, Solver] = {
    "exact": exact.solve,
    "two-stages": restricted.two_stages,
    "data-parallel": restricted.data_parallel,
}

# Policy B keeps more micro-batches alive, so it must gain this much (DAPPLE Table IV: 1.02 was not worth it).
POLICY_B_GAIN = 1.02

POLISHED = 4  # plans whose cuts are moved
SMALL = 32  # devices; for a cluster of at most this size, the least memory is computed before a search
NEVER_S = float("inf")
HANDED_OVER = 8  # number of plans to play


class Hybrid(NamedTuple):
    """A hybrid of pipeline and data parallelism, and the facts known about it.

    Attributes:
        origin: the solver that found it.
        formula_s: L of Eq. 1 and 2; with ``overlapped``, data parallelism whose all-reduce runs beside the last backward
            pass.
        latency_s: the time of playing it.
        policy: ``PA`` or ``PB``; ``depths`` are its K_i.
        ratio: DAPPLE's activation-communication ratio (Table V).
    """

    origin: str
    costs: DappleCosts
    stages: Stages
    formula_s: float
    latency_s: float
    policy: str
    depths: Tuple[int, ...]
    overlapped: bool
    ratio: float

    @property
    def micro_batches(self) -> int:
        return self.costs.micro_batches

    def peak_bytes(self) -> List[int]:
        """Peak bytes of every device of the cluster."""
        peaks = [0] * self.costs.servers.num_devices
        for stage, depth in zip(self.stages, self.depths):
            memory = self.costs.memory(stage)
            for device in self.costs.servers.devices(stage.used, stage.taken):
                peaks[device] = int(memory.bytes(depth))
        return peaks

    def describe(self) -> str:
        """``8:8 (30+21 layers), 4 micro-batches``."""
        if len(self.stages) == 1:
            what = "data parallel on {}{}".format(self.stages[0].replicas, ", overlapped" if self.overlapped else "")
        elif all(stage.replicas == 1 for stage in self.stages):
            what = f"straight, {len(self.stages)} stages"
        else:
            what = "{} ({} layers)".format(":".join(str(stage.replicas) for stage in self.stages),
                                           "+".join(str(stage.end - stage.first) for stage in self.stages))
        return f"{what}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"

    def candidate(self, method: str, others: Sequence[Hybrid] = ()) -> Candidate:
        """The plan as every search returns it, with the next ones as its runners-up."""
        servers = self.costs.servers
        stages = [Stage(first_layer=stage.first, last_layer=stage.end - 1, warmup=depth,
                        devices=(servers.devices(stage.used, stage.taken),))
                  for stage, depth in zip(self.stages, self.depths)]
        return of_stages(
            method, self.describe(), self.costs.stage_costs, stages, self.costs.global_batch, self.micro_batches, self.latency_s,
            self.peak_bytes(), [f"{method}: {one.describe()}, {seconds_text(one.latency_s)}" for one in others[:RUNNERS_UP]])


def plans(costs: StageCosts, global_batch: int, method: str, micro_batches: Optional[int] = None) -> List[Candidate]:
    """The plans to play, from fast to slow; empty if a faster one is known than any that fits may be.

    Args:
        method: ``dapple`` or a key of :data:`SOLVERS`.
        micro_batches: the only number of micro-batches to try.

    Raises:
        InfeasibleError: nothing fits memory.
    """
    solver, counts = "exact" if method == "dapple" else method, None if micro_batches is None else [micro_batches]
    profile, cluster, measures = costs.profile, costs.cluster, costs.measures
    largest = max(measures.limit(device.usable_bytes) for device in cluster.devices)
    is_hopeless = len(cluster) <= SMALL and least_memory(costs, global_batch) > largest
    found = [] if is_hopeless else search(profile, cluster, global_batch, solver, measures, counts)
    if not found and measures.below_s < NEVER_S:
        return []
    if not found:
        raise smallest_too_large(costs, method, least_memory(costs, global_batch))
    return [one.candidate(method, found[number + 1:]) for number, one in enumerate(found[:HANDED_OVER])]


def micro_batch_counts(profile: ModelProfile, global_batch: int) -> List[int]:
    """Every M that divides the batch and leaves micro-batches of at least the profile's granularity (or one, M = 1)."""
    least = profile.batch_granularity or 1
    return [m for m in range(1, global_batch + 1) if global_batch % m == 0 and (global_batch // m >= least or m == 1)]


def search(profile: ModelProfile, cluster: Cluster, global_batch: int, solver: str = "exact",
           measures: Measures = Measures(), counts: Optional[Sequence[int]] = None) -> List[Hybrid]:
    """Hybrids from fast to slow; empty if nothing fits memory.

    Args:
        solver: a key of :data:`SOLVERS`.
        measures: the memory measures.
        counts: numbers of micro-batches to try; None means all of :func:`micro_batch_counts`.
    """
    servers, shared = servers_of(cluster), StageCosts(profile, cluster, measures)
    counts = counts or micro_batch_counts(profile, global_batch)
    every = [DappleCosts(profile, servers, global_batch, count, measures, shared) for count in counts]
    if solver == "exact":
        found = _exact(every)
    else:
        found = [scored(solver, costs, stages) for costs in every for stages in [SOLVERS[solver](costs)] if stages]
        if solver == "data-parallel":
            found += _overlapped(found)
    return ranked(found)


def ranked(found: List[Hybrid]) -> List[Hybrid]:
    """Fast plans first; if two differ by less than 0.1%, the one with fewer stages first (section IV-D1)."""
    unique: Dict[Tuple[int, Stages, bool, Measures], Hybrid] = {}
    for candidate in found:
        key = (candidate.micro_batches, candidate.stages, candidate.overlapped, candidate.costs.measures)
        unique.setdefault(key, candidate)
    ranked = sorted(unique.values(), key=lambda c: (c.latency_s, len(c.stages)))
    if ranked:
        near = [c for c in ranked if c.latency_s <= ranked[0].latency_s * 1.001]
        first = min(near, key=lambda c: (len(c.stages), c.latency_s))
        ranked.remove(first)
        ranked.insert(0, first)
    return ranked


def _exact(every: List[DappleCosts]) -> List[Hybrid]:
    found: List[Hybrid] = []
    for name in ("data-parallel", "two-stages"):
        for costs in every:
            stages = SOLVERS[name](costs)
            if stages:
                found.append(scored(name, costs, stages))
    found += _overlapped([c for c in found if c.origin == "data-parallel"])
    pending = [exact.Floors(costs) for costs in every]
    limits = {one.costs.micro_batches: exact.FIRST_LIMIT * one.least_seconds for one in pending}
    last = {costs.micro_batches: exact.upper_bound(costs) for costs in every}
    while pending:
        # the micro-batch count with the lowest limit goes first; whatever it finds bounds the others
        floors = min(pending, key=lambda one: limits[one.costs.micro_batches])
        count = floors.costs.micro_batches
        bound = min([c.latency_s for c in found] + [last[count]])
        is_last = limits[count] * exact.FIRST_LIMIT >= bound
        stages = exact.below(floors, bound if is_last else limits[count])
        if stages:
            found.append(scored("exact", floors.costs, stages))
        if stages or is_last:
            pending.remove(floors)
        limits[count] *= exact.GROWTH
    return found + [polished(candidate) for candidate in ranked(found)[:POLISHED] if len(candidate.stages) > 1]


def polished(candidate: Hybrid) -> Hybrid:
    """The plan with its cuts moved, one layer at a time, to where it plays fastest."""
    best, improved = candidate, True
    while improved:
        improved = False
        for boundary in range(1, len(best.stages)):
            for step in (-1, 1):
                moved = _moved(best.stages, boundary, best.stages[boundary].first + step)
                if moved is not None and best.costs.fits(moved):
                    other = scored(f"{candidate.origin}, cuts moved", best.costs, moved)
                    if other.latency_s < best.latency_s * (1 - 1e-9):
                        best, improved = other, True
    return best


def _moved(stages: Stages, boundary: int, layer: int) -> Optional[Stages]:
    """The cut before stage ``boundary`` moved to ``layer``; None if a stage would be empty."""
    if not stages[boundary - 1].first < layer < stages[boundary].end:
        return None
    moved = list(stages)
    moved[boundary - 1] = stages[boundary - 1]._replace(end=layer)
    moved[boundary] = stages[boundary]._replace(first=layer)
    return tuple(moved)


def scored(origin: str, costs: DappleCosts, stages: Stages) -> Hybrid:
    """The plan, scored from its stages alone: by Eq. 1 and 2, and by playing it under both policies."""
    elements = costs.elements(stages)
    times = {}
    for policy in ("PA", "PB"):
        depths = depths_of(costs, stages, policy)
        times[policy] = (rehearse(elements, costs.micro_batches, depths), depths)
    policy = "PB" if times["PB"][0] * POLICY_B_GAIN < times["PA"][0] else "PA"
    return Hybrid(origin, costs, stages, costs.latency(stages), times[policy][0], policy, times[policy][1], False,
                     communication_ratio(costs, stages))


def communication_ratio(costs: DappleCosts, stages: Stages) -> float:
    """Mean time of a boundary, forward and back, over the mean time of a stage (Table V's ACR); 0 for one stage."""
    elements = costs.elements(stages)
    wires = [wire.forward_s + wire.backward_s for wire in elements[1::2]]
    work = [stage.forward_s + stage.backward_s for stage in elements[0::2]]
    return sum(wires) / len(wires) / (sum(work) / len(work)) if wires and sum(work) else 0.0


def _overlapped(found: List[Hybrid]) -> List[Hybrid]:
    """Data parallelism with the all-reduce of every layer started as soon as its gradients are ready."""
    made = []
    for candidate in found:
        latency_s = overlapped_seconds(candidate.costs, candidate.stages)
        if latency_s < candidate.latency_s:
            made.append(candidate._replace(origin="data-parallel, overlapped", formula_s=latency_s, latency_s=latency_s,
                                           overlapped=True))
    return made


def overlapped_seconds(costs: DappleCosts, stages: Stages) -> float:
    """One stage.  Gradients accumulate over all micro-batches.  During the last backward pass the all-reduces run in parallel,
    one after the other in the order of the layers (Poseidon: the paper's "DP Overlap", section VI-C)."""
    (stage,) = stages
    forward_s, backward_s = costs.times(stage)
    group = costs.group(stage.used, stage.taken)
    slowest = max(group.times, key=lambda times: times.backward[-1])
    ready_s = sent_s = 0.0
    for layer in reversed(range(costs.num_layers)):
        ready_s += slowest.work(layer, layer + 1).backward_s
        if costs.parameters[layer][layer + 1] and stage.replicas > 1:
            sent_s = max(sent_s, ready_s) + group.ring_seconds(layer, layer + 1)
    return forward_s * costs.micro_batches + backward_s * (costs.micro_batches - 1) + max(ready_s, sent_s)


def least_memory(costs: StageCosts, global_batch: int) -> float:
    """Bytes per device of the plan that needs the least on its fullest device: the smallest micro-batch, one in flight, and
    layers spread over as many stages as help (dynamic programming over layers and devices)."""
    micro_batch = -(-global_batch // max(micro_batch_counts(costs.profile, global_batch)))
    devices = min(len(costs.cluster), 4 * costs.num_layers)
    groups = {width: costs.group(range(width), -(-micro_batch // width))
              for width in (1 << k for k in range(devices.bit_length())) if width <= devices}
    best = [[0.0 if layer == 0 else float("inf")] * (devices + 1) for layer in range(costs.num_layers + 1)]
    for end in range(1, costs.num_layers + 1):
        for first in range(end):
            needs = [(width, group.memory(first, end).bytes(1)) for width, group in groups.items()]
            for used in range(1, devices + 1):
                for width, need in needs:
                    if width <= used:
                        best[end][used] = min(best[end][used], max(need, best[first][used - width]))
    return min(best[costs.num_layers])
