"""Jobs whose number of workers changes: who trains, what an end means, and whole jobs of scripts without TensorFlow."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest

from whale_tf.cli import elastic
from whale_tf.cli.elastic import CULPRIT_S, SAME_S, Elastic, Events, Members, Rate, fate, patience
from whale_tf.cli.group import WorkerHost
from whale_tf.errors import ClusterError

NEVER_S = 1e6
LOST, TAKEN, LEFT, REFUSED, SCATTERED = -signal.SIGKILL, 143, 75, 78, 79  # statuses


# ---------------------------------------------------------------------------------------------------- what decides
@pytest.mark.parametrize("text, times, seconds", [
    ("0", 0, None), ("3", 3, None), ("3/1h", 3, 3600), ("2/10m", 2, 600), ("1/1.5s", 1, 1.5)])
def test_rate(text: str, times: int, seconds: Optional[float]) -> None:
    assert Rate.parse(text, "--max-restarts") == (times, seconds)


@pytest.mark.parametrize("text", ["", "-1", "3/", "3/h", "3/1d", "1.5", "3/1h/2"])
def test_rate_that_is_none(text: str) -> None:
    with pytest.raises(ClusterError, match="--max-restarts is .*, expected a number, or one for a time such as 3/1h"):
        Rate.parse(text, "--max-restarts")


def test_events_count_within_their_time() -> None:
    budget = Events(Rate(2, 10.0))
    assert [budget.spend(now) for now in (0.0, 1.0, 2.0, 10.5, 11.5, 12.0)] == [True, True, False, True, True, False]
    altogether = Events(Rate(1))
    assert altogether.spend(0.0) and not altogether.spend(1e9)


def test_members_are_those_that_are_there() -> None:
    members = Members(4, 2, Rate(3, 600.0))
    assert members.chosen() == [0, 1, 2, 3]
    members.lose(1, 0.0)
    assert members.chosen() == [0, 2, 3] and members.returning() == [1]
    members.lose(0, 1.0)
    members.lose(3, 1.0)
    assert members.chosen() == [] and members.could_be_enough()  # one is left, two must train
    members.back(3)
    assert members.chosen() == [2, 3]
    members.back(1)
    members.back(0)
    assert members.chosen() == [0, 1, 2, 3]


def test_members_are_as_many_as_fit() -> None:
    members = Members(4, 1, Rate(3))
    members.lose(0, 0.0)
    members.refuse([1, 2, 3])
    assert members.chosen() == [1, 2]
    members.refuse([1, 2])
    assert members.chosen() == [1]
    members.back(0)
    assert members.chosen() == [0, 1, 2, 3]  # four have not been refused
    members.refuse([1])
    members.refuse([0, 1, 2, 3])
    assert members.chosen() == [] and not members.could_be_enough()
    assert members.demand() == "--workers asks for at least 1, and whale_tf refuses 1, 2, 3, 4"


def test_members_with_other_devices_have_not_been_refused() -> None:
    members = Members(4, 1, Rate(3), [1, 2, 1, 1])
    members.refuse([0, 1, 2, 3])
    tried = []
    while members.chosen():
        tried.append(members.chosen())
        members.refuse(tried[-1])
    assert tried == [[0, 2, 3], [1, 2, 3], [0, 2], [1, 3], [0], [1]]


def test_members_that_lack_parts_of_snapshots_go_on_with_others() -> None:
    members = Members(4, 1, Rate(3))
    members.lose(3, 0.0)
    members.refuse([0, 1, 2])
    members.scatter([0, 1])
    assert members.chosen() == [1, 2]
    members.scatter([1, 2])
    assert members.chosen() == [0, 2]
    members.scatter([0, 2])
    assert members.chosen() == [] and members.could_be_enough()
    assert members.demand() == (
        "--workers asks for at least 1, and whale_tf refuses 3, and those that are there lack parts of snapshots")
    members.back(3)
    assert members.chosen() == [0, 1, 2, 3]
    members.have_gone_on()
    members.lose(3, 0.0)
    assert members.chosen() == [0, 1]


def test_member_that_flaps_is_left_out() -> None:
    members = Members(2, 1, Rate(2, 600.0))
    assert not members.lose(1, 0.0)
    members.back(1)
    assert not members.lose(1, 700.0)  # the first loss no longer counts
    members.back(1)
    assert members.lose(1, 800.0) and members.returning() == [] and members.chosen() == [0]
    assert members.could_be_enough() and not members.lose(0, 800.0)
    members.lose(0, 801.0)
    assert not members.could_be_enough()


@pytest.mark.parametrize("status, expected", [
    (0, "done"), (1, "failed"), (7, "failed"), (127, "failed"), (LEFT, "left"), (REFUSED, "refused"), (SCATTERED, "scattered"),
    (TAKEN, "taken"),
    (-signal.SIGTERM, "taken"), (LOST, "lost"), (-signal.SIGSEGV, "lost"), (128 + signal.SIGKILL, "lost"), (255, "lost")])
def test_fate(status: int, expected: str) -> None:
    """Over ssh, 128 and a signal's number stand for the signal, and 255 for a broken connection."""
    assert fate(status) == expected


