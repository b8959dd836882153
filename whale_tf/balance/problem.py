"""The intra-TaskGraph load balance problem, and the scores of an answer.

One TaskGraph runs on n devices at once; its work is divisible into ``units`` (samples of the global batch under
``replicate``, rows of the sharded dimension under ``split``)::

    variables    u_i  whole units of device i,  L_i = u_i / units   (Whale's load ratio)
    constraints  sum u_i = units;  u_i >= minimum;  fixed_bytes + L_i * load_bytes <= memory_bytes_i (where u_i > 0)
    objective    step time  max_i L_i * flops / speed_i

Whale's own objective (section 3.3.1, Formula 1), sum_i |L_i - speed_i / sum(speed)|, adds up the devices' idle shares, whereas a
step takes as long as its slowest device.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Sequence, Tuple

from whale_tf.errors import InfeasibleError, PlanError


@dataclass(frozen=True)
class BalanceProblem:
    """See the module's docstring.

    Attributes:
        speeds: FLOP/s of each device (any common unit).
        memory_bytes: memory of each device.
        load_bytes: memory that is divided with the load (Whale's TG_mem): activations of the whole batch, or the sharded
            tensors.
        units: whole units of the load.
        fixed_bytes: memory that a device with any load needs, whatever its size (a replica's parameters).
        flops: work of the whole load; only scales the step time.
        minimum: smallest number of units of each device.
    """

    speeds: Tuple[float, ...]
    memory_bytes: Tuple[float, ...]
    load_bytes: float
    units: int
    fixed_bytes: float = 0.0
    flops: float = 1.0
    minimum: int = 1

    def __post_init__(self) -> None:
        if not self.speeds or len(self.speeds) != len(self.memory_bytes):
            raise PlanError(f"a balance needs one speed and one memory size for each device, got {len(self.speeds)} "
                            f"and {len(self.memory_bytes)}")
        finite = tuple(self.speeds) + tuple(self.memory_bytes) + (self.load_bytes, self.fixed_bytes, self.flops)
        if min(self.speeds) <= 0 or min(finite) < 0 or not all(math.isfinite(value) for value in finite):
            raise PlanError(f"speeds must be positive, memory, load and FLOPs not negative: {self}")
        if self.minimum < 0 or self.units < max(1, self.minimum * len(self.speeds)):
            raise PlanError(f"{self.units} units cannot give each of {len(self.speeds)} devices at least "
                            f"{self.minimum}; use fewer devices or a larger batch"
                            )

    def need_bytes(self, units: float) -> float:
        """Memory needed by a device with this many units; zero without any."""
        return 0.0 if units == 0 else self.fixed_bytes + units * self.load_bytes / self.units

    @property
    def capacities(self) -> Tuple[int, ...]:
        """The most units that fit in each device's memory, 0 to ``units``: the largest u with ``need_bytes(u) <= memory``."""
        return tuple(self._capacity(memory) for memory in self.memory_bytes)

    def _capacity(self, memory: float) -> int:
        if self.need_bytes(self.units) <= memory:
            return self.units
        if self.fixed_bytes > memory:
            return 0
        capacity = math.floor(min(self.units, (memory - self.fixed_bytes) * self.units / self.load_bytes))
        while capacity > 0 and self.need_bytes(capacity) > memory:  # corrects rounding in the line above: at most a step or two
            capacity -= 1
        while capacity < self.units and self.need_bytes(capacity + 1) <= memory:
            capacity += 1
        return capacity

    def check_feasible(self) -> Tuple[int, ...]:
        """The capacities, if some load fits.  Otherwise raises an InfeasibleError that says what would fit."""
        capacities = self.capacities
        short = [device for device, capacity in enumerate(capacities) if capacity < self.minimum]
        if short:
            raise InfeasibleError(
                f"device {short[0]} has {self.memory_bytes[short[0]]:.4g} bytes, its smallest share needs "
                f"{self.need_bytes(self.minimum):.4g}; use fewer devices, or divide the model")
        if sum(capacities) < self.units:
            missing = (self.units - sum(capacities)) * self.load_bytes / self.units
            raise InfeasibleError(
                f"{self.units} units do not fit: the devices have memory for {sum(capacities)}; {missing:.4g} bytes are missing. "
                f"Use a batch of at most {sum(capacities)}, more micro-batches, or more devices")
        return capacities


class Balance(NamedTuple):
    """An answer.

    Attributes:
        algorithm: the solver's name.
        units: whole units of each device; they sum to the problem's.
    """

    algorithm: str
    units: Tuple[int, ...]


# ---- scores, computed outside the solvers ----------------------------------------------------------------------

def step_time_s(problem: BalanceProblem, units: Sequence[float]) -> float:
    """max_i L_i * flops / speed_i."""
    return max(unit / speed for unit, speed in zip(units, problem.speeds)) * problem.flops / problem.units


def fits(problem: BalanceProblem, units: Sequence[int]) -> bool:
    """Whether every device is within its memory."""
    return all(problem.need_bytes(unit) <= memory for unit, memory in zip(units, problem.memory_bytes))
