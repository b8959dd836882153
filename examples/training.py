"""What every example does besides its four lines: a loop over real mini-batches that prints the loss."""
from __future__ import annotations

import itertools
from typing import Any, Iterator, List

import tensorflow.compat.v1 as tf


def train(train_op: tf.Operation, loss: tf.Tensor, inputs: Any, batches: Iterator[Any], steps: int) -> List[float]:
    """Runs ``steps`` steps in a plain Session, each fed with the next mini-batch.

    Args:
        train_op: one update of the variables.
        loss: scalar that is printed.
        inputs: NamedTuple of placeholders.
        batches: mini-batches of the same NamedTuple type.

    Returns:
        The loss of each step.
    """
    losses: List[float] = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for step, batch in enumerate(itertools.islice(batches, steps), 1):
            feed = {tensor: array for tensor, array in zip(inputs, batch) if tensor.consumers()}
            losses.append(float(session.run([loss, train_op], feed)[0]))
            if step % 5 == 0 or step == 1:
                print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses
