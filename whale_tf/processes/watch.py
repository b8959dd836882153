"""Monitors the other processes: whether they have started and are still alive.

This needs no extra transport, only an idle HTTP/2 connection to the port of each process's TensorFlow server.  The kernel
closes it when the process dies for any reason.  On a new connection, a server must answer with its settings, which a
stopped process or a lost host does not.  TensorFlow 1.15 itself waits for a dead member of a collective forever.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Callable, Dict, List, Optional, Tuple

from whale_tf.errors import ClusterError, ProcessLostError

# RFC 7540, 3.5 and 6.5: client preface, empty SETTINGS frame, acknowledgement of the server's
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"

TICK_S = 0.5
ASK_S = 15.0  # a connection silent for this long is replaced by a new one
SILENT_S = 60.0  # a process that has not answered for this long is lost
CONNECT_S = 3.0
GRACE_S = 5.0  # a run in progress when a process is lost may already have all it needs from it
END_S = 8.0
EXIT_STATUS = 75  # EX_TEMPFAIL: start again
TERMINATED_STATUS = 128 + signal.SIGTERM

Address = Tuple[str, int]


def split_address(address: str) -> Address:
    """``"[::1]:80" -> ("::1", 80)``.

    Raises:
        ClusterError: no port.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ClusterError(f"address {address!r} has no port; expected host:port")
    return host.strip("[]"), int(port)


def _connect(address: Address, timeout_s: float) -> Optional[socket.socket]:
    try:
        connection = socket.create_connection(address, timeout_s)
        connection.sendall(PREFACE)
        return connection
    except OSError:
        return None


class Watch:
    """Watches processes from a thread.

    Args:
        addresses: ``host:port`` of each process to watch, by rank.
        end: ends this process with a message and a status; called from the watching thread.
        asked_to_end: whether this process was asked to end; it then ends after process 0.

    Attributes:
        must_end: this process must end after being told of a loss: closing its Sessions may wait for the lost process.
    """

    def __init__(self, addresses: Dict[int, str], end: Optional[Callable[[str, int], None]] = None,
                 asked_to_end: Callable[[], bool] = lambda: False) -> None:
        self._addresses = {rank: split_address(address) for rank, address in addresses.items()}
        self._names = addresses
        self._end = end or end_process
        self._asked_to_end = asked_to_end
        self._connections: Dict[int, socket.socket] = {}
        self._heard: Dict[int, float] = {}
        self._lost: Dict[int, float] = {}
        self._waiting_since: Optional[float] = None
        self._told: Optional[float] = None  # when an exception told this process of a loss
        self.must_end = False
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="whale_tf watch", daemon=True)

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until every process's server accepts connections, then start to watch.

        Raises:
            ClusterError: a process has not started in time.
        """
        limit = time.monotonic() + timeout_s
        missing = sorted(self._addresses)
        while missing:
            for rank in list(missing):
                if self._open(rank):
                    missing.remove(rank)
            if missing and time.monotonic() > limit:
                raise ClusterError(
                    f"{self._describe(missing)} did not start within {timeout_s:.0f} s: start all "
                    f"{len(self._addresses) + 1} processes, check their addresses, or raise "
                    "communication.start_timeout_s")
            if missing:
                time.sleep(TICK_S / 2)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for connection in self._connections.values():
            connection.close()
        self._selector.close()

    # -------------------------------------------------------------------------------------------------- runs
    def __enter__(self) -> Watch:
        """Begin a run that waits for the other processes.

        Raises:
            ProcessLostError: a process is lost.
        """
        self.check()
        self._waiting_since = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
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
        return (
            f"{self._describe(sorted(self._lost))} has ended or no longer answers, and this process cannot train without it; "
            "look at its log, and start all processes again from the last checkpoint")

    def _describe(self, ranks: List[int]) -> str:
        return " and ".join(f"process {rank} ({self._names[rank]})" for rank in ranks)

    # ------------------------------------------------------------------------------------------------ the thread
    def _watch(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(TICK_S):
                self._read(key.data)
            now = time.monotonic()
            for rank in self._addresses:
                if rank not in self._lost and now - self._heard[rank] > ASK_S:
                    self._ask(rank)
            self._end_if_waiting_in_vain(time.monotonic())

    def _follows_process_0(self) -> bool:
        """Whether this process was asked to end and process 0 has ended: after a last checkpoint, so this is no error."""
        return 0 in self._lost and self._asked_to_end()

    def _end_if_waiting_in_vain(self, now: float) -> None:
        since = self._waiting_since
        if since is not None and self._follows_process_0():
            self._end("SIGTERM: ending after process 0", TERMINATED_STATUS)
        if since is not None and self._lost and now - max(since, min(self._lost.values())) > GRACE_S:
            self._end(self._message(), EXIT_STATUS)
        if self.must_end and self._told is not None and now - self._told > END_S:
            self._end(self._message(), EXIT_STATUS)

    def _read(self, rank: int) -> None:
        """Note that a process is alive; the content it sent is ignored."""
        try:
            alive = bool(self._connections[rank].recv(1 << 16))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            alive = False
        if alive:
            self._heard[rank] = time.monotonic()
        else:
            self._ask(rank)

    def _ask(self, rank: int) -> None:
        """Reconnect: the port of a dead process refuses connections."""
        self._close(rank)
        for _ in range(3):
            if self._open(rank):
                silent = time.monotonic() - self._heard[rank]
                if silent > SILENT_S:
                    break
                return
            if self._stop.wait(TICK_S):
                return
        self._close(rank)
        self._lost[rank] = time.monotonic()

    def _open(self, rank: int) -> bool:
        connection = _connect(self._addresses[rank], CONNECT_S)
        if connection is None:
            return False
        connection.setblocking(False)
        self._connections[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, rank)
        self._heard.setdefault(rank, time.monotonic())
        return True

    def _close(self, rank: int) -> None:
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()


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
