"""A plan from decisions: what crosses, warm-up depths, slices, gradient buckets (whoever decided)."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.bridges import cuts, pattern
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import Layout
from whale_tf.plan import BridgePlan, Estimate, GradientPlan, InputPlan, Plan, TaskGraphPlan
from whale_tf.planner.buckets import Gradient
from whale_tf.planner.gradients import backend_of, buckets_of, travels_as_fp16, variables_of
from whale_tf.planner.slices import follows_devices, replica_slices
from whale_tf.schedule import auto_policy, warmup_depths


class TaskGraphSpec(NamedTuple):
    """What an annotation says; ``device_count`` None: all devices; ``batch_of``: see :class:`whale_tf.plan.TaskGraphPlan`."""

    name: str
    strategy: str
    device_count: Optional[int]
    batch_of: Optional[int] = None


class StageStatistics(NamedTuple):
    """What the plan needs to know of a TaskGraph.

    Attributes:
        ops: names of its forward ops.
        activation_bytes: forward tensors that backward ops read, of the whole mini-batch (0: batch size not known).
        parameter_bytes: its trained variables.
        state_bytes: what the optimizer keeps for them (momentum one slot, Adam two).
        gradients: of its variables, in the order they become ready.
        read_in_loops: names of its variables whose handles version 1 while loops take in.
        gradient_bytes: of all gradients; a sparse one's size is not known.
    """

    ops: Tuple[str, ...]
    activation_bytes: int
    parameter_bytes: int
    state_bytes: int
    gradients: Tuple[Gradient, ...]
    read_in_loops: Tuple[str, ...] = ()
    gradient_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what a device holds whatever the micro-batch."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


class Crossing(NamedTuple):
    """A tensor that goes from one TaskGraph to another; ``bytes`` of the whole mini-batch (0: not known)."""

    tensor: str
    producer: int
    consumer: int
    layout: Optional[Layout]  # None: computed once per step
    bytes: int


class ModelFacts(NamedTuple):
    """A graph and what a plan needs to know of it.

    Attributes:
        specs: its TaskGraphs, in order; ``stages``: what each of them holds.
        crossings: what goes from one to another.
        inputs: batch input tensors, and their batch dimension.
    """

    graph: OpGraph
    specs: Sequence[TaskGraphSpec]
    stages: Sequence[StageStatistics]
    crossings: Sequence[Crossing]
    inputs: Mapping[str, int]


class Decision(NamedTuple):
    """What was decided before a plan is put together.

    Attributes:
        rows: ``[TaskGraph][model replica][replica]`` device numbers.
        warmups: None: by the configuration's policy.
        slices: of each TaskGraph; None: by its devices.
        processes: device numbers of each process, where there are several.
    """

    rows: Sequence[Tuple[Tuple[int, ...], ...]]
    micro_batches: int
    nested_batch: str
    estimate: Estimate
    warmups: Optional[Tuple[int, ...]] = None
    slices: Optional[Tuple[Optional[Tuple[int, ...]], ...]] = None
    processes: Tuple[Tuple[int, ...], ...] = ()


def assemble(facts: ModelFacts, cluster: Cluster, config: Config, decision: Decision) -> Plan:
    """The plan of these TaskGraphs on these devices: what crosses, warm-up depths, slices, gradient buckets.

    Raises:
        InfeasibleError: a TaskGraph does not fit its devices.
    """
    graph, specs, stages, crossings, inputs = facts
    rows, micro_batches = decision.rows, decision.micro_batches
    total, replicas = len(cluster.devices), len(rows[0])
    counts = [replica_count(spec, row) for spec, row in zip(specs, rows)]
    used = [device for spec, row in zip(specs, rows) if spec.batch_of is None for device in row[0]]
    warmups = decision.warmups or _warmups(facts, rows, counts, cluster, config, micro_batches)
    if len(used) > len(set(used)):
        warmups = (1,) * len(rows)
    parts = micro_batches * (replicas if decision.nested_batch == "divide" else 1)
    batch = static_batch(graph, inputs)
    slices = decision.slices or tuple(
        _slices(spec, stage, row, cluster, config, batch, parts, warmup)
        for spec, stage, row, warmup in zip(specs, stages, rows, warmups)
    )
    slices = tuple(_as_beside(i, specs, rows, slices) for i in range(len(specs)))
    sums = () if spans(specs, decision.processes, config) else decision.processes
    return Plan(
        graph=graph.fingerprint(),
        num_devices=total,
        num_model_replicas=replicas,
        num_micro_batch=micro_batches,
        schedule=config.pipeline.schedule,
        nested_batch=decision.nested_batch,
        sync_batch_norm=config.sync_batch_norm,
        init=config.init,
        random=config.random,
        emit=config.emit,
        task_graphs=tuple(
            TaskGraphPlan(
                name=spec.name,
                strategy=spec.strategy,
                ops=stage.ops,
                devices=row,
                warmup=warmup,
                slices=parts_of_batch,
                batch_of=spec.batch_of,
                variables=variables_of(stage.read_in_loops, row, cluster, config, decision.processes, bool(sums)),
            )
            for spec, stage, row, warmup, parts_of_batch in zip(specs, stages, rows, warmups, slices)
        ),
        inputs=tuple(InputPlan(tensor=name, dim=dim) for name, dim in inputs.items()),
        processes=decision.processes,
        bridges=tuple(_bridge(crossing, counts, micro_batches) for crossing in crossings),
        gradients=tuple(
            GradientPlan(
                task_graph=i,
                backend=backend_of(config, decision.processes, sums),
                buckets=buckets_of(stage.gradients, cluster, config, sums),
                bytes=stage.gradient_bytes,
                fp16=travels_as_fp16(config, decision.processes, sums),
            )
            for i, (stage, count) in enumerate(zip(stages, counts))
            if replicas * count > 1 and stage.gradients
        ),
        estimate=decision.estimate,
    )


def static_batch(graph: OpGraph, inputs: Mapping[str, int]) -> Optional[int]:
    """Examples of a mini-batch, where the graph's shapes say so."""
    for name, dim in inputs.items():
        shape = graph.tensors[graph.tensor(name)].shape
        if shape is not None and shape[dim] is not None:
            return shape[dim]
    return None


