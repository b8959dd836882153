"""Small scripts with loops and conditionals, run as they are and in parallel."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.graph_editor.graphs import control_flow
from tests.numeric.script import dense, weight

BATCH, WIDTH = 8, 3
Body = Callable[[tf.Tensor, tf.Tensor], Any]


class Setting(NamedTuple):
    """``version`` of control flow; whether the graph knows the size of the batch; replicas and micro-batches (None: the
    script as it is)."""

    version: int
    static: bool
    replicas: Optional[int] = None
    micro_batches: int = 1
    extra: Dict[str, Any] = {}
    dataset: bool = False
    devices: int = 2


class Result(NamedTuple):
    """Everything a script computed, in one vector, and its graph."""

    numbers: np.ndarray
    graph: tf.Graph


def loop(count: int, body: Callable[..., Any], *values: tf.Tensor) -> List[tf.Tensor]:
    """``count`` times ``values = body(i, *values)``."""
    return tf.while_loop(lambda i, *_: i < count, lambda i, *now: (i + 1,) + tuple(body(i, *now)), (0,) + values)[1:]


def rows(x: tf.Tensor) -> Any:
    """The number of examples: a number where the graph knows it."""
    size = x.shape.as_list()[0]
    return tf.shape(x)[0] if size is None else size


def run(body: Body, setting: Setting, steps: int = 3) -> Result:
    """Trains ``mean((y v - t)^2) + term`` with ``y, term = body(x, w)`` (or ``y`` alone)."""
    if setting.replicas:
        config = dict({"num_micro_batch": setting.micro_batches}, **setting.extra)
        wh.init(config, cluster=f"cpu:{setting.devices}")
    try:
        graph = tf.Graph()
        with graph.as_default(), control_flow(setting.version), tf.variable_scope("", use_resource=True):
            r = np.random.RandomState(0)
            data = r.randn(steps * 2, BATCH, WIDTH), r.randn(steps * 2, BATCH, 2)
            x, t = _inputs(data, setting)
            with wh.replicate(setting.replicas) if setting.replicas else contextlib.nullcontext():
                y = body(x, tf.convert_to_tensor(weight("w", [WIDTH, WIDTH], "float64")))
                y, term = y if isinstance(y, tuple) else (y, 0.0)
                loss = tf.reduce_mean(tf.square(dense(y, 2, "head") - t)) + term
            train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            variables = tf.global_variables()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                found = []
                for i in range(steps):
                    feed = {} if setting.dataset else {x: data[0][i], t: data[1][i]}
                    found += session.run([loss, y, train], feed)[:2]
                found += session.run(variables)
        return Result(np.concatenate([np.ravel(value) for value in found]), graph)
    finally:
        wh.shutdown()


def _inputs(data: Any, setting: Setting) -> Any:
    if setting.dataset:
        flat = tuple(part.reshape(-1, part.shape[-1]) for part in data)
        batches = tf.data.Dataset.from_tensor_slices(flat).batch(BATCH, drop_remainder=setting.static)
        return tf.data.make_one_shot_iterator(batches).get_next()
    size = BATCH if setting.static else None
    return [tf.placeholder(tf.float64, [size, part.shape[-1]]) for part in data]


def functional_clones(graph: tf.Graph) -> List[tf.Operation]:
    """The clones of all ops that call functions."""
    types = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "PartitionedCall", "StatefulPartitionedCall")
    return [op for op in graph.get_operations() if op.type in types and op.name.startswith("whale/")]


# -- bodies ------------------------------------------------------------------------------------------------------------


def reshaped(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Shapes with the size of the batch in the body."""
    return loop(2, lambda i, h: [tf.reshape(tf.tanh(tf.matmul(tf.reshape(h, [rows(x), 1, WIDTH])[:, 0], w)),
                                            [rows(x), WIDTH])], x)[0]


def mean_in_body(x: tf.Tensor, w: tf.Tensor) -> Any:
    """A mean over the batch, added up over the iterations."""
    h, total = loop(3, lambda i, h, total: (tf.tanh(tf.matmul(h, w)), total + tf.reduce_mean(h * h)),
                    x, tf.constant(0.0, tf.float64))
    return h, total


def weight_decay_in_body(x: tf.Tensor, w: tf.Tensor) -> Any:
    """A sum over the batch and a term that does not depend on the batch: clones must not count it once each."""
    def body(i: tf.Tensor, h: tf.Tensor, total: tf.Tensor) -> Any:
        return tf.tanh(tf.matmul(h, w)), total + tf.reduce_sum(h * h) + 0.1 * tf.reduce_sum(w * w)

    h, total = loop(3, body, x, tf.constant(0.0, tf.float64))
    return h, 0.01 * total


def divided_by_rows(x: tf.Tensor, w: tf.Tensor) -> Any:
    """A sum divided by the number of examples."""
    def body(i: tf.Tensor, h: tf.Tensor, total: tf.Tensor) -> Any:
        return tf.tanh(tf.matmul(h, w)), total + tf.reduce_sum(h * h) / tf.cast(tf.shape(h)[0], tf.float64)

    h, total = loop(3, body, x, tf.constant(0.0, tf.float64))
    return h, total


def positions(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Each example's place in the batch."""
    def body(i: tf.Tensor, h: tf.Tensor) -> Any:
        place = tf.cast(tf.range(tf.shape(h)[0]), tf.float64)
        return [tf.tanh(tf.matmul(h, w)) + 0.01 * tf.stop_gradient(tf.expand_dims(place, 1) + 0.0 * h)]

    return loop(2, body, x)[0]


def nested(x: tf.Tensor, w: tf.Tensor) -> Any:
    """A loop in a loop; in the inner one a sum over the batch and a term that does not depend on it."""
    def inner(j: tf.Tensor, h: tf.Tensor, total: tf.Tensor) -> Any:
        return tf.tanh(tf.matmul(h, w)), total + tf.reduce_sum(h * h) + 0.1 * tf.reduce_sum(w * w)

    h, total = loop(2, lambda i, h, total: loop(2, inner, h, total), x, tf.constant(0.0, tf.float64))
    return h, 0.01 * total


def branches(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Another branch in every second iteration."""
    def body(i: tf.Tensor, h: tf.Tensor) -> Any:
        return [tf.cond(tf.equal(i % 2, 0), lambda: tf.tanh(tf.matmul(h, w)), lambda: tf.nn.relu(h) - h * 0.5)]

    return loop(3, body, x)[0]


def weights_alone(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop that does not depend on the batch, but whose gradient does."""
    return tf.matmul(x, w) * loop(3, lambda i, u: [tf.tanh(tf.matmul(u, w))], tf.ones([1, WIDTH], tf.float64))[0]


def drawn(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Random numbers for each example, in place of the example."""
    return loop(1, lambda i, h: [h * 0.0 + tf.random_uniform(tf.shape(h), seed=7, dtype=tf.float64)], x)[0]
