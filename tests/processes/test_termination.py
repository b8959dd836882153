"""SIGTERM in a process of ``whale run``: it saves where no step is under way, and ends; a failed save harms nothing."""
from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any, Iterator, List

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.processes import termination
from whale_tf.processes.watch import TERMINATED_STATUS


@pytest.fixture(autouse=True)
def _launched(monkeypatch: Any, graph: Any) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("WHALE_RUN", "1")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wh.init(cluster="cpu:1")
    yield
    wh.shutdown()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


class Script:
    """Counts in a variable, with an optimizer, and saves."""

    def __init__(self, has_global_step: bool = False) -> None:
        self.weight = tf.get_variable("weight", [], tf.float64, tf.zeros_initializer())
        step = tf.train.get_or_create_global_step() if has_global_step else None
        self.train = tf.train.GradientDescentOptimizer(1.0).minimize(-self.weight, global_step=step)
        self.saver = tf.train.Saver(max_to_keep=2)
        self.session = tf.Session()
        self.session.run(tf.global_variables_initializer())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.session.run(self.train)


def asked_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def saved_weight(path: str) -> float:
    return float(tf.train.NewCheckpointReader(path).get_tensor("weight"))


@pytest.mark.slow
@pytest.mark.parametrize("has_global_step", [False, True])
def test_saves_after_the_step_under_the_next_number(tmp_path: Any, has_global_step: bool) -> None:
    script = Script(has_global_step)
    script.steps(2)
    script.saver.save(script.session, str(tmp_path / "model"), global_step=12)
    script.session.run(script.weight)  # trains nothing
    script.steps(3)
    asked_to_end()
    with pytest.raises(SystemExit) as end:
        script.steps(1)
    assert end.value.code == TERMINATED_STATUS
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model-15")
    assert saved_weight(str(tmp_path / "model-15")) == 5.0


@pytest.mark.slow
def test_step_given_as_a_variable(tmp_path: Any) -> None:
    script = Script(has_global_step=True)
    script.saver.save(script.session, str(tmp_path / "model"), global_step=tf.train.get_global_step())
    script.steps(3)
    asked_to_end()
    with pytest.raises(SystemExit):
        script.steps(1)
    assert saved_weight(str(tmp_path / "model-3")) == 3.0


@pytest.mark.slow
def test_saver_that_is_used_most(tmp_path: Any, capsys: Any) -> None:
    script = Script()
    best = tf.train.Saver()
    for _ in range(2):
        script.saver.save(script.session, str(tmp_path / "model"))
    best.save(script.session, str(tmp_path / "best"))
    script.steps(1)
    asked_to_end()
    with pytest.raises(SystemExit):
        script.session.make_callable(script.train)()
    assert saved_weight(str(tmp_path / "model")) == 1.0 and saved_weight(str(tmp_path / "best")) == 0.0
    assert "SIGTERM: saved {}; ending".format(tmp_path / "model") in capsys.readouterr().err


@pytest.mark.slow
def test_not_in_the_middle_of_a_save(tmp_path: Any, capsys: Any) -> None:
    """The script's own save goes through to its end, and is the last one."""
    script = Script()
    script.steps(1)
    train, script.session.run = script.session.run, lambda *args, **kwargs: (asked_to_end(), train(*args, **kwargs))[1]
    with pytest.raises(SystemExit):
        script.saver.save(script.session, str(tmp_path / "model"), global_step=1)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model-1")
    assert "nothing has changed since the last checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_script_that_saves_nothing(capsys: Any) -> None:
    script = Script()
    asked_to_end()
    with pytest.raises(SystemExit):
        script.steps(1)
    assert "the script itself has not saved a checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 20, 200])
def test_full_disk_leaves_the_checkpoint_before(tmp_path: Any, capsys: Any, limit: int) -> None:
    """No file may be longer than ``limit`` bytes: the data file, the index and the list of checkpoints fail in turn."""
    script = Script()
    for step in range(2):
        script.steps(1)
        script.saver.save(script.session, str(tmp_path / "model"), global_step=step)
    script.steps(1)
    asked_to_end()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(SystemExit) as end:
            script.steps(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert end.value.code == TERMINATED_STATUS
    assert "saving failed, so the previous checkpoint is the last one" in capsys.readouterr().err
    last = tf.train.latest_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "model-1") and saved_weight(last) == 2.0
    assert saved_weight(str(tmp_path / "model-0")) == 1.0


@pytest.mark.slow
def test_script_that_runs_nothing_any_more(monkeypatch: Any) -> None:
    """It ends after a while; not where whale_tf has been shut down in the meantime."""
    ends: List[int] = []
    monkeypatch.setattr(termination, "PATIENCE_S", 0.2)
    monkeypatch.setattr(termination, "end_process", lambda message, status: ends.append(status))
    script = Script()
    asked_to_end()
    wh.shutdown()
    time.sleep(0.6)
    assert not ends
    wh.init(cluster="cpu:1")
    script.steps(1)
    asked_to_end()
    limit = time.monotonic() + 30
    while not ends and time.monotonic() < limit:
        time.sleep(0.05)
    assert ends == [TERMINATED_STATUS]


@pytest.mark.slow
def test_script_with_a_handler_of_its_own() -> None:
    wh.shutdown()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wh.init(cluster="cpu:1")
    asked_to_end()
    script = Script()
    script.steps(1)
    assert np.isclose(script.session.run(script.weight), 1.0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
