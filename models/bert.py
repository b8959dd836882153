"""BERT: bidirectional transformer encoder with a masked language model.

Source: Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", 2019. Layers are normalised after each residual addition, as there.

The stages `embed`, `encoder_layer` (once per layer), `mlm_head` and `next_sentence_head` can be called one by one, each
inside a `with` block of the caller's choice:

    x, table = bert.embed(batch.tokens, config, batch.segments)
    for i in range(config.layers):
        x = bert.encoder_layer(x, config, name="layer_%d" % i)
    logits = bert.mlm_head(x, batch.positions, table, config)
    loss = bert.mlm_loss(logits, batch)
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class BertConfig:
    """Sizes of the encoder.

    Attributes:
        layers: number of encoder layers.
        hidden: width H of the residual stream.
        heads: number of attention heads; divides `hidden`.
        ffn: width of the feed-forward layer.
        vocab: number of tokens V.
        seq: sequence length S.
        predictions: masked positions P per sequence.
        segments: number of segment types.
        next_sentence: whether to add the pooler and the next-sentence prediction.
        dropout: probability of dropping activations and attention weights.
        dtype: "float32" or "float64".
        seed: seed of the initial values and of the dropout.
    """

    layers: int = 2
    hidden: int = 16
    heads: int = 2
    ffn: int = 32
    vocab: int = data.BYTE_VOCAB
    seq: int = 16
    predictions: int = 2
    segments: int = 2
    next_sentence: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls, layers: int = 2) -> BertConfig:
        """Hidden 16, two heads, sequences of 16 bytes: about 9,600 parameters."""
        return cls(layers=layers)

    @classmethod
    def small(cls) -> BertConfig:
        """Four layers of hidden 256 on sequences of 64 bytes: 3.3 million parameters."""
        return cls(layers=4, hidden=256, heads=4, ffn=1024, seq=64, predictions=10)

    @classmethod
    def base(cls) -> BertConfig:
        """BERT-Base of the paper, section 3: 110 million parameters."""
        return cls(layers=12, hidden=768, heads=12, ffn=3072, vocab=30522, seq=512, predictions=76, next_sentence=True)

    @classmethod
    def large(cls) -> BertConfig:
        """BERT-Large of the paper, section 3: 340 million parameters."""
        return cls(layers=24, hidden=1024, heads=16, ffn=4096, vocab=30522, seq=512, predictions=76,
                   next_sentence=True)


def inputs(config: BertConfig, batch_size: Optional[int] = None) -> data.MaskedLmBatch:
    """Placeholders of a masked language model batch; shapes as in `data.MaskedLmBatch`."""
    def ints(name: str, *dims: int) -> tf.Tensor:
        return tf.placeholder(tf.int32, [batch_size] + list(dims), name=name)

    return data.MaskedLmBatch(
        tokens=ints("tokens", config.seq), segments=ints("segments", config.seq),
        positions=ints("positions", config.predictions), labels=ints("labels", config.predictions),
        weights=tf.placeholder(config.dtype, [batch_size, config.predictions], name="weights"),
        next_sentence=ints("next_sentence"))


def embed(tokens: tf.Tensor, config: BertConfig, segments: Optional[tf.Tensor] = None,
          name: str = "embed") -> Tuple[tf.Tensor, tf.Variable]:
    """Sum of token, position and segment embeddings, normalised.

    Args:
        tokens: int32 `[B, S]`.
        config: sizes.
        segments: int32 `[B, S]`, or None for no segment embeddings.
        name: variable scope.

    Returns:
        Activations `[B, S, H]` and the token table `[V, H]`, which `mlm_head` shares.
    """
    dtype, seed = tf.as_dtype(config.dtype), config.seed
    with tf.variable_scope(name):
        table = layers.embedding_table(config.vocab, config.hidden, "tokens", dtype, seed=seed)
        positions = layers.embedding_table(config.seq, config.hidden, "positions", dtype, seed=seed)
        x = layers.embedding_lookup(table, tokens) + positions
        if segments is not None:
            kinds = layers.embedding_table(config.segments, config.hidden, "segments", dtype, seed=seed)
            # Few rows: a product with one-hot rows, as in the authors' code, has a dense gradient.
            one_hot = tf.one_hot(segments, config.segments, dtype=dtype)
            x = x + layers.unfold(tf.matmul(layers.fold(one_hot), kinds), one_hot)
        return layers.dropout(layers.layer_norm(x, "norm"), config.dropout, seed), table


def encoder_layer(x: tf.Tensor, config: BertConfig, bias: Optional[tf.Tensor] = None,
                  name: str = "layer") -> tf.Tensor:
    """One encoder layer: self-attention and feed-forward, each with residual and normalisation.

    Args:
        x: `[B, S, H]`.
        config: sizes.
        bias: scores added to the attention, `[B, 1, 1, S]` (see `layers.padding_bias`), or None without padding.
        name: variable scope.

    Returns:
        `[B, S, H]`.
    """
    stddev, seed = 0.02, config.seed
    with tf.variable_scope(name):
        attended = layers.multi_head_attention(x, x, config.heads, "attention", bias, dropout_rate=config.dropout,
                                               stddev=stddev, seed=seed)
        x = layers.layer_norm(x + layers.dropout(attended, config.dropout, seed), "attention_norm")
        y = layers.dense(x, config.ffn, "ffn_in", activation=layers.gelu, stddev=stddev, seed=seed)
        y = layers.dense(y, config.hidden, "ffn_out", stddev=stddev, seed=seed)
        return layers.layer_norm(x + layers.dropout(y, config.dropout, seed + 1), "ffn_norm")


def mlm_head(x: tf.Tensor, positions: tf.Tensor, table: tf.Variable, config: BertConfig,
             name: str = "mlm_head") -> tf.Tensor:
    """Predictions at the masked positions, by the tied embedding table.

    Args:
        x: `[B, S, H]`.
        positions: int32 `[B, P]`, the masked positions of each sequence.
        table: token table `[V, H]` from `embed`.
        config: sizes.
        name: variable scope.

    Returns:
        Logits `[B, P, V]`.
    """
    with tf.variable_scope(name):
        # Selecting rows by a batched product keeps each sequence by itself and its gradient a MatMul.
        masked = tf.matmul(tf.one_hot(positions, config.seq, dtype=x.dtype), x)
        masked = layers.dense(masked, config.hidden, "transform", activation=layers.gelu, stddev=0.02,
                              seed=config.seed)
        return layers.tied_logits(layers.layer_norm(masked, "norm"), table, use_bias=True)


def mlm_loss(logits: tf.Tensor, batch: data.MaskedLmBatch) -> tf.Tensor:
    """Weighted mean cross-entropy of logits `[B, P, V]` over the masked positions: a scalar."""
    return layers.weighted_cross_entropy(logits, batch.labels, batch.weights)


def next_sentence_head(x: tf.Tensor, config: BertConfig, name: str = "next_sentence") -> tf.Tensor:
    """Pooler over the first position and two-way classifier: `[B, S, H]` to logits `[B, 2]`."""
    with tf.variable_scope(name):
        pooled = layers.dense(x[:, 0], config.hidden, "pooler", activation=tf.tanh, stddev=0.02, seed=config.seed)
        return layers.dense(pooled, 2, "classifier", stddev=0.02, seed=config.seed)


def build(batch: data.MaskedLmBatch, config: BertConfig) -> layers.Model:
    """Whole model: masked language model loss, plus the next-sentence loss where the configuration asks for it.

    Args:
        batch: tensors of the shapes given at `data.MaskedLmBatch`.
        config: sizes.

    Returns:
        Model with logits `[B, P, V]`.
    """
    x, table = embed(batch.tokens, config, batch.segments)
    for i in range(config.layers):
        x = encoder_layer(x, config, name=f"layer_{i}")
    logits = mlm_head(x, batch.positions, table, config)
    loss = mlm_loss(logits, batch)
    if config.next_sentence:
        loss = loss + layers.mean_cross_entropy(next_sentence_head(x, config), batch.next_sentence)
    return layers.Model(loss, logits, batch)
