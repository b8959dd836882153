"""Convolutions, pooling and image resizing: ``nhwi,hwio->nhwo``.  Shards of an image need halos from their neighbours."""
from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import HALO, SUM, WHOLE, AnyDims, Dims, Rule, ShapeOperand, View, attr, axes, named

_CHANNELS_FIRST = ("NCHW", "NCDHW", "NCW")


def image(op: Op, spatial: int, channel: str, prefix: str, nested: str = "") -> Dims:
    """An image's dimensions in the op's data format; ``prefix`` names its spatial factors."""
    pixels: Dims = tuple((f"{prefix}{d}",) for d in range(spatial))
    channels = (channel, nested) if nested else (channel,)
    first = attr(op, "data_format", "NHWC") in _CHANNELS_FIRST
    return (("n",), channels) + pixels if first else (("n",),) + pixels + (channels,)


def _kinds(spatial: int, *contracted: str, is_grouped: bool = False) -> Dict[str, str]:
    kinds = {f"{p}{d}": HALO for p in "xy" for d in range(spatial)}
    kinds.update({f"k{d}": WHOLE for d in range(spatial)})
    kinds.update(dict.fromkeys(contracted, SUM))
    return {**kinds, **dict.fromkeys(("xi", "i", "o"), WHOLE)} if is_grouped else kinds


def _kernel(spatial: int) -> Dims:
    return tuple((f"k{d}",) for d in range(spatial)) + (("i",), ("o",))


def _images(op: Op, spatial: int, depthwise: int, is_grouped: bool) -> Tuple[Dims, Dims]:
    """Dimensions of the convolution's operand and of its result."""
    y = image(op, spatial, "i", "y", "o") if depthwise else image(op, spatial, "o", "y")
    return image(op, spatial, "xi" if is_grouped else "i", "x"), y


def _is_grouped(op: Op, spatial: int, depthwise: int, x: Optional[Sequence[Any]], kernel: Optional[Sequence[Any]]) -> bool:
    """Whether each group of channels has kernels of its own.  A part of the channels would be divided into other groups.

    Args:
        x, kernel: sizes of the convolution's operands.
    """
    if depthwise or x is None or kernel is None:
        return False
    channels, inner = x[image(op, spatial, "i", "x").index(("i",))], kernel[-2]
    return isinstance(channels, int) and isinstance(inner, int) and channels != inner


def _asked(op: Op, view: View, position: int) -> Optional[Sequence[Any]]:
    """The sizes of a gradient, which an operand asks for."""
    value = view.value(op.inputs[position])
    return view.shape(op.outputs[0]) if value is None else list(value)


def convolution(op: Op, view: View, spatial: int, depthwise: int = 0) -> Rule:
    grouped = _is_grouped(op, spatial, depthwise, view.shape(op.inputs[0]), view.shape(op.inputs[1]))
    x, y = _images(op, spatial, depthwise, grouped)
    return Rule((x, _kernel(spatial)), (y,), "mm", _kinds(spatial, *([] if depthwise else ["i"]), is_grouped=grouped))


def input_gradient(op: Op, view: View, spatial: int, depthwise: int = 0) -> Rule:
    grouped = _is_grouped(op, spatial, depthwise, _asked(op, view, 0), view.shape(op.inputs[1]))
    x, y = _images(op, spatial, depthwise, grouped)
    return Rule((None, _kernel(spatial), y), (x,), "nmm", _kinds(spatial, "o", is_grouped=grouped), (ShapeOperand(0, x),))


def filter_gradient(op: Op, view: View, spatial: int, depthwise: int = 0) -> Rule:
    kernel = _kernel(spatial)
    grouped = _is_grouped(op, spatial, depthwise, view.shape(op.inputs[0]), _asked(op, view, 1))
    x, y = _images(op, spatial, depthwise, grouped)
    return Rule((x, None, y), (kernel,), "mnm", _kinds(spatial, "n", is_grouped=grouped), (ShapeOperand(1, kernel),))


