"""What a search found: one value for every search, printable, and convertible to a Plan."""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from whale_tf.documents import Record, field, plain
from whale_tf.errors import PlanError
from whale_tf.plan import Estimate, GradientPlan, Plan, TaskGraphPlan
from whale_tf.profiler.model_profile import ModelProfile


@dataclass(frozen=True)
class Stage(Record):
    """A pipeline stage.

    Attributes:
        first_layer: number of its first layer in the profile.
        last_layer: number of its last one (inclusive, as DAPPLE's Table VII prints them).
        devices: ``[model replica][device]`` numbers; the devices of a row share the stage by ``strategy``.
        strategy: ``replicate`` (each takes a slice of the micro-batch) or ``split`` (tensor parallelism).
        warmup: forward micro-batches before the first backward one.
    """

    first_layer: int
    last_layer: int
    devices: Tuple[Tuple[int, ...], ...]
    strategy: str = "replicate"
    warmup: int = 1

    @property
    def all_devices(self) -> Tuple[int, ...]:
        return tuple(device for row in self.devices for device in row)


@dataclass(frozen=True)
class SearchResult(Record):
    """The plan a search takes, and what it believes of it.

    Attributes:
        kind: ``dp`` (one stage, the batch divided), ``straight`` (one device a stage), ``hybrid`` (anything else).
        micro_batches: of one model replica.
        latency_s: estimated seconds of one step.
        formula_latency_s: DAPPLE: L of Eq. 1 and 2 (``latency_s`` is the time of playing the schedule); AMP: Eq. 4.
        peak_memory_bytes: of each device of the cluster.
        fits: whether that is within every device's memory.
        activation_communication_ratio: DAPPLE Table V.
        warmup_policy: DAPPLE's PA or PB.
        overlapped_all_reduce: the estimate has gradients summed beside the backward pass.
        runners_up: the plans not taken, in words, best first.
    """

    search: str
    model: str
    cluster: str
    global_batch: int
    num_devices: int
    kind: str
    stages: Tuple[Stage, ...]
    micro_batches: int
    model_replicas: int = 1
    latency_s: float = field()
    formula_latency_s: float = field()
    peak_memory_bytes: Tuple[int, ...] = field()
    fits: bool = True
    recompute: bool = False
    activation_communication_ratio: Optional[float] = None
    warmup_policy: Optional[str] = None
    overlapped_all_reduce: bool = False
    search_seconds: float = field()
    description: str = field()
    runners_up: Tuple[str, ...] = ()

    def to_dict(self) -> Dict[str, Any]:
        """Plain values; the devices of a stage in one list."""
        value: Dict[str, Any] = plain(self)
        for row, stage in zip(value["stages"], self.stages):
            row["devices"] = list(stage.all_devices)
        return value

    def to_json(self, indent: Optional[int] = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_plan(self, profile: ModelProfile) -> Plan:
        """The executable Plan.  Each stage takes the ops of its layers where the profile has them.

        Raises:
            PlanError: the profile is of another model, or has ops for some layers only.
        """
        if profile.name != self.model or self.stages[-1].last_layer != len(profile.layers) - 1:
            raise PlanError(f"the plan was searched for {self.model!r} with {self.stages[-1].last_layer + 1} layers, "
                            f"the profile is {profile.name!r} with {len(profile.layers)}; give the same profile"
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
                name=f"stage_{number}", strategy=stage.strategy, devices=stage.devices, warmup=stage.warmup,
                ops=tuple(op for layer in layers for op in layer.ops or (layer.name,))))
            if len(stage.all_devices) > 1:
                size = profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1)
                gradients.append(GradientPlan(task_graph=number, backend="local", bytes=size))
        return Plan(
            graph=profile.graph or profile.name, num_devices=self.num_devices, num_model_replicas=self.model_replicas,
            num_micro_batch=self.micro_batches, nested_batch="divide" if self.model_replicas > 1 else "own",
            task_graphs=tuple(graphs), gradients=tuple(gradients),
            estimate=Estimate(search=self.search, latency_s=self.latency_s, peak_memory_bytes=self.peak_memory_bytes,
                              runners_up=self.runners_up))


_NO_CANDIDATE = ": no candidate: "


def no_candidate(search: str, reason: Exception) -> str:
    """Among the runners-up: why a search that was asked for gave no plan."""
    return f"{search}{_NO_CANDIDATE}{reason}"


def is_no_candidate(text: str) -> bool:
    return _NO_CANDIDATE in text


def kind_of(stages: Tuple[Stage, ...]) -> str:
    """``dp``, ``straight`` or ``hybrid``."""
    if len(stages) == 1 and stages[0].strategy == "replicate":
        return "dp"
    if len(stages) > 1 and all(len(stage.all_devices) == 1 for stage in stages):
        return "straight"
    return "hybrid"
