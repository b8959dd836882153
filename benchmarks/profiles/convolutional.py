"""Layer tables of convolutional models: float32, images with 3 channels, per sample.

Each builder walks the network once with the size of the feature map; one layer passes a ``Map`` to the next.
"""
from __future__ import annotations

from dataclasses import replace
from typing import List, NamedTuple, Tuple

from whale_tf.profiler.model_profile import LayerProfile

FLOAT = 4

# Winograd's F(2x2, 3x3) needs 2.25 times fewer multiplications (Lavin and Gray 2015); at 62% of the peak rate, that is 1.4
# times the peak in multiply-adds.  It is used for 3x3 convolutions of stride 1 with enough channels.
WINOGRAD_UTILIZATION = 1.4
CONV_UTILIZATION = 0.8
FIRST_CONV_UTILIZATION = 0.4  # 3 input channels
# One image at a time leaves most of a large GPU idle on the small maps of a cell.
CELL_UTILIZATION = 0.45


class Map(NamedTuple):
    """A feature map: pixels on a side, channels."""

    side: int
    channels: int

    @property
    def elements(self) -> int:
        return self.side * self.side * self.channels

    @property
    def size_bytes(self) -> int:
        return FLOAT * self.elements


class Cost(NamedTuple):
    """The cost that a part of a layer adds to it."""

    flops: float = 0.0
    parameters: int = 0
    traffic: int = 0
    kept: int = 0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.flops + other.flops, self.parameters + other.parameters, self.traffic + other.traffic,
                    self.kept + other.kept)