def _as_beside(
    number: int,
    specs: Sequence[TaskGraphSpec],
    rows: Sequence[Tuple[Tuple[int, ...], ...]],
    slices: Sequence[Optional[Tuple[int, ...]]],
) -> Optional[Tuple[int, ...]]:
    """The batch part of a ``split`` TaskGraph divides the batch like the ``replicate`` one that shares its devices."""
    if specs[number].batch_of is not None:
        for spec, row, parts in zip(specs, rows, slices):
            if spec.strategy == "replicate" and spec.batch_of is None and row == rows[number]:
                return parts
    return slices[number]


def _slices(
    spec: TaskGraphSpec,
    stage: StageStatistics,
    rows: Tuple[Tuple[int, ...], ...],
    cluster: Cluster,
    config: Config,
    batch: Optional[int],
    parts: int,
    warmup: int,
) -> Optional[Tuple[int, ...]]:
    """Uneven slices on unequal devices; on equal ones a mini-batch has to divide evenly."""
    if spec.strategy != "replicate" or (batch is not None and batch % parts):
        return None
    if not follows_devices(rows, cluster, config.balance.algorithm):
        return None
    return replica_slices(
        spec.name,
        rows,
        cluster,
        None if batch is None else batch // parts,
        warmup * stage.activation_bytes / parts,
        stage.resident_bytes,
        config.balance.algorithm,
    )


