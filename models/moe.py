"""Mixture-of-experts transformer: a language model whose feed-forward layers are sets of experts.

Sources: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020
(algorithm 1: top-2 gating, capacity, auxiliary loss; section 3.2: einsum dispatch and combine); Fedus, Zoph and
Shazeer, "Switch Transformers", 2021 (section 2.1 and 2.2: top-1 gating). GShard's groups are the sequences of the
mini-batch here, so gating never looks across examples; its second expert is always used, not at random. As there,
first choices are served before second ones: where the capacity binds, a later token may displace an earlier one.

Stages: `embed`, `attention_block`, then `ffn_block`, or `gating_dispatch` and `experts`, and `lm_head`:

    with wh.replicate(n):
        combine, dispatched, auxiliary = moe.gating_dispatch(x, config)
    with wh.split(n):
        y = moe.experts(combine, dispatched, config)
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of the model.

    Attributes:
        layers: number of transformer layers.
        hidden: width H of the residual stream.
        heads: number of attention heads; divides `hidden`.
        ffn: width F of a feed-forward layer, and of each expert.
        experts: number of experts E of a layer.
        top_k: experts used by each token, 1 or 2.
        capacity_factor: room of the experts as a multiple of an even load.
        moe_every: the feed-forward layer of every n-th transformer layer is a mixture.
        auxiliary_weight: weight of the load-balance loss.
        vocab: number of tokens V.
        seq: sequence length S.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    layers: int = 2
    hidden: int = 16
    heads: int = 2
    ffn: int = 32
    experts: int = 4
    top_k: int = 2
    capacity_factor: float = 1.25
    moe_every: int = 2
    auxiliary_weight: float = 0.01
    vocab: int = data.BYTE_VOCAB
    seq: int = 16
    dtype: str = "float32"
    seed: int = 0

    @property
    def capacity(self) -> int:
        """Tokens C of one sequence which one expert takes at most."""
        return int(math.ceil(self.top_k * self.seq * self.capacity_factor / self.experts))

    @classmethod
    def tiny(cls, top_k: int = 2) -> MoeConfig:
        """Four experts in one of two layers: about 12,000 parameters."""
        return cls(top_k=top_k)

    @classmethod
    def gshard_10b(cls) -> MoeConfig:
        """16 layers, 32 experts in every second one: the shape of MoE-32E-10B (Zhang et al. 2023, Rhino, table 2)."""
        return cls(layers=16, hidden=1536, heads=16, ffn=12288, experts=32, vocab=32000, seq=1024)

    @classmethod
    def m6_100b(cls) -> MoeConfig:
        """M6-T with 100 billion parameters (Yang et al. 2021): 24 layers of 512 experts."""
        return cls(layers=24, hidden=1024, heads=16, ffn=4096, experts=512, top_k=1, moe_every=1, vocab=21128, seq=512)

    @classmethod
    def m6_1t(cls) -> MoeConfig:
        """M6-T with a trillion parameters (Yang et al. 2021): 24 layers of 960 wider experts."""
        return cls(layers=24, hidden=1024, heads=16, ffn=21248, experts=960, top_k=1, moe_every=1, vocab=21128, seq=512)


class Gating(NamedTuple):
    """Result of `gating_dispatch`.

    Attributes:
        combine: weight of each expert's slot for each token, `[B, S, E, C]`.
        dispatched: the experts' inputs, `[E, B, C, H]`.
        auxiliary: load-balance loss, a scalar.
    """

    combine: tf.Tensor
    dispatched: tf.Tensor
    auxiliary: tf.Tensor


def inputs(config: MoeConfig, batch_size: Optional[int] = None) -> data.LanguageModelBatch:
    """Placeholders: tokens and labels, both int32 `[B, S]`."""
    return data.LanguageModelBatch(tf.placeholder(tf.int32, [batch_size, config.seq], name="tokens"),
                                   tf.placeholder(tf.int32, [batch_size, config.seq], name="labels"))


def embed(tokens: tf.Tensor, config: MoeConfig, name: str = "embed") -> Tuple[tf.Tensor, tf.Variable]:
    """Token and position embeddings of tokens `[B, S]`: activations `[B, S, H]` and the token table `[V, H]`."""
    dtype = tf.as_dtype(config.dtype)
    with tf.variable_scope(name):
        table = layers.embedding_table(config.vocab, config.hidden, "tokens", dtype, seed=config.seed)
        positions = layers.embedding_table(config.seq, config.hidden, "positions", dtype, 0.01, config.seed)
        return layers.embedding_lookup(table, tokens) + positions, table


def attention_block(x: tf.Tensor, config: MoeConfig, name: str = "attention") -> tf.Tensor:
    """Normalisation, causal self-attention and residual: `[B, S, H]` to `[B, S, H]`."""
    with tf.variable_scope(name):
        y = layers.layer_norm(x, "norm")
        bias = layers.causal_bias(config.seq, x.dtype)
        return x + layers.multi_head_attention(y, y, config.heads, "heads", bias, seed=config.seed)


def ffn_block(x: tf.Tensor, config: MoeConfig, name: str = "ffn") -> tf.Tensor:
    """Normalisation, dense feed-forward layer and residual: `[B, S, H]` to `[B, S, H]`."""
    with tf.variable_scope(name):
        y = layers.dense(layers.layer_norm(x, "norm"), config.ffn, "in", activation=tf.nn.relu, seed=config.seed)
        return x + layers.dense(y, config.hidden, "out", seed=config.seed)


def gating_dispatch(x: tf.Tensor, config: MoeConfig, name: str = "gating") -> Gating:
    """Choose experts for every token and send the tokens to them (GShard, algorithm 1).

    Tokens beyond an expert's capacity are not sent to it: the residual connection alone carries them on.

    Args:
        x: normalised activations `[B, S, H]`.
        config: sizes.
        name: variable scope; holds the gate's kernel `[H, E]`.
    """
    with tf.variable_scope(name):
        logits = layers.dense(x, config.experts, "gate", use_bias=False, seed=config.seed)
        gates = tf.nn.softmax(logits)  # [B, S, E]
        first = tf.one_hot(tf.argmax(gates, axis=-1, output_type=tf.int32), config.experts, dtype=x.dtype)
        auxiliary = load_balance_loss(gates, first)
        slots = [_assign_slots(first, None, config)]  # each [B, S, E, C]
        weights = [tf.reduce_sum(gates * first, axis=-1, keepdims=True)]  # each [B, S, 1]
        if config.top_k == 2:
            others = gates * (1.0 - first)
            second = tf.one_hot(tf.argmax(others, axis=-1, output_type=tf.int32), config.experts, dtype=x.dtype)
            slots.append(_assign_slots(second, first, config))
            weights.append(tf.reduce_sum(gates * second, axis=-1, keepdims=True))
            total = weights[0] + weights[1]
            weights = [weight / total for weight in weights]
        combine = _sum([slot * tf.expand_dims(weight, -1) for slot, weight in zip(slots, weights)])
        return Gating(combine, tf.einsum("bsec,bsh->ebch", _sum(slots), x), auxiliary)


def load_balance_loss(gates: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    """E * sum_e(share of tokens of e * mean gate of e), averaged over sequences (Switch Transformers, equation 4).

    Args:
        gates: probabilities `[B, S, E]`.
        chosen: 1 at the first choice of each token, `[B, S, E]`.

    Returns:
        Scalar; 1 for an even load.
    """
    share, gate = tf.reduce_mean(chosen, axis=1), tf.reduce_mean(gates, axis=1)
    return tf.reduce_mean(tf.reduce_sum(share * gate, axis=-1)) * layers.last_dim(gates)


def _assign_slots(chosen: tf.Tensor, earlier: Optional[tf.Tensor], config: MoeConfig) -> tf.Tensor:
    """Give each token the next free slot of its expert.

    Args:
        chosen: 1 at the expert of each token, `[B, S, E]`.
        earlier: choices that were served before these, `[B, S, E]`, or None.
        config: sizes.

    Returns:
        1 at the expert and slot of each token that found room, `[B, S, E, C]`.
    """
    slot = tf.cumsum(chosen, axis=1, exclusive=True)
    if earlier is not None:
        slot = slot + tf.reduce_sum(earlier, axis=1, keepdims=True)
    own_slot = tf.cast(tf.reduce_sum(slot * chosen, axis=-1), tf.int32)  # [B, S]
    # A slot beyond the capacity has a row of zeros.
    one_hot = tf.one_hot(own_slot, config.capacity, dtype=chosen.dtype)
    return tf.expand_dims(chosen, 3) * tf.expand_dims(one_hot, 2)


def experts(combine: tf.Tensor, dispatched: tf.Tensor, config: MoeConfig, name: str = "experts") -> tf.Tensor:
    """Feed-forward layer of each expert on its tokens, and the weighted sum per token.

    Args:
        combine: `[B, S, E, C]`.
        dispatched: `[E, B, C, H]`.
        config: sizes.
        name: variable scope; holds `kernel_in` `[E, H, F]` and `kernel_out` `[E, F, H]`.

    Returns:
        `[B, S, H]`.
    """
    sizes, dtype = [config.experts, config.hidden, config.ffn], dispatched.dtype
    stddev = layers.glorot_stddev(config.hidden, config.ffn)
    with tf.variable_scope(name):
        kernel_in = layers.normal_variable("kernel_in", sizes, stddev, dtype, config.seed)
        kernel_out = layers.normal_variable("kernel_out", [sizes[0], sizes[2], sizes[1]], stddev, dtype, config.seed)
        y = tf.nn.relu(tf.einsum("ebch,ehf->ebcf", dispatched, kernel_in))
        y = tf.einsum("ebcf,efh->ebch", y, kernel_out)
        return tf.einsum("bsec,ebch->bsh", combine, y)


def moe_block(x: tf.Tensor, config: MoeConfig, name: str = "moe") -> Tuple[tf.Tensor, tf.Tensor]:
    """Normalisation, mixture of experts and residual: `[B, S, H]` to `[B, S, H]` and the load-balance loss."""
    with tf.variable_scope(name):
        gating = gating_dispatch(layers.layer_norm(x, "norm"), config)
        return x + experts(gating.combine, gating.dispatched, config), gating.auxiliary


def lm_head(x: tf.Tensor, table: tf.Variable, name: str = "lm_head") -> tf.Tensor:
    """Final normalisation and tied softmax weights: `[B, S, H]` and table `[V, H]` to logits `[B, S, V]`."""
    with tf.variable_scope(name):
        return layers.tied_logits(layers.layer_norm(x, "norm"), table)


def build(batch: data.LanguageModelBatch, config: MoeConfig) -> layers.Model:
    """Whole model: mean cross-entropy plus the weighted load-balance losses.

    Args:
        batch: tokens and labels, both `[B, S]`.
        config: sizes.

    Returns:
        Model with logits `[B, S, V]`.
    """
    x, table = embed(batch.tokens, config)
    auxiliaries: List[tf.Tensor] = []
    for i in range(config.layers):
        with tf.variable_scope(f"layer_{i}"):
            x = attention_block(x, config)
            if (i + 1) % config.moe_every:
                x = ffn_block(x, config)
            else:
                x, auxiliary = moe_block(x, config)
                auxiliaries.append(auxiliary)
    logits = lm_head(x, table)
    loss = layers.mean_cross_entropy(logits, batch.labels) + config.auxiliary_weight * _sum(auxiliaries)
    return layers.Model(loss, logits, batch)


def _sum(tensors: List[tf.Tensor]) -> tf.Tensor:
    """Sum of tensors of one shape."""
    return tensors[0] if len(tensors) == 1 else tf.add_n(tensors)
