"""Places ranks on devices by Megatron's rule (AMP section 3.6): tensor-parallel ranks next to each other, so that they are in one
node, then data-parallel ranks, then pipeline stages::

    2 nodes of 4, pp = 2, dp = 2, tmp = 2          stage 0: pipelines (0 1) (2 3)   stage 1: pipelines (4 5) (6 7)
"""
from __future__ import annotations

import numpy

from whale_tf.cluster import Cluster
from whale_tf.planner.amp.cost import Degrees


def megatron(cluster: Cluster, degrees: Degrees) -> numpy.ndarray:
    """``[pp, dp, tmp]`` device numbers, devices in the cluster's order."""
    order = numpy.array([device for node in cluster.nodes for device in node])
    return order[:degrees.pp * degrees.dp * degrees.tmp].reshape(degrees.pp, degrees.dp, degrees.tmp)
