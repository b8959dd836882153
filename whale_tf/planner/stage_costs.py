"""What a stage of a pipeline costs: the same numbers for every search.

A stage is a run of layers, ``first`` to ``end - 1``, on a group of devices, for micro-batches of a number of samples::

    work       forward and backward seconds of one micro-batch on one device; the backward pass of a stage that is recomputed
               includes its forward pass
    message    the tensors behind a layer, one way, from the devices of a stage to those of the next one
    ring       the sum of gradients over n devices: 2 (n - 1) / n of the bytes, in 2 (n - 1) steps, over the slowest link
    memory     what is held all the time: parameters (a tied one once) with gradients and optimizer state, and what one
               micro-batch computes again; and what each micro-batch in flight holds

How these make up the time of a step is for a search to say: DAPPLE's Eq. 1 and 2 (:mod:`whale_tf.planner.dapple.cost`), AMP's
Eq. 3 to 5 (:mod:`whale_tf.planner.amp.cost`), Whale's balance of stages (:mod:`whale_tf.planner.partition`).
"""
from __future__ import annotations

import functools
import itertools
from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.balance.stages import interval_sums
from whale_tf.cluster import Cluster
from whale_tf.planner.measures import Measures
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import ModelProfile

UNLIMITED = 1 << 30  # micro-batches


class Work(NamedTuple):
    """Seconds of a device for one micro-batch of a stage."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


class LayerTimes:
    """Seconds of all layers on one type of device, for one number of samples.

    Attributes:
        forward_s: ``[layer]``
        seconds: ``[layer]`` forward and backward.
        forward, backward: ``[end]`` seconds of the layers before ``end``.
        unsummed: ``[layer]`` samples whose sums of tensor parallelism are not part of the times.
    """

    def __init__(self, forward: Sequence[float], backward: Sequence[float], unsummed: Sequence[float]) -> None:
        self.forward_s, self.seconds = forward, np.add(forward, backward)
        self.forward = [0.0, *itertools.accumulate(forward)]
        self.backward = [0.0, *itertools.accumulate(backward)]
        self.unsummed = np.asarray(unsummed)

    def work(self, first: int, end: int) -> Work:
        """Of the layers ``first`` to ``end - 1``."""
        return Work(self.forward[end] - self.forward[first], self.backward[end] - self.backward[first])


class Transfer(NamedTuple):
    """The cost of moving bytes."""

    seconds_per_byte: float = 0.0
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        return self.latency_s + self.seconds_per_byte * size

    @staticmethod
    def slowest(transfers: Iterable[Transfer]) -> Transfer:
        """A transfer that none of these takes longer than."""
        found = list(transfers) or [Transfer()]
        return Transfer(max(one.seconds_per_byte for one in found), max(one.latency_s for one in found))


class Links:
    """What groups of devices of one cluster are, and the transfers between them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._rings: Dict[FrozenSet[int], Transfer] = {}
        self._messages: Dict[Tuple[Tuple[int, ...], Tuple[int, ...]], Transfer] = {}
        self._kinds: Dict[Tuple[int, ...], Tuple[List[int], float]] = {}

    def kinds(self, devices: Tuple[int, ...]) -> Tuple[List[int], float]:
        """One device of each type in a group, and the bytes that all of them can use."""
        if devices not in self._kinds:
            members = [self.cluster.devices[device] for device in devices]
            types = {one.type: one.index for one in members}
            self._kinds[devices] = [types[name] for name in sorted(types)], min(one.usable_bytes for one in members)
        return self._kinds[devices]

    def ring(self, devices: Sequence[int]) -> Transfer:
        """The sum of bytes that all devices hold, by a ring all-reduce."""
        key, count = frozenset(devices), len(devices)
        if count == 1:
            return Transfer()
        if key not in self._rings:
            link, share = self.cluster.bottleneck(key), 2.0 * (count - 1) / count
            self._rings[key] = Transfer(share / link.bandwidth_bytes_per_s, 2.0 * (count - 1) * link.latency_s)
        return self._rings[key]

    def message(self, senders: Sequence[int], receivers: Sequence[int]) -> Transfer:
        """A micro-batch's tensors from one group of devices to another, one way.

        Every device of a group holds an equal slice of the micro-batch.  Bytes that stay on a node use its inner links, each
        device its own.  The difference between the bytes that a node holds before and after passes through its network adapters,
        which its devices share.
        """
        key = tuple(senders), tuple(receivers)
        if key not in self._messages:
            self._messages[key] = self._make_message(senders, receivers)
        return self._messages[key]

    def _make_message(self, senders: Sequence[int], receivers: Sequence[int]) -> Transfer:
        cluster = self.cluster
        if len(senders) == len(receivers) == 1:
            link = cluster.link(senders[0], receivers[0])
            return Transfer(1.0 / link.bandwidth_bytes_per_s, link.latency_s)
        sending, receiving = self._by_node(senders), self._by_node(receivers)
        per_byte = latency_s = 0.0
        for node in sorted({*sending, *receiving}):
            sent, received = sending.get(node, []), receiving.get(node, [])
            if sent and received:
                links = [cluster.link(a, b) for a in sent for b in received]
                slowest = min(link.bandwidth_bytes_per_s for link in links)
                per_byte = max(per_byte, max(1.0 / len(senders), 1.0 / len(receivers)) / slowest)
                latency_s = max(latency_s, max(link.latency_s for link in links))
            before, after = len(sent) / len(senders), len(received) / len(receivers)
            if abs(before - after) > 1e-12:
                here, others = (sent, receiving) if before > after else (received, sending)
                links = [cluster.link(here[0], there[0]) for other, there in others.items() if other != node]
                fastest = max(link.bandwidth_bytes_per_s for link in links)
                adapters = min(cluster.description.nodes[node].nic.count, len(here))  # type: ignore[union-attr]
                per_byte = max(per_byte, abs(before - after) / (fastest * adapters))
                latency_s = max(latency_s, max(link.latency_s for link in links))
        return Transfer(per_byte, latency_s)

    def _by_node(self, devices: Sequence[int]) -> Dict[int, List[int]]:
        found: Dict[int, List[int]] = {}
        for device in devices:
            found.setdefault(self.cluster.devices[device].node, []).append(device)
        return found


