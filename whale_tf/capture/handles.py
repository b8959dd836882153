"""Variables of a tf.function: they live outside, and its graph has a placeholder for the handle of each.

::

    tf.Variable w ── handle ──> w_handle (Placeholder) ──> ReadVariableOp ──> MatMul
    outside                     in the graph of the function
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Set

from whale_tf._tf_compat import tf, variable_value
from whale_tf.ir.across import SUMS


class Handle(NamedTuple):
    """What the op graph says in the placeholder's place: a variable's op, with the attributes that such an op has."""

    type: str
    attrs: Dict[str, Any]


def variable_handles(graph: tf.Graph) -> Dict[str, Handle]:
    """The placeholders of a function's graph that stand for variables, by name; of other graphs none."""
    found: Dict[str, Handle] = {}
    summed = _summed(graph)
    for tensor in getattr(graph, "inputs", ()):
        value = variable_value(tensor) if tensor.dtype == tf.resource else None
        if value is not None:
            shape, dtype = value
            dims = None if shape.rank is None else tuple(shape.as_list())
            attrs = {"shape": dims, "dtype": dtype.name, SUMS: tensor.op.name in summed}
            found[tensor.op.name] = Handle("VarHandleOp", attrs)
    return found


def _summed(graph: tf.Graph) -> Set[str]:
    """Placeholders of variables that say of themselves that their values add up over replicas: what metrics count."""
    captured = inside(graph) if hasattr(graph, "captures") else {}
    return {captured[id(variable.handle)].op.name for variable in captured_variables(graph)
            if variable.aggregation == tf.VariableAggregation.SUM}


def captured_variables(graph: tf.Graph) -> List[Any]:
    """A function's variables, in the order in which it was found to use them."""
    known = {id(variable.handle): variable for variable in getattr(graph, "variables", ())}
    return [known[id(outer)] for outer, _ in graph.captures if id(outer) in known] if known else []


def inside(graph: tf.Graph) -> Dict[int, tf.Tensor]:
    """What stands in a function's graph for each tensor that it captured, by ``id`` of the tensor outside."""
    return {id(outer): inner for outer, inner in graph.captures}
