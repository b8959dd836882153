"""Starts of processes that need not import TensorFlow again: each is a fork of a process that has done so, and nothing else.

::

    whale run ══ socket ══> server: imports TensorFlow and whale_tf, and waits
        │  "k", 4 pipes ───────> │ fork ──> keeper (cli/keeper.py) ── fork ──> the script, as Python would run it
        │ <── "started 4711" ─── │             │
        │ <── "0" ── pipe ─────────────────────┘ the script's exit status; end of file without it: the keeper was killed

A keeper lives without the server, which may end at any time: later starts then import TensorFlow again.

Neither TensorFlow 1.15 nor 2.x starts a thread, opens a device or makes a context when it is imported, and OpenBLAS, which NumPy
and SciPy use, makes its threads anew in a fork.  The server looks whether that is so here, and otherwise says that it cannot
serve.

The variables of the environment are those that the script had changed when it called ``wh.init``, since some count only when
TensorFlow is imported.
"""
from __future__ import annotations

import abc
import array
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence

from whale_tf.cli import keeper
from whale_tf.cli.group import Keeper, WorkerHost, keeper_of
from whale_tf.processes.endings import TOLD

POLL_S = 0.05
SETTLED_S = 2.0  # from the file that a process writes in wh.init to the start of the server
LIMIT_S = 120.0  # for the import of TensorFlow, or for a fork
REAP_S = 1.0
_FDS = 4  # standard input, output and error; and where a keeper says how its process has ended
_SERVER = ("import json, sys; sys.path[:1] = []; before = list(sys.path); sys.path.append({root!r}); "
           "from whale_tf.cli import warm; warm.serve({number}, before)")


class Warm:
    """The server, seen from the launcher.

    Args:
        say: takes a message to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._folder = tempfile.TemporaryDirectory()
        self._server: Optional[subprocess.Popen] = None
        self._socket: Optional[socket.socket] = None
        self._rest = b""
        self._is_ready: Optional[bool] = None  # None: not known yet
        self._started: List[int] = []  # process ids of keepers

    @property
    def variables(self) -> Dict[str, str]:
        """Environment variables of the processes, which tell the server what it needs."""
        return {TOLD: os.path.join(self._folder.name, "environment.json")}

    def tick(self) -> None:
        """Called now and then: starts the server, once a process has told of its environment."""
        if self._server is None:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(self.variables[TOLD]).st_mtime > SETTLED_S:
                    self._start()

    def _start(self) -> None:
        with open(self.variables[TOLD], encoding="utf8") as handle:
            told = json.load(handle)
        changed = dict(os.environ, **{name: value for name, value in told.items() if value is not None})
        for name, value in told.items():
            if value is None:
                changed.pop(name, None)
        self._socket, theirs = socket.socketpair()
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER.format(root=root, number=theirs.fileno())], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=changed, pass_fds=[theirs.fileno()],
                start_new_session=True)
        with contextlib.suppress(OSError):  # it has ended, which is noticed later
            self._socket.sendall(json.dumps(dict(os.environ)).encode() + b"\n")

    def keeper(self, host: WorkerHost) -> Keeper:
        """A new keeper of this machine's, a fork if the server runs; of another host as always."""
        if host.ssh or self._server is None:
            return keeper_of(host)
        self._wait(lambda: self._is_ready is not None)
        return (self._fork() if self._is_ready else None) or keeper_of(host)

    def _fork(self) -> Optional[Keeper]:
        """A fork of the server; None: the server has ended, or does not answer."""
        assert self._socket is not None
        pipes = [os.pipe() for _ in range(_FDS)]  # (read, write) of what is to be the keeper's 0, 1, 2 and 3
        theirs = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
        ours = [pipes[0][1], *(pipe[0] for pipe in pipes[1:])]
        count = len(self._started)
        try:
            self._socket.sendmsg([b"k"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))])
            self._wait(lambda: len(self._started) > count)
        except OSError:
            self._give_up("it has ended")
        finally:
            for number in theirs:
                os.close(number)
        if len(self._started) > count:
            return ForkedKeeper(self._started[-1], ours)
        for number in ours:
            os.close(number)
        return None

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Until then, until the server is known not to serve, or until it takes too long."""
        limit = time.monotonic() + LIMIT_S
        while self._is_ready is not False and not is_done():
            if time.monotonic() > limit:
                self._give_up(f"it has not answered for {LIMIT_S:g} s")
            else:
                self._read(1.0)

    def _read(self, seconds: float) -> None:
        """Takes note of what the server says within ``seconds``."""
        assert self._socket is not None
        if not select.select([self._socket], [], [], seconds)[0]:
            return
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._give_up("it has ended")
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf8").partition(" ")
            if word == "ready":
                self._is_ready = True
            elif word == "started":
                self._started.append(int(rest))
            else:
                self._give_up(rest)

    def _give_up(self, why: str) -> None:
        if self._is_ready is not False:
            self._is_ready = False
            self._say(f"processes start anew, not as forks of one that has imported TensorFlow: {why}")

    def close(self) -> None:
        """Ends the server; its forks go on."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()


class _Polled(abc.ABC):
    """What has the part of ``subprocess.Popen`` that tells of an end."""

    @abc.abstractmethod
    def poll(self) -> Optional[int]:
        """The exit status, negative for a signal; None: it runs."""

    def wait(self) -> int:
        while True:
            status = self.poll()
            if status is not None:
                return status
            time.sleep(POLL_S)


