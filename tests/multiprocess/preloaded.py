"""Runs Python programs in forks of a process that has imported TensorFlow: the import takes longer than most programs of tests.

A program has a process, a session, arguments, an environment and a ``__main__`` of its own, and ends as Python ends. Python
programs that it starts (as ``whale run`` does) are forks of it. What is lost is the order of imports: TensorFlow always comes
first. Tests to which that order matters start Python anew.
"""
from __future__ import annotations

import ctypes
import inspect
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
import weakref
from multiprocessing import forkserver
from typing import Any, Mapping, NamedTuple, Optional, Sequence

LIGHT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "light")  # has a sitecustomize.py

_forks = multiprocessing.get_context("forkserver")
_exec = subprocess.Popen


class Fork:
    """A program that runs, with the part of ``subprocess.Popen`` that tests need."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, output: str) -> None:
        """
        Args:
            arguments: those of Python's command line.
            output: an existing file, to which the program appends what it prints.
        """
        _import_tensorflow()
        self._process = _forks.Process(target=_first, args=(list(arguments), dict(environment), folder, output))
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def poll(self) -> Optional[int]:
        return self._process.exitcode

    def wait(self, timeout: Optional[float] = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _import_tensorflow() -> None:
    """Starts the process that is forked; it ends with this one. It must import nothing that changes what a program does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = LIGHT
    try:
        _forks.set_forkserver_preload(["tensorflow"])
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


# -- inside of a fork --------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command line of Python: ``-m`` a module, ``-c`` code, or (empty) a script, and ``sys.argv`` from the second on."""

    kind: str
    what: str
    arguments: Sequence[str]
    are_warnings_ignored: bool = False


def parsed(command: Sequence[str]) -> Optional[Command]:
    """None: it has options that a fork cannot follow."""
    rest, ignored = list(command), False
    while rest and rest[0] in ("-u", "-I", "-S", "-W"):  # -I and -S: a keeper of whale run, which imports Python's library alone
        if rest.pop(0) == "-W":
            if rest.pop(0) != "ignore":
                return None
            ignored = True
    kind = rest.pop(0) if rest and rest[0] in ("-m", "-c") else ""
    return Command(kind, rest[0], rest[1:], ignored) if rest and not rest[0].startswith("-") else None


def _first(arguments: Sequence[str], environment: Mapping[str, str], folder: str, output: str) -> None:
    command = parsed(arguments)
    assert command is not None, arguments
    os.setsid()
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    _run(command, environment)


class ForkingPopen(_exec):
    """Forks this process where Python itself is to be started."""

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        named = inspect.signature(_exec._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        args, is_plain = named["args"], not (named["shell"] or named["pass_fds"] or named["executable"])
        command = parsed(args[1:]) if is_plain and isinstance(args, list) and args[0] == sys.executable else None
        if command is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = {key: named[key] for key in ("p2cread", "c2pwrite", "errwrite")}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary directories are this process's
            if named["start_new_session"]:
                os.setsid()
            for number, pipe in enumerate(pipes.values()):
                if pipe != -1:
                    os.dup2(pipe, number)
            if named["cwd"] is not None:
                os.chdir(named["cwd"])
            if named["preexec_fn"] is not None:
                named["preexec_fn"]()
            _run(command, dict(os.environ) if named["env"] is None else named["env"])
        self._child_created = True
        for pipe in set(pipes.values()) - {-1}:
            os.close(pipe)


_filters = list(warnings.filters)


def _run(command: Command, environment: Mapping[str, str]) -> None:
    """Never returns."""
    os.closerange(3, 1024)
    for number in signal.Signals:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = [  # unbuffered, as ``python -u`` has them
        io.TextIOWrapper(open(number, "wb", 0, closefd=False), errors=errors, write_through=True)
        for number, errors in ((1, "strict"), (2, "backslashreplace"))]
    for name in [name for name, module in sys.modules.items() if module is None]:
        del sys.modules[name]  # what LIGHT has hidden from Keras
    warnings.filters[:] = _filters  # type: ignore[index]
    if command.are_warnings_ignored:
        warnings.simplefilter("ignore")
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in sys.path[1:] if path]
    sys.argv = [command.kind or command.what, *command.arguments]
    status = 0
    try:
        if command.kind == "-c":
            names = {"__name__": "__main__", "__builtins__": __builtins__}
            sys.path[:0] = ["", *added]
            exec(compile(command.what, "<string>", "exec"), names)
        elif command.kind == "-m":
            sys.path[:0] = [os.getcwd(), *added]
            runpy.run_module(command.what, run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [os.path.dirname(os.path.abspath(command.what)), *added]
            runpy.run_path(command.what, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # by which whale_tf knows that a script has failed
        status = 1
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        except SystemExit as end:  # with a status of its own
            status = int(end.code or 0)
    ctypes.pythonapi.Py_Exit(status)  # as the end of Python: what is registered with atexit, then what C++ destroys