@pytest.mark.parametrize("statuses, expected", [
    ([LOST], SAME_S), ([1, LOST], SAME_S), ([REFUSED], SAME_S), ([SCATTERED], SAME_S), ([1], CULPRIT_S), ([LEFT], CULPRIT_S),
    ([TAKEN, LOST], CULPRIT_S)])
def test_patience(statuses: Sequence[int], expected: float) -> None:
    """Whoever failed first may have lost another, whose end is not noticed yet; the others of one that was asked to end take a
    snapshot first."""
    assert patience(dict(enumerate(statuses))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("error, status", [
    ("ConfigError('x')", REFUSED), ("ScatteredError('x')", SCATTERED), ("ProcessLostError('x')", LEFT),
    ("NotStartedError('x')", LEFT), ("ValueError('x')", 1)])
def test_error_that_nobody_catches_has_a_status_of_its_own(error: str, status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", "from whale_tf.errors import *; from whale_tf.processes.endings import *\n"
                            "from whale_tf.processes.watch import NotStartedError\n"
                            f"tell_launcher(); tell_launcher()\nraise {error}"], stderr=subprocess.PIPE)
    expected = f"{error.split('(')[0]}: x\n" + "whale refused x\n" * (status in (REFUSED, SCATTERED))
    assert ended.returncode == status and ended.stderr.decode().endswith(expected)


# ------------------------------------------------------------------------------------------------------- whole jobs
START = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"] or "{}")
rank, count = task.get("task", {}).get("index", 0), len(task.get("cluster", {}).get("worker", [0]))
begun, start = sys.argv[1], int(os.environ["START"])
open(os.path.join(begun, "%d.%d" % (start, rank)), "w").close()
def lose():
    os.kill(os.getpid(), signal.SIGKILL)
def all_begin():
    while len([name for name in os.listdir(begun) if name.startswith("%d." % start)]) < count:
        time.sleep(0.01)