def spans(specs: Sequence[TaskGraphSpec], processes: Sequence[Tuple[int, ...]], config: Config) -> bool:
    """Whether a model replica spans processes: its TaskGraphs ask for more devices than a process has, or go across nodes."""
    asked = sum(spec.device_count or 0 for spec in specs if spec.batch_of is None)
    return bool(processes) and (asked > len(processes[0]) or goes_across(specs, config))


def goes_across(specs: Sequence[TaskGraphSpec], config: Config) -> bool:
    """Whether the replicas of each TaskGraph are to be beside each other, rather than the TaskGraphs of a model replica."""
    whole = [spec for spec in specs if spec.batch_of is None]
    return not config.cluster.device_place_prefer_intra_node and len(whole) > 1 and all(spec.device_count for spec in whole)


def replica_count(spec: TaskGraphSpec, row: Tuple[Tuple[int, ...], ...]) -> int:
    """Parts of a micro-batch: a ``split`` TaskGraph is one replica on all its devices."""
    return 1 if spec.strategy == "split" else len(row[0])


def _warmups(
    facts: ModelFacts,
    rows: Sequence[Tuple[Tuple[int, ...], ...]],
    counts: Sequence[int],
    cluster: Cluster,
    config: Config,
    micro_batches: int,
) -> Tuple[int, ...]:
    """DAPPLE's K_i for every stage, with D from the device's memory where the activations' size is known.  The batch part of a
    ``split`` TaskGraph is of that stage."""
    whole = sum(spec.batch_of is None for spec in facts.specs)
    stages, beside = facts.stages[:whole], [spec.batch_of for spec in facts.specs if spec.batch_of is not None]
    crossings = [c for c in facts.crossings if max(c.producer, c.consumer) < whole]
    limits = []
    for stage, row, count in zip(stages, rows, counts):
        device = cluster.devices[row[0][0]]
        per_micro_batch = stage.activation_bytes // (micro_batches * count)
        free = int(device.usable_bytes) - stage.resident_bytes
        limits.append(max(1, free // per_micro_batch) if per_micro_batch else micro_batches)
    policy: str = config.pipeline.warmup
    if policy == "auto":
        policy = auto_policy(_activation_communication_ratio(stages, rows, crossings, cluster))
    depths = warmup_depths(policy, len(stages), limits, micro_batches)
    return depths + tuple(depths[number] for number in beside)


def _activation_communication_ratio(
    stages: Sequence[StageStatistics],
    rows: Sequence[Tuple[Tuple[int, ...], ...]],
    crossings: Sequence[Crossing],
    cluster: Cluster,
) -> float:
    """DAPPLE's ACR from bytes alone: time to send what crosses the busiest boundary over the time a stage needs at least to
    move its activations through memory, forward and backward."""
    if len(stages) < 2:
        return 0.0
    boundary: Dict[int, int] = {}
    for crossing in crossings:
        if crossing.layout is not None:
            boundary[crossing.producer] = boundary.get(crossing.producer, 0) + crossing.bytes
    times = []
    for producer, size in boundary.items():
        other = (producer + 1) % len(rows)
        times.append(size / cluster.link(rows[producer][0][0], rows[other][0][0]).bandwidth_bytes_per_s)
    work = [
        2.0 * stage.activation_bytes / cluster.devices[row[0][0]].memory_bandwidth_bytes_per_s
        for stage, row in zip(stages, rows)
    ]
    mean = sum(work) / len(work)
    return max(times) / mean if times and mean else 0.0


def _bridge(crossing: Crossing, counts: Sequence[int], micro_batches: int) -> BridgePlan:
    producers, consumers = (cuts(counts[index]) for index in (crossing.producer, crossing.consumer))
    per_step = crossing.layout is None
    return BridgePlan(
        tensor=crossing.tensor,
        producer=crossing.producer,
        consumer=crossing.consumer,
        pattern="one-to-one" if per_step else pattern(producers, consumers),
        bytes=crossing.bytes // (1 if per_step else micro_batches),
        per_step=per_step,
    )
