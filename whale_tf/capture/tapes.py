"""Hooks into TensorFlow's gradients: calls of ``tf.gradients`` and of tapes are noted as gradient calls of their graph.

A tape calls the gradient function of each op that it saw.  The op's own name goes to the tape instead of a name scope, comes back
with that call, and tags the ops that the gradient function makes.
"""
from __future__ import annotations

import inspect
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

from whale_tf._tf_compat import ControlFlowGraph, eager_outside_functions, function_tracing, tf, v1
from whale_tf.capture.annotations import FORWARD_ATTR, annotations_of, gradient_call, gradient_names
from whale_tf.capture.callbacks import Callbacks, Function
from whale_tf.capture.handles import inside


class _Depth(threading.local):
    value = 0


_depth = _Depth()  # number of running gradient calls of this thread


def traced_function() -> Optional[tf.Graph]:
    """The graph of the tf.function that is being traced; None: there is none, or this TensorFlow has no place to rewrite it."""
    if tf.executing_eagerly() or not eager_outside_functions() or function_tracing() is None:
        return None
    return v1.get_default_graph()


def is_body(graph: tf.Graph) -> bool:
    """Whether the graph is of a branch or a loop inside a function."""
    return isinstance(graph, ControlFlowGraph)


def has_variables(xs: Any) -> bool:
    """Whether some of ``xs`` are variables (Keras 3 has a class of its own), or their handles."""
    return any(isinstance(x, tf.Variable) or hasattr(x, "handle") or getattr(x, "dtype", None) == tf.resource
               for x in tf.nest.flatten(xs))


def gradients_helper(original: Function, callbacks: Callbacks) -> Function:
    """Notes the call.  TensorFlow re-enters for function bodies (``src_graph`` is another graph) and for composite tensors; only
    the outermost call counts."""
    parameters = inspect.signature(original)

    def wrapper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(ys, xs, *args, **kwargs).arguments
        src_graph, first = given.get("src_graph"), given.get("grad_ys")
        in_body = src_graph is not None and src_graph is not v1.get_default_graph()
        if _depth.value or in_body or tf.executing_eagerly():
            return original(ys, xs, *args, **kwargs)
        if eager_outside_functions():
            return _in_function(ys, xs, callbacks, lambda: original(ys, xs, *args, **kwargs), first)
        _depth.value += 1
        try:
            with gradient_call(v1.get_default_graph(), ys, xs, first) as call:
                grads = callbacks.gradients(original(ys, xs, *args, **kwargs), xs)
                call.grads = gradient_names(grads)
        finally:
            _depth.value -= 1
        return grads
    return wrapper


def maybe_compile(original: Function, callbacks: Callbacks) -> Function:
    """Tags the ops that an op's gradient function makes with the op's name."""

    def wrapper(scope: str, op: tf.Operation, func: Any, grad_fn: Function) -> Any:
        graph = v1.get_default_graph()
        if op.graph is not graph:  # a body of the backward pass, for a body of the forward pass
            return original(scope, op, func, grad_fn)
        with graph._attr_scope({FORWARD_ATTR: v1.AttrValue(s=op.name.encode())}):
            return original(scope, op, func, grad_fn)
    return wrapper


def imperative_grad(original: Function, callbacks: Callbacks) -> Function:
    """Every ``GradientTape.gradient`` calls this: those of Keras' ``fit``, of optimizers' ``minimize``, and of training loops.
    A tape in a graph that a Session runs is found in that graph."""
    parameters = inspect.signature(original)

    def imperative_gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if not eager_outside_functions():
            return original(tape, target, sources, *args, **kwargs)
        first = parameters.bind(tape, target, sources, *args, **kwargs).arguments.get("output_gradients")
        return _in_function(target, sources, callbacks, lambda: original(tape, target, sources, *args, **kwargs), first)
    return imperative_gradient


