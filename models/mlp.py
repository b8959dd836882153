"""Multi-layer perceptron classifier: the smallest model, for first steps and for numeric checks.

Source: Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors", 1986; ReLU units.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class MlpConfig:
    """Sizes of the perceptron.

    Attributes:
        features: width of the input.
        hidden: width of each hidden layer.
        layers: number of hidden layers.
        classes: number of classes.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    features: int = 64
    hidden: int = 32
    layers: int = 3
    classes: int = 10
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls) -> MlpConfig:
        """Three hidden layers of 32 on the 64 pixels of a handwritten digit; about 4,500 parameters."""
        return cls()

    @classmethod
    def wide(cls) -> MlpConfig:
        """Four hidden layers of 1,024; about 3.2 million parameters."""
        return cls(hidden=1024, layers=4)


def inputs(config: MlpConfig, batch_size: Optional[int] = None) -> data.ImageBatch:
    """Placeholders: features `[B, features]`, labels `[B]`."""
    return data.ImageBatch(tf.placeholder(config.dtype, [batch_size, config.features], name="features"),
                           tf.placeholder(tf.int32, [batch_size], name="labels"))


def hidden_layer(x: tf.Tensor, config: MlpConfig, name: str) -> tf.Tensor:
    """`[B, D]` to `[B, hidden]`: dense and ReLU."""
    return layers.dense(x, config.hidden, name, activation=tf.nn.relu, stddev=layers.he_stddev(layers.last_dim(x)),
                        seed=config.seed)


def head(x: tf.Tensor, config: MlpConfig, name: str = "head") -> tf.Tensor:
    """`[B, hidden]` to logits `[B, classes]`."""
    return layers.dense(x, config.classes, name, seed=config.seed)


def build(batch: data.ImageBatch, config: MlpConfig) -> layers.Model:
    """Whole model with mean cross-entropy.

    Args:
        batch: features `[B, features]` and labels `[B]`.
        config: sizes.

    Returns:
        Model with logits `[B, classes]`.
    """
    x = batch.images
    for i in range(config.layers):
        x = hidden_layer(x, config, name=f"layer_{i}")
    logits = head(x, config)
    return layers.Model(layers.mean_cross_entropy(logits, batch.labels), logits, batch)
