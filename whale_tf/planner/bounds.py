"""Lower bounds of the simulated time of plans of layers, so that plans that are too slow need not be simulated.

A stage with ``f`` and ``b`` seconds of forward and backward work in a micro-batch does ``M`` of both, after the first micro-batch
has come through the stages before it (``fill``), and before the last one has gone back through them (``drain``).  Work includes
the sums of tensor parallelism between two layers, for which the next layer waits.  Gradients are summed once the last backward
step of their stage has begun, on links that all sums share::

    stage 0    f f f     b   f b   f b     b                 M (f + b)
    stage 1      f b   f b   f b   f b                fill + M (f + b) + drain
                                   | sums             fill + M f + (M - 1) b + sums

Under 1F1B a stage of warm-up ``K`` begins the forward step of micro-batch ``m + K`` after the backward step of ``m``, whose
tensors have gone to the last stage and back by then, so that all micro-batches take ``ceil(M / K)`` such round trips::

    round trip = sum of f + b of this stage and those behind it + the messages between them, both ways

A message is what an adapter receives: each device of a stage takes its own examples, and all of them under tensor parallelism.
Nothing else is counted: neither other bubbles, nor updates, nor recomputation.
"""

from __future__ import annotations

from itertools import groupby
from typing import Dict, List, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.plan import TaskGraphPlan
from whale_tf.planner.candidate import Candidate, Stage
from whale_tf.planner.simulated import with_slices
from whale_tf.planner.stage_costs import StageCosts, Work
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile
from whale_tf.simulator import Simulator
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Group

IN_ORDER = ("backward_first", "gpipe")  # schedules with one stage on each device, whose backward steps are whole


