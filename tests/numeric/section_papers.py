"""Losses over a whole mini-batch from papers, as their public implementations write them."""
from __future__ import annotations

from typing import Dict, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tests.numeric.cases import Inputs
from tests.numeric.script import dense, rng, weight
from tests.numeric.section_styles import CLASSES, WIDTH, Loss

TOKENS, QUEUE = 3, 24


def _errors(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_sum(tf.square(z - inputs["target"]), 1)


def set_attention(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Examples attend to each other (set transformer, inter-sample attention), beside what each has of its own."""
    query, key, value = (dense(z, WIDTH, name) for name in ("query", "key", "value"))
    mixed = z + tf.matmul(tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 2.0), value)
    seeds = weight("seeds", [2, WIDTH], "float64", 1.0)
    pooled = tf.matmul(tf.nn.softmax(tf.matmul(seeds, mixed, transpose_b=True)), mixed)
    return tf.reduce_mean(_errors(dense(mixed, WIDTH, "after"), inputs)) + 0.1 * tf.reduce_sum(tf.square(pooled))


def causal_attention(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """The batch as one sequence, two heads."""
    heads = [tf.transpose(tf.reshape(dense(z, WIDTH, name), [1, -1, 2, WIDTH // 2]), [0, 2, 1, 3]) for name in "qkv"]
    scores = tf.matmul(heads[0], heads[1], transpose_b=True)
    mask = tf.linalg.band_part(tf.ones([tf.shape(scores)[2]] * 2, z.dtype), -1, 0)
    mixed = tf.matmul(tf.nn.softmax(scores * mask - 1e9 * (1.0 - mask)), heads[2])
    return tf.reduce_mean(_errors(z + tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, WIDTH]), inputs))


def longest_sequence(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Sequences are cut at the length of the longest one, and their tokens are chosen by a mask."""
    tokens = tf.tanh(z[:, None, :] * tf.constant(np.linspace(0.5, 1.5, TOKENS))[None, :, None])
    lengths = inputs["label"] % 2 + 1
    longest = tf.reduce_max(lengths)
    chosen = tf.boolean_mask(tokens[:, :longest], tf.sequence_mask(lengths, longest))
    return tf.sqrt(tf.reduce_mean(tf.square(tf.matmul(chosen, weight("out", [WIDTH, WIDTH], "float64")) - 0.3)))


def branches_of_kinds(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A curriculum: the mean, the largest, or the root of the mean of the examples' losses."""
    errors = _errors(z, inputs)
    return tf.case([(tf.reduce_mean(errors) > 0.1, lambda: tf.reduce_mean(errors)),
                    (tf.reduce_min(errors) < 0.5, lambda: tf.reduce_max(errors))],
                   default=lambda: tf.sqrt(tf.reduce_mean(errors)))


def group_weights(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Group DRO: groups get weights by their losses, which are kept from step to step."""
    kept = tf.get_variable("group_weights", [CLASSES], tf.float64, tf.constant_initializer(1.0 / CLASSES), trainable=False)
    errors = _errors(z, inputs)
    counts = tf.unsorted_segment_sum(tf.ones_like(errors), inputs["label"], CLASSES)
    losses = tf.unsorted_segment_sum(errors, inputs["label"], CLASSES) / tf.maximum(counts, tf.ones_like(counts))
    weights = kept * tf.exp(0.1 * tf.stop_gradient(losses))
    weights = tf.assign(kept, weights / tf.reduce_sum(weights))
    return tf.reduce_sum(weights * losses) + 0.1 * tf.reduce_max(losses)


def semi_hard_triplets(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """FaceNet's loss, over all triplets in one matrix of `[B * B, B]`."""
    distances = tf.reduce_sum(tf.square(z[:, None] - z[None]), -1)
    labels = tf.reshape(inputs["label"], [tf.shape(inputs["label"])[0], 1])
    alike, count = tf.equal(labels, tf.transpose(labels)), tf.size(labels)
    tiled = tf.tile(distances, [count, 1])
    farther = tf.logical_and(tf.tile(tf.logical_not(alike), [count, 1]),
                             tf.greater(tiled, tf.reshape(tf.transpose(distances), [-1, 1])))
    is_any = tf.transpose(tf.reshape(tf.reduce_any(farther, 1, keepdims=True), [count, count]))
    most = tf.reduce_max(tiled, 1, keepdims=True)
    nearest = tf.reduce_min((tiled - most) * tf.cast(farther, z.dtype), 1, keepdims=True) + most
    apart = tf.cast(tf.logical_not(alike), z.dtype)
    least = tf.reduce_min(distances, 1, keepdims=True)
    farthest = tf.reduce_max((distances - least) * apart, 1, keepdims=True) + least
    negatives = tf.where(is_any, tf.transpose(tf.reshape(nearest, [count, count])), tf.tile(farthest, [1, count]))
    positives = tf.cast(alike, z.dtype) - tf.linalg.diag(tf.ones([count], z.dtype))
    return tf.truediv(tf.reduce_sum(tf.nn.relu((0.5 + distances - negatives) * positives)), tf.reduce_sum(positives))


def total_correlation(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Beta-TCVAE: densities of every latent under all examples' posteriors."""
    mean, log_variance = dense(z, WIDTH, "mean"), dense(z, WIDTH, "log_variance")
    latent = mean + tf.exp(0.5 * log_variance) * inputs["target"]
    density = -0.5 * (log_variance[None] + tf.square(latent[:, None] - mean[None]) * tf.exp(-log_variance[None]))
    joint = tf.reduce_logsumexp(tf.reduce_sum(density, 2), 1)
    return tf.reduce_mean(joint - tf.reduce_sum(tf.reduce_logsumexp(density, 1), 1)) + tf.reduce_mean(_errors(latent, inputs))


def void_lovasz(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """The Lovasz hinge over all elements, which a condition guards against there being none."""
    logits, truth = tf.reshape(z, [-1]), tf.reshape(tf.cast(inputs["target"] > 0.2, z.dtype), [-1])

    def hinge() -> tf.Tensor:
        errors, order = tf.nn.top_k(1.0 - logits * (2.0 * truth - 1.0), k=tf.shape(logits)[0])
        ordered = tf.gather(truth, order)
        jaccard = 1.0 - (tf.reduce_sum(ordered) - tf.cumsum(ordered)) / (tf.reduce_sum(ordered) + tf.cumsum(1.0 - ordered))
        steps = tf.concat([jaccard[:1], jaccard[1:] - jaccard[:-1]], 0)
        return tf.tensordot(tf.nn.relu(errors), tf.stop_gradient(steps), 1)

    return tf.cond(tf.equal(tf.size(logits), 0), lambda: 0.0 * tf.reduce_sum(logits), hinge)


def momentum_queue(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """MoCo: negatives are the keys of earlier mini-batches, kept in a queue."""
    queue = tf.get_variable("queue", initializer=tf.constant(rng("queue").randn(WIDTH, QUEUE)), trainable=False)
    query = tf.nn.l2_normalize(z, 1, epsilon=1e-3)
    key = tf.stop_gradient(tf.nn.l2_normalize(inputs["target"] + z, 1))
    logits = tf.concat([tf.reduce_sum(query * key, 1, keepdims=True), tf.matmul(query, queue)], 1) / 0.5
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.zeros([tf.shape(z)[0]], tf.int32), logits=logits))
    with tf.control_dependencies([loss]):
        update = tf.assign(queue, tf.concat([queue[:, tf.shape(key)[0]:], tf.transpose(key)], 1))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return loss


def sinkhorn_until(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Entropic transport between the batch and its targets, in a loop that ends when it changes little."""
    cost = tf.reduce_sum(tf.square(z[:, None] - inputs["target"][None]), -1)
    share = tf.fill([tf.shape(z)[0]], 1.0 / tf.cast(tf.shape(z)[0], z.dtype))

    def potential(u: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        return u[:, None] + v[None] - cost

    def balance(i: tf.Tensor, u: tf.Tensor, v: tf.Tensor, _: tf.Tensor) -> Tuple[tf.Tensor, ...]:
        new = u + tf.math.log(share) - tf.reduce_logsumexp(potential(u, v), 1)
        other = v + tf.math.log(share) - tf.reduce_logsumexp(potential(new, v), 0)
        return i + 1, new, other, tf.reduce_sum(tf.abs(new - u))

    start = [0, tf.zeros_like(share), tf.zeros_like(share), tf.ones([], z.dtype)]
    _, u, v, _ = tf.while_loop(lambda i, u, v, change: tf.logical_and(i < 4, change > 1e-6), balance, start)
    return tf.reduce_sum(tf.exp(potential(u, v)) * cost)


PAPERS: Dict[str, Loss] = {
    loss.__name__: loss for loss in (
        set_attention, causal_attention, longest_sequence, branches_of_kinds, group_weights, semi_hard_triplets,
        total_correlation, void_lovasz, momentum_queue, sinkhorn_until)
}
