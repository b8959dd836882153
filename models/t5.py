"""T5: encoder-decoder transformer with relative position bias, trained to restore spans cut out of a text.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
section 2.1: normalisation without mean and bias, no biases in dense layers, unscaled dot products, relative position
biases shared by all layers of a stack, embeddings shared by encoder, decoder and softmax.

Stages: `embed`, `position_bias`, `encoder_layer`, `final_norm`, `decoder_layer`, `lm_head`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class T5Config:
    """Sizes of the model.

    Attributes:
        encoder_layers: number of encoder layers.
        decoder_layers: number of decoder layers.
        hidden: width H of the residual stream.
        heads: number of attention heads.
        head_width: width of a head; heads * head_width need not be `hidden`.
        ffn: width of the feed-forward layer.
        vocab: number of tokens V.
        source: source length S.
        target: target length T.
        buckets: number of relative position buckets.
        max_distance: distance from which on all positions share a bucket.
        dropout: probability of dropping activations and attention weights.
        dtype: "float32" or "float64".
        seed: seed of the initial values and of the dropout.
    """

    encoder_layers: int = 2
    decoder_layers: int = 2
    hidden: int = 16
    heads: int = 2
    head_width: int = 8
    ffn: int = 32
    vocab: int = data.BYTE_VOCAB
    source: int = 16
    target: int = 8
    buckets: int = 8
    max_distance: int = 16
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls) -> T5Config:
        """Two layers each of hidden 16 on bytes: about 15,000 parameters."""
        return cls()

    @classmethod
    def small(cls) -> T5Config:
        """T5-Small (paper, section 3.7): 60 million parameters."""
        return cls(6, 6, 512, 8, 64, 2048, 32128, 512, 114, 32, 128)

    @classmethod
    def base(cls) -> T5Config:
        """T5-Base: 220 million parameters."""
        return cls(12, 12, 768, 12, 64, 3072, 32128, 512, 114, 32, 128)

    @classmethod
    def large(cls) -> T5Config:
        """T5-Large: 770 million parameters by the paper's count."""
        return cls(24, 24, 1024, 16, 64, 4096, 32128, 512, 114, 32, 128)


def inputs(config: T5Config, batch_size: Optional[int] = None) -> data.Seq2SeqBatch:
    """Placeholders of a source and target batch; shapes as in `data.Seq2SeqBatch`."""
    source, target = [batch_size, config.source], [batch_size, config.target]
    return data.Seq2SeqBatch(
        source=tf.placeholder(tf.int32, source, name="source"),
        source_mask=tf.placeholder(config.dtype, source, name="source_mask"),
        target=tf.placeholder(tf.int32, target, name="target"),
        labels=tf.placeholder(tf.int32, target, name="labels"),
        weights=tf.placeholder(config.dtype, target, name="weights"))


def token_table(config: T5Config, name: str = "tokens") -> tf.Variable:
    """Embedding table `[V, H]` which encoder, decoder and softmax share."""
    return layers.embedding_table(config.vocab, config.hidden, name, tf.as_dtype(config.dtype), 1.0, config.seed)


def embed(tokens: tf.Tensor, table: tf.Variable, config: T5Config) -> tf.Tensor:
    """Rows of `table` `[V, H]` for tokens `[B, S]`: `[B, S, H]`. There are no position embeddings."""
    return layers.dropout(layers.embedding_lookup(table, tokens), config.dropout, config.seed)


def relative_buckets(queries: int, keys: int, config: T5Config, bidirectional: bool) -> np.ndarray:
    """Bucket of each pair of positions: exact for small distances, logarithmic up to `max_distance`.

    Args:
        queries: number of query positions Sq.
        keys: number of key positions Sk.
        config: number of buckets and greatest distance.
        bidirectional: whether later keys have buckets of their own (encoder) or share bucket 0 (decoder).

    Returns:
        int32 `[Sq, Sk]`, each in [0, buckets).
    """
    distance = np.arange(queries)[:, None] - np.arange(keys)[None, :]  # positive: the key is earlier
    buckets, offset = config.buckets, np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / np.log(config.max_distance / exact)
    far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


def position_bias(length: int, config: T5Config, bidirectional: bool, name: str) -> tf.Tensor:
    """Scores to add to self-attention by relative position, with the causal mask in the decoder.

    Args:
        length: number of positions S.
        config: sizes.
        bidirectional: True for the encoder, False for the decoder.
        name: variable scope; holds `table` `[buckets, heads]`.

    Returns:
        `[1, heads, S, S]`, the same for all layers of a stack.
    """
    dtype = tf.as_dtype(config.dtype)
    with tf.variable_scope(name):
        table = layers.embedding_table(config.buckets, config.heads, "table", dtype, config.hidden ** -0.5,
                                       config.seed)
        bias = layers.embedding_lookup(table, tf.constant(relative_buckets(length, length, config, bidirectional)))
        bias = tf.expand_dims(tf.transpose(bias, [2, 0, 1]), 0)
        return bias if bidirectional else bias + layers.causal_bias(length, dtype)


