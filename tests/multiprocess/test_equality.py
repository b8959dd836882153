"""Two processes train what the local script trains on the mini-batches of both."""
from __future__ import annotations

import pickle
from typing import Any, Dict, List

import pytest

from tests.multiprocess.jobs import JOBS, local, merged
from tests.multiprocess.launch import WHALE_RUN, Starter
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal

WORKERS = 2


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> Dict[str, List[Outcome]]:
    """All jobs, one after the other in the same two processes: importing TensorFlow takes longer than any of them."""
    path = str(tmp_path_factory.mktemp("jobs") / "outcome")
    with Starter() as starter:
        run = starter.start(*WHALE_RUN, "--workers", str(WORKERS), "-m", "tests.multiprocess.jobs", path, *JOBS)
        assert run.wait(120) == 0, run.output
    found = []
    for rank in range(WORKERS):
        with open("{}.{}".format(path, rank), "rb") as handle:
            found.append(pickle.load(handle))
    return {name: [each[name] for each in found] for name in JOBS}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_equals_local(outcomes: Dict[str, List[Outcome]], name: str) -> None:
    job, found = JOBS[name], outcomes[name]
    expected, tolerance = local(job, WORKERS), TOLERANCE[job.setting.dtype]
    if job.replicas > 1:  # model replicas of a process take every second mini-batch: another order of examples
        expected, found = expected._replace(outputs={}), [one._replace(outputs={}) for one in found]
    assert_equal(merged(job, found), expected, tolerance)
    for other in found[1:]:
        assert_equal(other._replace(initial=found[0].initial, losses={}, outputs={}),
                     found[0]._replace(losses={}, outputs={}), tolerance)
    if "loss" in expected.losses:
        assert len({tuple(map(float, one.losses["loss"])) for one in found}) == 1, "the loss is not over all processes"
