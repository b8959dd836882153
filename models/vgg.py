"""VGG: plain stack of 3 x 3 convolutions with large dense layers at the end.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, table 1
(columns D and E).

Stages: `conv_group` (five of them), `dense_layers`, `head`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class VggConfig:
    """Sizes of the network.

    Attributes:
        groups: (number of convolutions, channels) of each group; a pooling after each halves the image.
        dense: width of the two dense layers before the classifier.
        image: height and width of the image.
        channels: channels of the image.
        classes: number of classes N.
        dropout: probability of dropping activations between the dense layers.
        dtype: "float32" or "float64".
        seed: seed of the initial values and of the dropout.
    """

    groups: Tuple[Tuple[int, int], ...] = ((1, 4), (2, 8))
    dense: int = 32
    image: int = 8
    channels: int = 1
    classes: int = 10
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls) -> VggConfig:
        """Two groups for 8 x 8 digits: about 3,400 parameters."""
        return cls()

    @classmethod
    def vgg16(cls, classes: int = 1000) -> VggConfig:
        """VGG-16 (column D) on ImageNet: 138 million parameters with 1,000 classes."""
        return cls(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 4096, 224, 3, classes)

    @classmethod
    def vgg19(cls, classes: int = 1000) -> VggConfig:
        """VGG-19 (column E) on ImageNet: 144 million parameters with 1,000 classes."""
        return cls(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), 4096, 224, 3, classes)


def inputs(config: VggConfig, batch_size: Optional[int] = None) -> data.ImageBatch:
    """Placeholders: images `[B, image, image, channels]`, labels int32 `[B]`."""
    shape = [batch_size, config.image, config.image, config.channels]
    return data.ImageBatch(tf.placeholder(config.dtype, shape, name="images"),
                           tf.placeholder(tf.int32, [batch_size], name="labels"))


def conv_group(x: tf.Tensor, config: VggConfig, group: int, name: Optional[str] = None) -> tf.Tensor:
    """Convolutions of one group and its pooling.

    Args:
        x: `[B, h, w, C]`.
        config: sizes.
        group: index of the group, from 0.
        name: variable scope; "group_<group>" by default.

    Returns:
        `[B, ceil(h / 2), ceil(w / 2), filters]`.
    """
    count, filters = config.groups[group]
    with tf.variable_scope(name or f"group_{group}"):
        for i in range(count):
            x = layers.conv2d(x, filters, 3, f"conv_{i}", use_bias=True, activation=tf.nn.relu,
                              seed=config.seed)
        return layers.max_pool(x, 2, 2)


def dense_layers(x: tf.Tensor, config: VggConfig, name: str = "dense") -> tf.Tensor:
    """Two dense layers: `[B, h, w, C]` to features `[B, dense]`."""
    height, width, channels = x.shape.as_list()[1:]
    x = layers.reshape(x, height * width * channels)
    with tf.variable_scope(name):
        for i in range(2):
            x = layers.dense(x, config.dense, f"layer_{i}", activation=tf.nn.relu,
                             stddev=layers.he_stddev(layers.last_dim(x)), seed=config.seed)
            x = layers.dropout(x, config.dropout, config.seed + i)
        return x


def head(features: tf.Tensor, config: VggConfig, name: str = "head") -> tf.Tensor:
    """Classifier: features `[B, dense]` to logits `[B, N]`."""
    return layers.dense(features, config.classes, name, seed=config.seed)


def build(batch: data.ImageBatch, config: VggConfig) -> layers.Model:
    """Whole model with mean cross-entropy.

    Args:
        batch: images `[B, h, w, channels]` and labels `[B]`.
        config: sizes.

    Returns:
        Model with logits `[B, N]`.
    """
    x = batch.images
    for group in range(len(config.groups)):
        x = conv_group(x, config, group)
    logits = head(dense_layers(x, config), config)
    return layers.Model(layers.mean_cross_entropy(logits, batch.labels), logits, batch)
