"""The hooks into TensorFlow: one table, installed and removed together.

A hook replaces one attribute of a TensorFlow class or module by a wrapper around the original.  The wrappers do no work
themselves: gradient calls are noted in :mod:`whale_tf.capture.annotations`, and everything about sessions, graphs and savers goes
to the :class:`Callbacks` that :func:`install` was given.
"""
from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, Callable, List, Mapping, MutableSet, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import (
    BaseSession,
    DatasetIterator,
    DatasetV1,
    DatasetV1Adapter,
    EventFileWriter,
    eager_outside_functions,
    function_tracing,
    gradients_util,
    imperative_grad,
    lacking,
    tf,
    v1,
)
from whale_tf.capture import fitting, layers, tapes
from whale_tf.capture.annotations import FORWARD_ATTR, annotations_of, gradient_call, gradient_names

Function = Callable[..., Any]


class Callbacks(NamedTuple):
    """What the hooks call.  ``original`` is always the unpatched TensorFlow function, bound to its session; a callback
    that takes it decides whether and how to call it.  The defaults change nothing.

    Attributes:
        gradients: (gradients, what they are with respect to) -> the gradients that the caller gets.
        outside_graph: (), before gradients of variables are taken in eager execution (or in a tf.function that cannot be
            rewritten): training that neither a Session nor a function runs.
        function_gradients: (graph), before gradients of variables are taken in the graph of a tf.function that is traced.
        jacobian: (graph), before a tape takes a Jacobian with respect to variables in the graph of a tf.function.
        forward_mode: (), before a ForwardAccumulator takes derivatives with respect to variables.
        function_called: (tf.function), before it is called for the first time since the hooks were installed.
        may_use_xla: (), whether Keras may compile a model with XLA if the script did not explicitly ask for it.
        arguments: (type of a tf.function's arguments) -> a more general one to trace it for, if possible.
        call: (concrete function, original), for every call of a tf.function, eagerly or in another function's graph.
        shuffle: (seed or None) -> the seed of ``Dataset.shuffle`` in eager execution.
        traced: (graph, attributes), when a tf.function has been traced; its graph can still be edited.
        made: (concrete function), when it has been made from that graph.
        before_call: (captured tensors), before a concrete function runs, or is called in another.
        before_finalize: (graph), before ``Graph.finalize`` makes it read-only; not called for function bodies.
        session_config: (target, graph or None, ConfigProto or None) -> the ConfigProto to use.
        session_target: (target, that ConfigProto) -> the target to use.
        create_session: (session creator, original, whether it is a chief's) -> a session, initialised or restored.
        run: (session, original, fetches, feed_dict, options, run_metadata) -> the fetched values.
        make_callable: (session, original, fetches, feed_list, accept_options) -> a callable.
        partial_run_setup: (session, original, fetches, feeds) -> a handle.
        before_extend: (session), before the session takes over new ops of its graph; all ways to run lead here.
        save: (saver, original, arguments of ``Saver.save``) -> the checkpoint's path.
        add_event: (original, event), for every event that goes to an event file.
        dataset: (dataset) -> the dataset from which to make an iterator.
        training_data: (Keras' adapter of the data that ``fit`` trains on) -> the adapter to use instead.
        training_batches: (dataset that Keras 2's ``fit`` trains on, mini-batches of an epoch or None) -> the dataset to use
            instead, and how many processes share it.
        divides: (), whether training steps are divided.
        writes: (), whether this process writes checkpoints, summaries and logs of functions.
    """

    gradients: Callable[[Any, Any], Any] = lambda grads, xs: grads
    outside_graph: Callable[[], None] = lambda: None
    function_gradients: Callable[[tf.Graph], None] = lambda graph: None
    jacobian: Callable[[tf.Graph], None] = lambda graph: None
    forward_mode: Callable[[], None] = lambda: None
    function_called: Callable[[Any], None] = lambda function: None
    may_use_xla: Callable[[], bool] = lambda: True
    arguments: Callable[[Any], Any] = lambda function_type: function_type
    call: Callable[[Any, Callable[[], Any]], Any] = lambda function, original: original()
    shuffle: Callable[[Optional[int]], Optional[int]] = lambda seed: seed
    traced: Callable[[tf.Graph, Mapping[str, Any]], None] = lambda graph, attributes: None
    made: Callable[[Any], None] = lambda function: None
    before_call: Callable[[Any], None] = lambda captured: None
    before_finalize: Callable[[tf.Graph], None] = lambda graph: None
    session_config: Callable[[str, Optional[tf.Graph], Any], Any] = lambda target, graph, config: config
    session_target: Callable[[str, Any], str] = lambda target, config: target
    create_session: Function = lambda creator, original, is_chief: original()
    run: Function = lambda session, original, *arguments: original(*arguments)
    make_callable: Function = lambda session, original, *arguments: original(*arguments)
    partial_run_setup: Function = lambda session, original, *arguments: original(*arguments)
    before_extend: Callable[[Any], None] = lambda session: None
    save: Function = lambda saver, original, *args, **kwargs: original(*args, **kwargs)
    add_event: Callable[[Callable[[Any], None], Any], None] = lambda original, event: original(event)
    dataset: Callable[[Any], Any] = lambda dataset: dataset
    training_data: Callable[[Any], Any] = lambda adapter: adapter
    training_batches: Callable[[Any, Optional[int]], Tuple[Any, int]] = lambda dataset, number: (dataset, 1)
    divides: Callable[[], bool] = lambda: False
    writes: Callable[[], bool] = lambda: True