class Bounds:
    """Lower bounds on one cluster.

    Args:
        simulator: plays the plans.
        balance: as for :func:`whale_tf.planner.simulated.simulated`.
    """

    def __init__(self, cluster: Cluster, simulator: Simulator, balance: str) -> None:
        self.cluster, self.network, self.balance = cluster, simulator.network, balance
        self._simulator = simulator
        self._costs: Dict[int, StageCosts] = {}  # by id of the profile, which they keep
        self._known: Dict[object, List[Dict[int, Work]]] = {}

    def seconds(self, found: Candidate) -> float:
        """No simulation of the plan under its measures takes less.

        Raises:
            PlanError: a layer has no time on a device, or a micro-batch has too few examples for its replicas.
        """
        seconds = self._task_seconds(found)
        return seconds + self.waiting_seconds(found, seconds)

    def waiting_seconds(self, found: Candidate, seconds: float) -> float:
        """The least time that the framework adds to a step whose tasks take ``seconds``, if any gradients are summed."""
        assert found.profile is not None, "stages are given in layers"
        is_summed = any(len(stage.devices) > 1 or stage.strategy == "replicate" and len(stage.all_devices) > 1
                        for stage in found.stages)
        ends = (found.profile.layers[0].tied, found.profile.layers[-1].tied)
        is_tied = len(found.stages) > 1 and ends[0] is not None and ends[0] == ends[1]
        return self._simulator.least_waiting_seconds(seconds, found.num_devices) if is_summed or is_tied else 0.0

    def _task_seconds(self, found: Candidate) -> float:
        """Without what the framework adds to a step of several devices."""
        assert found.profile is not None, "stages are given in layers"
        count, works = found.micro_batches, self._all_works(found)
        if found.measures.schedule not in IN_ORDER:
            busy: Dict[int, float] = {}
            for work in works:
                for device, one in work.items():
                    busy[device] = busy.get(device, 0.0) + count * sum(one)
            return max(busy.values())
        least_s = self._round_trips_s(found, works) if found.measures.schedule == "backward_first" else 0.0
        fill_s = drain_s = 0.0
        begin_s: List[float] = []  # of each stage's sums
        early_s: List[float] = []  # of each stage's first backward step
        for work in works:
            least_s = max(least_s, fill_s + drain_s + count * max(map(sum, work.values())))
            begin_s.append(fill_s + max(count * one.forward_s + (count - 1) * one.backward_s for one in work.values()))
            early_s.append(fill_s + min(one.forward_s for one in work.values()))
            fill_s += min(one.forward_s for one in work.values())
            drain_s += min(one.backward_s for one in work.values())
        return max(least_s, self._state_s(found, found.profile, begin_s, early_s))

    def _round_trips_s(self, found: Candidate, works: Sequence[Dict[int, Work]]) -> float:
        """The largest of the stages' round trips, for all micro-batches."""
        assert found.profile is not None, "stages are given in layers"
        samples, least_s, trip_s = found.global_batch / found.micro_batches, 0.0, 0.0
        for number in range(len(works) - 1, -1, -1):
            stage = found.stages[number]
            trip_s += min(map(sum, works[number].values()))
            if number + 1 < len(works):
                size = found.profile.layers[stage.last_layer].output_bytes * samples
                behind = found.stages[number + 1]
                trip_s += self._message_s(stage, behind, size) + self._message_s(behind, stage, size)
            warmup = min(stage.warmup, found.micro_batches)
            least_s = max(least_s, -(-found.micro_batches // warmup) * trip_s)
        return least_s

    def _message_s(self, sender: Stage, receiver: Stage, size: float) -> float:
        """Until the adapters of every node that has no sender have received what its devices take of a micro-batch."""
        devices, seconds = self.cluster.devices, 0.0
        sending = {devices[device].node: device for device in sender.all_devices}
        if len({devices[device].type for device in receiver.all_devices}) > 1:
            return 0.0  # parts are uneven
        parts = len(receiver.devices) * (1 if receiver.strategy == "split" else len(receiver.devices[0]))
        for node, members in groupby(sorted(receiver.all_devices, key=lambda device: devices[device].node),
                                     key=lambda device: devices[device].node):
            if node not in sending:
                here = list(members)
                link = max((self.cluster.link(other, here[0]) for other in sending.values()),
                           key=lambda one: one.bandwidth_bytes_per_s)
                adapters = min(self.cluster.description.nodes[node].nic.count, len(here))  # type: ignore[union-attr]
                seconds = max(seconds, len(here) * size / parts / (link.bandwidth_bytes_per_s * adapters))
        return seconds

    def busy_seconds(self, found: Candidate) -> List[float]:
        """For each stage, the work of its slowest device for one micro-batch."""
        return [max(map(sum, work.values())) for work in self._all_works(found)]

    def _all_works(self, found: Candidate) -> List[Dict[int, Work]]:
        assert found.profile is not None, "stages are given in layers"
        key = found.stages, found.micro_batches, found.model_replicas, id(found.profile)
        if key not in self._known:
            costs = self._costs.setdefault(id(found.profile), StageCosts(found.profile, self.cluster))
            plan = with_slices(found, found.profile, self.cluster, self.balance)
            self._known[key] = [self._works(costs, stage, task, found.global_batch / found.micro_batches)
                                for stage, task in zip(found.stages, plan.task_graphs)]
        return self._known[key]

    # ---- a stage -----------------------------------------------------------------------------------------------------

    def _works(self, costs: StageCosts, stage: Stage, task: TaskGraphPlan, samples: float) -> Dict[int, Work]:
        """The work of each device; ``samples``: of a micro-batch of all model replicas."""
        first, end = stage.first_layer, stage.last_layer + 1
        found: Dict[int, Work] = {}
        known: Dict[Tuple[str, float], Work] = {}  # device type, samples -> of the layers
        size = samples / len(stage.devices)
        layers = costs.profile.layers[first:end]
        for row in stage.devices:
            is_split = stage.strategy == "split"
            sums = self._sums_inside(row, layers, size) if is_split else (0.0, 0.0)
            slices = task.slices if task.slices is not None and not is_split else (1,) * len(row)
            for device, part in zip(row, slices):
                own = size if is_split else size * part / sum(slices)
                key = (self.cluster.devices[device].type, own)
                if key not in known:
                    known[key] = self._layers(costs, device, own, first, end, len(row)) if is_split else \
                        costs.times(device, own).work(first, end)
                found[device] = Work(known[key].forward_s + sums[0], known[key].backward_s + sums[1])
        return found

    @staticmethod
    def _layers(costs: StageCosts, device: int, samples: float, first: int, end: int, split: int) -> Work:
        """The work of a device that shares the layers with others."""
        own = [costs.times(device, samples, split if can_be_split(costs.profile.layers[number]) else 1).work(number, number + 1)
               for number in range(first, end)]
        return Work(sum(one.forward_s for one in own), sum(one.backward_s for one in own))

    def _sums_inside(self, row: Tuple[int, ...], layers: Sequence[LayerProfile], size: float) -> Tuple[float, float]:
        """Seconds of tensor parallelism's sums behind all layers but the last (forward), and before all but the first
        (backward)."""
        algorithms = self.network.algorithms_of(ALL_REDUCE, Group(tuple(sorted(row))))
        sums = [min(one.latency_s + (layer.tensor_parallel_bytes or 0) * size * one.seconds_per_byte for one in algorithms)
                if can_be_split(layer) else 0.0 for layer in layers]
        return sum(sums[:-1]), sum(sums[1:])

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _state_s(self, found: Candidate, profile: ModelProfile, begin_s: Sequence[float], early_s: Sequence[float]) -> float:
        """When all gradients are summed.  ZeRO v2 and v3 sum those of every micro-batch, and v3 also gathers the values for each,
        over the same links."""
        zero, count = found.measures.zero, found.micro_batches
        if zero == "none":
            return self._summed_s(found, profile, [(ALL_REDUCE, 1, begin_s)])
        if zero == "v1" or count == 1:
            return self._summed_s(found, profile, [(REDUCE_SCATTER, 1, begin_s)])
        gathers = [(ALL_GATHER, count, [0.0] * len(begin_s))] if zero == "v3" else []
        return self._summed_s(found, profile, [(REDUCE_SCATTER, count, early_s), *gathers])

    def _summed_s(self, found: Candidate, profile: ModelProfile,
                  kinds: Sequence[Tuple[str, int, Sequence[float]]]) -> float:
        """When all collectives of gradients and values are done: of each kind, a device does one after another, and a link
        carries the bytes of all.

        Args:
            kinds: each kind, how many times it moves the bytes of a stage, and when it begins on every stage.
        """
        least_s = 0.0
        carried: Dict[int, float] = {}
        earliest_s: Dict[int, float] = {}
        for kind, times, begin_s in kinds:
            for stage, begin in zip(found.stages, begin_s):
                is_tensor_parallel = stage.strategy == "split"
                size = times * _gradient_bytes(profile, stage, len(stage.devices[0]) if is_tensor_parallel else 1)
                for members in zip(*stage.devices) if is_tensor_parallel else [stage.all_devices]:
                    if len(members) < 2:
                        continue
                    algorithms = self.network.algorithms_of(kind, Group(tuple(sorted(members))))
                    least_s = max(least_s, begin + size * min(one.seconds_per_byte for one in algorithms))
                    loads = [dict(one.loads) for one in algorithms]
                    for link in set.intersection(*map(set, loads)):
                        carried[link] = carried.get(link, 0.0) + size * min(load[link] for load in loads)
                        earliest_s[link] = min(begin, earliest_s.get(link, begin))
        return max([least_s] + [earliest_s[link] + size / self.network.bandwidths[link] for link, size in carried.items()])


def _gradient_bytes(profile: ModelProfile, stage: Stage, degree: int) -> float:
    """Bytes of the gradients that every device of a stage sums, each tied parameter's once."""
    layers = profile.distinct(stage.first_layer, stage.last_layer + 1)
    return sum(layer.parameter_bytes / degree for layer in layers if degree == 1 or can_be_split(layer))


def can_be_split(layer: LayerProfile) -> bool:
    """Whether tensor parallelism divides a layer."""
    return layer.tensor_parallel_bytes is not None and bool(layer.parameter_bytes)
