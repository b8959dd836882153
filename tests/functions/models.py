"""Keras models of every kind that the matrix trains, each in two stages, with the data of its own.

What is random in a model (a generator's noise, a variational sample) is an input: clones and the local script then draw the same.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tests.functions.equality import Scope

keras = tf.keras  # 3 or, up to TensorFlow 2.15, 2
layers = keras.layers

EXAMPLES, BATCH = 80, 16  # five mini-batches
VALIDATION = 12

_rng = np.random.RandomState(0)
FEATURES, LABELS = _rng.randn(EXAMPLES, 6), _rng.randint(0, 3, EXAMPLES)
IMAGES, TOKENS = _rng.randn(EXAMPLES, 6, 6, 1), _rng.randint(0, 20, (EXAMPLES, 6))
NOISE, SERIES = _rng.randn(EXAMPLES, 2), _rng.randn(EXAMPLES, 4, 3)


class Case(NamedTuple):
    """One model of the matrix.

    Attributes:
        make: compiled model, from the scopes of its two stages.
        x, y: examples; ``y`` None: the model's own ``train_step`` needs none.
        config: what whale_tf is to be configured with for exact results.
        policy: Keras' dtype policy.
        tolerance: of each variable, relative to its norm (of bfloat16, which has 8 bits: beyond what the local run has lost).
    """

    make: Callable[[Sequence[Scope]], Any]
    x: Any
    y: Any = None
    config: Dict[str, Any] = {}
    policy: str = "float64"
    tolerance: float = 1e-11


def head(x: Any) -> Any:
    mixed = keras.mixed_precision.global_policy().name == "mixed_bfloat16"
    return layers.Dense(4, activation="softmax", dtype="float32" if mixed else None, name="head")(x)


def compiled(inputs: Any, outputs: Any, optimizer: Any, **options: Any) -> Any:
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, **dict({"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}, **options))
    return model


# -- classifiers -------------------------------------------------------------------------------------------------------
def mlp(stages: Sequence[Scope], optimizer: Callable[[Any], Any] = lambda inner: inner) -> Any:
    inputs = keras.Input((6,))
    with stages[0]():
        x = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    with stages[1]():
        outputs = head(layers.Dense(8, activation="gelu")(x))
    return compiled(inputs, outputs, optimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.5)))


def scaled(inner: Any) -> Any:
    """All variables are updated in one condition, which does not hold in steps whose gradients are not finite."""
    module = keras.optimizers if hasattr(keras.optimizers, "LossScaleOptimizer") else keras.mixed_precision
    return module.LossScaleOptimizer(inner, initial_scale=2.0 ** 10, dynamic_growth_steps=2)


def accumulated(inner: Any) -> Any:
    return keras.optimizers.AdamW(0.01, clipnorm=0.5, gradient_accumulation_steps=2, use_ema=True)


def accumulated_and_clipped_together(inner: Any) -> Any:
    """The norm of all accumulated gradients is in a condition that is in the loss scale's."""
    return scaled(keras.optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=2))


def convnet(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6, 6, 1))
    with stages[0]():
        x = layers.MaxPooling2D()(layers.Conv2D(4, 3, activation="relu")(inputs))
    with stages[1]():
        outputs = head(layers.Flatten()(layers.Conv2D(4, 2, activation="relu")(x)))
    return compiled(inputs, outputs, keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))


def normalized_convnet(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6, 6, 1))
    with stages[0]():
        x = layers.Conv2D(4, 3, activation="relu")(inputs)
        x = layers.MaxPooling2D()(layers.BatchNormalization()(x))
    with stages[1]():
        x = layers.BatchNormalization(momentum=0.9)(layers.Flatten()(x))
        outputs = head(x)
    return compiled(inputs, outputs, keras.optimizers.SGD(0.1))


def encoder(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6,), dtype="int32")
    with stages[0]():
        x = layers.Embedding(20, 8)(inputs) + layers.Embedding(6, 8)(tf.range(6))
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    with stages[1]():
        x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="relu")(x)))
        outputs = head(layers.GlobalAveragePooling1D()(x))
    return compiled(inputs, outputs, keras.optimizers.AdamW(0.01))


