"""The exact planner: the partition, replication and placement of least pipeline latency.

Problem.  Given N layers, a cluster and M micro-batches, choose stages (contiguous layers, each on a set of devices; all
devices used, all layers covered) to minimise ``L = max_Q L(Q)`` (:mod:`whale_tf.planner.dapple.cost`), every stage
holding at least one micro-batch.

Method.  Dynamic programming over suffixes: state (first layer j, used counts per server, device set of the stage at j).
Four numbers of a suffix decide what any prefix makes of it::

    X = max over pivots Q and stages s of the suffix of its terms of L
    Y = max_s (AR_s - sum of B before s)            end of the last all-reduce, for pivots before the suffix
    Z = max_Q (sum_{a<=Q} (F_a + B_a) + (M - 1) C_Q)  pivots of the suffix, for stages before it
    R = sum (F + B)                                  round trip, for stages short of memory

Putting an element (F, B, AR, C) in front gives::

    X' = max(F + X,  F + (M - 1) C + max(AR + B, Y),  F + B + AR + Z)
    Y' = max(AR, Y - B)      Z' = F + B + max((M - 1) C, Z)      R' = F + B + R

and for a stage that holds only D < M micro-batches, with T = (k + 1) R' + r B (``L_memory``)::

    X' = max(X', T + max(AR, Y - B))      Z' = max(Z', T)

All four grow with X, Y, Z and R, so a state keeps only its Pareto-optimal labels and nothing is lost.  Labels that cannot lead
below the best plan known are dropped: the layers before j need at least their work spread over all the devices used.
"""
from __future__ import annotations

import bisect
import math
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from whale_tf.planner.dapple.cost import DappleCosts, LayerStage, Stages
from whale_tf.planner.dapple.device_sets import Counts

INFINITY = float("inf")
# Two plans whose latencies differ by less are equal: floating-point sums in another order.
TOLERANCE = 1e-12

# Growing limits of the search, the first relative to the lower bound.
FIRST_LIMIT, GROWTH = 1.1, 1.2


class _Label(NamedTuple):
    x: float
    y: float
    z: float
    r: float
    stage: LayerStage
    rest: Optional[_Label]  # type: ignore[misc]  # recursive


# labels of one (layer, used) state by the set of their first stage
_Groups = Dict[Counts, List[_Label]]


def solve(costs: DappleCosts, bound: float = INFINITY) -> Optional[Stages]:
    """The plan of least latency, or None if no plan takes less than ``bound`` seconds (or none fits memory).

    On large clusters the device sets are those of :meth:`Servers.round_sets`, and the plan is the best of those.  The search
    starts with a limit a little above the lower bound, and goes on with growing limits: the tighter the limit, the fewer labels
    survive, and a plan found under any limit is the best of all.
    """
    floors = Floors(costs)
    limit = FIRST_LIMIT * floors.least_seconds
    last = min(bound, upper_bound(costs))
    while True:
        found = below(floors, min(limit, last))
        if found is not None or limit >= last:
            return found
        limit *= GROWTH


def below(floors: Floors, limit: float) -> Optional[Stages]:
    """One pass: the plan of least latency if it takes less than ``limit`` seconds, otherwise None."""
    return _Search(floors, limit).run()


def upper_bound(costs: DappleCosts) -> float:
    """No plan takes longer: every micro-batch alone through all layers on one device, all wires and one all-reduce."""
    cluster, samples = costs.servers.cluster, costs.micro_batch
    everything = costs.stage_costs.group(range(len(cluster)), samples)
    work_s = max(sum(times.work(0, costs.num_layers)) for times in everything.times)
    links = [cluster.link(0, device.index) for device in cluster.devices[1:]]
    slowest = min([link.bandwidth_bytes_per_s for link in links] or [INFINITY])
    latency_s = max([link.latency_s for link in links] or [0.0])
    wires_s = 2 * (sum(costs.outputs) * samples / slowest + costs.num_layers * latency_s)
    allreduce_s = 2 * costs.parameters[0][-1] / slowest + 2 * len(cluster) * latency_s
    return 2 * (costs.micro_batches + 1) * (work_s + wires_s) + allreduce_s


