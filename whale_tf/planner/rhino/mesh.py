"""Device meshes: the devices as a grid, each dimension of which divides what the dimensions before it left (Rhino section 4)."""

from __future__ import annotations

from typing import List, Tuple

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Link
from whale_tf.planner.rhino.collectives import Ring

Mesh = Tuple[int, ...]


def meshes(devices: int, dimensions: int = 2) -> List[Mesh]:
    """Every grid of that many devices with at most ``dimensions`` dimensions: 4 devices are (4,) and (2, 2).

    The order counts: devices that are next to each other are neighbours in the last dimension.
    """
    found: List[Mesh] = [(devices,)]
    if dimensions > 1:
        for first in range(2, devices // 2 + 1):
            if devices % first == 0:
                found += [(first,) + rest for rest in meshes(devices // first, dimensions - 1)]
    return found


def rings(cluster: Cluster, mesh: Mesh) -> List[Ring]:
    """The ring of each mesh dimension: of its groups of devices the slowest, when all of them are at work at once.

    Groups that leave the same node share its adapters.
    """
    found = []
    total = len(cluster)
    inner = total
    for size in mesh:
        inner //= size
        groups = [[start + block + step * inner for step in range(size)]
                  for block in range(0, total, inner * size) for start in range(inner)]
        found.append(Ring(size, max((_link(cluster, group, groups) for group in groups), key=lambda link: link.seconds(1 << 20))))
    return found


def _link(cluster: Cluster, group: List[int], groups: List[List[int]]) -> Link:
    alone = cluster.bottleneck(group)
    nodes = {cluster.devices[device].node for device in group}
    if len(nodes) == 1:
        return alone
    crossing = [other for other in groups if len({cluster.devices[device].node for device in other}) > 1]
    sharing = max(sum(any(cluster.devices[device].node == node for device in other) for other in crossing) for node in nodes)
    together = cluster.bottleneck([device for node in nodes for device in cluster.nodes[node]])
    bandwidth = min(alone.bandwidth_bytes_per_s, together.bandwidth_bytes_per_s / sharing)
    return alone._replace(bandwidth_bytes_per_s=bandwidth)
