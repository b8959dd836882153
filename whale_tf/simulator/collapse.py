"""Symmetric replicas are collapsed exactly: one device, group or link stands for all that must behave the same.

Devices, communication groups and links form a graph: a device is in groups, and a group loads links.  Colour refinement
finds the coarsest partition in which every member of a class has the same number of neighbours in every other class
(and the same costs).  The engine decides everything by a task's neighbourhood and breaks ties by instruction, never by
device, so by induction over time all members of a class do the same at the same moment.  Simulating one of each class, with
the right multiplicity on every link, therefore gives the exact answer for the whole cluster.
"""

from __future__ import annotations

from typing import Any, Dict, Hashable, List, NamedTuple, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.simulator.instructions import COMPUTATION, Instructions
from whale_tf.simulator.network import Network
from whale_tf.simulator.transformation import Group

Entry = Tuple[int, float, int]  # link, bytes on it per byte of the collective, how many groups load it in this way


class GroupClasses(NamedTuple):
    """The groups of one kind of communication that are simulated.

    ``kept``: their numbers; ``of_device``: the place in ``kept`` of a (kept) device's group, by class (if there are several, the
    one in which it receives);
    ``entries[place][algorithm]``: the load of the whole class on the simulated links.
    """

    kept: Tuple[int, ...]
    of_device: Dict[int, int]
    entries: Tuple[Tuple[Tuple[Entry, ...], ...], ...]


class Collapse:
    """Classes of one program on one cluster.

    Attributes:
        representative: device -> the device that is simulated in its place.
        kept: the simulated devices, in order.
    """

    def __init__(self, program: Instructions, cluster: Cluster, network: Network, collapse: bool = True) -> None:
        self._network = network
        self._patterns: Dict[Tuple[str, int], Tuple[str, Tuple[Group, ...]]] = {}
        for instruction in program.instructions:
            if instruction.groups:
                key = (instruction.label, id(instruction.groups))
                self._patterns.setdefault(key, (instruction.label, instruction.groups))
        devices = sorted({device for stage in program.stages for device in stage})
        self._device: Dict[int, int]  # colours: of devices, groups (of each pattern) and links
        self._group: List[List[int]]
        self._link: Dict[int, int]
        self._classes: Dict[int, GroupClasses]  # by pattern; all programs of one shape share them
        if collapse:
            facts = _device_facts(program, cluster, devices)
            shape = tuple(facts.items()), tuple(self._patterns.values())
            if shape not in network.colours:
                colours = _Refinement(facts, network, self._patterns)
                network.colours[shape] = colours.device, list(colours.group.values()), colours.link, {}
            self._device, self._group, self._link, self._classes = network.colours[shape]
        else:
            self._device = {device: device for device in devices}
            self._group = [list(range(len(groups))) for _, groups in self._patterns.values()]
            self._link, self._classes = {}, {}
        first: Dict[int, int] = {}
        self.representative = {device: first.setdefault(self._device[device], device) for device in devices}
        self.kept = tuple(sorted(first.values()))
        self._first_link: Dict[int, int] = {}
        for link, colour in self._link.items():
            self._first_link.setdefault(colour, link)
        self._numbers = {key: number for number, key in enumerate(self._patterns)}

    def groups(self, label: str, groups: Tuple[Group, ...]) -> GroupClasses:
        """Classes of a communication's groups."""
        number = self._numbers[label, id(groups)]
        if number not in self._classes:
            self._classes[number] = self._group_classes(label, groups, self._group[number])
        return self._classes[number]

    def _group_classes(self, label: str, groups: Tuple[Group, ...], colours: Sequence[int]) -> GroupClasses:
        place: Dict[int, int] = {}
        kept: List[int] = []
        of_device: Dict[int, int] = {}
        for number, group in enumerate(groups):
            colour = colours[number]
            if colour not in place:
                place[colour] = len(kept)
                kept.append(number)
            receivers = {receiver for _, receiver, _ in group.pairs} or set(group.devices)
            for device in group.devices:
                if self.representative[device] == device and (device in receivers or device not in of_device):
                    of_device[device] = place[colour]
        counts: List[Dict[Tuple[int, int, float], int]] = [{} for _ in kept]
        for number, group in enumerate(groups):
            table = counts[place[colours[number]]]
            for index, algorithm in enumerate(self._network.algorithms_of(label, group)):
                for link, load in algorithm.loads:
                    if not self._link or self._first_link[self._link[link]] == link:
                        entry = (index, link, load)
                        table[entry] = table.get(entry, 0) + 1
        entries = tuple(
            _by_algorithm(table, len(self._network.algorithms_of(label, groups[number]))) for table, number in zip(counts, kept))
        return GroupClasses(tuple(kept), of_device, entries)


