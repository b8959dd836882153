"""Small training programs, each with its own way of using the batch; every one must divide exactly.

A program takes placeholders (batch first) and returns tensors; ``variable`` makes a float64 variable.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

F = "float64"
I = "int32"  # noqa: E741 (beside F)


class Program(NamedTuple):
    """``inputs``: (dtype, shape without the batch) of each placeholder; ``only``: ``static`` where the batch size must be
    known, ``while frames`` where loops are to be written in that way."""

    name: str
    build: Callable[..., Any]
    inputs: Sequence[Tuple[str, Tuple[Optional[int], ...]]]
    only: str = ""
    integers: int = 3

    def __str__(self) -> str:
        return self.name


def variable(name: str, *shape: int) -> tf.Tensor:
    seed = sum(map(ord, name)) + len(shape)
    values = np.random.RandomState(seed).uniform(-0.5, 0.5, shape)
    return tf.get_variable(name, dtype=tf.float64, initializer=tf.constant(values))


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    return tf.nn.bias_add(tf.matmul(x, variable(name + "_w", int(x.shape[-1]), units)), variable(name + "_b", units))


def mean_loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = tf.nn.relu(dense(x, 6, "a"))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=dense(h, 3, "b"), labels=y))


def sum_and_l2(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = tf.tanh(dense(x, 6, "a"))
    loss = tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(logits=dense(h, 3, "b"), labels=tf.one_hot(y, 3, dtype=F)))
    return loss + 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])


def mean_and_l2(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=dense(x, 3, "b"), labels=y))
    return loss + 0.1 * tf.add_n([tf.reduce_sum(tf.square(v)) for v in tf.trainable_variables()])


def mean_plus_sum(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    logits = dense(x, 3, "b")
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=y)
    return tf.reduce_mean(loss) + 0.01 * tf.reduce_sum(tf.square(logits)) + tf.reduce_sum(tf.abs(logits)) / 7.0


def losses_weighted(x: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """TensorFlow's own losses, which compute in float32."""
    logits = tf.cast(dense(x, 3, "b"), tf.float32)
    weights = tf.cast(w, tf.float32)
    return (tf.losses.sparse_softmax_cross_entropy(y, logits, weights=weights)
            + tf.losses.mean_squared_error(tf.ones_like(logits), logits)
            + tf.losses.absolute_difference(tf.zeros_like(logits), tf.sigmoid(logits), weights=weights[:, None]))


def masked_mean(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    mask = tf.cast(tf.not_equal(y, 0), F)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=dense(x, 3, "b"), labels=y)
    return tf.reduce_sum(loss * mask) / (tf.reduce_sum(mask) + 1e-3)


def batch_size_as_number(x: tf.Tensor) -> tf.Tensor:
    n = tf.cast(tf.shape(x)[0], F)
    h = dense(x, 3, "a")
    return tf.reduce_sum(tf.square(h)) / n + tf.reduce_sum(h) / tf.sqrt(n) + tf.reduce_sum(h) / tf.cast(tf.size(h), F) + 1.0 / n


def odd_extent(x: tf.Tensor) -> tf.Tensor:
    """Bessel's correction: N / (N - 1)."""
    n = tf.shape(x)[0]
    h = dense(x, 3, "a")
    return tf.reduce_sum(tf.square(h)) * tf.cast(n, F) / tf.cast(n - 1, F)


def broadcasting(x: tf.Tensor) -> tf.Tensor:
    h = tf.reshape(dense(x, 6, "a"), [-1, 2, 3])
    h = h * variable("scale", 2, 1) + variable("shift", 3) - tf.reduce_mean(h, axis=2, keepdims=True)
    h = h / (1.0 + tf.reduce_max(tf.abs(h), axis=[1, 2], keepdims=True))
    return tf.reduce_mean(tf.squared_difference(h, variable("target", 1, 2, 3)))


def attention(x: tf.Tensor) -> tf.Tensor:
    width, heads = 6, 2
    batch, length = tf.shape(x)[0], int(x.shape[1])
    flat = tf.reshape(x, [-1, width])

    def heads_of(name: str) -> tf.Tensor:
        return tf.transpose(tf.reshape(dense(flat, width, name), [batch, length, heads, width // heads]), [0, 2, 1, 3])
    scores = tf.nn.softmax(tf.matmul(heads_of("q"), heads_of("k"), transpose_b=True))
    mixed = tf.reshape(tf.transpose(tf.matmul(scores, heads_of("v")), [0, 2, 1, 3]), [batch * length, width])
    mean, variance = tf.nn.moments(mixed, axes=[-1], keep_dims=True)
    normal = tf.nn.batch_normalization(mixed, mean, variance, variable("beta", width), variable("gamma", width), 1e-6)
    return tf.reduce_mean(tf.square(tf.reshape(normal, tf.shape(x)) + x))


def einsum(x: tf.Tensor) -> tf.Tensor:
    h = tf.einsum("bti,ij->btj", x, variable("w", 6, 4))
    return tf.reduce_mean(tf.square(tf.einsum("btj,bsj->bts", h, h)))


def tensordot(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.tensordot(x, variable("w", 6, 4), [[2], [0]])))


def time_major(x: tf.Tensor) -> tf.Tensor:
    length, width = int(x.shape[1]), int(x.shape[2])
    steps = tf.transpose(x, [1, 0, 2])
    flat = tf.reshape(steps, [-1, width])
    h = dense(flat, 4, "a")
    back = tf.reshape(h, [length, tf.shape(x)[0], 4])
    return tf.reduce_mean(tf.square(tf.transpose(back, [1, 0, 2]))) + tf.reduce_sum(back[0]) / 3.0


def unrolled(x: tf.Tensor) -> tf.Tensor:
    state = tf.zeros([tf.shape(x)[0], 4], F)
    states = []
    for step in tf.unstack(x, axis=1):
        state = tf.tanh(dense(tf.concat([step, state], 1), 4, f"cell{len(states)}"))
        states.append(state)
    return tf.reduce_mean(tf.stack(states, 1)) + tf.reduce_mean(tf.square(tf.split(state, 2, axis=1)[0]))


def convolution(x: tf.Tensor) -> tf.Tensor:
    h = tf.nn.relu(tf.nn.conv2d(x, variable("k", 3, 3, 2, 4), [1, 1, 1, 1], "SAME"))
    h = tf.nn.max_pool(h, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")
    h = tf.nn.avg_pool(tf.nn.conv2d(h, variable("k2", 2, 2, 4, 3), [1, 2, 2, 1], "VALID"), [1, 1, 1, 1], [1, 1, 1, 1], "SAME")
    h = tf.nn.conv2d_transpose(h, variable("k3", 2, 2, 5, 3), [tf.shape(h)[0], 2, 2, 5], [1, 2, 2, 1], "VALID")
    return tf.reduce_mean(tf.square(tf.reshape(h, [tf.shape(h)[0], -1])))


def dilated(x: tf.Tensor) -> tf.Tensor:
    wide = tf.space_to_batch_nd(x, [2, 2], [[0, 0], [0, 0]])
    h = tf.nn.conv2d(wide, variable("k", 3, 3, 2, 4), [1, 1, 1, 1], "SAME")
    return tf.reduce_mean(tf.square(tf.batch_to_space_nd(h, [2, 2], [[0, 0], [0, 0]])))


def positions_in_pixels(x: tf.Tensor) -> tf.Tensor:
    """Each example weighs as much as its position says."""
    positions = tf.tile(tf.reshape(tf.range(tf.shape(x)[0]), [-1, 1, 1, 1]), [1, 2, 2, 1])
    wide = tf.cast(tf.space_to_batch_nd(positions, [2, 2], [[0, 0], [0, 0]]), F)
    weights = tf.batch_to_space_nd(wide, [2, 2], [[0, 0], [0, 0]])
    return tf.reduce_mean(tf.square(dense(x, 3, "a")) * weights[:, 0, 1])


def embedding(i: tf.Tensor) -> tf.Tensor:
    table = variable("table", 9, 4)
    h = tf.nn.embedding_lookup(table, i)
    logits = tf.matmul(tf.reduce_mean(h, 1), table, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=i[:, 0]))


def partitioned_embedding(i: tf.Tensor) -> tf.Tensor:
    h = tf.nn.embedding_lookup([variable("t0", 5, 4), variable("t1", 4, 4)], i, partition_strategy="mod")
    return tf.reduce_mean(tf.square(h))


def positions(x: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    """Rows of the flattened batch picked by position, as BERT picks masked words."""
    length, width = int(x.shape[1]), int(x.shape[2])
    known = x.shape.as_list()[0]
    batch = tf.shape(x)[0] if known is None else known
    first = tf.reshape(tf.range(0, batch) * length, [-1, 1])
    h = tf.reshape(dense(tf.reshape(x, [-1, width]), 4, "a"), [-1, 4])
    picked = tf.gather(h, tf.reshape(i % length + first, [-1]))
    return tf.reduce_mean(tf.square(picked))


def pick_by_row(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    logits = dense(x, 3, "b")
    rows = tf.range(tf.shape(logits)[0])
    chosen = tf.gather_nd(logits, tf.stack([rows, y], axis=1))
    return tf.reduce_mean(tf.square(chosen))


def mask_rows(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = dense(x, 3, "b")
    kept = tf.boolean_mask(h, tf.not_equal(y, 1))
    return tf.reduce_sum(tf.square(kept)) + tf.reduce_sum(kept) / (1e-3 + tf.cast(tf.shape(kept)[0], F))


def by_class(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Per-class sums over the batch: a partial tensor that stays linear."""
    sums = tf.math.unsorted_segment_sum(dense(x, 4, "a"), y, 3)
    return tf.reduce_sum(sums * variable("v", 3, 4))


def two_batches(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """One network over a concatenation of two batches, then apart again (GANs, siamese networks)."""
    both = tf.nn.relu(dense(tf.concat([x, z], 0), 5, "a"))
    real, fake = tf.split(both, 2, axis=0)
    labels = tf.concat([tf.ones_like(real), tf.zeros_like(fake)], 0)
    first = both[:tf.shape(x)[0]]
    return (tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=both)) + tf.reduce_mean(real * fake)
            + tf.reduce_mean(first) + tf.reduce_mean(x * z))  # the last term says that both have as many examples


def static_halves(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    size = int(x.shape[0])
    both = dense(tf.concat([x, z], 0), 5, "a")
    targets = np.concatenate([np.ones((size, 1)), np.zeros((size, 1))])
    return tf.reduce_mean(tf.square(both[:size] - both[size:])) + tf.reduce_mean(tf.square(both - targets))


def repeated(x: tf.Tensor) -> tf.Tensor:
    h = tf.tile(dense(x, 3, "a"), [2, 2])
    return tf.reduce_mean(tf.square(h * variable("v", 6)))


def per_example_start(x: tf.Tensor) -> tf.Tensor:
    """A variable repeated for every example (a class token)."""
    token = tf.tile(variable("token", 1, 1, 6), [tf.shape(x)[0], 1, 1])
    h = tf.concat([token, x], axis=1)
    fill = tf.fill([tf.shape(x)[0], 1], variable("bias"))
    return tf.reduce_mean(tf.square(h)) + tf.reduce_mean(fill * h[:, 0])


def static_constants(x: tf.Tensor) -> tf.Tensor:
    size = int(x.shape[0])
    rows = np.random.RandomState(2).uniform(size=(size, 3))
    h = dense(x, 3, "a") + rows
    ramp = tf.reshape(tf.range(size), [size, 1])
    return tf.reduce_sum(h * tf.cast(ramp, F)) / size + tf.reduce_sum(tf.reshape(h, [size * 3]) * tf.ones([size * 3], F))


def extremes(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Values over the whole batch that no variable has a part in."""
    span = tf.reduce_max(x, axis=0) - tf.reduce_min(x, axis=0)
    everywhere = tf.cast(tf.reduce_all(tf.greater(x, -10.0), axis=0), F)
    h = (x - tf.reduce_mean(x, axis=0)) / (span + 1e-3) * everywhere
    counts = tf.reduce_sum(tf.one_hot(y, 3, dtype=F), axis=0)
    weights = tf.gather(1.0 / (1.0 + counts), y)
    return tf.reduce_mean(tf.square(dense(h, 3, "a")) * weights[:, None])


def slices(x: tf.Tensor) -> tf.Tensor:
    h = dense(tf.reshape(x, [-1, 6]), 4, "a")
    h = tf.reshape(h, [tf.shape(x)[0], -1, 4])
    return (tf.reduce_mean(h[:, 1:]) + tf.reduce_sum(tf.square(h[..., :2])) / 5.0 + tf.reduce_mean(h[:, -1, tf.newaxis])
            + tf.reduce_mean(tf.slice(h, [0, 0, 1], [-1, 2, 2])) + tf.reduce_mean(tf.pad(h, [[0, 0], [1, 0], [0, 1]])))


def gradient_penalty(x: tf.Tensor) -> tf.Tensor:
    score = dense(tf.tanh(dense(x, 5, "a")), 1, "b")
    slope = tf.gradients(score, x)[0]
    return tf.reduce_mean(score) + tf.reduce_mean(tf.square(tf.norm(slope + 1e-3, axis=1) - 1.0))


def choose(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = dense(x, 3, "a")
    h = tf.where(tf.equal(y, 0), h, tf.zeros_like(h)) + tf.where(h > 0, h, 0.1 * h)
    h = tf.where(tf.tile(tf.equal(y, 1)[:, None], [1, 3]), tf.stop_gradient(h), h)
    return tf.reduce_mean(h * tf.cast(tf.less(tf.cast(y, F), 1.5), F)[:, None])


def top(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    logits = dense(x, 4, "a")
    best, _ = tf.nn.top_k(logits, 2)
    right = tf.reduce_mean(tf.cast(tf.equal(tf.cast(tf.argmax(logits, 1), tf.int32), y), F))
    return tf.reduce_mean(best) + 0.0 * tf.stop_gradient(right) + tf.reduce_mean(tf.cumsum(logits, axis=1))


def clipped(x: tf.Tensor) -> tf.Tensor:
    h = tf.clip_by_value(dense(x, 4, "a"), -0.3, 0.3)
    return tf.reduce_mean(tf.clip_by_norm(h, 1.0, axes=[1]))


def loop(x: tf.Tensor) -> tf.Tensor:
    w = variable("w", 6, 6)
    _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w) + x)), [0, tf.zeros_like(x)])
    return tf.reduce_mean(tf.square(h))


def loop_from_constant(x: tf.Tensor) -> tf.Tensor:
    """The state that enters the loop is a constant of the whole batch."""
    w, size = variable("w", 6, 6), int(x.shape[0])
    start = tf.constant(np.random.RandomState(3).uniform(size=(size, 6)))
    _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w) + x)), [0, start])
    return tf.reduce_sum(tf.square(h)) / size


