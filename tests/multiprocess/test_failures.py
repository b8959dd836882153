"""Processes that come late, never, or die: the others go on, or end in bounded time and say why."""
from __future__ import annotations

import glob
import json
import os
import random
import re
import signal
import socket
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests import failures
from tests.multiprocess.launch import RUN_S, WHALE_RUN, Process, Starter
from whale_tf.config import VERIFIED
from whale_tf.processes.watch import EXIT_STATUS, TERMINATED_STATUS

SCRIPT = ("-m", "tests.multiprocess.train")
BOUND_S = 30  # from a process' death to the others' end
LOST_S = 15  # the same without a launcher, which takes 10 at most where nothing else runs


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


def printed(text: str) -> List[Tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\S+)\n", text)]


def losses(text: str) -> Dict[int, float]:
    return dict(printed(text))


@pytest.mark.slow
def test_late_worker_and_chief_only_files(starter: Starter, tmp_path: Any) -> None:
    """Their first step is compared with the local one, although hooks of the chief fetch more."""
    chief, worker = starter.workers(2)
    first = chief(*SCRIPT, "12", str(tmp_path), **{VERIFIED: "1"})
    time.sleep(10)
    second = worker(*SCRIPT, "12", str(tmp_path), **{VERIFIED: "1"})
    assert first.wait(RUN_S) == 0, first.output
    assert second.wait(BOUND_S) == 0, second.output
    assert "the first step of this graph equals the local one in" in first.output, first.output
    assert len(losses(first.output)) == 12 and losses(first.output) == losses(second.output)
    events = glob.glob(str(tmp_path / "events*"))
    assert len(events) == 1 and (tmp_path / "model.ckpt-12.index").exists()


@pytest.mark.slow
def test_wrong_first_step_ends_all(starter: Starter) -> None:
    """One process forgets the weight of its examples: each ends with the same error."""
    both = [start(*SCRIPT, "9", WRONG="1", **{VERIFIED: "1"}) for start in starter.workers(2)]
    for process in both:
        assert process.wait(RUN_S) == 1, process.output
        assert "MismatchError: the first training step of this graph is not the local one" in process.output, process.output


@pytest.mark.slow
@pytest.mark.parametrize("number, victim, more", [
    pytest.param(signal.SIGKILL, 1, {}, marks=pytest.mark.full), (signal.SIGKILL, 0, {"COUNT": "2"}),
    (signal.SIGKILL, 1, {"COUNT": "2"}), (signal.SIGSTOP, 1, {}), pytest.param(signal.SIGSTOP, 0, {}, marks=pytest.mark.full),
    pytest.param(signal.SIGSTOP, 1, {"COUNT": "2"}, marks=pytest.mark.full)])
def test_killed_or_stopped_process_ends_the_other(starter: Starter, number: int, victim: int, more: Dict[str, str]) -> None:
    """Beside each other, and with a TaskGraph on both (``COUNT``), of which each runs a part."""
    both = [start(*SCRIPT, "1000000", **more) for start in starter.workers(2)]
    for process in both:
        process.wait_for("step 20 ", RUN_S)
    both[victim].send(number)
    survivor = both[1 - victim]
    assert survivor.wait(LOST_S) in (1, EXIT_STATUS), survivor.output
    both[victim].send(signal.SIGKILL)
    fate = "has ended" if number == signal.SIGKILL else "has not answered for 5 s"
    assert f"process {victim} (127.0.0.1:" in survivor.output and fate in survivor.output, survivor.output


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.skipif(bool(failures.Links.reason()), reason=failures.Links.reason())
def test_cut_link_ends_all(starter: Starter, tmp_path: Any) -> None:
    """A sample of :mod:`tests.failures`: each process runs a stage."""
    case = failures.Case("session", "gpipe", 2, "link", "silent", "middle", step=3, victim=1, looks=False, restarts=False,
                         goes_on=False, snapshots=False)
    expected = failures.reference(starter, case.kind, 2, str(tmp_path / "local"))
    with failures.Links() as links:
        result = failures.run(starter, random.Random(1), case, str(tmp_path / "divided"), expected, links)
    assert not result.problem and result.seconds is not None, result.problem


@pytest.mark.slow
@pytest.mark.parametrize("look_late", ["0", pytest.param("4", marks=pytest.mark.once)])
def test_process_that_fails_ends_the_others(starter: Starter, look_late: str) -> None:
    """Each runs a part of the step; also one that could fail before the other has looked for it (``LOOK_LATE``)."""
    failing, other = [start(*SCRIPT, "9", COUNT="2", LOOK_LATE=late, **more)
                      for start, late, more in zip(starter.workers(2), ("0", look_late), ({"FAIL_AT": "3"}, {}))]
    assert failing.wait(RUN_S) == 1 and "the script's own mistake" in failing.output, failing.output
    assert other.wait(BOUND_S) in (1, EXIT_STATUS), other.output
    assert "process 0 (127.0.0.1:" in other.output and "has ended" in other.output, other.output


@pytest.mark.slow
def test_worker_that_never_comes(starter: Starter) -> None:
    chief, _ = starter.workers(2)
    alone = chief(*SCRIPT, "3", TIMEOUT="2")
    assert alone.wait(RUN_S) == 1
    assert "process 1 (127.0.0.1:" in alone.output and "did not start within 2 s" in alone.output, alone.output


