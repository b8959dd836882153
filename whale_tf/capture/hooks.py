"""The hooks into TensorFlow: one table, installed and removed together.

A hook replaces one attribute of a TensorFlow class or module by a wrapper around the original.  The wrappers do no work
themselves: gradient calls are noted in :mod:`whale_tf.capture.annotations`, and everything else goes to the
:class:`~whale_tf.capture.callbacks.Callbacks` that :func:`install` was given.
"""
from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, Callable, List, MutableSet, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import (
    BaseSession,
    DatasetIterator,
    DatasetV1,
    EventFileWriter,
    ResourceVariable,
    estimators,
    function_tracing,
    gradients_util,
    imperative_grad,
    lacking,
    tf,
    v1,
)
from whale_tf.capture import copies, distribution, fitting, layers, tapes
from whale_tf.capture.callbacks import Callbacks, Function


class Hook(NamedTuple):
    """``wrapper(original, callbacks)`` returns the replacement of ``owner.attribute``; ``tell`` is called with each new value if
    others than the owner must know it."""

    owner: Any
    attribute: str
    wrapper: Callable[[Function, Callbacks], Function]
    tell: Callable[[Function], Any] = lambda function: None


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
        def run(given: Any, captured: Any) -> Any:
            return original(self, given, captured, *args, **kwargs)

        callbacks.before_call(captured_inputs)
        return callbacks.call(self, run, tensor_inputs, captured_inputs)
    return _call_flat


def _function_call(original: Function, callbacks: Callbacks) -> Function:
    known: MutableSet[Any] = weakref.WeakSet()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            callbacks.function_called(self)
            known.add(self)
        with fitting.called():
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


def _variable_init(original: Function, callbacks: Callbacks) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self._in_graph_mode:
            callbacks.variable_made(self)
    return __init__


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
        original(self, callbacks.session_target(target, graph, config), graph, config)
    return __init__


def _answered_by(name: str) -> Callable[[Function, Callbacks], Function]:
    """For a method that a callback answers, which gets the object, the original method, and the arguments."""

    def wrapper(original: Function, callbacks: Callbacks) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(callbacks, name)(self, functools.partial(original, self), *args, **kwargs)
        return method
    return wrapper


def _session_extend_graph(original: Function, callbacks: Callbacks) -> Function:
    def _extend_graph(self: Any) -> Any:
        callbacks.before_extend(self)
        return original(self)
    return _extend_graph


def _call_input_fn(original: Function, callbacks: Callbacks) -> Function:
    def call(self: Any, input_fn: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        callbacks.estimator_graph(self, v1.get_default_graph(), mode)
        return original(self, input_fn, mode, *args, **kwargs)
    return call


def _call_model_fn(original: Function, callbacks: Callbacks) -> Function:
    def call(self: Any, features: Any, labels: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        callbacks.estimator_graph(self, v1.get_default_graph(), mode)
        return original(self, features, labels, mode, *args, **kwargs)
    return call


HOOKS: Tuple[Hook, ...] = (
    Hook(gradients_util, "_GradientsHelper", tapes.gradients_helper),
    Hook(gradients_util, "_MaybeCompile", tapes.maybe_compile),
    Hook(imperative_grad, "imperative_grad", tapes.imperative_grad),
    Hook(tf.Graph, "finalize", _graph_finalize),
    Hook(v1.train.Saver, "save", _answered_by("save")),
    Hook(v1.train.ChiefSessionCreator, "create_session", _answered_by("create_session")),
    Hook(v1.train.WorkerSessionCreator, "create_session", _answered_by("create_session")),
    Hook(EventFileWriter, "add_event", _answered_by("add_event")),
    Hook(DatasetV1, "_make_one_shot_iterator", fitting.make_iterator),
    Hook(DatasetV1, "_make_initializable_iterator", fitting.make_iterator),
    Hook(DatasetIterator, "make_initializer", fitting.make_initializer),
    Hook(BaseSession, "__init__", _session_init),
    Hook(BaseSession, "run", _answered_by("run")),
    Hook(BaseSession, "make_callable", _answered_by("make_callable")),
    Hook(BaseSession, "partial_run_setup", _answered_by("partial_run_setup")),
    Hook(BaseSession, "close", _answered_by("session_close")),
    Hook(BaseSession, "_extend_graph", _session_extend_graph),
)

_ESTIMATORS = estimators()
if _ESTIMATORS is not None:
    HOOKS += (
        Hook(_ESTIMATORS.run_config, "_init_distributed_setting_from_environment_var", _answered_by("run_config")),
        Hook(_ESTIMATORS.estimator, "train", _answered_by("estimator_train")),
        Hook(_ESTIMATORS.estimator, "_call_input_fn", _call_input_fn),
        Hook(_ESTIMATORS.estimator, "_call_model_fn", _call_model_fn),
        Hook(_ESTIMATORS.listener, "_evaluate", _answered_by("checkpoint_saved")),
        Hook(_ESTIMATORS.executor, "run_local", _answered_by("train_and_evaluate")),
    )

_TRACING = function_tracing()
if _TRACING is not None:
    HOOKS += (
        Hook(_TRACING.function, "__call__", _function_call),
        Hook(_TRACING.graph, "capture", _capture),
        Hook(_TRACING.concrete, "_call_flat", _call_flat),
        Hook(_TRACING.execute, "record_gradient", tapes.record_gradient),
        Hook(_TRACING.backprop, "_gradient_function", tapes.gradient_function, _TRACING.register),
        Hook(tf.GradientTape, "jacobian", tapes.jacobian),
        Hook(tf.autodiff.ForwardAccumulator, "__init__", tapes.forward_accumulator),
        Hook(_TRACING.concrete, _TRACING.make, _concrete_function),
        Hook(ResourceVariable, "__init__", _variable_init),
    )
if _TRACING is not None and _TRACING.compilation is not None:  # only several processes need these
    HOOKS += (
        Hook(_TRACING.compilation, "_create_concrete_function", _create_concrete_function),
        Hook(tf.data.Dataset, "__iter__", fitting.dataset_iter),
        Hook(_TRACING.loops, "_general_purpose_scan", fitting.dataset_loop),
        Hook(tf.data.Dataset, "shuffle", fitting.dataset_shuffle),
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
        found = {place[:2]: Hook(*place) for place in (*layers.places(), *copies.places(), *fitting.attributes(),
                                                       *distribution.places())}
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
                if hook.wrapper is layers.sequential_build:  # Keras reads its signature, on old Pythons that of what is wrapped
                    del vars(replacement)["__wrapped__"]
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


def original(owner: Any, attribute: str) -> Function:
    """TensorFlow's own function, whether it is hooked or not."""
    return next((item.original for item in _installed if item.hook[:2] == (owner, attribute)), vars(owner)[attribute])


def original_run(session: Any) -> Function:
    """TensorFlow's own ``run`` of a session, whether it is hooked or not."""
    return next(
        (functools.partial(item.original, session) for item in _installed if item.hook[:2] == (BaseSession, "run")), session.run)
