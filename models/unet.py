"""U-Net: convolutional encoder and decoder with skip connections, for a class per pixel.

Source: Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015, figure
1; with "SAME" padding, so that no cropping is needed.

Stages: `encoder_block` and `decoder_block` for each level, `bottom`, `head`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class UnetConfig:
    """Sizes of the network.

    Attributes:
        levels: number of times the image is halved.
        width: channels at full resolution; doubled at each level.
        image: height and width of the image; a multiple of 2**levels.
        channels: channels of the image.
        classes: classes of a pixel N.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    levels: int = 2
    width: int = 4
    image: int = 8
    channels: int = 1
    classes: int = 2
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls) -> UnetConfig:
        """Two levels for 8 x 8 digits: about 7,400 parameters."""
        return cls()

    @classmethod
    def paper(cls) -> UnetConfig:
        """Four levels of 64 to 1,024 channels, on 512 x 512 images: 31 million parameters."""
        return cls(levels=4, width=64, image=512)


def inputs(config: UnetConfig, batch_size: Optional[int] = None) -> data.SegmentationBatch:
    """Placeholders: images `[B, image, image, channels]`, labels int32 `[B, image, image]`."""
    shape = [batch_size, config.image, config.image]
    return data.SegmentationBatch(tf.placeholder(config.dtype, shape + [config.channels], name="images"),
                                  tf.placeholder(tf.int32, shape, name="labels"))


def encoder_block(x: tf.Tensor, config: UnetConfig, level: int,
                  name: Optional[str] = None) -> Tuple[tf.Tensor, tf.Tensor]:
    """Two convolutions and a pooling.

    Args:
        x: `[B, h, w, C]`.
        config: sizes.
        level: index of the level, from 0 at full resolution.
        name: variable scope; "encoder_<level>" by default.

    Returns:
        `[B, h / 2, w / 2, width * 2**level]`, and the skip connection `[B, h, w, width * 2**level]`.
    """
    with tf.variable_scope(name or f"encoder_{level}"):
        skip = _two_convs(x, config, level)
        return layers.max_pool(skip, 2, 2), skip


def bottom(x: tf.Tensor, config: UnetConfig, name: str = "bottom") -> tf.Tensor:
    """Two convolutions at the lowest resolution: `[B, h, w, C]` to `[B, h, w, width * 2**levels]`."""
    with tf.variable_scope(name):
        return _two_convs(x, config, config.levels)


def decoder_block(x: tf.Tensor, skip: tf.Tensor, config: UnetConfig, level: int,
                  name: Optional[str] = None) -> tf.Tensor:
    """Enlargement, skip connection and two convolutions.

    Args:
        x: `[B, h, w, C]`.
        skip: `[B, 2h, 2w, width * 2**level]` from `encoder_block` of the same level.
        config: sizes.
        level: index of the level.
        name: variable scope; "decoder_<level>" by default.

    Returns:
        `[B, 2h, 2w, width * 2**level]`.
    """
    with tf.variable_scope(name or f"decoder_{level}"):
        up = layers.conv2d_transpose(x, config.width * 2 ** level, 2, "up", seed=config.seed)
        return _two_convs(tf.concat([skip, up], axis=3), config, level)


def head(x: tf.Tensor, config: UnetConfig, name: str = "head") -> tf.Tensor:
    """Classifier of each pixel: `[B, h, w, C]` to logits `[B, h, w, N]`."""
    return layers.conv2d(x, config.classes, 1, name, use_bias=True, seed=config.seed)


def build(batch: data.SegmentationBatch, config: UnetConfig) -> layers.Model:
    """Whole model with mean cross-entropy over pixels.

    Args:
        batch: images `[B, h, w, channels]` and labels `[B, h, w]`.
        config: sizes.

    Returns:
        Model with logits `[B, h, w, N]`.
    """
    x = batch.images
    skips: List[tf.Tensor] = []
    for level in range(config.levels):
        x, skip = encoder_block(x, config, level)
        skips.append(skip)
    x = bottom(x, config)
    for level in reversed(range(config.levels)):
        x = decoder_block(x, skips[level], config, level)
    logits = head(x, config)
    return layers.Model(layers.mean_cross_entropy(logits, batch.labels), logits, batch)


def _two_convs(x: tf.Tensor, config: UnetConfig, level: int) -> tf.Tensor:
    for i in range(2):
        x = layers.conv2d(x, config.width * 2 ** level, 3, f"conv_{i}", use_bias=True,
                          activation=tf.nn.relu, seed=config.seed)
    return x
