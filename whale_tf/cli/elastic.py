"""A job whose number of processes changes from one start to the next: it goes on without workers that are lost, and takes them in
again when they are back.

::

    all workers ──> worker 2 is lost ──> the others are ended ───────────────────> start without it
                ──> worker 2 is back ──> all take a snapshot and end (SIGTERM) ──> start with it
                ──> whale_tf refuses so few (status 78) ─────────────────────────> start with fewer, until more are back
                ──> these lack parts of snapshots (status 79) ───────────────────> wait for others
                ──> the script fails by itself ──────────────────────────────────> end, or start again while --max-restarts lasts

A worker is a slot for a process: its number stays, while processes are numbered anew in each start.
"""
from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.cli.group import Group, Job, NotStarted, WorkerHost, keeper_of
from whale_tf.cli.warm import Warm
from whale_tf.cluster.processes import CHANGE
from whale_tf.errors import ClusterError
from whale_tf.processes.endings import REFUSED_STATUS, SCATTERED_STATUS
from whale_tf.processes.watch import EXIT_STATUS, TERMINATED_STATUS

SAME_S = 0.5  # other processes of a lost host are noticed within this time
CULPRIT_S = 10.0  # from the end of a process that has lost another to the notice of the other
PROBE_S, PROBE_LIMIT_S = 10.0, 20.0  # between two questions to a lost host, and for the answer
WAIT_S = 0.2
_RATE = re.compile(r"^(\d+)(?:/(\d+(?:\.\d+)?)([smh]))?$")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Rate(NamedTuple):
    """So many times, within so many seconds; None: altogether."""

    times: int
    seconds: Optional[float] = None

    @classmethod
    def parse(cls, text: str, option: str) -> Rate:
        """``"3"``, ``"3/10m"``.

        Raises:
            ClusterError: it is neither.
        """
        found = _RATE.match(text)
        if found is None:
            raise ClusterError(f"{option} is {text!r}, expected a number, or one for a time such as 3/1h, 3/10m or 3/90s")
        count, length, unit = found.groups()
        return cls(int(count), float(length) * _UNITS[unit] if length else None)

    def __str__(self) -> str:
        return f"{self.times}" if self.seconds is None else f"{self.times} times in {self.seconds:g} s"