"""


class Begun:
    """A job, and how many processes each start has had."""

    def __init__(self, tmp_path: Any, monkeypatch: Any) -> None:
        self._tmp_path, self._monkeypatch = tmp_path, monkeypatch
        self.folder = tmp_path / "begun"
        self.folder.mkdir()
        self.asked: List[Tuple[int, ...]] = []  # workers of each start

    def run(self, text: str, hosts: Sequence[WorkerHost], least: int = 1, restarts: Rate = Rate(0), flapping: Rate = Rate(9),
            rejoin_s: float = NEVER_S, wait_s: float = 0.0, grace_s: float = 5.0) -> int:
        path = self._tmp_path / "script.py"
        path.write_text(START + text)

        def variables(workers: Sequence[int]) -> Dict[str, str]:
            self.asked.append(tuple(workers))
            return {"START": str(len(self.asked) - 1)}
        return Elastic([sys.executable, "-S", str(path), str(self.folder)], hosts, least, variables, grace_s, restarts, flapping,
                       rejoin_s, wait_s, False).run()

    @property
    def counts(self) -> List[int]:
        starts = [int(name.split(".")[0]) for name in os.listdir(str(self.folder))]
        return [starts.count(start) for start in range(max(starts, default=-1) + 1)]


@pytest.fixture
def job(tmp_path: Any, monkeypatch: Any) -> Begun:
    return Begun(tmp_path, monkeypatch)


def here(count: int) -> List[WorkerHost]:
    return [WorkerHost("127.0.0.1")] * count


@pytest.mark.slow
def test_job_goes_on_without_two_that_are_lost_at_once(job: Begun, capfd: Any) -> None:
    """The processes that are left wait for the lost ones, and are ended."""
    status = job.run("all_begin()\nif start == 0 and rank in (1, 3): lose()\nif start == 0: time.sleep(600)", here(4), 2)
    said = capfd.readouterr().err
    assert status == 0 and job.counts == [4, 2] and job.asked == [(0, 1, 2, 3), (0, 2)], said
    assert "lost worker 1: process 1 ended with signal SIGKILL; worker 3: process 3 ended with signal SIGKILL, noticed at" in said
    assert said.count("whale run: starting 2 workers (0, 2)\n") == 1, said


@pytest.mark.slow
def test_job_that_loses_another_while_it_starts_again(job: Begun, capfd: Any) -> None:
    """The numbers of its processes are not those of its workers any more."""
    status = job.run("if start == 0 and rank == 0 or start == 1 and rank == 1: lose()\nif start < 2: time.sleep(600)", here(3))
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1, 2), (1, 2), (1,)], said
    assert "lost worker 0: process 0 ended" in said and "lost worker 2: process 1 ended" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("restarts, starts", [(Rate(0), 1), (Rate(1, 3600.0), 2)])
def test_error_of_the_script_ends_the_job(job: Begun, capfd: Any, restarts: Rate, starts: int) -> None:
    """Nobody is lost if every process ends with the same error."""
    status = job.run("raise ValueError('mine')", here(2), restarts=restarts)
    said = capfd.readouterr().err
    assert status == 1 and job.asked == [(0, 1)] * starts and "lost" not in said, said
    assert said.count("ValueError: mine") == 2 * starts, said
    assert said.count("restarting all processes (1 of 1 times in 3600 s)") == starts - 1, said


@pytest.mark.slow
def test_error_of_one_that_has_lost_another_is_not_the_scripts(job: Begun, capfd: Any) -> None:
    """Process 0 fails first; process 1, which is at fault, is noticed later."""
    status = job.run("all_begin()\nif start == 0 and rank == 0: sys.exit(1)\nif start == 0: time.sleep(0.7); lose()", here(2))
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1), (0,)] and "lost worker 1: process 1 ended with signal SIGKILL" in said, said


@pytest.mark.slow
def test_job_takes_the_next_smaller_number_that_is_not_refused(job: Begun, capfd: Any) -> None:
    status = job.run("if start == 0 and rank == 3: lose()\nif start == 0: time.sleep(600)\n"
                     "if count in (2, 3): print('whale refused why not ' + str(count), file=sys.stderr); sys.exit(78)", here(4))
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1, 2, 3), (0, 1, 2), (0, 1), (0,)], said
    assert "whale run: going on with 2 workers (0, 1), since whale_tf refuses the script on 3 workers: why not 3\n" in said, said
    assert "whale run: going on with worker 0, since whale_tf refuses the script on 2 workers: why not 2\n" in said, said
    assert said.count("why not") == 2, said


@pytest.mark.slow
def test_job_that_lacks_parts_of_snapshots_tries_these_workers_again_later(job: Begun, capfd: Any) -> None:
    """One alone could not go on, until two had."""
    status = job.run("all_begin()\nif start in (0, 2) and rank == 1: lose()\nif start in (0, 2): time.sleep(600)\n"
                     "if start == 1: print('whale refused part-1 is lost', file=sys.stderr); sys.exit(79)", here(2), wait_s=30.0)
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1), (0,), (0, 1), (0,)], said
    assert "worker 0 cannot go on alone: part-1 is lost\nwhale run: waiting up to 30 s for lost workers: --workers asks for at " \
        "least 1, and those that are there lack parts of snapshots\n" in said, said


@pytest.mark.slow
def test_job_that_is_refused_waits_for_lost_workers(job: Begun, capfd: Any) -> None:
    """Two have trained, and it may be that one cannot: its snapshots are on both hosts."""
    status = job.run("all_begin()\nif start == 0 and rank == 1: lose()\nif start == 0: time.sleep(600)\n"
                     "if count == 1: sys.exit(78)", here(2), wait_s=30.0)
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1), (0,), (0, 1)], said
    assert "waiting up to 30 s for lost workers: --workers asks for at least 1, and whale_tf refuses 1\n" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 3])
def test_job_that_is_refused_ends(job: Begun, capfd: Any, least: int) -> None:
    """At once if the first start is refused, otherwise if no smaller number may train."""
    text = "sys.exit(78)" if least == 1 else "if start == 0 and rank == 0: lose()\ntime.sleep(600 * (start == 0)); sys.exit(78)"
    assert job.run(text, here(4), least) == 78
    assert job.asked == ([(0, 1, 2, 3)] if least == 1 else [(0, 1, 2, 3), (1, 2, 3)]), capfd.readouterr().err


@pytest.mark.slow
def test_worker_that_flaps_is_left_out_and_this_is_said_once(job: Begun, capfd: Any) -> None:
    """It is lost again after each return, until it may not come back; the job goes on without it."""
    status = job.run("all_begin()\nif count == 2 and rank == 1: time.sleep(0.2); lose()\n"
                     "if count == 2: time.sleep(600)\ntime.sleep(1)", here(2), flapping=Rate(2, 600.0), rejoin_s=0.3)
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1), (0,), (0, 1), (0,)], said
    assert said.count("worker 1 was lost 2 times in 600 s (--leave-out), and is left out from now on") == 1, said
    assert said.count("worker 1 can train again; the others end after a snapshot") == 1, said


@pytest.mark.slow
def test_job_takes_workers_in_when_asked_to(job: Begun, capfd: Any) -> None:
    """SIGUSR2, at once. A process that was asked to end is not lost, whether it ends by the signal or after a snapshot."""
    threading.Thread(target=lambda: (until(lambda: len(job.counts) == 2 and job.counts[1] == 2),
                                     os.kill(os.getpid(), signal.SIGUSR2))).start()
    status = job.run("if rank: signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nall_begin()\n"
                     "if start == 0 and rank == 1: lose()\nif start < 2: time.sleep(600)", here(3))
    assert status == 0 and job.asked == [(0, 1, 2), (0, 2), (0, 1, 2)], capfd.readouterr().err


@pytest.mark.slow
def test_worker_that_is_taken_away_is_lost_once_all_have_ended(job: Begun, capfd: Any) -> None:
    """It was asked to end by somebody else; the others end after it, in their own time."""
    status = job.run("all_begin()\nif start == 0: time.sleep(0 if rank == 0 else 0.8); sys.exit(143 if rank == 0 else 75)",
                     here(3))
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1, 2), (1, 2)] and "lost worker 0: process 0 ended with status 143" in said, said


@pytest.mark.slow
def test_processes_that_lose_each_other_again_and_again_end_the_job(job: Begun, capfd: Any) -> None:
    status = job.run("sys.exit(75)", here(2), flapping=Rate(2, 600.0))
    said = capfd.readouterr().err
    assert status == 75 and job.asked == [(0, 1)] * 2, said
    assert "processes have lost each other 2 times in 600 s while all were there; look at the network" in said, said


@pytest.mark.slow
def test_job_of_too_few_ends(job: Begun, capfd: Any) -> None:
    """All are lost by a crash of the script, and come back until none may."""
    status = job.run("all_begin()\nlose()", here(2), 2, flapping=Rate(2, 600.0), wait_s=30.0)
    said = capfd.readouterr().err
    assert status == 128 + signal.SIGKILL and job.asked == [(0, 1)] * 2, said
    assert "waiting up to 30 s for lost workers" in said, said
    assert "too few workers are left: --workers asks for at least 2" in said, said


@pytest.fixture
def hosts(tmp_path: Any) -> Callable[[int], List[WorkerHost]]:
    """Workers over what stands in for ssh: it fails while there is a file with the host's name."""
    path = tmp_path / "shell"
    path.write_text(f'#!/bin/sh\n[ -e {tmp_path}/"$1" ] && exit 255\nexec sh -c "$2"\n')
    path.chmod(0o755)
    return lambda count: [WorkerHost("localhost", (str(path), f"host{number}")) for number in range(count)]


