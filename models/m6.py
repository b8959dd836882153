"""M6: multimodal encoder-decoder transformer; reads an image and a text, writes a text.

Sources: Lin et al., "M6: A Chinese Multimodal Pretrainer", 2021 (image patches and text tokens in one sequence); Jia et
al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs", 2022, section 5.3.1 (24 encoder and 24 decoder
layers, ten billion parameters). Here a linear projection of the pixels stands for the paper's convolutional patch
features.

Stages: `embed_image`, `embed_text`, `encoder_layer`, `decoder_layer`, `lm_head`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class M6Config:
    """Sizes of the model.

    Attributes:
        encoder_layers: number of encoder layers.
        decoder_layers: number of decoder layers.
        hidden: width H of the residual stream.
        heads: number of attention heads; divides `hidden`.
        ffn: width of the feed-forward layer.
        vocab: number of tokens V.
        image: height and width of the image.
        channels: channels of the image.
        patch: height and width of a patch; divides `image`.
        source: source text length S.
        target: target text length T.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    encoder_layers: int = 2
    decoder_layers: int = 2
    hidden: int = 16
    heads: int = 2
    ffn: int = 32
    vocab: int = data.BYTE_VOCAB
    image: int = 8
    channels: int = 1
    patch: int = 4
    source: int = 20
    target: int = 6
    dtype: str = "float32"
    seed: int = 0

    @property
    def patches(self) -> int:
        """Number of patches P of an image."""
        return (self.image // self.patch) ** 2

    @classmethod
    def tiny(cls) -> M6Config:
        """Two layers each of hidden 16, on 8 x 8 digits and bytes: about 16,000 parameters."""
        return cls()

    @classmethod
    def base(cls) -> M6Config:
        """Twelve layers each of hidden 1,024: 380 million parameters."""
        return cls(12, 12, 1024, 16, 4096, 21128, 256, 3, 32, 128, 128)

    @classmethod
    def m6_10b(cls) -> M6Config:
        """Ten billion parameters in 24 + 24 layers; the papers give these two figures, the width follows from them."""
        return cls(24, 24, 3840, 30, 15360, 21128, 256, 3, 32, 512, 128)


def inputs(config: M6Config, batch_size: Optional[int] = None) -> data.CaptionBatch:
    """Placeholders of images and text pairs; shapes as in `data.CaptionBatch`."""
    images = [batch_size, config.image, config.image, config.channels]
    source, target = [batch_size, config.source], [batch_size, config.target]
    return data.CaptionBatch(
        images=tf.placeholder(config.dtype, images, name="images"),
        source=tf.placeholder(tf.int32, source, name="source"),
        source_mask=tf.placeholder(config.dtype, source, name="source_mask"),
        target=tf.placeholder(tf.int32, target, name="target"),
        labels=tf.placeholder(tf.int32, target, name="labels"),
        weights=tf.placeholder(config.dtype, target, name="weights"))


def token_table(config: M6Config, name: str = "tokens") -> tf.Variable:
    """Embedding table `[V, H]` which encoder, decoder and softmax share."""
    return layers.embedding_table(config.vocab, config.hidden, name, tf.as_dtype(config.dtype), seed=config.seed)


def embed_image(images: tf.Tensor, config: M6Config, name: str = "image") -> tf.Tensor:
    """Linear projection of each patch plus position: images `[B, h, w, C]` to `[B, P, H]`."""
    with tf.variable_scope(name):
        x = layers.conv2d(images, config.hidden, config.patch, "patches", config.patch, use_bias=True,
                          seed=config.seed)
        x = layers.reshape(x, config.patches, config.hidden)
        return x + layers.embedding_table(config.patches, config.hidden, "positions", x.dtype, seed=config.seed)


def embed_text(tokens: tf.Tensor, table: tf.Variable, config: M6Config, name: str = "text") -> tf.Tensor:
    """Token and position embeddings: tokens `[B, S]` and table `[V, H]` to `[B, S, H]`."""
    with tf.variable_scope(name):
        x = layers.embedding_lookup(table, tokens)
        return x + layers.embedding_table(int(tokens.shape[1]), config.hidden, "positions", x.dtype, seed=config.seed)


def source_bias(patches: tf.Tensor, source_mask: tf.Tensor) -> tf.Tensor:
    """Attention bias `[B, 1, 1, P + S]`: all patches `[B, P, H]` are seen, and the text where `source_mask` is 1."""
    return layers.padding_bias(tf.concat([tf.ones_like(patches[:, :, 0]), source_mask], axis=1))


def encoder_layer(x: tf.Tensor, config: M6Config, bias: tf.Tensor, name: str = "encoder_layer") -> tf.Tensor:
    """One encoder layer, normalised on entry to each block.

    Args:
        x: `[B, P + S, H]`.
        config: sizes.
        bias: `[B, 1, 1, P + S]` from `source_bias`.
        name: variable scope.

    Returns:
        `[B, P + S, H]`.
    """
    with tf.variable_scope(name):
        y = layers.layer_norm(x, "attention_norm")
        x = x + layers.multi_head_attention(y, y, config.heads, "attention", bias, stddev=0.02, seed=config.seed)
        return _ffn(x, config)


def decoder_layer(x: tf.Tensor, memory: tf.Tensor, config: M6Config, bias: tf.Tensor,
                  name: str = "decoder_layer") -> tf.Tensor:
    """One decoder layer: causal self-attention, attention over the encoder's output, feed-forward.

    Args:
        x: `[B, T, H]`.
        memory: encoder output `[B, P + S, H]`.
        config: sizes.
        bias: `[B, 1, 1, P + S]` from `source_bias`.
        name: variable scope.

    Returns:
        `[B, T, H]`.
    """
    heads, seed = config.heads, config.seed
    with tf.variable_scope(name):
        y = layers.layer_norm(x, "attention_norm")
        causal = layers.causal_bias(int(x.shape[1]), x.dtype)
        x = x + layers.multi_head_attention(y, y, heads, "attention", causal, stddev=0.02, seed=seed)
        y = layers.layer_norm(x, "cross_norm")
        x = x + layers.multi_head_attention(y, memory, heads, "cross", bias, stddev=0.02, seed=seed)
        return _ffn(x, config)


def lm_head(x: tf.Tensor, table: tf.Variable, name: str = "lm_head") -> tf.Tensor:
    """Final normalisation and tied softmax weights: `[B, T, H]` and table `[V, H]` to logits `[B, T, V]`."""
    with tf.variable_scope(name):
        return layers.tied_logits(layers.layer_norm(x, "norm"), table)


def build(batch: data.CaptionBatch, config: M6Config) -> layers.Model:
    """Whole model with weighted mean cross-entropy over the target text.

    Args:
        batch: tensors of the shapes given at `data.CaptionBatch`.
        config: sizes.

    Returns:
        Model with logits `[B, T, V]`.
    """
    table = token_table(config)
    patches = embed_image(batch.images, config)
    x = tf.concat([patches, embed_text(batch.source, table, config, "source")], axis=1)
    bias = source_bias(patches, batch.source_mask)
    for i in range(config.encoder_layers):
        x = encoder_layer(x, config, bias, name=f"encoder_{i}")
    memory = layers.layer_norm(x, "encoder_norm")
    x = embed_text(batch.target, table, config, "target")
    for i in range(config.decoder_layers):
        x = decoder_layer(x, memory, config, bias, name=f"decoder_{i}")
    logits = lm_head(x, table)
    return layers.Model(layers.weighted_cross_entropy(logits, batch.labels, batch.weights), logits, batch)


def _ffn(x: tf.Tensor, config: M6Config) -> tf.Tensor:
    y = layers.dense(layers.layer_norm(x, "ffn_norm"), config.ffn, "ffn_in", activation=layers.gelu, stddev=0.02,
                     seed=config.seed)
    return x + layers.dense(y, config.hidden, "ffn_out", stddev=0.02, seed=config.seed)
