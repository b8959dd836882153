"""Processes that run and end together, each with its keeper, on this machine or on others."""
from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cli import keeper as module_of_keeper
from whale_tf.cli.keeper import PORT
from whale_tf.cluster.processes import tf_configs_at
from whale_tf.errors import ClusterError
from whale_tf.processes.endings import REASON

POLL_S = 0.1
ALIVE_S, LEASE_S = 2.0, 30.0  # keepers on other hosts are told every 2 s that this process lives; after 30 s they end their own
STOPPED_S = 5.0  # a process that is stopped for this long keeps the others waiting
KILL_S = 5.0
NEVER_S = 1e12
# the keeper's text is the first line that it reads: no byte more, since the others are for what it does
KEEPER = (sys.executable, "-I", "-S", "-c", "import io, json; exec(json.loads(io.FileIO(0, closefd=False).readline()))")
# environment variables that say something of this host, this user's session here, or this shell
OWN_TO_A_HOST = re.compile(
    r"(HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|HOST|HOSTNAME|PWD|OLDPWD|TERM.*|DISPLAY|TMPDIR|TMUX.*|_|(SSH|XDG|DBUS|SLURM|BASH_FUNC)_.*)$")
Keeper = Any  # a subprocess.Popen, or what stands in for it
COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI: cyan, yellow, green, magenta, blue, red


class Job(NamedTuple):
    """What the processes of a host are told.

    Attributes:
        addresses: of all processes, by rank.
        first: rank of the host's first process.
        variables: environment variables, in addition to this process's own.
    """

    addresses: List[str]
    first: int
    variables: Dict[str, str]


class WorkerHost(NamedTuple):
    """Where a process runs.

    Attributes:
        name: by which the other processes reach it.
        ssh: the command that runs another command there; none: this machine.
    """

    name: str
    ssh: Tuple[str, ...] = ()


