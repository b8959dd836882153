"""Annotations around Keras layers: a layer remembers its annotation, and enters it whenever a tf.function calls the layer.

Keras builds a model eagerly and calls its layers again when ``fit`` traces the training step, long after the user's ``with`` has
ended::

    with wh.replicate(1):
        x = Dense(8)(inputs)        the layer remembers the annotation, and so does this call of it
    model.fit(...)                  traces Dense.__call__ inside `with wh.replicate(1)`

A functional model has a node for each call.  A layer that several blocks share is called in the block of the node.
Copies of models are in :mod:`.copies`.
"""
from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import threading
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterator, MutableMapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import annotate, annotations_of, is_annotating
from whale_tf.capture.callbacks import Callbacks, Function, Place
from whale_tf.capture.handles import captured_variables, inside, own_handle
from whale_tf.capture.tapes import is_body, traced_function
from whale_tf.errors import AnnotationError


class Remembered(NamedTuple):
    """What a layer knows about the block in which it was made or first called."""

    strategy: str
    device_count: Optional[int]
    name: str


ROOTS = ("keras.src", "keras", "tf_keras.src", "tensorflow.python.keras")
Table = Sequence[Tuple[str, Sequence[Tuple[str, Callable[[Function, Callbacks], Function]]]]]


class Named(str):
    """A layer's name in its configuration.  The layer that is made from the configuration has the annotation."""

    block: Remembered

    def __new__(cls, name: str, block: Remembered) -> Named:
        made = super().__new__(cls, name)
        made.block = block
        return made

    def __deepcopy__(self, memo: Any) -> Named:
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)


class _Thread(threading.local):
    """Attributes:
        block: the annotation that is open in eager execution.
        has_layers: some layer remembers it.
        variables: those to be trained that were made in it.
        calls: number of running ``__call__`` of layers.
        node: what the node that a functional model is about to call remembers.
        is_rebuilding: a Sequential model calls all layers that it has, also those of earlier blocks.
    """

    block: Optional[Remembered] = None
    has_layers = False
    variables: Sequence[Any] = ()
    calls = 0
    node: Optional[Remembered] = None
    is_rebuilding = False


_thread = _Thread()
_known: MutableMapping[Any, Remembered] = weakref.WeakKeyDictionary()  # of layers, and of nodes of functional models
_made: Dict[int, Tuple[weakref.ref, Remembered]] = {}  # of variables, which have no hash, by id
_count = itertools.count()


class LayersBlock(ContextManager):
    """An annotation in eager execution.  Variables that are made in it belong to the annotations that use them, as in a graph.

    Raises:
        AnnotationError: on exit, if no layer or variable was made inside and no layer called; on entry, inside another one.
    """

    def __init__(self, strategy: str, device_count: Optional[int], name: Optional[str]) -> None:
        self._block = Remembered(strategy, device_count, name or f"{strategy}_of_layers_{next(_count)}")
        self._creators = tf.variable_creator_scope(_noted)

    def __enter__(self) -> None:
        if _thread.block is not None:
            raise AnnotationError(
                f"wh.{self._block.strategy} inside wh.{_thread.block.strategy}: annotations do not nest. Close the outer `with` "
                "block before opening the inner one.")
        _thread.block, _thread.has_layers, _thread.variables = self._block, False, []
        self._creators.__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._creators.__exit__(None, None, None)
        variables, has_layers = _thread.variables, _thread.has_layers
        _thread.block, _thread.variables = None, ()
        if not has_layers:
            _made.update((id(one), (weakref.ref(one), self._block)) for one in variables)
        if kind is None and not (has_layers or variables or _thread.calls):
            raise AnnotationError(
                f"wh.{self._block.strategy} applies to ops of a function or a graph, but TensorFlow is executing eagerly, and no "
                "Keras layer or variable was made inside. Use it inside a function: write @tf.function above the training step.")


def _noted(next_creator: Function, **kwargs: Any) -> Any:
    made = next_creator(**kwargs)
    if getattr(made, "trainable", False):  # an optimizer's variables belong to no part of a model
        _thread.variables = [*_thread.variables, made]
    return made


def enter_variables(graph: tf.Graph) -> None:
    """Puts the variables that a training function uses into the annotations in which they were made in eager execution."""
    annotations = annotations_of(graph)
    trained = {name for call in annotations.gradient_calls for name, gradient in zip(call.xs, call.grads) if gradient is not None}
    placeholders = inside(graph)
    for variable in captured_variables(graph):
        known, handle = _made.get(id(variable)), placeholders.get(id(own_handle(variable)))
        if known is not None and known[0]() is variable and handle is not None and handle.name in trained:
            annotations.made_in[handle.op.name] = annotations.enter(*known[1]).index


def is_calling() -> bool:
    """Whether a layer is being called."""
    return bool(_thread.calls)


def forget() -> None:
    """Makes layers created so far forget their annotations; layers created from now on remember theirs."""
    _known.clear()
    _made.clear()


