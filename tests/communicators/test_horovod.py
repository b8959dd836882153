"""Horovod as the carrier, where it is not installed or knows other processes (tests/multiprocess has it at work)."""
from __future__ import annotations

import sys
import types
from typing import Any, Iterator

import pytest
import tensorflow.compat.v1 as tf

from whale_tf.cluster import Processes
from whale_tf.communicators import Keys, communicator, horovod
from whale_tf.errors import ClusterError, ConfigError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    horovod._started.cache_clear()
    yield
    horovod._started.cache_clear()


def test_it_is_not_installed(monkeypatch: Any, graph: tf.Graph) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigError, match="'horovod', but Horovod for TensorFlow .* cannot be imported .*build it"):
        communicator("horovod", Nodes(StagedEdit(graph)), Processes(("a:1", "b:1"), 0), Keys())


def test_it_was_not_started_by_its_launcher(monkeypatch: Any, graph: tf.Graph) -> None:
    alone = types.SimpleNamespace(init=lambda: None, size=lambda: 1, rank=lambda: 0)
    package = types.ModuleType("horovod")
    monkeypatch.setattr(package, "tensorflow", alone, raising=False)
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", alone)
    with pytest.raises(ClusterError, match="this is process 1 of 2, but for Horovod it is process 0 of 1; .* horovodrun -np 2"):
        communicator("horovod", Nodes(StagedEdit(graph)), Processes(("a:1", "b:1"), 1), Keys())


def test_unknown_between_processes(graph: tf.Graph) -> None:
    with pytest.raises(ConfigError, match="between processes, expected one of collective, horovod"):
        communicator("local", Nodes(StagedEdit(graph)), Processes(("a:1", "b:1"), 0), Keys())
