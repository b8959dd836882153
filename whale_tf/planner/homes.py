"""Homes of variables: the host (offload), the replicas of their TaskGraph (ZeRO; Rajbhandari et al. 2020), or its first device
(``variables: "stage"``: a function's variables are not made there).  A layout may say which model replica keeps a part.

ZeRO divides the state that data parallelism keeps once per replica: optimizer state, gradients, parameters.  Here a whole
variable has a home among the replicas, and its update runs there as the script wrote it, so that any optimizer computes the
local result.
Homes are chosen so that every device has about the same bytes: the largest variable goes first, and each one goes to the device
with the least (Graham 1969; at most 4/3 - 1/(3n) times the least possible maximum).  If that leaves a device with more than
:data:`BALANCED` times its share, the largest variables are divided into parts first, as few of them as necessary.  There is one
part for each replica, and each part is a variable with a home of its own::

    4 replicas, variables of 60, 20, 10 and 10     whole variables         60 | 20 | 10 | 10
                                                   the largest in parts    15 + 20 | 15 + 10 | 15 + 10 | 15
                                                   the two largest         15 + 10 | 15 + 10 | 15 + 5 + 5 | 15 + 5 + 5
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError
from whale_tf.ir.parts import even_sizes
from whale_tf.passes.homes import PREFETCH
from whale_tf.plan import Plan
from whale_tf.residence import Residence, residence

NONE, STAGE = "none", "stage"
BALANCED = 1.03  # times its share: so full may a device be before variables are divided


class TrainedVariable(NamedTuple):
    """A trained variable or a part of one, its bytes, and the bytes of its optimizer state.  ``shard`` is its place under
    ``split``, ``whole`` the variable that it is a part of, and ``replica`` the model replica that keeps it, if it is told to."""

    name: str
    task_graph: int
    shard: int
    parameter: int
    state: int
    whole: str = ""
    replica: Optional[int] = None

    @property
    def bytes(self) -> int:
        return self.parameter + self.state

    def residence(self, plan: Plan) -> Residence:
        return residence(plan, self.task_graph, self.name, self.shard)

    def kept(self, plan: Plan) -> Dict[int, int]:
        """The devices that keep the variable -> its bytes there, including its optimizer state."""
        found = self.residence(plan)
        return {device: self.bytes if device in found.states else self.parameter for device in found.values}


class Dimension(NamedTuple):
    """One along which a variable can be divided."""

    number: int
    size: int


def parts_of(plan: Plan, variables: Sequence[TrainedVariable], config: Config,
             divisible: Callable[[TrainedVariable], Optional[Dimension]]) -> Plan:
    """The plan, saying which variables are divided into parts; see the module's docstring.

    Args:
        divisible: a dimension along which a variable can be divided; None: it cannot.
    """
    if config.zero == NONE or config.offload != NONE or whole_because(plan):
        return plan
    asked: Set[str] = set()
    items, parts = list(variables), {}  # type: List[TrainedVariable], Dict[TrainedVariable, int]
    least, best = float("inf"), {}  # type: float, Dict[TrainedVariable, int]
    while True:
        full = _too_full(plan, items)
        if sum(full.values()) < least:
            least, best = sum(full.values()), dict(parts)
        rest = [one for one in items if not one.whole and one.name not in asked and one.residence(plan).readers in full]
        if not rest:
            break
        largest = max(rest, key=lambda one: one.bytes)
        asked.add(largest.name)
        found = divisible(largest)
        if found is not None:
            parts[largest] = found.number
            items.remove(largest)
            items += [largest._replace(name=f"{largest.name}/{i}", parameter=largest.parameter * size // found.size,
                                       state=largest.state * size // found.size, whole=largest.name)
                      for i, size in enumerate(even_sizes(found.size, len(largest.residence(plan).readers)))]
    return replace(plan, zero=config.zero, task_graphs=tuple(
        replace(task, parts={one.name: dim for one, dim in best.items() if one.task_graph == number})
        for number, task in enumerate(plan.task_graphs)))


def whole_because(plan: Plan) -> str:
    """Why no variable is divided under this plan; empty: nothing stands against it."""
    if plan.data_parallel_processes:
        return "variables are divided into parts only if all replicas are in one step"
    split = next((task.name for task in plan.task_graphs if task.strategy == "split"), None)
    return "" if split is None else f"TaskGraph {split!r} has variables in parts by wh.split"


def too_large(plan: Plan, variables: Sequence[TrainedVariable]) -> List[TrainedVariable]:
    """Variables in whole with more bytes than a device's share."""
    total: Dict[Tuple[int, ...], int] = {}
    for one in variables:
        devices = one.residence(plan).readers
        total[devices] = total.get(devices, 0) + one.bytes
    return [one for one in variables for devices in [one.residence(plan).readers]
            if not one.whole and one.bytes * len(devices) > BALANCED * total[devices]]


def _too_full(plan: Plan, variables: Sequence[TrainedVariable]) -> Dict[Tuple[int, ...], float]:
    """Devices that share variables, and of which one has more than :data:`BALANCED` times its share -> how many times."""
    load = [0] * plan.num_devices
    for one, home in _balanced(plan, variables):
        load[home] += one.bytes
    found = {}
    for devices in {one.residence(plan).readers for one in variables}:
        own = [load[device] for device in devices]
        if max(own) * len(own) > BALANCED * sum(own):
            found[devices] = max(own) * len(own) / sum(own)
    return found


