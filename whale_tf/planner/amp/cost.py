"""AMP's cost of a strategy (section 3.4, Eq. 3 to 5), including differences that the paper averages away.

A strategy places ``pp x dp x tmp`` ranks on devices, ``placement[p][d][t]``.  As in the paper: a ring all-reduce of M bytes
over n devices takes ``2 (n - 1) M / (n B)`` with B the slowest link of the group (Eq. 3); a pipeline takes
``(gas - 1) max t + sum e + sum t`` (Eq. 5); the iteration the slowest pipeline plus the slowest gradient all-reduce (Eq. 4).

Beyond the paper:

* every stage of every pipeline has the speed of its own slowest device (the authors' code mixes all types into one average);
* a layer costs its measured time for the first measured samples and FLOPs for every further one, so launch overhead, which
  dominates small micro-batches and tensor parallelism, is not multiplied by the micro-batch;
* the gradient rings that leave a node at the same time share its adapters;
* a boundary costs the activations and their gradients;
* memory: parameters, gradients, optimizer state and the activations of the micro-batches in flight of the 1F1B schedule.
"""
from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, Optional, Tuple

import numpy

from whale_tf.cluster import Cluster
from whale_tf.planner.amp import layer_assignment
from whale_tf.planner.measures import Measures
from whale_tf.planner.stage_costs import Group, StageCosts, Transfer
from whale_tf.profiler.model_profile import ModelProfile


class Degrees(NamedTuple):
    """Numbers of pipeline stages, of parallel pipelines, and of devices that share each layer."""

    pp: int
    dp: int
    tmp: int


class AmpStrategy(NamedTuple):
    """The paper's Eq. 2.  ``placement`` is ``[pp, dp, tmp]`` device numbers; stage p holds layers ``cuts[p]`` to
    ``cuts[p + 1] - 1``; ``micro_batch`` is the samples of one micro-batch of one pipeline."""

    degrees: Degrees
    micro_batch: int
    placement: numpy.ndarray
    cuts: Tuple[int, ...]


class Estimate(NamedTuple):
    """Seconds of an iteration, bytes on every device of the cluster, and whether they fit."""

    seconds: float
    pipeline_s: float
    allreduce_s: float
    peak_bytes: Tuple[int, ...]
    fits: bool


