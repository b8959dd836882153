"""Starts processes that are sure to end: each in a session of its own, killed with its children when time is up."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Union

from tests.multiprocess.preloaded import Fork
from whale_tf.cluster.processes import free_ports, tf_configs

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WHALE_RUN = ("-m", "whale_tf.cli", "run")
RUN_S = 300  # at most: a short training, on a machine with other work, which may stand still for a minute


class Process:
    """A Python process whose output is kept.

    Attributes:
        status: set by ``wait``.
    """

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str], anew: bool) -> None:
        self._output = tempfile.NamedTemporaryFile()
        environment = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "WHALE_CLUSTER")}
        environment.update(variables, PYTHONPATH=ROOT, PYTHONUNBUFFERED="1")
        command = ["-W", "ignore", *arguments]
        self._process: Union[subprocess.Popen, Fork]
        if anew:
            self._process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                                             stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True)
        else:
            self._process = Fork(command, environment, ROOT, self._output.name)
        self.status: Optional[int] = None

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode("utf8", "replace")

    def wait(self, timeout_s: float) -> int:
        """The exit status; a process that has not ended in time fails the test (and is killed, see :class:`Starter`)."""
        try:
            self.status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {timeout_s} s:\n{self.output}")
        return self.status

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, text: str, timeout_s: float) -> None:
        limit = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.is_running, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < limit, f"no {text!r} within {timeout_s} s:\n{self.output}"
            time.sleep(0.1)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self.send(signal.SIGTERM)  # `whale run` ends its processes, which are in sessions of their own
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._output.close()


class Starter:
    """Starts processes; as a context manager ends all of them.

    Args:
        anew: as a user starts them, which takes seconds where TensorFlow is imported; otherwise they are forks of a process that
            has imported it (:mod:`tests.multiprocess.preloaded`).
    """

    def __init__(self, anew: bool = False) -> None:
        self._anew = anew
        self._started: List[Process] = []

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._started:
            process.kill()

    def start(self, *arguments: str, **variables: str) -> Process:
        process = Process(arguments, variables, self._anew)
        self._started.append(process)
        return process

    def workers(self, count: int) -> List[Worker]:
        return [Worker(self, variables) for variables in tf_configs(free_ports(count))]


def printed(*arguments: str, timeout_s: float = RUN_S, anew: bool = False) -> str:
    """What a Python program prints, which must succeed."""
    with Starter(anew) as starter:
        process = starter.start(*arguments)
        assert process.wait(timeout_s) == 0, process.output[-5000:]
        return process.output


class Worker(NamedTuple):
    """Starts one process of a job with the given arguments."""

    starter: Starter
    variables: Dict[str, str]

    def __call__(self, *arguments: str, **more: str) -> Process:
        return self.starter.start(*arguments, **dict(self.variables, **more))
