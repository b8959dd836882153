"""How often to take snapshots on machines that fail, and how much of the time then goes into steps that count.

Training waits ``d`` seconds for a snapshot, which is complete ``w`` seconds later; a failure comes every ``m`` seconds on
average, after which it takes ``r`` seconds until training goes on.  With a snapshot every ``t`` seconds, a failure loses the
steps since the last complete one, ``t / 2 + w`` seconds on average.  To first order, this share of the time is lost::

    d / t + (t / 2 + w + r) / m

It is least at ``t = sqrt(2 d m)`` (J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006, whose first order it is).  There ``w`` is zero: programs wait until the
file is written.  Here a thread writes, one snapshot at a time, so ``t`` is at least ``w``.
"""
from __future__ import annotations

import math
from typing import Dict, NamedTuple

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError, memory_text, seconds_text
from whale_tf.planner.candidate import Candidate

LEAST_STALL_S = 0.01  # reading the variables, even if nothing is copied (benchmarks/README.md)


class Snapshots(NamedTuple):
    """What snapshots of a plan take, and give.

    Attributes:
        bytes: values and optimizer state of all variables.
        stall_s: seconds for which training waits for one.
        write_s: seconds from then until it is complete.
        interval_s: seconds between two.
        goodput: share of the time that goes into steps that count; 0: less than nothing would.
    """

    bytes: float
    stall_s: float
    write_s: float
    interval_s: float
    goodput: float

    @property
    def told(self) -> str:
        return (f"snapshots: {memory_text(self.bytes)} every {seconds_text(self.interval_s)} (snapshot.every_s); training waits "
                f"{seconds_text(self.stall_s)} for one, which is complete {seconds_text(self.write_s)} later; expected goodput "
                f"{100 * self.goodput:.2f}% (Young, Daly; first order)")


def snapshots(found: Candidate, cluster: Cluster, mtbf_s: float, disk_bytes_per_s: float, restart_s: float) -> Snapshots:
    """The best interval for a plan.

    Args:
        mtbf_s: mean time between two failures of the whole job.
        disk_bytes_per_s: at which snapshots are written.
        restart_s: from a failure until training goes on.

    Raises:
        PlanError: the plan is not given in layers, or a number is not above zero.
    """
    for option, value in (("--mtbf", mtbf_s), ("--disk", disk_bytes_per_s), ("--restart", restart_s)):
        if not 0 < value < math.inf:
            raise PlanError(f"{option} is {value:g}, expected a number above 0")
    profile = found.profile
    if profile is None:
        raise PlanError(f"--mtbf needs the bytes of a plan's layers, but search {found.search!r} divides single ops; use another "
                        "--search")
    per_byte = 1.0 + profile.optimizer_bytes_per_parameter_byte
    copied: Dict[int, float] = {}  # device -> bytes, of all of its stages
    for stage in found.stages:
        device, degree = stage.devices[0][0], len(stage.devices[0]) if stage.strategy == "split" else 1
        size = per_byte * profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1) / degree
        copied[device] = copied.get(device, 0.0) + size
    stall_s = LEAST_STALL_S
    for device, size in copied.items():
        if cluster.devices[device].kind != "CPU":
            beside, numbers = cluster.with_hosts([[device]], len(cluster))
            stall_s = max(stall_s, LEAST_STALL_S + size / beside.bandwidth(numbers[device], numbers[len(cluster)]))
    size = per_byte * profile.parameter_bytes
    write_s = size / disk_bytes_per_s
    interval_s = max(math.sqrt(2 * stall_s * mtbf_s), write_s)
    lost = stall_s / interval_s + (interval_s / 2 + write_s + restart_s) / mtbf_s
    return Snapshots(size, stall_s, write_s, interval_s, max(0.0, 1.0 - lost))
