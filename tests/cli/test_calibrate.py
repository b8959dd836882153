"""The command measures for real, in a process of its own: thread pools belong to a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.command_line import call
from tests.test_architecture import ROOT
from whale_tf.cli import app
from whale_tf.errors import ClusterError
from whale_tf.measure.machine import Threads, collectives
from whale_tf.simulator import Calibration
from whale_tf.simulator.calibration import OVERLAPS


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "whale_tf.cli", "calibrate"] + list(arguments)
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=600)  # fmt: skip


@pytest.mark.once
@pytest.mark.slow
def test_measures_this_machine(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = str(tmp_path / "calibration.json")
    done = run("-o", path, "--repeat", "1")
    assert done.returncode == 0 and "communicator processes" in done.stdout, done.stdout
    found = Calibration.parse(path)
    assert found.device == "CPU" and found.intra_op == 1 and found.cores == os.cpu_count()
    large, larger = found.arithmetic[-2:]
    assert larger[1] > large[1] > 1e-6  # eight times the FLOPs take longer
    assert set(found.slow_down) == set(OVERLAPS)
    assert len(found.wake) == (6 if found.cores > 1 else 0) and all(0 <= seconds < 1 for _, seconds in found.wake)
    assert len(found.far) == (6 if len(os.sched_getaffinity(0)) > 1 else 0)
    assert set(found.communicators) == {"local", "processes"}
    assert all(one.alpha_s >= 0 and one.bandwidth_bytes_per_s > 0 for one in found.communicators.values())


def test_refuses_what_is_not_here() -> None:
    done = call(app, "calibrate", "--device", "V100")
    assert done.exit_code == 1 and "error: " in done.output and "--device CPU" in done.output


def test_process_whose_partner_fails_does_not_wait_for_it(tmp_path: Any, monkeypatch: Any) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$3" in *"], 1, ["*) echo no network; exit 3;; esac\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    began = time.monotonic()
    with pytest.raises(ClusterError, match="could not be measured: no network"):
        collectives(Threads(2, 1), 1)
    assert time.monotonic() - began < 30
