"""Python values as JSON, exactly, with arrays aside.  Only data: what is read back cannot run anything."""
from __future__ import annotations

import json
from typing import Any, Dict

import numpy as np

from whale_tf._tf_compat import tf

GONE = {"gone": True}


class NotData(Exception):
    """A value that is no data: a function, an open file, an object of a class."""


def to_json(value: Any, arrays: Dict[str, Any], name: str) -> Any:
    """A value as JSON.

    Args:
        value: None, a number, text, an array of numbers, a tensor, or lists, tuples and dicts of these.
        arrays: gets the arrays, by names that begin with ``name``.

    Raises:
        NotData
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"numpy": value.dtype.name, "value": value.item()}
    are_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype != np.longdouble
    if are_numbers or tf.is_tensor(value) and hasattr(value, "numpy"):
        arrays[name] = value
        return {"array": name, "is_tensor": not isinstance(value, np.ndarray)}
    if type(value) in (list, tuple):
        told = [to_json(each, arrays, f"{name}/{number}") for number, each in enumerate(value)]
        return told if type(value) is list else {"tuple": told}
    if type(value) is dict:
        return {"dict": [[to_json(key, arrays, f"{name}/key{number}"), to_json(each, arrays, f"{name}/{number}")]
                         for number, (key, each) in enumerate(value.items())]}
    raise NotData


def from_json(told: Any, arrays: Dict[str, np.ndarray]) -> Any:
    """The value that :func:`to_json` has told."""
    if isinstance(told, list):
        return [from_json(each, arrays) for each in told]
    if not isinstance(told, dict):
        return told
    if "numpy" in told:
        return np.dtype(told["numpy"]).type(told["value"])
    if "array" in told:
        value = arrays[told["array"]]
        return tf.constant(value) if told["is_tensor"] else np.asarray(value)  # of no dimensions, it is read as a number
    if "tuple" in told:
        return tuple(from_json(told["tuple"], arrays))
    return {from_json(key, arrays): from_json(each, arrays) for key, each in told["dict"]}


def attributes(thing: Any, arrays: Dict[str, Any], name: str) -> Dict[str, Any]:
    """The attributes of an object that are data, by name, as JSON."""
    found = {}
    for attribute, value in vars(thing).items():
        if attribute == "params":  # what ``fit`` was called with
            continue
        kept: Dict[str, Any] = {}
        try:
            found[attribute] = to_json(value, kept, f"{name}/{attribute}")
        except NotData:
            continue
        arrays.update(kept)
    return found


def changed(before: Dict[str, Any], now: Dict[str, Any]) -> Dict[str, Any]:
    """The attributes that have other values than ``before``, or hold arrays; those that are no data any more are ``GONE``."""
    found = {name: value for name, value in now.items()
             if name not in before or before[name] != value or "\"array\"" in json.dumps(value)}
    return dict(found, **{name: GONE for name in before if name not in now})
