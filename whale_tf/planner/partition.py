"""Divides a model's layers into pipeline stages of one device each, with :mod:`whale_tf.balance` (Whale section 3.3.2).

``S`` stages on ``N`` devices make ``N / S`` model replicas, which divide the mini-batch.  Devices are assigned so that every
replica has the same mix.  A stage is as slow as its slowest copy.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Sequence, Tuple

from whale_tf.balance import PartitionProblem, StagePartition, exact_stages, partition_latency_s, partition_memory_bytes
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.planner.candidate import Candidate, Stage, of_stages
from whale_tf.planner.stage_costs import StageCosts, Transfer
from whale_tf.planner.virtual_device import dealt
from whale_tf.schedule import warmup_depths

# A cut inside a repeated block must make the pipeline this much faster.
BLOCK_GAIN = 1.02


def auto_partition(costs: StageCosts, global_batch: int, num_stages: int, micro_batches: int,
                   solve: Callable[[PartitionProblem], StagePartition] = exact_stages) -> Candidate:
    """The layers on ``num_stages`` stages.

    Args:
        global_batch: samples of one step, for all model replicas together.
        micro_batches: micro-batches of one model replica.

    Raises:
        InfeasibleError: there are more stages than layers, or no partition fits in memory.
        PlanError: the stages do not divide the devices.
    """
    cluster = costs.cluster
    rows = stage_devices(cluster, num_stages)
    problem = partition_problem(costs, rows, global_batch, micro_batches)
    found = solve(problem)
    stages = _stages(found, rows, micro_batches)
    seconds = partition_latency_s(problem, found) + all_reduce_seconds(costs, stages)
    peaks = [0] * len(cluster.devices)
    for stage, need in zip(stages, partition_memory_bytes(problem, found.cuts)):
        for device in stage.all_devices:
            peaks[device] = int(need)
    sizes, replicas = "+".join(str(b - a) for a, b in zip(found.cuts, found.cuts[1:])), len(rows)
    description = "{} stage{} ({} layers){}, {} micro-batch{}".format(
        num_stages, "s" * (num_stages > 1), sizes, f" x {replicas} model replicas" if replicas > 1 else "", micro_batches,
        "es" * (micro_batches > 1))
    return of_stages("auto", description, costs, stages, global_batch, micro_batches, seconds, peaks)


def stage_devices(cluster: Cluster, num_stages: int) -> List[Tuple[int, ...]]:
    """``[model replica][place]`` device numbers.

    Raises:
        PlanError: the number of stages does not divide the number of devices.
    """
    total = len(cluster.devices)
    if num_stages > total or total % num_stages:
        fitting = [count for count in range(1, total + 1) if total % count == 0]
        raise PlanError(
            "{} TaskGraphs with a device each do not divide the {} devices of {!r}; set num_task_graph to {} (interleaved and "
            "zero_bubble_v then divide what each device has into several TaskGraphs)".format(
                num_stages, total, cluster.name, " or ".join(str(count) for count in fitting)))
    return dealt(cluster, num_stages, by_memory=True)


def partition_problem(costs: StageCosts, rows: Sequence[Tuple[int, ...]], global_batch: int,
                      micro_batches: int) -> PartitionProblem:
    """The layers' balance problem.  Work is in seconds on the first device, and speeds are relative to it."""
    samples = global_batch / (micro_batches * len(rows))
    places = list(zip(*rows))  # [place][model replica]
    groups = [costs.group(place, samples, len(rows)) for place in places]
    reference = costs.times(places[0][0], samples).seconds.tolist()
    total = max(sum(reference), 1e-300)
    message = Transfer.slowest(costs.message([a], [b]) for row in rows for a, b in zip(row, row[1:]))
    return PartitionProblem(
        flops=tuple(reference), resident_bytes=(), activation_bytes=(), stage_bytes=groups[0].all_memory(),
        handover_s=tuple(2 * message.seconds(size * samples) for size in costs.outputs[:-1]),
        speeds=tuple(min(total / max(sum(times.seconds.tolist()), 1e-300) for times in group.times) for group in groups),
        memory_bytes=tuple(group.limit for group in groups),
        micro_batches=micro_batches)


def _stages(found: StagePartition, rows: Sequence[Tuple[int, ...]], micro_batches: int) -> Tuple[Stage, ...]:
    depths = warmup_depths("PA", len(found.devices), None, micro_batches)
    return tuple(Stage(first_layer=first, last_layer=end - 1, devices=tuple((row[place],) for row in rows), warmup=depth)
                 for first, end, place, depth in zip(found.cuts, found.cuts[1:], found.devices, depths))


def all_reduce_seconds(costs: StageCosts, stages: Sequence[Stage]) -> float:
    """Time to sum the gradients over the replicas.  Stages on different devices do it in parallel."""
    seconds: Dict[Tuple[int, ...], float] = {}
    for stage in stages:
        devices, size = stage.all_devices, costs.bytes().parameters[stage.first_layer][stage.last_layer + 1]
        seconds[devices] = seconds.get(devices, 0.0) + costs.ring(devices).seconds(size)
    return max(seconds.values())


def respecting_blocks(coarse: Candidate, fine: Candidate) -> Candidate:
    """The partition between repeated blocks, unless cuts inside them gain enough."""
    return fine if fine.latency_s * BLOCK_GAIN < coarse.latency_s else coarse

