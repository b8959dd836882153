"""TensorFlow's graph optimizer, on or off for the Sessions that this process makes from now on; and the marks that say which."""
from __future__ import annotations

import functools
import zlib
from typing import Any, List

import tensorflow.compat.v1 as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context

_switch = {"on": True}


def turn(on: bool) -> None:
    _switch["on"] = on


def is_on() -> bool:
    return _switch["on"]


def marks(row: str) -> List[Any]:
    """Of a row of a matrix, by its name: a fixed half of all rows has the optimizer."""
    import pytest  # which processes that tests start do without

    return [pytest.mark.graph_optimizer if zlib.crc32(row.encode()) & 2 else pytest.mark.no_graph_optimizer]


def stays(item: Any, otherwise: bool) -> bool:
    """Whether a test has the optimizer: as its nearest mark says."""
    names = (mark.name for mark in item.iter_markers())
    return next((name == "graph_optimizer" for name in names if name in ("graph_optimizer", "no_graph_optimizer")), otherwise)


_original = BaseSession.__init__


@functools.wraps(_original)
def _init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
    if not is_on():
        given, config = config, tf.ConfigProto()
        config.MergeFrom(context.context().config if given is None else given)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    _original(self, target, graph, config)


BaseSession.__init__ = _init
