"""``fit`` in two processes, one of which is killed, then asked to end, then in one process: each step equals the local one."""
from __future__ import annotations

import os
import re
import signal
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess.launch import WHALE_RUN, Starter
from whale_tf.processes.watch import TERMINATED_STATUS

START_S = 120
SCRIPT = ("-m", "tests.multiprocess.train_long")

pytestmark = pytest.mark.skipif(not hasattr(tf, "keras") or not hasattr(tf.keras, "ops"), reason="snapshots are of Keras 3's fit")


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


def steps(output: str, rank: int) -> Dict[int, Tuple[float, float]]:
    """Loss, and the bits of the examples seen, after each step of a process."""
    return {int(step): (float(loss), float(seen))
            for step, loss, seen in re.findall(rf"\[{rank}\] step (\d+) loss (\S+) seen (\S+)\n", output)}


@pytest.mark.slow
@pytest.mark.parametrize("given, variables", [
    ("snapshot.every_s=0.2", {"SPANS": "1"}),
    pytest.param('zero="v2"', {}, marks=pytest.mark.full), pytest.param("snapshot.every_steps=5", {}, marks=pytest.mark.full)])
def test_killed_stopped_and_on_other_processes(starter: Starter, tmp_path: Any, given: str, variables: Dict[str, str]) -> None:
    """The second process alone gets the signal; both end after the same step."""
    whole = starter.start(*WHALE_RUN, *SCRIPT, str(tmp_path / "whole"))
    two = starter.start(*WHALE_RUN, "--workers", "2", "--max-restarts", "1", *SCRIPT, str(tmp_path / "ends"), given, PAUSE="0.15",
                        **variables)
    two.wait_for("[1] step 9 ", START_S)
    os.kill(int(re.findall(r"\[1\] process (\d+)\n", two.output)[0]), signal.SIGKILL)
    two.wait_for("[1] step 15 ", START_S)
    os.kill(int(re.findall(r"\[1\] process (\d+)\n", two.output)[1]), signal.SIGUSR1)
    assert two.wait(START_S) == TERMINATED_STATUS, two.output
    assert "fit goes on in epoch" in two.output or given == 'zero="v2"', two.output
    ended, = re.findall(r"SIGUSR1: snapshot of step (\d+) is complete; ending", two.output)
    one = starter.start(*WHALE_RUN, "--devices-per-worker", "2", *SCRIPT, str(tmp_path / "ends"), **variables)
    assert whole.wait(START_S) == 0 and one.wait(START_S) == 0, whole.output + one.output
    expected = steps(whole.output, 0)
    assert min(steps(one.output, 0)) == int(ended) + 1 and max(expected) == max(steps(one.output, 0)) == 24
    assert max(steps(two.output, 0)) == max(steps(two.output, 1)) == int(ended)
    for found in (steps(two.output, 0), steps(two.output, 1), steps(one.output, 0)):
        for step, values in found.items():
            assert values == pytest.approx(expected[step], rel=1e-9), step
    with np.load(tmp_path / "whole/variables.0.npz") as values, np.load(tmp_path / "ends/variables.0.npz") as others:
        assert len(values.files) == len(others.files) > 10
        for name in values.files:
            np.testing.assert_allclose(others[name], values[name], 1e-9, 1e-12)
