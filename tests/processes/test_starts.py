"""What a run with snapshots says of the starts before: steps that were lost, and how time was spent."""
from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any, List

import pytest

from whale_tf.cluster.processes import CHANGE
from whale_tf.runtime.snapshots import run as module
from whale_tf.runtime.snapshots.pace import Todo
from whale_tf.runtime.snapshots.run import Run, Spent

NOW = 1e9  # s; the clock stands still


@pytest.fixture
def said(monkeypatch: Any) -> List[str]:
    found: List[str] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: NOW))
    monkeypatch.setattr(module, "say", found.append)
    return found


def started(folder: Any, found: Any = None, is_chief: bool = True) -> Run:
    """A start that goes on with a snapshot, or with none, and takes none."""
    pace: Any = SimpleNamespace(is_chief=is_chief, begins=lambda step: None, after=lambda *given: Todo(False, 0))
    writer: Any = SimpleNamespace(wait=lambda: None, leads=False, lines=list)
    run = Run("fit", SimpleNamespace(path=str(folder)), writer, pace, found, 1, lambda *given: None)  # type: ignore[arg-type]
    if found is not None:
        run.begins(found.step)
    return run


def steps(run: Run, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.step_done(step, lambda: pytest.fail("no snapshot is due"))


def change(monkeypatch: Any, seconds: float) -> None:
    """As ``whale run`` tells it, so many seconds after the notice."""
    monkeypatch.setenv(CHANGE, json.dumps({"what": "lost worker 1", "at": NOW - seconds}))


def test_steps_without_a_snapshot_are_lost(tmp_path: Any, said: List[str], monkeypatch: Any) -> None:
    steps(started(tmp_path), 1, 3)
    change(monkeypatch, 5.0)
    again = started(tmp_path)
    assert said == []
    steps(again, 1, 2)
    again.finished(2)
    assert said == [
        "lost worker 1; steps 1 to 3 were lost, and training goes on with step 1, 5.0 s after this was noticed",
        "fit has finished: 2 steps, 0 s after its first start in 2 starts; 0.0% of this time went into these steps (goodput), "
        "5.0 s into starts, 0.00 s into waiting for snapshots"]
    assert CHANGE not in os.environ


@pytest.mark.parametrize("last, lost", [(4, "no step was"), (5, "step 5 was"), (7, "steps 5 to 7 were")])
def test_steps_since_the_snapshot_are_lost(tmp_path: Any, said: List[str], monkeypatch: Any, last: int, lost: str) -> None:
    """What the snapshot knows of the time before stays: here, two starts an hour ago."""
    steps(started(tmp_path), 1, last)
    change(monkeypatch, 0.0)
    before = Spent(NOW - 3600, 1800.0, 1.0, 2, 30.0)
    again = started(tmp_path, SimpleNamespace(step=4, state=lambda: ({"spent": list(before)}, {})))
    steps(again, 5, 5)
    again.finished(5)
    assert said[0].startswith(f"lost worker 1; {lost} lost, and training goes on with step 5, 0.0 s after this was noticed")
    assert "5 steps, 3600 s after its first start in 3 starts; 50.0% of this time" in said[1] and "30.0 s into starts" in said[1]


@pytest.mark.parametrize("text", ["", "12", "null", "{", '{"step": 3}'])
def test_file_that_is_not_as_expected_is_no_obstacle(tmp_path: Any, said: List[str], text: str) -> None:
    (tmp_path / "reached").write_text(text)
    run = started(tmp_path)
    steps(run, 1, 1)
    run.finished(1)
    assert said[0].startswith("fit has finished: 1 steps, 0 s after its first start; ")
    assert json.loads((tmp_path / "reached").read_text())["step"] == 1


def test_only_one_process_speaks_and_writes(tmp_path: Any, said: List[str], monkeypatch: Any) -> None:
    change(monkeypatch, 0.0)
    run = started(tmp_path, is_chief=False)
    steps(run, 1, 2)
    run.finished(2)
    assert said == [] and os.listdir(str(tmp_path)) == [] and CHANGE not in os.environ