def jacobian(original: Function, callbacks: Callbacks) -> Function:
    def jacobian(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        graph = traced_function()
        if graph is not None and has_variables(sources):
            callbacks.jacobian(graph)
        return original(self, target, sources, *args, **kwargs)
    return jacobian


def forward_accumulator(original: Function, callbacks: Callbacks) -> Function:
    def __init__(self: Any, primals: Any, tangents: Any) -> None:
        if eager_outside_functions() and has_variables(primals):
            callbacks.forward_mode()
        original(self, primals, tangents)
    return __init__


def _in_function(ys: Any, xs: Any, callbacks: Callbacks, gradients: Callable[[], Any], first: Any) -> Any:
    """Gradients in functions, while TensorFlow 2 executes eagerly outside them."""
    graph = traced_function()
    if has_variables(xs):
        if graph is None:
            callbacks.outside_graph()
        else:
            callbacks.function_gradients(graph)
            annotations_of(graph).trains = True
    return gradients() if graph is None else _noted(graph, ys, xs, gradients, first)


def _noted(graph: tf.Graph, ys: Any, xs: Any, gradients: Callable[[], Sequence[Any]], first: Any = None) -> Any:
    """What ``gradients`` returns for ``ys`` with respect to ``xs``, noted as a gradient call of a function's graph unless one is
    running."""
    if _depth.value:
        return gradients()
    _depth.value += 1
    try:
        captured = inside(graph)
        targets = [y for y in _in_graph(graph, captured, ys) if y is not None]
        sources = _in_graph(graph, captured, xs)
        with gradient_call(graph, targets, [x for x in sources if x is not None], first) as call:
            grads = gradients()
            call.grads = gradient_names([grad for grad, x in zip(grads, sources) if x is not None])
    finally:
        _depth.value -= 1
    return grads


def _in_graph(graph: tf.Graph, captured: Dict[int, tf.Tensor], values: Any) -> List[Optional[tf.Tensor]]:
    """The tensor in the graph that stands for each tensor or variable; None: there is none, so nothing in it depends on this."""
    found = []
    for value in values if isinstance(values, (list, tuple)) else [values]:
        value = getattr(value, "handle", value)
        found.append(value if getattr(value, "graph", None) is graph else captured.get(id(value)))
    return found


def record_gradient(original: Function, callbacks: Callbacks) -> Function:
    """Gives tapes an op's name instead of its scope's."""
    tracing = function_tracing()

    def record(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> None:
        if tracing is None or traced_function() is None or not outputs or not hasattr(outputs[0], "op"):
            original(op_name, inputs, attrs, outputs)
        else:
            tracing.record(op_name, inputs, attrs, outputs, outputs[0].op.name)
    return record


def gradient_function(original: Function, callbacks: Callbacks) -> Function:
    """Tags the ops that an op's gradient function makes with the op's name.

    If the op is in another graph, nothing is tagged."""

    def differentiate(op_name: str, attrs: Any, count: int, inputs: Any, outputs: Any, grads: Any, skipped: Any,
                      forward: str) -> Any:
        graph = traced_function()
        if graph is None or not forward or not _has(graph, forward, op_name):
            return original(op_name, attrs, count, inputs, outputs, grads, skipped, forward)
        with graph._attr_scope({FORWARD_ATTR: v1.AttrValue(s=forward.encode())}):
            return _shaped(original(op_name, attrs, count, inputs, outputs, grads, skipped, forward),
                           graph.get_operation_by_name(forward).inputs)
    return differentiate


def _shaped(grads: Any, inputs: Sequence[tf.Tensor]) -> Any:
    """Gives gradients without a rank (those of ``tf.py_function``) the shapes of what they are gradients of.  ``tf.gradients``
    does this, but tapes do not, and a script cannot."""
    for grad, x in zip(grads if isinstance(grads, (list, tuple)) else [grads], inputs):
        is_of_handle = x.dtype == tf.resource  # whose shape is not the variable's
        if isinstance(grad, tf.Tensor) and grad.shape.rank is None and not is_of_handle:
            grad.set_shape(x.shape)
    return grads


def _has(graph: tf.Graph, name: str, op_type: str) -> bool:
    try:
        return bool(graph.get_operation_by_name(name).type == op_type)
    except (KeyError, ValueError):
        return False
