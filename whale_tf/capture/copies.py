"""Copies of Keras models have the annotations of their originals.

    =================================  ==================================================================================
    copy                               what carries the annotations
    =================================  ==================================================================================
    ``from_config``, ``clone_model``   the layers' names in their configurations: strings that know a block
    ``clone_model``                    for calls of shared layers also the original's nodes
    ``deepcopy``, ``pickle``           an attribute of the buffer to which Keras 3 writes the model: plain Python values, which
                                       load without this package; Keras 2's ``deepcopy`` has both models at hand
    ``to_json``, Keras 2's ``pickle``  nothing: a warning says so
    =================================  ==================================================================================
"""
from __future__ import annotations

import sys
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from whale_tf.capture.callbacks import Callbacks, Function, Place
from whale_tf.capture.layers import ROOTS, Named, Remembered, block_of, places_in, remember_as

_ATTRIBUTE = "whale_tf_annotations"  # of a buffer with a pickled model
_Plain = Optional[Tuple[str, Optional[int], str]]


class _Notes(NamedTuple):
    """The annotations of a model: (name, annotation) of each layer, and the annotations of the nodes of functional models."""

    layers: List[Tuple[str, _Plain]]
    nodes: List[_Plain]

    @property
    def names(self) -> List[str]:
        """Names of the TaskGraphs."""
        return sorted({known[2] for known in [known for _, known in self.layers] + self.nodes if known is not None})


def places() -> Iterator[Place]:
    """(class, attribute, wrapper) for every loaded Keras, as far as its classes have the attributes."""
    modules = (sys.modules.get(f"{root}.{name}") for root in ROOTS for name in ("models", "models.cloning"))
    cloning = ((module, "_clone_functional_model", _carried) for module in modules if module is not None)
    return (place for place in (*places_in(_KERAS_3, _KERAS_2), *cloning) if place[1] in vars(place[0]))


def _layers(model: Any) -> List[Any]:
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def _nodes(model: Any) -> List[Any]:
    """What remembers the annotations of nodes, in an order that copies share."""
    return [getattr(node, "arguments", node) for layer in _layers(model)
            for _, nodes in sorted(getattr(layer, "_nodes_by_depth", {}).items()) for node in nodes]


def _noted(model: Any) -> _Notes:
    return _Notes([(layer.name, _plain(layer)) for layer in _layers(model)], [_plain(node) for node in _nodes(model)])


def _plain(item: Any) -> _Plain:
    block = block_of(item)
    return None if block is None else (block.strategy, block.device_count, block.name)


def _apply(notes: _Notes, copied: Any) -> None:
    """Layers of one name are copied in their order."""
    by_name: Dict[str, List[_Plain]] = {}
    for name, known in notes.layers:
        by_name.setdefault(name, []).append(known)
    for layer in _layers(copied):
        left = by_name.get(layer.name)
        _remember(layer, left.pop(0) if left else None)
    nodes = _nodes(copied)
    for node, known in zip(nodes, notes.nodes if len(nodes) == len(notes.nodes) else ()):
        _remember(node, known)


def _remember(item: Any, known: _Plain) -> None:
    if known is not None:
        remember_as(item, Remembered(*known))


def _get_config(original: Function, callbacks: Callbacks) -> Function:
    def get_config(self: Any) -> Any:
        config, block = original(self), block_of(self)
        if block is not None and isinstance(config.get("name"), str):
            config["name"] = Named(config["name"], block)
        return config
    return get_config


def _reduce(original: Function, callbacks: Callbacks) -> Function:
    def __reduce__(self: Any) -> Any:
        reduced, notes = original(self), _noted(self)
        buffer = next(iter(reduced[1]), None)
        if notes.names and hasattr(buffer, "__dict__"):
            setattr(buffer, _ATTRIBUTE, tuple(notes))
        elif notes.names:
            _say("pickle", notes)
        return reduced
    return __reduce__


def _unpickle(original: Any, callbacks: Callbacks) -> Any:
    """A class method, or a static one in the first releases of Keras 3."""
    is_static, make = isinstance(original, staticmethod), original.__func__

    def _unpickle_model(*args: Any) -> Any:
        model, notes = make(*args), vars(args[-1]).get(_ATTRIBUTE)
        if notes is not None:
            _apply(_Notes(*notes), model)
        return model
    return (staticmethod if is_static else classmethod)(_unpickle_model)


def _carried(original: Function, callbacks: Callbacks) -> Function:
    """For a function or method that returns a copy of its first argument, a model."""

    def copied(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(model, *args, **kwargs)
        _apply(_noted(model), made)
        return made
    return copied


def _to_json(original: Function, callbacks: Callbacks) -> Function:
    def to_json(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes = _noted(self)
        if notes.names:
            _say("to_json", notes)
        return original(self, *args, **kwargs)
    return to_json


def _say(caller: str, notes: _Notes) -> None:
    warnings.warn(
        f"{caller} keeps no annotations: layers of the model are in TaskGraphs ({', '.join(notes.names[:3])}"
        f"{', ...' if notes.names[3:] else ''}), and a model made from its result is in none; copy it with copy.deepcopy or "
        "clone_model, or make the new model inside a wh.replicate or wh.split block", stacklevel=3)


_KERAS_3 = (
    ("keras.src.ops.operation:Operation", (("get_config", _get_config),)),
    ("keras.src.saving.keras_saveable:KerasSaveable", (("__reduce__", _reduce), ("_unpickle_model", _unpickle))),
    ("keras.src.models.model:Model", (("__reduce__", _reduce), ("_unpickle_model", _unpickle), ("to_json", _to_json))),
)
_KERAS_2 = (
    ("base_layer:Layer", (("get_config", _get_config),)),
    ("training:Model", (("__reduce__", _reduce), ("__deepcopy__", _carried), ("to_json", _to_json))),
)
