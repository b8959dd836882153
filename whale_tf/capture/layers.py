"""Annotations around Keras 3 layers: remembered by the layer, entered again wherever the layer is called in a tf.function.

Keras builds a model eagerly and calls its layers again when ``fit`` traces the training step, long after the user's ``with`` has
ended::

    with wh.replicate(1):
        x = Dense(8)(inputs)        the layer remembers the annotation
    model.fit(...)                  traces Dense.__call__ inside `with wh.replicate(1)`
"""
from __future__ import annotations

import inspect
import itertools
import sys
import threading
import weakref
from typing import Any, Callable, ContextManager, MutableMapping, NamedTuple, Optional

from whale_tf.capture.annotations import annotate, is_annotating
from whale_tf.capture.tapes import is_body, traced_function
from whale_tf.errors import AnnotationError

Function = Callable[..., Any]


class _Remembered(NamedTuple):
    """What a layer knows of the block it was made or first called in."""

    strategy: str
    device_count: Optional[int]
    name: str


class _Thread(threading.local):
    """Attributes:
        block: the annotation that is open in eager execution.
        has_layers: some layer remembers it.
        calls: layers' ``__call__`` under way.
    """

    block: Optional[_Remembered] = None
    has_layers = False
    calls = 0


_thread = _Thread()
_layers: MutableMapping[Any, _Remembered] = weakref.WeakKeyDictionary()
_count = itertools.count()


class LayersBlock(ContextManager):
    """An annotation in eager execution.

    Raises:
        AnnotationError: on leaving it, if no layer was made or called inside; on entering it, inside another.
    """

    def __init__(self, strategy: str, device_count: Optional[int], name: Optional[str]) -> None:
        self._block = _Remembered(strategy, device_count, name or f"{strategy}_of_layers_{next(_count)}")

    def __enter__(self) -> None:
        if _thread.block is not None:
            raise AnnotationError(
                f"wh.{self._block.strategy} inside wh.{_thread.block.strategy}: annotations do not nest. Close the outer `with` "
                "block before opening the inner one.")
        _thread.block, _thread.has_layers = self._block, False

    def __exit__(self, kind: Any, *error: Any) -> None:
        has_layers = _thread.has_layers or _thread.calls
        _thread.block = None
        if kind is None and not has_layers:
            raise AnnotationError(
                f"wh.{self._block.strategy} is about the ops of a function or a graph, but TensorFlow is executing eagerly, and "
                "no Keras layer was made or called inside. Use it inside a function: write @tf.function above the training step.")


def forget() -> None:
    """Layers that are made from now on remember; those that were made before do no more."""
    _layers.clear()


def has_keras_layers() -> bool:
    """Whether Keras 3 is there, so that annotations in eager execution may be about its layers."""
    return layer_class() is not None


def layer_class() -> Any:
    """Keras 3's ``Layer``, where it is loaded (TensorFlow 2.16 and later load it themselves); else None."""
    return getattr(sys.modules.get("keras.src.layers.layer"), "Layer", None)


def trainer_class() -> Any:
    """Keras 3's base of all models that train."""
    return getattr(sys.modules.get("keras.src.trainers.trainer"), "Trainer", None)


def layer_init(original: Function, callbacks: Any) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _remember(self)

    __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras reads it to save layers
    return __init__


def layer_call(original: Function, callbacks: Any) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.calls:
            _remember(self)
        _thread.calls += 1
        try:
            known, graph = _layers.get(self), traced_function()
            if known is None or graph is None or is_body(graph) or is_annotating(graph):
                return original(self, *args, **kwargs)
            with annotate(graph, *known):
                return original(self, *args, **kwargs)
        finally:
            _thread.calls -= 1
    return __call__


def _remember(layer: Any) -> None:
    if _thread.block is not None:
        _layers[layer] = _thread.block
        _thread.has_layers = True


def resolve_auto_jit_compile(original: Function, callbacks: Any) -> Function:
    """Keras' answer to ``jit_compile="auto"``."""

    def _resolve_auto_jit_compile(self: Any) -> bool:
        return bool(original(self)) and callbacks.may_use_xla()
    return _resolve_auto_jit_compile


