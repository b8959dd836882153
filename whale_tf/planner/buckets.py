"""Decides which gradients travel together between processes.

A ring all-reduce of ``n`` bytes among ``W`` processes takes ``2 (W-1) a + 2 (W-1)/W n/b`` with latency ``a`` and bandwidth ``b``
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).  Sending a gradient along with others saves the first
term and costs two copies, into the bucket and out of it: ``4 n / m`` with memory bandwidth ``m``.  So gradients below
``(W-1) a m / 2`` bytes are gathered, until the latency is a tenth of the transfer: ``10 W a b`` bytes.  ``a`` is the link's
latency; between CPU devices it is at least :data:`REMOTE_CALL_S`.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster

# The cost of one step of TensorFlow's ring between CPU devices besides the wire: its remote calls and their threads.  Measured
# on two cores of an AMD EPYC (TensorFlow 2.21, one process on each): 15 sums of 50 to 80 KB took 5.5 ms per step more than one
# sum of everything, so each of the other 14 took 0.4 ms, in 2 (W-1) = 2 steps of the ring.  `whale calibrate` measures the same
# on any machine (communicators.processes.alpha_s).  Given as the adapters' latency_s in a cluster description, it counts if it
# is larger.
REMOTE_CALL_S = 2e-4


class Gradient(NamedTuple):
    """A gradient to be summed.

    Attributes:
        variable: name of the variable.
        bytes: its size; 0 if it cannot travel with others (sparse, or of unknown size).
        kind: data type and gradient call; only gradients of the same kind travel together.
    """

    variable: str
    bytes: int = 0
    kind: Tuple[str, int] = ("", 0)


class Limits(NamedTuple):
    """Gradients smaller than ``gradient_bytes`` travel together, up to about ``bucket_bytes``."""

    gradient_bytes: float
    bucket_bytes: float


def limits(cluster: Cluster, processes: Sequence[Sequence[int]], bucket_bytes: Optional[int] = None) -> Limits:
    """The limits from the cost model, or as given."""
    if bucket_bytes is not None:
        return Limits(bucket_bytes, bucket_bytes)
    count = len(processes)
    link = cluster.bottleneck(part[0] for part in processes)
    devices = [cluster.devices[part[0]] for part in processes]
    latency_s = max([link.latency_s] + [REMOTE_CALL_S for device in devices if device.kind == "CPU"])
    memory = min(device.memory_bandwidth_bytes_per_s for device in devices)
    return Limits((count - 1) * latency_s * memory / 2, 10 * count * latency_s * link.bandwidth_bytes_per_s)


def buckets(gradients: Sequence[Gradient], limit: Limits) -> Tuple[Tuple[str, ...], ...]:
    """Names of variables in the order in which their gradients become ready.  A bucket leaves when its last one is ready."""
    full: List[List[Gradient]] = []
    open_bucket: List[Gradient] = []
    for gradient in gradients:
        alone = not 0 < gradient.bytes < limit.gradient_bytes
        fits = not alone and bool(open_bucket) and open_bucket[0].kind == gradient.kind
        if fits and sum(each.bytes for each in open_bucket) < limit.bucket_bytes:
            open_bucket.append(gradient)
            continue
        full.append([gradient])
        if not alone:
            open_bucket = full[-1]
    return tuple(tuple(each.variable for each in bucket) for bucket in full)
