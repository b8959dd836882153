"""Candidates: the answers of all searches, which can be printed, compared and converted to a Plan; and the choice among them."""
from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.documents import Record, plain
from whale_tf.errors import InfeasibleError, PlanError, memory_text, seconds_text
from whale_tf.plan import Estimate, GradientPlan, Plan, TaskGraphPlan
from whale_tf.planner.measures import PRECISION_OF, Measures
from whale_tf.planner.sharding import Assignment
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile

RUNNERS_UP = 5  # number of runners-up to report
TIE = 1.01  # times within this ratio count as equal
OF_SEARCHES = ("is_bounded", "room", "below_s")  # what measures say to searches alone
UNTOLD = ("why_not", "profile", "assignment", "plan")  # fields that are left out of JSON


@dataclass(frozen=True)
class Stage(Record):
    """A pipeline stage.

    Attributes:
        first_layer: number of its first layer in the profile.
        last_layer: number of its last one (inclusive, as DAPPLE's Table VII prints them).
        devices: ``[model replica][device]`` numbers; the devices of a row share the stage by ``strategy``.
        strategy: ``replicate`` (each takes a slice of the micro-batch) or ``split`` (tensor parallelism).
        warmup: forward micro-batches before the first backward one.
        kept: as in a TaskGraphPlan of layers.
    """

    first_layer: int
    last_layer: int
    devices: Tuple[Tuple[int, ...], ...]
    strategy: str = "replicate"
    warmup: int = 1
    kept: Optional[Tuple[str, ...]] = None

    @property
    def all_devices(self) -> Tuple[int, ...]:
        return tuple(device for row in self.devices for device in row)


