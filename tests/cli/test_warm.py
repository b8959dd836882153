"""Forks of a process that has imported TensorFlow take the place of processes that import it; here nothing is imported."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List

import pytest

from tests.cli.test_elastic import until
from whale_tf.cli import warm
from whale_tf.cli.group import Group, Job, WorkerHost
from whale_tf.cli.warm import ForkedKeeper, Warm
from whale_tf.processes.endings import TOLD, tell_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux")
HERE = WorkerHost("127.0.0.1")
SERVER = warm._SERVER


class Launcher:
    """What forks scripts.

    Attributes:
        said: to the user.
    """

    def __init__(self, tmp_path: Any) -> None:
        self.said: List[str] = []
        self.warm = Warm(self.said.append)
        self._path = tmp_path / "script.py"

    def begin(self, **told: Any) -> None:
        """The server runs; ``told`` is what the script of the first start has changed in its environment."""
        with open(self.warm.variables[TOLD], "w", encoding="utf8") as handle:
            json.dump(told, handle)
        self.warm.tick()

    @property
    def server(self) -> int:
        """Its process id."""
        assert self.warm._server is not None
        return self.warm._server.pid

    def group(self, text: str, count: int = 1, grace_s: float = 5.0, **variables: str) -> Group:
        self._path.write_text("import json, os, signal, subprocess, sys, time\n" + text)
        return Group([sys.executable, "-u", str(self._path), "a b", "-x"], [HERE] * count, lambda ports: Job(
            [f"127.0.0.1:{port}" for port in ports], 0, variables), grace_s, self.warm.keeper)


@pytest.fixture
def launcher(tmp_path: Any, monkeypatch: Any) -> Iterator[Launcher]:
    monkeypatch.setattr(warm, "_SERVER", SERVER.replace("warm.serve", "warm._problem = lambda: ''; warm.serve"))
    monkeypatch.setattr(warm, "SETTLED_S", -1.0)
    found = Launcher(tmp_path)
    yield found
    found.warm.close()


def are_forks(group: Group) -> List[bool]:
    return [isinstance(keeper, ForkedKeeper) for keeper in group._keepers]


@pytest.mark.slow
def test_fork_is_as_a_process_of_its_own(launcher: Launcher, capfd: Any, monkeypatch: Any, tmp_path: Any) -> None:
    """Arguments, paths, environment, session, files: those that Python would have started the script with.  What the script of
    the first start had changed in the environment is not yet changed."""
    text = ("paths = sorted(map(os.path.realpath, filter(None, sys.path[1:])))\n"
            "print('same', json.dumps([sys.argv, sys.path[0], paths, __name__, os.environ['MY_OWN'], os.environ.get('ADDED'),\n"
            "    os.environ['FROM_JOB'], os.getcwd(), os.getsid(0) == os.getpid(),\n"
            "    sorted(os.listdir('/proc/self/fd'))[:3], sys.stdin.read(), sys.modules['__main__'].__name__,\n"
            "    signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, 'TF_CONFIG' in os.environ]))\n"
            "print('random', __import__('random').random(), 'pid', os.getpid()); print('warned', file=sys.stderr)")
    monkeypatch.setenv("MY_OWN", "1 2")
    outputs = []
    for is_fork in (False, True):
        if is_fork:
            launcher.begin(ADDED="3", MY_OWN=None)
        group = launcher.group(text, 2, FROM_JOB="4")
        assert group.wait() == 0 and are_forks(group) == [is_fork] * 2
        outputs.append(capfd.readouterr())
    same = [sorted(line for line in output.out.splitlines() if "same" in line) for output in outputs]
    assert len(same[0]) == 2 and same[0] == same[1]
    assert len({line.split("random ")[1] for line in outputs[1].out.splitlines() if "random" in line}) == 2  # each its own
    assert sorted(outputs[1].err.splitlines()) == ["[0] warned", "[1] warned"]


@pytest.mark.slow
def test_fork_ends_as_a_process_of_its_own(launcher: Launcher, capfd: Any) -> None:
    """The last one kills its keeper, with which it ends."""
    launcher.begin()
    for text, status, said in (
            ("sys.exit(7)", 7, ""), ("sys.exit('no data')", 1, "no data"), ("1 / 0", 1, "ZeroDivisionError: division by zero"),
            ("sys.excepthook = lambda *_: sys.exit(78)\n1 / 0", 78, ""), ("os._exit(9)", 9, ""),
            ("import atexit; atexit.register(print, 'at exit')\nsys.exit(3)", 3, "at exit"),
            ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, ""),
            ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)", 128 + signal.SIGKILL, "")):
        group = launcher.group(f"print('pid', os.getpid())\n{text}")
        assert group.wait() == status and are_forks(group) == [True], text
        output = capfd.readouterr()
        assert said in output.out + output.err, text
        pid = int(output.out.split("pid ")[1].split()[0])
        until(lambda: not alive(pid))
        assert not alive(pid), text


@pytest.mark.slow
def test_fork_gets_signals_and_is_killed_with_its_children(launcher: Launcher, capfd: Any) -> None:
    """One fails; the other, which does not listen to SIGTERM, and its child are killed after the time of grace."""
    launcher.begin()
    group = launcher.group("if json.loads(os.environ['TF_CONFIG'])['task']['index']: time.sleep(0.5); sys.exit(7)\n"
                           "signal.signal(signal.SIGTERM, lambda *_: print('asked'))\n"
                           "print('pid', subprocess.Popen(['sleep', '600']).pid)\nwhile True: time.sleep(0.1)", 2, 0.5)
    assert group.wait() == 7
    output = capfd.readouterr().out
    assert "[0] asked" in output and not alive(int(output.split("pid ")[1].split()[0]))


@pytest.mark.slow
def test_forks_go_on_without_the_server(launcher: Launcher, capfd: Any) -> None:
    """It is killed while they run: how they end is known all the same.  Later processes start anew, which is said once."""
    launcher.begin()
    group = launcher.group("print('here', flush=True); time.sleep(0.3)\nsys.exit(5)", 2)
    os.kill(launcher.server, signal.SIGKILL)
    assert group.wait() == 5 and are_forks(group) == [True, True] and launcher.said == []
    for _ in range(2):
        again = launcher.group("print('again')", 2)
        assert again.wait() == 0 and are_forks(again) == [False, False]
    assert launcher.said == ["processes start anew, not as forks of one that has imported TensorFlow: it has ended"]
    assert capfd.readouterr().out.count("] again") == 4


@pytest.mark.slow
def test_server_that_does_not_answer_is_not_waited_for(launcher: Launcher, monkeypatch: Any) -> None:
    """It is stopped."""
    launcher.begin()
    assert launcher.group("").wait() == 0
    monkeypatch.setattr(warm, "LIMIT_S", 0.2)
    os.kill(launcher.server, signal.SIGSTOP)
    group = launcher.group("sys.exit(4)", 2)
    assert group.wait() == 4 and are_forks(group) == [False, False]
    assert len(launcher.said) == 1 and "it has not answered for 0.2 s" in launcher.said[0]


@pytest.mark.slow
def test_server_that_must_not_be_forked_says_so(launcher: Launcher, monkeypatch: Any) -> None:
    monkeypatch.setattr(warm, "_SERVER", SERVER.replace("warm.serve", "warm._problem = lambda: '3 threads'; warm.serve"))
    launcher.begin()
    group = launcher.group("")
    assert group.wait() == 0 and are_forks(group) == [False]
    assert launcher.said == ["processes start anew, not as forks of one that has imported TensorFlow: 3 threads"]


@pytest.mark.slow
def test_process_that_has_imported_tensorflow_may_be_forked() -> None:
    """It has no threads, devices or context, as the server looks for itself."""
    found = subprocess.run([sys.executable, "-c", "from whale_tf.cli import warm; print('problem', repr(warm._problem()))"],
                           stdout=subprocess.PIPE, check=True).stdout.decode()
    assert "problem ''\n" in found


@pytest.mark.slow
def test_forks_end_with_the_launcher(launcher: Launcher, capfd: Any) -> None:
    """As the launcher's death does, closing its pipes ends a fork."""
    launcher.begin()
    group = launcher.group("print('pid', os.getpid(), flush=True); time.sleep(600)", grace_s=0.5)
    time.sleep(0.3)
    for keeper in group._keepers:
        keeper.stdin.close()
    assert group._keepers[0].wait() == -signal.SIGTERM
    launcher.warm.close()


def test_environment_that_is_told(tmp_path: Any, monkeypatch: Any) -> None:
    """What differs from the environment that this process was started with."""
    path = tmp_path / "environment.json"
    given = [name for name in _given() if name in os.environ]
    monkeypatch.setenv("ADDED", "1")
    monkeypatch.delenv(given[0])
    tell_environment()  # nobody asks
    monkeypatch.setenv(TOLD, str(path))
    tell_environment()
    told = json.loads(path.read_text())
    assert told["ADDED"] == "1" and told[given[0]] is None and given[1] not in told
    path.write_text("{}")
    tell_environment()
    assert path.read_text() == "{}" and os.listdir(str(tmp_path)) == ["environment.json"]


def _given() -> Dict[str, str]:
    with open("/proc/self/environ", "rb") as handle:
        return dict(pair.decode().partition("=")[::2] for pair in handle.read().split(b"\0") if b"=" in pair)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
