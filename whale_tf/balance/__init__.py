"""Load balance on unequal devices: within a TaskGraph (``balance``) and between TaskGraphs (``balance_stages``)."""
from __future__ import annotations

from typing import Callable, Mapping

from whale_tf.balance.exact import exact
from whale_tf.balance.memory_constrained import paper, repaired
from whale_tf.balance.partition import exact_stages
from whale_tf.balance.pipeline import even_stages, whale_stages
from whale_tf.balance.problem import Balance, BalanceProblem, fits, memory_utilisation, step_time_s, waste
from whale_tf.balance.proportional import even, proportional
from whale_tf.balance.stages import (
    PartitionProblem,
    StagePartition,
    partition_fits,
    partition_latency_s,
    partition_memory_bytes,
    stage_times_s,
)
from whale_tf.errors import PlanError, did_you_mean
from whale_tf.ir.parts import apportion

SOLVERS: Mapping[str, Callable[[BalanceProblem], Balance]] = {
    "exact": exact, "repaired": repaired, "paper": paper, "proportional": proportional, "even": even}
STAGE_SOLVERS: Mapping[str, Callable[[PartitionProblem], StagePartition]] = {
    "exact": exact_stages, "whale": whale_stages, "even": even_stages}


def balance(problem: BalanceProblem, algorithm: str = "exact") -> Balance:
    """Divides the load of one TaskGraph over its devices.

    Raises:
        InfeasibleError: ``exact`` or ``repaired`` and no load fits in memory (the others ignore memory or can end
            over it; ask :func:`fits`).
        PlanError: unknown algorithm.
    """
    return SOLVERS[_known(algorithm, SOLVERS)](problem)


def balance_stages(problem: PartitionProblem, algorithm: str = "exact") -> StagePartition:
    """Divides the ops of a model over pipeline stages and gives each stage a device.

    Raises:
        InfeasibleError: ``exact`` and no partition fits in memory (the others can end over it; ask
            :func:`partition_fits`).
        PlanError: unknown algorithm.
    """
    return STAGE_SOLVERS[_known(algorithm, STAGE_SOLVERS)](problem)


def _known(algorithm: str, solvers: Mapping[str, object]) -> str:
    if algorithm not in solvers:
        raise PlanError("unknown balance algorithm {!r}, expected one of {}.{}".format(
            algorithm, ", ".join(solvers), did_you_mean(algorithm, solvers)))
    return algorithm


__all__ = ["Balance", "BalanceProblem", "PartitionProblem", "SOLVERS", "STAGE_SOLVERS", "StagePartition", "apportion",
           "balance", "balance_stages", "fits", "memory_utilisation", "partition_fits", "partition_latency_s",
           "partition_memory_bytes", "stage_times_s", "step_time_s", "waste"]
