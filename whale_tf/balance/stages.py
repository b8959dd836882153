"""The inter-TaskGraph load balance problem (Whale section 3.3.2), and the scores of an answer.

For ops 0..n-1 in topological order, S devices and M micro-batches::

    variables    cuts 0 = k_0 < k_1 < ... < k_S = n;  a permutation p of the devices
    stage i      ops k_i .. k_{i+1} - 1 on device p_i:  t_i = sum flops / speed,  c_i = seconds to transfer its output
    constraints  resident_i + kept_i * activation_i <= memory of p_i,  kept_i the micro-batches stage i keeps alive
    objective    L = sum_i (t_i + c_i) + (M - 1) * max_i max(t_i, c_i)

L is the duration of a synchronous pipeline whose slowest stage sets the pace: the first micro-batch passes all stages,
each further one follows a pace later (AMP section 3.3; a transfer is a separate stage, as in DAPPLE section IV).
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.errors import InfeasibleError, PlanError


@dataclass(frozen=True)
class PartitionProblem:
    """See the module's docstring; all sizes are for one micro-batch.

    Attributes:
        flops: per op, forward and backward together.
        resident_bytes: per op, bytes its stage always holds (parameters, gradients, optimizer slots).
        activation_bytes: per op, bytes kept from a micro-batch's forward pass to its backward pass.
        handover_s: per boundary between two ops (n - 1 of them), seconds to send the tensors that cross it, both ways.
        speeds: FLOP/s of each device, one device (or group of replicas) per stage.
        memory_bytes: memory of each device.
        micro_batches: M.
        kept: micro-batches that stage i keeps alive; empty for min(S - i, M), as 1F1B needs (Whale section 3.3.2).
        fixed_order: device i runs stage i; otherwise the solver chooses.
        stage_bytes: ``[first, end]`` resident and activation bytes of a stage, if they are no sums over its ops (tied parameters,
            recomputation); then the two sizes per op are left out.
    """

    flops: Tuple[float, ...]
    resident_bytes: Tuple[float, ...]
    activation_bytes: Tuple[float, ...]
    handover_s: Tuple[float, ...]
    speeds: Tuple[float, ...]
    memory_bytes: Tuple[float, ...]
    micro_batches: int = 1
    kept: Tuple[int, ...] = ()
    fixed_order: bool = False
    stage_bytes: Optional[Tuple[np.ndarray, np.ndarray]] = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        n, stages = len(self.flops), len(self.speeds)
        if not n or not stages:
            raise PlanError(f"a partition needs at least one op and one device, got {n} and {stages}")
        sizes = (n, n) if self.stage_bytes is not None else (len(self.resident_bytes), len(self.activation_bytes))
        lengths = (*sizes, len(self.handover_s) + 1)
        if lengths != (n, n, n):
            raise PlanError(f"a partition of {n} ops needs {n} resident and activation sizes and {n - 1} hand-overs, got "
                            f"{lengths[0]}, {lengths[1]} and {lengths[2] - 1}")
        if len(self.memory_bytes) != stages or len(self.kept) not in (0, stages):
            raise PlanError(f"{stages} devices need {stages} memory sizes (and numbers of kept micro-batches), got "
                            f"{len(self.memory_bytes)} ({len(self.kept)})")
        numbers = self.flops + self.resident_bytes + self.activation_bytes + self.handover_s + self.memory_bytes
        if min(self.speeds) <= 0 or min(numbers) < 0 or not all(map(math.isfinite, numbers)) or self.micro_batches < 1:
            raise PlanError("speeds and micro-batches must be positive, sizes and times finite and not negative")
        if stages > n:
            raise InfeasibleError(f"{stages} stages need at least {stages} ops, the model has {n}; use at most {n} stages")
        if not self.kept:
            object.__setattr__(self, "kept", tuple(min(stages - i, self.micro_batches) for i in range(stages)))

    def need_bytes(self, stage: int) -> np.ndarray:
        """``[first, end]``: memory needed by stage number ``stage`` with the ops ``first`` to ``end - 1``."""
        resident, activation = self.stage_bytes or (interval_sums(self.resident_bytes), interval_sums(self.activation_bytes))
        found: np.ndarray = resident + self.kept[stage] * activation
        return found


def interval_sums(values: Sequence[float]) -> np.ndarray:
    """``[first, end]``: sum of ``values[first:end]``."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    found: np.ndarray = prefix[None, :] - prefix[:, None]
    return found


class StagePartition(NamedTuple):
    """An answer.

    Attributes:
        algorithm: the solver's name.
        cuts: first op of each stage, and n at the end; ``cuts[i]:cuts[i + 1]`` are the ops of stage i.
        devices: device of each stage.
    """

    algorithm: str
    cuts: Tuple[int, ...]
    devices: Tuple[int, ...]


# ---- scores, computed outside the solvers ----------------------------------------------------------------------

def stage_times_s(problem: PartitionProblem, cuts: Sequence[int], devices: Sequence[int]) -> Tuple[float, ...]:
    """t_i: seconds per micro-batch of each stage."""
    return tuple(sum(problem.flops[start:end]) / problem.speeds[device]
                 for start, end, device in zip(cuts, cuts[1:], devices))


def partition_latency_s(problem: PartitionProblem, partition: StagePartition) -> float:
    """The objective L."""
    times = stage_times_s(problem, partition.cuts, partition.devices)
    handovers = [problem.handover_s[cut - 1] for cut in partition.cuts[1:-1]]
    return pipeline_seconds(times, handovers, problem.micro_batches)


def pipeline_seconds(times_s: Sequence[float], handovers_s: Sequence[float], micro_batches: int) -> float:
    """L of stages and transfers."""
    return sum(times_s) + sum(handovers_s) + (micro_batches - 1) * max([*times_s, *handovers_s])


def partition_memory_bytes(problem: PartitionProblem, cuts: Sequence[int]) -> Tuple[float, ...]:
    """Memory needed by each stage."""
    return tuple(float(problem.need_bytes(stage)[start, end]) for stage, (start, end) in enumerate(zip(cuts, cuts[1:])))


def partition_fits(problem: PartitionProblem, partition: StagePartition) -> bool:
    """Whether every stage is within its device's memory (with a relative tolerance of 1e-9, as sizes are sums of floats)."""
    needs = partition_memory_bytes(problem, partition.cuts)
    return all(need <= problem.memory_bytes[device] * (1 + 1e-9) for need, device in zip(needs, partition.devices))