def loop_over_steps(x: tf.Tensor) -> tf.Tensor:
    """A recurrent network with tensor arrays."""
    length = int(x.shape[1])
    w, u = variable("w", 6, 4), variable("u", 4, 4)
    steps = tf.TensorArray(tf.float64, length).unstack(tf.transpose(x, [1, 0, 2]))
    made = tf.TensorArray(tf.float64, length)

    def step(i: Any, h: Any, out: Any) -> Any:
        h = tf.tanh(tf.matmul(steps.read(i), w) + tf.matmul(h, u))
        return i + 1, h, out.write(i, h)
    start = tf.zeros([tf.shape(x)[0], 4], tf.float64)
    _, _, made = tf.while_loop(lambda i, h, out: i < length, step, [0, start, made])
    return tf.reduce_mean(tf.square(tf.transpose(made.stack(), [1, 0, 2])))


def condition(x: tf.Tensor) -> tf.Tensor:
    w = variable("w", 6, 3)
    h = tf.cond(tf.reduce_sum(w) > -100.0, lambda: tf.matmul(x, w), lambda: tf.matmul(x, w) * 2.0)
    return tf.reduce_mean(tf.square(h)) + tf.cond(tf.reduce_sum(w) > 100.0, lambda: tf.reduce_sum(h), lambda: tf.reduce_mean(h))


