"""Assigns devices to model replicas, hardware-aware (Whale sections 3.2.1 and 3.3.2).

Equal devices are taken in order.  With unequal devices every model replica gets the same mix of types if the counts allow it, and
within a replica the devices with more memory come first, because stage i of N keeps N - i micro-batches::

    4 V100 and 4 P100, 4 devices a replica      replica 0: V100 V100 P100 P100    replica 1: V100 V100 P100 P100
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf.cluster import Cluster


def dealt(cluster: Cluster, per_replica: int, by_memory: bool) -> List[Tuple[int, ...]]:
    """``[model replica][place]`` device numbers; ``per_replica`` divides the number of devices.

    Args:
        by_memory: order a replica's unequal devices by memory, from high to low (otherwise by number).
    """
    total = len(cluster.devices)
    count = total // per_replica
    in_order = [tuple(range(g * per_replica, (g + 1) * per_replica)) for g in range(count)]
    if cluster.is_homogeneous:
        return in_order
    kinds: Dict[str, List[int]] = {}
    for device in cluster.devices:
        kinds.setdefault(device.type, []).append(device.index)
    rows: List[List[int]] = [list(row) for row in in_order]
    if all(len(members) % count == 0 for members in kinds.values()):
        shares = [(members, len(members) // count) for members in kinds.values()]
        rows = [[index for members, size in shares for index in members[g * size:(g + 1) * size]] for g in range(count)]
    return [tuple(sorted(row, key=lambda index: _rank(cluster, index) if by_memory else (0.0, 0.0, index))) for row in rows]


def _rank(cluster: Cluster, index: int) -> Tuple[float, float, int]:
    device = cluster.devices[index]
    return (-float(device.memory_bytes), -device.peak_flops_per_s["fp32"], index)
