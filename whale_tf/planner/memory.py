"""Peak memory of every device under a plan, from the liveness of the graph's tensors."""

from __future__ import annotations

from typing import List, Sequence, Set

from whale_tf.ir.region import Region
from whale_tf.plan import Plan
from whale_tf.profiler.liveness import micro_batch_memory


def device_peaks(plan: Plan, region: Region, gradients: Set[int], variable_bytes: Sequence[int]) -> List[int]:
    """Bytes of each device: variables with their slots, and the most that a step holds beside them.

    Args:
        region: its graph has the static shapes of a whole mini-batch of all model replicas, its TaskGraphs are the plan's.
        gradients: tensors that hold gradients of variables.
        variable_bytes: variables of each TaskGraph, and what the optimizer keeps for them.
    """
    peaks = [0.0] * plan.num_devices
    for index, task in enumerate(plan.task_graphs):
        replicas = plan.num_model_replicas * task.device_count
        memory = micro_batch_memory(region, gradients, index, plan.num_micro_batch, replicas)
        sizes = task.slices or (1,) * task.device_count
        for row in task.devices:
            for device, size in zip(row, sizes):
                share = size * task.device_count / sum(sizes)  # of an equal part
                peaks[device] += memory.peak(task.warmup, plan.num_micro_batch, share)
        for device in task.variable_devices:
            peaks[device] += variable_bytes[index]
    return [int(peak) for peak in peaks]
