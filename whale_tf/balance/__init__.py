"""Load balance on unequal devices: within a TaskGraph (``balance``) and between TaskGraphs (``exact_stages``)."""
from __future__ import annotations

from typing import Callable, Mapping

from whale_tf.balance.exact import exact
from whale_tf.balance.partition import exact_stages
from whale_tf.balance.problem import Balance, BalanceProblem, fits, step_time_s
from whale_tf.balance.proportional import even, proportional
from whale_tf.balance.stages import (
    PartitionProblem,
    StagePartition,
    partition_fits,
    partition_latency_s,
    partition_memory_bytes,
    pipeline_seconds,
    stage_times_s,
)
from whale_tf.errors import PlanError, did_you_mean
from whale_tf.ir.parts import apportion

SOLVERS: Mapping[str, Callable[[BalanceProblem], Balance]] = {
    "exact": exact, "proportional": proportional, "even": even}


def balance(problem: BalanceProblem, algorithm: str = "exact") -> Balance:
    """Divides the load of one TaskGraph over its devices.

    Raises:
        InfeasibleError: ``exact``, and no load fits in memory (the others ignore memory; check with :func:`fits`).
        PlanError: unknown algorithm.
    """
    if algorithm not in SOLVERS:
        raise PlanError("unknown balance algorithm {!r}, expected one of {}.{}".format(
            algorithm, ", ".join(SOLVERS), did_you_mean(algorithm, SOLVERS)))
    return SOLVERS[algorithm](problem)


__all__ = ["Balance", "BalanceProblem", "PartitionProblem", "SOLVERS", "StagePartition", "apportion", "balance",
           "exact_stages", "fits", "partition_fits", "partition_latency_s",
           "partition_memory_bytes", "pipeline_seconds", "stage_times_s", "step_time_s"]
