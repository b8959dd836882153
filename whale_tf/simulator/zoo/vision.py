"""Convolutional nets as layer tables: VGG19, ResNet-50, Inception-V3, and ResNet-50 with a very wide classifier."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence, Tuple, Union

from whale_tf.simulator.model_graph import Builder, ModelGraph

Pair = Tuple[int, int]


def _pair(value: Union[int, Pair]) -> Pair:
    return (value, value) if isinstance(value, int) else value


def image(b: Builder, size: int) -> int:
    return b.input("image", "b y x c", (b.batch, size, size, 3))


def convolution(b: Builder, name: str, x: int, channels: int, kernel: Union[int, Pair], stride: int = 1,
                 same: bool = True) -> int:
    """A convolution, whose channels may be partitioned, but not its image axes (halos)."""
    rows, columns = _pair(kernel)
    batch, height, width, depth = (int(extent) for extent in b.tensors[x].shape)
    out_y = -(-height // stride) if same else (height - rows) // stride + 1
    out_x = -(-width // stride) if same else (width - columns) // stride + 1
    weight = b.parameter(name + "_w", "i j c o", (rows, columns, depth, channels))
    flops = 2.0 * batch * out_y * out_x * channels * rows * columns * depth
    return b.op(
        name, "convolution", "b y x c, i j c o -> b p q o", (x, weight), flops, whole=("y", "x", "i", "j", "p", "q"), split="o",
        sizes={"p": out_y, "q": out_x, "o": channels})


def batch_norm(b: Builder, name: str, x: int) -> int:
    channels = b.tensors[x].shape[-1]
    gamma = b.parameter(name + "_gamma", "c", (channels,))
    beta = b.parameter(name + "_beta", "c", (channels,))
    dims = " ".join(b.tensors[x].dims)
    last = b.tensors[x].dims[-1]
    return b.op(name, "norm", f"{dims}, {last}, {last} -> {dims}", (x, gamma, beta), 8.0 * b.tensors[x].size)


def unit(b: Builder, name: str, x: int, channels: int, kernel: Union[int, Pair], stride: int = 1, same: bool = True,
          relu: bool = True) -> int:
    """Convolution, batch norm, ReLU."""
    y = batch_norm(b, name + "_bn", convolution(b, name, x, channels, kernel, stride, same))
    return b.pointwise(name + "_relu", "relu", y) if relu else y


def pool(b: Builder, name: str, x: int, kernel: int, stride: int, same: bool = True) -> int:
    height, width = (int(extent) for extent in b.tensors[x].shape[1:3])
    out_y = -(-height // stride) if same else (height - kernel) // stride + 1
    out_x = -(-width // stride) if same else (width - kernel) // stride + 1
    size = b.tensors[x].shape[0] * out_y * out_x * b.tensors[x].shape[3]
    return b.op(
        name, "pool", "b y x c -> b p q c", (x,), float(size * kernel * kernel), whole=("y", "x", "p", "q"),
        sizes={"p": out_y, "q": out_x})


def global_pool(b: Builder, x: int) -> int:
    return b.op("global_pool", "pool", "b y x c -> b c", (x,), float(b.tensors[x].size), whole=("y", "x"))


def dense(b: Builder, name: str, x: int, units: int, split: str = "o") -> int:
    features = b.tensors[x].shape[-1]
    weight = b.parameter(name + "_w", "f o", (features, units))
    y = b.op(name, "matmul", "b f, f o -> b o", (x, weight), split=split)
    return b.bias(name + "_bias", y)


def class_loss(b: Builder, x: int) -> None:
    """Softmax cross-entropy over one example's logits."""
    dims = " ".join(b.tensors[x].dims)
    b.op("loss", "loss", f"{dims} -> b", (x,), 6.0 * b.tensors[x].size)


def vgg19(batch: int, size: int = 224, classes: int = 1000) -> ModelGraph:
    """VGG19 (144M parameters): sixteen convolutions, three wide dense layers."""
    b = Builder("vgg-19", batch, optimizer="momentum")
    x = image(b, size)
    for block, (count, channels) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), 1):
        for layer in range(1, count + 1):
            with b.scope(f"conv{block}_{layer}"):
                x = b.bias("bias", convolution(b, "conv", x, channels, 3))
                x = b.pointwise("relu", "relu", x)
        with b.scope(f"pool{block}"):
            x = pool(b, "pool", x, 2, 2)
    with b.scope("fc1"):
        _, height, width, depth = b.tensors[x].shape
        weight = b.parameter("fc1_w", "y x c o", (height, width, depth, 4096))
        x = b.bias("fc1_bias", b.op("fc1", "matmul", "b y x c, y x c o -> b o", (x, weight), split="o"))
        x = b.pointwise("fc1_dropout", "dropout", b.pointwise("fc1_relu", "relu", x), mask=True)
    with b.scope("fc2"):
        x = dense(b, "fc2", x, 4096, split="f")
        x = b.pointwise("fc2_dropout", "dropout", b.pointwise("fc2_relu", "relu", x), mask=True)
    with b.scope("prediction"):
        class_loss(b, dense(b, "fc3", x, classes))
    return b.graph()


def resnet50(batch: int, size: int = 224, classes: int = 1000, name: str = "resnet-50") -> ModelGraph:
    """ResNet-50 (25.6M parameters with 1,000 classes)."""
    return residual(Builder(name, batch, optimizer="momentum"), (3, 4, 6, 3), _bottleneck, size, classes)