def block_of(item: Any) -> Optional[Remembered]:
    """What a layer or a node remembers."""
    return _known.get(item)


def remember_as(item: Any, block: Remembered) -> None:
    """Lets a layer or a node remember an annotation."""
    _known[item] = block


def places() -> Iterator[Place]:
    """(class, attribute, wrapper) for every loaded Keras."""
    return places_in(_KERAS_3, _KERAS_2)


def places_in(keras_3: Table, keras_2: Table) -> Iterator[Place]:
    """Places in every loaded Keras: Keras 3, tf.keras up to TensorFlow 2.15, tf_keras."""
    older = ((f"{root}.engine.{name}", attributes) for root in ROOTS for name, attributes in keras_2)
    for place, attributes in (*keras_3, *older):
        module, _, name = place.partition(":")
        owner = getattr(sys.modules.get(module), name, None)
        for attribute, wrapper in attributes if owner is not None else ():
            yield owner, attribute, wrapper


def load() -> None:
    """Loads ``tf.keras``, which most releases of TensorFlow load on first use."""
    try:
        importlib.import_module(tf.keras.layers.Layer.__module__)
    except (ImportError, AttributeError):
        pass  # a TensorFlow without it


def operation_init(original: Function, callbacks: Callbacks) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        name = kwargs.get("name")
        if isinstance(name, Named):
            kwargs["name"] = str(name)
        original(self, *args, **kwargs)
        if isinstance(name, Named):
            _known[self] = name.block

    __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras reads it to save layers
    return __init__


def layer_init(original: Function, callbacks: Callbacks) -> Function:
    made = operation_init(original, callbacks)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _remember(self)

    __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras reads it to save layers
    return __init__


def layer_call(original: Function, callbacks: Callbacks) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        (node, _thread.node), block = (_thread.node, None), _thread.block
        if _thread.is_rebuilding and not _thread.calls:
            _thread.block = _known.get(self)
        if not _thread.calls:
            _remember(self)
        _thread.calls += 1
        try:
            known, graph = node or _own(self), traced_function()
            if known is None or graph is None or is_body(graph) or is_annotating(graph):
                return original(self, *args, **kwargs)
            with annotate(graph, *known) as item:
                annotations_of(graph).remembered.add(item.name)
                return original(self, *args, **kwargs)
        finally:
            _thread.calls -= 1
            _thread.block = block
    return __call__


def sequential_add(original: Function, callbacks: Callbacks) -> Function:
    def add(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        if callable(layer):
            _remember(layer)
        original(self, layer, *args, **kwargs)
    return add


def sequential_build(original: Function, callbacks: Callbacks) -> Function:
    """Keras 3 makes a functional model anew whenever a layer is added to a Sequential model with an input."""

    def build(self: Any, input_shape: Any = None) -> Any:
        before, _thread.is_rebuilding = _thread.is_rebuilding, True
        try:
            return original(self, input_shape)
        finally:
            _thread.is_rebuilding = before
    return build


def node_arguments(original: Function, callbacks: Callbacks) -> Function:
    """A functional model reads a node's arguments right before it calls the node, or before it infers its shapes without a
    call."""

    def arguments(self: Any, tensors: Any) -> Any:
        _thread.node = _known.get(self) if traced_function() is not None else None
        return original(self, tensors)
    return arguments


def _own(item: Any) -> Optional[Remembered]:
    """The annotation of a layer; none for a model whose layers have others, which count instead: the model was only assembled
    inside its annotation."""
    known = _known.get(item)
    if known is None or not hasattr(item, "_flatten_layers"):
        return known
    others = (_known.get(inner, known) for inner in item._flatten_layers(include_self=False))
    return None if any(other != known for other in others) else known


def _remember(item: Any) -> None:
    if _thread.block is not None:
        _known[item] = _thread.block
        _thread.has_layers = True


def resolve_auto_jit_compile(original: Function, callbacks: Callbacks) -> Function:
    """Keras' answer to ``jit_compile="auto"``."""

    def _resolve_auto_jit_compile(self: Any) -> bool:
        return bool(original(self)) and callbacks.may_use_xla()
    return _resolve_auto_jit_compile


_KERAS_3 = (
    ("keras.src.layers.layer:Layer", (("__init__", layer_init), ("__call__", layer_call))),
    ("keras.src.ops.operation:Operation", (("__init__", operation_init), ("__call__", layer_call))),
    ("keras.src.ops.symbolic_arguments:SymbolicArguments", (("__init__", layer_init), ("fill_in", node_arguments))),
    ("keras.src.models.sequential:Sequential", (("add", sequential_add), ("build", sequential_build))),
    ("keras.src.trainers.trainer:Trainer", (("_resolve_auto_jit_compile", resolve_auto_jit_compile),)),
)
_KERAS_2 = (
    ("base_layer:Layer", (("__init__", layer_init), ("__call__", layer_call))),
    ("node:Node", (("__init__", layer_init), ("map_arguments", node_arguments))),
)