@functools.lru_cache(maxsize=8)
def links_of(cluster: Cluster) -> Links:
    """All searches on one cluster share them."""
    return Links(cluster)


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

    def bytes(self, in_flight: int) -> float:
        return self.fixed + in_flight * self.each


class StageBytes(NamedTuple):
    """``[first][end]`` bytes on one device of a stage with the layers ``first`` to ``end - 1``.

    Attributes:
        parameters: of its parameters, a tied one once.
        again: of what one sample computes again in the backward pass.
        each: of what one sample holds from the forward to the backward pass.
    """

    parameters: List[List[float]]
    again: List[List[float]]
    each: List[List[float]]


class Group:
    """What all stages on a group of devices have in common.

    Attributes:
        devices: their numbers.
        samples: of a micro-batch on one device.
        times: of all layers, for every type of device in the group.
        ring: the sum of gradients over all devices.
        limit: bytes that a stage may use on each of them.
    """

    def __init__(self, costs: StageCosts, devices: Sequence[int], samples: float, replicas: int, split: int) -> None:
        self.devices, self.samples = tuple(devices), samples
        types, usable_bytes = costs.links.kinds(self.devices)
        self.times = [costs.times(device, samples, split) for device in types]
        self.limit = costs.measures.limit(usable_bytes)
        self._state, self._sizes = costs.measures.parameter_bytes(costs.profile, replicas), costs.bytes(split)
        self._costs, self._split = costs, split
        self._ring: Optional[Transfer] = None

    @property
    def ring(self) -> Transfer:
        if self._ring is None:
            self._ring = self._costs.ring(self.devices)
        return self._ring

    def layer_seconds(self) -> np.ndarray:
        """``[layer]`` forward and backward seconds on the slowest device, with the sums of tensor parallelism over the group: one
        forward and one backward, of the samples whose sums are not in a measured time."""
        seconds = np.max([times.seconds for times in self.times], axis=0)
        if self._split > 1:
            sizes = np.array([layer.tensor_parallel_bytes or 0 for layer in self._costs.profile.layers], dtype=float)
            sizes *= np.max([times.unsummed for times in self.times], axis=0)
            seconds = seconds + 2 * (sizes * self.ring.seconds_per_byte + (sizes > 0) * self.ring.latency_s)
        return np.asarray(seconds)

    def work(self, first: int, end: int) -> Work:
        """Of the layers ``first`` to ``end - 1`` on the slowest device."""
        if len(self.times) == 1:
            return self.times[0].work(first, end)
        works = [times.work(first, end) for times in self.times]
        return Work(max(one.forward_s for one in works), max(one.backward_s for one in works))

    def ring_seconds(self, first: int, end: int) -> float:
        """To sum the gradients of the layers ``first`` to ``end - 1``."""
        return self.ring.seconds(self._sizes.parameters[first][end])

    def memory(self, first: int, end: int) -> StageMemory:
        """Of the layers ``first`` to ``end - 1``."""
        sizes, samples = self._sizes, self.samples
        return StageMemory(sizes.parameters[first][end] * self._state + sizes.again[first][end] * samples,
                           sizes.each[first][end] * samples, self.limit)

    def all_memory(self) -> Tuple[np.ndarray, np.ndarray]:
        """``[first, end]`` bytes of all stages: ``fixed`` and ``each`` of :class:`StageMemory`."""
        parameters, again, each = map(np.array, self._sizes)
        return parameters * self._state + again * self.samples, each * self.samples


