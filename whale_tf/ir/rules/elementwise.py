"""Elementwise ops: outputs have the (broadcast) shape of the operands.

Roles have a letter per operand (see :mod:`whale_tf.ir.rules.rule`).
"""
from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np

from whale_tf.ir.graph import Op, Shape
from whale_tf.ir.rules.rule import SAME, WHOLE, AnyDims, Dims, NoRule, Rule, View, axes

_FLOATS = ("float", "bfloat", "double", "half", "complex")
_CACHE: Dict[Tuple[str, int, Tuple[Shape, ...]], Rule] = {}


def elementwise_rule(roles: str, num_outputs: int, shapes: Tuple[Shape, ...]) -> Rule:
    """The rule of an op that broadcasts operands of the given shapes, as in NumPy."""
    key = (roles, num_outputs, shapes)
    rule = _CACHE.get(key)
    if rule is None:
        if len(_CACHE) > 10000:
            _CACHE.clear()
        rule = _CACHE[key] = _broadcast(roles, num_outputs, shapes)
    return rule


def _broadcast(roles: str, num_outputs: int, shapes: Tuple[Shape, ...]) -> Rule:
    if any(shape is None for shape in shapes):
        if all(shape is None or shape == () for shape in shapes):
            inputs: Tuple[AnyDims, ...] = tuple(SAME if shape is None else () for shape in shapes)
            return Rule(inputs, (SAME,) * num_outputs, roles)
        raise NoRule("operands of unknown rank may broadcast")
    rank = max(len(shape or ()) for shape in shapes)
    result: List[object] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape or (), rank - len(shape or ())):
            result[i] = size if result[i] == 1 or (result[i] is None and size not in (None, 1)) else result[i]
    full = axes(rank)
    aligned = tuple(_align(shape or (), result, full) for shape in shapes)
    return Rule(aligned, (full,) * num_outputs, roles)


def _align(shape: Tuple[object, ...], result: List[object], full: Dims) -> Dims:
    offset = len(result) - len(shape)
    if not offset and list(shape) == result:
        return full
    return tuple(() if size == 1 and result[i] != 1 else full[i] for i, size in enumerate(shape, offset))


def elementwise(op: Op, view: View, roles: str) -> Rule:
    """Ops with one role per operand."""
    return elementwise_rule(roles, len(op.outputs), tuple(map(view.shape, op.inputs)))


def strings(op: Op, view: View) -> Rule:
    """Any number of operands, each of one shape or a scalar."""
    return elementwise_rule("n" * len(op.inputs), 1, tuple(map(view.shape, op.inputs)))


def fields(op: Op, view: View) -> Rule:
    """Lines of text, and a default for each of their fields -> a result for each field."""
    dims = view.dims(op.inputs[0])
    return Rule((dims,) + (None,) * (len(op.inputs) - 1), (dims,) * len(op.outputs), "n" * len(op.inputs))


def decoded(op: Op, view: View) -> Rule:
    """The bytes of each string become numbers in a new last dimension."""
    dims = view.need_dims(op.inputs[0])
    return Rule((dims,) + (None,) * (len(op.inputs) - 1), (dims + (("number",),),), "n" * len(op.inputs), {"number": WHOLE})


def same_shape(op: Op, view: View) -> Rule:
    """AddN: operands do not broadcast, so one known shape is the shape of all."""
    shapes = [view.shape(t) for t in op.inputs]
    known = next((shape for shape in shapes if shape is not None), None)
    return elementwise_rule("a" * len(op.inputs), 1, (known,) * len(op.inputs))


def each(op: Op, view: View) -> Rule:
    """IdentityN: output ``i`` is a function of operand ``i`` alone."""
    dims = tuple(tuple((f"i{i}d{d}",) for d in range(view.need_rank(tensor))) for i, tensor in enumerate(op.inputs))
    return Rule(dims, dims, "a" * len(dims))


def cast(op: Op, view: View) -> Rule:
    """Casts are linear, except to booleans and from floats to integers."""
    before, after = (view.graph.tensors[t].dtype for t in (op.inputs[0], op.outputs[0]))
    linear = "bool" not in (before, after) and (after.startswith(_FLOATS) or not before.startswith(_FLOATS))
    return elementwise_rule("m" if linear else "n", 1, (view.shape(op.inputs[0]),))


def bitcast(op: Op, view: View) -> Rule:
    """Between types of the same size, elementwise; types of other sizes add or remove a last dimension."""
    before, after = (np.dtype(view.graph.tensors[t].dtype.replace("bfloat16", "float16")) for t in (op.inputs[0], op.outputs[0]))
    if before.itemsize == after.itemsize:
        return elementwise_rule("n", 1, (view.shape(op.inputs[0]),))
    dims = axes(view.need_rank(op.inputs[0]) + (before.itemsize > after.itemsize))
    pieces = (("pieces",),)
    if before.itemsize > after.itemsize:
        return Rule((dims[:-1],), ((*dims[:-1], *pieces),), "n")
    return Rule(((*dims[:-1], *pieces),), (dims[:-1],), "n")


def quotient(op: Op, view: View) -> Rule:
    """Division is linear in the numerator, except for integers."""
    floating = not view.graph.tensors[op.outputs[0]].dtype.startswith(("int", "uint"))
    return elementwise_rule("md" if floating else "nn", 1, tuple(map(view.shape, op.inputs)))


def select(op: Op, view: View) -> Rule:
    """Select: a vector condition picks rows of higher-rank branches."""
    shapes = [view.shape(t) for t in op.inputs]
    known = shapes[1] if shapes[1] is not None else shapes[2]
    condition = shapes[0]
    if known is not None and condition is not None and len(condition) == 1 and len(known) > 1:
        full = axes(len(known))
        return Rule((full[:1], full, full), (full,), "naa")
    return elementwise_rule("naa", 1, (condition if condition == () else known, known, known))


def per_row(op: Op, view: View) -> Rule:
    """Ops on (data, side operands): the first operand keeps its shape, the others are needed whole."""
    dims = view.dims(op.inputs[0])
    return Rule((dims,) + (None,) * (len(op.inputs) - 1), (dims,) * len(op.outputs), "m" + "n" * (len(op.inputs) - 1))


def bias_add(op: Op, view: View) -> Rule:
    """BiasAdd ``...c,c->...c`` (or ``nc...`` under NCHW)."""
    full = view.need_dims(op.inputs[0])
    channel = full[1 if op.attrs.get("data_format") == "NCHW" else -1]
    return Rule((full, (channel,)), (full,), "aa")