@pytest.mark.slow
def test_host_is_taken_in_when_it_answers(job: Begun, capfd: Any, hosts: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """WorkerHost 1 cannot be reached; the job starts without it, asks it again and again, and takes it in."""
    monkeypatch.setattr(elastic, "PROBE_S", 0.1)
    (tmp_path / "host1").write_text("")
    threading.Thread(target=lambda: (until(lambda: job.counts == [0, 2]), os.remove(str(tmp_path / "host1")))).start()
    status = job.run("all_begin()\nif count < 3: time.sleep(600)", hosts(3), rejoin_s=0.1)
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1, 2), (0, 2), (0, 1, 2)], said
    assert "process 1 cannot be started on localhost" in said and "worker 1 (localhost) can train again" in said, said


@pytest.mark.slow
def test_numbers_above_a_refused_one_are_tried_when_hosts_answer(job: Begun, capfd: Any, hosts: Any, tmp_path: Any,
                                                                 monkeypatch: Any) -> None:
    """Of four hosts two are lost; three are refused, before and after one of them is back."""
    monkeypatch.setattr(elastic, "PROBE_S", 0.1)

    def back() -> None:
        for start, name in ((1, "host2"), (3, "host3")):
            until(lambda: len(job.counts) > start and job.counts[start] == 2)
            os.remove(str(tmp_path / name))

    threading.Thread(target=back).start()
    status = job.run("all_begin()\nif count == 3: sys.exit(78)\nif start == 0 and rank > 1:\n    open(os.path.join(os.path."
                     "dirname(begun), 'host%d' % rank), 'w').close()\n    lose()\nif count == 2 or start == 0: time.sleep(600)",
                     hosts(4), rejoin_s=0.1)
    said = capfd.readouterr().err
    assert status == 0 and job.asked == [(0, 1, 2, 3), (0, 1), (0, 1, 2), (0, 1), (0, 1, 2, 3)], said
    assert said.count("going on with 2 workers (0, 1)") == 1, said


@pytest.mark.slow
@pytest.mark.parametrize("number, when", [(signal.SIGINT, "waiting up to 60 s"), (signal.SIGTERM, "starting worker 0")])
def test_signal_between_two_starts_ends_the_job(job: Begun, hosts: Any, monkeypatch: Any, number: int, when: str) -> None:
    """It comes while the job waits for a lost worker, or while keepers are started."""
    said: List[str] = []

    def say(text: str) -> None:
        said.append(text)
        if when in text:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(elastic, "say", say)
    before = signal.getsignal(number)
    status = job.run("all_begin()\nif rank == 0: time.sleep(600)\n"
                     "open(os.path.join(os.path.dirname(begun), 'host1'), 'w').close(); lose()", hosts(2),
                     2 if "wait" in when else 1, wait_s=60.0)
    assert status == 128 + number and signal.getsignal(number) is before and job.counts == [2], said
    assert said[-1] == f"{signal.Signals(number).name}: ending before all processes have started again"


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
