"""A small network learns from a large one: the teacher on one device, the student on the next.

    python examples/keras/knowledge_distillation.py

Two models are trained one after the other: the teacher alone, data parallel, and then the student beside the frozen teacher.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"num_micro_batch": 2}, cluster="cpu:2")  # before TensorFlow runs its first op

from typing import Any  # noqa: E402

import keras  # noqa: E402
from keras import layers, ops  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

TEMPERATURE = 3.0


class Distiller(keras.Model):
    """A student that is trained to give the teacher's probabilities, and the labels."""

    def __init__(self, teacher: Any, student: Any) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student
        self.teacher.trainable = False

    def call(self, images: Any, training: bool = False) -> Any:
        return self.student(images, training=training)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        with wh.replicate(1, name="teacher"):
            soft = ops.softmax(self.teacher(x, training=False) / TEMPERATURE)
        soft_loss = keras.losses.kl_divergence(soft, ops.softmax(y_pred / TEMPERATURE))
        hard_loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.mean(0.2 * hard_loss + 0.8 * TEMPERATURE ** 2 * soft_loss)


def classifier(width: int) -> Any:
    return keras.Sequential([keras.Input((64,)), layers.Dense(width, activation="relu"), layers.Dense(10)])


def main() -> None:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype("float32"), digits.target
    validation = images[1536:], labels[1536:]

    teacher = classifier(256)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(keras.optimizers.Adam(0.003), entropy, metrics=["accuracy"])
    teacher.fit(images[:1536], labels[:1536], batch_size=64, epochs=4, verbose=2, validation_data=validation)

    with wh.replicate(1, name="student"):
        student = classifier(12)
    distiller = Distiller(teacher, student)
    distiller.compile(keras.optimizers.Adam(0.01), metrics=["accuracy"])
    distiller.fit(images[:1536], labels[:1536], batch_size=64, epochs=6, verbose=2, validation_data=validation)
    print(f"weights: teacher {teacher.count_params():,}, student {student.count_params():,}")
    print(wh.explain())


if __name__ == "__main__":
    main()
