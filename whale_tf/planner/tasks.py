"""A list of computations and messages between devices, played by the simulator's engine."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.patterns.moves import Recipe
from whale_tf.profiler.op_cost import OpCost
from whale_tf.profiler.op_time import op_seconds
from whale_tf.simulator.buffers import BufferRows
from whale_tf.simulator.engine import run
from whale_tf.simulator.execution_graph import ExecutionGraph, LinkUse, queue_of
from whale_tf.simulator.network import Network
from whale_tf.simulator.program import COMPUTATION, FEATURE
from whale_tf.simulator.simulate import Options, gamma_of
from whale_tf.simulator.transformation import SEND_RECV, Group, Pair

START = -1  # in place of a task: there from the start
NOTHING = -1  # lane of a task that only waits


class Tasks:
    """Computations of a device run in the order they are added; messages when what they send is there and the way is free."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._network = Network(cluster)
        self._seconds: List[float] = []
        self._lane: List[int] = []
        self._slots: List[Tuple[int, ...]] = []
        self._queues: Dict[int, Tuple[int, ...]] = {}
        self._links: Dict[int, Tuple[LinkUse, ...]] = {}
        self._edges: List[Tuple[int, int]] = []
        self._last = [START] * len(cluster)  # computation of each device
        self._last_added = [START] * len(cluster)  # addition beside them

    def compute(self, device: int, seconds: float, waits: Sequence[int]) -> int:
        """What takes no time is done as soon as what it waits for is."""
        if not seconds:
            return self.join(waits)
        task = self._add(COMPUTATION, seconds, (device,), [*waits, self._last[device]])
        self._last[device] = task
        return task

    def send(self, size: float, pairs: Sequence[Pair], waits: Sequence[int]) -> int:
        """One message for each pair (sender, receiver, fraction of ``size`` bytes), all at once."""
        pairs = [pair for pair in pairs if pair[2] > 0.0]
        if not pairs or not size:
            return self.join(waits)
        devices = tuple(sorted({end for pair in pairs for end in pair[:2]}))
        best = self._network.best(SEND_RECV, Group(devices, tuple(pairs)), size)
        seconds = best.latency_s + size * best.seconds_per_byte
        task = self._add(FEATURE, seconds, devices, waits)
        sending = {queue_of(j, FEATURE) for j, _, _ in pairs}
        receiving = {queue_of(i, FEATURE, incoming=True) for _, i, _ in pairs}
        self._queues[task] = tuple(sorted(sending | receiving))
        if seconds > 0:
            self._links[task] = tuple((link, load * size / seconds, 1) for link, load in best.loads)
        return task

    def add_up(self, device: int, moved: float, waits: Sequence[int]) -> int:
        """An addition that moves so many bytes through the device's memory, beside its computations."""
        seconds = op_seconds(OpCost(0.0, moved), self.cluster.devices[device], "float32")
        self._last_added[device] = task = self._add(COMPUTATION, seconds, (device,), [*waits, self._last_added[device]])
        return task

    def carry_out(self, recipe: Recipe, size: float, devices: Sequence[int], ready: Sequence[int],
                  beside: bool = False) -> List[int]:
        """What each device waits for after a recipe.

        Args:
            size: bytes of the tensor.
            ready: the task that makes each device's part.
            beside: additions do not wait for the computations that were added before them.
        """
        done = list(ready)
        for step in recipe:
            ways = list(step.messages)
            pairs = [(devices[j], devices[i], part) for j, i, part in ways]
            sent = self.send(size, pairs, [done[j] for j in sorted({j for j, _, _ in ways})])
            for i in {i for _, i, _ in ways}:
                done[i] = sent if not step.added else self.join([done[i], sent])
            for i, part in step.added:
                moved = size * part * (step.devices + 1)
                adding = op_seconds(OpCost(0.0, moved), self.cluster.devices[devices[i]], "float32")
                done[i] = self.add_up(devices[i], moved, [done[i]]) if beside else self.compute(devices[i], adding, [done[i]])
        return done

    def join(self, waits: Sequence[int]) -> int:
        behind = sorted({task for task in waits if task != START})
        if len(behind) < 2:
            return behind[0] if behind else START
        return self._add(NOTHING, 0.0, (), behind)

    def makespan(self) -> float:
        """Seconds until all is done."""
        total = len(self._seconds)
        pairs = np.array(sorted(set(self._edges)), np.int64).reshape(-1, 2)
        first = np.zeros(total + 1, np.int64)
        np.cumsum(np.bincount(pairs[:, 0], minlength=total), out=first[1:])
        graph = ExecutionGraph(
            self._seconds, self._lane, list(range(total)), [0] * total, self._slots, self._queues, self._links,
            pairs[:, 1].tolist(), first.tolist(), np.bincount(pairs[:, 1], minlength=total).tolist(),
            tuple(range(len(self.cluster))), {}, BufferRows().unfold({}, 0))
        gammas = [gamma_of(self.cluster, device, Options()) for device in range(len(self.cluster))]
        return run(graph, self._network.bandwidths, gammas).makespan

    def _add(self, lane: int, seconds: float, slots: Tuple[int, ...], waits: Sequence[int]) -> int:
        task = len(self._seconds)
        self._seconds.append(seconds)
        self._lane.append(lane)
        self._slots.append(slots)
        self._edges.extend((source, task) for source in set(waits) if source != START)
        return task
