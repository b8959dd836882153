"""Losses and layers that need all examples of a mini-batch together, behind a small encoder."""
from __future__ import annotations

import functools
from typing import Dict, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tests.numeric.cases import Case, Inputs, register
from tests.numeric.script import Arrays, Script, Stages, dense, joined, rng, weight
from tests.numeric.section_papers import PAPERS
from tests.numeric.section_styles import CLASSES, STYLES, WIDTH, Loss

FEATURES, SIZE, STEPS = 5, 12, 3


def _examples(count: int, dtype: str) -> Arrays:
    r = rng("sections")
    return {"x": r.randn(count, FEATURES).astype(dtype), "label": r.randint(0, CLASSES, count).astype("int32"),
            "target": r.randn(count, WIDTH).astype(dtype), "score": r.rand(count).astype(dtype)}


def _distances(z: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(z[:, None, :] - z[None, :, :]), 2)


def _centred(x: tf.Tensor) -> tf.Tensor:
    return x - tf.reduce_mean(x, 0, keepdims=True)


def _per_example(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_sum(tf.square(z - inputs["target"]), 1)


def _rows(z: tf.Tensor) -> tf.Tensor:
    return tf.shape(z)[0]


# -- pairs of examples -------------------------------------------------------------------------------------------------


def in_batch_negatives(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    logits = tf.matmul(z, tf.nn.l2_normalize(inputs["target"], 1), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=tf.range(_rows(z))))


def contrastive(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    z = tf.nn.l2_normalize(z, 1, epsilon=1e-3)
    similarity = tf.matmul(z, z, transpose_b=True) / 0.5
    same = tf.cast(tf.equal(inputs["label"][:, None], inputs["label"][None, :]), z.dtype)
    return -tf.reduce_mean(tf.reduce_sum(same * tf.nn.log_softmax(similarity), 1) / tf.reduce_sum(same, 1))


def triplets(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    distances = _distances(z)
    same = tf.equal(inputs["label"][:, None], inputs["label"][None, :])
    far = tf.reduce_max(tf.where(same, distances, tf.zeros_like(distances)), 1)
    near = tf.reduce_min(tf.where(same, distances + 100.0, distances), 1)
    return tf.reduce_mean(tf.nn.relu(far - near + 1.0))


def ranking(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    s, t = z[:, 0], inputs["score"]
    better = tf.cast(t[:, None] > t[None, :], z.dtype)
    return tf.reduce_sum(better * tf.nn.softplus(s[None, :] - s[:, None])) / tf.reduce_sum(better)


# -- numbers over the batch --------------------------------------------------------------------------------------------


def rmse(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(z - inputs["target"])))


def correlation(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    a, b = _centred(z), _centred(inputs["target"])
    return 1.0 - tf.reduce_sum(a * b) / tf.sqrt(tf.reduce_sum(tf.square(a)) * tf.reduce_sum(tf.square(b)))


def cosine_of_means(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    a, b = (tf.nn.l2_normalize(tf.reduce_mean(each, 0), 0) for each in (z, inputs["target"]))
    return 1.0 - tf.reduce_sum(a * b)


def dice(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    p, t = tf.sigmoid(z), tf.cast(inputs["target"] > 0.0, z.dtype)
    return 1.0 - (2.0 * tf.reduce_sum(p * t) + 1.0) / (tf.reduce_sum(p) + tf.reduce_sum(t) + 1.0)


def jaccard(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """By class: the confusion of soft predictions and labels."""
    p, t = tf.nn.softmax(z), tf.one_hot(inputs["label"], WIDTH, dtype=z.dtype)
    both = tf.reduce_sum(p * t, 0)
    return 1.0 - tf.reduce_mean(both / (tf.reduce_sum(p, 0) + tf.reduce_sum(t, 0) - both + 1e-3))


def barlow_twins(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    def normal(x: tf.Tensor) -> tf.Tensor:
        x = _centred(x)
        return x / tf.sqrt(tf.reduce_mean(tf.square(x), 0, keepdims=True) + 1e-3)

    c = tf.matmul(normal(z), normal(inputs["target"]), transpose_a=True) / tf.cast(_rows(z), z.dtype)
    eye = tf.eye(WIDTH, dtype=z.dtype)
    return tf.reduce_sum(tf.square(c - eye) * (eye + 0.1 * (1.0 - eye)))


def vicreg(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    centred = _centred(z)
    count = tf.cast(_rows(z), z.dtype)
    covariance = tf.matmul(centred, centred, transpose_a=True) / (count - 1.0)
    spread = tf.sqrt(tf.reduce_mean(tf.square(centred), 0) + 1e-3)
    apart = tf.reduce_sum(tf.square(covariance - tf.linalg.diag(tf.linalg.diag_part(covariance))))
    return (tf.reduce_mean(tf.square(z - inputs["target"])) + tf.reduce_mean(tf.nn.relu(1.0 - spread)) + 0.1 * apart)


def covariance(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    c = tf.einsum("bi,bj->ij", z, inputs["target"]) / tf.cast(_rows(z), z.dtype)
    return -tf.linalg.logdet(tf.matmul(c, c, transpose_b=True) + tf.eye(WIDTH, dtype=z.dtype))


def log_sum_exp(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_sum(tf.reduce_logsumexp(z - inputs["target"], 0))


def ratio(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    one, other = tf.reduce_mean(_per_example(z, inputs)), tf.reduce_mean(tf.square(z))
    return one / (other + 1.0) + one * other


# -- order and choice of examples --------------------------------------------------------------------------------------


def extremes(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_max(_per_example(z, inputs)) - 0.5 * tf.reduce_sum(tf.reduce_min(z, 0))


def hardest(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.top_k(_per_example(z, inputs), 3)[0])


def sorted_losses(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    losses = tf.sort(_per_example(z, inputs))
    return tf.reduce_sum(losses * tf.cast(tf.range(_rows(z)), z.dtype))


def ranked_by_score(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    ordered = tf.gather(z, tf.argsort(inputs["score"]))
    return tf.reduce_mean(tf.square(ordered[1:] - ordered[:-1])) + 0.1 * tf.reduce_mean(tf.square(z))


def reverse_and_stride(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.reverse(z, [0]) - z[::-1] * 0.5 - inputs["target"])) + tf.reduce_mean(z[::2, 0])


def running_sums(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.cumsum(z, 0) - inputs["target"]))


def unique_labels(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    classes, index = tf.unique(inputs["label"])
    sums = tf.unsorted_segment_sum(z, index, tf.size(classes))
    return tf.reduce_mean(tf.square(sums))


def masked_mean(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """A part may have no example of the class."""
    return tf.reduce_mean(tf.boolean_mask(_per_example(z, inputs), tf.equal(inputs["label"], 0)))


def segment_means(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    means = tf.unsorted_segment_mean(z, inputs["label"], CLASSES)
    return tf.reduce_mean(tf.square(z - tf.gather(means, inputs["label"]))) - 0.1 * tf.reduce_mean(tf.square(means))


def neighbours(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.square(z - tf.roll(z, 1, 0)))


def first_and_rest(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.square(z[1:] - z[:1])) + tf.reduce_mean(tf.square(inputs["target"][0] - z))


# -- per-example values again ------------------------------------------------------------------------------------------


def batch_normalised(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    mean, variance = tf.nn.moments(z, 0)
    y = tf.nn.batch_normalization(z, mean, variance, weight("beta", [WIDTH], "float64", 0.1),
                                  weight("gamma", [WIDTH], "float64", 1.0), 1e-3)
    return tf.reduce_mean(tf.square(tf.tanh(dense(y, WIDTH, "after")) - inputs["target"]))


def conditional(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    losses = _per_example(z, inputs)
    return tf.cond(tf.reduce_mean(z) > 0.0, lambda: tf.reduce_mean(losses), lambda: tf.sqrt(tf.reduce_sum(losses)))


def centres(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Distances to class centres of this very batch, and to trained ones."""
    trained = tf.gather(weight("centres", [CLASSES, WIDTH], "float64", 1.0), inputs["label"])
    means = tf.unsorted_segment_mean(tf.stop_gradient(z), inputs["label"], CLASSES)
    return tf.reduce_mean(tf.square(z - trained)) + 0.3 * tf.reduce_mean(tf.abs(z - tf.gather(means, inputs["label"])))


def several(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Sections one after the other: whitening, a sort, and a norm of the sum."""
    z = _centred(z) / tf.sqrt(tf.reduce_mean(tf.square(z)) + 0.1)
    z = dense(tf.sort(tf.tanh(z), 0), WIDTH, "between")
    return tf.norm(tf.reduce_sum(z - inputs["target"], 0)) + rmse(z, inputs)


@tf.custom_gradient
def _clipped(x: tf.Tensor) -> tf.Tensor:
    return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 0.1)


def clipped_gradient(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(_per_example(_clipped(z), inputs))


def scan(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    states = tf.scan(lambda state, row: 0.5 * state + tf.tanh(row), z, tf.zeros([WIDTH], z.dtype))
    return tf.reduce_mean(tf.square(states - inputs["target"]))


LOSSES: Dict[str, Loss] = joined({
    loss.__name__: loss for loss in (
        in_batch_negatives, contrastive, triplets, ranking, rmse, correlation, cosine_of_means, dice, jaccard, barlow_twins,
        vicreg, covariance, log_sum_exp, ratio, extremes, hardest, sorted_losses, ranked_by_score, reverse_and_stride,
        running_sums, unique_labels, masked_mean, segment_means, neighbours, first_and_rest, batch_normalised, conditional,
        centres, several, clipped_gradient, scan)
}, STYLES, PAPERS)


def _build(loss: Loss, inputs: Inputs, stages: Stages, dtype: str) -> Script:
    def measured(x: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        z = dense(x, WIDTH, "second")
        return z, loss(z, inputs)

    z, value = stages.run([lambda x: tf.tanh(dense(x, WIDTH, "first")), measured], inputs["x"])
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        update = tf.train.AdamOptimizer(0.05, epsilon=1e-2).minimize(value)
    return Script([[update]], {"loss": value}, {"z": z})


def case_of(loss: Loss, last: int = SIZE) -> Case:
    """A model with a loss; ``last``: examples of the last mini-batch."""
    return Case(_examples, functools.partial(_build, loss), sizes=(SIZE,) * (STEPS - 1) + (last,))


SECTIONS = register({name: case_of(loss) for name, loss in LOSSES.items()})
assert np.lcm.reduce([2, 3, 4]) == SIZE, "divides by every number of parts"
