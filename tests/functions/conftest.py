"""tf.functions under whale_tf, beside the same functions without it."""
from __future__ import annotations

import os
import sys
from typing import Any, Iterator, List

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import whale_tf as wh
from tests import graph_optimizer
from tests.functions.equality import clear_keras
from tests.numeric.races import unordered
from whale_tf._tf_compat import function_tracing, make_logical_cpus
from whale_tf.runtime import functions

DEVICES = 5  # four, and one that stands for the host

if function_tracing() is not None:
    make_logical_cpus(DEVICES)  # while tests are collected: TensorFlow has executed nothing yet


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    if function_tracing() is None:
        reason = f"TensorFlow {tf.__version__} has no place where a traced tf.function can be rewritten (2.4 and later have)"
        for item in items:
            if str(item.fspath).startswith(os.path.dirname(__file__)):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function that is rewritten is checked once."""
    original = functions.finish

    def finish(graph: tf.Graph, *arguments: Any) -> None:
        original(graph, *arguments)
        found = unordered([tensor.op for tensor in graph.outputs] + list(graph.control_outputs))
        assert not found, "a call may read these before or after the write:\n  " + "\n  ".join(found[:10])

    monkeypatch.setattr(functions, "finish", finish)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Eager execution, and Keras' own settings (it keeps the first policy of types that it is asked for), whatever tests before
    have changed; hooks are taken out afterwards."""
    if "keras" in sys.modules and function_tracing() is not None:
        clear_keras()
    with context.eager_mode():
        yield
        wh.shutdown()


@pytest.fixture(autouse=True)
def function_optimizer(request: Any) -> Iterator[None]:
    """TensorFlow's graph optimizer, but for tests with the mark ``no_graph_optimizer``."""
    on = graph_optimizer.stays(request.node, True)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture
def float64() -> Iterator[None]:
    """Keras computes in float64."""
    backend = tf.keras.backend
    before = backend.floatx()
    backend.set_floatx("float64")
    yield
    backend.set_floatx(before)
    clear_keras()
