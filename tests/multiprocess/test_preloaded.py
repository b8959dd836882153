"""Processes of tests are forks of one that has imported TensorFlow."""
from __future__ import annotations

import re
from typing import Any

import pytest

from tests.multiprocess.launch import WHALE_RUN, printed

SCRIPT = """
import os, signal, sys
ours = [number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(number) != signal.SIG_DFL]
sys.stdout.write("forked %s, handlers %s, leads %s\\n" % ("tensorflow" in sys.modules, ours, os.getpid() == os.getsid(0)))
"""


@pytest.mark.slow
def test_processes_of_a_job_are_forks(tmp_path: Any) -> None:
    """Although their keepers, which are forks, too, stand between; and whale run's handlers of signals are not theirs."""
    (tmp_path / "script.py").write_text(SCRIPT)
    output = printed(*WHALE_RUN, "--workers", "1:2", str(tmp_path / "script.py"))
    found = sorted(re.findall(r"\[\d\] .*", output))
    assert found == [f"[{rank}] forked True, handlers [], leads True" for rank in (0, 1)], output
