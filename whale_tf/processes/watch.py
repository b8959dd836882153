"""Monitors the other processes: whether they have started, are alive, and answer.

This needs no extra transport, only an HTTP/2 connection to the port of each process's TensorFlow server.  The kernel closes it
when the process dies for any reason.  Every second the server is asked for a method that it does not have.  A thread of
TensorFlow answers that, without Python: a process that computes, compiles or loads data for minutes answers at once, while a
stopped process or a lost host is silent.  TensorFlow itself waits for such a member of a collective forever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

from whale_tf.errors import ClusterError, ProcessLostError

# RFC 7540, 3.5 and 6.5: client preface, empty SETTINGS frame, acknowledgement of the server's
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"
# RFC 7541, 6.1 and 6.2.2: POST, http, :path, content-type, te and :authority, all without Huffman codes and dynamic table
QUESTION = b"\x83\x86\x04\x0f/whale_tf/alive" b"\x0f\x10\x10application/grpc" b"\x00\x02te\x08trailers" b"\x01\x05whale"

TICK_S = 0.5
ASK_S = 1.0  # between two questions
AFRESH_S = 2.5  # a connection without an answer for this long is replaced by a new one
REFUSALS = 3  # as many in a row by the port of a process that had answered: it has ended
LATE_S = 2.0  # a run that waits for others for this long says so
GRACE_S = 2.5  # a run in progress when a process is lost may already have all it needs from it
SHORT_GRACE_S = 0.5  # the same if the launcher, which starts another job, has asked this process to end
END_S = 5.0
EXIT_STATUS = 75  # EX_TEMPFAIL: start again
TERMINATED_STATUS = 128 + signal.SIGTERM

Address = Tuple[str, int]


class NotStartedError(ClusterError, ProcessLostError):
    """Another process has not started in time."""


def split_address(address: str) -> Address:
    """``"[::1]:80" -> ("::1", 80)``.

    Raises:
        ClusterError: no port.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ClusterError(f"address {address!r} has no port; expected host:port")
    return host.strip("[]"), int(port)


def question(number: int) -> bytes:
    """The ``number``-th question on a connection: a HEADERS frame (RFC 7540, 6.2) that opens and ends a stream of its own."""
    return len(QUESTION).to_bytes(3, "big") + b"\1\5" + (2 * number + 1).to_bytes(4, "big") + QUESTION


