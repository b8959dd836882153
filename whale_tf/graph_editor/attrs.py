"""Conversion of Python values to ``AttrValue``, and the attributes that follow from a node's inputs.

::

    add("AddN", "total", ["a", "b"])    ->    node { op: "AddN" input: "a" input: "b"
                                                     attr N: 2, attr T: DT_FLOAT }      # both inferred from a and b
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import AttrValue, NodeDef, OpDef, tf, v1
from whale_tf.errors import GraphEditError, did_you_mean

TensorProto = type(v1.AttrValue().tensor)  # TensorFlow does not export it

# Attribute type of an OpDef -> the field of AttrValue (and of AttrValue.ListValue) for it.
_FIELD = {"type": "type", "shape": "shape", "int": "i", "float": "f", "bool": "b", "string": "s", "tensor": "tensor",
          "func": "func"}
_MESSAGES = frozenset(["shape", "tensor", "func"])  # fields that are protos themselves
_PYTHON = {"int": int, "float": float, "bool": bool}


def to_attr_value(value: Any, kind: Optional[str] = None) -> AttrValue:
    """``value`` as an AttrValue.

    Args:
      value: a DType or NumPy dtype, int, float, bool, str, bytes, TensorShape, NumPy array (for ``tensor``), function
        name (for ``func``), a list of these, or an AttrValue, which is returned unchanged.
      kind: the attribute's type as an OpDef spells it (``"int"``, ``"list(type)"``); None: guess it from the value.

    Raises:
      TypeError, ValueError: the value does not fit the kind.
    """
    if isinstance(value, v1.AttrValue):
        return value
    result = v1.AttrValue()
    _write(result, value, kind)
    return result


def _write(target: AttrValue, value: Any, kind: Optional[str]) -> None:
    """Gives an AttrValue another value."""
    if isinstance(value, v1.AttrValue):
        target.CopyFrom(value)
        return
    kind = kind or _guess_kind(value)
    if kind.startswith("list("):
        kind = kind[len("list("):-1]
        target.list.CopyFrom(v1.AttrValue.ListValue(**{_FIELD[kind]: [_scalar(each, kind) for each in value]}))
    elif kind in _MESSAGES:
        getattr(target, _FIELD[kind]).CopyFrom(_scalar(value, kind))
    else:
        setattr(target, _FIELD[kind], _scalar(value, kind))


def _scalar(value: Any, kind: str) -> Any:
    """``value`` as the Python object or proto that an AttrValue field of this kind takes."""
    if kind == "type":
        return tf.as_dtype(value).as_datatype_enum
    if kind == "shape":
        return tf.TensorShape(value).as_proto()
    if kind == "tensor":
        return value if isinstance(value, TensorProto) else v1.make_tensor_proto(value)
    if kind == "func":
        return v1.NameAttrList(name=value) if isinstance(value, str) else value
    if kind == "string":
        return value.encode() if isinstance(value, str) else bytes(value)
    return _PYTHON[kind](value)


def _guess_kind(value: Any) -> str:
    """The attribute type of a value that no OpDef describes (attributes whose name starts with ``_``)."""
    if isinstance(value, (list, tuple)):
        return "list({})".format(_guess_kind(value[0]) if value else "string")  # all empty lists are serialised in the same way
    for types, kind in (((bool, np.bool_), "bool"), ((int, np.integer), "int"), ((float, np.floating), "float"),
                        ((str, bytes), "string"), (tf.DType, "type"), (tf.TensorShape, "shape"),
                        ((np.ndarray, TensorProto), "tensor"), (v1.NameAttrList, "func"),
                        ((type, np.dtype), "type")):
        if isinstance(value, types):
            return kind
    raise TypeError(f"no attribute type fits {value!r} of type {type(value).__name__}")


class OpSignature:
    """What staging needs to know about an op type, read once from the OpDef.

    Args:
      op_def: the op's definition.
    """

    def __init__(self, op_def: OpDef) -> None:
        self.name = op_def.name
        self.kinds: Dict[str, str] = {attr.name: attr.type for attr in op_def.attr}
        self._defaults = {attr.name: attr.default_value for attr in op_def.attr}
        self._inputs = list(op_def.input_arg)
        self._outputs = list(op_def.output_arg)
        self._one_each = not any(arg.number_attr or arg.type_list_attr for arg in self._outputs)
        self._inferable = {name for arg in self._inputs for name in (arg.type_attr, arg.number_attr, arg.type_list_attr)
                           if name}
        self._fixed_arity = not any(arg.number_attr or arg.type_list_attr for arg in self._inputs)

    def set_attrs(self, node: NodeDef, attrs: Mapping[str, Any]) -> None:
        """Write Python values to ``node.attr``.

        Raises:
          GraphEditError: the op has no such attribute, or the value does not fit.
        """
        for name, value in attrs.items():
            kind = self.kinds.get(name)
            if kind is None and not name.startswith("_"):
                raise GraphEditError(f"op type {self.name} (node {node.name!r}) has no attribute {name!r}; it has "
                                     f"{sorted(self.kinds)}.{did_you_mean(name, self.kinds)}")
            try:
                _write(node.attr[name], value, kind)
            except (TypeError, ValueError) as error:
                raise GraphEditError("attribute {!r} of node {!r} ({}) should be of type {}, got {!r}: {}".format(
                    name, node.name, self.name, kind or "bool, int, float, str, DType, TensorShape or array", value,
                    error)) from error

    def infer_attrs(self, node: NodeDef, inputs: Sequence[str], dtype_of: Callable[[str], Any]) -> None:
        """Set the type and number attributes of ``node`` that are missing and follow from its data inputs.

        If an input's dtype is not known yet (``dtype_of`` returns None), its attribute stays unset.

        Raises:
          GraphEditError: the number of inputs does not fit the op type.
        """
        missing = {name for name in self._inferable if name not in node.attr}
        if not missing:
            if self._fixed_arity and len(inputs) != len(self._inputs):
                raise self._wrong_arity(node, len(self._inputs), len(inputs))
            return
        start = 0
        for arg, length in zip(self._inputs, self._argument_lengths(node, len(inputs))):
            edges = inputs[start:start + length]
            start += length
            if arg.number_attr in missing:
                node.attr[arg.number_attr].i = length
            if arg.type_attr in missing and edges:
                dtype = dtype_of(edges[0])
                if dtype is not None:
                    node.attr[arg.type_attr].type = dtype.base_dtype.as_datatype_enum
                    missing.discard(arg.type_attr)
            if arg.type_list_attr in missing:
                dtypes = [dtype_of(edge) for edge in edges]
                if None not in dtypes:
                    node.attr[arg.type_list_attr].list.type.extend([dtype.base_dtype.as_datatype_enum for dtype in dtypes])

    def _argument_lengths(self, node: NodeDef, n_inputs: int) -> List[int]:
        """The number of data inputs that each input argument takes; arguments of unknown length share the rest equally."""
        lengths: List[Optional[int]] = []
        for arg in self._inputs:
            if arg.number_attr:
                lengths.append(node.attr[arg.number_attr].i if arg.number_attr in node.attr else None)
            elif arg.type_list_attr:
                lengths.append(len(node.attr[arg.type_list_attr].list.type) if arg.type_list_attr in node.attr else None)
            else:
                lengths.append(1)
        rest = n_inputs - sum(length for length in lengths if length is not None)
        unknown = lengths.count(None)
        if rest < 0 or (rest > 0 and not unknown):
            raise self._wrong_arity(node, n_inputs - rest, n_inputs)
        if unknown > 1 and rest % unknown:
            raise GraphEditError(f"node {node.name!r}: give the attributes {sorted(self._inferable)} of {self.name}; "
                                 f"its {n_inputs} inputs can be divided in more than "
                                 "one way")
        return [rest // unknown if length is None else length for length in lengths]

    def _wrong_arity(self, node: NodeDef, expected: int, given: int) -> GraphEditError:
        return GraphEditError(f"node {node.name!r}: {self.name} takes {expected} inputs, got {given}")

    def output_dtypes(self, node: NodeDef) -> List[Any]:
        """The dtypes of a node's outputs (None if a type attribute is not set)."""
        dtypes: List[Any] = []
        for arg in self._outputs:
            if arg.type_list_attr:
                dtypes.extend(tf.as_dtype(each) for each in self._attr(node, arg.type_list_attr).list.type)
                continue
            enum = self._attr(node, arg.type_attr).type if arg.type_attr else arg.type
            dtypes.extend([tf.as_dtype(enum) if enum else None] * self._length(node, arg))
        return dtypes

    def output_count(self, node: NodeDef) -> int:
        """How many outputs a node has."""
        return len(self._outputs) if self._one_each else len(self.output_dtypes(node))

    def typed_by(self, node: NodeDef, attr: str) -> Tuple[List[int], List[int]]:
        """Positions of the inputs and outputs of a node whose type is its attribute ``attr``."""
        found = []
        for arguments in (self._inputs, self._outputs):
            positions: List[int] = []
            start = 0
            for arg in arguments:
                length = self._length(node, arg)
                if arg.type_attr == attr:
                    positions.extend(range(start, start + length))
                start += length
            found.append(positions)
        return found[0], found[1]

    def function_edge(self, node: NodeDef, index: int) -> str:
        """Output ``index`` of a node as an edge in a function: ``node:output_name:place``."""
        start = 0
        for arg in self._outputs:
            length = self._length(node, arg)
            if index < start + length:
                return f"{node.name}:{arg.name}:{index - start}"
            start += length
        raise GraphEditError(f"node {node.name!r} ({self.name}) has {start} outputs, so there is no output {index}")

    def _length(self, node: NodeDef, arg: Any) -> int:
        """The number of tensors that an argument stands for."""
        if arg.type_list_attr:
            return len(self._attr(node, arg.type_list_attr).list.type)
        return self._attr(node, arg.number_attr).i if arg.number_attr else 1

    def _attr(self, node: NodeDef, name: str) -> AttrValue:
        return node.attr[name] if name in node.attr else self._defaults[name]
