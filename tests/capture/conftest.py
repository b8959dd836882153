from __future__ import annotations

from typing import Callable, Iterator

import pytest
import tensorflow as tf

from tests import graph_optimizer  # noqa: F401 (wraps a function whose original test_hooks looks at)
from whale_tf.capture import annotations, hooks


@pytest.fixture
def hooked() -> Iterator[None]:
    """Hooks with callbacks that change nothing; no annotations of earlier tests."""
    annotations.forget()
    hooks.install(hooks.Callbacks())
    yield
    hooks.uninstall()
    annotations.forget()


@pytest.fixture
def control_flow() -> Iterator[Callable[[bool], None]]:
    """``control_flow(functional)``: whether loops and conditions become While and If or frames of Enter, Switch, ..."""
    v1 = tf.compat.v1
    functional_before = v1.control_flow_v2_enabled()
    switch = {True: v1.enable_control_flow_v2, False: v1.disable_control_flow_v2}
    yield lambda functional: switch[functional]()
    switch[functional_before]()
