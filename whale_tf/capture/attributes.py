"""Attribute values (``AttrValue``) as plain Python values: types as names, shapes as tuples, functions as their names."""
from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np

from whale_tf._tf_compat import AttrValue, tf
from whale_tf.ir.graph import Shape

MAX_CONST_ELEMENTS = 4096


class Attributes:
    """Converts the attributes of many nodes; equal lists, shapes and tensors are converted once."""

    def __init__(self) -> None:
        self._known: Dict[bytes, Any] = {}

    def value(self, value: AttrValue) -> Any:
        """The value of one attribute; None for tensors of more than 4096 elements."""
        number = value.type
        if number:  # most attributes are types
            return DTYPE_NAMES[number]
        kind = value.WhichOneof("value")
        return _SCALARS[kind](value) if kind in _SCALARS else self._compound(kind, value)

    def _compound(self, kind: str, value: AttrValue) -> Any:
        if kind == "tensor" and _elements(value.tensor.tensor_shape) > MAX_CONST_ELEMENTS:
            return None
        key = value.SerializeToString()
        if key not in self._known:
            self._known[key] = _compound(kind, value)
        return self._known[key]


def proto_shape(shape: Any) -> Shape:
    """A TensorShapeProto as a tuple."""
    if shape.unknown_rank:
        return None
    return tuple([None if dim.size < 0 else dim.size for dim in shape.dim])


class _DtypeNames(Dict[int, str]):
    """DataType number -> name, filled as needed; 0 (DT_INVALID) is ``invalid``."""

    def __missing__(self, number: int) -> str:
        self[number] = tf.as_dtype(number).name if number else "invalid"
        return self[number]


DTYPE_NAMES: _DtypeNames = _DtypeNames()


def _text(value: bytes) -> Any:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


_SCALARS: Dict[Optional[str], Callable[[Any], Any]] = {
    "type": lambda value: DTYPE_NAMES[value.type],
    "b": lambda value: value.b,
    "i": lambda value: value.i,
    "f": lambda value: value.f,
    "s": lambda value: _text(value.s),
    "func": lambda value: value.func.name,
    "placeholder": lambda value: value.placeholder,
    None: lambda value: None,
}


def _compound(kind: str, value: Any) -> Any:
    if kind == "shape":
        return proto_shape(value.shape)
    if kind == "tensor":
        return _array(value.tensor)
    items = value.list
    for field, convert in _LISTS:
        content = getattr(items, field)
        if content:
            return tuple([convert(item) for item in content])
    return ()


_LISTS: Tuple[Tuple[str, Callable[[Any], Any]], ...] = (
    ("i", int), ("type", lambda item: DTYPE_NAMES[item]), ("s", _text), ("shape", lambda item: proto_shape(item)),
    ("b", bool), ("f", float), ("func", lambda item: item.name), ("tensor", lambda item: _array(item)))


def _elements(shape: Any) -> int:
    count = 1
    for dim in shape.dim:
        count *= dim.size
    return count


def _array(tensor: Any) -> Optional[np.ndarray]:
    """A TensorProto's value, read-only; None above 4096 elements or for a dtype without arrays."""
    if _elements(tensor.tensor_shape) > MAX_CONST_ELEMENTS or not _has_array(tensor.dtype):
        return None
    array = tf.make_ndarray(tensor)
    array.setflags(write=False)
    return array


def _has_array(number: int) -> bool:
    return DTYPE_NAMES[number] not in ("invalid", "resource", "variant")
