"""Hosts that meet learn of each other, and are told who is missing."""
from __future__ import annotations

import errno
import json
import socket
import threading
import time
from typing import Any, Dict, List, Sequence

import pytest

from whale_tf.cluster import rendezvous
from whale_tf.cluster.processes import free_ports
from whale_tf.cluster.rendezvous import Host, Met, Room
from whale_tf.errors import ClusterError


def meet(rooms: Sequence[Room], names: str, timeout_s: float) -> Dict[str, Any]:
    """What each host gets, or its error."""
    found: Dict[str, Any] = {}

    def come(room: Room, number: int, name: str) -> None:
        try:
            found[name] = room.meet(Host(name, (number, number + 10), number), timeout_s)
        except ClusterError as error:
            found[name] = error

    threads = [threading.Thread(target=come, args=(room, number, name)) for number, (room, name) in enumerate(zip(rooms, names))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return found


def test_all_learn_of_all_and_come_back(monkeypatch: Any) -> None:
    monkeypatch.setattr(rendezvous, "TELL_S", 0.1)
    port, = free_ports(1)
    rooms = [Room(("127.0.0.1", port), 3) for _ in range(3)]
    for _ in range(2):
        found: Dict[str, Met] = meet(rooms, "cab", 20)
        hosts: List[Host] = list(found["a"].hosts)
        assert all(met.hosts == found["a"].hosts for met in found.values())
        assert [(host.name, host.devices) for host in hosts] == [("a", 1), ("b", 2), ("c", 0)]
        assert [found[name].own for name in "abc"] == [0, 1, 2]
        assert hosts[1].addresses == ["127.0.0.1:2", "127.0.0.1:12"]
    late = meet(rooms[:2], "ca", 0.6)
    for error in late.values():
        assert isinstance(error, ClusterError)
        assert "2 of 3 are there (a (127.0.0.1), c (127.0.0.1)), and b (127.0.0.1) has not come back" in str(error)
    for room in rooms:
        room.close()


def test_host_that_comes_again_counts_once(monkeypatch: Any) -> None:
    """Its first connection is broken, which the serving host has not noticed."""
    monkeypatch.setattr(rendezvous, "TELL_S", 0.1)
    host, (port,) = Host("a", (1,), 1), free_ports(1)
    room = Room(("127.0.0.1", port), 2)
    room._serve()
    with socket.create_connection(("127.0.0.1", port)) as broken:
        broken.sendall(json.dumps(host._asdict()).encode() + b"\n")
        assert b"here" in broken.makefile("rb").readline()
        with pytest.raises(ClusterError, match="1 of 2 are there"):
            room.meet(host, 0.5)
    room.close()


def test_serves_on_after_a_host_that_could_not_be_accepted(monkeypatch: Any) -> None:
    """Nobody was let in any more, and all waited in vain."""
    monkeypatch.setattr(rendezvous, "TELL_S", 0.1)
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accepted(listening: socket.socket) -> Any:
        found = accept(listening)
        if errors:
            found[0].close()
            raise errors.pop()
        return found

    monkeypatch.setattr(socket.socket, "accept", accepted)
    room = Room(("127.0.0.1", free_ports(1)[0]), 1)
    assert room.meet(Host("a", (1,), 1), 5).own == 0 and not errors
    room.close()


def test_nobody_serves() -> None:
    with pytest.raises(ClusterError, match="did not meet at 203.0.113.1:9 within 0.1 s: nobody answers there"):
        Room(("203.0.113.1", 9), 2).meet(Host("a", (1,), 1), 0.1)
