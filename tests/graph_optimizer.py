"""TensorFlow's graph optimizer, on or off for the Sessions that this process makes from now on."""
from __future__ import annotations

import functools
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context

_switch = {"on": True}


def turn(on: bool) -> None:
    _switch["on"] = on


def is_on() -> bool:
    return _switch["on"]


_original = BaseSession.__init__


@functools.wraps(_original)
def _init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
    if not is_on():
        given, config = config, tf.ConfigProto()
        config.MergeFrom(context.context().config if given is None else given)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    _original(self, target, graph, config)


BaseSession.__init__ = _init
