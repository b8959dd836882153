"""A mixture of experts: everything is data parallel but the experts, which are divided over the devices (Whale, Example 5).

    python examples/mixture_of_experts.py

Each example goes to the expert with the largest gate. The experts' weights are stacked, ``[expert, ...]``, so dividing the
einsums' expert label gives every device whole experts. Examples stay where they are but for that: they are sent to the devices
of all experts and come back by all-to-all, forward and backward. ``models/moe.py`` is a transformer of this kind, with two
experts for each token and a limited capacity.
"""
from __future__ import annotations

import os
import sys
from typing import Tuple

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import whale_tf as wh
from examples.training import train
from models import data, layers, mlp

EXPERTS, WIDTH = 4, 48


def gating_dispatch(x: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    """`[B, D]` to combination weights `[B, EXPERTS]` and the experts' inputs `[EXPERTS, B, D]`."""
    gates = tf.nn.softmax(layers.dense(x, EXPERTS, "gates"))
    chosen = tf.one_hot(tf.argmax(gates, 1), EXPERTS)
    return gates * chosen, tf.einsum("be,bd->ebd", chosen, x)


def experts(weights: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Every expert's two layers, combined to `[B, D]`."""
    width = int(inputs.shape[-1])
    up = layers.normal_variable("up", [EXPERTS, width, WIDTH], width ** -0.5, tf.float32)
    down = layers.normal_variable("down", [EXPERTS, WIDTH, width], WIDTH ** -0.5, tf.float32)
    hidden = tf.nn.relu(tf.einsum("ebd,edh->ebh", inputs, up))
    outputs = tf.einsum("ebh,ehd->ebd", hidden, down)
    return tf.reduce_sum(outputs * tf.expand_dims(tf.transpose(weights), 2), 0)


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init(cluster="cpu:4")
    total_gpus = wh.total_gpus()
    wh.set_default_strategy(wh.replicate(total_gpus))

    config = mlp.MlpConfig(hidden=32)
    inputs = mlp.inputs(config, batch_size=96)
    x = mlp.hidden_layer(inputs.images, config, name="layer_0")
    combined_weights, dispatch_inputs = gating_dispatch(x)
    with wh.split(total_gpus):
        outputs = experts(combined_weights, dispatch_inputs)
    loss = layers.mean_cross_entropy(mlp.head(x + outputs, config), inputs.labels)

    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss)
    train(train_op, loss, inputs, data.batches(data.digit_features(), 96), steps=30)
    print(wh.explain())


if __name__ == "__main__":
    main()