class Hook(NamedTuple):
    """``wrapper(original, callbacks)`` returns the replacement of ``owner.attribute``; ``tell`` is called with each new value if
    others than the owner must know it."""

    owner: Any
    attribute: str
    wrapper: Callable[[Function, Callbacks], Function]
    tell: Callable[[Function], Any] = lambda function: None


# -- gradient calls -------------------------------------------------------------------------------------------------
def _gradients_helper(original: Function, callbacks: Callbacks) -> Function:
    """Notes the call.  TensorFlow re-enters for function bodies (``src_graph`` is another graph) and for composite tensors; only
    the outermost call counts."""
    parameters = inspect.signature(original)

    def wrapper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(ys, xs, *args, **kwargs).arguments
        src_graph, first = given.get("src_graph"), given.get("grad_ys")
        in_body = src_graph is not None and src_graph is not v1.get_default_graph()
        if tapes.depth.value or in_body or tf.executing_eagerly():
            return original(ys, xs, *args, **kwargs)
        if eager_outside_functions():
            return _in_function(ys, xs, callbacks, lambda: original(ys, xs, *args, **kwargs), first)
        tapes.depth.value += 1
        try:
            with gradient_call(v1.get_default_graph(), ys, xs, first) as call:
                grads = callbacks.gradients(original(ys, xs, *args, **kwargs), xs)
                call.grads = gradient_names(grads)
        finally:
            tapes.depth.value -= 1
        return grads
    return wrapper


def _maybe_compile(original: Function, callbacks: Callbacks) -> Function:
    """Tags the ops that an op's gradient function makes with the op's name."""

    def wrapper(scope: str, op: tf.Operation, func: Any, grad_fn: Function) -> Any:
        graph = v1.get_default_graph()
        if op.graph is not graph:  # a body of the backward pass, for a body of the forward pass
            return original(scope, op, func, grad_fn)
        with graph._attr_scope({FORWARD_ATTR: v1.AttrValue(s=op.name.encode())}):
            return original(scope, op, func, grad_fn)
    return wrapper


def _imperative_grad(original: Function, callbacks: Callbacks) -> Function:
    """Every ``GradientTape.gradient`` calls this: those of Keras' ``fit``, of optimizers' ``minimize``, and of training loops.
    A tape in a graph that a Session runs is found in that graph."""
    parameters = inspect.signature(original)

    def imperative_gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if not eager_outside_functions():
            return original(tape, target, sources, *args, **kwargs)
        first = parameters.bind(tape, target, sources, *args, **kwargs).arguments.get("output_gradients")
        return _in_function(target, sources, callbacks, lambda: original(tape, target, sources, *args, **kwargs), first)
    return imperative_gradient


