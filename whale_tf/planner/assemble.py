"""Assembles a plan from decisions: transfers, warm-up depths, slices, gradient buckets, whoever made the decisions."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.bridges import cuts, pattern
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import AnnotationError
from whale_tf.ir import batch_axis
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import Layout
from whale_tf.plan import BridgePlan, Estimate, GradientPlan, InputPlan, Plan, TaskGraphPlan
from whale_tf.planner.buckets import Gradient
from whale_tf.planner.gradients import backend_of, buckets_of, travels_as_fp16, variables_of
from whale_tf.planner.slices import follows_devices, replica_slices
from whale_tf.profiler.graph_profile import precision_of
from whale_tf.schedule import auto_policy, in_flight, orders, positions_of, schedule_of, warmup_depths


class TaskGraphSpec(NamedTuple):
    """An annotation.  ``device_count`` None means all devices.  For ``batch_of`` see :class:`whale_tf.plan.TaskGraphPlan`, for
    ``one_step`` :class:`whale_tf.plan.Plan`.  ``alone``: one model replica computes for all."""

    name: str
    strategy: str
    device_count: Optional[int]
    batch_of: Optional[int] = None
    one_step: bool = False
    alone: bool = False


UNANNOTATED = TaskGraphSpec("model", "replicate", None)  # all of a graph that has no annotations


class StageStatistics(NamedTuple):
    """The facts about a TaskGraph that a plan needs.

    Attributes:
        ops: names of its forward ops.
        activation_bytes: bytes of forward tensors that backward ops read, for the whole mini-batch (0: batch size not known).
        parameter_bytes: bytes of its trained variables.
        state_bytes: bytes of their optimizer state (momentum has one slot, Adam two).
        gradients: gradients of its variables, in the order in which they become ready.
        read_in_loops: names of its variables whose handles enter version 1 while loops.
        updated_in_functions: names of its variables that conditions, loops and calls write.
        gradient_bytes: bytes of all gradients; the size of a sparse one is not known.
    """

    ops: Tuple[str, ...]
    activation_bytes: int
    parameter_bytes: int
    state_bytes: int
    gradients: Tuple[Gradient, ...]
    read_in_loops: Tuple[str, ...] = ()
    updated_in_functions: Tuple[str, ...] = ()
    gradient_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Parameters, gradients and optimizer state: the bytes that a device holds regardless of the micro-batch."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


class Crossing(NamedTuple):
    """A tensor that goes from one TaskGraph to another.  ``bytes`` counts the whole mini-batch (0: not known)."""

    tensor: str
    producer: int
    consumer: int
    layout: Optional[Layout]  # None if it is computed once per step
    bytes: int


class ModelFacts(NamedTuple):
    """A graph with the facts that a plan needs.

    Attributes:
        specs: its TaskGraphs, in order.
        stages: the facts about each of them.
        crossings: the tensors that go from one to another.
        inputs: batch input tensors, and their batch dimension.
    """

    graph: OpGraph
    specs: Sequence[TaskGraphSpec]
    stages: Sequence[StageStatistics]
    crossings: Sequence[Crossing]
    inputs: Mapping[str, int]


class Decision(NamedTuple):
    """The decisions from which a plan is assembled.

    Attributes:
        rows: ``[TaskGraph][model replica][replica]`` device numbers.
        warmups: warm-up depths; None means by the configuration's policy.
        slices: slices of each TaskGraph; None means by its devices.
        processes: device numbers of each process, if there are several.
    """

    rows: Sequence[Tuple[Tuple[int, ...], ...]]
    micro_batches: int
    nested_batch: str
    estimate: Estimate
    warmups: Optional[Tuple[int, ...]] = None
    slices: Optional[Tuple[Optional[Tuple[int, ...]], ...]] = None
    processes: Tuple[Tuple[int, ...], ...] = ()


def assemble(facts: ModelFacts, cluster: Cluster, config: Config, decision: Decision) -> Plan:
    """The plan of these TaskGraphs on these devices: transfers, warm-up depths, slices, gradient buckets.

    Raises:
        InfeasibleError: a TaskGraph does not fit its devices.
    """
    graph, specs, stages, crossings, inputs = facts
    rows, micro_batches = decision.rows, decision.micro_batches
    total, replicas = len(cluster.devices), len(rows[0])
    parts = {"own": micro_batches, "divide": micro_batches * replicas, "micro": 1}[decision.nested_batch]
    counts = [replica_count(spec, row) for spec, row in zip(specs, rows)]
    used = [device for spec, row in zip(specs, rows) if spec.batch_of is None for device in row[0]]
    if schedule_of(config.pipeline.schedule).folding is not None:
        positions = positions_of(rows)
        warmups = in_flight(orders(config.pipeline.schedule, micro_batches, (1,) * len(positions), positions), len(positions))
    elif len(used) > len(set(used)):
        warmups = (1,) * len(rows)
    else:
        chosen = None if schedule_of(config.pipeline.schedule).policy else decision.warmups
        warmups = chosen or _warmups(facts, rows, counts, cluster, config, micro_batches, parts)
    batch = static_batch(graph, inputs)
    slices = decision.slices or tuple(
        _slices(graph, spec, stage, row, cluster, config, batch, parts, warmup)
        for spec, stage, row, warmup in zip(specs, stages, rows, warmups))
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
        precision=config.precision,
        loss_scale=config.loss_scale,
        task_graphs=tuple(
            TaskGraphPlan(
                name=spec.name, strategy=spec.strategy, ops=stage.ops, devices=row, warmup=warmup, slices=parts_of_batch,
                batch_of=spec.batch_of, xla=config.xla,
                variables=variables_of(stage.read_in_loops, stage.updated_in_functions, row, cluster, config, decision.processes,
                                       bool(sums)))
            for spec, stage, row, warmup, parts_of_batch in zip(specs, stages, rows, warmups, slices)),
        inputs=tuple(InputPlan(tensor=name, dim=dim) for name, dim in inputs.items()),
        processes=decision.processes,
        one_step=bool(decision.processes) and any(spec.one_step for spec in specs),
        bridges=tuple(_bridge(crossing, counts, parts) for crossing in crossings),
        gradients=tuple(
            GradientPlan(
                task_graph=i, backend=backend_of(config, decision.processes, sums),
                buckets=buckets_of(stage.gradients, cluster, config, sums), bytes=stage.gradient_bytes,
                fp16=travels_as_fp16(config, decision.processes, sums))
            for i, (stage, count) in enumerate(zip(stages, counts))
            if replicas * count > 1 and stage.gradients),
        estimate=decision.estimate)


def static_batch(graph: OpGraph, inputs: Mapping[str, int]) -> Optional[int]:
    """:func:`whale_tf.ir.batch_axis.static_batch` of inputs by their names."""
    return batch_axis.static_batch(graph, {graph.tensor(name): dim for name, dim in inputs.items()})


def _as_beside(number: int, specs: Sequence[TaskGraphSpec], rows: Sequence[Tuple[Tuple[int, ...], ...]],
               slices: Sequence[Optional[Tuple[int, ...]]]) -> Optional[Tuple[int, ...]]:
    """The batch part of a ``split`` TaskGraph divides the batch like the ``replicate`` one that shares its devices."""
    if specs[number].batch_of is not None:
        for spec, row, parts in zip(specs, rows, slices):
            if spec.strategy == "replicate" and spec.batch_of is None and row == rows[number]:
                return parts
    return slices[number]


def _slices(graph: OpGraph, spec: TaskGraphSpec, stage: StageStatistics, rows: Tuple[Tuple[int, ...], ...], cluster: Cluster,
            config: Config, batch: Optional[int], parts: int, warmup: int) -> Optional[Tuple[int, ...]]:
    """Uneven slices on unequal devices.  On equal devices a mini-batch must divide evenly."""
    if spec.strategy != "replicate" or (batch is not None and batch % parts):
        return None
    if not follows_devices(rows, cluster, config.balance.algorithm):
        return None
    return replica_slices(
        spec.name, rows, cluster, None if batch is None else batch // parts, warmup * stage.activation_bytes / parts,
        stage.resident_bytes, config.balance.algorithm, precision_of(graph))


def folded_positions(specs: Sequence[TaskGraphSpec], total: int, config: Config) -> Tuple[int, ...]:
    """The stage of devices of every TaskGraph, under a schedule that puts several TaskGraphs on each device; otherwise nothing.

    Each device gets the smallest number of TaskGraphs, at least two, with which the stages' devices divide ``total``.  There is
    a single stage only if it takes all devices.

    Raises:
        AnnotationError: there is no such number, or the TaskGraphs cannot share devices.
    """
    name = config.pipeline.schedule
    folded = schedule_of(name).folding
    if folded is None:
        return ()
    counts = {total if spec.device_count is None else spec.device_count for spec in specs}
    asked = ", ".join(f"{spec.strategy}({'' if spec.device_count is None else spec.device_count})" for spec in specs)
    if len(counts) > 1 or any(spec.strategy == "split" for spec in specs):
        raise AnnotationError(
            f"pipeline.schedule {name!r} runs several TaskGraphs on the same devices, so all of them need 'replicate' with "
            f"the same number of devices, but they are {asked}; use backward_first or zero_bubble_h1, or equal annotations")
    count, = counts
    fits = [each for each in range(2, len(specs) + 1) if len(specs) % each == 0 and total % (len(specs) // each * count) == 0
            and (each < len(specs) or count == total)]
    if name == "zero_bubble_v":
        fits = [each for each in fits if each == 2]
    if not fits:
        raise AnnotationError(
            f"pipeline.schedule {name!r} puts {'two' if name == 'zero_bubble_v' else 'at least two'} TaskGraphs on each device, "
            f"but {len(specs)} of {count} device(s) each ({asked}) do not divide over {total} device(s) like that; annotate "
            f"{2 * max(1, total // count)} TaskGraphs, or use backward_first or zero_bubble_h1")
    return folded(len(specs), fits[0])


def stages_of(specs: Sequence[TaskGraphSpec], total: int, config: Config) -> List[TaskGraphSpec]:
    """The TaskGraphs by which devices are counted: the first of those that share devices by the schedule, without those that hold
    the batch part of another one."""
    whole, positions = [spec for spec in specs if spec.batch_of is None], folded_positions(specs, total, config)
    return whole[:max(positions) + 1] if positions else whole


def spans(specs: Sequence[TaskGraphSpec], processes: Sequence[Tuple[int, ...]], config: Config) -> bool:
    """Whether processes run parts of one step: they are told to, have different numbers of devices, or a model replica spans
    them, because its TaskGraphs ask for more devices than a process has or span nodes."""
    if not processes:
        return False  # one process, which has all devices
    if len(set(map(len, processes))) > 1:
        return True
    stages = stages_of(specs, sum(map(len, processes)), config)
    asked = sum(spec.device_count or 0 for spec in stages)
    told = any(spec.one_step for spec in specs)
    return told or asked > len(processes[0]) or goes_across(specs, config)


def devices_for_all(processes: Sequence[Tuple[int, ...]], cluster: Cluster) -> int:
    """The number of devices of a TaskGraph that asks for all: those of a process, or the cluster's if processes have different
    numbers of them, or there is one."""
    return len(processes[0]) if len(set(map(len, processes))) == 1 else len(cluster)


def goes_across(specs: Sequence[TaskGraphSpec], config: Config) -> bool:
    """Whether the replicas of each TaskGraph are placed next to each other, rather than the TaskGraphs of a model replica."""
    whole = [spec for spec in specs if spec.batch_of is None]
    return not config.cluster.device_place_prefer_intra_node and len(whole) > 1 and all(spec.device_count for spec in whole)


def replica_count(spec: TaskGraphSpec, row: Tuple[Tuple[int, ...], ...]) -> int:
    """Parts of a micro-batch: a ``split`` TaskGraph is one replica on all its devices."""
    return 1 if spec.strategy == "split" else len(row[0])


def _warmups(facts: ModelFacts, rows: Sequence[Tuple[Tuple[int, ...], ...]], counts: Sequence[int], cluster: Cluster,
             config: Config, micro_batches: int, parts: int) -> Tuple[int, ...]:
    """DAPPLE's K_i for every stage, with D from the device's memory if the size of activations is known.  The batch part of a
    ``split`` TaskGraph belongs to the stage of that TaskGraph.

    Args:
        parts: micro-batches into which a mini-batch is divided, those of all model replicas that share it.
    """
    whole = sum(spec.batch_of is None for spec in facts.specs)
    stages, beside = facts.stages[:whole], [spec.batch_of for spec in facts.specs if spec.batch_of is not None]
    crossings = [c for c in facts.crossings if max(c.producer, c.consumer) < whole]
    limits = []
    for stage, row, count in zip(stages, rows, counts):
        device = cluster.devices[row[0][0]]
        per_micro_batch = stage.activation_bytes // (parts * count)
        free = int(device.usable_bytes) - stage.resident_bytes
        limits.append(max(1, free // per_micro_batch) if per_micro_batch else micro_batches)
    schedule = schedule_of(config.pipeline.schedule)
    policy: str = schedule.policy or config.pipeline.warmup
    if schedule.splits:  # every stage holds as many micro-batches as the first one
        limits = [min(limits)] * len(limits)
    if policy == "auto":
        policy = auto_policy(_activation_communication_ratio(stages, rows, crossings, cluster))
    depths = warmup_depths(policy, len(stages), limits, micro_batches)
    return depths + tuple(depths[number] for number in beside)


def _activation_communication_ratio(stages: Sequence[StageStatistics], rows: Sequence[Tuple[Tuple[int, ...], ...]],
                                    crossings: Sequence[Crossing], cluster: Cluster) -> float:
    """DAPPLE's ACR from bytes alone: the transfer time at the busiest boundary, divided by the least time that a stage needs to
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
        for stage, row in zip(stages, rows)]
    mean = sum(work) / len(work)
    return max(times) / mean if times and mean else 0.0


def _bridge(crossing: Crossing, counts: Sequence[int], parts: int) -> BridgePlan:
    producers, consumers = (cuts(counts[index]) for index in (crossing.producer, crossing.consumer))
    per_step = crossing.layout is None
    return BridgePlan(
        tensor=crossing.tensor, producer=crossing.producer, consumer=crossing.consumer,
        pattern="one-to-one" if per_step else pattern(producers, consumers),
        bytes=crossing.bytes // (1 if per_step else parts), per_step=per_step)
