"""A generative adversarial network on handwritten digits, with a `train_step` of its own.

    python examples/keras/gan.py

The generator is on one device, the discriminator on the next. The noise is drawn in the step: every part of the mini-batch draws
numbers of its own.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"num_micro_batch": 2}, cluster="cpu:2")  # before TensorFlow runs its first op

from typing import Any, Dict  # noqa: E402

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

NOISE = 16


class Adversaries(keras.Model):
    """Both players' losses follow from one pass, and both are updated after it."""

    def __init__(self) -> None:
        super().__init__()
        with wh.replicate(1):
            self.generator = keras.Sequential([
                keras.Input((NOISE,)), layers.Dense(64, activation="relu"), layers.Dense(64, activation="sigmoid")])
        with wh.replicate(1):
            self.discriminator = keras.Sequential([
                keras.Input((64,)), layers.Dense(64, activation="leaky_relu"), layers.Dense(1)])
        self.seed = keras.random.SeedGenerator(0)
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_mean, self.g_mean = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")

    @property
    def metrics(self) -> Any:
        return [self.d_mean, self.g_mean]

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real: Any) -> Dict[str, Any]:
        noise = keras.random.normal((tf.shape(real)[0], NOISE), seed=self.seed)
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            on_real, on_made = self.discriminator(real), self.discriminator(self.generator(noise))
            d_loss = (self.entropy(0.9 * tf.ones_like(on_real), on_real) + self.entropy(tf.zeros_like(on_made), on_made)) / 2.0
            g_loss = self.entropy(tf.ones_like(on_made), on_made)
        for tape, loss, player, optimizer in ((d_tape, d_loss, self.discriminator, self.d_optimizer),
                                              (g_tape, g_loss, self.generator, self.g_optimizer)):
            optimizer.apply(tape.gradient(loss, player.trainable_variables), player.trainable_variables)
        self.d_mean.update_state(d_loss)
        self.g_mean.update_state(g_loss)
        return {"d_loss": self.d_mean.result(), "g_loss": self.g_mean.result()}


def main() -> None:
    keras.utils.set_random_seed(0)
    images = (load_digits().data[:1536] / 16.0).astype("float32")
    model = Adversaries()
    model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(1e-3, beta_1=0.5))
    model.fit(images, batch_size=64, epochs=12, verbose=2)
    made = model.generator(keras.random.normal((64, NOISE), seed=1))
    distance = keras.ops.mean(keras.ops.min(keras.ops.sum((made[:, None] - images[None]) ** 2, axis=2), axis=1))
    print(f"squared distance of a made image to the nearest digit: {float(distance):.2f}")
    print(wh.explain())


if __name__ == "__main__":
    main()
