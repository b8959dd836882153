"""One training run with snapshots, whatever makes its steps: when they are taken, what is in them, and what they have cost."""
from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from whale_tf.cluster.processes import CHANGE
from whale_tf.processes.watch import say
from whale_tf.runtime.snapshots.files import REACHED, STATE, Piece, Snapshot, Store
from whale_tf.runtime.snapshots.pace import Pace
from whale_tf.runtime.snapshots.writing import Job, Writer

_SPENT = "spent"
_WIDTH = 200  # bytes of this file


class Spent(NamedTuple):
    """How the time of a run was spent, in all processes that it has had one after the other.

    Attributes:
        since: when the first of them began; Unix time in seconds.
        trained_s: seconds of training whose steps are in the snapshot.
        waited_s: seconds for which training waited for snapshots.
        starts: number of processes so far.
        started_s: seconds of starts: from the notice of an end, if ``whale run`` has told it, to the first step after it.
    """

    since: float
    trained_s: float = 0.0
    waited_s: float = 0.0
    starts: int = 0
    started_s: float = 0.0


class Run:
    """See the module's docstring.

    Args:
        name: of what trains, for messages.
        found: the snapshot to go on with.
        number: of this process's run in the names of snapshots.
        end: ends this process after a last snapshot.

    Attributes:
        told: the state in the found snapshot, as JSON; None: none was found.
        arrays: its arrays.
        bytes: that this process wrote in the last snapshot; 0: none was taken.
    """

    def __init__(self, name: str, store: Store, writer: Writer, pace: Pace, found: Optional[Snapshot], number: int,
                 end: Callable[[Job, Writer, int], None]) -> None:
        self.name, self.found = name, found
        self._store, self._writer, self._pace, self._number, self._end = store, writer, pace, number, end
        self.told: Any = None
        self.arrays: Dict[str, Any] = {}
        before = Spent(time.time())
        if found is not None:
            self.told, self.arrays = found.state()
            before = Spent(*self.told.get(_SPENT, before))
        self._begin = time.monotonic()
        self._asked = json.loads(os.environ[CHANGE])["at"] if CHANGE in os.environ else time.time()
        self._started_s = max(0.0, time.time() - self._asked)
        self._waited_s = 0.0
        self._count = 0
        self._ends = False
        self.bytes = 0
        self._reached, self._is_closed = -1, False
        self._step = self._last_reached = 0 if found is None else found.step
        if self.is_chief:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it only helps to tell what was lost
                with open(os.path.join(store.path, REACHED), encoding="utf8") as handle:
                    last = json.load(handle)
                self._last_reached = max(self._step, int(last["step"]))
                before = before._replace(since=min(before.since, last["since"]), starts=max(before.starts, last["starts"]),
                                         started_s=max(before.started_s, last["started_s"]))
        self._before = before

    @property
    def is_chief(self) -> bool:
        return self._pace.is_chief

    def begins(self, step: int) -> None:
        """Training begins after ``step``: what came before was spent on beginning."""
        self._pace.begins(step)
        self._begin, self._waited_s = time.monotonic(), 0.0
        self._started_s = max(0.0, time.time() - self._asked)
        self._note(max(step, self._last_reached))

    def says(self, text: str) -> None:
        """Says it once, for all processes."""
        if self.is_chief:
            say(text)

    def step_done(self, step: int, take: Callable[[], Job], must_agree: bool = False) -> None:
        """After ``step``: takes a snapshot, if it is time; or the last one, after which this process ends.

        Raises:
            SystemExit: a process was asked to end.
        """
        self._note(step)
        if CHANGE in os.environ and step > self._step:
            self._tell_change(step)
        todo = self._pace.after(step, must_agree, self._writer)
        if todo.signal:
            self._ends = True
            self._end(take(), self._writer, todo.signal)
        elif todo.takes:
            take()

    def _note(self, step: int) -> None:
        """Keeps for the next start, at each step, what a snapshot may not have."""
        if (self.is_chief or self._writer.leads) and not self._is_closed:
            spent = self.spent()
            text = json.dumps({"step": step, "since": spent.since, "starts": spent.starts, "started_s": spent.started_s})
            with contextlib.suppress(OSError):  # a full disk
                if self._reached < 0:
                    os.makedirs(self._store.path, exist_ok=True)
                    self._reached = os.open(os.path.join(self._store.path, REACHED), os.O_RDWR | os.O_CREAT, 0o644)
                os.pwrite(self._reached, text.ljust(_WIDTH).encode(), 0)

    def _tell_change(self, step: int) -> None:
        """Says what the launcher told of the start before, once training goes on."""
        change = json.loads(os.environ.pop(CHANGE))
        lost = max(0, self._last_reached - self._step)
        self.says("{}; {} lost, and training goes on with step {}, {:.1f} s after this was noticed".format(
            change["what"], "no step was" if not lost else f"step {self._last_reached} was" if lost == 1 else
            f"steps {self._step + 1} to {self._last_reached} were", self._step + 1, time.time() - change["at"]))

    def take(self, step: int, state: Dict[str, Any], arrays: Dict[str, Any],
             read: Callable[[], Tuple[List[Piece], List[Any]]]) -> Job:
        """Takes a snapshot.

        Args:
            state: of the run, as JSON, with ``arrays``.
            read: what this process holds.
        """
        begin = time.monotonic()
        pieces, tensors = read()
        if self.is_chief:
            for name, value in arrays.items():
                shape = tuple(value.shape)
                pieces.append(Piece(STATE + name, STATE + name, name, shape, (0,) * len(shape), True))
                tensors.append(np.array(value) if isinstance(value, np.ndarray) else value)  # the script may change it
        folder = self._store.folder(step, self._number + self._count)  # there may be two of a step: the last one is by a signal
        job = Job(self._store, folder, step, json.dumps({**state, _SPENT: list(self.spent())}), pieces, tensors)
        self._writer.start(job)
        waited_s = time.monotonic() - begin
        self._pace.taken(step, waited_s)
        self._waited_s, self._count = self._waited_s + waited_s, self._count + 1
        self.bytes = sum(_bytes(tensor) for tensor in tensors)
        return job

    def spent(self) -> Spent:
        """How time was spent until now."""
        before = self._before
        return Spent(before.since, before.trained_s + time.monotonic() - self._begin - self._waited_s,
                     before.waited_s + self._waited_s, before.starts + 1, before.started_s + self._started_s)

    def finished(self, step: int, how: str = "has finished", is_quiet: bool = False) -> None:
        """Training is over, after ``step``: says what it took."""
        self.close()
        if is_quiet or self._ends:  # by a signal, and has said so
            return
        spent = self.spent()
        elapsed_s = max(time.time() - spent.since, 1e-9)
        starts = "" if spent.starts == 1 else f" in {spent.starts} starts"
        self.says(f"{self.name} {how}: {step} steps, {elapsed_s:.0f} s after its first start{starts}; "
                  f"{100 * min(1.0, spent.trained_s / elapsed_s):.1f}% of this time went into these steps (goodput), "
                  f"{spent.started_s:.1f} s into starts, {spent.waited_s:.2f} s into waiting for snapshots")

    def close(self) -> None:
        """Waits for the last snapshot, and leaves no file open."""
        self._writer.wait()
        self._is_closed = True
        if self._reached >= 0:
            os.close(self._reached)
            self._reached = -1

    def forget_others(self) -> None:
        """Deletes the snapshots of runs before this one, which has not gone on with them."""
        if self.is_chief:
            self._store.delete_before(self._number)

    def wait_for(self, job: Job) -> None:
        """Until this snapshot is complete, in every process, or cannot be written, which is said."""
        self._writer.wait_for_manifest(job)

    def wait(self) -> None:
        """Until the last snapshot is written."""
        self._writer.wait()

    def lines(self) -> List[str]:
        """What snapshots are taken and cost, for the user."""
        lines = [f"{self.name}: {self._store.path}"]
        if self._count:
            lines.append(f"{self._count} snapshots, {self.bytes / 2**20:.1f} MiB each from this process; training waited "
                         f"{1000 * self._waited_s / self._count:.1f} ms for one, and {self._writer.written_s:.2f} s later the "
                         "last one was complete")
        else:
            lines.append("none taken yet")
        return lines + self._writer.lines()


def _bytes(value: Any) -> int:
    size = 1
    for dim in value.shape:
        size *= int(dim)
    return size * int(getattr(value.dtype, "size", 0) or getattr(value.dtype, "itemsize", 0))