def residual(b: Builder, counts: Sequence[int], block: Callable[[Builder, int, int, int, bool], int], size: int = 224,
             classes: int = 1000) -> ModelGraph:
    """A network of four stages of blocks (He et al. 2016, Table 1).

    Args:
        counts: blocks of each stage.
        block: of (graph, operand, channels, stride, whether its shortcut is projected) -> its result.
    """
    x = image(b, size)
    with b.scope("stem"):
        x = pool(b, "pool", unit(b, "conv", x, 64, 7, 2), 3, 2)
    for stage, count in enumerate(counts):
        for number in range(count):
            with b.scope(f"stage{stage}_block{number}"):
                x = block(b, x, 64 << stage, 2 if stage and not number else 1, not number)
    with b.scope("classifier"):
        class_loss(b, dense(b, "fc", global_pool(b, x), classes))
    return b.graph()


def _bottleneck(b: Builder, x: int, channels: int, stride: int, project: bool) -> int:
    shortcut = unit(b, "shortcut", x, 4 * channels, 1, stride, relu=False) if project else x
    y = unit(b, "conv1", x, channels, 1)
    y = unit(b, "conv2", y, channels, 3, stride)
    y = unit(b, "conv3", y, 4 * channels, 1, relu=False)
    return b.pointwise("relu", "relu", b.add("residual", y, shortcut))


Unit = Tuple[int, Union[int, Pair], int, bool]  # channels, kernel, stride, same


class Tower(NamedTuple):
    """Units one after another; the units of ``fork`` all follow the last one, in parallel, and end the tower."""

    units: Sequence[Unit]
    fork: Sequence[Unit] = ()


def _towers(b: Builder, x: int, towers: Sequence[Tower], pool_units: int = 0, pool_stride: int = 0) -> int:
    """Parallel towers (and one that pools first), concatenated along the channels."""
    ends = []
    for number, tower in enumerate(towers):
        y = x
        for step, one in enumerate(tower.units):
            y = unit(b, f"tower{number}_conv{step}", y, *one)
        ends += [unit(b, f"tower{number}_fork{step}", y, *one) for step, one in enumerate(tower.fork)] or [y]
    if pool_stride:
        ends.append(pool(b, "pool", x, 3, pool_stride, same=False))
    elif pool_units:
        ends.append(unit(b, "pool_conv", pool(b, "pool", x, 3, 1), pool_units, 1))
    names = [f"c{number}" for number in range(len(ends))]
    return b.op(
        "concat", "concat", ", ".join("b y x " + name for name in names) + " -> b y x c", tuple(ends),
        float(sum(b.tensors[end].size for end in ends)), whole=tuple(names) + ("c",),
        sizes={"c": sum(b.tensors[end].shape[-1] for end in ends)})


def inception_v3(batch: int, size: int = 299, classes: int = 1000) -> ModelGraph:
    """Inception-V3 without its auxiliary head (23.8M parameters)."""
    b = Builder("inception-v3", batch, optimizer="momentum")
    x = image(b, size)
    with b.scope("stem"):
        for number, stem in enumerate(((32, 3, 2, False), (32, 3, 1, False), (64, 3, 1, True))):
            x = unit(b, f"conv{number}", x, *stem)
        x = unit(b, "conv3", pool(b, "pool0", x, 3, 2, same=False), 80, 1, same=False)
        x = pool(b, "pool1", unit(b, "conv4", x, 192, 3, same=False), 3, 2, same=False)

    def one(channels: int, kernel: Union[int, Pair] = 1) -> Unit:
        return channels, kernel, 1, True

    def half(channels: int) -> Unit:
        return channels, 3, 2, False

    for number, pooled in enumerate((32, 64, 64)):
        with b.scope(f"mixed_a{number}"):
            x = _towers(b, x, [Tower([one(64)]), Tower([one(48), one(64, 5)]), Tower([one(64), one(96, 3), one(96, 3)])], pooled)
    with b.scope("reduce_a"):
        x = _towers(b, x, [Tower([half(384)]), Tower([one(64), one(96, 3), half(96)])], pool_stride=2)
    for number, c in enumerate((128, 160, 160, 192)):
        with b.scope(f"mixed_b{number}"):
            x = _towers(
                b,
                x,
                [
                    Tower([one(192)]),
                    Tower([one(c), one(c, (1, 7)), one(192, (7, 1))]),
                    Tower([one(c), one(c, (7, 1)), one(c, (1, 7)), one(c, (7, 1)), one(192, (1, 7))])],
                192)
    with b.scope("reduce_b"):
        x = _towers(
            b, x, [Tower([one(192), half(320)]), Tower([one(192), one(192, (1, 7)), one(192, (7, 1)), half(192)])], pool_stride=2)
    for number in range(2):
        with b.scope(f"mixed_c{number}"):
            ends = [one(384, (1, 3)), one(384, (3, 1))]
            x = _towers(b, x, [Tower([one(320)]), Tower([one(384)], ends), Tower([one(448), one(384, 3)], ends)], 192)
    with b.scope("classifier"):
        class_loss(b, dense(b, "fc", global_pool(b, x), classes))
    return b.graph()


def mlp(batch: int, layers: int = 4, width: int = 1024) -> ModelGraph:
    """Equal dense layers with ReLU, and a loss over the last: the smallest model that can be split in every way."""
    b = Builder("mlp", batch, optimizer="sgd")
    x = b.input("x", "b f", (batch, width))
    for layer in range(layers):
        with b.scope(f"layer{layer}"):
            x = b.pointwise("relu", "relu", dense(b, "fc", x, width, split="fo"[layer % 2]))
    with b.scope("head"):
        class_loss(b, x)
    return b.graph()
