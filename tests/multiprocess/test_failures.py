"""Processes that come late, never, or die: the others go on, or end in bounded time and say why."""
from __future__ import annotations

import glob
import os
import re
import signal
import time
from typing import Any, Dict, Iterator

import pytest

from tests.multiprocess.launch import WHALE_RUN, Starter
from whale_tf.processes.watch import EXIT_STATUS

SCRIPT = ("-m", "tests.multiprocess.train")
BOUND_S = 30  # from a process' death to the others' end
START_S = 60


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


def losses(text: str) -> Dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


@pytest.mark.slow
def test_a_late_worker_and_chief_only_files(starter: Starter, tmp_path: Any) -> None:
    chief, worker = starter.workers(2)
    first = chief(*SCRIPT, "12", str(tmp_path))
    time.sleep(8)
    second = worker(*SCRIPT, "12", str(tmp_path))
    assert first.wait(START_S) == 0, first.output
    assert second.wait(BOUND_S) == 0, second.output
    assert len(losses(first.output)) == 12 and losses(first.output) == losses(second.output)
    events = glob.glob(str(tmp_path / "events*"))
    assert len(events) == 1 and (tmp_path / "model.ckpt-12.index").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim, more", [(1, {}), (0, {"COUNT": "2"}), (1, {"COUNT": "2"})])
def test_a_killed_process_ends_the_other(starter: Starter, victim: int, more: Dict[str, str]) -> None:
    """Beside each other, and with a TaskGraph on both (``COUNT``), so that process 0 drives process 1."""
    both = [start(*SCRIPT, "1000000", **more) for start in starter.workers(2)]
    for process in both[:1] if more else both:
        process.wait_for("step 20 ", START_S)
    both[victim].send(signal.SIGKILL)
    survivor = both[1 - victim]
    assert survivor.wait(BOUND_S) in (1, EXIT_STATUS), survivor.output
    assert "process {} (127.0.0.1:".format(victim) in survivor.output and "has ended" in survivor.output, survivor.output


@pytest.mark.slow
def test_a_driver_that_fails_fails_the_others(starter: Starter) -> None:
    driver, server = [start(*SCRIPT, "9", COUNT="2", FAIL_AT="3") for start in starter.workers(2)]
    assert driver.wait(START_S) == 1 and "the script's own mistake" in driver.output, driver.output
    assert server.wait(BOUND_S) == EXIT_STATUS, server.output
    assert "process 0, which drove this one, has failed" in server.output, server.output


@pytest.mark.slow
def test_a_worker_that_never_comes(starter: Starter) -> None:
    chief, _ = starter.workers(2)
    alone = chief(*SCRIPT, "3", TIMEOUT="2")
    assert alone.wait(START_S) == 1
    assert "process 1 (127.0.0.1:" in alone.output and "did not come within 2 s" in alone.output, alone.output


@pytest.mark.slow
def test_two_runs_side_by_side_and_a_restart(starter: Starter, tmp_path: Any) -> None:
    """One run's chief is killed once: all its processes start again from the last checkpoint; the other run goes on."""
    options = ("--workers", "2", "--max-restarts", "1")
    runs = [starter.start(*WHALE_RUN, *options, *SCRIPT, "24", str(tmp_path / name), PAUSE="0.1")
            for name in ("a", "b")]
    runs[0].wait_for("step 11 ", START_S)
    os.kill(int(re.findall(r"\[0\] process (\d+)", runs[0].output)[0]), signal.SIGKILL)
    for run in runs:
        assert run.wait(2 * START_S) == 0, run.output
        assert run.output.count("finished") == 2
    assert "starting all processes again (1 of 1)" in runs[0].output
    assert "starting all processes again" not in runs[1].output
    broken, whole = losses(runs[0].output), losses(runs[1].output)
    assert set(broken) == set(whole) == set(range(24))
    assert broken == pytest.approx(whole, rel=1e-12)
