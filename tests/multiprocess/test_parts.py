"""Sessions of several processes, each of which runs its part of a step, in a script that does other things than train, too."""
from __future__ import annotations

import re
from typing import Any, Iterator, List, Sequence, Tuple

import pytest

from tests.multiprocess.launch import RUN_S, WHALE_RUN, Process, Starter

SCRIPT = ("-m", "tests.multiprocess.train_parts")


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


def run(starter: Starter, folder: Any, *arguments: str, workers: int = 2) -> Process:
    return starter.start(*WHALE_RUN, "--workers", str(workers), *SCRIPT, *arguments, FOLDER=str(folder))


def shown(text: str) -> List[str]:
    return re.findall(r"^(\[[a-z][\w ]+\] .*)", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("arguments, workers, lines", [((), 2, 15), pytest.param(("STEPS",), 4, 13, marks=pytest.mark.once)])
def test_runs_of_all_kinds_equal_local(starter: Starter, tmp_path: Any, arguments: Any, workers: int, lines: int) -> None:
    """Epochs, moving averages, an evaluation and a summary by one process alone, an assignment, a save and a restore."""
    together = run(starter, tmp_path, *arguments, workers=workers)
    alone = starter.start(*SCRIPT, *arguments, FOLDER=str(tmp_path))
    assert together.wait(RUN_S) == 0, together.output
    assert alone.wait(RUN_S) == 0, alone.output
    expected = shown(alone.output)
    assert len(expected) == lines
    for rank in range(workers):
        left_out = ["[result]"] * (rank % 3 > 0) + ["[summary]"] * (rank > 0)
        found = shown(together.output.replace(f"[{rank}] ", ""))
        assert found == [line for line in expected if not line.startswith(tuple(left_out))]


def beside_one(starter: Starter, workers: int, script: Sequence[str]) -> Tuple[str, List[str]]:
    """Runs a script in several processes and in one; the output of the former, and what the latter shows."""
    together, alone = starter.start(*WHALE_RUN, "--workers", str(workers), *script), starter.start(*script)
    assert together.wait(RUN_S) == 0, together.output
    assert alone.wait(RUN_S) == 0, alone.output
    return together.output, shown(alone.output)


@pytest.mark.slow
def test_epochs_of_data_parallel_processes(starter: Starter) -> None:
    """The step in which the data ends fails at another time in each process, and the next one has nothing to do with it."""
    script = ("-m", "tests.multiprocess.train_epochs")
    together, expected = beside_one(starter, 4, script)
    assert len(expected) == 12
    for rank in range(4):
        assert shown(together.replace(f"[{rank}] ", "")) == expected


@pytest.mark.slow
@pytest.mark.half
@pytest.mark.parametrize("kind", ["functional", "switches"])
def test_conditions_over_variables_of_several_processes(starter: Starter, kind: str) -> None:
    script = ("-m", "tests.multiprocess.train_conditions", kind)
    together, expected = beside_one(starter, 2, script)
    assert len(expected) == 13
    for rank in range(2):
        others = tuple(f"[variables {index}]" for index in range(6) if index % 2 != rank)
        assert shown(together.replace(f"[{rank}] ", "")) == [line for line in expected if not line.startswith(others)]


@pytest.mark.slow
def test_fetch_of_one_process_beside_a_step_is_refused(starter: Starter, tmp_path: Any) -> None:
    process = run(starter, tmp_path, "ALONE")
    assert process.wait(RUN_S) != 0
    assert "has come to a training run, but another one has not within 5 s" in process.output, process.output


@pytest.mark.slow
def test_other_mini_batches_are_refused(starter: Starter, tmp_path: Any) -> None:
    process = run(starter, tmp_path, "OTHER")
    assert process.wait(RUN_S) != 0
    assert "of this graph has another first example in process 1 than in process 0" in process.output, process.output
