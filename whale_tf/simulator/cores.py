"""Logical devices that share the cores of their process: TensorFlow's executor on CPU devices.

Every process has a pool with as many threads as ops may run at once (``inter_op_parallelism_threads``).  The ops of all its
logical devices run on them.  The rules are those of the executor (tensorflow/core/common_runtime/executor.cc, ``ScheduleReady``)
and of its pool (Eigen's NonBlockingThreadPool):

* when an op ends, the short ops that it makes ready run next on the same thread; if there are none, one long op does.  The
  others go to the front of the thread's queue, as do all ops that a received tensor makes ready.  The order of edges in
  TensorFlow's optimized graph decides which long op continues; here it is the last one that is not in :attr:`Hosts.put_off`;
* a thread without work takes some from the front of its own queue, then from the back of another's; one that has waited for
  work so long that it sleeps has to wake up first (:attr:`Calibration.wake`), and takes what the others have left by then;
* a tensor for another device of the process is handed over by a send on the thread that made it;
* an exchange between processes begins on a thread of each process' pool, and waits in a queue behind everything that is ready, so
  threads with enough to compute begin it late.  From then on it runs in parallel with the ops, one exchange after another;
* an operand that another thread has written is in the other core's cache, from which it takes longer to arrive
  (:attr:`Calibration.far`);
* ops that run at once slow each other down, depending on what limits each (:attr:`Calibration.slow_down`).  So do an exchange
  between processes and their ops: it has its own threads, which take the cores from the ops.
"""

from __future__ import annotations

from collections import deque
from heapq import heappush
from typing import AbstractSet, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.simulator.calibration import COMMUNICATION
from whale_tf.simulator.engine import LOOK, Times, _Engine
from whale_tf.simulator.execution_graph import ExecutionGraph
from whale_tf.simulator.instructions import COMPUTATION, GRADIENT

# Ops whose kernels take less than TensorFlow's kOpIsExpensiveThresholdCycles (8,000) run on the thread that made them ready.
# At 2.6 GHz, the clock of the machine that benchmarks/README.md describes, that is 3.1 us, operands from another core included.
# TensorFlow finds out in the first hundred runs of a session, in which it takes all ops for long.
SHORT_S = 8000 / 2.6e9


class Hosts(NamedTuple):
    """Attributes:
    of_slot: process of each simulated device.
    cores: threads of each process.
    limit_of: what limits the speed of a computation task.
    slowed: (limit, other limit) -> factor.
    wake_s: seconds for which a thread has waited for work -> seconds until it has woken up.
    far_s: bytes of an operand that another thread has written -> additional seconds for an op that reads it.
    operands: task -> (the task that wrote it, bytes) of everything that it reads.
    put_off: computations that go to the queue if another long op becomes ready at the same time.
    """

    of_slot: Sequence[int]
    cores: int
    limit_of: Callable[[int], str]
    slowed: Callable[[str, str], float]
    wake_s: Callable[[float], float]
    far_s: Callable[[float], float]
    operands: Mapping[int, Sequence[Tuple[int, float]]]
    put_off: AbstractSet[int] = frozenset()


def run_on_cores(graph: ExecutionGraph, bandwidths: Sequence[float], hosts: Hosts, sharing: bool, overlap: bool) -> Times:
    """Like :func:`whale_tf.simulator.engine.run`; ``overlap``: whether ops slow each other down.

    Raises:
        PlanError: some tasks wait for each other forever.
    """
    return _OnCores(graph, bandwidths, hosts, sharing, overlap).run()


def operands(graph: ExecutionGraph) -> Dict[int, List[Tuple[int, float]]]:
    """For every computation: (the task that wrote it, bytes) of everything that it reads, including tensors that a send has
    handed over."""
    found: Dict[int, List[Tuple[int, float]]] = {}
    table = graph.buffers
    for buffer, reader in zip(table.reader_buffer.tolist(), table.reader_task.tolist()):
        operand = (int(table.producer[buffer]), float(table.bytes[buffer]))
        if graph.lane[reader] == COMPUTATION:
            found.setdefault(reader, []).append(operand)
        else:
            for receiver in graph.successors[graph.first_successor[reader]:graph.first_successor[reader + 1]]:
                if graph.lane[receiver] == COMPUTATION:
                    found.setdefault(receiver, []).append(operand)
    return found