class _Search:
    """The dynamic programming, for plans below ``bound``."""

    def __init__(self, floors: Floors, bound: float) -> None:
        costs = floors.costs
        self.costs, self.servers, self._floors = costs, costs.servers, floors
        self.steady = costs.micro_batches - 1
        self.bound = bound
        self.work_bound = min(bound, costs.measures.below_s)  # of a step's work alone
        self.states: Dict[Tuple[int, Counts], _Groups] = {}
        self.memory_binds = floors.memory_binds

    def run(self) -> Optional[Stages]:
        best: Optional[_Label] = None
        for labels in self._solve(0, self.servers.none()).values():
            for label in labels:
                if best is None or label.x < best.x:
                    best = label
        return None if best is None else self._placed(best)

    def _solve(self, layer: int, used: Counts) -> _Groups:
        """Pareto-optimal suffix plans of ``layer`` to the last on the devices not ``used``."""
        key = (layer, used)
        if key in self.states:
            return self.states[key]
        groups: _Groups = {}
        self.states[key] = groups
        floors = self._floors
        floor_f, floor_c = floors.of(layer, used)
        # the busiest stage of either side as the pivot, after all stages before it
        before_s, behind_s = floors.busiest(0, layer, used), floors.busiest(layer, -1, self.servers.free(used))
        if max((self.steady + 1) * before_s, floor_c + (self.steady + 1) * behind_s) * (1 - TOLERANCE) >= self.work_bound:
            return groups
        for taken in self.servers.sets(used):
            labels = self._with_first_set(layer, used, taken, floor_f, floor_c)
            if labels:
                groups[taken] = labels
        return groups

    def _with_first_set(self, layer: int, used: Counts, taken: Counts, floor_f: float, floor_c: float) -> List[_Label]:
        costs, steady, bound = self.costs, self.steady, self.bound
        labels: List[_Label] = []
        last = self.servers.free(used) == taken
        behind, sent = (used, taken) if last else self.servers.behind(used, taken)
        ends: Iterable[int] = (costs.num_layers,) if last else self._ends(layer, behind, floor_c)
        devices = costs.group(used, taken)
        ring, parameters = devices.ring, costs.parameters[layer]
        for end in ends:
            stage = LayerStage(layer, end, used, taken)
            forward_s, backward_s = devices.work(layer, end)
            work_s = forward_s + backward_s
            if (steady + 1) * work_s + floor_c >= self.work_bound:
                break
            rests = {} if last else self._solve(end, behind)
            if not (rests or last):
                continue
            depth = devices.memory(layer, end).depth
            if depth < 1:
                break
            allreduce_s = ring.seconds(parameters[end])
            if last:
                label = _last(stage, forward_s, backward_s, allreduce_s, steady)
                if label.x + floor_f < bound:
                    _insert(labels, label, self.memory_binds)
                break
            for receivers, group in rests.items():
                wire_s = costs.wire(end, _minus(behind, sent), sent, self.servers.matched(behind, receivers, sent))
                for rest in group:
                    if 2 * wire_s + work_s + rest.z + floor_c < bound and wire_s + forward_s + rest.x + floor_f < bound:
                        label = _in_front(rest, wire_s, stage, forward_s, backward_s, allreduce_s, depth, steady)
                        if label.x + floor_f < bound and label.z + floor_c < bound:
                            _insert(labels, label, self.memory_binds)
        return labels

    def _ends(self, layer: int, behind: Counts, floor_c: float) -> Iterable[int]:
        """Where a stage from ``layer`` can end if the devices ``behind`` are used then: neither the layers before it nor those
        after it may keep their devices busy beyond the bound.

        Args:
            floor_c: least seconds of a micro-batch's work before ``layer``.
        """
        work, size, count = self._floors.work, self.costs.num_layers, (self.steady + 1) * (1 - TOLERANCE)
        used, rest = self._floors.capacity(behind), self._floors.capacity(self.servers.free(behind))
        return range(max(layer + 1, bisect.bisect_left(work, work[-1] - (self.work_bound - floor_c) / count * rest)),
                     min(size, bisect.bisect_right(work, self.work_bound / count * used)))

    def _placed(self, label: _Label) -> Stages:
        """Undoes the exchanges of servers: the stages with the servers' own numbers."""
        place = list(range(len(self.servers.sizes)))  # real server of each canonical place
        used = list(self.servers.none())
        before: Optional[Counts] = None
        stages: List[LayerStage] = []
        step: Optional[_Label] = label
        while step is not None:
            taken = step.stage.taken if before is None else self.servers.matched(step.stage.used, step.stage.taken, before)
            real = [0] * len(used)
            for slot, count in enumerate(taken):
                real[place[slot]] = count
            stages.append(LayerStage(step.stage.first, step.stage.end, tuple(used), tuple(real)))
            used = [a + b for a, b in zip(used, real)]
            # ``taken`` may be a permutation of the state's own order: move tied servers to their places there
            spelled = _same_spelling(taken, step.stage.taken, step.stage.used, self.servers.classes)
            order = self.servers.canonical_order(step.stage.used, step.stage.taken)
            place = [place[spelled[k]] for k in order]
            before = tuple(step.stage.taken[k] for k in order)
            step = step.rest
        return tuple(stages)