def pooling(op: Op, view: View, role: str, spatial: int) -> Rule:
    """Pooling: examples and channels pass."""
    x, y = image(op, spatial, "c", "x"), image(op, spatial, "c", "y")
    return Rule((x,), (y,) * len(op.outputs), role, _kinds(spatial))


def pooling_gradient(op: Op, view: View, letters: str, result: str, roles: str) -> Rule:
    """``letters`` and ``result`` say which operands are shaped like the input (x) or like the output (y)."""
    spatial = view.need_rank(op.inputs[0]) - 2
    images = {p: image(op, spatial, "c", p) for p in "xy"}
    return Rule(tuple(images[p] for p in letters), (images[result],), roles, _kinds(spatial))


def average_gradient(op: Op, view: View, spatial: int) -> Rule:
    x, y = image(op, spatial, "c", "x"), image(op, spatial, "c", "y")
    return Rule((None, y), (x,), "nm", _kinds(spatial), (ShapeOperand(0, x),))


def resize(op: Op, view: View) -> Rule:
    x, y = image(op, 2, "c", "x"), image(op, 2, "c", "y")
    role = "n" if view.graph.tensors[op.inputs[0]].dtype != view.graph.tensors[op.outputs[0]].dtype else "m"
    return Rule((x, None), (y,), role + "n", _kinds(2))


def resize_gradient(op: Op, view: View) -> Rule:
    x, y = image(op, 2, "c", "x"), image(op, 2, "c", "y")
    second = None if op.type == "ResizeNearestNeighborGrad" else x
    return Rule((y, second), (x,), "mn", _kinds(2))


def projective(op: Op, view: View) -> Rule:
    """One projective transformation for each image, or one for all; linear unless pixels from outside have a value."""
    x, y = image(op, 2, "c", "x"), image(op, 2, "c", "y")
    fill = [view.graph.producer(t).value for t in op.inputs[3:]]
    role = "m" if all(value is not None and not np.any(value) for value in fill) else "n"
    rows: Tuple[str, ...] = () if view.need_shape(op.inputs[1])[0] == 1 else ("n",)
    operands = (x, (rows, ("t",)), None, ())[:len(op.inputs)]
    return Rule(operands, (y,), role + "n" * (len(operands) - 1), dict.fromkeys(("x0", "x1", "y0", "y1", "t"), WHOLE))


def crops(op: Op, view: View, letters: str, result: str, roles: str) -> Rule:
    """Crops ``n`` of images ``b``, which are picked by an index; linear unless pixels from outside have a value.

    Args:
        letters: the operands: images (x), their shape (s), crops (y), boxes (b), indices (i), or the crops' size (z).
        result: the letter of the result.
    """
    dims: Dict[str, AnyDims] = {"x": named("bhwc"), "y": named("nuvc"), "b": named("nf"), "i": named("n"), "s": None, "z": None}
    if attr(op, "extrapolation_value", 0.0):
        roles = roles.replace("m", "n")
    shapes = tuple(ShapeOperand(i, named("bhwc")) for i, letter in enumerate(letters) if letter == "s")
    kinds = {**dict.fromkeys("bhwuvf", WHOLE), **({"n": SUM} if result == "x" else {"c": SUM} if result == "b" else {})}
    return Rule(tuple(dims[letter] for letter in letters), (dims[result],), roles, kinds, shapes)


def local_response(op: Op, view: View) -> Rule:
    full = axes(4)
    return Rule((full,) * len(op.inputs), (full,), "n" if len(op.inputs) == 1 else "mnn", {"d3": WHOLE})


def patches(op: Op, view: View) -> Rule:
    x = image(op, 2, "c", "x")
    y = image(op, 2, "o", "y")
    return Rule((x,), (y,), "m", {**_kinds(2), "c": WHOLE, "o": WHOLE})
