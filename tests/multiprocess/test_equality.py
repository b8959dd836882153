"""Several processes train what the local script trains on the mini-batches of all."""
from __future__ import annotations

import pickle
import sys
from typing import Any, Dict, List, Sequence

import pytest

from tests import graph_optimizer
from tests.multiprocess.jobs import JOBS, SPANNING, Job, local, merged
from tests.multiprocess.launch import WHALE_RUN, Starter
from tests.multiprocess.matrix import every_case, groups, pairwise
from tests.numeric.equality import TOLERANCE, Outcome, differences

HOROVOD_RUN = ("-m", "horovod.runner.launch")
NAMED: List[Job] = list(JOBS.values()) + list(SPANNING.values())
PAIRWISE = [pytest.param(jobs, marks=[pytest.mark.graph_optimizer, pytest.mark.once] if jobs[0].workers > 2 else [])
            for jobs in groups(NAMED + pairwise(), 60)]
FULL = groups(every_case(), 60)


def run_jobs(path: str, jobs: Sequence[Job], launcher: Sequence[str] = WHALE_RUN) -> List[List[Outcome]]:
    """Outcomes of each job in every process that trains.  All jobs run one after the other in the same processes: importing
    TensorFlow takes longer than any of them."""
    count = str(jobs[0].workers)
    if launcher is WHALE_RUN:
        options = ["--workers", count]
    else:  # Horovod's
        options = ["-np", count, "-H", "localhost:" + count, "--gloo", sys.executable]
    with open(path, "wb") as handle:
        pickle.dump(list(jobs), handle)
    with Starter() as starter:
        run = starter.start(*launcher, *options, "-m", "tests.multiprocess.jobs", path, str(int(graph_optimizer.is_on())))
        assert run.wait(60 + 10 * len(jobs)) == 0, run.output
    found = []
    for rank in range(jobs[0].workers):
        with open(f"{path}.{rank}", "rb") as handle:
            found.append(pickle.load(handle))
    return [list(outcomes) for outcomes in zip(*found)]


def name_of(jobs: Sequence[Job]) -> str:
    return "{} processes{}".format(jobs[0].workers, ", each runs a part" if jobs[0].spans else "")


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("jobs", PAIRWISE, ids=name_of)
def test_equals_local(jobs: List[Job], tmp_path: Any) -> None:
    check(jobs, str(tmp_path / "outcomes"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("jobs", FULL, ids=name_of)
def test_every_arrangement_equals_local(jobs: List[Job], tmp_path: Any) -> None:
    check(jobs, str(tmp_path / "outcomes"))


@pytest.mark.slow
def test_horovod_equals_local(tmp_path: Any) -> None:
    pytest.importorskip("horovod.tensorflow")
    backend = ("communication.backend", "horovod")
    check([job._replace(config=job.config + (backend,)) for job in JOBS.values()], str(tmp_path / "outcomes"), HOROVOD_RUN)


def check(jobs: Sequence[Job], path: str, launcher: Sequence[str] = WHALE_RUN) -> None:
    wrong: Dict[Job, List[str]] = {}
    for job, outcomes in zip(jobs, run_jobs(path, jobs, launcher)):
        found = differing(job, outcomes)
        if found:
            wrong[job] = found
    assert not wrong, f"differs from the local script: {wrong}"


def differing(job: Job, found: List[Outcome]) -> List[str]:
    """Where the processes differ from the local script, or from each other."""
    expected, tolerance = local(job), job.tolerance or TOLERANCE[job.setting.dtype]
    if job.spans:
        return [each for one in found for each in differences(one, expected, tolerance)]
    if job.replicas > 1:  # model replicas of a process take every second mini-batch: another order of examples
        expected, found = expected._replace(outputs={}), [one._replace(outputs={}) for one in found]
    wrong = differences(merged(job, found), expected, tolerance)
    if job.tolerance and not differences(merged(job, found), expected, TOLERANCE["float64"]):
        wrong.append("nothing was rounded")
    for other in found[1:]:
        wrong += differences(other._replace(initial=found[0].initial, losses={}, outputs={}),
                             found[0]._replace(losses={}, outputs={}), tolerance)
    if "loss" in expected.losses and len({tuple(map(float, one.losses["loss"])) for one in found}) > 1:
        wrong.append("the loss is not over all processes")
    return wrong