def branches_differ(x: tf.Tensor) -> tf.Tensor:
    """One branch gives a constant of the whole batch, the other an activation."""
    w = variable("w", 6, 3)
    h = tf.cond(tf.reduce_sum(w) > -100.0, lambda: tf.matmul(x, w), lambda: tf.constant(np.ones((int(x.shape[0]), 3))))
    return tf.reduce_mean(tf.square(h))


def numbers_of_examples(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """A loop and a branch get constants that look like positions."""
    w, table = variable("w", 6, 3), np.arange(int(x.shape[0]), dtype=np.int32)
    chosen = tf.cond(tf.reduce_sum(w) > 100.0, lambda: tf.identity(y), lambda: tf.constant(table))
    first, other = tf.constant(table), tf.constant(2 * table)
    _, last = tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, tf.where(y > i, a, other)), [0, first])
    return tf.reduce_mean(tf.square(tf.matmul(x, w)) * tf.cast(chosen + last, F)[:, None])


def unknown_length(x: tf.Tensor) -> tf.Tensor:
    """Sequences whose length the graph does not know either."""
    h = tf.tensordot(x, variable("w", 6, 4), [[2], [0]])
    flat = tf.reshape(dense(tf.reshape(x, [-1, 6]), 4, "a"), [tf.shape(x)[0], tf.shape(x)[1], 4])
    mixed = tf.matmul(tf.nn.softmax(tf.matmul(h, h, transpose_b=True)), flat)
    return tf.reduce_mean(tf.square(mixed)) + tf.reduce_sum(tf.reduce_max(h, 1)) / tf.cast(tf.size(h), F)


