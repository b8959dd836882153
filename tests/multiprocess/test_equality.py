"""Two processes train what the local script trains on the mini-batches of both."""
from __future__ import annotations

import pickle
from typing import Any, Dict, Iterable, List

import pytest

from tests.multiprocess.jobs import DRIVEN, JOBS, local, merged
from tests.multiprocess.launch import WHALE_RUN, Starter
from tests.numeric.equality import TOLERANCE, Outcome, differences

WORKERS = 2


def run_jobs(path: str, jobs: Iterable[str], ranks: int) -> Dict[str, List[Outcome]]:
    """All jobs, one after the other in the same two processes: importing TensorFlow takes longer than any of them."""
    with Starter() as starter:
        run = starter.start(*WHALE_RUN, "--workers", str(WORKERS), "-m", "tests.multiprocess.jobs", path, *jobs)
        assert run.wait(120) == 0, run.output
    found = []
    for rank in range(ranks):
        with open("{}.{}".format(path, rank), "rb") as handle:
            found.append(pickle.load(handle))
    return {name: [each[name] for each in found] for name in jobs}


@pytest.mark.slow
def test_equals_local(tmp_path: Any) -> None:
    outcomes = run_jobs(str(tmp_path / "outcome"), JOBS, WORKERS)
    wrong = {name: found for name, found in ((name, differing(name, outcomes[name])) for name in JOBS) if found}
    assert not wrong, "differs from the local script: {}".format(wrong)


@pytest.mark.slow
def test_a_driver_equals_local(tmp_path: Any) -> None:
    """Model replicas that span processes; the other process serves, and ends without an error."""
    outcomes = run_jobs(str(tmp_path / "outcome"), DRIVEN, 1)
    wrong = {
        name: found for name, job in DRIVEN.items()
        for found in [differences(outcomes[name][0], local(job, 1), TOLERANCE[job.setting.dtype])] if found}
    assert not wrong, "differs from the local script: {}".format(wrong)


def differing(name: str, found: List[Outcome]) -> List[str]:
    """Where the processes differ from the local script, or from each other."""
    job = JOBS[name]
    expected, tolerance = local(job, WORKERS), TOLERANCE[job.setting.dtype]
    if job.replicas > 1:  # model replicas of a process take every second mini-batch: another order of examples
        expected, found = expected._replace(outputs={}), [one._replace(outputs={}) for one in found]
    wrong = differences(merged(job, found), expected, tolerance)
    for other in found[1:]:
        wrong += differences(other._replace(initial=found[0].initial, losses={}, outputs={}),
                             found[0]._replace(losses={}, outputs={}), tolerance)
    if "loss" in expected.losses and len({tuple(map(float, one.losses["loss"])) for one in found}) > 1:
        wrong.append("the loss is not over all processes")
    return wrong