def conv(source: Map, channels: int, kernel: int, stride: int = 1) -> Tuple[Map, Cost]:
    """A square convolution without bias."""
    out = Map(source.side // stride, channels)
    weights = source.channels * channels * kernel * kernel
    return out, Cost(2.0 * weights * out.side * out.side, weights, 0, out.size_bytes)


def normalised(cost: Cost, out: Map) -> Cost:
    """Add batch normalisation and ReLU: statistics, normalisation, activation (two reads each way), and the tensors they keep."""
    return cost + Cost(0.0, 2 * out.channels, 6 * out.size_bytes, out.size_bytes)


def layer(name: str, cost: Cost, output_bytes: int, utilization: float) -> LayerProfile:
    return LayerProfile(name=name, forward_flops=cost.flops, traffic_bytes=cost.traffic, utilization=utilization,
                        parameter_bytes=FLOAT * cost.parameters, output_bytes=output_bytes, activation_bytes=cost.kept)


def dense(name: str, inputs: int, outputs: int) -> LayerProfile:
    """A fully connected layer with bias and ReLU."""
    return LayerProfile(name=name, forward_flops=2.0 * inputs * outputs, utilization=0.75,
                        parameter_bytes=FLOAT * (inputs + 1) * outputs, output_bytes=FLOAT * outputs,
                        activation_bytes=2 * FLOAT * outputs, tensor_parallel_bytes=FLOAT * outputs)


def vgg19(classes: int) -> List[LayerProfile]:
    """VGG-19 (Simonyan and Zisserman 2014, configuration E), 224 x 224; 26 layers with input and loss, as DAPPLE counts them."""
    here = Map(224, 3)
    layers = [LayerProfile(name="input", output_bytes=here.size_bytes)]
    for block, (count, channels) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), 1):
        for index in range(1, count + 1):
            first = here.channels == 3
            here, cost = conv(here, channels, 3)
            cost += Cost(0.0, channels, 4 * here.size_bytes, here.size_bytes)  # bias and ReLU
            layers.append(layer(f"conv{block}_{index}", cost, here.size_bytes,
                                FIRST_CONV_UTILIZATION if first else WINOGRAD_UTILIZATION))
        full, here = here, Map(here.side // 2, here.channels)
        pool = Cost(0.0, 0, full.size_bytes + here.size_bytes, here.size_bytes)
        layers.append(layer(f"pool{block}", pool, here.size_bytes, 1.0))
    layers += [dense("fc1", here.elements, 4096), dense("fc2", 4096, 4096), dense("prediction", 4096, classes)]
    return layers + [LayerProfile(name="loss", traffic_bytes=4 * FLOAT * classes, output_bytes=FLOAT)]


def residual(name: str, blocks: Tuple[int, ...], channels: int, width: int, classes: int) -> List[LayerProfile]:
    """ResNet of bottleneck blocks (He et al. 2015), with the stride in the 3x3 convolution.  Blocks are ``width`` times as wide
    inside, in ``width`` groups (the interpretation of a "width factor" that comes closest to Rhino's Table 4)."""
    here, cost = conv(Map(224, 3), channels, 7, 2)
    cost = normalised(cost, here)
    here = Map(56, channels)
    layers = [layer("stem", cost + Cost(0.0, 0, 5 * here.size_bytes, here.size_bytes), here.size_bytes,
                    FIRST_CONV_UTILIZATION)]
    for stage, count in enumerate(blocks):
        inner = channels * 2 ** stage
        for index in range(count):
            here, cost = _bottleneck(here, inner, width, 2 if stage and not index else 1)
            layers.append(layer(f"block{stage + 1}_{index + 1}", cost, here.size_bytes, CONV_UTILIZATION))
    classifier = dense("classifier", here.channels, classes)
    return layers + [replace(classifier, traffic_bytes=float(here.size_bytes))]


def _bottleneck(source: Map, inner: int, width: int, stride: int) -> Tuple[Map, Cost]:
    one, first = conv(source, inner * width, 1)
    two, second = conv(one, inner * width, 3, stride)
    second = second._replace(flops=second.flops / width, parameters=second.parameters // width)
    out, third = conv(two, 4 * inner, 1)
    cost = normalised(first, one) + normalised(second, two) + normalised(third, out)
    cost += Cost(0.0, 0, 2 * out.size_bytes, 0)  # the residual addition
    if source != out:
        short, extra = conv(source, 4 * inner, 1, stride)
        cost += extra + Cost(0.0, 2 * short.channels, 5 * short.size_bytes, short.size_bytes)
    return out, cost


def unet(channels: int) -> List[LayerProfile]:
    """U-Net (Ronneberger et al. 2015), 256 x 256, 5 levels; tensors that skip over a cut count towards its output."""
    here, layers = Map(256, 3), []  # type: ignore[var-annotated]
    skips: List[Map] = []
    for level in range(5):
        if level:
            skips.append(here)
            here = Map(here.side // 2, here.channels)
        here, cost = _double(here, channels * 2 ** level)
        layers.append(layer(f"down{level + 1}", cost, here.size_bytes + sum(s.size_bytes for s in skips),
                            WINOGRAD_UTILIZATION))
    for level in reversed(range(4)):
        skip = skips.pop()
        up = Map(skip.side, skip.channels)
        cost = Cost(2.0 * 4 * here.channels * up.channels * here.side ** 2, 4 * here.channels * up.channels, 0, up.size_bytes)
        here, more = _double(Map(up.side, 2 * up.channels), channels * 2 ** level)
        layers.append(layer(f"up{level + 1}", cost + more, here.size_bytes + sum(s.size_bytes for s in skips),
                            WINOGRAD_UTILIZATION))
    out, cost = conv(here, 2, 1)
    return layers + [layer("output", cost, out.size_bytes, CONV_UTILIZATION)]


def _double(source: Map, channels: int) -> Tuple[Map, Cost]:
    one, first = conv(source, channels, 3)
    two, second = conv(one, channels, 3)
    return two, normalised(first, one) + normalised(second, two)


def amoebanet(cells: int, channels: int) -> List[LayerProfile]:
    """AmoebaNet-D (Real et al. 2018, Fig. 7; scaled as in GPipe section 3), 224 x 224: stem, two reduction cells, then
    three groups of ``cells / 3`` normal cells with a reduction cell between groups.  A cell reads the outputs of the two
    cells before it, so both are sent over every cut."""
    before, cost = conv(Map(224, 3), 32, 3, 2)
    layers = [LayerProfile(name="input", output_bytes=Map(224, 3).size_bytes),
              layer("stem", normalised(cost, before), before.size_bytes, FIRST_CONV_UTILIZATION)]
    here = before

    def add(name: str, width: int, reduction: bool) -> None:
        nonlocal before, here
        out, cost = _cell(before, here, width, reduction)
        before, here = here, out
        layers.append(layer(name, cost, before.size_bytes + here.size_bytes, CELL_UTILIZATION))

    add("stem_cell_0", channels // 4, True)
    add("stem_cell_1", channels // 2, True)
    for group in range(3):
        if group:
            add(f"reduction_cell_{group - 1}", channels * 2 ** group, True)
        for index in range(cells // 3):
            add(f"cell_{group * cells // 3 + index}", channels * 2 ** group, False)
    layers.append(replace(dense("classifier", here.channels, 1000), traffic_bytes=float(here.size_bytes)))
    return layers + [LayerProfile(name="loss", output_bytes=FLOAT)]


def _cell(before: Map, here: Map, width: int, reduction: bool) -> Tuple[Map, Cost]:
    """Both inputs are projected to ``width`` channels; then come the genotype's convolutions and poolings."""
    side = here.side
    cost = Cost()
    for source in (before, here):
        projected, part = conv(Map(side, source.channels), width, 1)
        cost += normalised(part, projected)
    stride = 2 if reduction else 1
    inner = Map(side, width)
    parts = ([_squeezed(inner, stride, (9,)), _squeezed(Map(side // stride, width), 1, (7, 7)),
              _plain(Map(side // stride, width))]
             if reduction else [_plain(inner)] * 3 + [_squeezed(inner, 1, (7, 7))] * 2)
    for part in parts:
        cost += part
    out = Map(side // stride, width)
    cost += Cost(0.0, 0, 24 * out.size_bytes, 6 * out.size_bytes)  # five poolings or identities, five additions, concat
    return Map(out.side, (3 if reduction else 4) * width), cost


def _plain(inner: Map) -> Cost:
    out, cost = conv(inner, inner.channels, 1)
    return normalised(cost, out)


def _squeezed(inner: Map, stride: int, kernels: Tuple[int, ...]) -> Cost:
    """1x1 to a quarter of the channels, spatial kernels with these numbers of elements (7: 1x7 or 7x1; 9: 3x3), 1x1 back."""
    narrow = inner.channels // 4
    middle, first = conv(inner, narrow, 1)
    cost = normalised(first, middle)
    out = Map(inner.side // stride, narrow)
    for elements in kernels:
        weights = narrow * narrow * elements
        cost += normalised(Cost(2.0 * weights * out.side ** 2, weights, 0, out.size_bytes), out)
    wide, last = conv(out, inner.channels, 1)
    return cost + normalised(last, wide)