@pytest.mark.once
@pytest.mark.slow
def test_port_that_is_taken(starter: Starter) -> None:
    chief, _ = starter.workers(2)
    with socket.socket() as taken:
        address = json.loads(chief.variables["TF_CONFIG"])["cluster"]["worker"][0]
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port is held for those who share it
        taken.bind(("", int(address.split(":")[1])))
        taken.listen(1)
        process = chief(*SCRIPT, "3")
        assert process.wait(RUN_S) == 1
    assert f"of this process's address {address} is used" in process.output, process.output


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, pytest.param({"COUNT": "2"}, marks=pytest.mark.full)])
def test_sigterm_saves_first(starter: Starter, tmp_path: Any, more: Dict[str, str]) -> None:
    """Beside each other, and each with a part of the step (``COUNT``); the next run goes on there."""
    run = starter.start(*WHALE_RUN, "--workers", "2", *SCRIPT, "40", str(tmp_path), PAUSE="0.05", SAVE_STEPS="1000", **more)
    run.wait_for("step 11 ", RUN_S)
    run.send(signal.SIGTERM)
    assert run.wait(BOUND_S) == TERMINATED_STATUS, run.output
    assert "ProcessLostError" not in run.output and "no longer answers" not in run.output, run.output
    trained = losses(run.output)
    last = tf.train.latest_checkpoint(str(tmp_path))
    assert re.search(f"SIGTERM: saved {last};", run.output), run.output
    assert int(last.split("-")[-1]) in (len(trained), len(trained) + 1)  # the last step may not have come to print its loss
    if more:
        return
    again = starter.start(*WHALE_RUN, "--workers", "2", *SCRIPT, "40", str(tmp_path))
    assert again.wait(RUN_S) == 0, again.output
    assert min(losses(again.output)) == int(last.split("-")[-1]) and max(losses(again.output)) == 39


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero", "parts"])
def test_process_that_makes_fewer_steps_ends_the_other(starter: Starter, how: str) -> None:
    """It stays for the other one, which reads its variables, until that one waits for it in a step that it does not make."""
    job = starter.start(*WHALE_RUN, "--workers", "2", "-m", "tests.multiprocess.train_longer", how)
    assert job.wait(RUN_S) in (1, EXIT_STATUS), job.output  # an error, or waiting in TensorFlow
    assert "[1] whale_tf: process 0 waits for this process in a run that this one does not make" in job.output, job.output
    assert re.search(r"\[0\] .*process 1 \(\S+\) has ended, and this process cannot train", job.output), job.output
    assert job.output.count("step 2 ") == 2 and "step 3 " not in job.output, job.output


@pytest.mark.slow
def test_full_disk_ends_all_and_the_next_start_goes_on(starter: Starter, tmp_path: Any) -> None:
    """No file can be written after step 12: the save after step 15 fails, and the one after step 10 stands."""
    run = starter.start(*WHALE_RUN, "--workers", "2", "--max-restarts", "1", *SCRIPT, "20", str(tmp_path), FULL_AT="12")
    assert run.wait(RUN_S) == 0, run.output
    first, second = run.output.split("restarting all processes (1 of 1)")
    assert set(losses(first)) >= set(range(14)) and set(losses(second)) == set(range(10, 20)), run.output
    again = losses(first)
    assert {step: again[step] for step in range(10, 14)} == pytest.approx(
        {step: losses(second)[step] for step in range(10, 14)}, rel=1e-12)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-20")


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_two_runs_side_by_side_and_kills_at_random_times(starter: Starter, tmp_path: Any, kills: int) -> None:
    """A process of the one run is killed or stopped again and again, while it starts or trains; each time both end soon, and
    start again from the last checkpoint.  The other run is left in peace, and both have the same losses."""
    steps, pause_s = 80 * kills, 0.02
    options = ("--workers", "2", "--max-restarts", str(kills), *SCRIPT, str(steps))
    broken, whole = [starter.start(*WHALE_RUN, *options, str(tmp_path / name), PAUSE=str(pause_s), SAVE_STEPS="3")
                     for name in ("a", "b")]
    chance = random.Random(kills)
    for attempt in range(kills):
        started = f"restarting all processes ({attempt} of" if attempt else ""
        broken.wait_for(started, RUN_S)

        def output(started: str = started) -> str:
            return broken.output.rpartition(started)[2] if started else broken.output

        wait_until(lambda: len(pids(output())) == 2, RUN_S, broken)
        if attempt % 3:  # else it is killed while it starts
            wait_until(lambda: "step " in output(), RUN_S, broken)
        time.sleep(chance.uniform(0, 1.5))
        processes = pids(output())
        victim = chance.choice(processes)
        os.kill(victim, (signal.SIGKILL, signal.SIGSTOP)[attempt % 2])
        wait_until(lambda: not any(map(alive, processes)), BOUND_S, broken)
    for run in (whole, broken):
        assert run.wait(RUN_S + 4 * steps * pause_s) == 0, run.output
    assert f"({kills} of {kills})" in broken.output and "restarting all processes" not in whole.output
    expected = losses(whole.output)
    assert set(losses(broken.output)) == set(expected) == set(range(steps))
    for step, loss in printed(broken.output):
        assert loss == pytest.approx(expected[step], rel=1e-9), step
    for path in tf.train.get_checkpoint_state(str(tmp_path / "a")).all_model_checkpoint_paths:
        reader = tf.train.NewCheckpointReader(path)
        assert all(np.isfinite(reader.get_tensor(name)).all() for name in reader.get_variable_to_shape_map())


def pids(output: str) -> List[int]:
    return [int(number) for number in re.findall(r"\[\d\] process (\d+)\n", output)]


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def wait_until(condition: Callable[[], bool], limit_s: float, process: Process) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"not within {limit_s} s:\n{process.output}"
        time.sleep(0.05)
