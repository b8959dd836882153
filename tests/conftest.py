"""What all tests share: a quiet TensorFlow with few threads, hypothesis profiles, the full matrix, logical devices."""
from __future__ import annotations

import os
from typing import Any, Callable, Iterator, List

import hypothesis
import pytest

# before anything imports TensorFlow or NumPy: every process of pytest-xdist would otherwise start a thread per core
for _name, _value in (("TF_CPP_MIN_LOG_LEVEL", "3"), ("TF_NUM_INTRAOP_THREADS", "1"), ("TF_NUM_INTEROP_THREADS", "2"),
                      ("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MPLBACKEND", "Agg")):
    os.environ.setdefault(_name, _value)

_COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow,
                                                       hypothesis.HealthCheck.data_too_large]}
hypothesis.settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("fuzz", max_examples=5000, **_COMMON)
hypothesis.settings.register_profile("quick", max_examples=20, derandomize=True, **_COMMON)
# pytest's own --hypothesis-profile comes later and wins
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full (the whole matrix)")


def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    """Without --full the full matrix is deselected, not skipped: its pairwise subset runs instead."""
    if config.getoption("--full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def graph() -> Iterator[Any]:
    """A fresh tf.Graph, current while the test runs."""
    import tensorflow as tf

    with tf.Graph().as_default() as fresh:
        yield fresh


@pytest.fixture
def logical_devices() -> Callable[[int], Any]:
    """``logical_devices(n)``: the ConfigProto of a Session with n logical CPU devices."""
    import tensorflow as tf

    return lambda count: tf.compat.v1.ConfigProto(device_count={"CPU": count}, allow_soft_placement=False)
