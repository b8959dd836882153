"""The watch tells a live process from a dead, a silent and an absent one."""
from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Iterator, List

import pytest

from whale_tf.cluster.processes import free_ports
from whale_tf.errors import ClusterError, ProcessLostError
from whale_tf.processes import watch as module
from whale_tf.processes.watch import PREFACE, Watch, end_later, question, split_address


class Server:
    """Accepts connections, and answers whatever it is sent, until it is killed or falls silent."""

    def __init__(self) -> None:
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(5)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections: List[socket.socket] = []
        self.answers = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
                self.connections.append(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except OSError:  # killed
                return

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # killed
            while connection.recv(1 << 16):
                if self.answers:
                    connection.sendall(b"here")

    def drop(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def kill(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.drop()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    try:
        found.kill()
    except OSError:
        pass  # the test did


@pytest.fixture
def ends() -> List[str]:
    return []


@pytest.fixture
def watch(server: Server, ends: List[str], monkeypatch: Any) -> Iterator[Watch]:
    monkeypatch.setattr(module, "TICK_S", 0.05)
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    monkeypatch.setattr(module, "ASK_S", 0.1)
    monkeypatch.setattr(module, "AFRESH_S", 0.3)
    found = Watch({1: server.address}, 0.6, lambda message, status: ends.append(message))
    found.wait_for_all(30)
    assert eventually(lambda: server.connections)
    yield found
    found.stop()


def eventually(condition: Any, limit_s: float = 30.0) -> bool:
    limit = time.monotonic() + limit_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.slow
def test_death_between_runs_is_told_by_the_next(watch: Watch, server: Server, ends: List[str]) -> None:
    with watch:
        pass
    server.kill()
    with pytest.raises(ProcessLostError, match=r"process 1 \(127.0.0.1:\d+\) has ended"):
        watch.check(patience_s=30)
    with pytest.raises(ProcessLostError):
        watch.__enter__()
    assert not ends


@pytest.mark.slow
def test_death_during_a_run_ends_this_process(watch: Watch, server: Server, ends: List[str]) -> None:
    with watch:
        server.kill()
        assert eventually(lambda: ends) and "process 1" in ends[0]


@pytest.mark.slow
def test_process_that_was_asked_to_end_follows_process_0(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.05)
    ends: List[int] = []
    watch = Watch({0: server.address}, 1.0, lambda message, status: ends.append(status), asked_to_end=lambda: True)
    watch.wait_for_all(30)
    with watch:
        server.kill()
        assert eventually(lambda: ends) and ends[0] == module.TERMINATED_STATUS
    with pytest.raises(SystemExit):
        watch.check()
    watch.stop()


@pytest.mark.slow
def test_broken_connection_is_no_death(watch: Watch, server: Server, ends: List[str]) -> None:
    with watch:
        server.drop()
        assert eventually(lambda: len(server.connections) > 1)
        time.sleep(0.5)
        watch.check()
    assert not ends


@pytest.mark.slow
def test_process_that_answers_no_more(watch: Watch, server: Server, ends: List[str]) -> None:
    time.sleep(0.8)
    watch.check()
    with watch:
        with watch:  # of another thread
            pass
        server.answers = False
        assert eventually(lambda: ends) and "has not answered for 0.6 s" in ends[0]


@pytest.mark.slow
def test_one_that_could_not_hear_takes_nobody_for_lost(watch: Watch, server: Server, monkeypatch: Any) -> None:
    """As after SIGSTOP and SIGCONT, or while an extension holds Python's lock."""
    look = watch._look

    def late(ready: Any) -> None:
        time.sleep(0.8)
        look([])

    with monkeypatch.context() as patch:
        patch.setattr(watch, "_look", late)
        time.sleep(1)
    time.sleep(0.9)
    watch.check()


@pytest.mark.slow
def test_one_that_is_lost_while_others_start(server: Server, monkeypatch: Any) -> None:
    """A port that is open and does not answer is no process that has yet to start."""
    monkeypatch.setattr(module, "TICK_S", 0.05)
    server.answers = False
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        watch = Watch({1: server.address, 2: f"127.0.0.1:{unused.getsockname()[1]}"}, 0.5)
        with pytest.raises(ProcessLostError, match=r"process 1 \(127.0.0.1:\d+\) has not answered"):
            watch.wait_for_all(30)
        watch.stop()


@pytest.mark.slow
def test_one_that_never_comes() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        absent = Watch({2: f"127.0.0.1:{unused.getsockname()[1]}"}, 1.0)
        with pytest.raises(ClusterError, match=r"process 2 \(127.0.0.1:\d+\) did not start within 0 s: start all 2 processes"):
            absent.wait_for_all(0.3)
        absent.stop()


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80) and split_address("a:1") == ("a", 1)
    with pytest.raises(ClusterError, match="has no port"):
        split_address("a")


SERVER = """
import ctypes, sys, time
import tensorflow.compat.v1 as tf
server = tf.train.Server({"worker": ["127.0.0.1:" + sys.argv[1]]}, "worker", 0)
ctypes.PyDLL(None).sleep(6)  # with Python's lock
time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.slow
def test_server_of_tensorflow_answers_until_it_is_stopped() -> None:
    """Also while Python does nothing else."""
    port, = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    watch = Watch({1: f"127.0.0.1:{port}"}, 3.0)
    try:
        watch.wait_for_all(60)
        time.sleep(4)
        watch.check()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessLostError, match="has not answered for 3 s"):
            watch.check(patience_s=10)
    finally:
        process.kill()
        process.wait()
        watch.stop()


def test_question_is_a_request_of_http2() -> None:
    assert PREFACE.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") and len(PREFACE) == 24 + 9 + 9
    frames = question(0), question(1)
    assert [int.from_bytes(frame[5:9], "big") for frame in frames] == [1, 3]
    assert all(int.from_bytes(frame[:3], "big") == len(frame) - 9 for frame in frames)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such timers")
def test_process_that_no_longer_runs_python_ends_with_a_status() -> None:
    """As TensorFlow waits for a lost process when Python has shut down; a signal would look like a lost process."""
    pid = os.fork()
    if pid == 0:
        end_later(0.05, 75)
        ctypes.PyDLL(None).sleep(20)  # holds Python's lock
        os._exit(1)
    _, ended = os.waitpid(pid, 0)
    assert os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == 75
