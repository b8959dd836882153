"""Variables of a tf.function: they live outside, and its graph has a placeholder for the handle of each.

::

    tf.Variable w ── handle ──> w_handle (Placeholder) ──> ReadVariableOp ──> MatMul
    outside                     in the graph of the function
"""
from __future__ import annotations

from typing import Any, Dict, NamedTuple

from whale_tf._tf_compat import tf, variable_value


class Handle(NamedTuple):
    """What the op graph says in the placeholder's place: a variable's op, with the attributes that such an op has."""

    type: str
    attrs: Dict[str, Any]


def variable_handles(graph: tf.Graph) -> Dict[str, Handle]:
    """The placeholders of a function's graph that stand for variables, by name; of other graphs none."""
    found = {}
    for tensor in getattr(graph, "inputs", ()):
        value = variable_value(tensor) if tensor.dtype == tf.resource else None
        if value is not None:
            shape, dtype = value
            dims = None if shape.rank is None else tuple(shape.as_list())
            found[tensor.op.name] = Handle("VarHandleOp", {"shape": dims, "dtype": dtype.name})
    return found


def inside(graph: tf.Graph) -> Dict[int, tf.Tensor]:
    """What stands in a function's graph for each tensor that it captured, by ``id`` of the tensor outside."""
    return {id(outer): inner for outer, inner in graph.captures}
