"""Convolutions, pooling and image resizing: ``nhwi,hwio->nhwo``; images need their neighbours' rims."""
from __future__ import annotations

from typing import Dict, List

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import HALO, SUM, WHOLE, Builder, Dims, Rule, ShapeOperand, View, attr, axes

_CHANNELS_FIRST = ("NCHW", "NCDHW", "NCW")


def image(op: Op, spatial: int, channel: str, prefix: str, nested: str = "") -> Dims:
    """An image's dimensions in the op's data format; ``prefix`` names its spatial factors."""
    pixels: Dims = tuple((f"{prefix}{d}",) for d in range(spatial))
    channels = (channel, nested) if nested else (channel,)
    first = attr(op, "data_format", "NHWC") in _CHANNELS_FIRST
    return (("n",), channels) + pixels if first else (("n",),) + pixels + (channels,)


def _kinds(spatial: int, *contracted: str) -> Dict[str, str]:
    kinds = {f"{p}{d}": HALO for p in "xy" for d in range(spatial)}
    kinds.update({f"k{d}": WHOLE for d in range(spatial)})
    kinds.update(dict.fromkeys(contracted, SUM))
    return kinds


def convolution(spatial: int, depthwise: bool = False) -> Dict[str, Builder]:
    """Builders of forward, input gradient and filter gradient."""
    kernel: Dims = tuple((f"k{d}",) for d in range(spatial)) + (("i",), ("o",))

    def dims(op: Op) -> List[Dims]:
        return [image(op, spatial, "i", "x"), image(op, spatial, "i", "y", "o") if depthwise else image(op, spatial, "o", "y")]

    def forward(op: Op, view: View) -> Rule:
        x, y = dims(op)
        return Rule((x, kernel), (y,), "mm", _kinds(spatial, *([] if depthwise else ["i"])))

    def input_gradient(op: Op, view: View) -> Rule:
        x, y = dims(op)
        return Rule((None, kernel, y), (x,), "nmm", _kinds(spatial, "o"), (ShapeOperand(0, x),))

    def filter_gradient(op: Op, view: View) -> Rule:
        x, y = dims(op)
        return Rule((x, None, y), (kernel,), "mnm", _kinds(spatial, "n"), (ShapeOperand(1, kernel),))
    return {"": forward, "BackpropInput": input_gradient, "BackpropFilter": filter_gradient}


def pooling(role: str, spatial: int) -> Builder:
    """Pooling: examples and channels pass."""
    def build(op: Op, view: View) -> Rule:
        x, y = image(op, spatial, "c", "x"), image(op, spatial, "c", "y")
        return Rule((x,), (y,) * len(op.outputs), role, _kinds(spatial))
    return build


def pooling_gradient(letters: str, result: str, roles: str) -> Builder:
    """``letters`` and ``result`` say which operands have the input's (x) or the output's (y) image."""
    def build(op: Op, view: View) -> Rule:
        spatial = view.need_rank(op.inputs[0]) - 2
        images = {p: image(op, spatial, "c", p) for p in "xy"}
        return Rule(tuple(images[p] for p in letters), (images[result],), roles, _kinds(spatial))
    return build


def average_gradient(spatial: int) -> Builder:
    def build(op: Op, view: View) -> Rule:
        x, y = image(op, spatial, "c", "x"), image(op, spatial, "c", "y")
        return Rule((None, y), (x,), "nm", _kinds(spatial), (ShapeOperand(0, x),))
    return build


def resize(op: Op, view: View) -> Rule:
    x, y = image(op, 2, "c", "x"), image(op, 2, "c", "y")
    role = "n" if view.graph.tensors[op.inputs[0]].dtype != view.graph.tensors[op.outputs[0]].dtype else "m"
    return Rule((x, None), (y,), role + "n", _kinds(2))


def resize_gradient(op: Op, view: View) -> Rule:
    x, y = image(op, 2, "c", "x"), image(op, 2, "c", "y")
    second = None if op.type == "ResizeNearestNeighborGrad" else x
    return Rule((y, second), (x,), "mn", _kinds(2))


def local_response(op: Op, view: View) -> Rule:
    full = axes(4)
    return Rule((full,) * len(op.inputs), (full,), "n" if len(op.inputs) == 1 else "mnn", {"d3": WHOLE})


def patches(op: Op, view: View) -> Rule:
    x = image(op, 2, "c", "x")
    y = image(op, 2, "o", "y")
    return Rule((x,), (y,), "m", {**_kinds(2), "c": WHOLE, "o": WHOLE})


RULES: Dict[str, Builder] = {
    "AvgPool": pooling("m", 2), "AvgPool3D": pooling("m", 3), "MaxPool": pooling("n", 2), "MaxPool3D": pooling("n", 3),
    "MaxPoolGrad": pooling_gradient("xyy", "x", "nnm"), "MaxPool3DGrad": pooling_gradient("xyy", "x", "nnm"),
    "MaxPoolGradGrad": pooling_gradient("xyx", "y", "nnm"), "AvgPoolGrad": average_gradient(2),
    "AvgPool3DGrad": average_gradient(3), "LRN": local_response, "LRNGrad": local_response,
    "ResizeBilinear": resize, "ResizeNearestNeighbor": resize, "ResizeBicubic": resize,
    "ResizeBilinearGrad": resize_gradient, "ResizeNearestNeighborGrad": resize_gradient,
    "ResizeBicubicGrad": resize_gradient, "ExtractImagePatches": patches,
}
for _suffix, _builder in convolution(2).items():
    RULES["Conv2D" + _suffix] = _builder
for _suffix, _builder in convolution(3).items():
    RULES["Conv3D" + _suffix + ("V2" if _suffix else "")] = _builder
for _suffix, _builder in convolution(2, depthwise=True).items():
    RULES["DepthwiseConv2dNative" + _suffix] = _builder
