"""The shares of a divided dimension that the devices of a ``split`` TaskGraph take: uneven shards (Whale section 3.3.1).

Parts of different dimensions must fit each other.  If attention's heads are divided, the width of the layers around it is divided
in whole heads; otherwise tensors would be regrouped between them.  So shares are counted in units of whole heads::

    speeds 2:1, 12 heads of 64      units of 1/12: 8 and 4, so 8 and 4 heads, and 512 and 256 of the width
    speeds 2:1, 4 heads of 64       units of 1/4: 3 and 1
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Iterable, Mapping, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.ir.graph import Op
from whale_tf.ir.rules import View
from whale_tf.ir.traits import CONTRACTIONS
from whale_tf.patterns.strategy import STACK, strategies
from whale_tf.planner.slices import UNITS_PER_DEVICE, follows_devices, replica_slices


def device_shares(name: str, rows: Sequence[Sequence[int]], cluster: Cluster, algorithm: str, ops: Iterable[Op], view: View,
                  batch: Mapping[int, int], resident_bytes: float, precision: str) -> Tuple[int, ...]:
    """Shares that follow the devices' speed and memory.  They are equal on equal devices, and if the configuration says so.

    Args:
        name: name of the TaskGraph, for messages.
        rows: ``[model replica][place]`` device numbers; a place is as slow and as small as the least of its devices.
        algorithm: a key of :data:`whale_tf.balance.SOLVERS`.
        ops: the TaskGraph's forward ops.
        batch: tensor -> the dimension that counts examples.
        resident_bytes: variables, gradients and optimizer state of the whole TaskGraph, which are divided.
        precision: of the arithmetic, a key of ``Device.peak_flops_per_s``.

    Raises:
        InfeasibleError: no division fits in memory.
    """
    even = (1,) * len(rows[0])
    if not follows_devices(rows, cluster, algorithm):
        return even
    units = fitting_units(ops, view, len(even), batch)
    return replica_slices(name, rows, cluster, units, resident_bytes, 0.0, algorithm, precision) or even


def fitting_units(ops: Iterable[Op], view: View, count: int, batch: Mapping[int, int]) -> int:
    """Units that divide evenly the stacks of matrix products (heads, experts) in ``ops``; at most eight per device.

    Args:
        count: number of devices.
        batch: tensor -> the dimension that counts examples.
    """
    stacks = [sum(strategy.gives[0].sizes) for op in ops if op.type in CONTRACTIONS
              for strategy in strategies(op, view, (1,) * count, batch).found if strategy.pattern == STACK]
    common = reduce(math.gcd, stacks, 0)
    most = UNITS_PER_DEVICE * count
    return max((units for units in range(count, most + 1) if common and common % units == 0), default=most)