def _as_told(plan: Plan, variables: Sequence[TrainedVariable]) -> List[Tuple[TrainedVariable, int]]:
    """Variables that are told where to live, and their homes.  Model replicas follow one another on the devices, also those that
    compute nothing."""
    found = []
    for one in variables:
        if one.replica is not None:
            rows = plan.task_graphs[one.task_graph].devices
            row = rows[one.replica] if one.replica < len(rows) else [device + one.replica * len(rows[0]) for device in rows[0]]
            found.append((one, row[one.shard]))
    return found


def _balanced(plan: Plan, variables: Sequence[TrainedVariable]) -> List[Tuple[TrainedVariable, int]]:
    """Variables that have several devices to live on, and their homes."""
    load, found = [0] * plan.num_devices, _as_told(plan, variables)
    for one, home in found:
        load[home] += one.bytes
    for one in sorted(variables, key=lambda one: -one.bytes):
        devices = one.residence(plan).readers
        if len(devices) > 1 and one.replica is None:
            home = min(devices, key=lambda device: load[device])
            load[home] += one.bytes
            found.append((one, home))
    return found


def with_homes(plan: Plan, variables: Sequence[TrainedVariable], config: Config) -> Plan:
    """The plan with the homes for its variables that the configuration asks for.

    Raises:
        ConfigError: there are no devices over which to divide them.
    """
    if not asks_for_homes(config):
        return _at_home(plan, _as_told(plan, variables), NONE, NONE)
    at_home = _on_first_devices(plan, variables) if config.variables == STAGE else []
    if (config.zero, config.offload) != (NONE, NONE):
        _check(plan, config)
        at_home += _balanced(plan, variables) if config.offload == NONE else [
            (one, plan.host_of(one.residence(plan).readers[0])) for one in variables]
    else:
        at_home += _as_told(plan, variables)
    return _at_home(plan, at_home, config.zero, config.offload)


def _at_home(plan: Plan, at_home: Sequence[Tuple[TrainedVariable, int]], zero: str, offload: str) -> Plan:
    homes: List[Dict[str, int]] = [{} for _ in plan.task_graphs]
    for one, home in at_home:
        homes[one.task_graph][one.name] = home
    tasks = tuple(replace(task, homes=found) for task, found in zip(plan.task_graphs, homes))
    return replace(plan, task_graphs=tasks, zero=zero, offload=offload)


def asks_for_homes(config: Config) -> bool:
    return config.variables == STAGE or (config.zero, config.offload) != (NONE, NONE)


def _on_first_devices(plan: Plan, variables: Sequence[TrainedVariable]) -> List[Tuple[TrainedVariable, int]]:
    """The variables of TaskGraphs that replicate, unless all of these begin on the first device, where the script made them."""
    firsts = {number: task.devices[0][0] for number, task in enumerate(plan.task_graphs) if task.strategy != "split"}
    return [(one, firsts[one.task_graph]) for one in variables if one.task_graph in firsts] if any(firsts.values()) else []


class Resident(NamedTuple):
    """Bytes on each device, hosts last: those of the variables at home there; of the sums of their gradients, unless a sum
    overwrites a replica's own gradient; and of the values that the device reads from other homes, for a whole step or while a
    call needs one."""

    held: List[int]
    sums: List[int]
    read: List[int]


def resident(plan: Plan, variables: Sequence[TrainedVariable], one_memory: bool) -> Resident:
    """The bytes that variables with homes take on each device.

    Args:
        one_memory: whether the devices are CPU devices of one process, which pass values without copying them.
    """
    found = Resident(*([0] * plan.hosts.stop for _ in range(3)))
    largest: Dict[int, Dict[str, int]] = {}  # device -> variable -> bytes that others have of it
    for one in variables:
        where, kept = one.residence(plan), one.kept(plan)
        home = plan.task_graphs[one.task_graph].homes.get(one.name)
        if home is None:
            continue
        for device, size in kept.items():
            found.held[device] += size
        for device in where.states:
            found.sums[device] += one.parameter * (plan.adds_at_home or plan.num_micro_batch == 1)
        sent_to = {plan.here(home, rank) for rank in range(len(plan.data_parallel_processes))}.difference(kept)
        for device in sent_to:
            found.read[device] += one.parameter
        for device in () if one_memory else set(where.readers).difference(kept, sent_to):
            of = largest.setdefault(device, {})
            of[one.whole or one.name] = of.get(one.whole or one.name, 0) + one.parameter
    for device, sizes in largest.items():
        found.read[device] += sum(sorted(sizes.values())[-PREFETCH - 1:]) if plan.reads_anew else sum(sizes.values())
    return found


def resident_of_task_graphs(plan: Plan, variables: Sequence[TrainedVariable], one_memory: bool) -> List[int]:
    """For each TaskGraph, the bytes that the fullest of its devices holds besides activations: variables, optimizer state, and
    gradients, of all TaskGraphs there."""
    size = [sum(at_home) for at_home in zip(*resident(plan, variables, one_memory))]
    for one in variables:
        added = one.parameter + one.bytes
        if one.name in plan.task_graphs[one.task_graph].homes:
            added = one.parameter if plan.num_micro_batch > 1 and not plan.adds_at_home else 0
        for device in one.residence(plan).readers:
            size[device] += added
    return [max(size[device] for row in task.devices for device in row) for task in plan.task_graphs]


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
    if not plan.spans_processes and NONE not in (config.zero, config.offload):
        raise ConfigError(f"{what}, and offload is {config.offload!r}, under which each process has all variables on its own "
                          "host and divides none: leave one of them out, or start one process that sees all devices")