def _by_algorithm(table: Dict[Tuple[int, int, float], int], algorithms: int) -> Tuple[Tuple[Entry, ...], ...]:
    """Entries from counts of (algorithm, link, load)."""
    rows: List[List[Entry]] = [[] for _ in range(algorithms)]
    for (index, link, load), count in sorted(table.items()):
        rows[index].append((link, load, count))
    return tuple(tuple(row) for row in rows)


class _Refinement:
    """Colour refinement; afterwards ``device``, ``group`` and ``link`` map to colours."""

    def __init__(self, facts: Dict[int, Hashable], network: Network,
                 patterns: Dict[Tuple[str, int], Tuple[str, Tuple[Group, ...]]]) -> None:
        self._patterns = patterns
        self._groups_of: Dict[int, List[Tuple[Tuple[str, int], int]]] = {device: [] for device in facts}
        self._loads: Dict[Tuple[str, int], List[List[Tuple[int, int, float]]]] = {}
        self._pairs: Dict[Tuple[str, int], List[List[Tuple[int, int, float]]]] = {}
        users: Dict[int, List[Tuple[Tuple[str, int], int, int, float]]] = {}
        for key, (label, groups) in patterns.items():
            rows = []
            for number, group in enumerate(groups):
                for device in group.devices:
                    self._groups_of[device].append((key, number))
                row = [(index, link, _rounded(load)) for index, algorithm in enumerate(network.algorithms_of(label, group))
                       for link, load in algorithm.loads]
                for index, link, load in row:
                    users.setdefault(link, []).append((key, number, index, load))
                rows.append(row)
            self._loads[key] = rows
            self._pairs[key] = [[(a, b, _rounded(fraction)) for a, b, fraction in group.pairs] for group in groups]
        self._order = {key: number for number, key in enumerate(patterns)}
        self._users = users
        self.device = _numbered(facts)
        self.link = _numbered({link: network.bandwidths[link] for link in users})
        self.group: Dict[Tuple[str, int], List[int]] = {}
        classes = 0
        while True:
            self._refine()
            now = sum(len(set(colours)) for colours in (self.device.values(), self.link.values(), *self.group.values()))
            if now == classes:
                return
            classes = now

    def _refine(self) -> None:
        device, link = self.device, self.link
        numbers: Dict[Hashable, int] = {}
        for key, (_, groups) in self._patterns.items():
            colours = []
            for members, pairs, row in zip(groups, self._pairs[key], self._loads[key]):
                inside: Any = tuple(sorted([(device[a], device[b], fraction) for a, b, fraction in pairs])) or \
                    tuple(sorted([device[a] for a in members.devices]))
                loads = tuple(sorted([(index, link[name], load) for index, name, load in row]))
                colours.append(numbers.setdefault((self._order[key], inside, loads), len(numbers)))
            self.group[key] = colours
        group = self.group
        self.link = _numbered({
            name: (link[name], tuple(sorted([(group[key][number], index, load) for key, number, index, load in users])))
            for name, users in self._users.items()})
        self.device = _numbered({
            one: (colour, tuple(sorted([group[key][number] for key, number in self._groups_of[one]])))
            for one, colour in device.items()})


def _device_facts(program: Instructions, cluster: Cluster, devices: Sequence[int]) -> Dict[int, Hashable]:
    """Everything about a device's own work: its type, and its class in every config in which it takes part."""
    facts: Dict[int, List[Hashable]] = {device: [] for device in devices}
    every = [instruction.parts for instruction in program.instructions if instruction.lane == COMPUTATION]
    every += [buffer.parts for buffer in program.buffers]
    for number, parts in enumerate({id(parts): parts for parts in every}.values()):
        for device, kind in zip(parts.devices, parts.kind):
            facts[device].append((number, kind))
    return {device: (cluster.devices[device].type, cluster.devices[device].memory_bytes, tuple(facts[device]))
            for device in devices}


def _numbered(values: Dict[int, Any]) -> Dict[int, int]:
    """Equal values get equal small numbers."""
    numbers: Dict[Hashable, int] = {}
    return {key: numbers.setdefault(value, len(numbers)) for key, value in values.items()}


def _rounded(value: float) -> float:
    """The same value for sums that differ only in the order of their terms."""
    return float(f"{value:.12g}")