def _jacobian(original: Function, callbacks: Callbacks) -> Function:
    def jacobian(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        graph = tapes.traced_function()
        if graph is not None and tapes.has_variables(sources):
            callbacks.jacobian(graph)
        return original(self, target, sources, *args, **kwargs)
    return jacobian


def _forward_accumulator(original: Function, callbacks: Callbacks) -> Function:
    def __init__(self: Any, primals: Any, tangents: Any) -> None:
        if eager_outside_functions() and tapes.has_variables(primals):
            callbacks.forward_mode()
        original(self, primals, tangents)
    return __init__


def _in_function(ys: Any, xs: Any, callbacks: Callbacks, gradients: Callable[[], Any], first: Any) -> Any:
    """Gradients in functions, while TensorFlow 2 executes eagerly outside them."""
    graph = tapes.traced_function()
    if tapes.has_variables(xs):
        if graph is None:
            callbacks.outside_graph()
        else:
            callbacks.function_gradients(graph)
            annotations_of(graph).trains = True
    return gradients() if graph is None else tapes.noted(graph, ys, xs, gradients, first)


# -- functions ------------------------------------------------------------------------------------------------------
def _create_concrete_function(original: Function, callbacks: Callbacks) -> Function:
    def create(function_type: Any, type_context: Any, func_graph: tf.Graph, tracing_options: Any) -> Any:
        other = function_type if tracing_options.input_signature is not None else callbacks.arguments(function_type)
        if other is not function_type:
            try:
                return original(other, type_context, type(func_graph)(func_graph.name), tracing_options)
            except (TypeError, ValueError):
                pass  # the function asks for a static size; any other error will occur again
        return original(function_type, type_context, func_graph, tracing_options)
    return create


def _capture(original: Function, callbacks: Callbacks) -> Function:
    """Gives the placeholders of tensors that a function captures from eager execution the same names in every process, so that
    its plan can be run again.  TensorFlow's own names count everything that was executed before."""

    def capture(self: Any, tensor: Any, name: Optional[str] = None, shape: Any = None) -> Any:
        if name is None and not hasattr(tensor, "graph"):
            name = "captured"
        return original(self, tensor, name, shape)
    return capture


def _call_flat(original: Function, callbacks: Callbacks) -> Function:
    """Runs a concrete function, or calls it in another one."""

    def _call_flat(self: Any, tensor_inputs: Any, captured_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks.before_call(captured_inputs)
        return callbacks.call(self, lambda: original(self, tensor_inputs, captured_inputs, *args, **kwargs))
    return _call_flat


def _function_call(original: Function, callbacks: Callbacks) -> Function:
    known: MutableSet[Any] = weakref.WeakSet()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            callbacks.function_called(self)
            known.add(self)
        return original(self, *args, **kwargs)
    return __call__


def _concrete_function(original: Any, callbacks: Callbacks) -> Any:
    """Makes a concrete function from each traced graph: a constructor or, since TensorFlow 2.14, a class method."""
    is_constructor = inspect.isfunction(original)
    make = original if is_constructor else original.__func__

    def from_func_graph(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, graph, *args, **kwargs).arguments
        if isinstance(graph, tf.Graph) and graph.building_function:
            callbacks.traced(graph, given.get("attrs") or {})
        made = make(self, graph, *args, **kwargs)
        callbacks.made(self if is_constructor else made)
        return made

    signature = inspect.signature(make)
    return from_func_graph if is_constructor else classmethod(from_func_graph)


# -- graphs, sessions and savers ------------------------------------------------------------------------------------
def _graph_finalize(original: Function, callbacks: Callbacks) -> Function:
    def finalize(self: tf.Graph) -> Any:
        if not self.finalized and not self.building_function:
            callbacks.before_finalize(self)
        return original(self)
    return finalize


def _session_init(original: Function, callbacks: Callbacks) -> Function:
    def __init__(self: Any, target: str = "", graph: Optional[tf.Graph] = None, config: Any = None) -> None:
        config = callbacks.session_config(target, graph, config)
        original(self, callbacks.session_target(target, config), graph, config)
    return __init__


def _chief_create_session(original: Function, callbacks: Callbacks) -> Function:
    def create_session(self: Any) -> Any:
        return callbacks.create_session(self, functools.partial(original, self), True)
    return create_session


def _worker_create_session(original: Function, callbacks: Callbacks) -> Function:
    def create_session(self: Any) -> Any:
        return callbacks.create_session(self, functools.partial(original, self), False)
    return create_session


def _session_run(original: Function, callbacks: Callbacks) -> Function:
    def run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        return callbacks.run(self, functools.partial(original, self), fetches, feed_dict, options, run_metadata)
    return run


def _session_make_callable(original: Function, callbacks: Callbacks) -> Function:
    def make_callable(self: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
        return callbacks.make_callable(self, functools.partial(original, self), fetches, feed_list, accept_options)
    return make_callable


def _session_partial_run_setup(original: Function, callbacks: Callbacks) -> Function:
    def partial_run_setup(self: Any, fetches: Any, feeds: Any = None) -> Any:
        return callbacks.partial_run_setup(self, functools.partial(original, self), fetches, feeds)
    return partial_run_setup


def _session_extend_graph(original: Function, callbacks: Callbacks) -> Function:
    def _extend_graph(self: Any) -> Any:
        callbacks.before_extend(self)
        return original(self)
    return _extend_graph


def _saver_save(original: Function, callbacks: Callbacks) -> Function:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        return callbacks.save(self, functools.partial(original, self), *args, **kwargs)
    return save


def _add_event(original: Function, callbacks: Callbacks) -> Function:
    def add_event(self: Any, event: Any) -> None:
        callbacks.add_event(functools.partial(original, self), event)
    return add_event


# -- input pipelines --------------------------------------------------------------------------------------------------
def _make_iterator(original: Function, callbacks: Callbacks) -> Function:
    """Methods of a dataset that make an iterator."""

    def make_iterator(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return original(self, *args, **kwargs)
        dataset = callbacks.dataset(self)
        if dataset is self:
            return original(self, *args, **kwargs)
        adapted = dataset if isinstance(dataset, DatasetV1) else DatasetV1Adapter(dataset)
        return original(adapted, *args, **kwargs)
    return make_iterator


def _make_initializer(original: Function, callbacks: Callbacks) -> Function:
    def make_initializer(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, callbacks.dataset(dataset), *args, **kwargs)
    return make_initializer


def _dataset_iter(original: Function, callbacks: Callbacks) -> Function:
    def __iter__(self: Any) -> Any:
        return original(callbacks.dataset(self) if tf.executing_eagerly() and not fitting.iterates() else self)
    return __iter__


def _dataset_loop(original: Function, callbacks: Callbacks) -> Function:
    """A loop over a dataset in a function."""

    def scan(ds: Any, init_state: Any, body: Any) -> Any:
        return original(ds if fitting.iterates() else callbacks.dataset(ds), init_state, body)
    return scan


def _dataset_shuffle(original: Function, callbacks: Callbacks) -> Function:
    def shuffle(self: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, buffer_size, callbacks.shuffle(seed) if tf.executing_eagerly() else seed, *args, **kwargs)
    return shuffle


HOOKS: Tuple[Hook, ...] = (
    Hook(gradients_util, "_GradientsHelper", _gradients_helper),
    Hook(gradients_util, "_MaybeCompile", _maybe_compile),
    Hook(imperative_grad, "imperative_grad", _imperative_grad),
    Hook(tf.Graph, "finalize", _graph_finalize),
    Hook(v1.train.Saver, "save", _saver_save),
    Hook(v1.train.ChiefSessionCreator, "create_session", _chief_create_session),
    Hook(v1.train.WorkerSessionCreator, "create_session", _worker_create_session),
    Hook(EventFileWriter, "add_event", _add_event),
    Hook(DatasetV1, "_make_one_shot_iterator", _make_iterator),
    Hook(DatasetV1, "_make_initializable_iterator", _make_iterator),
    Hook(DatasetIterator, "make_initializer", _make_initializer),
    Hook(BaseSession, "__init__", _session_init),
    Hook(BaseSession, "run", _session_run),
    Hook(BaseSession, "make_callable", _session_make_callable),
    Hook(BaseSession, "partial_run_setup", _session_partial_run_setup),
    Hook(BaseSession, "_extend_graph", _session_extend_graph),
)

_TRACING = function_tracing()
if _TRACING is not None:
    HOOKS += (
        Hook(_TRACING.function, "__call__", _function_call),
        Hook(_TRACING.graph, "capture", _capture),
        Hook(_TRACING.concrete, "_call_flat", _call_flat),
        Hook(_TRACING.execute, "record_gradient", tapes.record_gradient),
        Hook(_TRACING.backprop, "_gradient_function", tapes.gradient_function, _TRACING.register),
        Hook(tf.GradientTape, "jacobian", _jacobian),
        Hook(tf.autodiff.ForwardAccumulator, "__init__", _forward_accumulator),
        Hook(_TRACING.concrete, _TRACING.make, _concrete_function),
    )
if _TRACING is not None and _TRACING.compilation is not None:  # only several processes need these
    HOOKS += (
        Hook(_TRACING.compilation, "_create_concrete_function", _create_concrete_function),
        Hook(tf.data.Dataset, "__iter__", _dataset_iter),
        Hook(_TRACING.loops, "_general_purpose_scan", _dataset_loop),
        Hook(tf.data.Dataset, "shuffle", _dataset_shuffle),
        Hook(tf.train.Checkpoint, "save", fitting.checkpoint_save),
        Hook(tf.train.Checkpoint, "write", fitting.checkpoint_write),
        Hook(tf.train.CheckpointManager, "save", fitting.manager_save),
        Hook(tf.summary, "create_file_writer", fitting.create_file_writer),
    )


class _Installed(NamedTuple):
    hook: Hook
    original: Any
    replacement: Any


_installed: List[_Installed] = []
_callbacks: Any = None


def install(callbacks: Callbacks) -> None:
    """Installs all hooks.  Installing again replaces the callbacks; wrappers never stack.

    Raises:
        UnsupportedTensorFlowError: this TensorFlow lacks something that is hooked.
    """
    global _callbacks
    uninstall()
    _callbacks = callbacks
    _put(HOOKS)
    install_keras()


def install_keras() -> None:
    """Installs hooks in every Keras that has been loaded since, if TensorFlow's functions can be rewritten."""
    if _installed and _TRACING is not None:
        found = {place[:2]: Hook(*place) for place in (*layers.places(), *fitting.attributes())}
        _put([found[place] for place in found if place not in {item.hook[:2] for item in _installed}])


def _put(hooks: Sequence[Hook]) -> None:
    missing = [f"{hook.owner.__name__}.{hook.attribute}" for hook in hooks if hook.attribute not in vars(hook.owner)]
    if missing:
        raise lacking(missing)
    try:
        for hook in hooks:
            original = vars(hook.owner)[hook.attribute]
            replacement = hook.wrapper(original, _callbacks)
            if inspect.isfunction(replacement):
                functools.update_wrapper(replacement, original)
            setattr(hook.owner, hook.attribute, replacement)
            hook.tell(replacement)
            _installed.append(_Installed(hook, original, replacement))
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Restores all original objects; does nothing if no hook is installed."""
    while _installed:
        hook, original, _ = _installed.pop()
        setattr(hook.owner, hook.attribute, original)
        hook.tell(original)


def installed() -> bool:
    return bool(_installed)


def original_run(session: Any) -> Function:
    """TensorFlow's own ``run`` of a session, whether it is hooked or not."""
    return next(
        (functools.partial(item.original, session) for item in _installed if item.hook[:2] == (BaseSession, "run")), session.run)
