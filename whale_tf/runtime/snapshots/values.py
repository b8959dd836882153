"""Python values as JSON, exactly, with arrays aside.  Only data: what is read back cannot run anything."""
from __future__ import annotations

import json
from typing import Any, Container, Dict, List

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
    if are_numbers or isinstance(value, tf.Tensor) and hasattr(value, "numpy"):  # variables and ragged tensors are none
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


def attributes(thing: Any, arrays: Dict[str, Any], name: str, known: Container[int] = ()) -> Dict[str, Any]:
    """The attributes of an object that are data, or variables, by name, as JSON.

    Args:
        known: ``id`` of TensorFlow's variables whose values are kept elsewhere.
    """
    found = {}
    for attribute, value in vars(thing).items():
        if attribute == "params":  # what ``fit`` was called with
            continue
        kept: Dict[str, Any] = {}
        try:
            variables = _variables(value)
            if variables:  # the object keeps them, and they get their values
                found[attribute] = {"variables": [
                    None if id(one) in known else to_json(tf.convert_to_tensor(one), kept, f"{name}/{attribute}/{number}")
                    for number, one in enumerate(variables)]}
            else:
                found[attribute] = to_json(value, kept, f"{name}/{attribute}")
        except NotData:
            continue
        arrays.update(kept)
    return found


def put_back(thing: Any, attribute: str, told: Any, arrays: Dict[str, np.ndarray]) -> None:
    """Gives an object the attribute that :func:`attributes` has told."""
    if not isinstance(told, dict) or "variables" not in told:
        setattr(thing, attribute, from_json(told, arrays))
        return
    for variable, value in zip(_variables(getattr(thing, attribute, None)), told["variables"]):
        if value is not None:
            variable.assign(from_json(value, arrays))


def _variables(value: Any) -> List[Any]:
    """TensorFlow's variables, if a value is a variable, or a list or tuple of nothing else."""
    found = [getattr(one, "_value", one) for one in (value if type(value) in (list, tuple) else [value])]  # Keras 3 wraps them
    return found if all(isinstance(one, tf.Variable) for one in found) else []


def changed(before: Dict[str, Any], now: Dict[str, Any]) -> Dict[str, Any]:
    """The attributes that have other values than ``before``, or hold arrays; those that are no data any more are ``GONE``."""
    found = {name: value for name, value in now.items()
             if name not in before or before[name] != value or "\"array\"" in json.dumps(value)}
    return dict(found, **{name: GONE for name in before if name not in now})
