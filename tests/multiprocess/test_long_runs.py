"""``fit`` in two processes, one of which is killed, then asked to end, then in one process: each step equals the local one; and a
sample of :mod:`tests.chaos`."""
from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import tensorflow as tf

from tests import chaos
from tests.multiprocess.launch import RUN_S, WHALE_RUN, Process, Starter
from whale_tf.processes.watch import TERMINATED_STATUS

SCRIPT = ("-m", "tests.multiprocess.train_long")
Reference = Callable[[str], Tuple[chaos.Steps, List[Any]]]

of_fit = pytest.mark.skipif(not hasattr(tf, "keras") or not hasattr(tf.keras, "ops"), reason="snapshots are of Keras 3's fit")


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: Any) -> Reference:
    """The run of a kind that does not end, made once.  Backups change no number, so that of ``fit`` has no other ones."""
    found: Dict[str, Tuple[chaos.Steps, List[Any]]] = {}

    def of(kind: str) -> Tuple[chaos.Steps, List[Any]]:
        plain = "fit" if kind == "backup" else kind
        if plain not in found:
            with Starter() as starter:
                found[plain] = chaos.reference(starter, plain, str(tmp_path_factory.mktemp(plain)))
        return found[plain]

    return of


def steps(output: str, rank: int) -> Dict[int, Tuple[float, float]]:
    """Loss, and the bits of the examples seen, after each step of a process."""
    return {int(step): (float(loss), float(seen))
            for step, loss, seen in re.findall(rf"\[{rank}\] step (\d+) loss (\S+) seen (\S+)\n", output)}


def one(starter: Starter, folder: str, spans: bool) -> Process:
    """A run in one process."""
    options = ("--devices-per-worker", "2") if spans else ()
    return starter.start(*WHALE_RUN, *options, *SCRIPT, folder, **({"SPANS": "1"} if spans else {}))


def variables(process: Process) -> List[np.ndarray]:
    """At the end of a run in one process."""
    assert process.wait(RUN_S) == 0, process.output
    return [np.array(value) for value in json.loads(process.output.partition("variables ")[2].splitlines()[0])]


@of_fit
@pytest.mark.slow
@pytest.mark.parametrize("given, spans", [
    ("snapshot.every_s=0.2", True),
    pytest.param('zero="v2"', False, marks=pytest.mark.full),
    pytest.param("snapshot.every_steps=5", False, marks=pytest.mark.full)])
def test_killed_stopped_and_on_other_processes(starter: Starter, tmp_path: Any, given: str, spans: bool) -> None:
    """The second process alone gets the signal; both end after the same step."""
    two = starter.start(*WHALE_RUN, "--workers", "2", "--max-restarts", "1", *SCRIPT, str(tmp_path / "ends"), given, PAUSE="0.15",
                        **({"SPANS": "1"} if spans else {}))
    whole = one(starter, str(tmp_path / "whole"), False)
    two.wait_for("[1] step 9 ", RUN_S)
    os.kill(int(re.findall(r"\[1\] process (\d+)\n", two.output)[0]), signal.SIGKILL)
    two.wait_for("[1] step 15 ", RUN_S)
    os.kill(int(re.findall(r"\[1\] process (\d+)\n", two.output)[1]), signal.SIGUSR1)
    assert two.wait(RUN_S) == TERMINATED_STATUS, two.output
    assert "fit goes on in epoch" in two.output or given == 'zero="v2"', two.output
    ended, = re.findall(r"SIGUSR1: snapshot of step (\d+) is complete; ending", two.output)
    again = one(starter, str(tmp_path / "ends"), spans)
    values, others = variables(whole), variables(again)
    expected, rest = steps(whole.output, 0), steps(again.output, 0)
    assert min(rest) == int(ended) + 1 and max(expected) == max(rest) == 24
    assert max(steps(two.output, 0)) == max(steps(two.output, 1)) == int(ended)
    for found in (steps(two.output, 0), steps(two.output, 1), rest):
        for step, pair in found.items():
            assert pair == pytest.approx(expected[step], rel=1e-9), step
    assert len(others) == len(values) > 10
    for value, other in zip(values, others):
        np.testing.assert_allclose(other, value, 1e-9, 1e-12)


