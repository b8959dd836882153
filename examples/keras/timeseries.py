"""An LSTM that forecasts a noisy sum of seasons, data parallel on two devices.

    python examples/keras/timeseries.py

Loops of TensorFlow stay whole: each device runs the LSTM over its half of every mini-batch.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init(cluster="cpu:2")  # before TensorFlow runs its first op

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

PAST, AHEAD = 24, 3


def main() -> None:
    keras.utils.set_random_seed(0)
    time = np.arange(1600)
    noise = np.random.RandomState(0).randn(len(time))
    series = (np.sin(2 * np.pi * time / 24) + 0.5 * np.sin(2 * np.pi * time / 168) + 0.1 * noise).astype("float32")[:, None]
    windows = keras.utils.timeseries_dataset_from_array(series[:-AHEAD], series[PAST + AHEAD - 1:], PAST, batch_size=64)
    validation = windows.take(4)

    model = keras.Sequential([keras.Input((PAST, 1)), layers.LSTM(16), layers.Dense(1)])
    model.compile(keras.optimizers.RMSprop(0.003), "mse", metrics=["mae"])
    model.fit(windows.skip(4), epochs=5, verbose=2, validation_data=validation)
    print(wh.explain())


if __name__ == "__main__":
    main()
