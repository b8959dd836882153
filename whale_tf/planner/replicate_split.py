"""Whale's hybrid of two TaskGraphs on the same devices: the first layers replicated, the last ones split (Whale section 4,
Example 2; Figures 13 and 14)::

    devices 0 to 7      features: replicate, each its own examples | classifier: split, each its own classes

It pays for layers with many weights and few examples: their gradients are not summed, but the examples of all devices are
gathered.  One micro-batch takes

    work of the first layers + ring of their gradients + work of a part of the last layers + what they exchange.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.planner.candidate import Candidate, Stage, of_stages
from whale_tf.planner.micro_batches import micro_batch_counts
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.layer_time import layer_seconds

HANDED_OVER = 6  # plans to play


def plans(costs: StageCosts, global_batch: int, method: str, micro_batches: Optional[int] = None) -> List[Candidate]:
    """The plans to play, from fast to slow.

    Raises:
        InfeasibleError: the last layer cannot be divided, or the batch is too small for the devices.
    """
    devices, layers = tuple(range(len(costs.cluster))), costs.profile.layers
    counts = [micro_batches] if micro_batches is not None else micro_batch_counts(global_batch, 1, 1, len(devices))
    counts = [count for count in counts if global_batch % (count * len(devices)) == 0]
    if not counts:
        raise InfeasibleError(f"{method}: a batch of {global_batch} cannot be divided over {len(devices)} devices; use a "
                              f"multiple of {len(devices)}")
    found: List[Tuple[float, int, int]] = []
    for count in counts:
        size, behind_s = global_batch / count, 0.0
        own = costs.group(devices, size / len(devices))
        for cut in range(len(layers) - 1, 0, -1):
            parts = _part_seconds(costs, cut, size)
            if parts is None:
                break
            behind_s += parts
            gathered_s = costs.ring(devices).seconds(layers[cut - 1].output_bytes * size)  # forward, and as much backward
            seconds = count * (own.work(0, cut).both_s + behind_s + gathered_s) + own.ring_seconds(0, cut)
            found.append((seconds, cut, count))
    if not found:
        raise InfeasibleError(f"{method}: {costs.profile.name!r} ends with layer {layers[-1].name!r}, which {len(devices)} "
                              "devices cannot divide, or not as far as its times are known")
    return [_candidate(costs, global_batch, method, *one) for one in sorted(found)[:HANDED_OVER]]


def _part_seconds(costs: StageCosts, layer: int, samples: float) -> Optional[float]:
    """Of a layer's part on the slowest device, forward and backward; None: it cannot be divided, or its time is not known."""
    cluster, profile = costs.cluster, costs.profile
    if profile.layers[layer].tensor_parallel_bytes is None or len(cluster) == 1:
        return None
    types = {device.type: device for device in cluster.devices}
    try:
        times = [layer_seconds(profile, profile.layers[layer], device, samples, len(cluster)) for device in types.values()]
    except PlanError:
        return None
    return max(time.forward_s + time.backward_s for time in times)


def _candidate(costs: StageCosts, global_batch: int, method: str, seconds: float, cut: int, count: int) -> Candidate:
    devices, names = (tuple(range(len(costs.cluster))),), [layer.name for layer in costs.profile.layers]
    stages = (Stage(first_layer=0, last_layer=cut - 1, devices=devices),
              Stage(first_layer=cut, last_layer=len(names) - 1, devices=devices, strategy="split"))
    text = (f"{names[0]} to {names[cut - 1]} replicated on {len(costs.cluster)}, {names[cut]}"
            f"{f' to {names[-1]}' if cut < len(names) - 1 else ''} split, {count} micro-batch{'es' if count > 1 else ''}")
    return of_stages(method, text, costs, stages, global_batch, count, seconds)
