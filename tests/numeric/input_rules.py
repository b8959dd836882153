"""The lines that generated programs over several inputs are made of, as text with the rows of their results."""
from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Sequence, Tuple, Union

import tensorflow.compat.v1 as tf

Rows = Union[int, Tuple[int, ...]]


class Rule(NamedTuple):
    """``code`` of some operands ``{a}``, ``{b}``, ``{c}``, of so many rows that it ``fits``, which gives ``rows``; a tuple for
    several results. ``{k}`` is a small number."""

    code: str
    rows: Callable[..., Rows]
    fits: Callable[..., bool] = lambda *rows: True

    @property
    def arity(self) -> int:
        return sum("{%s}" % name in self.code for name in "abc")


def _same(a: int, *others: int) -> int:
    return a


def _even(a: int, *others: int) -> bool:
    return a % 2 == 0


def _larger(a: int, b: int) -> bool:
    return a >= b + 2


def _equal(a: int, b: int) -> bool:
    return a == b


def _sum(a: int, b: int, c: int) -> bool:
    return a == b + c


JOINS: Dict[str, Rule] = {
    "concat": Rule("tf.concat([{a}, {b}], 0)", lambda a, b: a + b),
    "concat of three": Rule("tf.concat([{a}, {b}, {c}], 0)", lambda a, b, c: a + b + c),
    "concat with itself": Rule("tf.concat([{a}, {b}, -{a}], 0)", lambda a, b: 2 * a + b),
    "stack": Rule("tf.reshape(tf.stack([{a}, 2.0 * {b}]), [-1, 3])", lambda a, b: 2 * a, _equal),
    "interleave": Rule("tf.reshape(tf.stack([{a}, 2.0 * {b}], 1), [-1, 3])", lambda a, b: 2 * a, _equal),
    "add": Rule("{a} + 0.5 * {b}", _same, _equal),
    "where": Rule("tf.where(tf.greater({a}, {b}), {a}, 0.5 * {b})", _same, _equal),
    "cross attention": Rule("tf.matmul(tf.nn.softmax(tf.matmul({a}, {b}, transpose_b=True)), {b})", _same),
    "add mean of": Rule("{a} + tf.reduce_mean({b}, 0, keepdims=True)", _same),
    "stitch": Rule("tf.dynamic_stitch([tf.range(tf.shape({a})[0]), tf.shape({a})[0] + tf.range(tf.shape({b})[0])], [{a}, {b}])",
                   lambda a, b: a + b),
    "concat of columns": Rule("tf.transpose(tf.concat([tf.transpose({a}), tf.transpose({b})], 1))", lambda a, b: a + b),
    "side by side": Rule("tf.concat([{a}, {b}], 1)[:, 1:4]", _same, _equal),
    "mean of stack": Rule("tf.reduce_mean(tf.stack([{a}, {b}]), 0)", _same, _equal),
    "tile": Rule("tf.tile({a}, [2, 1])", lambda a: 2 * a),
    "repeat": Rule("tf.repeat({a}, 2, axis=0)", lambda a: 2 * a),
}