def recurrent(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((4, 3))
    with stages[0]():
        x = layers.LSTM(4, return_sequences=True)(inputs)
    with stages[1]():
        outputs = head(layers.GRU(4)(x))
    return compiled(inputs, outputs, keras.optimizers.RMSprop(0.01))


def embeddings(stages: Sequence[Scope]) -> Any:
    """Two tables with sparse gradients, one of them without a dense layer behind it."""
    inputs = keras.Input((6,), dtype="int32")
    with stages[0]():
        x = layers.Flatten()(layers.Embedding(20, 4)(inputs))
        biases = layers.GlobalMaxPooling1D()(layers.Embedding(20, 4)(inputs))
    with stages[1]():
        outputs = head(layers.Dense(4)(x) + biases)
    return compiled(inputs, outputs, keras.optimizers.Adagrad(0.1))


def bfloat16(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6,))
    with stages[0]():
        x = layers.LayerNormalization()(layers.Dense(16, activation="relu")(inputs))
    with stages[1]():
        outputs = head(layers.Dense(8, activation="relu")(x))
    return compiled(inputs, outputs, keras.optimizers.SGD(0.1, momentum=0.9))


class Likeness(layers.Layer):
    """Logits of all tokens by an embedding's own table: tied weights."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return tf.nn.softmax(tf.einsum("bld,td->blt", x, tf.convert_to_tensor(self.embedding.embeddings)))


def tied(stages: Sequence[Scope]) -> Any:
    inputs = keras.Input((6,), dtype="int32")
    with stages[0]():
        embedding = layers.Embedding(20, 4)
        x = layers.Dense(4, activation="tanh")(embedding(inputs))
    with stages[1]():
        outputs = Likeness(embedding)(layers.Dense(4)(x))
    return compiled(inputs, outputs, keras.optimizers.Adam(0.01))


class Text(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.strings.as_string(x)


class Hash(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.strings.to_hash_bucket_fast(x, 20)


def texts(stages: Sequence[Scope]) -> Any:
    """The second stage reads texts that the first one makes."""
    inputs = keras.Input((6,), dtype="int32")
    with stages[0]():
        words = Text()(inputs)
        x = layers.Flatten()(layers.Embedding(20, 4)(Hash()(words)))
    with stages[1]():
        late = layers.GlobalMaxPooling1D()(layers.Embedding(20, 4)(Hash()(words)))
        outputs = head(layers.Dense(4)(x) + late)
    return compiled(inputs, outputs, keras.optimizers.SGD(0.1))


# -- training steps of the user's ----------------------------------------------------------------------------------------
class Trained(keras.Model):
    """Means of losses, and a step that takes nothing but inputs."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.means = {name: keras.metrics.Mean(name) for name in names}

    @property
    def metrics(self) -> List[Any]:
        return list(self.means.values())

    def noted(self, **losses: Any) -> Dict[str, Any]:
        for name, loss in losses.items():
            self.means[name].update_state(loss)
        return {name: mean.result() for name, mean in self.means.items()}


class Adversaries(Trained):
    """A generator and a discriminator, trained in turn: the generator against the discriminator as it is after its update."""

    def __init__(self, stages: Sequence[Scope]) -> None:
        super().__init__("d_loss", "g_loss")
        with stages[0]():
            self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(8, activation="relu"), layers.Dense(6)])
        with stages[1]():
            self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="leaky_relu"), layers.Dense(1)])
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)

    def losses_of(self, real: Any, noise: Any) -> Tuple[Any, Any]:
        made = self.generator(noise)
        on_real, on_made = self.discriminator(real), self.discriminator(made)
        return (self.bce(tf.ones_like(on_real), on_real) + self.bce(tf.zeros_like(on_made), on_made),
                self.bce(tf.ones_like(on_made), on_made))

    def train_step(self, data: Any) -> Dict[str, Any]:
        real, noise = data[0]
        with tf.GradientTape() as tape:
            d_loss, _ = self.losses_of(real, noise)
        variables = self.discriminator.trainable_variables
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables))
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.bce(tf.ones_like(judged), judged)
        variables = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables))
        return self.noted(d_loss=d_loss, g_loss=g_loss)

    def test_step(self, data: Any) -> Dict[str, Any]:
        return self.noted(**dict(zip(("d_loss", "g_loss"), self.losses_of(*data[0]))))


class Together(Adversaries):
    """Both players' gradients from one forward pass, by two tapes, and then both updates."""

    def train_step(self, data: Any) -> Dict[str, Any]:
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            d_loss, g_loss = self.losses_of(*data[0])
        for loss, tape, optimizer, player in ((d_loss, d_tape, self.d_optimizer, self.discriminator),
                                              (g_loss, g_tape, self.g_optimizer, self.generator)):
            optimizer.apply_gradients(zip(tape.gradient(loss, player.trainable_variables), player.trainable_variables))
        return self.noted(d_loss=d_loss, g_loss=g_loss)


