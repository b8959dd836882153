"""Single tasks: computations and messages between devices, what they wait for, and the buffers that they write and read."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.simulator.buffers import NO_BUFFERS, BufferTable
from whale_tf.simulator.calibration import MEMORY
from whale_tf.simulator.cores import Hosts, run_on_cores
from whale_tf.simulator.costs import DEFAULT_GAMMA
from whale_tf.simulator.engine import Times, run
from whale_tf.simulator.execution_graph import ExecutionGraph, LinkUse, queue_of
from whale_tf.simulator.instructions import COMPUTATION, SCRATCH, BlockKey, Buffer, DeviceClasses, Instruction
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
    """Columns with an entry for each task or buffer; a large step has so many that an object for each would take longer than the
    rest.

    Attributes:
        names, blocks, lanes: of each task, as in :class:`whale_tf.simulator.instructions.Instruction`.
        limits: what limits each task's speed (:data:`whale_tf.simulator.calibration.MEMORY` or ``ARITHMETIC``).
        chains: the ops of each call on each device, in the graph's order, if they are a step's.
    """

    def __init__(self, cluster: Cluster, network: Network, used: Optional[Sequence[int]] = None, in_queues: bool = True) -> None:
        """Args:
        used: devices that take part; None: all.
        in_queues: a device sends and receives one message at a time; otherwise all messages in transit share the links.
        """
        self.cluster, self.network, self.in_queues = cluster, network, in_queues
        self.used = tuple(range(len(cluster)) if used is None else used)
        self._slot = {device: slot for slot, device in enumerate(self.used)}
        self.names: List[str] = []
        self.blocks: List[BlockKey] = []
        self.lanes: List[int] = []
        self.limits: List[str] = []
        self.chains: Sequence[Sequence[int]] = ()
        self.matrix_flops: Dict[int, float] = dict.fromkeys(self.used, 0.0)  # of each device
        self.devices: List[Tuple[int, ...]] = []
        self._seconds: List[float] = []
        self._micro_batch: List[int] = []
        self._sent: Dict[int, Tuple[Group, float]] = {}
        self._queues: Dict[int, Tuple[int, ...]] = {}
        self._links: Dict[int, Tuple[LinkUse, ...]] = {}
        self._sources: List[int] = []  # of each edge, the task that ends first, and in _targets the one that waits for it
        self._targets: List[int] = []
        self._buffer_names: List[str] = []
        self._categories: List[str] = []
        self._producers: List[int] = []
        self.buffer_devices: List[int] = []
        self._sizes: List[float] = []
        self._readers: Dict[Tuple[int, int], bool] = {}  # (buffer, task) -> whether the task may overwrite the buffer

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def add(self, lane: int, seconds: float, devices: Tuple[int, ...], waits: Sequence[int] = (), about: About = About(),  # noqa: B008
            limit: str = MEMORY) -> int:
        task = len(self.lanes)
        self.names.append(about.name)
        self.blocks.append((about.task_graph, about.label))
        self.lanes.append(lane)
        self.limits.append(limit)
        self.devices.append(devices)
        self._seconds.append(seconds)
        self._micro_batch.append(about.micro_batch)
        self.wait(task, waits)
        return task

    def compute(self, names: Sequence[str], blocks: Sequence[BlockKey], seconds: Sequence[float], limits: Sequence[str],
                devices: Sequence[Tuple[int, ...]], micro_batch: int) -> int:
        """Add computations of one micro-batch; returns the first one's number, after which the others follow."""
        first = len(self.lanes)
        self.names += names
        self.blocks += blocks
        self.lanes += [COMPUTATION] * len(names)
        self.limits += limits
        self.devices += devices
        self._seconds += seconds
        self._micro_batch += [micro_batch] * len(names)
        return first

    def wait(self, task: int, before: Iterable[int]) -> None:
        for source in before:
            if source != START:
                self._sources.append(source)
                self._targets.append(task)

    def communicate(self, kind: str, group: Group, size: float, lane: int, waits: Sequence[int],
                    about: About = About()) -> int:  # noqa: B008
        """Add a collective of ``size`` bytes (as :class:`whale_tf.simulator.transformation.Communication` counts them), or
        messages that are sent at once, each with the fraction of ``size`` that its pair in the group has."""
        best = self.network.best(kind, group, size)
        seconds = best.latency_s + size * best.seconds_per_byte
        task = self.add(lane, seconds, group.devices, waits, about)
        self._sent[task] = group, size
        ends = [end for sender, receiver, _ in group.pairs for end in ((sender, False), (receiver, True)) if self.in_queues]
        if not group.pairs:
            ends = [(device, False) for device in group.devices]
        self._queues[task] = tuple(sorted({queue_of(self._slot[device], lane, incoming) for device, incoming in ends}))
        if seconds > 0:
            self._links[task] = tuple((link, load * size / seconds, 1) for link, load in best.loads)
        return task

    def group(self, task: int) -> Optional[Group]:
        """The devices that a communication is between; None: the task computes."""
        return self._sent[task][0] if task in self._sent else None

    @property
    def instructions(self) -> List[Instruction]:
        """An object for each task."""
        found = [Instruction(task, *row, row[1][1]) for task, row in enumerate(zip(self.names, self.blocks, self.lanes))]
        for task, (group, size) in self._sent.items():
            found[task].groups, found[task].size_bytes = (group,), size
        return found

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def buffer(self, name: str, category: str, task: int, device: int, size: float) -> int:
        """Add a buffer that a task writes; -1 if its size is 0."""
        if size <= 0.0:
            return -1
        self._buffer_names.append(name)
        self._categories.append(category)
        self._producers.append(task)
        self.buffer_devices.append(device)
        self._sizes.append(size)
        return len(self._sizes) - 1

    def read(self, task: int, buffer: int, may_overwrite: bool = False) -> None:
        """Add a reader; ``may_overwrite``: by a result of the buffer's size, if nobody reads the buffer later."""
        if buffer >= 0:
            self._readers[buffer, task] = may_overwrite or self._readers.get((buffer, task), False)

    @property
    def buffers(self) -> List[Buffer]:
        """An object for each buffer."""
        rows = zip(self._buffer_names, self._categories, self._producers, self.buffer_devices, self._sizes)
        return [Buffer(name, category, task, DeviceClasses((device,), (0,), (0,)), (size,))
                for name, category, task, device, size in rows]

    # ---- one computation at a time -----------------------------------------------------------------------------------

    def take_turns(self, chains: Sequence[Sequence[int]]) -> None:
        """From here on, a device does one computation at a time: the first of the ops that are ready; and, in parallel with ops,
        one addition at a time.

        A task that waits for itself is left out, with everything that waits for it; the engine names it.

        Args:
            chains: ops in the order in which they run.
        """
        for chain in chains:
            self._sources += chain[:-1]
            self._targets += chain[1:]
        total, ops = len(self.lanes), {task for chain in chains for task in chain}
        after, first, count = self._edges()
        turn = [task + total if task in ops else task for task in range(total)]  # ops come after all others that are ready
        ready = [turn[task] for task, waits in enumerate(count) if not waits]
        heapify(ready)
        last: Dict[Tuple[int, bool], int] = {}
        while ready:
            task = heappop(ready)
            is_op = task >= total
            task -= total * is_op
            if self.lanes[task] == COMPUTATION:
                key = self.devices[task][0], is_op
                if key in last:
                    self._sources.append(last[key])
                    self._targets.append(task)
                last[key] = task
            for later in after[first[task]:first[task + 1]]:
                count[later] -= 1
                if not count[later]:
                    heappush(ready, turn[later])

    # ---- all of them -------------------------------------------------------------------------------------------------

    def _edges(self) -> Tuple[List[int], List[int], List[int]]:
        """The tasks that wait for task ``t``, from ``first[t]`` to ``first[t + 1]``; ``first``; and for how many each waits."""
        total = len(self.lanes)
        sources, targets = np.array(self._sources, np.int64), np.array(self._targets, np.int64)
        first = np.zeros(total + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=total), out=first[1:])
        waits = np.bincount(targets, minlength=total).tolist()
        return targets[np.argsort(sources, kind="stable")].tolist(), first.tolist(), waits

    def graph(self, with_buffers: bool = True) -> ExecutionGraph:
        """``with_buffers``: otherwise only times can be computed."""
        successors, first, waits = self._edges()
        return ExecutionGraph(
            self._seconds, self.lanes, [task if way >= 0 else -1 for task, way in enumerate(self.lanes)], self._micro_batch,
            [tuple([self._slot[device] for device in devices]) for devices in self.devices], self._queues, self._links,
            successors, first, waits, self.used, {}, self._buffer_table() if with_buffers else NO_BUFFERS)

    def _buffer_table(self) -> BufferTable:
        written = {(task, size) for task, size, category in zip(self._producers, self._sizes, self._categories)
                   if category != SCRATCH}
        readers = np.array(list(self._readers), np.int64).reshape(-1, 2)
        overwritten = [may and (task, self._sizes[buffer]) in written for (buffer, task), may in self._readers.items()]
        return BufferTable(
            np.array([self._slot[device] for device in self.buffer_devices], np.int64), np.array(self._sizes, np.float64),
            np.arange(len(self._sizes)), np.array(self._producers, np.int64), readers[:, 0], readers[:, 1],
            np.array(overwritten, bool))

    def times(self, graph: ExecutionGraph) -> Times:
        """The times at which the tasks run."""
        return run(graph, self.network.bandwidths, [DEFAULT_GAMMA[self.cluster.devices[device].kind] for device in self.used])

    def times_on_cores(self, graph: ExecutionGraph, cores: int, chains: Sequence[Sequence[int]],
                       process_of: Optional[Mapping[int, int]] = None) -> Times:
        """The times if the devices of each node share so many threads, which do not slow each other down.  A thread continues
        with an op of a call (``chains``) and puts off additions.

        Args:
            process_of: device -> its process, 0 if it is missing; then the devices of a process share the threads.
        """
        ops = {task for chain in chains for task in chain}
        node_of = [device.node if process_of is None else process_of.get(number, 0)
                   for number, device in enumerate(self.cluster.devices)]
        busy = sorted({node_of[device] for devices in self.devices for device in devices})
        host_of = {node: host for host, node in enumerate(busy)}
        put_off = {task for task, lane in enumerate(self.lanes) if lane == COMPUTATION}.difference(ops)
        hosts = Hosts([host_of.get(node_of[device], 0) for device in self.used], cores, lambda task: MEMORY,
                      lambda one, other: 1.0, lambda waited: 0.0, lambda size: 0.0, {}, put_off)
        return run_on_cores(graph, self.network.bandwidths, hosts, sharing=True, overlap=False)

    def makespan(self) -> float:
        """Seconds until everything is done."""
        return self.times(self.graph(with_buffers=False)).makespan