CUTS: Dict[str, Rule] = {
    "halves": Rule("tf.concat([{a}[:tf.shape({a})[0] // 2], 3.0 * {a}[tf.shape({a})[0] // 2:]], 0)", _same),
    "first half": Rule("{a}[:tf.shape({a})[0] // 2]", lambda a: a // 2),
    "second half": Rule("{a}[tf.shape({a})[0] // 2:]", lambda a: a - a // 2),
    "split in two": Rule("tf.split({a}, 2)", lambda a: (a // 2, a // 2), _even),
    "split by sizes": Rule("tf.split({a}, [tf.shape({b})[0], tf.shape({c})[0]])", lambda a, b, c: (b, c), _sum),
    "up to size": Rule("{a}[:tf.shape({b})[0]]", lambda a, b: b, _larger),
    "from size": Rule("{a}[tf.shape({b})[0]:]", lambda a, b: a - b, _larger),
    "last of size": Rule("{a}[-tf.shape({b})[0]:]", lambda a, b: b, _larger),
    "slice from size": Rule("tf.slice({a}, [tf.shape({b})[0], 0], [-1, -1])", lambda a, b: a - b, _larger),
    "up to size of concat": Rule("{a}[:tf.shape(tf.concat([{b}, {c}], 0))[0]]", lambda a, b, c: b + c, lambda a, b, c: a > b + c),
    "mask up to size": Rule("tf.boolean_mask({a}, tf.range(tf.shape({a})[0]) < tf.shape({b})[0])", lambda a, b: b, _larger),
    "partition at size": Rule("tf.dynamic_partition({a}, tf.cast(tf.range(tf.shape({a})[0]) < tf.shape({b})[0], tf.int32), 2)",
                              lambda a, b: (a - b, b), _larger),
    "gather up to size": Rule("tf.gather({a}, tf.range(tf.shape({b})[0]))", lambda a, b: b, _larger),
    "every second": Rule("{a}[::2]", lambda a: (a + 1) // 2),
    "differences": Rule("{a}[1:] - {a}[:-1]", lambda a: a - 1),
    "rows of greatest": Rule("tf.gather({a}, tf.math.top_k({a}[:, 0], 2)[1])", lambda a: 2),
    "first two": Rule("{a}[:2]", lambda a: 2),
    "two blocks": Rule("tf.reshape(tf.reshape({a}, [2, -1, 3]) * tf.constant([[[1.0]], [[3.0]]], tf.float64), [-1, 3])", _same,
                       _even),
    "mean of two blocks": Rule("tf.reduce_mean(tf.reshape({a}, [2, -1, 3]), 0)", lambda a: a // 2, _even),
    "mean of pairs": Rule("tf.reduce_mean(tf.reshape({a}, [-1, 2, 3]), 1)", lambda a: a // 2, _even),
}

POSITIONS: Dict[str, Rule] = {
    "range": Rule("{a} * (0.1 * tf.cast(tf.range(tf.shape({a})[0]), tf.float64)[:, None])", _same),
    "count": Rule("{a} * (0.1 * tf.cumsum(tf.ones([tf.shape({a})[0], 1], tf.float64)))", _same),
    "count of ones like": Rule("{a} * (0.1 * tf.cumsum(tf.ones_like({a})))", _same),
    "linspace": Rule("{a} * tf.linspace(tf.constant(0.5, tf.float64), 1.5, tf.shape({a})[0])[:, None]", _same),
    "position mask": Rule("{a} * (1.0 + tf.cast(tf.range(tf.shape({a})[0]) < tf.shape({b})[0], tf.float64)[:, None])", _same,
                          _larger),
    "ones and zeros": Rule("{a} * tf.concat([tf.ones([tf.shape({b})[0], 1], tf.float64), 0.5 + tf.zeros([tf.shape({c})[0], 1], "
                           "tf.float64)], 0)", _same, _sum),
    "ones and zeros like": Rule("{a} * tf.concat([tf.ones_like({b}), 0.5 + tf.zeros_like({c})], 0)", _same, _sum),
    "repeated numbers": Rule("{a} * tf.repeat(tf.constant([1.0, 3.0], tf.float64), "
                             "[tf.shape({b})[0], tf.shape({c})[0]])[:, None]", _same, _sum),
    "one hot": Rule("{a} + tf.one_hot(tf.range(tf.shape({a})[0]) % 3, 3, dtype=tf.float64)", _same),
    "fill": Rule("{a} * tf.fill([tf.shape({a})[0], 3], 1.0 / tf.cast(tf.shape({a})[0], tf.float64))", _same),
}

WHOLE: Dict[str, Rule] = {
    "reverse": Rule("tf.reverse({a}, [0])", _same),
    "reversed slice": Rule("{a} + 0.5 * {a}[::-1]", _same),
    "gather reversed": Rule("tf.gather({a}, tf.range(tf.shape({a})[0])[::-1])", _same),
    "gather sorted": Rule("tf.gather({a}, tf.argsort({a}[:, 0]))", _same),
    "gather modulo": Rule("{a} + tf.gather({b}, tf.range(tf.shape({a})[0]) % tf.shape({b})[0])", _same),
    "roll": Rule("{a} * tf.roll({a}, 1, 0)", _same),
    "cumulative sum": Rule("0.2 * tf.cumsum({a})", _same),
    "centre": Rule("{a} - tf.reduce_mean({a}, 0, keepdims=True)", _same),
    "normalise": Rule("({a} - tf.nn.moments({a}, [0])[0]) * tf.math.rsqrt(tf.nn.moments({a}, [0])[1] + 0.1)", _same),
    "loop over rows": Rule("tf.map_fn(lambda row: tf.sin(row) + row[0], {a})", _same),
    "scatter reversed": Rule("tf.scatter_nd(tf.range(tf.shape({a})[0])[::-1, None], {a}, tf.shape({a}))", _same),
    "softmax": Rule("tf.nn.softmax({a}, 0) * tf.cast(tf.shape({a})[0], tf.float64)", _same),
    "attention": Rule("tf.matmul(tf.nn.softmax(tf.matmul({a}, {a}, transpose_b=True)), {a})", _same),
    "pad": Rule("tf.pad({a}, [[1, 0], [0, 0]])", lambda a: a + 1),
    "masked sum": Rule("{a} + 0.1 * tf.reduce_sum(tf.boolean_mask({a}, {a}[:, 0] > 0.0), 0, keepdims=True)", _same),
    "segments": Rule("tf.gather(tf.math.unsorted_segment_sum({a}, tf.range(tf.shape({a})[0]) % 4, 4), "
                     "tf.range(tf.shape({a})[0]) % 4)", _same),
    "condition": Rule("tf.cond(tf.reduce_mean({a}) > 0.1, lambda: tf.sin({a}), lambda: {a} - 0.1)", _same),
}

DRAWS: Dict[str, Rule] = {
    "uniform": Rule("{a} * tf.random.uniform([tf.shape({a})[0], 1], dtype=tf.float64, seed={k})", _same),
    "uniform without seed": Rule("{a} * tf.random.uniform(tf.shape({a}), dtype=tf.float64)", _same),
    "normal": Rule("{a} + tf.random.normal(tf.shape({a}), dtype=tf.float64, seed={k})", _same),
    "stateless": Rule("{a} * tf.random.stateless_uniform([tf.shape({a})[0], 1], seed=[1, {k}], dtype=tf.float64)", _same),
    "stateless normal": Rule("{a} + tf.random.stateless_normal(tf.shape({a}), seed=[1, {k}], dtype=tf.float64)", _same),
    "dropout": Rule("tf.nn.dropout({a}, rate=0.3, seed={k})", _same),
    "shuffle": Rule("tf.gather({a}, tf.random.shuffle(tf.range(tf.shape({a})[0]), seed={k}))", _same),
    "shuffle rows": Rule("{a} + tf.stop_gradient(tf.random.shuffle({a}, seed={k}))", _same),
    "crop": Rule("tf.slice(tf.pad({a}, [[0, 0], [1, 1]]), [0, tf.random.uniform([], 0, 3, tf.int32, seed={k})], [-1, 3])", _same),
    "noise of a size": Rule("{a} + tf.concat([tf.random.normal([tf.shape({b})[0], 3], dtype=tf.float64, seed={k}), {c}], 0)",
                            _same, _sum),
}

TERMS: Dict[str, Rule] = {
    "mean": Rule("tf.reduce_mean(tf.square({a}))", _same),
    "sum": Rule("0.1 * tf.reduce_sum(tf.square({a}))", _same),
    "mean of sums": Rule("tf.reduce_mean(tf.reduce_sum(tf.square({a}), 1))", _same),
    "sum over size": Rule("tf.reduce_sum(tf.square({a})) / tf.cast(tf.shape({a})[0], tf.float64)", _same),
    "sum over other size": Rule("tf.reduce_sum(tf.square({a})) / tf.cast(tf.shape({b})[0], tf.float64)", _same),
    "two means": Rule("tf.reduce_mean(tf.square({a})) + 2.0 * tf.reduce_mean(tf.square(1.0 - {b}))", _same),
    "ratio": Rule("tf.reduce_mean(tf.square({a})) / (1.0 + tf.reduce_mean(tf.abs({b})))", _same),
    "share": Rule("tf.reduce_sum({a}) / (1.0 + tf.reduce_sum(tf.abs({b})))", _same),
    "mean of means": Rule("tf.reduce_mean(tf.stack([tf.reduce_mean(tf.square({a})), tf.reduce_mean({b})]))", _same),
    "root": Rule("tf.sqrt(tf.reduce_mean(tf.square({a})) + 0.1)", _same),
    "log sum exp": Rule("tf.reduce_logsumexp({a})", _same),
    "greatest": Rule("tf.reduce_max({a}) - 0.1 * tf.reduce_min({a})", _same),
    "threshold": Rule("tf.reduce_mean(tf.square({a}) * tf.cast({a} >= 0.9 * tf.reduce_mean(tf.stop_gradient({b})), tf.float64))",
                      _same),
    "cross entropy": Rule("-tf.reduce_mean(tf.reduce_sum(tf.stop_gradient(tf.nn.softmax({b})) * tf.nn.log_softmax({a}), -1))",
                          _same, _equal),
    "masked": Rule("0.1 * tf.reduce_sum(tf.boolean_mask(tf.square({a}), {a}[:, 0] > 0.0))", _same),
    "product": Rule("tf.reduce_mean({a}) * tf.reduce_mean(tf.square({b}))", _same),
    "distances": Rule("tf.reduce_mean(tf.square({a}[:, None] - {b}[None]))", _same),
    "last rows": Rule("tf.reduce_mean(tf.square({a}[-1])) + tf.reduce_mean(tf.square({b}[0]))", _same),
}

GROUPS = {"joins": JOINS, "cuts": CUTS, "positions": POSITIONS, "whole": WHOLE}

# what makes a matrix of an input that is none; {a}, {b}: such inputs, {t}: a table of rows, {f}: rows for features;
# table(): a look-up table of ids
OPENED: Dict[str, Sequence[Tuple[str, int]]] = {  # code and number of inputs
    "ids": [("tf.gather({t}, {a})", 1), ("tf.nn.embedding_lookup({t}, {a})", 1),
            ("tf.matmul(tf.one_hot({a}, 7, dtype=tf.float64), {t})", 1), ("tf.gather({t}, tf.concat([{a}, {b}], 0))", 2),
            ("tf.gather({t}, tf.strings.to_hash_bucket_fast(tf.strings.as_string({a}), 7))", 1),
            ("tf.reduce_sum(tf.gather({t}, tf.strings.to_hash_bucket_fast(tf.strings.split(tf.strings.join(["
             "tf.strings.as_string({a}), tf.strings.as_string(-{a})], ' '), result_type='RaggedTensor').to_tensor(''), 7)), 1)",
             1),
            ("tf.reduce_sum(tf.gather({t}, tf.strings.unicode_decode(tf.strings.join([tf.strings.as_string({a}), 'a']), 'UTF-8')"
             ".to_tensor() % 7), 1)", 1),
            ("tf.gather({t}, table().lookup({a}))", 1),
            ("tf.matmul(tf.cast(tf.reshape(tf.image.crop_and_resize(tf.reshape(tf.one_hot({a}, 7), [-1, 1, 7, 1]), tf.tile("
             "[[0.0, 1.0, 1.0, 0.0]], [tf.shape({a})[0], 1]), tf.range(tf.shape({a})[0]), [1, 7]), [-1, 7]), tf.float64), {t})",
             1)],
    "ragged": [("tf.reduce_sum(tf.gather({t}, {a}), 1)", 1), ("tf.reduce_mean(tf.gather({t}, {a}), 1)", 1),
               ("tf.reduce_sum(tf.gather({t}, {a}.to_tensor()), 1)", 1),
               ("tf.math.segment_sum(tf.gather({t}, {a}.flat_values), {a}.value_rowids())", 1),
               ("tf.cast({a}.row_lengths(), tf.float64)[:, None] * {t}[:1]", 1),
               ("tf.reduce_sum(tf.gather({t}, tf.concat([{a}, {b}], 0)), 1)", 2),
               ("tf.reduce_max(tf.gather({t}, {a}), 1)", 1),
               ("tf.reduce_sum(tf.ragged.map_flat_values(tf.sin, tf.gather({t}, {a})), 1)", 1),
               ("tf.reduce_sum(tf.gather({t}, {a}) * 2.0, 1)", 1),
               ("tf.nn.embedding_lookup_sparse({t}, {a}.to_sparse(), None, combiner='mean')", 1),
               ("tf.gather({t}, {a}.to_tensor()[:, 0])", 1),
               ("tf.reduce_sum(tf.gather({t}, tf.ragged.map_flat_values(table().lookup, {a})), 1)", 1),
               ("tf.reduce_sum(tf.gather({t}, tf.strings.to_hash_bucket_fast(tf.strings.as_string({a}.to_tensor()), 7)), 1)", 1)],
    # with empty rows
    "hollow": [("tf.reduce_sum(tf.gather({t}, {a}), 1)", 1), ("tf.reduce_sum(tf.gather({t}, {a}.to_tensor()), 1)", 1),
               ("tf.cast({a}.row_lengths(), tf.float64)[:, None] * {t}[:1]", 1),
               ("tf.math.unsorted_segment_sum(tf.gather({t}, {a}.flat_values), {a}.value_rowids(), {a}.nrows())", 1)],
    "numbers": [("tf.reduce_sum({a}, 1)[:, None] * {t}[:1]", 1), ("tf.reduce_mean(tf.sin({a}), 1)[:, None] * {t}[:1]", 1),
                ("tf.reduce_sum({a}.to_tensor(), 1, keepdims=True) * {t}[:1]", 1)],
    "sparse": [("tf.sparse.sparse_dense_matmul({a}, {f})", 1), ("tf.matmul(tf.sparse.to_dense({a}), {f})", 1),
               ("tf.reshape(tf.sparse.reduce_sum({a}, 1), [-1, 1]) * {f}[:1]", 1),
               ("tf.sparse.sparse_dense_matmul(tf.sparse.concat(0, [{a}, {b}]), {f})", 2),
               ("tf.sparse.sparse_dense_matmul({a}, {f}) + tf.matmul(tf.reshape(tf.sparse.reduce_sum({a}, 0), [1, 4]), {f})", 1),
               ("tf.sparse.sparse_dense_matmul(tf.sparse.reorder({a}), {f})", 1),
               ("tf.matmul(tf.sparse.to_dense(tf.sparse.fill_empty_rows({a}, 0.5)[0]), {f})", 1),
               ("tf.sparse.segment_mean({f}, tf.cast({a}.indices[:, 1], tf.int32), tf.cast({a}.indices[:, 0], tf.int32), "
                "num_segments=tf.cast({a}.dense_shape[0], tf.int32))", 1),
               ("tf.matmul(tf.scatter_nd({a}.indices, {a}.values, {a}.dense_shape), {f})", 1)],
}
if hasattr(tf.sparse, "bincount"):
    _COUNTED = "tf.sparse.to_dense(tf.sparse.bincount({a}, minlength=7, maxlength=7, axis=-1, weights=None))"
    OPENED["ids"] = [*OPENED["ids"], (f"tf.matmul(tf.cast({_COUNTED.format(a='{a}[:, None]')}, tf.float64), {{t}})", 1)]
    OPENED["ragged"] = [*OPENED["ragged"], (f"tf.matmul(tf.cast({_COUNTED}, tf.float64), {{t}})", 1)]
