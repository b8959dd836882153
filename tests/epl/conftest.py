"""Every test begins in graph mode, and leaves nothing behind."""
from __future__ import annotations

from typing import Any

import pytest

import whale_tf as wh
from whale_tf._tf_compat import v1
from whale_tf.epl.env import Env


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WHALE_CLUSTER", "cpu:4")
    with v1.Graph().as_default():  # no eager execution
        yield
    wh.shutdown()
    Env.get().reset()
