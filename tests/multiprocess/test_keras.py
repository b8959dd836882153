"""Keras and tf.functions in two processes: equal to one, and no process waits for another that has ended."""
from __future__ import annotations

import csv
import os
import pickle
import re
import signal
from itertools import zip_longest
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest

from tests.multiprocess.launch import RUN_S, WHALE_RUN, Starter
from whale_tf._tf_compat import function_tracing
from whale_tf.processes.watch import EXIT_STATUS

if function_tracing() is None or function_tracing().compilation is None:  # type: ignore[union-attr]
    pytest.skip("no functions in several processes before TensorFlow 2.15", allow_module_level=True)

SCRIPT = ("-m", "tests.multiprocess.train_keras")
TWO = (*WHALE_RUN, "--workers", "2")
BOUND_S = 40
TOLERANCE = 1e-11  # float64


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


@pytest.mark.once
@pytest.mark.slow
def test_equals_one_process(starter: Starter, tmp_path: Any) -> None:
    """``fit`` and loops, on two devices of each of two processes: all that is logged, returned, counted and learned.  Between two
    steps an optimizer's variables take memory in one process (``zero``), or on the host of each (``offload``).  The first step of
    each function is compared with the local one."""
    local = starter.start(*SCRIPT, "equality", str(tmp_path / "local"))
    assert local.wait(RUN_S) == 0, local.output
    both = starter.start(*TWO, "--devices-per-worker", "2", "--verify", *SCRIPT, "equality", str(tmp_path / "both"))
    assert both.wait(RUN_S) == 0, both.output
    assert both.output.count("equals the local one") == 7 and "Not compared" not in both.output, both.output
    expected, *found = [read(tmp_path / name) for name in ("local.0", "both.0", "both.1")]
    state = 2 * 8 * (11 * 5 + 20 * 3 + 3)  # bytes of Adam's moments
    (own, part), (others_own, others_part) = [one["v3"].pop() for one in (expected, *found)][1:]
    assert own == others_own == 0 and 0 < part < state and part + others_part == state
    assert [one["v0"].pop().tolist() for one in (expected, *found)][1:] == [[0, state]] * 2
    for case, values in expected.items():
        for outcome in found:
            assert len(outcome[case]) == len(values), case
            for one, other in zip(values, outcome[case]):
                np.testing.assert_allclose(other, one, TOLERANCE, TOLERANCE, err_msg=case)


@pytest.mark.once
@pytest.mark.slow
def test_kill_and_the_restart_from_the_backup(starter: Starter, tmp_path: Any) -> None:
    """One process is killed in the third epoch: the other names it and ends; both start again from the second."""
    whole = starter.start(*TWO, *SCRIPT, "fit", "5", str(tmp_path / "whole"))
    broken = starter.start(*TWO, "--max-restarts", "1", *SCRIPT, "fit", "5", str(tmp_path / "broken"), PAUSE="0.3")
    broken.wait_for("[1] step 10 ", RUN_S)
    os.kill(int(re.findall(r"\[1\] process (\d+)\n", broken.output)[0]), signal.SIGKILL)
    assert broken.wait(RUN_S) == 0 and whole.wait(RUN_S) == 0, broken.output + whole.output
    first, second = broken.output.split("restarting all processes (1 of 1)")
    assert "process 1 ended with signal SIGKILL" in first, first
    assert second.count("] finished") == 2, broken.output
    assert losses(second, 0) == losses(second, 1)
    for pair, other in zip_longest(losses(second, 0), losses(whole.output, 0)[8:], fillvalue=()):
        assert pair == pytest.approx(other, rel=1e-5), "callbacks go on counting"
    expected, found = [logged(tmp_path / name / "log.csv") for name in ("whole", "broken")]
    assert len(expected) == len(found) == 5  # process 0 alone has written
    for row, other in zip(expected, found):
        assert other == pytest.approx(row, rel=1e-5)
    assert (tmp_path / "whole/model.keras").exists()


@pytest.mark.once
@pytest.mark.slow
def test_process_that_ends_early_ends_the_other(starter: Starter, tmp_path: Any) -> None:
    both = [start(*SCRIPT, "fit", "100000", str(tmp_path), SHORT="6") for start in starter.workers(2)]
    assert both[1].wait(RUN_S) == 0 and "finished" in both[1].output, both[1].output
    assert both[0].wait(BOUND_S) in (1, EXIT_STATUS), both[0].output
    assert "process 1 (127.0.0.1:" in both[0].output and "has ended" in both[0].output, both[0].output


def read(path: Any) -> Dict[str, List[np.ndarray]]:
    with open(path, "rb") as handle:
        found: Dict[str, List[np.ndarray]] = pickle.load(handle)
    return found


def logged(path: Any) -> List[Dict[str, float]]:
    with open(path, newline="") as handle:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(handle)]


def losses(output: str, rank: int) -> List[Tuple[float, ...]]:
    """Number and loss of each step."""
    return [(int(step), float(loss)) for step, loss in re.findall(rf"\[{rank}\] step (\d+) loss (\S+)\n", output)]
