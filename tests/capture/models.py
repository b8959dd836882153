"""Small training scripts, written as a user would, one per feature that capture has to understand.

Each builds into the default graph and returns what the tests ask about by name.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Sequence

import tensorflow as tf

v1 = tf.compat.v1


def dense(x: Any, units: int, name: str, activation: Any = None) -> Any:
    """A fully connected layer with variables ``<name>/w`` and ``<name>/b``."""
    with v1.variable_scope(name):
        w = v1.get_variable("w", [x.shape[-1], units], initializer=v1.random_uniform_initializer(-1, 1, seed=1))
        b = v1.get_variable("b", [units], initializer=v1.zeros_initializer())
        y = tf.add(tf.matmul(x, w), b)
        return y if activation is None else activation(y)


def placeholder(shape: Sequence[Any] = (None, 8), name: str = "x", dtype: Any = tf.float32) -> Any:
    return v1.placeholder(dtype, shape, name)


def mlp() -> None:
    """Clipped Adam with a learning-rate schedule, summaries, an accuracy metric, a saver and an init op."""
    x, labels = placeholder(), placeholder([None], "labels", tf.int64)
    logits = dense(dense(x, 8, "hidden", tf.nn.relu), 3, "logits")
    loss = tf.reduce_mean(v1.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), name="loss")
    step = v1.train.get_or_create_global_step()
    rate = v1.train.exponential_decay(0.1, step, 10, 0.9, name="rate")
    optimizer = v1.train.AdamOptimizer(rate)
    pairs = optimizer.compute_gradients(loss)
    clipped, norm = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 1.0, name="clip")
    optimizer.apply_gradients(zip(clipped, [variable for _, variable in pairs]), global_step=step, name="train")
    v1.summary.scalar("summary_loss", loss)
    v1.summary.scalar("summary_norm", norm)
    v1.summary.histogram("summary_gradient", pairs[0][0])
    v1.metrics.accuracy(labels, tf.argmax(logits, 1), name="accuracy")
    v1.summary.merge_all(name="summaries")
    v1.train.Saver(name="saver")
    v1.global_variables_initializer()


def momentum() -> None:
    loss = tf.reduce_mean(tf.square(dense(placeholder(), 2, "a")), name="loss")
    v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")


def gan() -> None:
    """The generator's update waits for the discriminator's."""
    real, noise = placeholder(name="real"), placeholder([None, 4], "noise")
    fake = dense(noise, 8, "generator")
    with v1.variable_scope("shared", reuse=v1.AUTO_REUSE):
        on_real, on_fake = dense(real, 1, "discriminator"), dense(fake, 1, "discriminator")
    d_loss = tf.reduce_mean(tf.nn.softplus(on_fake) + tf.nn.softplus(-on_real), name="d_loss")
    g_loss = tf.reduce_mean(tf.nn.softplus(-on_fake), name="g_loss")
    of = {scope: v1.trainable_variables(scope) for scope in ("generator", "shared")}
    d_train = v1.train.AdamOptimizer(0.1).minimize(d_loss, var_list=of["shared"], name="d_train")
    with tf.control_dependencies([d_train]):
        v1.train.GradientDescentOptimizer(0.1).minimize(g_loss, var_list=of["generator"], name="g_train")


def gradient_penalty() -> None:
    x = placeholder()
    y = dense(dense(x, 8, "a", tf.tanh), 1, "b")
    slope = tf.gradients(y, x, name="inner")[0]
    penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0), name="penalty")
    loss = tf.add(tf.reduce_mean(y), penalty, name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def inner_update() -> None:
    """The gradient of a variable is used on the way to a second loss (MAML): no cut there."""
    x = placeholder()
    w = v1.get_variable("w", [8, 1], initializer=v1.random_uniform_initializer(seed=1))
    first = tf.reduce_mean(tf.square(tf.matmul(x, w)), name="first")
    stepped = tf.subtract(w, 0.1 * tf.gradients(first, w, name="inner")[0], name="stepped")
    loss = tf.reduce_mean(tf.square(tf.matmul(x, stepped)), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def tied_embedding() -> None:
    ids = placeholder([None, 5], "ids", tf.int32)
    table = v1.get_variable("table", [11, 4], initializer=v1.random_uniform_initializer(-1, 1, seed=1))
    h = dense(tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1), 4, "hidden", tf.tanh)
    logits = tf.matmul(h, table, transpose_b=True, name="logits")
    loss = tf.reduce_mean(v1.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 0], logits=logits), name="loss")
    v1.train.AdamOptimizer(0.1).minimize(loss, name="train")


def sparse_embedding() -> None:
    ids = placeholder([None], "ids", tf.int32)
    table = v1.get_variable("table", [11, 4], initializer=v1.random_uniform_initializer(-1, 1, seed=1))
    loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids)), name="loss")
    v1.train.AdagradOptimizer(0.1).minimize(loss, name="train")


def batch_norm() -> None:
    """Averages of batch statistics, updated before the gradients, as tf.layers users write it."""
    x = dense(placeholder(), 4, "a")
    average = v1.get_variable("average", [4], initializer=v1.zeros_initializer(), trainable=False)
    mean, variance = tf.nn.moments(x, [0], name="moments")
    update = v1.assign_sub(average, 0.1 * (average - mean), name="update_average")
    y = dense(tf.divide(x - mean, tf.sqrt(variance + 1e-3)), 1, "b")
    with tf.control_dependencies([tf.group(update, name="updates")]):
        loss = tf.reduce_mean(tf.square(y), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def loop() -> None:
    x = placeholder()
    w = v1.get_variable("w", [8, 8], initializer=v1.random_uniform_initializer(-1, 1, seed=1), use_resource=True)
    _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), [0, x], name="loop")
    loss = tf.reduce_mean(tf.square(h), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def condition() -> None:
    x = placeholder()
    w = v1.get_variable("w", [8, 8], initializer=v1.random_uniform_initializer(-1, 1, seed=1), use_resource=True)
    h = v1.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, w), lambda: 2.0 * x, name="condition")
    loss = tf.reduce_mean(tf.square(h), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def dataset() -> None:
    """A pipeline with a function, an initializable iterator, and preprocessing after it."""
    data = tf.data.Dataset.range(32).map(lambda i: tf.cast(tf.fill([8], i), tf.float32)).batch(4)
    iterator = v1.data.make_initializable_iterator(data)
    x = tf.multiply(iterator.get_next(name="next"), 0.1, name="scaled")
    loss = tf.reduce_mean(tf.square(dense(x, 2, "a")), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def decoupled_decay() -> None:
    """Weight decay that writes the variable before the gradient step, and an average of the weights after it."""
    x = placeholder()
    w = v1.get_variable("w", [8, 1], initializer=v1.random_uniform_initializer(seed=1))
    loss = tf.reduce_mean(tf.square(tf.matmul(x, w)), name="loss")
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss, [w])
    with tf.control_dependencies([v1.assign_sub(w, 0.01 * w, name="decay")]):
        step = optimizer.apply_gradients(pairs, name="step")
    with tf.control_dependencies([step]):
        v1.train.ExponentialMovingAverage(0.9).apply([w])
    v1.assign(w, tf.zeros([8, 1]), name="reset")


def function_call() -> None:
    """A traced function inside the graph; differentiating it gives the call more outputs."""
    x = placeholder()
    w = v1.get_variable("w", [8, 8], initializer=v1.random_uniform_initializer(-1, 1, seed=1), use_resource=True)
    h = tf.function(lambda value: tf.tanh(tf.matmul(value, w)))(x)
    loss = tf.reduce_mean(tf.square(h), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def second_order() -> None:
    """A gradient penalty through a condition: the backward pass of a backward pass."""
    x = placeholder()
    w = v1.get_variable("w", [8, 8], initializer=v1.random_uniform_initializer(-1, 1, seed=1), use_resource=True)
    h = v1.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(tf.matmul(x, w)), lambda: 2.0 * x, name="condition")
    slope = tf.gradients(h, x, name="inner")[0]
    loss = tf.reduce_mean(tf.square(slope), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


MODELS: Dict[str, Callable[[], None]] = {
    model.__name__: model for model in (
        mlp, momentum, gan, gradient_penalty, inner_update, tied_embedding, sparse_embedding, batch_norm, loop,
        condition, dataset, decoupled_decay, function_call, second_order)}
