"""GPT-2: transformer decoder, a language model that predicts the next token.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: normalisation before each block and
once after the last, residual projections scaled down at initialisation, tied embeddings.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class Gpt2Config:
    """Sizes of the decoder.

    Attributes:
        layers: number of decoder layers.
        hidden: width H of the residual stream; the feed-forward layer is four times as wide.
        heads: number of attention heads; divides `hidden`.
        vocab: number of tokens V.
        seq: sequence length S.
        dropout: probability of dropping activations and attention weights.
        dtype: "float32" or "float64".
        seed: seed of the initial values and of the dropout.
    """

    layers: int = 2
    hidden: int = 16
    heads: int = 2
    vocab: int = data.BYTE_VOCAB
    seq: int = 16
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls, layers: int = 2) -> Gpt2Config:
        """Hidden 16, sequences of 16 bytes: about 11,000 parameters."""
        return cls(layers=layers)

    @classmethod
    def small(cls) -> Gpt2Config:
        """The smallest published model: 124 million parameters."""
        return cls(layers=12, hidden=768, heads=12, vocab=50257, seq=1024)

    @classmethod
    def medium(cls) -> Gpt2Config:
        """24 layers of hidden 1,024: 355 million parameters."""
        return cls(layers=24, hidden=1024, heads=16, vocab=50257, seq=1024)

    @classmethod
    def xl(cls) -> Gpt2Config:
        """The largest published model: 1.5 billion parameters."""
        return cls(layers=48, hidden=1600, heads=25, vocab=50257, seq=1024)


def inputs(config: Gpt2Config, batch_size: Optional[int] = None) -> data.LanguageModelBatch:
    """Placeholders: tokens and labels, both int32 `[B, S]`."""
    return data.LanguageModelBatch(tf.placeholder(tf.int32, [batch_size, config.seq], name="tokens"),
                                   tf.placeholder(tf.int32, [batch_size, config.seq], name="labels"))


def embed(tokens: tf.Tensor, config: Gpt2Config, name: str = "embed") -> Tuple[tf.Tensor, tf.Variable]:
    """Sum of token and position embeddings.

    Args:
        tokens: int32 `[B, S]`.
        config: sizes.
        name: variable scope.

    Returns:
        Activations `[B, S, H]` and the token table `[V, H]`, which `lm_head` shares.
    """
    dtype = tf.as_dtype(config.dtype)
    with tf.variable_scope(name):
        table = layers.embedding_table(config.vocab, config.hidden, "tokens", dtype, seed=config.seed)
        positions = layers.embedding_table(config.seq, config.hidden, "positions", dtype, 0.01, config.seed)
        x = layers.embedding_lookup(table, tokens) + positions
        return layers.dropout(x, config.dropout, config.seed), table


def decoder_layer(x: tf.Tensor, config: Gpt2Config, name: str = "layer") -> tf.Tensor:
    """One decoder layer: causal self-attention and feed-forward, normalised on entry, added to the residual.

    Args:
        x: `[B, S, H]`.
        config: sizes.
        name: variable scope.

    Returns:
        `[B, S, H]`.
    """
    residual_stddev = 0.02 / math.sqrt(2.0 * config.layers)
    with tf.variable_scope(name):
        attended = causal_attention(layers.layer_norm(x, "attention_norm"), config, residual_stddev)
        x = x + layers.dropout(attended, config.dropout, config.seed)
        y = layers.dense(layers.layer_norm(x, "ffn_norm"), 4 * config.hidden, "ffn_in", activation=layers.gelu_tanh,
                         stddev=0.02, seed=config.seed)
        y = layers.dense(y, config.hidden, "ffn_out", stddev=residual_stddev, seed=config.seed)
        return x + layers.dropout(y, config.dropout, config.seed + 1)


def causal_attention(x: tf.Tensor, config: Gpt2Config, output_stddev: float, name: str = "attention") -> tf.Tensor:
    """Self-attention with one joint projection for queries, keys and values: `[B, S, H]` to `[B, S, H]`.

    Args:
        x: `[B, S, H]`.
        config: sizes.
        output_stddev: deviation of the output projection's initial values.
        name: variable scope.
    """
    with tf.variable_scope(name):
        joint = layers.dense(x, 3 * config.hidden, "qkv", stddev=0.02, seed=config.seed)
        query, key, value = [layers.split_heads(part, config.heads) for part in tf.split(joint, 3, axis=2)]
        context = layers.dot_product_attention(query, key, value, layers.causal_bias(int(x.shape[1]), x.dtype),
                                               dropout_rate=config.dropout, seed=config.seed)
        return layers.dense(layers.merge_heads(context), config.hidden, "output", stddev=output_stddev,
                            seed=config.seed)


def lm_head(x: tf.Tensor, table: tf.Variable, name: str = "lm_head") -> tf.Tensor:
    """Final normalisation and tied softmax weights: `[B, S, H]` and table `[V, H]` to logits `[B, S, V]`."""
    with tf.variable_scope(name):
        return layers.tied_logits(layers.layer_norm(x, "norm"), table)


def build(batch: data.LanguageModelBatch, config: Gpt2Config) -> layers.Model:
    """Whole model with mean cross-entropy over all positions.

    Args:
        batch: tokens and labels, both `[B, S]`.
        config: sizes.

    Returns:
        Model with logits `[B, S, V]`.
    """
    x, table = embed(batch.tokens, config)
    for i in range(config.layers):
        x = decoder_layer(x, config, name=f"layer_{i}")
    logits = lm_head(x, table)
    return layers.Model(layers.mean_cross_entropy(logits, batch.labels), logits, batch)
