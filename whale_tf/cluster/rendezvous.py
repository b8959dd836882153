"""Hosts that run the same command meet at an address, and each learns where the processes of all are.

::

    host a, which has the address     serves; waits in the room, too
    host b   ── {"name": "b", "ports": [..], "devices": 4} ──> room
             <── {"here": ["a (10.0.0.1)"]} ──                  while hosts are missing, every second
             <── {"hosts": [...], "own": 1} ──                  when all are there, and the room is empty again

A host that starts its processes again comes back to the same room, which is served until the serving host's command ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster.environment import host_of
from whale_tf.errors import ClusterError

TELL_S = 1.0  # between two messages to hosts that wait


class Host(NamedTuple):
    """What a host brings to a meeting.

    Attributes:
        name: for messages.
        ports: of its processes.
        devices: of each of its processes.
        address: where the others reach it; the serving host finds it out.
    """

    name: str
    ports: Tuple[int, ...]
    devices: int
    address: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def addresses(self) -> List[str]:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return [f"{host}:{port}" for port in self.ports]


class Met(NamedTuple):
    """The hosts of a meeting in the order of their processes, and the index of the own one."""

    hosts: Tuple[Host, ...]
    own: int


def split_meeting_point(text: str) -> Tuple[str, int]:
    """``"head:29400" -> ("head", 29400)``.

    Raises:
        ClusterError: it is not a host and a port.
    """
    host, _, port = text.rpartition(":")
    if not host or host_of(text) == text or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"--rdzv is {text!r}, expected HOST:PORT, an address that all hosts can reach, of one of them")
    return host.strip("[]"), int(port)


class Room:
    """Where ``count`` hosts meet.  It is served by the host that has its address: the first one there that comes.

    Args:
        point: host and port.
        count: hosts that take part.
    """

    def __init__(self, point: Tuple[str, int], count: int) -> None:
        self._point = point
        self._count = count
        self._lock = threading.Lock()
        self._waiting: Dict[socket.socket, Host] = {}
        self._before: Sequence[Host] = ()  # of the last meeting
        self._listening: Optional[socket.socket] = None

    def meet(self, host: Host, timeout_s: float) -> Met:
        """Waits until all hosts are there.

        Raises:
            ClusterError: some are missing after ``timeout_s``.
        """
        limit = time.monotonic() + timeout_s
        told = f"nobody answers there, so {self._point[0]} itself has not run the command, or cannot be reached"
        while time.monotonic() < limit:
            self._serve()
            try:
                with socket.create_connection(self._point, min(5.0, timeout_s)) as connection:
                    connection.settimeout(3 * TELL_S)
                    connection.sendall(json.dumps(host._asdict()).encode() + b"\n")
                    for line in connection.makefile("rb"):
                        answer = json.loads(line.decode("utf8"))
                        if "hosts" in answer:
                            with self._lock:  # the serving host may end now, but not before all have been told
                                return Met(tuple(map(_host, answer["hosts"])), answer["own"])
                        told = _who_is_missing(answer, self._count)
                        if time.monotonic() > limit:
                            break
            except (OSError, ValueError):
                pass  # not served yet, or no longer
            time.sleep(TELL_S / 5)
        raise ClusterError(
            "{} host(s) did not meet at {}:{} within {:g} s: {}; run the same command on every host, or raise "
            "--rdzv-timeout".format(self._count, *self._point, timeout_s, told))

    def close(self) -> None:
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None

    # ------------------------------------------------------------------------------------------------- the serving host
    def _serve(self) -> None:
        """Serve the room, if its address is this host's and nobody does yet."""
        if self._listening is not None:
            return
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(*self._point, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as probe:
                probe.bind((address[0], 0, *address[2:]))  # refused if the address is another host's
            listening = socket.socket(family)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(("", self._point[1]))
                listening.listen(128)
            except OSError as error:
                listening.close()
                if error.errno != errno.EADDRINUSE:  # else another command on this host serves
                    raise
                return
            self._listening = listening
            threading.Thread(target=self._accept, args=(listening,), name="whale_tf rendezvous", daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while self._listening is listening:
            try:
                connection, peer = listening.accept()
            except OSError:  # closed; or no more files can be opened now, or a host has left before it was accepted
                time.sleep(TELL_S / 5)
            else:
                threading.Thread(target=self._welcome, args=(connection, peer[0]), daemon=True).start()

    def _welcome(self, connection: socket.socket, peer: str) -> None:
        """One host, from when it comes until all are there."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError), connection:  # it has left, or is no host of ours
            host = _host(json.loads(connection.makefile("rb").readline(1 << 20).decode("utf8")))
            host = host._replace(address=self._point[0] if peer == connection.getsockname()[0] else peer)
            with self._lock:
                for earlier in [one for one, known in self._waiting.items() if known == host]:
                    del self._waiting[earlier]  # that connection is broken, which has not been noticed yet
                self._waiting[connection] = host
                if len(self._waiting) == self._count:
                    self._send_on()
                    return
            try:
                while self._tell(connection):
                    time.sleep(TELL_S)
            finally:
                with self._lock:
                    self._waiting.pop(connection, None)

    def _tell(self, connection: socket.socket) -> bool:
        with self._lock:
            if connection not in self._waiting:
                return False
            here = list(self._waiting.values())
            names = [host.name for host in here]
            absent = [str(host) for host in self._before if host.name not in names]
            connection.sendall(json.dumps({"here": sorted(map(str, here)), "absent": absent}).encode() + b"\n")
            return True

    def _send_on(self) -> None:
        """All are there: each learns of all, the serving host's first.  The room is empty again."""
        rows = sorted(self._waiting.items(), key=lambda row: (row[1].address != self._point[0], row[1]))
        self._before = [host for _, host in rows]
        for own, (connection, _) in enumerate(rows):
            with contextlib.suppress(OSError):  # it has just left: its processes will be missed
                connection.sendall(json.dumps({"hosts": [host._asdict() for host in self._before], "own": own}).encode() + b"\n")
        self._waiting.clear()


def _host(given: Dict[str, Any]) -> Host:
    return Host(str(given["name"]), tuple(map(int, given["ports"])), int(given["devices"]), str(given["address"]))


def _who_is_missing(answer: Dict[str, Any], count: int) -> str:
    here, absent = answer["here"], answer["absent"]
    told = "{} of {} are there ({})".format(len(here), count, ", ".join(here))
    return told + (", and {} has not come back".format(", ".join(absent)) if absent else "")