class ForkedKeeper(_Polled):
    """Stands in for the ``subprocess.Popen`` of a keeper.

    Args:
        pipes: this process's ends of the keeper's standard input, output and error, and of the one where it says how its process
            has ended.
    """

    def __init__(self, pid: int, pipes: Sequence[int]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = open(pipes[0], "wb", 0), open(pipes[1], "rb"), open(pipes[2], "rb")
        self._end, self._said = open(pipes[3], "rb", 0), b""
        os.set_blocking(pipes[3], False)
        self._status: Optional[int] = None

    def poll(self) -> Optional[int]:
        while self._status is None:
            data = self._end.read(64)
            if data is None:  # it has not said anything
                return None
            self._said += data
            if not data:
                self._end.close()
                self._status = int(self._said or -signal.SIGKILL)
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------- the server
def serve(number: int, path: Sequence[str]) -> None:
    """The server's whole life.

    Args:
        number: file descriptor of its socket.
        path: ``sys.path`` of scripts, behind their own folder.
    """
    launcher = socket.socket(fileno=number)
    with launcher.makefile("rb", 0) as lines:
        environment = json.loads(lines.readline())
    problem = _problem()
    launcher.sendall(b"ready\n" if not problem else f"unsafe {problem}\n".encode())
    gc.collect()
    gc.freeze()  # forks share these objects
    while not problem:
        if select.select([launcher], [], [], REAP_S)[0]:
            data, rights, _, _ = launcher.recvmsg(1, socket.CMSG_SPACE(_FDS * array.array("i").itemsize))
            if not data:
                break
            pipes = array.array("i")
            pipes.frombytes(rights[0][2][:_FDS * pipes.itemsize])
            pid = os.fork()
            if pid == 0:
                _keep(list(pipes), environment, path)
            for pipe in pipes:
                os.close(pipe)
            launcher.sendall(f"started {pid}\n".encode())
        with contextlib.suppress(ChildProcessError):  # there are none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _problem() -> str:
    """Imports TensorFlow; why this process must not be forked, if so."""
    try:
        import tensorflow as tf
        from tensorflow.python.eager import context

        import whale_tf.api  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    if getattr(context, "_context", None) is not None and context._context._initialized:
        return f"importing TensorFlow {tf.__version__} made a context"
    if not os.path.isdir("/proc/self/task"):
        return f"the threads of a process are not known on {sys.platform}"
    with open("/proc/self/maps", encoding="utf8") as handle:
        libraries = {os.path.basename(line.split()[-1]) for line in handle if "openblas" in line}
    most = 1 + len(libraries) * (len(os.sched_getaffinity(0)) - 1)
    count = len(os.listdir("/proc/self/task"))
    if count > most:
        return f"importing TensorFlow {tf.__version__} started {count - most} threads"
    opened = [name for name in (_target(name) for name in os.listdir("/proc/self/fd")) if name.startswith("/dev/nvidia")]
    return f"importing TensorFlow {tf.__version__} opened {opened[0]}" if opened else ""


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the folder itself
        return ""


def _keep(pipes: Sequence[int], environment: Mapping[str, str], path: Sequence[str]) -> NoReturn:
    """A fork of the server becomes a keeper."""
    try:
        os.setsid()
        for number, pipe in enumerate(pipes):  # these are in ascending order, from 3 on
            os.dup2(pipe, number)
        os.closerange(_FDS, 1024)
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _written(1, "strict"), _written(2, "backslashreplace")
        keeper.main(lambda task: Forked(task, environment, path), _finish)
    finally:
        os._exit(1)


def _finish(status: int, mimics: bool) -> None:
    """Says how the script has ended."""
    os.write(_FDS - 1, str(status).encode())
    os._exit(0)


class Forked(_Polled):
    """Stands in for the ``subprocess.Popen`` of a script."""

    def __init__(self, task: Dict[str, Any], environment: Mapping[str, str], path: Sequence[str]) -> None:
        ends_with_this = keeper.dies_with_this()
        self.pid = os.fork()
        self._status: Optional[int] = None
        if self.pid == 0:
            try:
                os.setsid()
                if ends_with_this is not None:
                    ends_with_this()
                os.closerange(3, 1024)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.chdir(task["directory"])
                _run(task["command"][1:], dict(environment, **task["variables"]), path)
            finally:
                os._exit(1)

    def poll(self) -> Optional[int]:
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = _exit_status(status) if ended else None
        return self._status


def _run(arguments: Sequence[str], environment: Mapping[str, str], path: Sequence[str]) -> NoReturn:
    """``python ARGUMENTS``, in this process: ``[-u] SCRIPT ...`` or ``[-u] -m MODULE ...``."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # each process has its own, as if it had just been started
    sys.modules["numpy"].random.seed()
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _written(1, "strict"), _written(2, "backslashreplace")
    rest = [one for one in arguments[:1] if one != "-u"] + list(arguments[1:])
    is_module = rest[0] == "-m"
    name, *others = rest[1:] if is_module else rest
    sys.argv = [name, *others]
    sys.path[:] = [os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)), *path]
    status = 0
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # by which whale_tf knows that a script has failed
        status = 1
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        except SystemExit as end:  # with a status of its own
            status = _status_of(end)
    ctypes.pythonapi.Py_Exit(status)  # as the end of Python: what is registered with atexit, then what C++ destroys
    os._exit(status)


def _status_of(end: SystemExit) -> int:
    if isinstance(end.code, int) or end.code is None:
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _written(number: int, errors: str) -> Any:
    """Standard output or error, without a buffer, as ``python -u`` has them."""
    return io.TextIOWrapper(open(number, "wb", 0, closefd=False), errors=errors, write_through=True)


def _exit_status(status: int) -> int:
    """As ``subprocess`` gives it: negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
