"""TensorFlow's graph optimizer, on or off for what this process runs from now on: new Sessions, and functions."""
from __future__ import annotations

import functools
from typing import Any

import tensorflow
import tensorflow.compat.v1 as tf
from tensorflow.python.client.session import BaseSession

from whale_tf._tf_compat import function_tracing

_switch = {"on": True}


def turn(on: bool) -> None:
    if function_tracing() is not None:
        tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})
    _switch["on"] = on


def is_on() -> bool:
    return _switch["on"]


_original = BaseSession.__init__


@functools.wraps(_original)
def _init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
    if not is_on():
        given, config = config, tf.ConfigProto()
        config.MergeFrom(given or tf.ConfigProto())
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    _original(self, target, graph, config)


BaseSession.__init__ = _init
