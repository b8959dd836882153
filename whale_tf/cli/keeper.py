"""Keeps one process of ``whale run`` on its host: starts it, passes signals on, and ends it when nobody asks for it any more.

::

    whale run ══ pipe, or ssh ══> keeper ──> process, in a session of its own
        │  this module's text        │
        │ <── "whale port 40123"     │ a free port of the host
        │  task, as JSON ──────────> │ starts the process
        │  "alive", "signal 15" ───> │ passes signals on
        ×  end of file, or silence   │ SIGTERM and, after the time of grace, SIGKILL

The launcher sends this text, so a host needs no whale_tf to run it, and only modules of Python's library are imported.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional

POLL_S = 0.1
PORT = "whale port "


class Lines:
    """Lines from a file descriptor, which are there or not."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rest = b""
        self.has_ended = False

    def wait(self, seconds: float) -> List[str]:
        """Those that have come within ``seconds`` at most."""
        if self.has_ended:
            time.sleep(seconds)
            return []
        if select.select([self._number], [], [], seconds)[0]:
            data = os.read(self._number, 1 << 16)
            self.has_ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            return [line.decode("utf8") for line in lines]
        return []


def started(task: Dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Starts the process.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(task["command"], env=dict(os.environ, **task["variables"]), cwd=task["directory"],
                            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=dies_with_this())


def main(start: Callable[[Dict[str, Any]], Any] = started, finish: Optional[Callable[[int, bool], None]] = None) -> None:
    """Called on the process's host.

    ``start`` starts the process, as ``subprocess.Popen`` does; ``finish`` is :func:`end`, or what takes its place.

    The port is held while the process lives: bound with SO_REUSEADDR, it goes to nobody who asks the system for any port, and the
    process's server can have it.  Only Linux lets two sockets share a port so.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("", 0))
        print(PORT + str(port.getsockname()[1]), flush=True)
        lines, given = Lines(0), []  # type: Lines, List[str]
        while not given and not lines.has_ended:
            given = lines.wait(60.0)
        if sys.platform != "linux":
            port.close()
        if given and given[0].startswith("{"):  # otherwise a signal: the launcher ends before it has said what to run
            task = json.loads(given[0])
            (finish or end)(keep(task, lines, given[1:], start), task["mimics"])


def keep(task: Dict[str, Any], lines: Lines, given: List[str], start: Callable[[Dict[str, Any]], Any]) -> int:
    """Runs a process to its end, and returns its status; ``given`` are lines that have come with the task."""
    try:
        child = start(task)
    except OSError as error:
        say("cannot be started: %s" % error)
        return 127
    before = time.monotonic()
    silent_s, stopped_s, asked = 0.0, 0.0, None  # type: float, float, Optional[float]
    while child.poll() is None:
        for line in given:
            if line.startswith("signal "):
                send(child, int(line.split()[1]))
        given = lines.wait(POLL_S)
        now = time.monotonic()
        elapsed, before = min(now - before, 2 * POLL_S), now  # this process may have been stopped, too
        silent_s = 0.0 if given else silent_s + elapsed
        stopped_s = stopped_s + elapsed if is_stopped(child.pid) else 0.0
        if stopped_s > task["stopped_s"]:
            say("has been stopped for %g s, and the others wait for it; killing it" % task["stopped_s"])
            send(child, signal.SIGKILL)
            stopped_s = 0.0
        if asked is None and (lines.has_ended or silent_s > task["lease_s"]):
            asked = now
            send(child, signal.SIGTERM)
        if asked is not None and now - asked > task["grace_s"]:
            send(child, signal.SIGKILL)
    send(child, signal.SIGKILL)  # what it has started
    return int(child.wait())


def send(child: Any, number: int) -> None:
    """SIGKILL also reaches all processes that the child has started."""
    try:
        if number == signal.SIGKILL:
            os.killpg(child.pid, number)
        else:
            os.kill(child.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended


def is_stopped(pid: int) -> bool:
    """Whether a child is stopped by a signal (Python on some systems cannot tell)."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def dies_with_this() -> Optional[Callable[[], Any]]:
    """What a child calls so that the kernel (Linux) kills it if this process is killed."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def end(status: int, mimics: bool) -> None:
    """Ends as the process did: over ssh, 128 and the number of a signal stand for the signal."""
    if status < 0 and mimics:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(128 - status if status < 0 else status)


def say(text: str) -> None:
    sys.stderr.write("whale run: this process %s\n" % text)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