class Events:
    """Counts events against a rate."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._times: Deque[float] = deque()

    def count(self, now: float) -> int:
        """How many there are that still count at the time ``now`` (seconds)."""
        while self._times and self.rate.seconds is not None and now - self._times[0] > self.rate.seconds:
            self._times.popleft()
        return len(self._times)

    def add(self, now: float) -> int:
        """One more; the number of all that count."""
        self._times.append(now)
        return self.count(now)

    def spend(self, now: float) -> bool:
        """One more, if the rate allows it."""
        if self.count(now) >= self.rate.times:
            return False
        self.add(now)
        return True


class Members:
    """Which workers there are, and how many of them may train.

    Args:
        count: of all workers.
        least: of those that train.
        flapping: a worker that is lost so often is left out for good.
        devices: what each has; workers with equal ones stand in for each other.  Default: all have the same.

    Attributes:
        lost: workers that are lost, and when.
        left_out: those that are never taken in again.
    """

    def __init__(self, count: int, least: int, flapping: Rate, devices: Sequence[Hashable] = ()) -> None:
        self._count, self.least = count, least
        kinds = list(devices) or [None] * count
        self._kinds = [kinds.index(kind) for kind in kinds]
        self._losses = [Events(flapping) for _ in range(count)]
        self.lost: Dict[int, float] = {}
        self.left_out: Set[int] = set()
        self._refused: Set[Tuple[int, ...]] = set()  # kinds of workers that do not fit the script, for good
        self._scattered: List[Set[int]] = []  # workers that lack parts of snapshots, until training has gone on

    def chosen(self) -> List[int]:
        """The workers that train: as many as are there and fit; none: they are too few."""
        return self._most(worker for worker in range(self._count) if worker not in self.lost)

    def _most(self, workers: Iterable[int]) -> List[int]:
        """The greatest number of these that may be tried.  Of each number there are at most as many choices as workers."""
        ring = sorted(workers, key=lambda worker: (self._kinds[worker], worker))
        for number in range(len(ring), self.least - 1, -1):
            for first in range(len(ring)):
                some = (ring + ring)[first:first + number]
                if self._of(some) not in self._refused and not any(scattered.issuperset(some) for scattered in self._scattered):
                    return sorted(some)
        return []

    def _of(self, workers: Iterable[int]) -> Tuple[int, ...]:
        return tuple(sorted(self._kinds[worker] for worker in workers))

    def refuse(self, workers: Sequence[int]) -> None:
        """whale_tf refuses the script on these, and thus on as many others of their kinds."""
        self._refused.add(self._of(workers))

    def scatter(self, workers: Sequence[int]) -> None:
        """These lack parts of snapshots.  So do fewer of them, but not others."""
        self._scattered.append(set(workers))

    def have_gone_on(self) -> None:
        """There may be other snapshots since then."""
        self._scattered.clear()

    def lose(self, worker: int, now: float) -> bool:
        """A worker is lost; whether it is left out from now on."""
        self.lost[worker] = now
        if self._losses[worker].add(now) >= self._losses[worker].rate.times:
            self.left_out.add(worker)
        return worker in self.left_out

    def returning(self) -> List[int]:
        """Lost workers that may come back."""
        return [worker for worker in sorted(self.lost) if worker not in self.left_out]

    def back(self, worker: int) -> None:
        """A worker is there again."""
        del self.lost[worker]

    def demand(self) -> str:
        """How many must train, and why."""
        numbers = sorted({len(kinds) for kinds in self._refused})
        refused = f", and whale_tf refuses {', '.join(map(str, numbers))}" if numbers else ""
        scattered = ", and those that are there lack parts of snapshots" if self._scattered else ""
        return f"--workers asks for at least {self.least}{refused}{scattered}"

    def could_be_enough(self) -> bool:
        """Whether enough workers would be there if all came back that may, and some number of them fits."""
        return bool(self._most(worker for worker in range(self._count) if worker not in self.left_out))


def fate(status: int) -> str:
    """What the exit status of a worker says about it.

    "done"; "lost": it ended by a signal, or its connection broke; "taken": it was asked to end, and not by us; "left": it has
    lost another; "refused": whale_tf cannot run the script on so few; "scattered": they lack parts of snapshots; "failed": by a
    mistake of the script.
    """
    if status == 0:
        return "done"
    if status in (TERMINATED_STATUS, -signal.SIGTERM):
        return "taken"
    if status < 0 or status == 255 or status - 128 in [each.value for each in signal.Signals]:
        return "lost"
    return {EXIT_STATUS: "left", REFUSED_STATUS: "refused", SCATTERED_STATUS: "scattered"}.get(status, "failed")


def patience(statuses: Mapping[int, int]) -> float:
    """Seconds, from the first failure, in which other processes may end by themselves: the first to end need not be at fault."""
    fates = set(map(fate, statuses.values()))
    if "taken" in fates:
        return CULPRIT_S  # all end in their own time, after a snapshot
    return SAME_S if fates & {"lost", "refused", "scattered"} else CULPRIT_S


class Interrupted(BaseException):
    """A signal asks the job to end while none of its processes run.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Elastic:
    """See the module's docstring.

    Args:
        command: that each process runs.
        worker_hosts: of all workers.
        least: how many must train.
        variables: environment variables of the processes of some workers.
        grace_s: seconds between SIGTERM and SIGKILL.
        restarts: how often to start again after the script's own failures.
        flapping: a worker that is lost so often is left out.
        rejoin_s: seconds from a loss until the worker may be taken in again (SIGUSR2: at once).
        wait_s: seconds to wait for workers if too few are left.
        warm: whether processes of this machine are forks of one that has imported TensorFlow, from the second start on.
        devices: what each worker has (:class:`Members`).
    """

    def __init__(self, command: Sequence[str], worker_hosts: Sequence[WorkerHost], least: int,
                 variables: Callable[[Sequence[int]], Dict[str, str]], grace_s: float, restarts: Rate, flapping: Rate,
                 rejoin_s: float, wait_s: float, warm: bool, devices: Sequence[Hashable] = ()) -> None:
        self._command, self._worker_hosts, self._variables, self._grace_s = command, worker_hosts, variables, grace_s
        self._members = Members(len(worker_hosts), least, flapping, devices)
        self._restarts, self._flapping, self._nobodys = Events(restarts), flapping, Events(flapping)
        self._rejoin_s, self._wait_s = rejoin_s, wait_s
        self._warm = Warm(say) if warm and not all(host.ssh for host in worker_hosts) else None
        self._workers: Sequence[int] = ()  # that train now
        self._begin = 0.0
        self._hurries = False  # SIGUSR2 has come
        self._has_asked = False  # these processes to end, so that more can start
        self._probes: Dict[int, subprocess.Popen] = {}
        self._probed: Dict[int, float] = {}
        self._change: Dict[str, Any] = {}

    def run(self) -> int:
        """Starts processes again and again, until they have done their work, or cannot go on.

        Returns:
            The exit status: 0, or that of a process that has failed; 128 and the number of a signal that has come while none ran.
        """
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._hurry)
        try:
            return self._run()
        except Interrupted as end:
            say(f"{signal.Signals(end.number).name}: ending before all processes have started again")
            return 128 + end.number
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for probe in self._probes.values():
                probe.kill()
                probe.wait()
            if self._warm is not None:
                self._warm.close()

    def _run(self) -> int:
        status = 1
        while True:
            if not self._are_enough():
                return status
            try:
                group = self._group()
            except NotStarted as error:
                say(str(error))
                self._lose({self._workers[error.index]: "it cannot be started"}, time.time())
                continue
            status = group.wait(patience, self._must_end)
            if status == 0 or group.interrupted:
                if status:
                    say(group.failure)
                return status
            if not self._goes_on(group):
                return status

    def _group(self) -> Group:
        self._workers, self._begin = self._members.chosen(), time.monotonic()
        self._hurries = self._has_asked = False
        worker_hosts = [self._worker_hosts[worker] for worker in self._workers]
        if self._change:
            say(f"starting {self._named(self._workers)}")
        variables = self._variables(self._workers)
        if self._change:
            variables[CHANGE] = json.dumps(self._change)
        if self._warm is not None:
            variables.update(self._warm.variables)
        return Group(self._command, worker_hosts, lambda ports: Job(
            [f"{host.name}:{port}" for host, port in zip(worker_hosts, ports)], 0, variables), self._grace_s,
            keeper_of if self._warm is None else self._warm.keeper)

    # ------------------------------------------------------------------------------------------------- after an end
    def _goes_on(self, group: Group) -> bool:
        """Takes note of why processes have ended; whether to start again."""
        fates = {index: fate(status) for index, status in group.statuses.items()}
        if not {"refused", "scattered"} & set(fates.values()):
            self._members.have_gone_on()
        gone = {"lost"} if self._has_asked else {"lost", "taken"}
        lost = {self._workers[index]: group.how(index) for index, what in fates.items() if what in gone}
        now = time.monotonic()
        if lost:
            self._lose(lost, group.failed_at)
        elif self._has_asked:
            pass
        elif {"refused", "scattered"} & set(fates.values()):
            return self._others(group, "scattered" in fates.values())
        elif set(fates.values()) <= {"left", "done"}:
            if self._nobodys.add(now) >= self._flapping.times:
                say(f"processes have lost each other {self._flapping} while all were there; look at the network")
                return False
            self._note(group.failure, group.failed_at)
            say(f"{group.failure}: it has lost another, and all are there")
        else:
            say(group.failure)
            if not self._restarts.spend(now):
                return False
            self._note(group.failure, group.failed_at)
            say(f"restarting all processes ({self._restarts.count(now)} of {self._restarts.rate})")
        return True

    def _lose(self, lost: Mapping[int, str], noticed_at: float) -> None:
        now = time.monotonic()
        out = [worker for worker in sorted(lost) if self._members.lose(worker, now)]
        how = "; ".join(f"{self._named([worker])}: {what}" for worker, what in sorted(lost.items()))
        text = f"lost {how}"
        self._note(text, noticed_at)
        say(f"{text}, noticed at {time.strftime('%H:%M:%S', time.localtime(noticed_at))}")
        for worker in out:
            say(f"{self._named([worker])} was lost {self._flapping} (--leave-out), and is left out from now on")

    def _others(self, group: Group, are_scattered: bool) -> bool:
        """The script cannot go on with these workers: with others, unless it was the first start, whose number the user has asked
        for."""
        is_first = not self._change
        number = f"{len(self._workers)} worker{'s' * (len(self._workers) > 1)}"
        if are_scattered:
            self._members.scatter(self._workers)
            what = f"{self._named(self._workers)} cannot go on alone"
        else:
            self._members.refuse(self._workers)
            what = f"whale_tf refuses the script on {number}"
        reasons = [group.reasons[index] for index in group.statuses if index in group.reasons]
        why = reasons[0] if reasons else f"{group.failure}, and says why above"
        chosen = self._members.chosen()
        if is_first and not are_scattered:
            say(f"{what}, with which the job begins: {why}")
            return False
        say(f"{f'going on with {self._named(chosen)}, since ' if chosen else ''}{what}: {why}")
        self._change = self._change or {"what": what, "at": group.failed_at}
        return True

    def _note(self, text: str, noticed_at: float) -> None:
        """For what the processes say when training goes on."""
        self._change = {"what": text, "at": noticed_at}

    # ------------------------------------------------------------------------------------------------- who is there
    def _must_end(self) -> bool:
        """Whether more workers could train than do."""
        now = time.monotonic()
        if self._warm is not None:
            self._warm.tick()
        if self._members.lost:
            self._look(now)
        if not self._hurries and now - self._begin < self._rejoin_s:
            return False
        chosen = self._members.chosen()
        if len(chosen) > len(self._workers):
            text = f"{self._named([worker for worker in chosen if worker not in self._workers])} can train again"
            say(f"{text}; the others end after a snapshot")
            self._note(text, time.time())
            self._has_asked = True
        return self._has_asked

    def _look(self, now: float, is_urgent: bool = False) -> None:
        """Takes note of lost workers that are back: of this machine after a while, of others when their host answers."""
        for worker in self._members.returning():
            if not (is_urgent or self._hurries) and now - self._members.lost[worker] < self._rejoin_s:
                continue
            if not self._worker_hosts[worker].ssh or self._answers(worker, now):
                self._members.back(worker)

    def _answers(self, worker: int, now: float) -> bool:
        """Whether a host answers, as far as is known now."""
        probe = self._probes.get(worker)
        if probe is None:
            if now - self._probed.get(worker, -PROBE_S) >= PROBE_S:
                self._probed[worker] = now
                self._probes[worker] = subprocess.Popen(
                    [*self._worker_hosts[worker].ssh, "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True)
            return False
        if probe.poll() is None and now - self._probed[worker] > PROBE_LIMIT_S:
            probe.kill()
        if probe.poll() is None:
            return False
        del self._probes[worker]
        return probe.wait() == 0

    def _are_enough(self) -> bool:
        """Waits for workers, if too few are there."""
        limit, has_said = time.monotonic() + self._wait_s, False
        while not self._members.chosen():
            if not self._members.could_be_enough() or time.monotonic() > limit:
                say(f"too few workers are left: {self._members.demand()}")
                return False
            if not has_said:
                has_said = True
                say(f"waiting up to {self._wait_s:g} s for lost workers: {self._members.demand()}")
            self._look(time.monotonic(), is_urgent=True)
            if not self._members.chosen():
                time.sleep(WAIT_S)
        return True

    def _interrupt(self, number: int, frame: Any) -> None:
        raise Interrupted(number)

    def _hurry(self, number: int, frame: Any) -> None:
        self._hurries = True

    def _named(self, workers: Sequence[int]) -> str:
        """``worker 1 (host)``; ``3 workers (0, 1, 3)``."""
        if len(workers) == 1:
            host = self._worker_hosts[workers[0]]
            return f"worker {workers[0]}" + (f" ({host.name})" if host.ssh else "")
        return f"{len(workers)} workers ({', '.join(map(str, workers))})"


def say(text: str) -> None:
    sys.stderr.write(f"whale run: {text}\n")
    sys.stderr.flush()
