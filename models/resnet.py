"""ResNet: convolutional network with residual blocks.

Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2016. Bottleneck blocks stride in their
3 x 3 convolution ("version 1.5"), as do the implementations that published throughputs refer to; parameters are the
paper's.

Stages: `stem`, `block_group` (four of them), `head`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class ResnetConfig:
    """Sizes of the network.

    Attributes:
        blocks: number of residual blocks in each group; each group after the first halves the image.
        bottleneck: blocks of 1x1, 3x3, 1x1 convolutions (ResNet-50) instead of two 3x3 (ResNet-18).
        width: channels of the first group; each later group doubles them.
        image: height and width of the image in pixels.
        channels: channels of the image.
        classes: number of classes N.
        small_image: stem of one 3x3 convolution, without the fourfold reduction.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    blocks: Tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    width: int = 64
    image: int = 224
    channels: int = 3
    classes: int = 1000
    small_image: bool = False
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def resnet18(cls) -> ResnetConfig:
        """ResNet-18 on ImageNet: 11.7 million parameters."""
        return cls()

    @classmethod
    def resnet50(cls, classes: int = 1000) -> ResnetConfig:
        """ResNet-50 on ImageNet: 25.6 million parameters with 1,000 classes."""
        return cls(blocks=(3, 4, 6, 3), bottleneck=True, classes=classes)

    @classmethod
    def tiny(cls, bottleneck: bool = False) -> ResnetConfig:
        """One block in each of two groups, for 8 x 8 digits: about 5,000 parameters (2,400 with bottlenecks)."""
        return cls(blocks=(1, 1), bottleneck=bottleneck, width=8 if not bottleneck else 4, image=8, channels=1,
                   classes=10, small_image=True)

    @classmethod
    def digits(cls) -> ResnetConfig:
        """ResNet-18's blocks at width 16 for 8 x 8 digits: about 700,000 parameters."""
        return cls(width=16, image=8, channels=1, classes=10, small_image=True)


def inputs(config: ResnetConfig, batch_size: Optional[int] = None) -> data.ImageBatch:
    """Placeholders: images `[B, image, image, channels]`, labels int32 `[B]`."""
    shape = [batch_size, config.image, config.image, config.channels]
    return data.ImageBatch(tf.placeholder(config.dtype, shape, name="images"),
                           tf.placeholder(tf.int32, [batch_size], name="labels"))


def stem(images: tf.Tensor, config: ResnetConfig, training: bool = True, name: str = "stem") -> tf.Tensor:
    """First convolution, and for large images a pooling.

    Args:
        images: `[B, h, w, channels]`.
        config: sizes.
        training: whether batch normalisation uses the batch's statistics.
        name: variable scope.

    Returns:
        `[B, h / 4, w / 4, width]`, or `[B, h, w, width]` for small images.
    """
    with tf.variable_scope(name):
        if config.small_image:
            return conv_norm(images, config.width, 3, "conv", training, tf.nn.relu, seed=config.seed)
        x = conv_norm(images, config.width, 7, "conv", training, tf.nn.relu, stride=2, seed=config.seed)
        return layers.max_pool(x, 3, 2)


def block_group(x: tf.Tensor, config: ResnetConfig, group: int, training: bool = True,
                name: Optional[str] = None) -> tf.Tensor:
    """All residual blocks of one group.

    Args:
        x: `[B, h, w, C]`.
        config: sizes.
        group: index of the group, from 0.
        training: whether batch normalisation uses the batch's statistics.
        name: variable scope; "group_<group>" by default.

    Returns:
        `[B, h / s, w / s, filters]` with s = 1 for the first group and 2 for the others, and filters = width *
        2**group, times 4 with bottlenecks.
    """
    with tf.variable_scope(name or f"group_{group}"):
        for i in range(config.blocks[group]):
            stride = 2 if group > 0 and i == 0 else 1
            x = block(x, config, config.width * 2 ** group, stride, training, name=f"block_{i}")
        return x


def block(x: tf.Tensor, config: ResnetConfig, filters: int, stride: int, training: bool = True,
          name: str = "block") -> tf.Tensor:
    """One residual block (paper, figure 5).

    Args:
        x: `[B, h, w, C]`.
        config: sizes.
        filters: channels of the inner convolutions.
        stride: step of the block.
        training: whether batch normalisation uses the batch's statistics.
        name: variable scope.

    Returns:
        `[B, h / stride, w / stride, filters]`, times 4 channels with bottlenecks.
    """
    outputs, seed = filters * (4 if config.bottleneck else 1), config.seed
    with tf.variable_scope(name):
        shortcut = x
        if stride != 1 or layers.last_dim(x) != outputs:
            shortcut = conv_norm(x, outputs, 1, "shortcut", training, stride=stride, seed=seed)
        if config.bottleneck:
            y = conv_norm(x, filters, 1, "conv_0", training, tf.nn.relu, seed=seed)
            y = conv_norm(y, filters, 3, "conv_1", training, tf.nn.relu, stride=stride, seed=seed)
            y = conv_norm(y, outputs, 1, "conv_2", training, seed=seed)
        else:
            y = conv_norm(x, filters, 3, "conv_0", training, tf.nn.relu, stride=stride, seed=seed)
            y = conv_norm(y, filters, 3, "conv_1", training, seed=seed)
        return tf.nn.relu(y + shortcut)


def conv_norm(x: tf.Tensor, filters: int, size: int, name: str, training: bool,
              activation: layers.Activation = None, stride: int = 1, seed: int = 0) -> tf.Tensor:
    """Convolution, batch normalisation, activation: `[B, h, w, C]` to `[B, h / stride, w / stride, filters]`."""
    with tf.variable_scope(name):
        y = layers.batch_norm(layers.conv2d(x, filters, size, "conv", stride, seed=seed), "norm", training)
        return y if activation is None else activation(y)


def head(x: tf.Tensor, config: ResnetConfig, name: str = "head") -> tf.Tensor:
    """Classifier: mean over the image and dense layer, `[B, h, w, C]` to logits `[B, N]`."""
    return classifier(pool(x), config, name)


def pool(x: tf.Tensor) -> tf.Tensor:
    """Mean over the image: `[B, h, w, C]` to features `[B, C]`."""
    return tf.reduce_mean(x, axis=[1, 2])


def classifier(features: tf.Tensor, config: ResnetConfig, name: str = "head") -> tf.Tensor:
    """Dense layer of features `[B, C]` to logits `[B, N]`; with very many classes the part worth splitting."""
    return layers.dense(features, config.classes, name, seed=config.seed)


def features(images: tf.Tensor, config: ResnetConfig, training: bool = True) -> tf.Tensor:
    """Everything before the classifier: images `[B, h, w, channels]` to features `[B, C]`."""
    x = stem(images, config, training)
    for group in range(len(config.blocks)):
        x = block_group(x, config, group, training)
    return pool(x)


def build(batch: data.ImageBatch, config: ResnetConfig, training: bool = True) -> layers.Model:
    """Whole model with mean cross-entropy.

    Args:
        batch: images `[B, h, w, channels]` and labels `[B]`.
        config: sizes.
        training: whether batch normalisation uses the batch's statistics.

    Returns:
        Model with logits `[B, N]`.
    """
    logits = classifier(features(batch.images, config, training), config)
    return layers.Model(layers.mean_cross_entropy(logits, batch.labels), logits, batch)
