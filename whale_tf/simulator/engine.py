"""HTAE, the event engine (Proteus section VI): when every task starts and ends.

A device has a computation queue, a feature communication queue and a gradient communication queue.  The execution graph
already orders computations.  A communication starts when it is first in the queues of all its devices.  Queues serve in order
of readiness, with ties broken by instruction.  Two run-time behaviours change speeds while tasks run:

* bandwidth sharing: communications on one link share it fairly (:func:`whale_tf.simulator.network.fair_share`);
* overlap: a computation and a gradient communication on one device slow each other down by ``1 + gamma``.

Both are exact for piecewise constant speeds: whenever the set of running tasks changes, the remaining work of the affected
tasks is updated and their ends are moved.  All events of one instant are handled before any speed is computed, so the answer
does not depend on their order.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Deque, Dict, List, NamedTuple, Sequence, Set, Tuple

from whale_tf.errors import PlanError
from whale_tf.simulator.execution_graph import QUEUES_PER_DEVICE, ExecutionGraph, LinkUse
from whale_tf.simulator.instructions import GRADIENT
from whale_tf.simulator.network import fair_share

EMPTY = float("inf")  # fair share of a link that nothing uses
LOOK = -1  # an event at which no task ends but one may begin


class Times(NamedTuple):
    """Seconds from the start of the step, per task."""

    start: List[float]
    end: List[float]

    @property
    def makespan(self) -> float:
        return max(self.end, default=0.0)


def run(graph: ExecutionGraph, bandwidths: Sequence[float], gammas: Sequence[float], sharing: bool = True,
        overlap: bool = True) -> Times:
    """Simulate the graph.

    Args:
        bandwidths: bytes per second of each link.
        gammas: overlap factor of each simulated device.
        sharing, overlap: switch the two run-time behaviours off.

    Raises:
        PlanError: some tasks wait for each other forever.
    """
    return _Engine(graph, bandwidths, gammas if overlap else [0.0] * len(gammas), sharing).run()


class _Engine:
    def __init__(self, graph: ExecutionGraph, bandwidths: Sequence[float], gammas: Sequence[float], sharing: bool) -> None:
        count, slots = len(graph.seconds), len(graph.devices)
        self.graph, self.bandwidths, self.gammas, self.sharing = graph, bandwidths, gammas, sharing
        self.now = 0.0
        self.start = [0.0] * count
        self.end = [-1.0] * count  # while running: the end as far as is known
        self.done = [False] * count
        self.waits_for = list(graph.waits_for)
        self.events: List[Tuple[float, int]] = []
        # running tasks whose speed is not 1 or may change: (remaining work, at what time, speed)
        self.left: Dict[int, Tuple[float, float, float]] = {}
        self.links = _contended(graph, bandwidths) if sharing else {}
        self.computing = [-1] * slots  # the computation running on each device
        self.reducing = [-1] * slots  # the gradient communication running on each device
        self.queues: List[Deque[int]] = [deque() for _ in range(slots * QUEUES_PER_DEVICE)]
        self.busy = [False] * (slots * QUEUES_PER_DEVICE)
        self.freed: List[int] = []  # queues whose task has just ended
        # link -> running communications -> what each wants of it: (bytes per second alone, number of such communications)
        self.on_link: Dict[int, Dict[int, List[Tuple[float, int]]]] = {}
        self.level: Dict[int, float] = {}  # link -> fair share, bytes per second
        self.dirty_links: Set[int] = set()
        self.dirty: Set[int] = set()  # tasks whose speed has to be computed again

    def run(self) -> Times:
        finished = 0
        ready = [task for task, waits in enumerate(self.waits_for) if not waits]
        while True:
            finished += self._begin(ready)
            if self.dirty or self.dirty_links:
                self._change_speeds()
            if not self.events:
                break
            ready = []
            self.now = now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                task = heappop(self.events)[1]
                if task != LOOK and not self.done[task] and self.end[task] == now:
                    finished += 1
                    self._finish(task, ready)
        if finished < len(self.done):
            raise PlanError(
                f"deadlock: {len(self.done) - finished} of {len(self.done)} tasks never run; tasks {self._blocked()} "
                f"wait for each other")
        return Times(self.start, self.end)

    # ---- one instant ------------------------------------------------------------------------------------------------

    def _finish(self, task: int, ready: List[int]) -> None:
        """A running task ends; tasks that waited only for it become ready."""
        self.done[task] = True
        if self.graph.lane[task]:
            self._release(task)
        else:
            self._end_computation(task)
        self._make_ready(task, ready)

    def _make_ready(self, task: int, ready: List[int]) -> None:
        """Make the tasks ready that waited only for this task, which has ended."""
        graph, waits_for = self.graph, self.waits_for
        for successor in graph.successors[graph.first_successor[task] : graph.first_successor[task + 1]]:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                ready.append(successor)

    def _release(self, task: int) -> None:
        self.left.pop(task, None)
        for queue in self.graph.queues[task]:
            self.busy[queue] = False
            self.freed.append(queue)
        for link, _, _ in self.links.get(task, ()):
            self.on_link[link].pop(task, None)
            self.dirty_links.add(link)
        if self.graph.lane[task] == GRADIENT:
            for slot in self.graph.slots[task]:
                self.reducing[slot] = -1
                if self.computing[slot] >= 0:
                    self.dirty.add(self.computing[slot])

    def _begin(self, ready: List[int]) -> int:
        """Start everything that can start now; returns how many tasks of no duration have ended immediately."""
        now, at_once = self.now, 0
        lanes, seconds = self.graph.lane, self.graph.seconds
        communications: List[int] = []
        while ready:
            task = ready.pop()
            lane = lanes[task]
            if lane > 0:
                communications.append(task)
                continue
            self.start[task] = now
            duration = seconds[task]
            if lane < 0 or duration <= 0.0:
                self.end[task] = now
                self.done[task] = True
                at_once += 1
                self._make_ready(task, ready)
                continue
            self._start_computation(task, duration)
        if communications or self.freed:
            self._start_communications(sorted(communications))
        return at_once

    def _start_computation(self, task: int, duration: float) -> None:
        slot, now = self.graph.slots[task][0], self.now
        self.computing[slot] = task
        if self.reducing[slot] >= 0:
            self.left[task] = (duration, now, 0.0)
            self.dirty.add(task)
            self.dirty.add(self.reducing[slot])
        else:
            self.end[task] = now + duration
            heappush(self.events, (now + duration, task))

    def _end_computation(self, task: int) -> None:
        slot = self.graph.slots[task][0]
        self.computing[slot] = -1
        if task in self.left:
            del self.left[task]
        if self.reducing[slot] >= 0:
            self.dirty.add(self.reducing[slot])

    def _start_communications(self, ready: List[int]) -> None:
        """Queue ready communications; start those that are first in all their queues, if these are free."""
        candidates: Dict[int, None] = {}
        for queue in self.freed:
            if self.queues[queue]:
                candidates[self.queues[queue][0]] = None
        self.freed = []
        for task in ready:
            for queue in self.graph.queues[task]:
                self.queues[queue].append(task)
            candidates[task] = None
        for task in candidates:
            queues = self.graph.queues[task]
            for queue in queues:
                if self.busy[queue] or self.queues[queue][0] != task:
                    break
            else:
                for queue in queues:
                    self.queues[queue].popleft()
                    self.busy[queue] = True
                self._start_communication(task)

    def _start_communication(self, task: int) -> None:
        graph = self.graph
        self.start[task] = self.now
        links, slows = self.links.get(task, ()), graph.lane[task] == GRADIENT
        if not links and not slows:  # nothing changes its speed
            end = self.end[task] = self.now + graph.seconds[task]
            heappush(self.events, (end, task))
            return
        self.left[task] = (graph.seconds[task], self.now, 0.0)
        self.dirty.add(task)
        for link, demand, count in links:
            self.on_link.setdefault(link, {}).setdefault(task, []).append((demand, count))
            self.dirty_links.add(link)
        if slows:
            for slot in graph.slots[task]:
                self.reducing[slot] = task
                running = self.computing[slot]
                if running >= 0 and running not in self.left:
                    self.left[running] = (self.end[running] - self.now, self.now, 1.0)
                if running >= 0:
                    self.dirty.add(running)

    # ---- speeds -----------------------------------------------------------------------------------------------------

    def _change_speeds(self) -> None:
        for link in sorted(self.dirty_links):
            users = self.on_link[link]
            level = fair_share(self.bandwidths[link], [one for wanted in users.values() for one in wanted]) if users else EMPTY
            if level != self.level.get(link):
                self.level[link] = level
                self.dirty.update(users)
        self.dirty_links.clear()
        for task in sorted(self.dirty):
            if not self.done[task] and task in self.left:
                self._set_speed(task, self._speed(task))
        self.dirty.clear()

    def _set_speed(self, task: int, speed: float) -> None:
        left, since, old = self.left[task]
        if speed == old:
            return
        left = max(0.0, left - (self.now - since) * old)
        self.left[task] = (left, self.now, speed)
        end = self.now + left / speed
        if end != self.end[task]:
            self.end[task] = end
            heappush(self.events, (end, task))

    def _speed(self, task: int) -> float:
        graph = self.graph
        slots = graph.slots[task]
        if graph.lane[task] == 0:
            return 1.0 / (1.0 + self.gammas[slots[0]]) if self.reducing[slots[0]] >= 0 else 1.0
        speed = 1.0
        for link, demand, _ in self.links.get(task, ()):
            level = self.level[link]
            if level < demand * speed:
                speed = level / demand
        if graph.lane[task] == GRADIENT:
            gamma = max((self.gammas[slot] for slot in slots if self.computing[slot] >= 0), default=0.0)
            speed /= 1.0 + gamma
        return speed

    def _blocked(self) -> List[int]:
        return [task for task, done in enumerate(self.done) if not done][:5]


def _contended(graph: ExecutionGraph, bandwidths: Sequence[float]) -> Dict[int, Tuple[LinkUse, ...]]:
    """The links of the communications that have to share some, without those that have room for all communications that can run
    at once: of those in one queue, one at a time does."""
    kinds = {(id(uses), id(graph.queues[task])): (uses, graph.queues[task]) for task, uses in graph.links.items()}
    most: Dict[int, Dict[int, float]] = {}  # link -> queue -> the most that a communication of the queue takes, bytes per second
    for uses, queues in kinds.values():
        taken: Dict[int, float] = {}
        for link, demand, count in uses:
            taken[link] = taken.get(link, 0.0) + demand * count
        for link, rate in taken.items():
            of_link = most.setdefault(link, {})
            queue = queues[0] if queues else LOOK
            of_link[queue] = max(rate, of_link.get(queue, 0.0))
    full = {link for link, of_link in most.items() if LOOK in of_link or sum(of_link.values()) > bandwidths[link]}
    kept = {id(uses): tuple(use for use in uses if use[0] in full) for uses, _ in kinds.values()}
    return {task: kept[id(uses)] for task, uses in graph.links.items() if kept[id(uses)]}