def _last(stage: LayerStage, forward_s: float, backward_s: float, allreduce_s: float, steady: int) -> _Label:
    """The suffix of one stage; ``steady`` is M - 1."""
    work_s = forward_s + backward_s
    return _Label((steady + 1) * work_s + allreduce_s, allreduce_s, (steady + 1) * work_s, work_s, stage, None)


def _in_front(rest: _Label, wire_s: float, stage: LayerStage, forward_s: float, backward_s: float, allreduce_s: float, depth: int,
              steady: int) -> _Label:
    """The suffix with a wire and then a stage put in front of it, by the rules of the module's docstring."""
    x = wire_s + max(rest.x, 2 * steady * wire_s + max(wire_s, rest.y), wire_s + rest.z)
    y = rest.y - wire_s
    z = 2 * wire_s + max(2 * steady * wire_s, rest.z)
    work_s = forward_s + backward_s
    r = work_s + 2 * wire_s + rest.r
    x = forward_s + max(x, steady * work_s + max(allreduce_s + backward_s, y), backward_s + allreduce_s + z)
    z = work_s + max(steady * work_s, z)
    if depth <= steady:
        rounds, left = divmod(steady, depth)
        trip_s = (rounds + 1) * r + left * backward_s
        x, z = max(x, trip_s + max(allreduce_s, y - backward_s)), max(z, trip_s)
    return _Label(x, max(allreduce_s, y - backward_s), z, r, stage, rest)


def _same_spelling(real: Counts, spelled: Counts, used: Counts, classes: Counts) -> List[int]:
    """For each place of ``spelled`` a place of ``real`` with the same class, used count and taken count, each once."""
    free = list(range(len(real)))
    result = []
    for k in range(len(spelled)):
        match = next(m for m in free if (classes[m], used[m], real[m]) == (classes[k], used[k], spelled[k]))
        free.remove(match)
        result.append(match)
    return result


def _minus(total: Counts, part: Counts) -> Counts:
    return tuple(a - b for a, b in zip(total, part))


def _insert(labels: List[_Label], new: _Label, with_round_trip: bool) -> None:
    """Keeps ``labels`` Pareto-optimal in (X, Y, Z) and, where memory can bind, R."""
    x, y, z, r = new[0], new[1], new[2], new[3]
    for old in labels:
        if old.x <= x and old.y <= y and old.z <= z and (not with_round_trip or old.r <= r):
            return
    labels[:] = [old for old in labels
                 if not (x <= old.x and y <= old.y and z <= old.z and (not with_round_trip or r <= old.r))]
    labels.append(new)


def _memory_binds(costs: DappleCosts) -> bool:
    """Whether some stage might hold fewer than all micro-batches, so that round trips matter."""
    memory = costs.measures.limit(min(device.usable_bytes for device in costs.servers.cluster.devices))
    whole = costs.memory(LayerStage(0, costs.num_layers, costs.servers.none(), _single(costs)))
    return whole.fixed + costs.micro_batches * whole.each > memory


def _single(costs: DappleCosts) -> Counts:
    """One device of the first server: the largest slice."""
    return tuple(1 if k == 0 else 0 for k in range(len(costs.servers.sizes)))


