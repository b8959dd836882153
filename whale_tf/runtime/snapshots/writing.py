"""The thread that writes snapshots while training goes on."""
from __future__ import annotations

import threading
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from whale_tf._tf_compat import eager_mode, tf
from whale_tf.processes.watch import say
from whale_tf.runtime.snapshots.files import PAUSE_S, Piece, Store
from whale_tf.runtime.snapshots.neighbours import Neighbours

OTHERS_S = 120.0  # until the parts of the other processes, or the manifest of process 0, are there


class Job(NamedTuple):
    """A snapshot to write.

    Attributes:
        state: of the run, as JSON text.
        pieces, tensors: what this process has.
    """

    store: Store
    folder: str
    step: int
    state: str
    pieces: Sequence[Piece]
    tensors: Sequence[Any]


class Writer:
    """Writes one snapshot at a time, in a thread of its own.

    Args:
        count, rank: number of processes, and which this is.
        host: the device from which values are written.
        has_lost: whether another process has ended, so that its part does not come any more.
        neighbours: None: all processes reach one directory.

    Attributes:
        failed_step: step of the last snapshot that this process could not write; 0: none.
        written_s: seconds that the last snapshot took from its step until it was complete.
    """

    def __init__(self, count: int, rank: int, host: str, has_lost: Callable[[], bool] = lambda: False,
                 neighbours: Optional[Neighbours] = None) -> None:
        self._count, self._rank, self._host, self._has_lost = count, rank, host, has_lost
        self._neighbours = neighbours
        self._thread: Optional[threading.Thread] = None
        self._given_up = threading.Event()
        self.failed_step = 0
        self.written_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def leads(self) -> bool:
        """Whether this process leads those that reach its directory, if there are several directories."""
        return self._neighbours is not None and self._neighbours.leads

    def lines(self) -> List[str]:
        """Where copies are, for the user."""
        return [] if self._neighbours is None else [self._neighbours.line()]

    def give_up(self) -> None:
        """No longer wait for the parts of other processes."""
        self._given_up.set()

    def start(self, job: Job) -> None:
        """Writes a snapshot, after the one before."""
        self.wait()
        self._given_up.clear()
        self._thread = threading.Thread(target=self._write, args=(job,), name="whale_tf snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the snapshot is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait_for_manifest(self, job: Job) -> bool:
        """Until the snapshot is complete, in every process; False: it has failed."""
        self.wait()
        return self.failed_step != job.step and _until(lambda: job.store.is_complete(job.folder), OTHERS_S, self._has_lost)

    def _write(self, job: Job) -> None:
        begin = time.monotonic()
        try:
            with eager_mode(), tf.device(self._host):  # a thread begins in the mode of the whole process
                job.store.write_part(job.folder, self._rank, job.pieces, job.tensors)
            ready, neighbours = time.monotonic(), self._neighbours
            if neighbours is not None:
                neighbours.send_part(job.folder)
            if self._rank == 0:
                job.store.complete(
                    job.folder, job.step, self._count, job.state, lambda: not (
                        self._given_up.is_set() or self._has_lost() or time.monotonic() - ready > OTHERS_S),
                    *(() if neighbours is None else (neighbours.kept(), lambda: neighbours.send_manifest(job.folder))))
            elif self.leads:
                job.store.prune()
            self.written_s = time.monotonic() - begin
        except Exception as error:  # whatever it is, training goes on, and nobody waits for this snapshot
            self.failed_step = job.step
            if self._rank == 0 and not job.store.is_complete(job.folder):
                job.store.delete(job.folder)
            text = getattr(error, "message", str(error))  # TensorFlow's own
            say(f"snapshot of step {job.step} cannot be written, so the one before remains: {text}")


def _until(condition: Callable[[], bool], limit_s: float, is_in_vain: Callable[[], bool]) -> bool:
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit or is_in_vain():
            return condition()  # what is lost now may have done it before
        time.sleep(PAUSE_S)
    return True