class AmpCosts:
    """The cost model of one profile on one cluster.

    Args:
        blocking: whether a stage waits for its messages in estimates (otherwise they overlap with its next micro-batch, as layers
            are always assigned; section 6.1).
        shared_adapters: whether gradient rings that leave a node share its adapters.
    """

    def __init__(self, profile: ModelProfile, cluster: Cluster, global_batch: int, blocking: bool = False,
                 shared_adapters: bool = True, measures: Measures = Measures()) -> None:  # noqa: B008 (a frozen tuple)
        self.profile, self.cluster, self.global_batch = profile, cluster, global_batch
        self.blocking, self.shared_adapters, self.measures = blocking, shared_adapters, measures
        self.stage_costs = StageCosts(profile, cluster, measures)
        self._times: Dict[Tuple[Degrees, int, bytes], numpy.ndarray] = {}
        self._grouped: Dict[Tuple[Degrees, int, bytes], List[Group]] = {}
        self._wired: Dict[Tuple[bytes, Degrees], Tuple[numpy.ndarray, numpy.ndarray, float]] = {}

    def accumulation(self, degrees: Degrees, micro_batch: int) -> int:
        """``gas``: micro-batches of one pipeline."""
        return self.global_batch // (degrees.dp * micro_batch)

    # ---- Eq. 5 -----------------------------------------------------------------------------------------------------

    def layer_times(self, degrees: Degrees, micro_batch: int, placement: numpy.ndarray) -> numpy.ndarray:
        """``[dp, L, pp]`` seconds, forward and backward, of one micro-batch of every layer on every stage."""
        key_of_all = (degrees, micro_batch, placement.tobytes())
        if key_of_all in self._times:
            return self._times[key_of_all]
        pp, dp, tmp = degrees
        known: Dict[Tuple[FrozenSet[str], Transfer], numpy.ndarray] = {}
        times = numpy.empty((dp, len(self.profile.layers), pp))
        for p in range(pp):
            for d in range(dp):
                group = placement[p, d].tolist()
                key = (frozenset(self.cluster.devices[device].type for device in group), self.stage_costs.ring(group))
                if key not in known:
                    known[key] = self.stage_costs.group(group, micro_batch, dp, tmp).layer_seconds()
                times[d, :, p] = known[key]
        self._times[key_of_all] = times
        return times

    def edge_times(self, degrees: Degrees, micro_batch: int, placement: numpy.ndarray) -> numpy.ndarray:
        """``[dp, L - 1, pp - 1]`` seconds of the tensors after layer c crossing from stage p to p + 1, and of their gradients
        back.  Each device sends to its counterpart."""
        per_byte, latency_s, _ = self._wires(degrees, placement)
        sizes = numpy.array(self.stage_costs.outputs[:-1], dtype=float) * micro_batch
        return 2 * (sizes[None, :, None] * per_byte[:, None, :] + latency_s[:, None, :])

    # ---- Eq. 4 -----------------------------------------------------------------------------------------------------

    def assign(self, degrees: Degrees, micro_batch: int, placement: numpy.ndarray) -> Optional[AmpStrategy]:
        """The strategy with the best layer assignment that fits memory, or the best one if none does; None if there are more
        stages than layers.

        The pipelines of a heterogeneous cluster differ, but all hold the same layers.  So the assignment is made for the slowest
        device and link of each stage over all pipelines (exact if the pipelines are alike).
        """
        times = self.layer_times(degrees, micro_batch, placement).max(axis=0)
        alike = bool(numpy.all(times == times[:, :1]))
        edges = self.edge_times(degrees, micro_batch, placement).max(axis=0)
        gas = self.accumulation(degrees, micro_batch)
        problem = (times[:, 0] if alike else times, edges, gas, degrees.pp)
        found = layer_assignment.assign(*problem)
        if found is not None and not self._memory(AmpStrategy(degrees, micro_batch, placement, found.cuts), gas)[1]:
            found = layer_assignment.assign(*problem, self._lowest(degrees, micro_batch, placement, gas)) or found
        return None if found is None else AmpStrategy(degrees, micro_batch, placement, found.cuts)

    def estimate(self, strategy: AmpStrategy) -> Estimate:
        """Eq. 4 of a strategy, pipeline by pipeline, and its memory."""
        degrees, micro_batch, placement, cuts = strategy
        gas = self.accumulation(degrees, micro_batch)
        times = self.layer_times(degrees, micro_batch, placement)
        edges = self.edge_times(degrees, micro_batch, placement)
        pipeline_s = max(layer_assignment.evaluate(times[d], edges[d], gas, cuts, self.blocking) for d in range(degrees.dp))
        allreduce_s = max((self.allreduce_seconds(degrees, placement, p, cuts) for p in range(degrees.pp)), default=0.0)
        peak, fits = self._memory(strategy, gas)
        return Estimate(pipeline_s + allreduce_s, pipeline_s, allreduce_s, peak, fits)

    def allreduce_seconds(self, degrees: Degrees, placement: numpy.ndarray, stage: int, cuts: Tuple[int, ...]) -> float:
        """The slowest gradient ring of a stage (Eq. 3): one ring for each tensor-parallel rank, over all pipelines."""
        if degrees.dp == 1:
            return 0.0
        share = self._wires(degrees, placement)[2] if self.shared_adapters else 1.0
        size = self.stage_costs.bytes(degrees.tmp).parameters[cuts[stage]][cuts[stage + 1]]
        seconds = 0.0
        for t in range(degrees.tmp):
            group = placement[stage, :, t].tolist()
            ring = self.stage_costs.ring(group)
            is_crossing = len({self.cluster.devices[device].node for device in group}) > 1
            seconds = max(seconds, ring.latency_s + ring.seconds_per_byte * size * (share if is_crossing else 1.0))
        return seconds

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _wires(self, degrees: Degrees, placement: numpy.ndarray) -> Tuple[numpy.ndarray, numpy.ndarray, float]:
        """(``[dp, pp - 1]`` seconds per byte, ``[dp, pp - 1]`` latency, rings that share the busiest adapter)."""
        key = (placement.tobytes(), degrees)
        if key not in self._wired:
            pp, dp, tmp = degrees
            per_byte, latency_s = numpy.zeros((dp, pp - 1)), numpy.zeros((dp, pp - 1))
            for d in range(dp):
                for p in range(pp - 1):
                    per_byte[d, p], latency_s[d, p] = Transfer.slowest(
                        self.stage_costs.message([a], [b])
                        for a, b in zip(placement[p, d].tolist(), placement[p + 1, d].tolist()))
            self._wired[key] = (per_byte, latency_s, float(self._rings_on_an_adapter(degrees, placement)))
        return self._wired[key]

    def _rings_on_an_adapter(self, degrees: Degrees, placement: numpy.ndarray) -> int:
        rings: Dict[int, int] = {}
        nodes = numpy.array([device.node for device in self.cluster.devices])[placement]
        for p in range(degrees.pp):
            for t in range(degrees.tmp):
                touched = set(nodes[p, :, t].tolist())
                for node in touched if len(touched) > 1 else ():
                    rings[node] = rings.get(node, 0) + 1
        adapters = [node.nic.count if node.nic is not None else 1 for node in self.cluster.description.nodes]
        return max([-(-count // adapters[node]) for node, count in rings.items()] or [1])

    def _groups(self, degrees: Degrees, micro_batch: int, placement: numpy.ndarray) -> List[Group]:
        """The devices of every stage, of all pipelines."""
        key = degrees, micro_batch, placement.tobytes()
        if key not in self._grouped:
            self._grouped[key] = [self.stage_costs.group(devices.ravel().tolist(), micro_batch, degrees.dp, degrees.tmp)
                                  for devices in placement]
        return self._grouped[key]

    def _lowest(self, degrees: Degrees, micro_batch: int, placement: numpy.ndarray, gas: int) -> List[List[int]]:
        """``[pp][L + 1]``: the first layer with which a stage that ends there fits the smallest of its devices."""
        rows, known = [], {}  # type: List[List[int]], Dict[Tuple[int, float], List[int]]
        groups = self._groups(degrees, micro_batch, placement)
        fixed, each = groups[0].all_memory()  # alike on all stages: as many samples, replicas and parts
        for p, group in enumerate(groups):
            key = min(gas, degrees.pp - p), group.limit
            if key not in known:
                sizes, row, first = (fixed + key[0] * each).tolist(), [0], 0
                for end in range(1, len(self.profile.layers) + 1):
                    while first < end and sizes[first][end] > group.limit:
                        first += 1
                    row.append(first)
                known[key] = row
            rows.append(known[key])
        return rows

    def _memory(self, strategy: AmpStrategy, gas: int) -> Tuple[Tuple[int, ...], bool]:
        """Peak bytes of every device, with the micro-batches in flight of 1F1B, and whether they fit."""
        degrees, micro_batch, placement, cuts = strategy
        peak, fits = [0] * len(self.cluster.devices), True
        for p, group in enumerate(self._groups(degrees, micro_batch, placement)):
            size = int(group.memory(cuts[p], cuts[p + 1]).bytes(min(gas, degrees.pp - p)))
            fits = fits and size <= group.limit
            for device in group.devices:
                peak[device] = size
        return tuple(peak), fits


def tensor_degrees(profile: ModelProfile, cluster: Cluster) -> List[int]:
    """Degrees of tensor parallelism to try: divisors of the smallest node (tensor parallelism stays within a node, as in
    Megatron); 1 for a model that cannot be split; and for a model known only by measurements, the degrees measured on every
    device type."""
    if all(layer.tensor_parallel_bytes is None for layer in profile.layers):
        return [1]
    smallest = min(len(node) for node in cluster.nodes)
    degrees = [n for n in range(1, smallest + 1) if all(len(node) % n == 0 for node in cluster.nodes)]
    for layer in profile.layers:
        if layer.measured and not (layer.forward_flops or layer.traffic_bytes) and layer.tensor_parallel_bytes is not None:
            for name in {device.type for device in cluster.devices}:
                known = {point.tensor_parallel for point in layer.measured if point.device == name}
                degrees = [n for n in degrees if n in known]
    return degrees
