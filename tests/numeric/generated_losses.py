"""Random losses over all examples of a mini-batch: compositions of sorts, sums, gathers, norms and conditions."""
from __future__ import annotations

from typing import Any, Callable, Dict

import hypothesis.strategies as st
import tensorflow.compat.v1 as tf

Inputs = Dict[str, tf.Tensor]
Step = Callable[[tf.Tensor, Inputs], tf.Tensor]

MOST_STEPS = 3


def _standard(v: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    mean, variance = tf.nn.moments(v, [0])
    return (v - mean) * tf.rsqrt(variance + 0.1)


def _pairs(v: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.reduce_mean(tf.sqrt(tf.square(v[:, None] - v[None, :]) + 0.1), 1)


def _condition(v: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    return tf.cond(tf.reduce_mean(v) > 0.1, lambda: tf.sin(v), lambda: v - tf.reduce_max(v))


# `[B]` to `[B]`
STEPS: Dict[str, Step] = {
    "sort": lambda v, inputs: tf.sort(v),
    "ranked": lambda v, inputs: tf.gather(v, tf.argsort(inputs["weight"])),
    "centre": lambda v, inputs: v - tf.reduce_mean(v),
    "standard": _standard,
    "softmax": lambda v, inputs: tf.nn.softmax(v[None])[0],
    "unit": lambda v, inputs: v * tf.rsqrt(tf.reduce_sum(tf.square(v)) + 0.1),
    "total": lambda v, inputs: tf.cumsum(v) / 10.0,
    "reverse": lambda v, inputs: v + 0.5 * v[::-1],
    "roll": lambda v, inputs: v * tf.roll(v, 1, 0),
    "share": lambda v, inputs: v * inputs["weight"] / tf.reduce_sum(inputs["weight"]),
    "pairs": _pairs,
    "condition": _condition,
    "tanh": lambda v, inputs: tf.tanh(v),
}

# `[B]` to a number
ENDS: Dict[str, Step] = {
    "mean": lambda v, inputs: tf.reduce_mean(v),
    "sum": lambda v, inputs: 0.1 * tf.reduce_sum(tf.square(v)),
    "root": lambda v, inputs: tf.sqrt(tf.reduce_mean(tf.square(v)) + 0.01),
    "greatest": lambda v, inputs: tf.reduce_max(v) - tf.reduce_min(v),
    "log_sum_exp": lambda v, inputs: tf.reduce_logsumexp(v),
    "heavy": lambda v, inputs: tf.reduce_mean(tf.boolean_mask(v, inputs["weight"] >= tf.reduce_max(inputs["weight"]))),
    "first": lambda v, inputs: tf.square(v[0]) + 0.1 * tf.reduce_sum(v[1:] * v[:1]),
    "ratio": lambda v, inputs: tf.reduce_sum(v) / (1.0 + tf.reduce_sum(tf.abs(v))),
    "product": lambda v, inputs: tf.reduce_mean(v) * tf.reduce_mean(tf.square(v)),
}


def is_together(name: str) -> bool:
    """Whether a loss's name is one of these compositions."""
    return name.partition(">")[2] in ENDS


def loss_of(name: str) -> Step:
    """The loss called ``sort+centre>mean``, plus a mean of each example's: what is zero for every model, as the mean of centred
    values is, would leave nothing but rounding to compare."""
    steps, _, end = name.partition(">")

    def loss(y: tf.Tensor, inputs: Inputs) -> tf.Tensor:
        each = v = tf.reduce_mean(tf.square(y - inputs["target"]), 1)
        for step in filter(None, steps.split("+")):
            v = STEPS[step](v, inputs)
        return ENDS[end](v, inputs) + 0.1 * tf.reduce_mean(each)

    return loss


@st.composite
def losses(draw: Any) -> str:
    """Names for :func:`loss_of`."""
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=MOST_STEPS))
    return "{}>{}".format("+".join(steps), draw(st.sampled_from(sorted(ENDS))))
