"""A small model whose first layer a test gives, trained without a plan or under one."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh

Plan = Tuple[Dict[str, Any], Any, Optional[Callable[[], Any]]]  # configuration, cluster, strategy of both stages
PLANS: Dict[str, Plan] = {
    "two stages": ({"num_micro_batch": 2}, "cpu:2", lambda: wh.replicate(1)),
    "nested": ({"num_micro_batch": 2, "io.nested_batch": "divide"}, "cpu:4", lambda: wh.replicate(1)),
    "called": ({"emit": "call"}, "cpu:2", None),
}


def weights(name: str, *shape: int) -> Any:
    return tf.get_variable(name, initializer=np.random.RandomState(len(name)).randn(*shape) / 3, use_resource=True)


def trained(entrance: Callable[[Dict], tf.Tensor], examples: int, batch: Optional[int], plan: Optional[Plan]
            ) -> Tuple[List[np.ndarray], str]:
    """Losses of three steps and the trained variables, and what ``wh.explain()`` says of the plan.

    Args:
        entrance: adds its inputs' values to a feed dictionary, and gives a matrix `[examples, 5]`.
        batch: the static number of examples; None: open.
    """
    wh.shutdown()
    config, cluster, strategy = plan or ({}, "", None)
    if plan:
        wh.init(config, cluster=cluster)
    with tf.Graph().as_default():
        stage = strategy or contextlib.nullcontext
        target = tf.placeholder(tf.float64, [batch])
        feeds: Dict = {target: np.random.RandomState(1).randn(examples)}
        with stage():
            h = tf.tanh(entrance(feeds))
        with stage():
            loss = tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(h, weights("last", 5, 1)), 1) - target))
        update = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            found = [session.run([loss, update], feeds)[0] for _ in range(3)]
            return [np.asarray(each) for each in found + session.run(tf.trainable_variables())], wh.explain() if plan else ""
