"""An Estimator trains, evaluates and predicts.

python -m tests.multiprocess.train_estimator ROWS: each mini-batch has this many rows.
"""
from __future__ import annotations

import json
import sys
from typing import Any, Dict, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh

STEPS, ROWS = 5, 16


def model(features: tf.Tensor, labels: Any, mode: str) -> Any:
    hidden = tf.layers.dense(features, 3, tf.nn.tanh, kernel_initializer=tf.constant_initializer(0.1))
    outputs = tf.layers.dense(hidden, 1, kernel_initializer=tf.constant_initializer(0.2))
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, {"outputs": outputs})
    loss = tf.reduce_mean(tf.square(outputs - labels))
    train = tf.train.AdamOptimizer(0.02).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


def data(rows: int) -> Any:
    features = np.random.RandomState(0).rand(5 * ROWS, 4)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(1, keepdims=True))).batch(rows)


def results(rows: int) -> Dict[str, Any]:
    """What all processes must agree on, with each other and with the local script."""
    settings = tf.estimator.RunConfig(save_checkpoints_steps=3, keep_checkpoint_max=1)
    estimator = tf.estimator.Estimator(model, config=settings)
    before, _ = tf.estimator.train_and_evaluate(
        estimator, tf.estimator.TrainSpec(lambda: data(rows).repeat(), max_steps=STEPS),
        tf.estimator.EvalSpec(lambda: data(7), None, throttle_secs=0))
    estimator.train(lambda: data(rows).repeat(), steps=STEPS)
    predicted = [float(row["outputs"][0]) for row in estimator.predict(lambda: data(7))]
    return {"before": {name: float(value) for name, value in before.items()}, "predicted": predicted,
            "after": {name: float(value) for name, value in estimator.evaluate(lambda: data(7)).items()},
            "variables": {name: estimator.get_variable_value(name).tolist() for name in estimator.get_variable_names()}}


def main(arguments: Tuple[str, ...]) -> None:
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init()
    print("RESULTS " + json.dumps(results(int(arguments[0]))), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
