"""``fit`` with snapshots, which goes on wherever it has ended.

``python -m tests.multiprocess.train_long DIRECTORY [KEY=VALUE...]``: what each step logged goes to standard output.  Environment
variables: PAUSE (seconds a step), SPANS (each process runs a part of the step).
"""
from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional

import numpy as np

import whale_tf as wh

EPOCHS, EXAMPLES, BATCH = 4, 48, 8  # of all processes together


def trained(folder: str, given: Dict[str, Any], spans: bool, workers: int, cluster: Optional[str],
            take: Callable[[int, float, float], None], pause_s: float = 0.0) -> List[Any]:
    """The variables at the end.

    Args:
        given: configuration.
        spans: a pipeline of two stages.
        workers: number of processes, if each of them takes a share of the data.
        take: is given the number of each step, its loss, and the bits of the examples that the epoch has seen.
    """
    wh.init({"snapshot.path": f"{folder}/snapshots", **({"io.slicing": False, "num_micro_batch": 2} if spans else {}), **given},
            cluster=cluster)
    import tensorflow as tf  # its variables and ops come after wh.init

    from tests.functions.long_runs import metric

    keras = tf.keras
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(3)

    class Steps(keras.callbacks.Callback):
        count = 0  # is in snapshots

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            time.sleep(pause_s)
            take(self.count, float(logs["loss"]), float(logs["seen"]))

    inputs = keras.Input((5,))
    with wh.replicate(1) if spans else contextlib.nullcontext():
        x = keras.layers.Dense(8, activation="tanh")(inputs)
    with wh.replicate(1) if spans else contextlib.nullcontext():
        x = keras.layers.Dense(1)(keras.layers.Dense(8, activation="tanh")(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(0.05), lambda y_true, y_pred: tf.square(y_true[:, :1] - y_pred), metrics=[metric()])
    rng = np.random.RandomState(0)
    x = rng.randn(EXAMPLES, 5)
    y = np.stack([x @ rng.randn(5), 2.0 ** np.arange(EXAMPLES)], axis=1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=5).batch(BATCH // workers)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Steps(), keras.callbacks.ReduceLROnPlateau("loss", patience=1)],
              validation_data=(x[:8], y[:8]))
    return [value.numpy() for value in model.variables + model.optimizer.variables]


def main() -> None:
    task, spans = json.loads(os.environ.get("TF_CONFIG") or "{}"), "SPANS" in os.environ
    workers = 1 if spans else len(task.get("cluster", {}).get("worker", ())) or 1
    given = {key: json.loads(value) for key, value in (each.split("=") for each in sys.argv[2:])}
    print("process", os.getpid(), flush=True)
    values = trained(sys.argv[1], given, spans, workers, None,
                     lambda step, loss, seen: print(f"step {step} loss {loss!r} seen {seen!r}", flush=True),
                     float(os.environ.get("PAUSE", "0")))
    print("variables", json.dumps([value.tolist() for value in values]), flush=True)


if __name__ == "__main__":
    main()