class _Link:
    """The connection to one process.

    Attributes:
        heard: when it last answered or, before its first answer, since when its port has been open; None: it is not open.
        has_answered: at least once.
        refusals: how often in a row its port has refused a connection since its last answer.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self._address = split_address(address)
        self._selector = selector
        self._known: Optional[Tuple[Any, ...]] = None  # family and address that have answered
        self._tried: Tuple[Any, ...] = ()
        self._attempts = 0
        self._connection: Optional[socket.socket] = None
        self._is_connected = False
        self._opened = self._asked = 0.0
        self._questions = 0
        self.heard: Optional[float] = None
        self.has_answered = False
        self.refusals = 0

    def step(self, now: float) -> None:
        """Open a connection if there is none, or if this one is silent; ask, if it is time to."""
        if self._connection is not None and now - max(self._opened, self.heard or 0.0) > AFRESH_S:
            self.close()
        if self._connection is None:
            self._open(now)
        elif self._is_connected and now - self._asked > ASK_S:
            self._asked = now
            self._send(question(self._questions))
            self._questions += 1

    def ready(self, now: float) -> None:
        """The selector has found something to do on the connection."""
        assert self._connection is not None
        if not self._is_connected:
            self._connect(now, self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            return
        try:
            alive = bool(self._connection.recv(1 << 16))  # whatever it is
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            alive = False
        if alive:
            self.heard, self.refusals, self.has_answered, self._known = now, 0, True, self._tried
        else:
            self._fail()
            self.step(now)

    def close(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _open(self, now: float) -> None:
        self._opened, self._asked, self._questions, self._is_connected = now, now, 0, False
        try:
            found = [self._known] if self._known else [
                (each[0], each[4]) for each in socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)]
        except OSError:  # a host that is not known yet
            return
        self._tried = found[self._attempts % len(found)]
        self._attempts += 1
        family, address = self._tried
        try:
            self._connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # this process has too many files open; it tries again
            return
        self._connection.setblocking(False)
        self._selector.register(self._connection, selectors.EVENT_WRITE, self)
        problem = self._connection.connect_ex(address)
        if problem not in (0, errno.EINPROGRESS):
            self._connect(now, problem)

    def _connect(self, now: float, problem: int) -> None:
        """An attempt to connect has ended, with the number of an error or 0."""
        assert self._connection is not None
        if problem:
            self.refusals += self.has_answered and problem in (errno.ECONNREFUSED, errno.ECONNRESET)
            self._fail()
            return
        self._is_connected = True
        self._selector.modify(self._connection, selectors.EVENT_READ, self)
        if self.heard is None:
            self.heard = now
        self._send(PREFACE)

    def _send(self, data: bytes) -> None:
        assert self._connection is not None
        try:
            self._connection.send(data)
        except BlockingIOError:
            pass  # many questions without an answer
        except OSError:
            self._fail()

    def _fail(self) -> None:
        self.close()
        if not self.has_answered:  # a proxy may accept connections for a process that has not started
            self.heard = None


class Watch:
    """Watches processes from a thread.

    Args:
        addresses: ``host:port`` of each process to watch, by rank.
        silent_s: a process that has not answered for this long is lost.
        end: ends this process with a message and a status; called from the watching thread.
        asked_to_end: whether this process was asked to end; it then ends after process 0.
        short_grace: whether who asks for the end waits for it, and starts all again.

    Attributes:
        must_end: this process must end after being told of a loss: closing its Sessions may wait for the lost process.
        when_late: called from a thread of its own, once, if a run waits for other processes for :data:`LATE_S`.
    """

    def __init__(self, addresses: Dict[int, str], silent_s: float, end: Optional[Callable[[str, int], None]] = None,
                 asked_to_end: Callable[[], bool] = lambda: False, short_grace: bool = False) -> None:
        self._selector = selectors.DefaultSelector()
        self._links = {rank: _Link(address, self._selector) for rank, address in addresses.items()}
        self._names = addresses
        self._silent_s = silent_s
        self._end = end or end_process
        self._asked_to_end = asked_to_end
        self._short_grace = short_grace
        self._lost: Dict[int, Tuple[float, str]] = {}  # when, and what has become of it
        self._runs = 0  # in progress, that wait for the other processes
        self._waiting_since: Optional[float] = None
        self._lock = threading.Lock()
        self._told: Optional[float] = None  # when an exception told this process of a loss
        self.must_end = False
        self.when_late: Optional[Callable[[], None]] = None
        self._told_late: Optional[Callable[[], None]] = None  # the last of these that was called
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="whale_tf watch", daemon=True)

    def wait_for_all(self, timeout_s: float) -> None:
        """Watch from now on, and wait until every process's server has answered.

        Raises:
            NotStartedError: a process has not started in time.
            ProcessLostError: a process has started, and is lost before the others have.
        """
        limit = time.monotonic() + timeout_s
        self._thread.start()
        atexit.register(self._end_in_time)
        while True:
            self.check()
            missing = [rank for rank, link in self._links.items() if not link.has_answered]
            if not missing:
                return
            if time.monotonic() > limit:
                raise NotStartedError(
                    f"{self._describe(missing)} did not start within {timeout_s:.0f} s: start all "
                    f"{len(self._links) + 1} processes, check their addresses, or raise "
                    "communication.start_timeout_s")
            time.sleep(TICK_S / 5)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self._end_in_time)
        for link in self._links.values():
            link.close()
        self._selector.close()

    # -------------------------------------------------------------------------------------------------- runs
    def __enter__(self) -> Watch:
        """Begin a run that waits for the other processes.

        Raises:
            ProcessLostError: a process is lost.
        """
        self.check()
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._waiting_since = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._runs -= 1
            if not self._runs:
                self._waiting_since = None

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    def check(self, patience_s: float = 0.0) -> None:
        """Check that all processes are alive.

        Raises:
            ProcessLostError: a process is lost, or is lost within ``patience_s``.
            SystemExit: process 0 has ended, and this process was asked to.
        """
        if self.wait_for_loss(patience_s):
            if self._follows_process_0():
                sys.exit(TERMINATED_STATUS)
            self._told = self._told or time.monotonic()
            raise ProcessLostError(self._message())

    def wait_for_loss(self, patience_s: float) -> bool:
        """Whether a process is lost, or is lost within ``patience_s``."""
        limit = time.monotonic() + patience_s
        while not self._lost and time.monotonic() < limit:
            time.sleep(TICK_S / 5)
        return self.lost

    def _message(self) -> str:
        fates: Dict[str, list] = {}  # in the order of their losses
        for rank, (_, fate) in list(self._lost.items()):
            fates.setdefault(fate, []).append(rank)
        return "{}, and this process cannot train without it; look at its log, and start all processes again from the last " \
            "checkpoint".format(", and ".join(f"{self._describe(sorted(ranks))} {fate}" for fate, ranks in fates.items()))

    def _describe(self, ranks: Iterable[int]) -> str:
        return " and ".join(f"process {rank} ({self._names[rank]})" for rank in ranks)

    # ------------------------------------------------------------------------------------------------ the thread
    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.is_set():
            self._look(self._selector.select(TICK_S))
            now = time.monotonic()
            if now - before > 2 * TICK_S:  # this process itself was stopped, or its Python was: it could not have heard
                for link in self._links.values():
                    link.heard = None if link.heard is None else min(now, link.heard + now - before)
            before = now
            for rank, link in self._links.items():
                if rank not in self._lost:
                    link.step(now)
                    self._judge(rank, link, now)
            self._end_if_waiting_in_vain(now)
            self._tell_if_late(now)

    def _look(self, ready: Iterable[Tuple[selectors.SelectorKey, int]]) -> None:
        now = time.monotonic()
        for key, _ in ready:
            key.data.ready(now)

    def _judge(self, rank: int, link: _Link, now: float) -> None:
        if link.refusals >= REFUSALS:
            self._lost[rank] = now, "has ended"
        elif link.heard is not None and now - link.heard > self._silent_s:
            self._lost[rank] = now, (
                f"has not answered for {self._silent_s:g} s (communication.lost_after_s), because it is stopped, or its host or "
                "the network is down")
        else:
            return
        link.close()

    def _follows_process_0(self) -> bool:
        """Whether this process was asked to end and process 0 has ended: after a last checkpoint, so this is no error."""
        return 0 in self._lost and self._asked_to_end()

    def _end_if_waiting_in_vain(self, now: float) -> None:
        since = self._waiting_since
        if since is not None and self._follows_process_0():
            self._end("SIGTERM: ending after process 0", TERMINATED_STATUS)
        grace_s = SHORT_GRACE_S if self._short_grace and self._asked_to_end() else GRACE_S
        if since is not None and self._lost and now - max(since, min(when for when, _ in self._lost.values())) > grace_s:
            self._end(self._message(), EXIT_STATUS)
        if self.must_end and self._told is not None and now - self._told > END_S:
            self._end(self._message(), EXIT_STATUS)

    def _tell_if_late(self, now: float) -> None:
        since, late = self._waiting_since, self.when_late
        if late not in (None, self._told_late) and since is not None and now - since > LATE_S:
            self._told_late = late
            threading.Thread(target=late, name="whale_tf late", daemon=True).start()

    def _end_in_time(self) -> None:
        """Ends a process that knows of a loss though TensorFlow waits for the lost process while Python shuts down: then this
        thread no longer runs, and no handler either."""
        if self._told is not None:
            end_later(END_S, EXIT_STATUS)


class _Event(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux."""

    _fields_ = [("value", ctypes.c_int64), ("number", ctypes.c_int), ("notify", ctypes.c_int), ("function", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("rest", ctypes.c_char * 32)]


def end_later(seconds: float, status: int) -> None:
    """Ends this process after some seconds, unless it has ended: by a thread of the C library, which needs no Python.

    The launcher of an elastic job must be able to tell a process that has lost another one from a lost one, so no signal can do
    this.  Systems without such threads have nothing better.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "timer_create") and sys.platform.startswith("linux"):
        library = ctypes.CDLL("librt.so.1")  # glibc before 2.34
    if not hasattr(library, "timer_create"):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        return
    by_thread, monotonic = 2, 1  # SIGEV_THREAD, CLOCK_MONOTONIC
    event = _Event(value=status, notify=by_thread, function=ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p))
    timer, whole = ctypes.c_void_p(), int(seconds)
    library.timer_create(monotonic, ctypes.byref(event), ctypes.byref(timer))
    library.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, whole, int(1e9 * (seconds - whole))), None)


def end_process(message: str, status: int = EXIT_STATUS) -> None:
    """End this process at once: its main thread is inside TensorFlow and will not return."""
    say(message)
    os._exit(status)


def say(message: str) -> None:
    """Write to standard error; ignore failures, e.g. a full disk."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(f"whale_tf: {message}\n")
        sys.stderr.flush()
