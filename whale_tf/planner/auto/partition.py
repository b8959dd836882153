"""Divides a model's layers into pipeline stages of one device each, with :mod:`whale_tf.balance` (Whale section 3.3.2).

``S`` stages on ``N`` devices make ``N / S`` model replicas, which divide the mini-batch.  Devices are assigned so that every
replica has the same mix.  A stage is as slow as its slowest copy.
"""

from __future__ import annotations

import time
from typing import Callable, Dict, List, Sequence, Tuple

from whale_tf.balance import PartitionProblem, StagePartition, exact_stages, partition_latency_s, partition_memory_bytes
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.planner.candidate import Candidate, Stage, kind_of
from whale_tf.planner.measures import Measures
from whale_tf.planner.virtual_device import dealt
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.schedule import warmup_depths

# A cut inside a repeated block must make the pipeline this much faster.
BLOCK_GAIN = 1.02


def auto_partition(
    profile: ModelProfile, cluster: Cluster, global_batch: int, num_stages: int, micro_batches: int,
    measures: Measures = Measures(),  # noqa: B008 (a frozen tuple)
    solve: Callable[[PartitionProblem], StagePartition] = exact_stages,
) -> Candidate:
    """The profile's layers on ``num_stages`` stages.

    Args:
        global_batch: samples of one step, for all model replicas together.
        micro_batches: micro-batches of one model replica.
        measures: the memory measures.
        solve: gives each stage its layers and device.

    Raises:
        InfeasibleError: there are more stages than layers, or no partition fits in memory.
        PlanError: the stages do not divide the devices.
    """
    began = time.perf_counter()
    rows = stage_devices(cluster, num_stages)
    problem = partition_problem(profile, cluster, rows, global_batch, micro_batches, measures)
    found = solve(problem)
    stages = _stages(found, rows, micro_batches)
    seconds = partition_latency_s(problem, found) + all_reduce_seconds(profile, cluster, stages)
    peaks = [0] * len(cluster.devices)
    for stage, need in zip(stages, partition_memory_bytes(problem, found.cuts)):
        for device in stage.all_devices:
            peaks[device] = int(need)
    replicas = len(rows)
    return Candidate(
        search="auto", model=profile.name, cluster=cluster.name, global_batch=global_batch, num_devices=len(cluster),
        kind=kind_of(stages), stages=stages, micro_batches=micro_batches, model_replicas=replicas, latency_s=seconds,
        formula_latency_s=seconds, peak_memory_bytes=tuple(peaks), search_seconds=time.perf_counter() - began,
        description="{} stage{} ({} layers){}, {} micro-batch{}".format(
            num_stages, "s" * (num_stages > 1), "+".join(str(b - a) for a, b in zip(found.cuts, found.cuts[1:])),
            f" x {replicas} model replicas" if replicas > 1 else "", micro_batches, "es" * (micro_batches > 1)))


def stage_devices(cluster: Cluster, num_stages: int) -> List[Tuple[int, ...]]:
    """``[model replica][place]`` device numbers.

    Raises:
        PlanError: the number of stages does not divide the number of devices.
    """
    total = len(cluster.devices)
    if num_stages > total or total % num_stages:
        fitting = [count for count in range(1, total + 1) if total % count == 0]
        raise PlanError("{} TaskGraphs with a device each do not divide the {} devices of {!r}; set num_task_graph to {}".format(
            num_stages, total, cluster.name, " or ".join(str(count) for count in fitting)))
    return dealt(cluster, num_stages, by_memory=True)


def partition_problem(
    profile: ModelProfile, cluster: Cluster, rows: Sequence[Tuple[int, ...]], global_batch: int, micro_batches: int,
    measures: Measures = Measures(),  # noqa: B008
) -> PartitionProblem:
    """The layers' balance problem.  Work is in seconds on the first device, and speeds are relative to it."""
    samples = global_batch / (micro_batches * len(rows))
    seconds = {device.type: [sum(layer_seconds(profile, layer, device, samples)[:2]) for layer in profile.layers]
               for device in cluster.devices}
    reference = seconds[cluster.devices[rows[0][0]].type]
    total = max(sum(reference), 1e-300)

    def speed(place: int) -> float:
        return min(total / max(sum(seconds[cluster.devices[row[place]].type]), 1e-300) for row in rows)

    places = range(len(rows[0]))
    links = [cluster.link(a, b) for row in rows for a, b in zip(row, row[1:])]
    slowest = min((link.bandwidth_bytes_per_s for link in links), default=1.0)
    latency_s = max((link.latency_s for link in links), default=0.0)
    return PartitionProblem(
        flops=tuple(reference),
        resident_bytes=tuple(layer.parameter_bytes * measures.parameter_bytes(profile, len(rows)) for layer in profile.layers),
        activation_bytes=tuple(_kept_bytes(profile, number, measures) * samples for number in range(len(profile.layers))),
        handover_s=tuple(2 * (latency_s + layer.output_bytes * samples / slowest) for layer in profile.layers[:-1]),
        speeds=tuple(speed(place) for place in places),
        memory_bytes=tuple(measures.limit(min(cluster.devices[row[place]].usable_bytes for row in rows)) for place in places),
        micro_batches=micro_batches)


def _kept_bytes(profile: ModelProfile, number: int, measures: Measures) -> float:
    """Bytes of one layer and sample: all tensors that its backward pass reads, or only the ones needed for recomputation."""
    layer = profile.layers[number]
    return float(layer.activation_bytes if measures.recompute == "none" else profile.layers[max(0, number - 1)].output_bytes)


def _stages(found: StagePartition, rows: Sequence[Tuple[int, ...]], micro_batches: int) -> Tuple[Stage, ...]:
    depths = warmup_depths("PA", len(found.devices), None, micro_batches)
    return tuple(Stage(first_layer=first, last_layer=end - 1, devices=tuple((row[place],) for row in rows), warmup=depth)
                 for first, end, place, depth in zip(found.cuts, found.cuts[1:], found.devices, depths))


def all_reduce_seconds(profile: ModelProfile, cluster: Cluster, stages: Sequence[Stage]) -> float:
    """Time of a ring all-reduce of the gradients over the replicas.  Stages on different devices do it in parallel."""
    seconds: Dict[Tuple[int, ...], float] = {}
    for stage in stages:
        devices, count = stage.all_devices, len(stage.all_devices)
        if count > 1:
            size = profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1)
            sent_s = 2 * (count - 1) * cluster.bottleneck(devices).seconds(size / count)
            seconds[devices] = seconds.get(devices, 0.0) + sent_s
    return max(seconds.values(), default=0.0)


def respecting_blocks(coarse: Candidate, fine: Candidate) -> Candidate:
    """The partition between repeated blocks, unless cuts inside them gain enough."""
    return fine if fine.latency_s * BLOCK_GAIN < coarse.latency_s else coarse