@of_fit
@pytest.mark.slow
def test_backups_of_two_processes(starter: Starter, reference: Reference, tmp_path: Any) -> None:
    """One of them is killed, and Keras' BackupAndRestore goes on in one process, under another plan."""
    kind, folder = "backup", str(tmp_path / "ends")
    steps, values = reference(kind)
    two = chaos.started(starter, kind, "two", folder, ["snapshot.every_steps=3"], PAUSE="0.1")
    two.wait_for("[1] step 8 ", RUN_S)
    os.kill(chaos.pids_of(two.output)[1], signal.SIGKILL)
    assert two.wait(RUN_S) != 0
    reached = chaos.checked(two.output, steps, 0, "two processes")
    again = chaos.started(starter, kind, "zero", folder, ["snapshot.every_steps=3"])
    assert again.wait(RUN_S) == 0, again.output
    assert "fit goes on in epoch 2, after 2 steps" in again.output, again.output
    assert chaos.checked(again.output, steps, reached, "one process") == chaos.STEPS
    chaos.compare(folder, values, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan, lost", [
    pytest.param("fit", "gpipe", 0, marks=of_fit),
    ("session", "split", 1),  # and copies of variables, with their slots
    pytest.param("session", "gpipe", 0, marks=pytest.mark.full)])
def test_directory_is_lost_with_its_process(starter: Starter, reference: Reference, tmp_path: Any, kind: str, plan: str,
                                            lost: int) -> None:
    """Two processes run parts of a step, each with a directory of its own; its neighbour has what it needs to go on."""
    folder, (steps, values) = tmp_path / "ends", reference(kind)
    folder.mkdir()
    job = starter.start(*WHALE_RUN, "--workers", "2", "--max-restarts", "1", "-m", chaos.SCRIPT, kind, plan, str(folder),
                        "snapshot.every_steps=2", OWN="0,1", HOLD="7")
    for rank in range(2):
        job.wait_for(f"[{rank}] step 7 ", RUN_S)
    os.kill(int(re.findall(rf"\[{lost}\] process (\d+)\n", job.output)[0]), signal.SIGKILL)
    shutil.rmtree(folder / "snapshots" / str(lost))
    (folder / "go-7").write_text("")
    assert job.wait(RUN_S) == 0, job.output
    first, again = re.split(r"whale run: .*start", job.output, maxsplit=1)
    assert 2 < chaos.checked(again, steps, chaos.checked(first, steps, 0, "before"), "after") == chaos.STEPS
    assert re.search(rf"process {lost} \(\S+\) gets part-0(, part-1)? of \S+ \S+ from process {1 - lost} ", again), job.output
    assert min(chaos.steps_of(again)) in (5, 7), job.output
    chaos.compare(str(folder), values, kind)


