"""The parts of every micro-batch that the replicas of a TaskGraph take (Whale section 3.3.1)."""

from __future__ import annotations

import math
from functools import reduce
from typing import Optional, Sequence, Tuple

from whale_tf.balance import BalanceProblem, balance
from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError

UNITS_PER_DEVICE = 8  # accuracy of the slices' proportions if the batch size is not known


def follows_devices(rows: Sequence[Sequence[int]], cluster: Cluster, algorithm: str) -> bool:
    """Whether parts follow the devices: there are several types, and the configuration does not ask for equal parts."""
    return algorithm != "even" and len({cluster.devices[index].type for row in rows for index in row}) > 1


def replica_slices(name: str, rows: Sequence[Sequence[int]], cluster: Cluster, samples: Optional[int], load_bytes: float,
                   fixed_bytes: float, algorithm: str, precision: str) -> Optional[Tuple[int, ...]]:
    """Slice sizes that follow the devices' speed and memory; None means equal sizes.

    Args:
        name: name of the TaskGraph, for messages.
        rows: ``[model replica][replica]`` device numbers; a place is as slow and as small as the least of its devices.
        samples: examples of one micro-batch; None if not known.
        load_bytes: activations of all micro-batches that are alive at one time, to be divided.
        fixed_bytes: parameters, gradients and optimizer state of one replica.
        algorithm: a key of :data:`whale_tf.balance.SOLVERS`.
        precision: of the arithmetic, a key of ``Device.peak_flops_per_s``.

    Raises:
        InfeasibleError: no division fits in memory.
        PlanError: fewer examples than replicas.
    """
    places = range(len(rows[0]))
    if len(places) == 1:
        return None
    speeds = tuple(min(cluster.devices[row[i]].peak_flops_per_s[precision] for row in rows) for i in places)
    memory = tuple(min(cluster.devices[row[i]].usable_bytes for row in rows) for i in places)
    units = samples if samples is not None else UNITS_PER_DEVICE * len(places)
    try:
        found = balance(BalanceProblem(speeds, memory, load_bytes, units, fixed_bytes), algorithm).units
    except InfeasibleError as error:
        raise InfeasibleError(f"TaskGraph {name!r} on devices {list(rows[0])}: {error}") from None
    except PlanError as error:
        raise PlanError(f"TaskGraph {name!r}, micro-batch of {units} examples: {error}") from None
    if len(set(found)) == 1:
        return None
    divisor = reduce(math.gcd, found)
    return tuple(size // divisor for size in found)