@dataclass(frozen=True)
class Candidate:
    """A plan with its estimate, or the reason why there is none.

    Attributes:
        description: the plan's shape, in words.
        kind: ``dp`` (one stage, the batch divided), ``straight`` (one device per stage), ``hybrid`` (anything else).
        micro_batches: micro-batches of one model replica.
        latency_s: estimated seconds of one step.
        is_played: whether the estimate comes from playing the plan's tasks, and not from the search itself.
        peak_memory_bytes: peak of each device of the cluster.
        fits: whether the peaks are within every device's memory.
        measures: the memory measures.
        runners_up: the plans that were not chosen, in words, best first.
        without: the search's answers without each of the measures, in words.
        why_not: the reason why the search found no plan; then nothing else is known.
        times, xla, host: as in :class:`~whale_tf.plan.Estimate`.
        profile: the layers in which the stages are given; None if every op is divided.
        assignment: how every op is divided.
        plan: the plan for a captured graph; None if it follows from the profile.
    """

    search: str
    description: str
    model: str = ""
    cluster: str = ""
    global_batch: int = 0
    num_devices: int = 0
    kind: str = ""
    stages: Tuple[Stage, ...] = ()
    micro_batches: int = 1
    model_replicas: int = 1
    latency_s: float = float("inf")
    peak_memory_bytes: Tuple[int, ...] = ()
    fits: bool = True
    measures: Measures = Measures()
    is_played: bool = False
    search_seconds: float = 0.0
    runners_up: Tuple[str, ...] = ()
    without: Tuple[str, ...] = ()
    why_not: str = ""
    times: str = ""
    xla: bool = False
    host: str = ""
    profile: Optional[ModelProfile] = None
    assignment: Optional[Assignment] = None
    plan: Optional[Plan] = None

    @property
    def told(self) -> str:
        """The candidate in one line: ``dapple: data parallel on 8, 4 micro-batches, ZeRO v3, simulated 3.433 s``."""
        if self.why_not:
            return f"{self.search}: {self.description}"
        seconds = f"{'simulated ' if self.is_played else ''}{seconds_text(self.latency_s)}"
        return f"{self.search}: " + ", ".join([self.description, *self.measures.described(), seconds])

    @property
    def estimate(self) -> Estimate:
        """The part of the candidate that a Plan keeps."""
        return Estimate(search=self.search, global_batch=self.global_batch, latency_s=self.latency_s,
                        peak_memory_bytes=self.peak_memory_bytes, runners_up=self.runners_up, without=self.without,
                        times=self.times, xla=self.xla, host=self.host)

    def to_dict(self) -> Dict[str, Any]:
        """The candidate as plain values, with the devices of a stage in one list."""
        value = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in UNTOLD}
        value["measures"] = {name: part for name, part in self.measures._asdict().items() if name not in OF_SEARCHES}
        value["stages"] = [dict(plain(stage), devices=list(stage.all_devices)) for stage in self.stages]
        return value

    def to_json(self, indent: Optional[int] = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_plan(self, profile: ModelProfile) -> Plan:
        """The executable Plan.  Each stage takes the ops of its layers if the profile has them.

        Raises:
            PlanError: the profile belongs to another model, or has ops for only some layers.
        """
        if profile.name != self.model or self.stages[-1].last_layer != len(profile.layers) - 1:
            raise PlanError(f"the plan was searched for {self.model!r} with {self.stages[-1].last_layer + 1} layers, "
                            f"but the profile is {profile.name!r} with {len(profile.layers)}; give the same profile"
                            )
        without = [layer.name for layer in profile.layers if not layer.ops]
        if without and len(without) < len(profile.layers) and profile.graph:
            raise PlanError("layers {} of {!r} name no ops, the others do; record the profile again".format(
                ", ".join(without[:3]), profile.name))
        graphs: List[TaskGraphPlan] = []
        gradients: List[GradientPlan] = []
        for number, stage in enumerate(self.stages):
            layers = profile.layers[stage.first_layer:stage.last_layer + 1]
            graphs.append(TaskGraphPlan(
                name=f"stage_{number}", strategy=stage.strategy, devices=stage.devices, warmup=stage.warmup, kept=stage.kept,
                ops=tuple(op for layer in layers for op in layer.ops or (layer.name,))))
            if len(stage.all_devices) > 1:
                size = profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1)
                gradients.append(GradientPlan(task_graph=number, backend="local", bytes=size))
        return Plan(
            graph=profile.graph or profile.name, num_devices=self.num_devices, num_model_replicas=self.model_replicas,
            num_micro_batch=self.micro_batches, nested_batch="divide" if self.model_replicas > 1 else "own",
            task_graphs=tuple(graphs), gradients=tuple(gradients), schedule=self.measures.schedule, zero=self.measures.zero,
            offload=self.measures.offload, precision=PRECISION_OF.get(profile.precision, "float32"), estimate=self.estimate)


def of_stages(search: str, description: str, costs: StageCosts, stages: Sequence[Stage], global_batch: int,
              micro_batches: int, latency_s: float = float("inf"), peak_memory_bytes: Sequence[int] = (),
              runners_up: Sequence[str] = ()) -> Candidate:
    """The candidate of a search that found stages of a profile's layers.

    Args:
        peak_memory_bytes: of every device; empty if the search does not say.
    """
    return Candidate(
        search, description, costs.profile.name, costs.cluster.name, global_batch, len(costs.cluster), kind_of(stages),
        tuple(stages), micro_batches, len(stages[0].devices), latency_s,
        tuple(peak_memory_bytes) or (0,) * len(costs.cluster), measures=costs.measures, runners_up=tuple(runners_up),
        profile=costs.profile)


def no_candidate(search: str, reason: Exception) -> Candidate:
    """The candidate of a requested search that found no plan."""
    return Candidate(search, f"no candidate: {reason}", fits=False, why_not=str(reason))


