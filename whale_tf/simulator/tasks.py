"""Single tasks: computations and messages between devices, what they wait for, and the buffers that they write and read."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.simulator.buffers import BufferTable
from whale_tf.simulator.calibration import MEMORY
from whale_tf.simulator.cores import Hosts, run_on_cores
from whale_tf.simulator.costs import DEFAULT_GAMMA
from whale_tf.simulator.engine import Times, run
from whale_tf.simulator.execution_graph import ExecutionGraph, LinkUse, queue_of
from whale_tf.simulator.instructions import COMPUTATION, SCRATCH, Buffer, Instruction, Parts
from whale_tf.simulator.network import Network
from whale_tf.simulator.transformation import Group

START = -1  # instead of a task: exists from the start
NOTHING = -1  # lane of a task that only waits


class About(NamedTuple):
    """What a timeline says about a task; ``label``: as in :class:`whale_tf.simulator.instructions.Instruction`; micro-batch -1:
    it belongs to none."""

    name: str = ""
    label: str = ""
    task_graph: int = 0
    micro_batch: int = -1


class Tasks:
    """Attributes:
    limits: what limits each task's speed (:data:`whale_tf.simulator.calibration.MEMORY` or ``ARITHMETIC``).
    """

    def __init__(self, cluster: Cluster, network: Network, used: Optional[Sequence[int]] = None, in_queues: bool = True) -> None:
        """Args:
        used: devices that take part; None: all.
        in_queues: a device sends and receives one message at a time; otherwise all messages in transit share the links.
        """
        self.cluster, self.network, self.in_queues = cluster, network, in_queues
        self.used = tuple(range(len(cluster)) if used is None else used)
        self._slot = {device: slot for slot, device in enumerate(self.used)}
        self.instructions: List[Instruction] = []
        self.buffers: List[Buffer] = []
        self.limits: List[str] = []
        self.matrix_flops: Dict[int, float] = dict.fromkeys(self.used, 0.0)  # of each device
        self.devices: List[Tuple[int, ...]] = []
        self._seconds: List[float] = []
        self._micro_batch: List[int] = []
        self._queues: Dict[int, Tuple[int, ...]] = {}
        self._links: Dict[int, Tuple[LinkUse, ...]] = {}
        self._edges: Dict[Tuple[int, int], None] = {}
        self._readers: Dict[Tuple[int, int], bool] = {}  # (buffer, task) -> whether the task may overwrite the buffer

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def add(self, lane: int, seconds: float, devices: Tuple[int, ...], waits: Sequence[int] = (), about: About = About(),  # noqa: B008
            limit: str = MEMORY) -> int:
        task = len(self.instructions)
        self.instructions.append(Instruction(task, about.name, (about.task_graph, about.label), lane, about.label))
        self.limits.append(limit)
        self.devices.append(devices)
        self._seconds.append(seconds)
        self._micro_batch.append(about.micro_batch)
        self.wait(task, waits)
        return task

    def wait(self, task: int, before: Sequence[int]) -> None:
        for source in before:
            if source != START:
                self._edges[source, task] = None

    def communicate(self, kind: str, group: Group, size: float, lane: int, waits: Sequence[int],
                    about: About = About()) -> int:  # noqa: B008
        """Add a collective of ``size`` bytes (as :class:`whale_tf.simulator.transformation.Communication` counts them), or
        messages that are sent at once, each with the fraction of ``size`` that its pair in the group has."""
        best = self.network.best(kind, group, size)
        seconds = best.latency_s + size * best.seconds_per_byte
        task = self.add(lane, seconds, group.devices, waits, about)
        self.instructions[task].groups, self.instructions[task].size_bytes = (group,), size
        ends = [end for sender, receiver, _ in group.pairs for end in ((sender, False), (receiver, True)) if self.in_queues]
        if not group.pairs:
            ends = [(device, False) for device in group.devices]
        self._queues[task] = tuple(sorted({queue_of(self._slot[device], lane, incoming) for device, incoming in ends}))
        if seconds > 0:
            self._links[task] = tuple((link, load * size / seconds, 1) for link, load in best.loads)
        return task

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def buffer(self, name: str, category: str, task: int, device: int, size: float) -> int:
        """Add a buffer that a task writes; -1 if its size is 0."""
        if size <= 0.0:
            return -1
        self.buffers.append(Buffer(name, category, task, Parts((device,), (0,), (0,)), (size,)))
        return len(self.buffers) - 1

    def read(self, task: int, buffer: int, may_overwrite: bool = False) -> None:
        """Add a reader; ``may_overwrite``: by a result of the buffer's size, if nobody reads the buffer later."""
        if buffer >= 0:
            self._readers[buffer, task] = may_overwrite or self._readers.get((buffer, task), False)

    # ---- one computation at a time -----------------------------------------------------------------------------------

    def take_turns(self, chains: Sequence[Sequence[int]]) -> None:
        """From here on, a device does one computation at a time: the first of the ops that are ready; and, in parallel with ops,
        one addition at a time.

        A task that waits for itself is left out, with everything that waits for it; the engine names it.

        Args:
            chains: ops in the order in which they run.
        """
        for chain in chains:
            for before, task in zip(chain, chain[1:]):
                self._edges[before, task] = None
        ops = {task for chain in chains for task in chain}
        after: Dict[int, List[int]] = {}
        count = [0] * len(self.instructions)
        for source, task in self._edges:
            after.setdefault(source, []).append(task)
            count[task] += 1
        ready = [(task in ops, task) for task, waits in enumerate(count) if not waits]
        heapify(ready)
        last: Dict[Tuple[int, bool], int] = {}
        while ready:
            is_op, task = heappop(ready)
            if self.instructions[task].lane == COMPUTATION:
                key = self.devices[task][0], is_op
                self.wait(task, [last.get(key, START)])
                last[key] = task
            for later in after.get(task, ()):
                count[later] -= 1
                if not count[later]:
                    heappush(ready, (later in ops, later))

    # ---- all of them -------------------------------------------------------------------------------------------------

    def graph(self) -> ExecutionGraph:
        total = len(self.instructions)
        pairs = np.array(list(self._edges), np.int64).reshape(-1, 2)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        first = np.zeros(total + 1, np.int64)
        np.cumsum(np.bincount(pairs[:, 0], minlength=total), out=first[1:])
        lane = [instruction.lane for instruction in self.instructions]
        readers = np.array(list(self._readers), np.int64).reshape(-1, 2)
        written = {(buffer.producer, buffer.bytes) for buffer in self.buffers if buffer.category != SCRATCH}
        buffers = BufferTable(
            np.array([self._slot[buffer.parts.devices[0]] for buffer in self.buffers], np.int64),
            np.array([buffer.bytes[0] for buffer in self.buffers], np.float64), np.arange(len(self.buffers)),
            np.array([buffer.producer for buffer in self.buffers], np.int64), readers[:, 0], readers[:, 1],
            np.array([may and (task, self.buffers[one].bytes) in written for (one, task), may in self._readers.items()], bool))
        return ExecutionGraph(
            self._seconds, lane, [task if way >= 0 else -1 for task, way in enumerate(lane)], self._micro_batch,
            [tuple(self._slot[device] for device in devices) for devices in self.devices], self._queues, self._links,
            pairs[:, 1].tolist(), first.tolist(), np.bincount(pairs[:, 1], minlength=total).tolist(), self.used, {}, buffers)

    def times(self, graph: ExecutionGraph) -> Times:
        """The times at which the tasks run."""
        return run(graph, self.network.bandwidths, [DEFAULT_GAMMA[self.cluster.devices[device].kind] for device in self.used])

    def times_on_cores(self, graph: ExecutionGraph, cores: int, chains: Sequence[Sequence[int]]) -> Times:
        """The times if the devices of each node share so many threads, which do not slow each other down.  A thread continues
        with an op of a call (``chains``) and puts off additions."""
        nodes, ops = [self.cluster.devices[device].node for device in self.used], {task for chain in chains for task in chain}
        hosts = Hosts(nodes, cores, lambda task: MEMORY, lambda one, other: 1.0, lambda waited: 0.0, lambda size: 0.0, {},
                      {one.id for one in self.instructions if one.lane == COMPUTATION}.difference(ops))
        return run_on_cores(graph, self.network.bandwidths, hosts, sharing=True, overlap=False)

    def makespan(self) -> float:
        """Seconds until everything is done."""
        return self.times(self.graph()).makespan