def attention(x: tf.Tensor, memory: tf.Tensor, config: T5Config, bias: tf.Tensor, name: str) -> tf.Tensor:
    """Multi-head attention of `x` `[B, Sq, H]` over `memory` `[B, Sk, H]` without biases and scaling: `[B, Sq, H]`.

    The initial values make up for the missing scaling. `bias` is broadcast to `[B, heads, Sq, Sk]`.
    """
    width, seed, stddev = config.heads * config.head_width, config.seed, config.hidden ** -0.5
    with tf.variable_scope(name):
        query = layers.dense(x, width, "query", use_bias=False, stddev=stddev * config.head_width ** -0.5, seed=seed)
        key = layers.dense(memory, width, "key", use_bias=False, stddev=stddev, seed=seed)
        value = layers.dense(memory, width, "value", use_bias=False, stddev=stddev, seed=seed)
        query, key, value = [layers.split_heads(part, config.heads) for part in (query, key, value)]
        context = layers.dot_product_attention(query, key, value, bias, 1.0, config.dropout, seed)
        return layers.dense(layers.merge_heads(context), config.hidden, "output", use_bias=False,
                            stddev=width ** -0.5, seed=seed)


def ffn(x: tf.Tensor, config: T5Config, name: str = "ffn") -> tf.Tensor:
    """Feed-forward layer with residual: `[B, S, H]` to `[B, S, H]`."""
    with tf.variable_scope(name):
        y = layers.dense(layers.rms_norm(x, "norm"), config.ffn, "in", activation=tf.nn.relu, use_bias=False,
                         stddev=config.hidden ** -0.5, seed=config.seed)
        y = layers.dense(y, config.hidden, "out", use_bias=False, stddev=config.ffn ** -0.5, seed=config.seed)
        return x + layers.dropout(y, config.dropout, config.seed)


def encoder_layer(x: tf.Tensor, config: T5Config, positions: tf.Tensor, padding: tf.Tensor,
                  name: str = "encoder_layer") -> tf.Tensor:
    """One encoder layer.

    Args:
        x: `[B, S, H]`.
        config: sizes.
        positions: `[1, heads, S, S]` from `position_bias`.
        padding: `[B, 1, 1, S]` from `layers.padding_bias`.
        name: variable scope.

    Returns:
        `[B, S, H]`.
    """
    with tf.variable_scope(name):
        y = layers.rms_norm(x, "attention_norm")
        y = attention(y, y, config, positions + padding, "attention")
        return ffn(x + layers.dropout(y, config.dropout, config.seed), config)


def decoder_layer(x: tf.Tensor, memory: tf.Tensor, config: T5Config, positions: tf.Tensor, padding: tf.Tensor,
                  name: str = "decoder_layer") -> tf.Tensor:
    """One decoder layer: self-attention, attention over the encoder's output, feed-forward.

    Args:
        x: `[B, T, H]`.
        memory: encoder output `[B, S, H]`.
        config: sizes.
        positions: `[1, heads, T, T]` from `position_bias`, causal.
        padding: `[B, 1, 1, S]` from `layers.padding_bias`, of the source.
        name: variable scope.

    Returns:
        `[B, T, H]`.
    """
    with tf.variable_scope(name):
        y = layers.rms_norm(x, "attention_norm")
        x = x + layers.dropout(attention(y, y, config, positions, "attention"), config.dropout, config.seed)
        y = layers.rms_norm(x, "cross_norm")
        x = x + layers.dropout(attention(y, memory, config, padding, "cross"), config.dropout, config.seed + 1)
        return ffn(x, config)


def final_norm(x: tf.Tensor, config: T5Config, name: str) -> tf.Tensor:
    """Normalisation after the last layer of a stack: `[B, S, H]` to `[B, S, H]`."""
    return layers.dropout(layers.rms_norm(x, name), config.dropout, config.seed)


def lm_head(x: tf.Tensor, table: tf.Variable, config: T5Config) -> tf.Tensor:
    """Softmax over the shared embeddings `[V, H]`, scaled by H**-0.5: `[B, T, H]` to logits `[B, T, V]`."""
    return layers.tied_logits(x * config.hidden ** -0.5, table)


def build(batch: data.Seq2SeqBatch, config: T5Config) -> layers.Model:
    """Whole model with weighted mean cross-entropy over the target.

    Args:
        batch: tensors of the shapes given at `data.Seq2SeqBatch`.
        config: sizes.

    Returns:
        Model with logits `[B, T, V]`.
    """
    table, padding = token_table(config), layers.padding_bias(batch.source_mask)
    x = embed(batch.source, table, config)
    positions = position_bias(config.source, config, True, "encoder_positions")
    for i in range(config.encoder_layers):
        x = encoder_layer(x, config, positions, padding, name=f"encoder_{i}")
    memory = final_norm(x, config, "encoder_norm")
    x = embed(batch.target, table, config)
    positions = position_bias(config.target, config, False, "decoder_positions")
    for i in range(config.decoder_layers):
        x = decoder_layer(x, memory, config, positions, padding, name=f"decoder_{i}")
    logits = lm_head(final_norm(x, config, "decoder_norm"), table, config)
    return layers.Model(layers.weighted_cross_entropy(logits, batch.labels, batch.weights), logits, batch)