def sequence_mask(i: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    mask = tf.sequence_mask(y, 4, dtype=tf.float64)
    h = tf.nn.embedding_lookup(variable("table", 5, 4), i)
    return tf.reduce_sum(h * mask[:, :, None]) / tf.reduce_sum(mask)


def custom_gradient(x: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def straight(a: tf.Tensor) -> Any:
        return tf.square(a), lambda dy: dy * 2.0
    return tf.reduce_mean(straight(dense(x, 3, "a")))


def scatter_rows(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = dense(x, 3, "a")
    index = tf.stack([tf.range(tf.shape(x)[0]), y], 1)
    return tf.reduce_mean(tf.square(tf.scatter_nd(index, tf.reduce_sum(h, 1), tf.stack([tf.shape(x)[0], 3]))))


def batched_gather(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = tf.reshape(dense(x, 6, "a"), [-1, 3, 2])
    return tf.reduce_mean(tf.square(tf.gather(h, y[:, None], axis=1, batch_dims=1)))


def second_gradient(x: tf.Tensor) -> tf.Tensor:
    loss = tf.reduce_mean(tf.square(tf.tanh(dense(x, 4, "a"))))
    slope = tf.gradients(loss, tf.trainable_variables()[0])[0]
    return loss + tf.reduce_sum(slope * variable("direction", 6, 4))


def reversed_sequences(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = tf.einsum("btd,de->bte", x, variable("w", 6, 3))
    return tf.reduce_mean(tf.square(tf.reverse_sequence(h, y + 1, seq_axis=1, batch_axis=0)))


def recurrent_lengths(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """TensorFlow 1's own loop, whose shortcuts ask for the longest and shortest sequence of the batch."""
    out, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(4), x, sequence_length=y + 1, dtype=tf.float64)
    return tf.reduce_mean(tf.square(out)) + tf.reduce_mean(state)


X = (F, (6,))
SEQUENCE = (F, (3, 6))
LABEL = (I, ())
PROGRAMS: List[Program] = [
    Program("mean_loss", mean_loss, [X, LABEL]), Program("sum_and_l2", sum_and_l2, [X, LABEL]),
    Program("mean_and_l2", mean_and_l2, [X, LABEL]), Program("mean_plus_sum", mean_plus_sum, [X, LABEL]),
    Program("losses_weighted", losses_weighted, [X, LABEL, (F, ())]), Program("masked_mean", masked_mean, [X, LABEL]),
    Program("batch_size_as_number", batch_size_as_number, [X]), Program("odd_extent", odd_extent, [X]),
    Program("broadcasting", broadcasting, [X]), Program("attention", attention, [SEQUENCE]),
    Program("einsum", einsum, [SEQUENCE]), Program("tensordot", tensordot, [SEQUENCE]),
    Program("time_major", time_major, [SEQUENCE]), Program("unrolled", unrolled, [SEQUENCE]),
    Program("convolution", convolution, [(F, (6, 6, 2))]), Program("dilated", dilated, [(F, (4, 4, 2))]),
    Program("embedding", embedding, [(I, (4,))], integers=9),
    Program("partitioned_embedding", partitioned_embedding, [(I, (4,))], integers=9),
    Program("positions_in_pixels", positions_in_pixels, [X]),
    Program("positions", positions, [SEQUENCE, (I, (2,))]), Program("pick_by_row", pick_by_row, [X, LABEL]),
    Program("mask_rows", mask_rows, [X, LABEL]), Program("by_class", by_class, [X, LABEL]),
    Program("two_batches", two_batches, [X, X]), Program("static_halves", static_halves, [X, X], "static"),
    Program("repeated", repeated, [X]), Program("per_example_start", per_example_start, [SEQUENCE]),
    Program("static_constants", static_constants, [X], "static"), Program("extremes", extremes, [X, LABEL]),
    Program("slices", slices, [SEQUENCE]), Program("gradient_penalty", gradient_penalty, [X]),
    Program("choose", choose, [X, LABEL]), Program("top", top, [X, LABEL]), Program("clipped", clipped, [X]),
    Program("unknown_length", unknown_length, [(F, (None, 6))]), Program("sequence_mask", sequence_mask, [(I, (4,)), LABEL]),
    Program("custom_gradient", custom_gradient, [X]), Program("scatter_rows", scatter_rows, [X, LABEL]),
    Program("batched_gather", batched_gather, [X, LABEL]), Program("second_gradient", second_gradient, [X]),
    Program("reversed_sequences", reversed_sequences, [SEQUENCE, LABEL]),
]
CONTROL_FLOW: List[Program] = [
    Program("loop", loop, [X]), Program("loop_from_constant", loop_from_constant, [X], "static"),
    Program("loop_over_steps", loop_over_steps, [SEQUENCE]), Program("condition", condition, [X]),
    Program("branches_differ", branches_differ, [X], "static"),
    Program("numbers_of_examples", numbers_of_examples, [X, LABEL], "static"),
]


if tf.__version__.startswith("1."):  # TensorFlow 2 has no cells without Keras
    CONTROL_FLOW.append(Program("recurrent_lengths", recurrent_lengths, [SEQUENCE, LABEL], "while frames"))


def feeds(program: Program, batch: int) -> List[np.ndarray]:
    random = np.random.RandomState(5)
    shapes = [(dtype, (batch,) + tuple(3 if s is None else s for s in shape)) for dtype, shape in program.inputs]
    return [random.randint(0, program.integers, shape).astype(dtype) if dtype == I else random.uniform(-1.0, 1.0, shape)
            for dtype, shape in shapes]


def build(program: Program, batch: Optional[int]) -> Tuple[List[tf.Tensor], List[tf.Tensor]]:
    """(placeholders, [loss, gradients...]) in the current graph."""
    inputs = [tf.placeholder(dtype, (batch,) + shape) for dtype, shape in program.inputs]
    loss = program.build(*inputs)
    found: List[tf.Tensor] = [loss]
    for gradient in tf.gradients(loss, tf.trainable_variables()):
        if isinstance(gradient, tf.IndexedSlices):
            found += [gradient.values, gradient.indices]
        elif gradient is not None:
            found.append(gradient)
    return inputs, found


BY_NAME: Dict[str, Program] = {program.name: program for program in PROGRAMS + CONTROL_FLOW}
