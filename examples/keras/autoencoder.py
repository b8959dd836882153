"""A variational autoencoder of handwritten digits: the encoder on one device, the decoder on the next.

    python examples/keras/autoencoder.py

The sample between them is random; each micro-batch draws numbers of its own.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"num_micro_batch": 4}, cluster="cpu:2")  # before TensorFlow runs its first op

from typing import Any, Dict  # noqa: E402

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers, ops  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

LATENT = 8


class Sampling(layers.Layer):
    """A draw from the normal distribution that the encoder describes."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(0)

    def call(self, mean: Any, log_variance: Any) -> Any:
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seed_generator)


class Autoencoder(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        images, latent = keras.Input((64,)), keras.Input((LATENT,))
        with wh.replicate(1):
            x = layers.Dense(64, activation="relu")(images)
            self.encoder = keras.Model(images, [layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)])
            self.sampling = Sampling()
        with wh.replicate(1):
            x = layers.Dense(64, activation="relu")(latent)
            self.decoder = keras.Model(latent, layers.Dense(64)(x))
        self.means = {name: keras.metrics.Mean(name) for name in ("loss", "reconstruction", "kl")}

    @property
    def metrics(self) -> Any:
        return list(self.means.values())

    def train_step(self, images: Any) -> Dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoder(images)
            logits = self.decoder(self.sampling(mean, log_variance))
            entropy = tf.nn.sigmoid_cross_entropy_with_logits(images, logits)
            reconstruction = ops.mean(ops.sum(entropy, axis=1))
            kl = ops.mean(ops.sum(0.5 * (mean ** 2 + ops.exp(log_variance) - log_variance - 1.0), axis=1))
            loss = reconstruction + kl
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for name, value in (("loss", loss), ("reconstruction", reconstruction), ("kl", kl)):
            self.means[name].update_state(value)
        return {name: mean.result() for name, mean in self.means.items()}


def main() -> None:
    keras.utils.set_random_seed(0)
    images = (load_digits().data[:1536] / 16.0).astype("float32")
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.003))
    model.fit(images, batch_size=64, epochs=6, verbose=2)
    mean, _ = model.encoder.predict(images[:5], verbose=0)
    print("the first latent vector:", mean[0].round(2))
    print(wh.explain())


if __name__ == "__main__":
    main()
