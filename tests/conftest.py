"""What all tests share: a quiet TensorFlow with few threads, hypothesis profiles, which tests run, logical devices."""
from __future__ import annotations

import inspect
import os
import sys
import zlib
from typing import Any, Callable, Iterator, List, Optional

import hypothesis
import pytest

# before anything imports TensorFlow or NumPy: every process of pytest-xdist would otherwise start a thread per core
for _name, _value in (("TF_CPP_MIN_LOG_LEVEL", "3"), ("TF_NUM_INTRAOP_THREADS", "1"), ("TF_NUM_INTEROP_THREADS", "2"),
                      ("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("MPLBACKEND", "Agg"),
                      ("WHALE_VERIFY", "1")):  # the last: what passes ensure is checked
    os.environ.setdefault(_name, _value)

_COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow,
                                                       hypothesis.HealthCheck.data_too_large]}
hypothesis.settings.register_profile("ci", max_examples=100, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("fuzz", max_examples=5000, **_COMMON)
hypothesis.settings.register_profile("quick", max_examples=20, derandomize=True, **_COMMON)
# pytest's own --hypothesis-profile comes later and wins
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# folders that test the half of the package which never imports TensorFlow
PURE = ("balance", "bridges", "cluster", "diagnosis", "ir", "papers", "patterns", "planner", "profiler", "schedule", "simulator")

# folders whose many short trainings run without TensorFlow's graph optimizer
SMALL_STEPS = ("ir", "models", "multiprocess", "numeric", "emit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full (the whole matrix)")


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> Optional[List[Any]]:
    """Without --full, nothing of a test that is marked full as a whole: to collect thousands of cases takes seconds."""
    is_full = inspect.isfunction(obj) and any(mark.name == "full" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_full and not collector.config.getoption("--full") else None


def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    """Without --full, three kinds of tests are deselected, not skipped: the full matrix, of which a pairwise subset runs instead;
    on Python 3.7 what would compute there what it computes beside the other TensorFlow, which is tests with the mark ``once`` and
    slow pure ones; and of tests with the mark ``half`` the cases that run on the other TensorFlow. Quick pure tests remain: they
    show that every pure module works on that Python."""
    for item in items:
        if is_pure(item):
            item.add_marker(pytest.mark.pure)
    if config.getoption("--full"):
        return

    is_old, is_shared = sys.version_info < (3, 8), "WHALE_TEST_SHARED" in os.environ

    def runs(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        if "full" in marks:
            return False
        if "half" in marks and is_shared and is_old != zlib.crc32(item.nodeid.encode()) % 2:
            return False
        return not is_old or ("once" not in marks and not {"pure", "slow"} <= marks)

    chosen = [runs(item) for item in items]
    if not all(chosen):
        config.hook.pytest_deselected(items=[item for item, is_run in zip(items, chosen) if not is_run])
        items[:] = [item for item, is_run in zip(items, chosen) if is_run]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """TensorFlow's graph optimizer takes longer than the small steps that tests in ``SMALL_STEPS`` run. It stays where the mark
    ``graph_optimizer`` asks for it: order, fusion and memory, sessions, loops, a fixed half of the matrix, generated models,
    four processes. It also stays in the other folders, and in scripts that tests start. (For functions it is turned by
    ``tests/functions/conftest.py``.)"""
    if "tensorflow" in sys.modules:
        from tests import graph_optimizer

        graph_optimizer.turn(graph_optimizer.stays(item, _folder(item) not in SMALL_STEPS))


def is_pure(item: Any) -> bool:
    """Whether a test stands in a folder of ``PURE`` and its module does not import TensorFlow (always as ``tf``)."""
    return _folder(item) in PURE and not hasattr(item.module, "tf")


def _folder(item: pytest.Item) -> str:
    return os.path.relpath(str(item.fspath), os.path.dirname(__file__)).split(os.sep)[0]


def _active() -> Any:
    """What the last wh.init set."""
    module = sys.modules.get("whale_tf.runtime.active")
    return None if module is None else module.current()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Scripts that a test runs in this process may have turned eager execution off, and not have called wh.shutdown."""
    before = _active()
    yield
    if _active() not in (None, before):
        sys.modules["whale_tf"].shutdown()
    if getattr(sys.modules.get("tensorflow"), "__version__", "1").startswith("1"):
        return
    from tensorflow.python.eager import context
    if context.default_execution_mode != context.EAGER_MODE:
        context.default_execution_mode = context.EAGER_MODE
        context.context()._thread_local_data.is_eager = True


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
