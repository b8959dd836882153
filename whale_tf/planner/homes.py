"""Homes of variables: the host (offload), or the replicas of their TaskGraph (ZeRO; Rajbhandari et al. 2020).

ZeRO divides the state that data parallelism keeps once per replica: optimizer state, gradients, parameters.  Here a whole
variable has a home among the replicas, and its update runs there as the script wrote it, so that any optimizer computes the
local result.
Homes are chosen so that every device has about the same bytes: the largest variable goes first, and each one goes to the device
with the least (Graham 1969; at most 4/3 - 1/(3n) times the least possible maximum).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, NamedTuple, Sequence

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError
from whale_tf.passes.homes import AHEAD
from whale_tf.plan import Plan

NONE = "none"


class Held(NamedTuple):
    """A trained variable, its bytes, and the bytes of its optimizer state.  ``shard`` is its place under ``split``."""

    name: str
    task_graph: int
    shard: int
    parameter: int
    state: int

    @property
    def bytes(self) -> int:
        return self.parameter + self.state

    def readers(self, plan: Plan) -> List[int]:
        """The devices of all replicas of the variable's TaskGraph."""
        task = plan.task_graphs[self.task_graph]
        return [d for row in task.devices for d in (row if task.strategy != "split" else row[self.shard:self.shard + 1])]

    def kept(self, plan: Plan) -> Dict[int, int]:
        """The devices that keep the variable -> its bytes there, including its optimizer state."""
        task, readers = plan.task_graphs[self.task_graph], self.readers(plan)
        home = task.homes.get(self.name)
        if home is not None:
            found = {plan.here(home, rank): self.parameter for rank in range(len(plan.processes))}
            return {**found, home: self.bytes}
        return dict.fromkeys(readers if task.variables == "mirrored" else readers[:1], self.bytes)


def with_homes(plan: Plan, variables: Sequence[Held], config: Config) -> Plan:
    """The plan with the homes for its variables that the configuration asks for.

    Raises:
        ConfigError: there are no devices over which to divide them.
    """
    if config.zero == NONE and config.offload == NONE:
        return plan
    _check(plan, config)
    load = [0] * plan.num_devices
    homes: List[Dict[str, int]] = [{} for _ in plan.task_graphs]
    for one in sorted(variables, key=lambda one: -one.bytes):
        if config.offload != NONE:
            homes[one.task_graph][one.name] = plan.host
            continue
        devices = one.readers(plan)
        if len(devices) > 1:
            home = min(devices, key=lambda device: load[device])
            homes[one.task_graph][one.name] = home
            load[home] += one.bytes
    tasks = tuple(replace(task, homes=found) for task, found in zip(plan.task_graphs, homes))
    return replace(plan, task_graphs=tasks, zero=config.zero, offload=config.offload)


class Resident(NamedTuple):
    """Bytes on each device, the host last: those of the variables at home there; of the sums of their gradients, unless a sum
    overwrites a replica's own gradient; and of the values that the device reads from other homes, for a whole step or while a
    call needs one."""

    held: List[int]
    sums: List[int]
    read: List[int]


def resident(plan: Plan, variables: Sequence[Held], one_memory: bool) -> Resident:
    """The bytes that variables with homes take on each device.

    Args:
        one_memory: whether the devices are CPU devices of one process, which pass values without copying them.
    """
    found = Resident(*([0] * (plan.num_devices + 1) for _ in range(3)))
    largest: Dict[int, List[int]] = {}
    for one in variables:
        home = plan.task_graphs[one.task_graph].homes.get(one.name)
        if home is None:
            continue
        for device, size in one.kept(plan).items():
            found.held[device] += size
        found.sums[home] += one.parameter * (plan.adds_at_home or plan.num_micro_batch == 1)
        for device in () if one_memory else set(one.readers(plan)).difference(one.kept(plan)):
            largest.setdefault(device, []).append(one.parameter)
    for device, sizes in largest.items():
        found.read[device] = sum(sorted(sizes)[-AHEAD - 1:]) if plan.reads_anew else sum(sizes)
    return found


def resident_of_task_graphs(plan: Plan, variables: Sequence[Held], one_memory: bool) -> List[int]:
    """The bytes that a device of each TaskGraph holds besides activations: variables, optimizer state, gradients."""
    at_home = resident(plan, variables, one_memory)
    found = []
    for number, task in enumerate(plan.task_graphs):
        own = [one for one in variables if one.task_graph == number]
        goes_home = [one for one in own if one.name in task.homes]
        size = sum(one.parameter + one.bytes for one in own if one.name not in task.homes)
        if plan.num_micro_batch > 1 and not plan.adds_at_home:
            size += sum(one.parameter for one in goes_home)
        most = max(at_home.held[d] + at_home.sums[d] + at_home.read[d] for row in task.devices for d in row)
        found.append(size + (most if goes_home else 0))
    return found


def has_one_memory(cluster: Cluster) -> bool:
    return all(device.kind == "CPU" for device in cluster.devices)


def _check(plan: Plan, config: Config) -> None:
    key, value = ("zero", config.zero) if config.zero != NONE else ("offload", config.offload)
    if len(plan.processes) > 1:
        _check_processes(plan, config, f"{key} is {value!r}, and there are {len(plan.processes)} processes")
    most = max(plan.num_model_replicas * task.replica_count for task in plan.task_graphs)
    if config.zero != NONE and most == 1:
        raise ConfigError(
            f"zero is {config.zero!r}, which divides variables over the replicas of a TaskGraph, but no TaskGraph of this plan "
            "has two; use wh.replicate(n) with n > 1, a cluster with room for several model replicas, or zero 'none'")


def _check_processes(plan: Plan, config: Config, what: str) -> None:
    if plan.spans_processes:
        raise ConfigError(f"{what}, over which model replicas span; let each process have the devices of a model replica, start "
                          "one process that sees all devices, or leave zero and offload out")
    if NONE not in (config.zero, config.offload):
        raise ConfigError(f"{what}, and offload is {config.offload!r}, under which each process has all variables on its own "
                          "host and divides none: leave one of them out, or start one process that sees all devices")
    if config.zero == "v3":
        raise ConfigError(f"{what}; parameters are divided within one process only: use 'v2', which divides states and sums of "
                          "gradients, or start one process that sees all devices")
