"""A small script for EPL's API or for none, and its numbers."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np

from whale_tf._tf_compat import tf, v1

FEATURES, CLASSES = 6, 4


class Outcome(NamedTuple):
    """What training gave.

    Attributes:
        losses: of each step.
        values: of every variable of the local script, by name.
    """

    losses: List[float]
    values: Dict[str, Any]


def examples(count: int, seed: int = 0) -> Dict[str, Any]:
    random = np.random.RandomState(seed)
    return {"x": random.randn(count, FEATURES), "y": random.randint(0, CLASSES, count)}


def batches(count: int, batch: int, is_static: bool) -> Any:
    """An initializable iterator's elements, `{"x": [batch, features], "y": [batch]}`, as in scripts for EPL."""
    dataset = tf.data.Dataset.from_tensor_slices(examples(count)).batch(batch, drop_remainder=is_static)
    iterator = v1.data.make_initializable_iterator(dataset)
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def weights(name: str, shape: List[int]) -> Any:
    values = np.random.RandomState(sum(map(ord, name))).uniform(-0.5, 0.5, shape)
    return v1.get_variable(name, shape, tf.float64, v1.constant_initializer(values, tf.float64))


def layer(x: Any, width: int, name: str) -> Any:
    return tf.tanh(tf.matmul(x, weights(name + "_kernel", [int(x.shape[-1]), width])) + weights(name + "_bias", [width]))


def mean_loss(logits: Any, y: Any) -> Any:
    return tf.reduce_mean(v1.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def train(build: Callable[[], Any], steps: int, optimizer: Optional[Callable[[], Any]] = None,
          start: Callable[[], Any] = lambda: None) -> Outcome:
    """Trains a new graph for some steps.

    Args:
        build: makes the loss.
        start: called first in the graph.
    """
    with v1.Graph().as_default():
        start()
        loss = build()
        made = v1.train.MomentumOptimizer(0.5, 0.9) if optimizer is None else optimizer()
        step = made.minimize(loss, v1.train.get_or_create_global_step())
        variables = {variable.name: variable for variable in v1.global_variables()}
        with v1.train.MonitoredTrainingSession() as session:
            losses = [float(session.run([loss, step])[0]) for _ in range(steps)]
            return Outcome(losses, session.run(variables))


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-9) -> None:
    """Losses and every variable are equal, and training changed something."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert len(set(expected.losses)) > 1 and expected.values.keys() <= found.values.keys()
    for name, value in expected.values.items():
        np.testing.assert_allclose(found.values[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
