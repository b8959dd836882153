"""``keras.distribution`` in several processes: each process compares what it has with the local script.

``python -m tests.multiprocess.train_distribution DEVICES WAY...``, in a job of two processes with DEVICES each; by default all.
"""
from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, Dict

import whale_tf as wh

DEVICES = int(sys.argv[1])
CLUSTER = f"2xcpu:{DEVICES}"

wh.init(cluster=CLUSTER)  # before TensorFlow runs an op, so that it starts this process's server

import tensorflow as tf  # noqa: E402

from tests.functions.test_keras_distribution import MAP, D, X, Y, check_equal, model_parallel, perceptron, trained  # noqa: E402

WAYS: Dict[str, Callable[[], Any]] = {
    "data parallel": lambda: D.DataParallel(),
    "replicas in processes": lambda: model_parallel((DEVICES, 2)),
    "tiles in both processes": lambda: model_parallel((DEVICES, 2), {**MAP, "down/kernel": ("model", "batch")}),
    "replicas over processes": lambda: model_parallel((1, DEVICES, 2), {"up/kernel": ("a", "b"), "down/kernel": ("b", "a")},
                                                      ("batch", "a", "b"))}


def check_parts(model: Any, data: Any) -> None:
    """Evaluation and training have the same parts of variables, in the same places."""
    model.evaluate(data, verbose=0)
    model.predict_on_batch(X[:3])
    for name in ("up", "down"):
        record = vars(model.get_layer(name).kernel._value)["_whale_parts"]
        assert record.held is not None and list(record.parts) == [record.held]


def main() -> None:
    tf.keras.config.set_floatx("float64")
    data = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(8)
    wh.shutdown()
    local = trained(perceptron, data)
    for name in sys.argv[2:] or WAYS:
        wh.init(cluster=CLUSTER)
        D.initialize(num_processes=2)
        D.set_distribution(WAYS[name]())
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*is not divided")
            found = trained(perceptron, data)
            check_equal(found, local)
            if name != "data parallel":
                check_parts(found.model, data)
        D.set_distribution(None)
        wh.shutdown()
        print(f"{name}: equal", flush=True)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