class StageCosts:
    """The costs of all stages of one model on one cluster.

    ``split`` is the number of devices that share every layer (tensor parallelism); a layer that cannot be split is computed and
    held whole by each of them.

    Args:
        measures: the memory measures; the profile is in their precision already.
    """

    def __init__(self, profile: ModelProfile, cluster: Cluster,
                 measures: Measures = Measures()) -> None:  # noqa: B008 (a frozen tuple)
        self.profile, self.cluster, self.measures = profile, cluster, measures
        self.outputs = [layer.output_bytes for layer in profile.layers]
        self._times: Dict[Tuple[str, float, int], LayerTimes] = {}
        self._bytes: Dict[int, StageBytes] = {}
        self.links = links_of(cluster)

    @property
    def num_layers(self) -> int:
        return len(self.outputs)

    # ---- time ------------------------------------------------------------------------------------------------------

    def times(self, device: int, samples: float, split: int = 1) -> LayerTimes:
        """Of all layers on devices of the type of ``device``.

        Raises:
            PlanError: the time of a layer on this type is not known.
        """
        one = self.cluster.devices[device]
        key = (one.type, samples, split)
        if key not in self._times:
            found = [layer_seconds(self.profile, layer, one, samples, split) for layer in self.profile.layers]
            again = self.measures.recompute != "none"
            batch = max(samples, self.profile.batch_granularity or 1)
            self._times[key] = LayerTimes(
                [time.forward_s for time in found],
                [time.backward_s + (time.forward_s if again else 0.0) for time in found],
                [batch - min(batch, time.measured_batch) for time in found])
        return self._times[key]

    def group(self, devices: Sequence[int], samples: float, replicas: Optional[int] = None, split: int = 1) -> Group:
        """The stages on a group of devices.

        Args:
            samples: of a micro-batch on one device.
            replicas: number of devices that hold the same parameters, over which ZeRO divides their state; None: all of these.
        """
        return Group(self, devices, samples, len(devices) if replicas is None else replicas, split)

    # ---- communication ---------------------------------------------------------------------------------------------

    def ring(self, devices: Sequence[int]) -> Transfer:
        """The sum of bytes that all devices hold, by a ring all-reduce."""
        return self.links.ring(devices)

    def message(self, senders: Sequence[int], receivers: Sequence[int]) -> Transfer:
        """A micro-batch's tensors from one group of devices to another, one way; see :meth:`Links.message`."""
        return self.links.message(senders, receivers)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def bytes(self, split: int = 1) -> StageBytes:
        if split not in self._bytes:
            self._bytes[split] = self._make_bytes(split)
        return self._bytes[split]

    def _make_bytes(self, split: int) -> StageBytes:
        layers = self.profile.layers
        degrees = [1 if layer.tensor_parallel_bytes is None else split for layer in layers]
        kept = [layer.activation_bytes / degree for layer, degree in zip(layers, degrees)]
        taken = [float(size) for size in (self.outputs[0], *self.outputs[:-1])]  # bytes that layers take from the previous ones
        size = len(layers)
        parameters = np.zeros((size + 1, size + 1))
        for first in range(size):
            seen, total = set(), 0.0
            for end, (layer, degree) in enumerate(zip(layers[first:], degrees[first:]), first + 1):
                if layer.tied is None or layer.tied not in seen:
                    total += layer.parameter_bytes / degree
                seen.add(layer.tied)
                parameters[first, end] = total
        whole, none = interval_sums(kept), np.zeros((size + 1, size + 1))
        again, each = {
            "none": (none, whole), "stage": (whole, np.tile(np.array([*taken, 0.0])[:, None], size + 1)),
        }.get(self.measures.recompute, (_largest(kept), interval_sums(taken)))
        return StageBytes(parameters.tolist(), again.tolist(), each.tolist())


def _largest(values: Sequence[float]) -> np.ndarray:
    """``[first, end]``: the largest of ``values[first:end]``."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        found[first, first + 1:] = np.maximum.accumulate(values[first:])
    return found