class Floors:
    """Lower bounds of the work of one micro-batch, for all passes over one number of micro-batches.

    One after the other, stages with the work ``w_i`` on ``t_i`` of ``T`` devices take ``sum w_i / t_i``, which is at least
    ``(sum sqrt(w_i)) ** 2 / T`` (Cauchy and Schwarz).  If memory needs many stages, that is many times the time of one stage on
    all of these devices.

    Attributes:
        costs: of the plans.
        memory_binds: whether some stage might hold fewer than all micro-batches.
        work: ``[layer]`` device seconds, forward and backward, of the layers before it.
    """

    def __init__(self, costs: DappleCosts) -> None:
        self.costs, self.memory_binds = costs, _memory_binds(costs)
        self._rates = self._find_rates()
        self._capacities: Dict[Counts, float] = {}
        self._seconds: Dict[int, Tuple[List[float], List[float]]] = {}  # by number of devices: [layer] forward, and both
        ahead, work = [INFINITY] * costs.num_layers, [INFINITY] * costs.num_layers
        for replicas in range(1, costs.servers.num_devices + 1):
            forward, backward = self._fastest(replicas)
            ahead = [min(w, replicas * f) for w, f in zip(ahead, forward)]
            work = [min(w, replicas * (f + b)) for w, f, b in zip(work, forward, backward)]
        self.work, starts = _sums(work), self._starts()
        self._in_turn = _in_turn(_sums(ahead), starts), _in_turn(self.work, starts)

    @property
    def least_seconds(self) -> float:
        """Of a step: the work spread evenly over all devices, without any communication."""
        return self.costs.micro_batches * self.busiest(0, -1, self.costs.servers.sizes)

    def capacity(self, counts: Counts) -> float:
        """The equivalent number of devices of the fastest type: a stage takes at least its layers' work divided by that."""
        if counts not in self._capacities:
            self._capacities[counts] = sum(count * rate for count, rate in zip(counts, self._rates)) * (1 + TOLERANCE)
        return self._capacities[counts]

    def _find_rates(self) -> List[float]:
        """For every server, the speed of its fastest device relative to the fastest of all, at most over layers and slices."""
        costs, cluster = self.costs, self.costs.servers.cluster
        types = {device.type: device.index for device in cluster.devices}
        if len(types) == 1:
            return [1.0] * len(costs.servers.sizes)
        rates = dict.fromkeys(types, 0.0)
        for samples in sorted({-(-costs.micro_batch // count) for count in range(1, costs.servers.num_devices + 1)}):
            tables = {name: costs.stage_costs.times(device, samples) for name, device in types.items()}
            for part in (0, 1):
                for layer in range(costs.num_layers):
                    seconds = {name: times.work(layer, layer + 1)[part] for name, times in tables.items()}
                    least = min(seconds.values())
                    for name, value in seconds.items():
                        rates[name] = max(rates[name], least / value if value else 1.0)
        return [max(rates[cluster.devices[device].type] for device in node) for node in cluster.nodes]

    def _starts(self) -> List[int]:
        """``[end]`` the first layer with which a stage can end there, on as many and as large devices as there are."""
        costs, first, found = self.costs, 0, [0]
        room = costs.measures.limit(max(device.usable_bytes for device in costs.servers.cluster.devices))
        everything = costs.stage_costs.group(range(costs.servers.num_devices), -(-costs.micro_batch // costs.servers.num_devices))
        for end in range(1, costs.num_layers + 1):
            while first < end - 1 and everything.memory(first, end).bytes(1) > room:
                first += 1
            found.append(first)
        return found

    def _fastest(self, replicas: int) -> Tuple[List[float], List[float]]:
        """Seconds of every layer on the fastest device type."""
        costs = self.costs
        everything = costs.stage_costs.group(range(costs.servers.num_devices), -(-costs.micro_batch // replicas))
        forward, backward = ([min(times.work(k, k + 1)[part] for times in everything.times) for k in range(costs.num_layers)]
                             for part in (0, 1))
        return forward, backward

    def of(self, layer: int, used: Counts) -> Tuple[float, float]:
        """Seconds of the layers before ``layer`` on the devices ``used``, in however many stages: forward, and both passes."""
        if layer == 0:
            return 0.0, 0.0
        devices = sum(used)
        if devices not in self._seconds:
            forward, backward = self._fastest(devices)
            self._seconds[devices] = _sums(forward), _sums([f + b for f, b in zip(forward, backward)])
        forward_s, both_s = self._seconds[devices]
        ahead, both = self._in_turn
        capacity = self.capacity(used)
        return max(forward_s[layer], ahead[layer] / capacity), max(both_s[layer], both[layer] / capacity)

    def busiest(self, first: int, end: int, counts: Counts) -> float:
        """Seconds of the slowest of any number of stages with the layers ``first`` to ``end - 1`` on devices."""
        work = self.work[end] - self.work[first]
        return work / self.capacity(counts) if work > 0.0 else 0.0


def _in_turn(work: List[float], starts: List[int]) -> List[float]:
    """``[end]`` the least ``(sum sqrt(w_i)) ** 2`` of stages with the layers before ``end``.

    Args:
        work: ``[layer]`` of the layers before it.
        starts: ``[end]`` the first layer of the longest stage that ends there.
    """
    roots = [0.0]
    for end in range(1, len(work)):
        roots.append(min(roots[first] + math.sqrt(max(0.0, work[end] - work[first])) for first in range(starts[end], end)))
    return [root * root * (1 - TOLERANCE) for root in roots]


def _sums(values: List[float]) -> List[float]:
    """Prefix sums, rounded down a little so that sums in another order stay above them."""
    total, result = 0.0, [0.0]
    for value in values:
        total += value
        result.append(total * (1 - 1e-12))
    return result
