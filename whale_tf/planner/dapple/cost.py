"""DAPPLE's cost of a hybrid plan: pipeline latency (section IV-A, Eq. 1 and 2), memory and warm-up depth (section V-C).

A plan is a chain of computation stages, with a communication stage between two of them::

    stage 0   F0 F1 F2 -- B0 F3 B1 ...          computation, replicated on its devices
    wire 0       c0 c1 c2    c0 ...             activations forward, gradients back
    stage 1         F0 B0 F1 B1 ...

**The latency** of ``M`` micro-batches with pivot ``Q``, over computation and communication stages alike::

    L(Q) = sum_{s<=Q} F_s + (M - 1) C_Q + max_s (AR_s + e_s)        C_Q = F_Q + B_Q
    e_s  = sum_{a=s}^{Q} B_a  for s <= Q,      - sum_{a=Q+1}^{s-1} B_a  for s > Q

Eq. 1 prints ``- sum_{a=Q}^{s} B_a`` for every ``s >= Q``.  Read literally, this subtracts the pivot's own last backward pass
where it must be added (a single stage would end before it).  So this module uses the time at which the last backward pass of
``s`` ends, relative to the start of the pivot's.

**The pivot** is the stage without bubbles.  Every stage, assumed to have no bubbles, gives a bound, so ``L`` is the largest
``L(Q)``.  The paper's formula 3 is a heuristic for the same stage.

**Memory** enters twice.  A stage must hold its parameters, gradients, optimizer state and at least one micro-batch.  And with
room for only ``D < M`` micro-batches, ``D`` of them go to the end and back (round trip ``R``) before the next ``D``, the last
``r`` ones a backward pass apart::

    L_memory(Q) = sum_{s<Q} F_s + k R_Q + R_Q + r B_Q + max_s (AR_s + sum_{a=s}^{Q-1} B_a or - sum_{a=Q}^{s-1} B_a)
    M - 1 = k D + r

Eq. 1 leaves that out.  If all micro-batches fit, the term vanishes.
"""
from __future__ import annotations

import itertools
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy

from whale_tf.planner.dapple.device_sets import Counts, Servers
from whale_tf.planner.measures import Measures
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import ModelProfile

UNLIMITED = 1 << 30


class Stage(NamedTuple):
    """Layers ``first`` to ``end - 1`` on the devices ``taken`` after those ``used`` by earlier stages."""

    first: int
    end: int
    used: Counts
    taken: Counts

    @property
    def replicas(self) -> int:
        return sum(self.taken)


Stages = Tuple[Stage, ...]


class Element(NamedTuple):
    """A computation or communication stage as Eq. 1 sees it; seconds, ``depth``: micro-batches it can hold."""

    forward_s: float
    backward_s: float
    allreduce_s: float = 0.0
    depth: int = UNLIMITED


def latency(elements: Sequence[Element], micro_batches: int) -> float:
    """``L`` of the module's docstring, in seconds: the largest ``L(Q)`` and ``L_memory(Q)``; straight from the formula."""
    bounds = []
    for pivot, element in enumerate(elements):
        before_s = sum(e.forward_s for e in elements[:pivot])
        work_s = element.forward_s + element.backward_s
        bounds.append(before_s + micro_batches * work_s + _ending(elements, pivot))
        if element.depth < micro_batches:
            trip_s = sum(e.forward_s + e.backward_s for e in elements[pivot:])
            bounds.append(before_s + trip_seconds(micro_batches, element, trip_s) + _ending(elements, pivot))
    return max(bounds)


def trip_seconds(micro_batches: int, element: Element, round_trip_s: float) -> float:
    """From the first forward to the last backward pass of a stage that holds ``depth`` micro-batches at a time."""
    rounds, rest = divmod(micro_batches - 1, element.depth)
    return (rounds + 1) * round_trip_s + rest * element.backward_s


def _ending(elements: Sequence[Element], pivot: int) -> float:
    """From the end of the pivot's last backward pass to the last all-reduce."""
    return max(e.allreduce_s + (sum(a.backward_s for a in elements[s:pivot]) if s <= pivot else
                                -sum(a.backward_s for a in elements[pivot:s]))
               for s, e in enumerate(elements))


class StageMemory(NamedTuple):
    """Bytes on each device of a stage: ``fixed`` (parameters, gradients, optimizer state, and recomputed tensors of one
    micro-batch), ``each`` for every micro-batch in flight, and the ``limit`` of the smallest device."""

    fixed: float
    each: float
    limit: float

    @property
    def depth(self) -> int:
        """DAPPLE's D: micro-batches that fit; 0: not even one."""
        room = self.limit - self.fixed
        if room < self.each or room < 0:
            return 0
        return UNLIMITED if self.each == 0 else int(min(room / self.each, UNLIMITED))