def ranked(candidates: Sequence[Candidate]) -> List[Candidate]:
    """Candidates that fit come first, faster ones before slower ones.  Among nearly equal ones, the one with the fewest measures
    comes first.  Candidates without a plan come last.

    Among plans of one stage the fastest comes first, so that none is slower than the undivided graph or data parallelism.
    """
    ordered = sorted(candidates, key=lambda c: (bool(c.why_not), not c.fits, c.latency_s, len(c.stages)))
    near = [c for c in ordered if c.fits == ordered[0].fits and c.latency_s <= ordered[0].latency_s * TIE]
    first = min(near, key=lambda c: (c.assignment is not None, len(c.measures.described()), len(c.stages),
                                     len(c.stages) > 1 and c.micro_batches, c.latency_s))
    return [first] + [c for c in ordered if c is not first]


def best(candidates: Sequence[Candidate], cluster: Cluster) -> Candidate:
    """The best candidate, with the others as its runners-up.  The reason why a search found no plan is never left out.

    Raises:
        InfeasibleError: no candidate fits in memory.
    """
    first, *others = ranked(candidates)
    reasons = tuple({c.search: c.told for c in reversed(others) if c.why_not}.values())  # one of each search
    if not first.fits:
        if not first.why_not:
            raise _too_large([c for c in candidates if not c.why_not], cluster)
        raise InfeasibleError("; ".join(dict.fromkeys(c.why_not for c in candidates if c.why_not)))
    return replace(first, runners_up=tuple(_told(first, [c for c in others if not c.why_not])) + reasons)


def _told(first: Candidate, others: Sequence[Candidate]) -> List[str]:
    """The plans to report, best first: each once, including the best of every search."""
    distinct = {c.told: c for c in reversed(others) if c.told != first.told}
    ordered = list(reversed(list(distinct.values())))
    searches = {c.search: c.told for c in reversed(ordered)}
    leading = {c.told for c in sorted(ordered, key=lambda c: c.told not in searches.values())[:RUNNERS_UP]}
    return [c.told for c in ordered if c.told in leading]


def fit(peak_bytes: Sequence[int], cluster: Cluster) -> bool:
    """Whether every device holds its peak."""
    return all(peak <= device.usable_bytes for peak, device in zip(peak_bytes, cluster.devices))


def _too_large(scored: Sequence[Candidate], cluster: Cluster) -> InfeasibleError:
    least = min(scored, key=lambda c: max(c.peak_memory_bytes))
    need, room = max(least.peak_memory_bytes), min(device.usable_bytes for device in cluster.devices)
    measures = f" ({', '.join(least.measures.described())})" if least.measures.described() else ""
    return InfeasibleError(
        f"no plan fits in memory: the smallest of {len(scored)} candidates{measures} needs {memory_text(need)} on its "
        f"fullest device, but the smallest of the {len(cluster.devices)} devices of {cluster.name!r} has room for "
        f"{memory_text(room)}; use larger devices, more of them, or a smaller mini-batch", need)


def smallest_too_large(costs: StageCosts, search: str, least_bytes: float) -> InfeasibleError:
    """The error of a search of which no plan fits; ``least_bytes``: of the smallest one on its fullest device."""
    cluster, measures = costs.cluster, costs.measures.described()
    smallest = min(cluster.devices, key=lambda device: device.usable_bytes)
    return InfeasibleError(
        f"no plan of {costs.profile.name!r} fits the {len(cluster)} devices of {cluster.name!r} ({smallest.type} has "
        f"{memory_text(smallest.memory_bytes)}, {memory_text(smallest.usable_bytes)} for a step)"
        f"{', even ' + ', '.join(measures) if measures else ''}: the smallest plan of {search!r} needs "
        f"{memory_text(least_bytes)} on its fullest device; use larger devices, more of them, or a smaller batch", least_bytes)


def kind_of(stages: Sequence[Stage]) -> str:
    """``dp``, ``straight`` or ``hybrid``."""
    if len(stages) == 1 and stages[0].strategy == "replicate":
        return "dp"
    if len(stages) > 1 and all(len(stage.all_devices) == 1 for stage in stages):
        return "straight"
    return "hybrid"