class _Core:
    """One thread: what it runs, since when it has been idle, when it will have woken up (-1: it is not waking up), what it runs
    next, and its queue."""

    def __init__(self) -> None:
        self.task = -1
        self.idle_since = 0.0
        self.wakes_at = -1.0
        self.next: Deque[int] = deque()
        self.queue: Deque[int] = deque()


class _OnCores(_Engine):
    def __init__(self, graph: ExecutionGraph, bandwidths: Sequence[float], hosts: Hosts, sharing: bool, overlap: bool) -> None:
        super().__init__(graph, bandwidths, [0.0] * len(graph.devices), sharing)
        self.hosts = hosts
        self.overlap = overlap
        self.cores: List[List[_Core]] = [[_Core() for _ in range(hosts.cores)] for _ in range(max(hosts.of_slot) + 1)]
        self.core_of: Dict[int, _Core] = {}  # running and finished computations
        self.exchanges: List[Dict[int, None]] = [{} for _ in self.cores]  # running communications of each process with others
        self.pending: List[Tuple[_Core, int]] = []  # ready computations, with the thread that made them ready
        self.made_by: Dict[int, _Core] = {}
        self.received: Set[int] = set()  # tasks that tensors from other devices made ready
        self.not_taken: Dict[int, int] = {}  # waiting collective -> number of processes of which no thread has taken it
        self.turn = 0

    def _make_ready(self, task: int, ready: List[int]) -> None:
        known = len(ready)
        super()._make_ready(task, ready)
        maker = self.made_by.pop(task, None)
        core = self.core_of.get(task, None if self.graph.lane[task] > 0 else maker)  # tasks without duration: the maker's
        if core is not None:
            self.made_by.update(dict.fromkeys(ready[known:], core))
        if self.graph.lane[task] > 0 or (self.graph.lane[task] < 0 and task in self.received):
            self.received.update(ready[known:])

    def _begin(self, ready: List[int]) -> int:
        at_once = super()._begin(ready)
        by_core: Dict[int, Tuple[_Core, List[int]]] = {}
        for core, task in reversed(self.pending):  # _begin takes the last first
            by_core.setdefault(id(core), (core, []))[1].append(task)
        self.pending = []
        for core, tasks in by_core.values():
            self._schedule(core, tasks)
        for host in range(len(self.cores)):
            self._work(host)
        return at_once

    def _start_computation(self, task: int, duration: float) -> None:
        self._enqueue(task, self.hosts.of_slot[self.graph.slots[task][0]], self.made_by.pop(task, None))

    def _enqueue(self, task: int, host: int, maker: Optional[_Core]) -> None:
        cores = self.cores[host]
        if maker is None or maker not in cores:  # the start of the step, or a tensor from elsewhere
            self.turn += 1
            maker = cores[self.turn % len(cores)]
        self.pending.append((maker, task))

    def _start_communications(self, ready: List[int]) -> None:
        """Communications between devices of one process are short ops on the sender's thread; the others take links."""
        on_links = []
        for task in ready:
            hosts = self._hosts_of(task)
            if len(hosts) == 1:
                self._start_computation(task, self.graph.seconds[task])
            elif self.graph.lane[task] == GRADIENT:
                maker = self.made_by.pop(task, None)
                self.not_taken[task] = len(hosts)
                for host in hosts:
                    self._enqueue(task, host, maker)
            else:
                on_links.append(task)
        super()._start_communications(on_links)

    def _start_communication(self, task: int) -> None:
        super()._start_communication(task)
        for host in self._hosts_of(task):
            self.exchanges[host][task] = None
            self._running_changed(host)

    def _hosts_of(self, task: int) -> List[int]:
        """The processes of a task's devices."""
        return sorted({self.hosts.of_slot[slot] for slot in self.graph.slots[task]})

    def _release(self, task: int) -> None:
        if task in self.core_of:
            self._end_computation(task)
            return
        super()._release(task)
        for host in self._hosts_of(task):
            del self.exchanges[host][task]
            self._running_changed(host)

    def _schedule(self, core: _Core, tasks: Sequence[int]) -> None:
        core.queue.extend(task for task in tasks if task in self.not_taken)
        ops = [task for task in tasks if task not in self.not_taken]
        received = [task for task in ops if task in self.received]
        made_here = [task for task in ops if task not in self.received]
        short = [task for task in made_here if self._is_short(task, core)]
        core.next.extend(short)
        long = sorted((task for task in made_here if task not in short), key=lambda task: task not in self.hosts.put_off)
        if long and not core.next and core.task < 0:
            core.next.append(long.pop())
        core.queue.extendleft(received + long)

    def _is_short(self, task: int, core: _Core) -> bool:
        """Whether an op runs on the thread that made it ready.  Sends do, too."""
        host = self.hosts.of_slot[self.graph.slots[task][0]]
        return self.graph.lane[task] > 0 or self.graph.seconds[task] + self._far_s(task, core, host) < SHORT_S

    def _work(self, host: int) -> None:
        """Let threads without work take some."""
        changed = False
        for core in self.cores[host]:
            while core.task < 0 and self._is_awake(core, host) and self._has_work(core, host):
                task = core.next.popleft()
                if task in self.not_taken:
                    self._taken(task)
                    continue
                core.task = task
                self.core_of[task] = core
                self.start[task] = self.now
                self.left[task] = (self.graph.seconds[task] + self._far_s(task, core, host), self.now, 0.0)
                changed = True
        if changed:
            self._running_changed(host)

    def _is_awake(self, core: _Core, host: int) -> bool:
        """Whether the thread may take work now; if it sleeps and there is some, it begins to wake up."""
        if core.wakes_at < 0 and self.now > core.idle_since and (core.next or any(one.queue for one in self.cores[host])):
            core.wakes_at = self.now + self.hosts.wake_s(self.now - core.idle_since)
            heappush(self.events, (core.wakes_at, LOOK))
        if core.wakes_at > self.now:
            return False
        if core.wakes_at >= 0:
            core.wakes_at, core.idle_since = -1.0, self.now
        return True

    def _far_s(self, task: int, core: _Core, host: int) -> float:
        """Additional time for operands that other threads of the process have written."""
        others = [other for other in self.cores[host] if other is not core]
        reads = self.hosts.operands.get(task, ())
        return sum(self.hosts.far_s(size) for maker, size in reads if self.core_of.get(maker) in others)

    def _has_work(self, core: _Core, host: int) -> bool:
        """Whether there is work for the thread: its own, or some to take from another thread."""
        if not core.next:
            other = max(self.cores[host], key=lambda one: len(one.queue))
            if core.queue:
                core.next.append(core.queue.popleft())
            elif other.queue:
                core.next.append(other.queue.pop())
        return bool(core.next)

    def _taken(self, task: int) -> None:
        """A thread of one more process has begun the collective."""
        self.not_taken[task] -= 1
        if not self.not_taken[task]:
            del self.not_taken[task]
            super()._start_communications([task])

    def _running_changed(self, host: int) -> None:
        self.dirty.update(core.task for core in self.cores[host] if core.task >= 0)
        self.dirty.update(self.exchanges[host])

    def _end_computation(self, task: int) -> None:
        self.left.pop(task, None)
        core = self.core_of[task]
        core.task, core.idle_since = -1, self.now
        self._running_changed(self.hosts.of_slot[self.graph.slots[task][0]])

    def _speed(self, task: int) -> float:
        if task not in self.core_of:
            alone = super()._speed(task)
            beside = [self._slowed(task, COMMUNICATION, host) for host in self._hosts_of(task)] if self.overlap else [0.0]
            return alone / (1.0 + max(beside))  # the slowest process holds up the others
        if not self.overlap or self.graph.lane[task]:
            return 1.0
        host, mine = self.hosts.of_slot[self.graph.slots[task][0]], self.hosts.limit_of(task)
        exchanging = self.hosts.slowed(mine, COMMUNICATION) - 1.0 if self.exchanges[host] else 0.0
        return 1.0 / (1.0 + self._slowed(task, mine, host) + exchanging)

    def _slowed(self, task: int, limit: str, host: int) -> float:
        """By what fraction the other ops that a process runs lengthen a task that ``limit`` limits."""
        others = [core.task for core in self.cores[host] if core.task not in (-1, task) and not self.graph.lane[core.task]]
        return sum(self.hosts.slowed(limit, self.hosts.limit_of(other)) - 1.0 for other in others)