class _SetCost(NamedTuple):
    """The times of the layers on one device set: prefix sums over layers for every device type in it."""

    replicas: int
    slice_samples: int
    forward: List[List[float]]
    backward: List[List[float]]
    allreduce_s_per_byte: float
    allreduce_s: float
    memory_bytes: float


class Costs:
    """Every cost of one model on one cluster with one number of micro-batches.

    Samples are not divisible: a stage on ``g`` devices computes ``ceil(micro-batch / g)`` samples on its busiest one.

    Attributes:
        micro_batches: M; the micro-batch has ``global_batch / M`` samples.
    """

    def __init__(self, profile: ModelProfile, servers: Servers, global_batch: int, micro_batches: int,
                 measures: Measures = Measures()) -> None:  # noqa: B008 (a frozen tuple)
        self.profile, self.servers, self.measures = profile, servers, measures
        self.global_batch, self.micro_batches = global_batch, micro_batches
        self.micro_batch = -(-global_batch // micro_batches)
        self.num_layers = len(profile.layers)
        self.outputs = [layer.output_bytes for layer in profile.layers]
        self.parameters = _range_parameters(profile)
        self._kept = [0.0, *itertools.accumulate(float(layer.activation_bytes) for layer in profile.layers)]
        taken = [self.outputs[0], *self.outputs[:-1]]  # bytes that layers take from the previous ones
        self._passed = [0.0, *itertools.accumulate(map(float, taken))]
        self._prefixes: Dict[Tuple[str, int], Tuple[List[float], List[float]]] = {}
        self._sets: Dict[Tuple[Counts, Counts], _SetCost] = {}
        self._wires: Dict[Tuple[Counts, Counts, Counts], Tuple[float, float]] = {}

    # ---- stages ----------------------------------------------------------------------------------------------------

    def set_cost(self, used: Counts, taken: Counts) -> _SetCost:
        key = (used, taken)
        if key not in self._sets:
            self._sets[key] = self._make_set(used, taken)
        return self._sets[key]

    def times(self, stage: Stage) -> Tuple[float, float]:
        """(F_s, B_s): seconds of one micro-batch on the busiest device of the stage."""
        cost = self.set_cost(stage.used, stage.taken)
        pairs = [(f[stage.end] - f[stage.first], b[stage.end] - b[stage.first]) for f, b in zip(cost.forward, cost.backward)]
        return max(f for f, _ in pairs), max(b for _, b in pairs)

    def allreduce_seconds(self, stage: Stage) -> float:
        """AR(P_s, g_s): ring all-reduce of the stage's gradients over its devices."""
        cost = self.set_cost(stage.used, stage.taken)
        if cost.replicas == 1:
            return 0.0
        return cost.allreduce_s + cost.allreduce_s_per_byte * self.parameters[stage.first][stage.end]

    def kept_bytes(self, first: int, end: int) -> float:
        """Activations of layers first to end - 1 for one sample."""
        return self._kept[end] - self._kept[first]

    def memory(self, stage: Stage) -> StageMemory:
        cost = self.set_cost(stage.used, stage.taken)
        fixed = self.parameters[stage.first][stage.end] * self.measures.parameter_bytes(self.profile, cost.replicas)
        again, each = self.held_bytes(stage.first, stage.end)
        return StageMemory(fixed + again * cost.slice_samples, each * cost.slice_samples, self.measures.limit(cost.memory_bytes))

    def held_bytes(self, first: int, end: int) -> Tuple[float, float]:
        """Activations of layers first to end - 1 for one sample: of the micro-batch being recomputed, and of each one in
        flight."""
        whole, how = self.kept_bytes(first, end), self.measures.recompute
        if how == "none":
            return 0.0, whole
        if how == "stage":
            return whole, float(self.outputs[max(0, first - 1)])
        largest = max(self.kept_bytes(layer, layer + 1) for layer in range(first, end))
        return largest, self._passed[end] - self._passed[first]

    def element(self, stage: Stage, depth: Optional[int] = None) -> Element:
        """The stage as Eq. 1 sees it; ``depth``: micro-batches in flight (default: what memory allows)."""
        forward_s, backward_s = self.times(stage)
        fits = self.memory(stage).depth
        return Element(forward_s, backward_s, self.allreduce_seconds(stage), fits if depth is None else min(depth, fits))

    def wire(self, boundary: int, used: Counts, taken: Counts, receivers: Counts) -> float:
        """Seconds of one micro-batch's tensors crossing after layer ``boundary - 1``, one way.

        ``taken`` (after ``used``) sends to ``receivers``, the next devices on each server.  Every replica holds an equal slice of
        the micro-batch.  Bytes that stay on a server use its inner links, each device its own.  The difference between the bytes
        that a server holds before and after passes through its network adapters, which its devices share.
        """
        key = (used, taken, receivers)
        if key not in self._wires:
            self._wires[key] = self._make_wire(used, taken, receivers)
        per_byte, latency_s = self._wires[key]
        return latency_s + per_byte * self.outputs[boundary - 1] * self.micro_batch

    # ---- whole plans -----------------------------------------------------------------------------------------------

    def elements(self, stages: Sequence[Stage], depths: Optional[Sequence[int]] = None) -> List[Element]:
        """Computation and communication stages of a plan, in order."""
        made: List[Element] = []
        for index, stage in enumerate(stages):
            if index:
                before = stages[index - 1]
                wire_s = self.wire(stage.first, before.used, before.taken, stage.taken)
                made.append(Element(wire_s, wire_s))
            made.append(self.element(stage, None if depths is None else depths[index]))
        return made

    def fits(self, stages: Sequence[Stage]) -> bool:
        return all(self.memory(stage).depth >= 1 for stage in stages)

    def latency(self, stages: Sequence[Stage], depths: Optional[Sequence[int]] = None) -> float:
        """``L`` of a plan, scored from its stages alone."""
        return latency(self.elements(stages, depths), self.micro_batches)

    # ---- construction ----------------------------------------------------------------------------------------------

    def _make_set(self, used: Counts, taken: Counts) -> _SetCost:
        devices = self.servers.devices(used, taken)
        cluster = self.servers.cluster
        replicas = len(devices)
        slice_samples = -(-self.micro_batch // replicas)
        types = {cluster.devices[device].type: device for device in devices}
        prefixes = [self.prefix(name, device, slice_samples) for name, device in sorted(types.items())]
        per_byte = latency_s = 0.0
        if replicas > 1:
            link = cluster.bottleneck(devices)
            per_byte = 2.0 * (replicas - 1) / replicas / link.bandwidth_bytes_per_s
            latency_s = 2.0 * (replicas - 1) * link.latency_s
        return _SetCost(replicas, slice_samples, [f for f, _ in prefixes], [b for _, b in prefixes], per_byte, latency_s,
                        min(cluster.devices[device].usable_bytes for device in devices))

    def prefix(self, name: str, device: int, samples: int) -> Tuple[List[float], List[float]]:
        key = (name, samples)
        if key not in self._prefixes:
            forward, backward = [0.0], [0.0]
            for layer in self.profile.layers:
                time = layer_seconds(self.profile, layer, self.servers.cluster.devices[device], samples)
                forward.append(forward[-1] + time.forward_s)
                backward.append(backward[-1] + time.backward_s + (time.forward_s if self.measures.recompute != "none" else 0.0))
            self._prefixes[key] = (forward, backward)
        return self._prefixes[key]

    def _make_wire(self, used: Counts, taken: Counts, receivers: Counts) -> Tuple[float, float]:
        cluster = self.servers.cluster
        senders_n, receivers_n = sum(taken), sum(receivers)
        behind = tuple(a + b for a, b in zip(used, taken))
        sending = [self.servers.devices(*_only(used, taken, k)) for k in range(len(taken))]
        receiving = [self.servers.devices(*_only(behind, receivers, k)) for k in range(len(taken))]
        per_byte = latency_s = 0.0
        crossing = [abs(a / senders_n - b / receivers_n) for a, b in zip(taken, receivers)]
        for k in range(len(taken)):
            if sending[k] and receiving[k]:
                links = [cluster.link(a, b) for a in sending[k] for b in receiving[k]]
                slowest = min(link.bandwidth_bytes_per_s for link in links)
                per_byte = max(per_byte, max(1.0 / senders_n, 1.0 / receivers_n) / slowest)
                latency_s = max(latency_s, max(link.latency_s for link in links))
            if crossing[k] > 1e-12:
                out = taken[k] / senders_n > receivers[k] / receivers_n
                here, others = (sending[k], receiving) if out else (receiving[k], sending)
                links = [cluster.link(here[0], there[0]) for other, there in enumerate(others) if there and other != k]
                fastest = max(link.bandwidth_bytes_per_s for link in links)
                adapters = min(cluster.description.nodes[k].nic.count, len(here))  # type: ignore[union-attr]
                per_byte = max(per_byte, crossing[k] / (fastest * adapters))
                latency_s = max(latency_s, max(link.latency_s for link in links))
        return per_byte, latency_s


def _only(used: Counts, taken: Counts, server: int) -> Tuple[Counts, Counts]:
    """The part of a device set on one server."""
    return used, tuple(count if k == server else 0 for k, count in enumerate(taken))


def _range_parameters(profile: ModelProfile) -> List[List[float]]:
    """``[first][end]``: parameter bytes of layers first to end - 1, a tied parameter once."""
    size = len(profile.layers)
    table = numpy.zeros((size + 1, size + 1))
    for first in range(size):
        seen = set()
        total = 0.0
        for end, layer in enumerate(profile.layers[first:], first + 1):
            if layer.tied is None or layer.tied not in seen:
                total += layer.parameter_bytes
            seen.add(layer.tied)
            table[first, end] = total
    result: List[List[float]] = table.tolist()
    return result