class Variational(Trained):
    """A variational autoencoder; its noise is an input."""

    def __init__(self, stages: Sequence[Scope]) -> None:
        super().__init__("loss", "kl")
        inputs, latent = keras.Input((6,)), keras.Input((2,))
        with stages[0]():
            x = layers.Dense(8, activation="relu")(inputs)
            self.encoder = keras.Model(inputs, [layers.Dense(2)(x), layers.Dense(2)(x)])
        with stages[1]():
            self.decoder = keras.Model(latent, layers.Dense(6)(layers.Dense(8, activation="relu")(latent)))

    def losses_of(self, x: Any, noise: Any) -> Tuple[Any, Any]:
        mean, log_variance = self.encoder(x)
        z = mean + tf.exp(0.5 * log_variance) * noise
        kl = -0.5 * tf.reduce_mean(tf.reduce_sum(1.0 + log_variance - mean ** 2 - tf.exp(log_variance), 1))
        return tf.reduce_mean(tf.reduce_sum((x - self.decoder(z)) ** 2, 1)) + kl, kl

    def train_step(self, data: Any) -> Dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, kl = self.losses_of(*data[0])
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return self.noted(loss=loss, kl=kl)

    def test_step(self, data: Any) -> Dict[str, Any]:
        return self.noted(**dict(zip(("loss", "kl"), self.losses_of(*data[0]))))


class Critic(Trained):
    """A Wasserstein critic with a penalty on its slope between real and made examples (Gulrajani et al. 2017): nested tapes."""

    def __init__(self, stages: Sequence[Scope]) -> None:
        super().__init__("loss", "penalty")
        inputs = keras.Input((6,))
        with stages[0]():
            x = layers.Dense(8, activation="tanh")(inputs)
        with stages[1]():
            outputs = layers.Dense(1)(layers.Dense(8, activation="softplus")(x))
        self.critic = keras.Model(inputs, outputs)

    def losses_of(self, real: Any, noise: Any) -> Tuple[Any, Any]:
        made = tf.concat([noise, noise, noise], 1)
        between = 0.3 * real + 0.7 * made
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between)
        slopes = tf.sqrt(tf.reduce_sum(tape.gradient(judged, between) ** 2, 1))
        penalty = tf.reduce_mean((slopes - 1.0) ** 2)
        return tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(real)) + 10.0 * penalty, penalty

    def train_step(self, data: Any) -> Dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, penalty = self.losses_of(*data[0])
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return self.noted(loss=loss, penalty=penalty)

    def test_step(self, data: Any) -> Dict[str, Any]:
        return self.noted(**dict(zip(("loss", "penalty"), self.losses_of(*data[0]))))


def own(kind: Any, stages: Sequence[Scope]) -> Any:
    model = kind(stages)
    model.compile(keras.optimizers.Adam(0.01))
    return model


CASES: Dict[str, Case] = {
    "mlp": Case(mlp, FEATURES, LABELS),
    "convnet": Case(convnet, IMAGES, LABELS),
    "convnet, synchronised batch norm": Case(normalized_convnet, IMAGES, LABELS, {"sync_batch_norm": True}),
    "encoder": Case(encoder, TOKENS, LABELS),
    "lstm and gru": Case(recurrent, SERIES, LABELS),
    "embeddings": Case(embeddings, TOKENS, LABELS),
    "texts": Case(texts, TOKENS, LABELS),
    "tied weights": Case(tied, TOKENS, np.roll(TOKENS, -1, axis=1)),
    "bfloat16": Case(bfloat16, FEATURES, LABELS, policy="mixed_bfloat16", tolerance=2e-2),
    "loss scale": Case(functools.partial(mlp, optimizer=scaled),
                       np.where(np.arange(EXAMPLES)[:, None] == 40, np.nan, FEATURES), LABELS),  # one step is skipped
    "gan": Case(functools.partial(own, Adversaries), (FEATURES, NOISE)),
    "gan, both at once": Case(functools.partial(own, Together), (FEATURES, NOISE)),
    "vae": Case(functools.partial(own, Variational), (FEATURES, NOISE)),
    "gradient penalty": Case(functools.partial(own, Critic), (FEATURES, NOISE)),
}
if hasattr(keras, "ops"):  # Keras 3
    CASES["accumulated gradients"] = Case(functools.partial(mlp, optimizer=accumulated), FEATURES, LABELS)
    CASES["accumulated, clipped together"] = Case(
        functools.partial(mlp, optimizer=accumulated_and_clipped_together), FEATURES, LABELS)