class NotStarted(ClusterError):
    """A keeper does not start.

    Args:
        index: of its process among those of the group.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class Group:
    """Processes that run and end together, each with its keeper.

    Args:
        command: the command that each process runs.
        worker_hosts: the host of each process.
        meet: says, once the ports of these processes are known, where all processes of the job are.
        grace_s: seconds between SIGTERM and SIGKILL.
        started: starts the keeper of a process.

    Attributes:
        interrupted: whether a signal asked the processes to end.
        statuses: of processes that ended before all were ended, by index, in the order in which this was noticed.
        failure: why the status is not 0, in words.
        reasons: why whale_tf refuses the script, by the index of a process that has said so.
        failed_at: when that was noticed, or when all were asked to end; Unix time in seconds.

    Raises:
        NotStarted: a keeper does not start.
        ClusterError: a host does not come.
    """

    def __init__(self, command: Sequence[str], worker_hosts: Sequence[WorkerHost], meet: Callable[[Sequence[int]], Job],
                 grace_s: float, started: Optional[Callable[[WorkerHost], Keeper]] = None) -> None:
        self._grace_s = grace_s
        self.interrupted = False
        self.statuses: Dict[int, int] = {}
        self.failure = ""
        self.reasons: Dict[int, str] = {}
        self.failed_at = 0.0
        self._interrupted_at: Optional[float] = None
        self._worker_hosts = worker_hosts
        self._keepers: List[Keeper] = []
        self._threads: List[threading.Thread] = []
        self._lock = threading.Lock()
        self._told = 0.0
        self._first = 0  # rank of the first of these processes
        try:
            for host in worker_hosts:
                self._keepers.append((started or keeper_of)(host))
            for rank, keeper in enumerate(self._keepers):
                self._follow(rank, keeper.stderr, sys.stderr)
            job = meet([self._port(index) for index in range(len(worker_hosts))])
            self._first = job.first
            for index, own in enumerate(tf_configs_at(job.addresses)[job.first:job.first + len(worker_hosts)]):
                self._follow(index, self._keepers[index].stdout, sys.stdout)
                self._write(self._keepers[index], json.dumps(
                    self._task(command, worker_hosts[index], dict(job.variables, **own), len(job.addresses) > 1)))
        except BaseException:
            self._signal(signal.SIGKILL)
            for keeper in self._keepers:
                keeper.kill()
                keeper.wait()
            raise

    def _task(self, command: Sequence[str], host: WorkerHost, variables: Mapping[str, str], has_others: bool) -> Dict[str, Any]:
        there = {name: value for name, value in os.environ.items() if not OWN_TO_A_HOST.match(name)} if host.ssh else {}
        return {"command": list(command), "variables": dict(there, **variables), "directory": os.getcwd(),
                "mimics": not host.ssh, "grace_s": self._grace_s, "lease_s": LEASE_S if host.ssh else NEVER_S,
                "stopped_s": STOPPED_S if has_others else NEVER_S}

    def _port(self, rank: int) -> int:
        """The port that a keeper has found; what the host's shell prints before is shown."""
        keeper = self._keepers[rank]
        assert keeper.stdout is not None
        for line in iter(keeper.stdout.readline, b""):
            if line.startswith(PORT.encode()):
                return int(line[len(PORT):])
            self._print(rank, line, sys.stdout)
        raise NotStarted(rank, "process {} cannot be started on {}: {} ended with status {}".format(
            rank, self._worker_hosts[rank].name, " ".join(self._worker_hosts[rank].ssh) or "its keeper", keeper.wait()))

    def wait(self, patience: Callable[[Mapping[int, int]], float] = lambda statuses: 0.0,
             must_end: Callable[[], bool] = lambda: False) -> int:
        """Wait for all processes to end.  If one fails, stop the others.

        Args:
            patience: statuses of those that have ended -> seconds, from the first failure, for which others that have failed by
                themselves are waited for.
            must_end: is asked again and again whether all shall be asked to end, as by SIGTERM.

        Returns:
            0, or the status of the first that failed.
        """
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            status = self._first_failure(patience, must_end)
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        for thread in self._threads:
            thread.join(timeout=self._grace_s)
        return status

    def stop(self) -> None:
        """End all running processes: SIGTERM, then SIGKILL for each process and its children."""
        self._signal(signal.SIGTERM)
        if not self._have_ended_in(self._grace_s):
            self._signal(signal.SIGKILL)
            self._have_ended_in(KILL_S)
        for keeper in self._keepers:
            if keeper.poll() is None:  # its connection is broken, and it will end the process by itself
                keeper.kill()
            keeper.wait()

    def _have_ended_in(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while any(keeper.poll() is None for keeper in self._keepers):
            if time.monotonic() > limit:
                return False
            self._tell_alive()
            time.sleep(POLL_S)
        return True

    def _first_failure(self, patience: Callable[[Mapping[int, int]], float], must_end: Callable[[], bool]) -> int:
        failed_at: Optional[float] = None
        while True:
            for rank, keeper in enumerate(self._keepers):
                status = keeper.poll()
                if status is not None and rank not in self.statuses:
                    self.statuses[rank] = status
            have_ended = len(self.statuses) == len(self._keepers)
            failed = [(rank, status) for rank, status in self.statuses.items() if status]
            if failed:
                failed_at = failed_at or time.monotonic()
                self.failed_at = self.failed_at or time.time()
                if have_ended or time.monotonic() - failed_at >= patience(self.statuses):
                    rank, status = failed[0]
                    self.failure = self.how(rank)
                    return 128 - status if status < 0 else status
            elif have_ended:
                return 0
            elif self._interrupted_at is None and must_end():
                self._interrupted_at = time.monotonic()
                self.failed_at = time.time()
                self._signal(signal.SIGTERM)
            if self._interrupted_at is not None and time.monotonic() - self._interrupted_at > self._grace_s:
                self.failure = "processes did not end when asked to"
                return 128 + signal.SIGKILL
            self._tell_alive()
            time.sleep(POLL_S)

    def how(self, rank: int) -> str:
        """How a process has ended, in words."""
        host, status = self._worker_hosts[rank], self.statuses[rank]
        number = -status if status < 0 else status - 128 if host.ssh else 0
        how = f"status {status}"
        if number in [each.value for each in signal.Signals]:
            how = f"signal {signal.Signals(number).name}"
        elif host.ssh and status == 255:
            how += f": {host.ssh[0]} has no connection to {host.name}"
        return f"process {self._first + rank} ended with {how}"

    def _forward(self, number: int, frame: Any) -> None:
        self.interrupted = True
        self._interrupted_at = self._interrupted_at or time.monotonic()
        self._signal(number)

    def _signal(self, number: int) -> None:
        """Send a signal to the running processes, and SIGKILL to all processes that they have started, too."""
        for keeper in self._keepers:
            self._write(keeper, f"signal {int(number)}")

    def _tell_alive(self) -> None:
        """Ask keepers on other hosts for their processes: they end them when nobody does."""
        if time.monotonic() - self._told > ALIVE_S:
            self._told = time.monotonic()
            for keeper, host in zip(self._keepers, self._worker_hosts):
                if host.ssh:
                    self._write(keeper, "alive")

    def _write(self, keeper: Keeper, line: str) -> None:
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            os.write(keeper.stdin.fileno(), line.encode() + b"\n")

    def _follow(self, rank: int, stream: Optional[IO[bytes]], out: IO[str]) -> None:
        thread = threading.Thread(target=self._copy, args=(rank, stream, out), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _copy(self, rank: int, stream: IO[bytes], out: IO[str]) -> None:
        for line in iter(stream.readline, b""):
            if line.startswith(REASON.encode()):
                self.reasons[rank] = line[len(REASON):].decode("utf8", "replace").strip()
            else:
                self._print(rank, line, out)
        stream.close()

    def _print(self, rank: int, line: bytes, out: IO[str]) -> None:
        host = self._worker_hosts[rank]
        prefix = f"[{self._first + rank} {host.name}] " if host.ssh else f"[{self._first + rank}] "
        if out.isatty():
            prefix = f"\033[{COLOURS[rank % len(COLOURS)]}m{prefix}\033[0m"
        with self._lock:
            out.write(prefix + line.decode("utf8", "replace").rstrip("\n") + "\n")
            out.flush()


def keeper_of(host: WorkerHost) -> Keeper:
    """A new keeper, which has its text."""
    keeper = subprocess.Popen([*host.ssh, *_quoted(KEEPER, bool(host.ssh))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, start_new_session=True)
    assert keeper.stdin is not None
    with contextlib.suppress(OSError):  # it has ended
        os.write(keeper.stdin.fileno(), json.dumps(inspect.getsource(module_of_keeper)).encode() + b"\n")
    return keeper


def _quoted(command: Sequence[str], for_shell: bool) -> List[str]:
    """A command as arguments, or as the one argument that ssh gives to a shell."""
    return [" ".join(map(shlex.quote, command))] if for_shell else list(command)
