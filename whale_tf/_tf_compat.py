"""The one place that asks which TensorFlow this is.

Everything else imports ``tf`` and ``v1`` from here, so that a missing TensorFlow gives one clear message; what differs
between the two lines of releases gets a function here.
"""
from __future__ import annotations

from typing import Any

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "whale_tf rewrites TensorFlow graphs, and no TensorFlow was found. Install the build that fits the machine "
        "(tensorflow, tensorflow-cpu or tensorflow-gpu; 1.15 or 2.x), or run: pip install 'whale_tf[tf]'") from error

__all__ = ["AttrValue", "FunctionDef", "GraphDef", "NodeDef", "OpDef", "op_def", "tf", "v1"]

# Names of protos for annotations: type checkers see all of TensorFlow as Any.
AttrValue = Any
FunctionDef = Any
GraphDef = Any
NodeDef = Any
OpDef = Any

v1 = tf.compat.v1


def op_def(graph: tf.Graph, op_type: str) -> OpDef:
    """The OpDef of an op type: a registered op, or a function of the graph's library called as an op.

    Raises:
      LookupError: there is none.
    """
    lookup = getattr(graph, "op_def_for_type", None) or graph._get_op_def  # renamed within the 2.x releases
    try:
        return lookup(op_type)
    except (tf.errors.OpError, RuntimeError) as error:  # 1.x and 2.x, in this order
        raise LookupError("no op type {!r} in TensorFlow {}".format(op_type, tf.__version__)) from error
