"""Variables of a tf.function: they live outside it, and its graph has a placeholder for the handle of each.

::

    tf.Variable w ── handle ──> w_handle (Placeholder) ──> ReadVariableOp ──> MatMul
    outside                     in the graph of the function
"""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Set

from whale_tf._tf_compat import tf, variable_value
from whale_tf.capture.annotations import TASK_GRAPH_ATTR, annotations_of
from whale_tf.garbage import instances
from whale_tf.ir.across import SUMS
from whale_tf.ir.graph import LAYOUT_ATTR, LAYOUT_OF_ATTR


class Handle(NamedTuple):
    """What the op graph has instead of the placeholder: a variable's op, with the attributes of such an op."""

    type: str
    attrs: Dict[str, Any]


def variable_handles(graph: tf.Graph) -> Dict[str, Handle]:
    """The placeholders of a function's graph that stand for variables, by name; other graphs have none."""
    found: Dict[str, Handle] = {}
    summed, made_in, layouts = _summed(graph), annotations_of(graph).made_in, annotations_of(graph).layouts
    for tensor in getattr(graph, "inputs", ()):
        value = variable_value(tensor) if tensor.dtype == tf.resource else None
        if value is not None:
            shape, dtype = value
            dims = None if shape.rank is None else tuple(shape.as_list())
            attrs = {"shape": dims, "dtype": dtype.name, SUMS: tensor.op.name in summed}
            if tensor.op.name in made_in:
                attrs[TASK_GRAPH_ATTR] = made_in[tensor.op.name]
            if tensor.op.name in layouts:
                attrs[LAYOUT_ATTR], attrs[LAYOUT_OF_ATTR] = layouts[tensor.op.name]
            found[tensor.op.name] = Handle("VarHandleOp", attrs)
    return found


def _summed(graph: tf.Graph) -> Set[str]:
    """Placeholders of variables which declare that their values are summed over replicas, such as the counts of metrics."""
    captured = inside(graph) if hasattr(graph, "captures") else {}
    return {captured[id(variable.handle)].op.name for variable in captured_variables(graph)
            if variable.aggregation == tf.VariableAggregation.SUM}


def note_variables(graph: tf.Graph) -> None:
    """Makes a function's graph know the variable of every handle that it captured.

    TensorFlow notes a variable that is read or assigned.  Keras' legacy optimizers do neither with their slots: they give kernels
    the handles (``m.handle``), which is all that the graph then has.  Only a variable knows its handle, so all are looked at.
    """
    known = {id(own_handle(variable)) for variable in graph.variables}
    unknown = {id(outer) for outer, inner in graph.captures
               if id(outer) not in known and inner.dtype == tf.resource and variable_value(inner) is not None}
    if unknown:
        add_variables(graph, [one for one in instances(tf.Variable) if id(own_handle(one)) in unknown])


def add_variables(graph: tf.Graph, variables: Iterable[Any]) -> None:
    """Notes variables whose handles a function captured."""
    graph.variables = [*graph.variables, *variables]


def own_handle(variable: Any) -> Any:
    """A variable's handle; taking it has no effect on a variable that is divided.  None: it has none of its own."""
    return vars(variable).get("_handle")


def captured_variables(graph: tf.Graph) -> List[Any]:
    """A function's variables, in the order of their first use."""
    known = {id(variable.handle): variable for variable in getattr(graph, "variables", ())}
    return [known[id(outer)] for outer, _ in graph.captures if id(outer) in known] if known else []


def inside(graph: tf.Graph) -> Dict[int, tf.Tensor]:
    """The placeholder in a function's graph of each tensor that it captured, by ``id`` of the tensor outside."""
    return {id(outer): inner for outer, inner in graph.captures}
