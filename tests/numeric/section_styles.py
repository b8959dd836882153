"""Losses over a whole mini-batch, written in the ways that people write them: other ops for the same things."""
from __future__ import annotations

from typing import Callable, Dict, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tests.numeric.cases import Inputs
from tests.numeric.script import dense, joined, weight

Loss = Callable[[tf.Tensor, Inputs], tf.Tensor]
STYLES: Dict[str, Loss] = {}
WIDTH, CLASSES = 4, 3


def style(loss: Loss) -> Loss:
    STYLES.update(joined(STYLES, {loss.__name__: loss}))
    return loss


def _count(z: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(z)[0], z.dtype)


def _gram_distances(z: tf.Tensor) -> tf.Tensor:
    gram = tf.matmul(z, tf.transpose(z))
    square = tf.linalg.diag_part(gram)
    return tf.maximum(tf.expand_dims(square, 0) - 2.0 * gram + tf.expand_dims(square, 1), 1e-3)


def _same(inputs: Inputs) -> tf.Tensor:
    label = tf.reshape(inputs["label"], [-1, 1])
    return tf.math.equal(label, tf.transpose(label))


def _errors(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.math.reduce_sum(tf.math.squared_difference(z, inputs["target"]), axis=-1)


# -- pairs -------------------------------------------------------------------------------------------------------------


@style
def as_many_of_the_hardest(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A number that is counted over the examples is where a sorted vector, and columns, are cut."""
    count = tf.reduce_sum(tf.cast(inputs["score"] > 0.7, tf.int32))
    hardest = tf.sort(_errors(z, inputs), direction="DESCENDING")[:count]
    return tf.reduce_sum(hardest) / tf.reduce_sum(tf.ones([count], z.dtype)) + tf.reduce_mean(z[:, :count])


@style
def both_directions(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    logits = tf.tensordot(z, inputs["target"], [[1], [1]]) * tf.exp(weight("temperature", [], "float64", 0.5))
    rows, columns = tf.nn.log_softmax(logits, axis=1), tf.nn.log_softmax(logits, axis=0)
    return -0.5 * (tf.reduce_mean(tf.linalg.diag_part(rows)) + tf.reduce_mean(tf.linalg.diag_part(columns)))


@style
def one_hot_pairs(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    logits = tf.einsum("bi,ci->bc", z, inputs["target"])
    targets = tf.eye(tf.shape(logits)[0], dtype=z.dtype)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits))


@style
def distances_by_where(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    distances = tf.sqrt(_gram_distances(z))
    alike = tf.linalg.set_diag(_same(inputs), tf.zeros([tf.shape(z)[0]], tf.bool))
    near = tf.gather_nd(distances, tf.where(alike))
    far = tf.gather_nd(distances, tf.where(tf.logical_not(_same(inputs))))
    return tf.reduce_mean(near) + tf.reduce_mean(tf.nn.relu(2.0 - far))


@style
def tiled_pairs(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    count = tf.shape(z)[0]
    left = tf.reshape(tf.tile(z, [1, count]), [count * count, WIDTH])
    right = tf.tile(z, [count, 1])
    return tf.reduce_mean(tf.exp(-tf.reduce_sum(tf.square(left - right), -1)))


@style
def tiled_cube(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    count = tf.shape(z)[0]
    cube = tf.tile(tf.expand_dims(z, 0), tf.stack([count, 1, 1]))
    return tf.reduce_sum(tf.tanh(tf.reduce_sum(cube * tf.transpose(cube, [1, 0, 2]), 2))) / (_count(z) ** 2)


@style
def all_triplets(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    distances, same = _gram_distances(z), _same(inputs)
    apart = tf.logical_not(tf.cast(tf.eye(tf.shape(z)[0]), tf.bool))
    valid = tf.logical_and(tf.expand_dims(tf.logical_and(same, apart), 2), tf.expand_dims(tf.logical_not(same), 1))
    losses = tf.nn.relu(tf.expand_dims(distances, 2) - tf.expand_dims(distances, 1) + 0.5) * tf.cast(valid, z.dtype)
    return tf.reduce_sum(losses) / (tf.cast(tf.math.count_nonzero(losses > 1e-16), z.dtype) + 1e-16)


@style
def lifted(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    similarity = tf.matmul(tf.math.l2_normalize(z, -1, epsilon=1e-3), tf.math.l2_normalize(z, -1, epsilon=1e-3),
                           adjoint_b=True)
    mask = tf.where(_same(inputs), -1e9 * tf.ones_like(similarity), tf.zeros_like(similarity))
    return tf.reduce_mean(tf.math.reduce_logsumexp(similarity + mask, axis=-1))


@style
def listwise(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    truth = tf.nn.softmax(inputs["score"], axis=0)
    return -tf.reduce_sum(truth * tf.nn.log_softmax(tf.squeeze(z[:, :1], -1), axis=0))


@style
def positives_against_negatives(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    s = z[..., 1]
    positive, negative = (tf.boolean_mask(s, mask) for mask in (inputs["score"] > 0.5, inputs["score"] <= 0.5))
    return tf.reduce_mean(tf.square(tf.nn.relu(1.0 - (tf.expand_dims(positive, 1) - tf.expand_dims(negative, 0)))))


@style
def neighbour_graph(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    near = tf.math.top_k(-_gram_distances(inputs["target"]), k=3).indices
    return tf.reduce_mean(tf.square(tf.gather(z, near) - z[:, tf.newaxis]))


@style
def soft_ranks(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    s = z[:, 2]
    ranks = tf.reduce_sum(tf.sigmoid(s[:, tf.newaxis] - s[tf.newaxis, :]), -1)
    truth = tf.cast(tf.argsort(tf.argsort(inputs["score"])), z.dtype)
    return tf.reduce_mean(tf.square(ranks - truth))


@style
def upper_triangle(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    similarity = tf.matmul(z, z, transpose_b=True)
    return tf.reduce_mean(tf.square(tf.linalg.band_part(similarity, 0, -1) - tf.linalg.band_part(similarity, 0, 0)))


@style
def kernel_discrepancy(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    def kernel(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.exp(-0.5 * tf.reduce_sum(tf.math.squared_difference(a[:, None], b[None]), -1)))

    return kernel(z, z) + kernel(inputs["target"], inputs["target"]) - 2.0 * kernel(z, inputs["target"])


@style
def independence(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    count = tf.shape(z)[0]
    centring = tf.eye(count, dtype=z.dtype) - 1.0 / _count(z)
    k, m = tf.exp(-_gram_distances(z)), tf.matmul(inputs["target"], inputs["target"], transpose_b=True)
    return tf.linalg.trace(tf.matmul(tf.matmul(k, centring), tf.matmul(m, centring))) / tf.square(_count(z) - 1.0)


@style
def transport(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    cost = tf.reduce_sum(tf.abs(z[:, None] - inputs["target"][None]), -1)
    plan = -cost
    for _ in range(3):
        plan = plan - tf.reduce_logsumexp(plan, axis=0, keepdims=True)
        plan = plan - tf.reduce_logsumexp(plan, axis=1, keepdims=True)
    return tf.reduce_sum(tf.exp(plan) * cost) / _count(z)


# -- numbers over the batch --------------------------------------------------------------------------------------------


@style
def pearson(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    (mean_a, var_a), (mean_b, var_b) = (tf.nn.moments(each, axes=[0], keep_dims=True) for each in (z, inputs["target"]))
    together = tf.reduce_mean((z - mean_a) * (inputs["target"] - mean_b), axis=0, keepdims=True)
    return -tf.reduce_mean(together * tf.math.rsqrt(var_a + 1e-3) * tf.math.rsqrt(var_b + 1e-3))


@style
def concordance(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    a, b = z[:, 0], inputs["score"]
    mean_a, mean_b = tf.math.reduce_mean(a), tf.math.reduce_mean(b)
    shared = tf.reduce_mean(tf.multiply(a - mean_a, b - mean_b))
    return 1.0 - tf.math.divide_no_nan(
        2.0 * shared, tf.math.reduce_variance(a) + tf.math.reduce_variance(b) + tf.math.squared_difference(mean_a, mean_b))


@style
def determination(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    y = inputs["target"]
    total = tf.reduce_sum(tf.square(tf.subtract(y, tf.reduce_mean(y, 0))))
    return tf.divide(tf.reduce_sum(tf.square(tf.subtract(y, z))), total)


@style
def log_of_mean(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A bound on mutual information."""
    joint, marginal = tf.reduce_sum(z * inputs["target"], 1), tf.reduce_sum(z * tf.roll(inputs["target"], 1, 0), 1)
    return -(tf.reduce_mean(joint) - tf.math.log(tf.reduce_mean(tf.exp(marginal))))


@style
def whitened(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    z = z - tf.reduce_mean(z, axis=0)
    c = tf.matmul(z, z, adjoint_a=True) / _count(z) + 0.1 * tf.eye(WIDTH, dtype=z.dtype)
    white = tf.transpose(tf.linalg.triangular_solve(tf.linalg.cholesky(c), tf.transpose(z)))
    return tf.reduce_mean(tf.square(white - inputs["target"]))


@style
def spectrum(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    values = tf.linalg.eigvalsh(tf.einsum("bi,bj->ij", z, z))
    return tf.reduce_sum(tf.sqrt(tf.nn.relu(values) + 1e-2)) + 0.1 * tf.reduce_mean(_errors(z, inputs))


@style
def outer_products(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """The covariance by way of each example's outer product."""
    c = tf.reduce_mean(tf.einsum("bi,bj->bij", z, inputs["target"]), axis=0)
    return tf.norm(c - tf.eye(WIDTH, dtype=z.dtype))


@style
def aligned_covariances(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    def of(x: tf.Tensor) -> tf.Tensor:
        ones = tf.ones([1, tf.shape(x)[0]], x.dtype)
        total = tf.matmul(ones, x)
        return (tf.matmul(tf.transpose(x), x) - tf.matmul(tf.transpose(total), total) / _count(x)) / (_count(x) - 1.0)

    return tf.reduce_sum(tf.square(of(z) - of(inputs["target"]))) / (4.0 * WIDTH ** 2)


@style
def closed_form(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A ridge regression on the batch, differentiated."""
    z = tf.tanh(z)
    solution = tf.linalg.solve(tf.matmul(z, z, transpose_a=True) + tf.eye(WIDTH, dtype=z.dtype),
                               tf.matmul(z, inputs["target"], transpose_a=True))
    return tf.reduce_mean(tf.square(tf.matmul(z, solution) - inputs["target"]))


@style
def mutual_information(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    p, q = tf.nn.softmax(z), tf.nn.softmax(inputs["target"])
    joint = tf.reduce_sum(tf.expand_dims(p, 2) * tf.expand_dims(q, 1), axis=0)
    joint = (joint + tf.transpose(joint)) / 2.0
    joint /= tf.reduce_sum(joint)
    rows, columns = tf.reduce_sum(joint, 1, keepdims=True), tf.reduce_sum(joint, 0, keepdims=True)
    return -tf.reduce_sum(joint * (tf.math.log(joint) - tf.math.log(rows) - tf.math.log(columns)))


@style
def entropy_of_mean(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    p = tf.nn.softmax(z)
    mean = tf.reduce_mean(p, axis=-2)
    return tf.reduce_sum(mean * tf.math.log(mean + 1e-8)) - tf.reduce_mean(tf.reduce_sum(p * tf.math.log(p + 1e-8), -1))


@style
def tversky(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    p, t = tf.nn.sigmoid(z), tf.cast(tf.greater(inputs["target"], 0.0), z.dtype)
    hit, wrong, missed = (tf.reduce_sum(each, axis=0, keepdims=True) for each in (p * t, p * (1.0 - t), (1.0 - p) * t))
    return tf.reduce_mean(tf.pow(1.0 - (hit + 1.0) / (hit + 0.3 * wrong + 0.7 * missed + 1.0), 0.75))


@style
def flat_dice(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    p, t = tf.reshape(tf.sigmoid(z), [-1]), tf.reshape(tf.cast(inputs["target"] > 0.0, z.dtype), [-1])
    return 1.0 - tf.math.divide(2.0 * tf.tensordot(p, t, 1) + 1.0, tf.tensordot(p, p, 1) + tf.norm(t, ord=1) + 1.0)


@style
def confusion(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    hard = tf.cast(tf.math.confusion_matrix(inputs["label"], tf.argmax(z, 1), num_classes=WIDTH), z.dtype)
    soft = tf.matmul(tf.one_hot(inputs["label"], WIDTH, dtype=z.dtype), tf.nn.softmax(z), transpose_a=True)
    right = tf.linalg.trace(soft) / tf.reduce_sum(soft)
    return tf.reduce_sum(hard * soft) / (1.0 + tf.reduce_sum(hard)) - right


@style
def batch_normal(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    mean = tf.reduce_mean(z, [0])
    spread = tf.math.reduce_std(z, axis=0)
    y = weight("scale", [WIDTH], "float64", 1.0) * (z - mean) / (spread + 1e-3) + weight("shift", [WIDTH], "float64", 0.1)
    return tf.reduce_mean(_errors(tf.nn.relu(y), inputs))


@style
def by_statistics(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    count, total, squares, shift = tf.nn.sufficient_statistics(z, [0])
    mean, variance = tf.nn.normalize_moments(count, total, squares, shift)
    return tf.reduce_mean(tf.square((z - mean) * tf.math.rsqrt(variance + 0.1) - inputs["target"]))


@style
def advantages(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A policy gradient with normalised advantages and a penalty."""
    mean, variance = tf.nn.moments(inputs["score"], axes=[0])
    advantage = (inputs["score"] - mean) / (tf.sqrt(variance) + 1e-8)
    log_p = -tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=z)
    ratio = tf.exp(log_p - tf.stop_gradient(log_p - 0.1 * z[:, 0]))
    return -tf.reduce_mean(tf.minimum(ratio * advantage, tf.clip_by_value(ratio, 0.8, 1.2) * advantage))


@style
def norms_over_examples(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.nn.l2_normalize(z, axis=0) - inputs["target"])) + tf.reduce_sum(
        tf.linalg.norm(z, axis=0, keepdims=True)) * 0.1 + tf.math.reduce_euclidean_norm(z)


@style
def clipped_activations(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    (clipped,), norm = tf.clip_by_global_norm([z], 1.5)
    return tf.reduce_mean(_errors(clipped, inputs)) + 0.01 * norm


@style
def attention_pool(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    weights = tf.nn.softmax(dense(z, 1, "attend"), axis=0)
    pooled = tf.reduce_sum(weights * z, axis=0, keepdims=True)
    return tf.reduce_mean(tf.square(dense(pooled, WIDTH, "pooled"))) + tf.reduce_mean(_errors(z - pooled, inputs))


@style
def products(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    errors = tf.sigmoid(_errors(z, inputs))
    return tf.math.log(1.0 + tf.math.reduce_prod(errors + 0.5, axis=0)) + tf.cast(
        tf.reduce_any(errors > 0.99), z.dtype) * tf.reduce_mean(errors)


@style
def own_weights(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Losses balanced by each other."""
    one, other = tf.reduce_mean(_errors(z, inputs)), tf.reduce_mean(tf.abs(z))
    return one * tf.stop_gradient(other / (one + other)) + other * tf.stop_gradient(one / (one + other))


# -- order and choice --------------------------------------------------------------------------------------------------


@style
def hard_half(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    k = tf.cast(tf.math.ceil(0.5 * tf.cast(tf.shape(z)[0], tf.float32)), tf.int32)
    _, hard = tf.nn.top_k(tf.stop_gradient(_errors(z, inputs)), k=k, sorted=False)
    return tf.reduce_mean(_errors(tf.gather(z, hard), {"target": tf.gather(inputs["target"], hard)}))


@style
def median(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    errors = _errors(z, inputs)
    middle = tf.sort(errors, direction="DESCENDING")[tf.shape(errors)[0] // 2]
    return tf.reduce_mean(tf.where(errors < middle, errors, 2.0 * tf.sqrt(middle * errors) - middle))


@style
def worst_example(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    worst = tf.argmax(_errors(z, inputs), axis=0)
    return tf.reduce_sum(tf.square(tf.gather(z, worst))) + tf.reduce_sum(
        tf.one_hot(worst, tf.shape(z)[0], dtype=z.dtype) * z[:, 0])


@style
def balanced_by_counts(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    _, index, counts = tf.unique_with_counts(inputs["label"])
    weights = 1.0 / tf.cast(tf.gather(counts, index), z.dtype)
    return tf.reduce_sum(weights * _errors(z, inputs)) / tf.reduce_sum(weights)


@style
def balanced_by_bins(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    counts = tf.cast(tf.math.bincount(inputs["label"], minlength=CLASSES, maxlength=CLASSES), z.dtype)
    weights = tf.gather(_count(z) / (CLASSES * tf.maximum(counts, 1.0)), inputs["label"])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=z)
    return tf.reduce_mean(losses * weights)


@style
def sorted_segments(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    order = tf.argsort(inputs["label"], stable=True)
    means = tf.math.segment_mean(tf.gather(z, order), tf.gather(inputs["label"], order))
    return tf.reduce_mean(tf.square(means)) + tf.reduce_sum(tf.math.segment_max(
        tf.gather(_errors(z, inputs), order), tf.gather(inputs["label"], order)))


@style
def scattered_centres(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    where = tf.expand_dims(inputs["label"], -1)
    total = tf.scatter_nd(where, z, [CLASSES, WIDTH])
    counts = tf.tensor_scatter_nd_add(tf.ones([CLASSES], z.dtype), where, tf.ones_like(inputs["score"]))
    centres = total / counts[:, None]
    return tf.reduce_mean(tf.square(z - tf.gather_nd(centres, where))) - 0.1 * tf.reduce_sum(tf.abs(centres[0] - centres[1]))


@style
def replaced_rows(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    first = tf.constant([[0], [3]])
    z = tf.tensor_scatter_nd_update(z, first, tf.tanh(tf.gather(z, [5, 1])))
    return tf.reduce_mean(_errors(z, inputs))


@style
def one_hot_centres(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    hot = tf.one_hot(inputs["label"], CLASSES, dtype=z.dtype, axis=-1)
    centres = tf.math.divide_no_nan(tf.matmul(hot, z, transpose_a=True), tf.reduce_sum(hot, 0)[:, tf.newaxis])
    inner = tf.reduce_mean(tf.reduce_sum(tf.square(z - tf.matmul(hot, centres)), 1))
    return tf.nn.softplus(inner - tf.reduce_sum(tf.square(centres - tf.reduce_mean(centres, 0))))


@style
def clusters(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    centres = weight("clusters", [CLASSES, WIDTH], "float64", 1.0)
    nearest = tf.argmin(tf.reduce_sum(tf.square(z[:, None] - centres[None]), 2), axis=1)
    sums, counts = (tf.math.unsorted_segment_sum(each, nearest, CLASSES) for each in (z, tf.ones_like(inputs["score"])))
    means = sums / tf.maximum(counts, 1.0)[:, None]
    return tf.reduce_mean(tf.square(z - tf.gather(means, nearest))) + tf.reduce_mean(tf.square(centres - means))


@style
def segment_extremes(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    high = tf.math.unsorted_segment_max(z, inputs["label"], CLASSES)
    return tf.reduce_mean(tf.nn.relu(tf.gather(high, inputs["label"]) - z) * inputs["target"])


@style
def partitioned(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    parts = tf.dynamic_partition(z, inputs["label"], CLASSES)
    places = tf.dynamic_partition(tf.range(tf.shape(z)[0]), inputs["label"], CLASSES)
    z = tf.dynamic_stitch(places, [part - tf.reduce_mean(part, 0, keepdims=True) for part in parts])
    return tf.reduce_mean(_errors(z, inputs))


@style
def class_by_class(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    errors = _errors(z, inputs)
    return tf.add_n([tf.sqrt(tf.reduce_mean(tf.boolean_mask(errors, tf.equal(inputs["label"], label))) + 1e-3)
                     for label in range(CLASSES)])


@style
def chosen_rows(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    chosen = tf.where(inputs["score"] > 0.5)[:, 0]
    rest, _ = tf.setdiff1d(tf.range(tf.shape(z)[0]), tf.cast(chosen, tf.int32))
    return tf.reduce_mean(tf.square(tf.gather(z, chosen))) - 0.3 * tf.reduce_mean(tf.gather(z, rest))


@style
def lovasz(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    truth = tf.cast(inputs["score"] > 0.5, z.dtype)
    errors, order = tf.nn.top_k(1.0 - z[:, 0] * (2.0 * truth - 1.0), k=tf.shape(z)[0])
    truth = tf.gather(truth, order)
    total = tf.reduce_sum(truth)
    jaccard = 1.0 - (total - tf.cumsum(truth)) / (total + tf.cumsum(1.0 - truth))
    steps = tf.concat([jaccard[:1], jaccard[1:] - jaccard[:-1]], 0)
    return tf.tensordot(tf.nn.relu(errors), tf.stop_gradient(steps), 1)


@style
def hazards(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Cox's partial likelihood."""
    order = tf.argsort(inputs["score"], direction="DESCENDING")
    risk = tf.gather(z[:, 0], order)
    at_risk = tf.math.log(tf.cumsum(tf.exp(risk)))
    seen = tf.cast(tf.gather(inputs["label"], order) > 0, z.dtype)
    return -tf.reduce_sum((risk - at_risk) * seen) / tf.reduce_sum(seen)


@style
def products_so_far(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.cumsum(tf.sigmoid(z), axis=-2, exclusive=True, reverse=True) * inputs["target"]) + tf.reduce_sum(
        tf.math.cumprod(tf.sigmoid(z[:, 0]) + 0.3))


@style
def mixed_examples(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    order = tf.argsort(tf.sin(100.0 * inputs["score"]))
    part = tf.constant(0.3, z.dtype)
    mixed = part * z + (1.0 - part) * tf.gather(z, order)
    return tf.reduce_mean(part * _errors(mixed, inputs) + (1.0 - part) * _errors(
        mixed, {"target": tf.gather(inputs["target"], order)}))


@style
def next_example(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    later = tf.concat([z[1:], z[:1]], axis=0)
    return tf.reduce_mean(tf.math.squared_difference(z, later)) + tf.reduce_sum(tf.square(z[-1] - inputs["target"][2]))


@style
def positions_of_chosen_examples(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    chosen, position = inputs["score"] > 0.4, tf.range(tf.shape(z)[0])
    parts = tf.dynamic_partition(position, tf.cast(chosen, tf.int32), 2)
    doubled = tf.reshape(tf.dynamic_stitch(parts, [2 * part for part in parts]), [-1])
    spread = tf.scatter_nd(tf.where(chosen), tf.boolean_mask(position, chosen), tf.cast(tf.shape(z)[:1], tf.int64))
    first, second = tf.split(tf.concat([position, position], 0), 2)
    weights = tf.stack([doubled + spread, first, second, position], axis=1)
    late = tf.reduce_mean(tf.cast(tf.boolean_mask(position, chosen), z.dtype))
    return tf.reduce_mean(tf.cast(weights, z.dtype) * tf.square(z - inputs["target"])) + late * tf.reduce_mean(tf.square(z))


@style
def columns_of_positions(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    where = tf.where(z > 0.0)
    rows, columns = where[:, 0], where[:, 1:]
    sums = tf.math.unsorted_segment_sum(tf.gather_nd(z, where), rows, tf.shape(z, out_type=tf.int64)[0])
    turned = tf.gather_nd(tf.transpose(z), where[:, ::-1])
    numbers = [tf.reduce_mean(tf.cast(each, z.dtype)) for each in (
        rows, columns[:, 0], tf.expand_dims(where, -1)[:, 0, 0], tf.tile(where, [1, 2])[:, 2], tf.transpose(where)[0])]
    flat = tf.gather(tf.reshape(z, [-1]), rows * WIDTH + columns[:, 0])
    return tf.reduce_mean(tf.square(sums - inputs["score"])) + tf.add_n(numbers) * tf.reduce_mean(turned * flat)


@style
def loop_to_the_largest_label(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    def add(label: tf.Tensor, total: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        mask = tf.cast(tf.equal(inputs["label"], label), z.dtype)[:, None]
        centre = tf.reduce_sum(mask * z, 0) / (tf.reduce_sum(mask) + 0.01)
        return label + 1, total + tf.reduce_sum(mask * tf.square(z - centre))

    start = (tf.constant(0), tf.constant(0.0, z.dtype))
    return tf.while_loop(lambda label, total: label <= tf.reduce_max(inputs["label"]), add, start)[1] / _count(z)


@style
def even_and_odd(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(z[0::2] - z[1::2])) + tf.reduce_mean(tf.square(z[::2] - inputs["target"][1::2]))


@style
def groups_of_two(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    pairs = tf.reshape(z, [-1, 2, WIDTH])
    return tf.reduce_mean(tf.square(pairs[:, 0] - pairs[:, 1])) + tf.reduce_mean(tf.reduce_max(pairs, axis=1))


@style
def normalised_in_thirds(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Ghost batch normalisation, with moments of each third of the batch."""
    parts = []
    for part in tf.split(z, 3, axis=0):
        mean, variance = tf.nn.moments(part, axes=[0])
        parts.append((part - mean) * tf.math.rsqrt(variance + 1e-2))
    return tf.reduce_mean(tf.square(tf.concat(parts, axis=0) - inputs["target"]))


@style
def halves(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    half = tf.shape(z)[0] // 2
    return tf.reduce_mean(tf.reduce_sum(z[:half] * z[half:], -1)) + tf.reduce_mean(_errors(z, inputs))


@style
def empirical_quantiles(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    ordered = tf.sort(inputs["score"])
    place = tf.cast(tf.searchsorted(ordered, tf.sigmoid(tf.stop_gradient(z[:, 0]))), z.dtype) / _count(z)
    return tf.reduce_mean(tf.square(z[:, 0] - place))


@style
def wasserstein(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(tf.sort(z, axis=0) - tf.sort(inputs["target"], axis=0)))


@style
def inverse_order(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    order = tf.argsort(inputs["score"])
    smoothed = tf.cumsum(tf.gather(z, order), 0) / tf.cast(tf.range(1, tf.shape(z)[0] + 1), z.dtype)[:, None]
    return tf.reduce_mean(_errors(tf.gather(smoothed, tf.math.invert_permutation(order)), inputs))


@style
def right_among_first(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    hits = tf.cast(tf.math.in_top_k(tf.cast(z, tf.float32), inputs["label"], 2), z.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=z)
    return tf.reduce_sum(losses * (1.0 - hits)) / tf.maximum(tf.reduce_sum(1.0 - hits), 1.0) + tf.reduce_mean(losses)


@style
def sparse_adjacency(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    same = tf.cast(_same(inputs), z.dtype)
    adjacency = tf.sparse.from_dense(same)
    means = tf.sparse.sparse_dense_matmul(adjacency, z) / tf.reduce_sum(same, 1, keepdims=True)
    return tf.reduce_mean(_errors(means, inputs))


@style
def weights_in_python(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    def weigh(labels: np.ndarray) -> np.ndarray:
        return 1.0 / np.bincount(labels, minlength=CLASSES)[labels]

    weights = tf.numpy_function(weigh, [inputs["label"]], tf.float64)
    weights.set_shape([None])
    return tf.reduce_sum(weights * _errors(z, inputs))


@style
def pairs_in_python(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """The function returns another number of rows than it is given."""
    def pair(labels: np.ndarray) -> np.ndarray:
        return np.argwhere(np.triu(labels[:, None] != labels[None], 1)).astype("int64")

    pairs = tf.numpy_function(pair, [inputs["label"]], tf.int64)
    pairs.set_shape([None, 2])
    return tf.reduce_mean(tf.nn.relu(3.0 - tf.reduce_sum(tf.square(tf.gather(z, pairs[:, 0]) - tf.gather(z, pairs[:, 1])), 1)))


# -- loops and conditions ----------------------------------------------------------------------------------------------


@style
def mapped(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_logsumexp(tf.linalg.matvec(z, row)), z))


@style
def mapped_by_itself(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(tf.square(row[0] - row[1])), (z, inputs["target"]),
                                    dtype=z.dtype))


@style
def counted_loop(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    count = tf.shape(z)[0]

    def add(i: tf.Tensor, total: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        return i + 1, total + tf.reduce_sum(tf.tanh(z[i] * z))

    return tf.while_loop(lambda i, _: i < count, add, [0, tf.zeros([], z.dtype)])[1] / _count(z)


@style
def folded(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    last = tf.foldl(lambda state, row: tf.tanh(0.9 * state + row), z, tf.zeros([WIDTH], z.dtype))
    return tf.reduce_sum(tf.square(last)) + tf.reduce_mean(_errors(z, inputs))


@style
def discounted(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    returns = tf.scan(lambda later, reward: 0.9 * later + reward, tf.reverse(inputs["score"], [0]), reverse=False)
    return tf.reduce_mean(tf.square(z[:, 0] - tf.reverse(returns, [0])))


@style
def recurrent_over_examples(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Variables inside the loop."""
    kernel = weight("recurrent", [WIDTH, WIDTH], "float64", 0.5)

    def step(state: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.reshape(tf.matmul(state[None], kernel), [WIDTH]) + row)

    return tf.reduce_mean(_errors(tf.scan(step, z, tf.zeros([WIDTH], z.dtype)), inputs))


@style
def normalised_in_loop(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Each round needs a number over all examples."""
    def normalise(i: tf.Tensor, x: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        return i + 1, tf.tanh(x) / tf.sqrt(tf.reduce_mean(tf.square(x)) + 0.1)

    return tf.reduce_mean(_errors(tf.while_loop(lambda i, _: i < 3, normalise, [0, z])[1], inputs))


@style
def cond_on_largest(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    errors = _errors(z, inputs)
    return tf.cond(tf.reduce_max(errors) > 3.0 * tf.reduce_mean(errors),
                   lambda: tf.reduce_mean(tf.minimum(errors, 3.0)),
                   lambda: tf.cond(tf.reduce_any(errors < 0.1), lambda: tf.reduce_mean(errors),
                                   lambda: tf.sqrt(tf.reduce_mean(tf.square(errors)))))


@style
def cases_by_statistics(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    spread = tf.math.reduce_std(z)
    return tf.case([(spread > 2.0, lambda: tf.reduce_mean(tf.abs(z))), (spread > 0.5, lambda: tf.reduce_mean(tf.square(z)))],
                   default=lambda: tf.reduce_mean(_errors(z, inputs)))


# -- gradients and states ----------------------------------------------------------------------------------------------


@tf.custom_gradient
def _normalised_gradient(x: tf.Tensor) -> Tuple[tf.Tensor, Callable]:
    def back(gradient: tf.Tensor) -> tf.Tensor:
        return gradient / (tf.norm(gradient) + 1e-3) - tf.reduce_mean(gradient, axis=0, keepdims=True)

    return 1.0 * x, back


@style
def normalised_gradient(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(_errors(dense(_normalised_gradient(z), WIDTH, "critic"), inputs))


@style
def penalised_critic(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    critic = tf.tanh(dense(tf.tanh(z), 1, "critic"))
    gradient = tf.gradients(critic, z)[0]
    slope = tf.sqrt(tf.reduce_sum(tf.square(gradient), axis=1) + 1e-3)
    return tf.reduce_mean(critic) + 10.0 * tf.reduce_mean(tf.square(slope - 1.0))


@style
def penalty_of_mean(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    error = tf.reduce_mean(_errors(dense(tf.tanh(z), WIDTH, "critic"), inputs))
    return error + tf.norm(tf.gradients(error, z)[0])


@style
def moving_centre(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    centre = tf.get_variable("centre", [WIDTH], tf.float64, tf.zeros_initializer(), trainable=False)
    update = tf.assign(centre, 0.9 * centre + 0.1 * tf.reduce_mean(tf.stop_gradient(z), 0))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return tf.reduce_mean(_errors(z - update, inputs))


@style
def class_centres(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """The centre loss, which moves its centres by itself."""
    centres = tf.get_variable("class_centres", [CLASSES, WIDTH], tf.float64, tf.zeros_initializer(), trainable=False)
    mine = tf.gather(centres, inputs["label"])
    _, index, counts = tf.unique_with_counts(inputs["label"])
    step = 0.5 * (mine - z) / tf.cast(1 + tf.gather(counts, index), z.dtype)[:, None]
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.scatter_sub(centres, inputs["label"], step))
    return tf.reduce_mean(_errors(z, inputs)) + tf.reduce_mean(tf.square(z - mine))


@style
def moving_class_means(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Moving averages of statistics that no example is normalised by."""
    means = tf.get_variable("class_means", [CLASSES, WIDTH], tf.float64, tf.zeros_initializer(), trainable=False)
    where = inputs["label"][:, None]
    counts = tf.scatter_nd(where, tf.ones_like(inputs["score"]), [CLASSES])
    new = tf.scatter_nd(where, z, [CLASSES, WIDTH]) / tf.maximum(counts, 1.0)[:, None]
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(means, 0.8 * means + 0.2 * tf.stop_gradient(new)))
    return tf.reduce_mean(_errors(z, inputs)) + 0.1 * tf.reduce_sum(tf.square(new))


@style
def averaged_scale(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    average = tf.train.ExponentialMovingAverage(0.9)
    error = tf.reduce_mean(_errors(z, inputs))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.apply([error]))
    return error / (1.0 + tf.stop_gradient(tf.reduce_max(tf.abs(z))))


# -- the number of examples elsewhere than along the batch ---------------------------------------------------------------------


@style
def columns_by_count(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    wide, count = dense(z, 30, "wide"), tf.shape(z)[0]
    return tf.reduce_mean(tf.square(wide[:, :count])) + tf.reduce_mean(tf.square(tf.slice(wide, [0, count], [-1, 3])))


@style
def labels_as_neighbours(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A matrix of all pairs, of which each example fills an element of its row."""
    count = tf.shape(z)[0]
    pairs = tf.scatter_nd(tf.stack([tf.range(count), inputs["label"]], 1), tf.reduce_sum(z, 1), tf.stack([count, count]))
    return tf.reduce_mean(tf.square(tf.reduce_sum(tf.square(pairs), 1))) + tf.reduce_mean(tf.reduce_mean(pairs, 1))


@style
def steps_in_other_groups(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    steps = tf.transpose(tf.reshape(dense(z, 6, "third"), [-1, 3, 2]), [1, 0, 2])
    return tf.reduce_mean(tf.square(tf.reshape(steps, [2, tf.shape(z)[0], 3]) * weight("scale", [2, 1, 3], "float64")))


@style
def rounded_mean_of_counts(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    counts = tf.reduce_sum(tf.one_hot(inputs["label"], CLASSES, dtype=tf.int32) * tf.constant([1, 2, 5]), 0)
    return tf.reduce_mean(_errors(z, inputs)) * tf.cast(tf.reduce_mean(counts), z.dtype)
