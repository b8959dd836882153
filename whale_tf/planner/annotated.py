"""The plan that the user's annotations ask for (Whale section 3.1).

Devices are taken in order, one VirtualDevice after the other.  What is left over becomes nested data parallelism::

    cluster of 4 devices, replicate(1) + replicate(1):     model replica 0: stage 0 on 0, stage 1 on 1
                                                           model replica 1: stage 0 on 2, stage 1 on 3
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.bridges import cuts, pattern
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import AnnotationError, ConfigError, PlanError
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import Layout
from whale_tf.plan import BridgePlan, GradientPlan, InputPlan, Plan, TaskGraphPlan
from whale_tf.schedule import auto_policy, warmup_depths


class TaskGraphSpec(NamedTuple):
    """What an annotation says; ``device_count`` None: all devices."""

    name: str
    strategy: str
    device_count: Optional[int]


class StageStatistics(NamedTuple):
    """What the plan needs to know of a TaskGraph.

    Attributes:
        ops: names of its forward ops.
        activation_bytes: forward tensors that backward ops read, of the whole mini-batch (0: batch size not known).
        parameter_bytes: its variables.
        gradients: variable names in the order their gradients become ready.
    """

    ops: Tuple[str, ...]
    activation_bytes: int
    parameter_bytes: int
    gradients: Tuple[str, ...]


class Crossing(NamedTuple):
    """A tensor that goes from one TaskGraph to another; ``bytes`` of the whole mini-batch (0: not known)."""

    tensor: str
    producer: int
    consumer: int
    layout: Optional[Layout]  # None: computed once per step
    bytes: int


def annotated_plan(
    graph: OpGraph,
    specs: Sequence[TaskGraphSpec],
    stages: Sequence[StageStatistics],
    crossings: Sequence[Crossing],
    inputs: Dict[str, int],
    cluster: Cluster,
    config: Config,
) -> Plan:
    """See the module's docstring.

    Raises:
        AnnotationError: the device counts do not fit the cluster.
        PlanError: the configuration asks for what cannot be.
    """
    _check_built(config)
    micro_batches = config.pipeline.num_micro_batch or 1
    total = len(cluster.devices)
    is_pipeline = micro_batches > 1 and len(specs) > 1
    rows = virtual_devices(specs, total, is_pipeline, config.cluster.colocate_split_and_replicate)
    counts = [replica_count(spec, row) for spec, row in zip(specs, rows)]
    replicas = len(rows[0])
    shared = sum(len(row) * len(row[0]) for row in rows) > total
    plan_schedule = config.pipeline.schedule
    warmups = _warmups(stages, rows, counts, crossings, cluster, config, micro_batches)
    backend = config.communication.backend
    return Plan(
        graph=graph.fingerprint(),
        num_devices=total,
        num_model_replicas=replicas,
        num_micro_batch=micro_batches,
        schedule=plan_schedule,
        nested_batch=config.io.nested_batch,
        sync_batch_norm=config.sync_batch_norm,
        task_graphs=tuple(
            TaskGraphPlan(
                name=spec.name, strategy=spec.strategy, ops=stage.ops, devices=row, warmup=1 if shared else warmup
            )
            for spec, stage, row, warmup in zip(specs, stages, rows, warmups)
        ),
        inputs=tuple(InputPlan(tensor=name, dim=dim) for name, dim in inputs.items()),
        bridges=tuple(_bridge(crossing, counts, micro_batches) for crossing in crossings),
        gradients=tuple(
            GradientPlan(
                task_graph=i,
                backend="local" if backend == "auto" else backend,
                buckets=tuple((name,) for name in stage.gradients),
                bytes=stage.parameter_bytes,
            )
            for i, (stage, count) in enumerate(zip(stages, counts))
            if replicas * count > 1 and stage.gradients
        ),
    )


NOT_YET = (
    "auto.auto_parallel", "pipeline.num_stages", "communication.bucket_bytes", "communication.fp16",
    "communication.sparse_as_dense", "init")  # fmt: skip


def _check_built(config: Config) -> None:
    """Refuse settings that nothing reads yet, rather than ignore them.

    Raises:
        ConfigError
    """
    defaults = Config()
    for key in NOT_YET:
        if config[key] != defaults[key] and (key, config[key]) != ("auto.auto_parallel", "rhino"):
            raise ConfigError(
                "{} is {!r}, but this version of whale_tf does not support it yet; leave it out (default {!r})".format(
                    key, config[key], defaults[key]
                )
            )


def replica_count(spec: TaskGraphSpec, row: Tuple[Tuple[int, ...], ...]) -> int:
    """Parts of a micro-batch: a ``split`` TaskGraph is one replica on all its devices."""
    return 1 if spec.strategy == "split" else len(row[0])


def virtual_devices(
    specs: Sequence[TaskGraphSpec], total: int, is_pipeline: bool, colocate: bool = False
) -> List[Tuple[Tuple[int, ...], ...]]:
    """``[TaskGraph][model replica][replica]`` device numbers.

    Args:
        colocate: TaskGraphs share the devices of their model replica, all beginning at its first one.

    Raises:
        AnnotationError: the counts do not divide the number of devices, or exceed it (then all TaskGraphs must ask for all
            devices, and share them).
    """
    counts = [total if spec.device_count is None else spec.device_count for spec in specs]
    asked = ", ".join(
        "{}({})".format(spec.strategy, "" if spec.device_count is None else spec.device_count) for spec in specs
    )
    for spec, count in zip(specs, counts):
        if count > total:
            raise AnnotationError(
                "TaskGraph {!r} asks for {} devices, the cluster has {}; use {}({}) or a larger cluster".format(
                    spec.name, count, total, spec.strategy, total
                )
            )
    needed = max(counts) if colocate else sum(counts)
    if colocate and is_pipeline:
        raise AnnotationError(
            "cluster.colocate_split_and_replicate lets the TaskGraphs ({}) share devices, but there are several micro-batches, "
            "and stages of a pipeline need devices of their own; use one micro-batch, or leave the setting out".format(asked)
        )
    if needed > total:
        if all(count == total for count in counts) and not is_pipeline:
            return [(tuple(range(total)),) for _ in counts]
        raise AnnotationError(
            "the TaskGraphs ask for {} devices together ({}), the cluster has {}; use counts whose sum divides {}, or{} let "
            "every TaskGraph ask for all {} devices to share them".format(
                needed, asked, total, total, " with one micro-batch" if is_pipeline else "", total
            )
        )
    if total % needed:
        raise AnnotationError(
            "the TaskGraphs ask for {} devices together ({}), which does not divide the cluster's {}; model replicas need a "
            "multiple: use {} or {} devices, or other counts".format(
                needed, asked, total, total // needed * needed, (total // needed + 1) * needed
            )
        )
    rows = []
    start = 0
    for count in counts:
        rows.append(tuple(tuple(range(g * needed + start, g * needed + start + count)) for g in range(total // needed)))
        start += 0 if colocate else count
    return rows


def _warmups(
    stages: Sequence[StageStatistics],
    rows: Sequence[Tuple[Tuple[int, ...], ...]],
    counts: Sequence[int],
    crossings: Sequence[Crossing],
    cluster: Cluster,
    config: Config,
    micro_batches: int,
) -> Tuple[int, ...]:
    """DAPPLE's K_i for every stage, with D from the device's memory where the activations' size is known."""
    limits = []
    for stage, row, count in zip(stages, rows, counts):
        device = cluster.devices[row[0][0]]
        per_micro_batch = stage.activation_bytes // (micro_batches * count)
        # weights, gradients and two slots of Adam
        free = device.memory_bytes - 4 * stage.parameter_bytes
        limits.append(max(1, free // per_micro_batch) if per_micro_batch else micro_batches)
    policy: str = config.pipeline.warmup
    if policy == "auto":
        policy = auto_policy(_activation_communication_ratio(stages, rows, crossings, cluster))
    return warmup_depths(policy, len(stages), limits, micro_batches)


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


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Refuse a plan that was made for a cluster of another size.

    Raises:
        PlanError
    """
    if plan.num_devices != len(cluster.devices):
        raise PlanError(
            "the plan was made for {} devices, the cluster has {}; pass the cluster it was made for".format(
                plan.num_devices, len(cluster.devices)
            )
        )
