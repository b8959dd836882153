"""Small convolutional generative adversarial network for 8 x 8 images: two losses, two sets of variables.

Sources: Goodfellow et al., "Generative Adversarial Nets", 2014 (non-saturating losses, section 3); Mescheder, Geiger
and Nowozin, "Which Training Methods for GANs do actually Converge?", 2018 (gradient penalty R1, equation 9).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from models import data, layers

GENERATOR, DISCRIMINATOR = "generator", "discriminator"


@dataclass(frozen=True)
class GanConfig:
    """Sizes of both networks.

    Attributes:
        image: height and width of the image; a multiple of 4.
        noise: width Z of the generator's input.
        width: channels at full resolution.
        penalty: weight gamma of the gradient penalty R1; 0 leaves it out.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    image: int = 8
    noise: int = 8
    width: int = 4
    penalty: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls, penalty: float = 0.0) -> GanConfig:
        """Width 4 on 8 x 8 digits: about 1,500 parameters."""
        return cls(penalty=penalty)


class GanModel(NamedTuple):
    """Result of `build`.

    Attributes:
        generator_loss: scalar; minimise over `generator_variables`.
        discriminator_loss: scalar; minimise over `discriminator_variables`.
        images: generated images `[B, image, image, 1]`.
        inputs: the batch `build` was called with.
        generator_variables: trainable variables of the generator.
        discriminator_variables: trainable variables of the discriminator.
    """

    generator_loss: tf.Tensor
    discriminator_loss: tf.Tensor
    images: tf.Tensor
    inputs: data.GanBatch
    generator_variables: List[tf.Variable]
    discriminator_variables: List[tf.Variable]


def inputs(config: GanConfig, batch_size: Optional[int] = None) -> data.GanBatch:
    """Placeholders: images `[B, image, image, 1]`, noise `[B, Z]`."""
    return data.GanBatch(
        tf.placeholder(config.dtype, [batch_size, config.image, config.image, 1], name="images"),
        tf.placeholder(config.dtype, [batch_size, config.noise], name="noise"))


def generator(noise: tf.Tensor, config: GanConfig, name: str = GENERATOR) -> tf.Tensor:
    """Noise `[B, Z]` to images `[B, image, image, 1]` between -1 and 1."""
    start, filters, seed = config.image // 4, 2 * config.width, config.seed
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        x = layers.dense(noise, start * start * filters, "project", activation=tf.nn.relu, seed=seed)
        x = layers.reshape(x, start, start, filters)
        x = tf.nn.relu(layers.conv2d_transpose(x, config.width, 4, "up_0", seed=seed))
        return tf.tanh(layers.conv2d_transpose(x, 1, 4, "up_1", seed=seed))


def discriminator(images: tf.Tensor, config: GanConfig, name: str = DISCRIMINATOR) -> tf.Tensor:
    """Images `[B, image, image, 1]` to logits `[B, 1]` (high: real); a second call uses the same variables."""
    seed = config.seed
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        x = layers.conv2d(images, config.width, 4, "down_0", 2, use_bias=True, activation=tf.nn.leaky_relu, seed=seed)
        x = layers.conv2d(x, 2 * config.width, 4, "down_1", 2, use_bias=True, activation=tf.nn.leaky_relu, seed=seed)
        x = layers.reshape(x, (config.image // 4) ** 2 * 2 * config.width)
        return layers.dense(x, 1, "logit", seed=seed)


def gradient_penalty(logits: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Mean over the batch of half the squared gradient of `logits` `[B, 1]` by `images` `[B, h, w, C]`: a scalar."""
    gradient = tf.gradients(logits, images)[0]
    return 0.5 * tf.reduce_mean(tf.reduce_sum(tf.square(gradient), axis=[1, 2, 3]))


def build(batch: data.GanBatch, config: GanConfig) -> GanModel:
    """Both networks and their losses.

    Args:
        batch: real images `[B, image, image, 1]` and noise `[B, Z]`.
        config: sizes.
    """
    images = generator(batch.noise, config)
    real, fake = discriminator(batch.images, config), discriminator(images, config)
    discriminator_loss = _mean_sigmoid_loss(real, 1.0) + _mean_sigmoid_loss(fake, 0.0)
    if config.penalty:
        discriminator_loss = discriminator_loss + config.penalty * gradient_penalty(real, batch.images)
    return GanModel(_mean_sigmoid_loss(fake, 1.0), discriminator_loss, images, batch, _variables(GENERATOR),
                    _variables(DISCRIMINATOR))


def _mean_sigmoid_loss(logits: tf.Tensor, label: float) -> tf.Tensor:
    labels = tf.zeros_like(logits) + label
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))


def _variables(name: str) -> List[tf.Variable]:
    """Trainable variables of one network, wherever the caller's scope has put it."""
    outer = tf.get_variable_scope().name
    return tf.trainable_variables((outer + "/" if outer else "") + name + "/")
