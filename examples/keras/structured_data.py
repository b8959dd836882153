"""Numbers and categories of a table, with callbacks: a pipeline of two stages on two devices.

    python examples/keras/structured_data.py

The embeddings of the categories and the numbers' scales are the first stage. Early stopping, a learning rate that falls, a saved
model that is loaded again: all as on one device.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"num_micro_batch": 2}, cluster="cpu:2")  # before TensorFlow runs its first op

import tempfile  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

JOBS, TOWNS = 12, 30


def people(count: int) -> tuple:
    """A made table: age and hours of work, job and town; and whether the income is high."""
    rng = np.random.RandomState(0)
    table = {"age": rng.uniform(18, 80, (count, 1)).astype("float32"), "hours": rng.uniform(0, 60, (count, 1)).astype("float32"),
             "job": rng.randint(0, JOBS, (count, 1)), "town": rng.randint(0, TOWNS, (count, 1))}
    wage, rent = rng.randn(JOBS), 0.5 * rng.randn(TOWNS)
    score = 0.04 * (table["hours"] - 30) + 0.02 * (table["age"] - 45) + wage[table["job"]] + rent[table["town"]]
    return table, (score + 0.3 * rng.randn(count, 1) > 0).astype("float32")


def main() -> None:
    keras.utils.set_random_seed(0)
    table, rich = people(2400)
    inputs = {name: keras.Input((1,), dtype=values.dtype.name, name=name) for name, values in table.items()}
    with wh.replicate(1):
        scales = [layers.Rescaling(1 / 20, offset=-2.0)(inputs[name]) for name in ("age", "hours")]
        tables = [layers.Flatten()(layers.Embedding(size, 4)(inputs[name])) for name, size in (("job", JOBS), ("town", TOWNS))]
        x = layers.Concatenate()(scales + tables)
    with wh.replicate(1):
        x = layers.Dense(32, activation="relu")(x)
        outputs = layers.Dense(1, activation="sigmoid")(x)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.keras")
        callbacks = [keras.callbacks.EarlyStopping(patience=2), keras.callbacks.ReduceLROnPlateau(patience=1),
                     keras.callbacks.ModelCheckpoint(best, save_best_only=True)]
        model.fit(table, rich, batch_size=96, epochs=8, verbose=2, validation_split=0.2, callbacks=callbacks)
        loss, accuracy, auc = keras.models.load_model(best).evaluate(table, rich, verbose=0)
    print(f"the best saved model: loss {loss:.4f}  accuracy {accuracy:.3f}  AUC {auc:.3f}")
    print(wh.explain())


if __name__ == "__main__":
    main()
