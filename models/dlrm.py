"""DLRM: recommendation model with embedding tables and pairwise interactions.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
section 2.

Stages: `bottom_mlp`, `embeddings`, `interaction`, `top_mlp`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers


@dataclass(frozen=True)
class DlrmConfig:
    """Sizes of the model.

    Attributes:
        dense: number of dense features D.
        table_rows: number of rows of each embedding table; one table per categorical feature.
        width: width W of an embedding, and of the bottom MLP's output.
        bottom: widths of the bottom MLP's hidden layers.
        top: widths of the top MLP's hidden layers.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    dense: int = 8
    table_rows: Tuple[int, ...] = (17,) * 6
    width: int = 8
    bottom: Tuple[int, ...] = (16,)
    top: Tuple[int, ...] = (16,)
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls) -> DlrmConfig:
        """Six tables of 17 rows, for `data.digit_records(6)`: about 1,600 parameters."""
        return cls()

    @classmethod
    def large_tables(cls) -> DlrmConfig:
        """26 tables of a million rows, 13 dense features, as on the Criteo data: 1.7 billion parameters."""
        return cls(dense=13, table_rows=(1000000,) * 26, width=64, bottom=(512, 256), top=(512, 256))


def inputs(config: DlrmConfig, batch_size: Optional[int] = None) -> data.ClickBatch:
    """Placeholders: dense `[B, D]`, categories int32 `[B, F]`, labels `[B]`."""
    return data.ClickBatch(
        tf.placeholder(config.dtype, [batch_size, config.dense], name="dense"),
        tf.placeholder(tf.int32, [batch_size, len(config.table_rows)], name="categories"),
        tf.placeholder(config.dtype, [batch_size], name="labels"))


def bottom_mlp(dense: tf.Tensor, config: DlrmConfig, name: str = "bottom") -> tf.Tensor:
    """Dense features `[B, D]` to `[B, W]`."""
    return _mlp(dense, config.bottom + (config.width,), config, name)


def embeddings(categories: tf.Tensor, config: DlrmConfig, name: str = "tables") -> List[tf.Tensor]:
    """One row `[B, W]` of each of the F tables, for categories `[B, F]`."""
    dtype = tf.as_dtype(config.dtype)
    with tf.variable_scope(name):
        return [layers.embedding_lookup(
            layers.embedding_table(rows, config.width, f"table_{i}", dtype, rows ** -0.5, config.seed),
            categories[:, i]) for i, rows in enumerate(config.table_rows)]


def interaction(dense: tf.Tensor, embedded: List[tf.Tensor]) -> tf.Tensor:
    """Dot products of all pairs of the F + 1 vectors `[B, W]`, appended to `dense`: `[B, W + (F + 1) F / 2]`."""
    vectors = tf.stack([dense] + embedded, axis=1)
    products = tf.matmul(vectors, vectors, transpose_b=True)
    return tf.concat([dense] + [products[:, i, :i] for i in range(1, len(embedded) + 1)], axis=1)


def top_mlp(x: tf.Tensor, config: DlrmConfig, name: str = "top") -> tf.Tensor:
    """Interactions `[B, W + (F + 1) F / 2]` to logits `[B]`."""
    x = _mlp(x, config.top, config, name)
    return tf.reshape(layers.dense(x, 1, name + "_logit", seed=config.seed), [layers.batch_size(x)])


def build(batch: data.ClickBatch, config: DlrmConfig) -> layers.Model:
    """Whole model with mean sigmoid cross-entropy.

    Args:
        batch: dense `[B, D]`, categories `[B, F]`, labels `[B]`.
        config: sizes.

    Returns:
        Model with logits `[B]`.
    """
    x = interaction(bottom_mlp(batch.dense, config), embeddings(batch.categories, config))
    logits = top_mlp(x, config)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch.labels, logits=logits)
    return layers.Model(tf.reduce_mean(losses), logits, batch)


def _mlp(x: tf.Tensor, widths: Tuple[int, ...], config: DlrmConfig, name: str) -> tf.Tensor:
    with tf.variable_scope(name):
        for i, width in enumerate(widths):
            x = layers.dense(x, width, f"layer_{i}", activation=tf.nn.relu,
                             stddev=layers.he_stddev(layers.last_dim(x)), seed=config.seed)
        return x