@pytest.mark.once
@pytest.mark.slow
def test_job_loses_a_worker_and_takes_it_in_again(starter: Starter, reference: Reference, tmp_path: Any) -> None:
    """Three workers, two, and three again.  Both times training waits after a step for what changes."""
    kind, folder = "session", tmp_path / "changes"
    steps, values = reference(kind)
    folder.mkdir()
    job = starter.start(*WHALE_RUN, "--workers", "2:3", "--rejoin", "10000", "--no-warm", "-m", chaos.SCRIPT, kind, "two",
                        str(folder), "snapshot.every_steps=2", HOLD="4,8", PAUSE="0.2")
    for rank in range(3):
        job.wait_for(f"[{rank}] step 4 ", RUN_S)
    os.kill(int(re.findall(r"\[1\] process (\d+)\n", job.output)[0]), signal.SIGKILL)
    (folder / "go-4").write_text("")
    job.wait_for("starting 2 workers (0, 2)\n", RUN_S)
    for rank in range(2):
        job.wait_for(f"[{rank}] step 8 ", RUN_S)
    job.send(signal.SIGUSR2)
    job.wait_for("worker 1 can train again; the others end after a snapshot", RUN_S)
    time.sleep(0.5)  # the signal comes after these words
    (folder / "go-8").write_text("")
    assert job.wait(RUN_S) == 0, job.output
    starts = chaos.starts_of(job.output)
    assert [len(chaos.pids_of(start)) for start in starts] == [3, 2, 3], job.output
    reached = 0
    for number, start in enumerate(starts):
        reached = chaos.checked(start, steps, reached, f"start {number}")
    assert reached == chaos.STEPS, job.output
    chaos.compare(str(folder), values, kind)
    lost, back = re.findall(r"whale_tf: (.*), and training goes on with step (\d+), \S+ s after this was noticed", job.output)
    text = "lost worker 1: process 1 ended with signal SIGKILL; "
    first = int(lost[1])
    assert first in (1, 3) and lost[0] in [text + each for each in (
        f"steps {first} to 4 were lost", f"steps {first} to 3 were lost", "step 3 was lost")], job.output
    assert back[0] == "worker 1 can train again; no step was lost" and int(back[1]) > 8, job.output
    assert re.search(r"in 3 starts; \S+% of this time .*, \d+\.\d s into starts", job.output), job.output


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("kind", ["session", pytest.param("loop", marks=of_fit)])
def test_number_that_is_refused_is_passed_over(starter: Starter, reference: Reference, tmp_path: Any, kind: str) -> None:
    """Four workers are two replicas of a pipeline, and three none, so that two go on, until there are four again."""
    steps, values = reference(kind)
    result = chaos.elastic(starter, random.Random(1), kind, "stages", str(tmp_path / "job"), (steps, values))
    assert result.events[0].startswith("stages: 4 -> 2 -> 4 -> 2 workers"), result.events


@pytest.mark.full
@pytest.mark.once
def test_one_host_of_three_waits_for_another(starter: Starter, reference: Reference, tmp_path: Any) -> None:
    """Two hosts are lost at once, and one with its directory.  The third lacks a part of all snapshots, and waits."""
    kind, folder = "session", tmp_path / "ends"
    steps, values = reference(kind)
    folder.mkdir()
    options = ("--workers", "1:3", *chaos.hosts_in(str(folder)), "--rejoin", "10000")
    command = ("-m", chaos.SCRIPT, kind, "nested", str(folder), "snapshot.every_steps=2")
    job = starter.start(*WHALE_RUN, *options, *command, HOLD="7")
    for rank, host in enumerate(chaos.ADDRESSES):
        job.wait_for(f"[{rank} {host}] step 7 ", RUN_S)
    for _, _, pid in sorted(chaos.BEGUN.findall(job.output))[:2]:
        os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(folder / "snapshots" / chaos.ADDRESSES[0])
    (folder / "go-7").write_text("")
    assert job.wait(RUN_S) == 0, job.output
    first, alone, *others = chaos.starts_of(job.output)
    assert "ScatteredError" in alone and "nor does one before; start again with a host that has what is" in alone, job.output
    assert f"worker 2 ({chaos.ADDRESSES[2]}) cannot go on alone: snapshot " in alone, job.output
    assert "waiting up to 300 s for lost workers: --workers asks for at least 1, and those that are there" in alone, job.output
    assert not chaos.steps_of(alone) and min(chaos.steps_of(others[0])) in (5, 7), job.output
    reached = chaos.checked(first, steps, 0, "before")
    for start in others:
        reached = chaos.checked(start, steps, reached, "after")
    assert reached == chaos.STEPS
    chaos.compare(str(folder), values, kind)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", chaos.KINDS)
def test_chaos(starter: Starter, reference: Reference, tmp_path: Any, kind: str) -> None:
    rng, folder = random.Random(chaos.KINDS.index(kind)), str(tmp_path / "ends")
    result = chaos.run(starter, rng, kind, folder, reference(kind), kind != "backup", 3)
    assert len(result.events) == 4
