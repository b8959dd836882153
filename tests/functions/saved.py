"""A Keras model on its way through files, a process for each stop: ``python -m tests.functions.saved WHAT PLAN DIRECTORY``.

``make``: makes, trains and saves a model; ``go_on``: loads it in every format that this Keras has, and trains it further.
PLAN is one of :data:`PLANS`; under ``none`` whale_tf is not imported.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

PLANS: Dict[str, Tuple[str, Dict[str, Any], str]] = {  # strategy of the two stages, configuration, cluster
    "pipeline": ("replicate replicate", {"num_micro_batch": 4}, "cpu:2"),
    "split": ("replicate split", {}, "cpu:2"),
    "split of everything": ("split", {}, "cpu:2"),
    "data parallel": ("", {}, "cpu:2"),
    "search": ("", {"num_task_graph": 2, "num_micro_batch": 2}, "cpu:2"),
    "two processes": ("", {"communication.start_timeout_s": 60}, "2xcpu:1"),
}
TASK = json.loads(os.environ.get("TF_CONFIG", "{}"))
WORKERS, RANK = (2, TASK["task"]["index"]) if TASK else (1, 0)
RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(48, 6), RNG.randint(0, 3, 48)


def made(keras: Any, stages: Sequence[Any]) -> Any:
    inputs = keras.Input((6,))
    with stages[0]():
        x = keras.layers.LayerNormalization()(keras.layers.Dense(8, activation="tanh")(inputs))
    with stages[1]():
        outputs = keras.layers.Dense(4, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(model: Any) -> List[float]:
    losses: List[float] = model.fit(X, LABELS, batch_size=16 // WORKERS, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses


def save(model: Any, directory: str, is_keras_3: bool) -> None:
    for ending in ("keras", "h5"):
        model.save(f"{directory}/model.{ending}")
    if WORKERS == 1 and is_keras_3:
        model.export(f"{directory}/model", verbose=False)
    elif WORKERS == 1:
        model.save(f"{directory}/model")


def main(what: str, plan: str, directory: str) -> None:
    stages: List[Any] = [contextlib.nullcontext] * 2
    if plan != "none":
        import whale_tf as wh

        strategies, config, cluster = PLANS[plan]
        wh.init(config, cluster=cluster)
        count = 1 if plan == "pipeline" else 2
        names = strategies.split()
        if len(names) == 2:
            stages = [functools.partial(getattr(wh, name), count) for name in names]
        elif names:
            wh.set_default_strategy(getattr(wh, names[0])(count))

    import tensorflow as tf

    keras = tf.keras
    is_keras_3 = hasattr(keras, "ops")
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(0)
    if what == "make":
        model = made(keras, stages)
    else:
        model = keras.models.load_model(f"{directory}/model.keras")
        before = list(np.load(f"{directory}/make.0.npz").values())[2]
        others = [keras.models.load_model(f"{directory}/model.h5").predict]
        if os.path.exists(f"{directory}/model"):
            served = tf.saved_model.load(f"{directory}/model")
            others.append(lambda x, verbose: (served.serve if is_keras_3 else served)(tf.constant(x)))
        for predict in (model.predict, *others):
            np.testing.assert_allclose(np.array(predict(X, verbose=0)), before, rtol=1e-12, atol=1e-14)
    losses = fit(model)
    predicted = model.predict(X, verbose=0)
    if what == "make":
        save(model, directory, is_keras_3)
    np.savez(f"{directory}/{what}.{RANK}.npz", *losses, predicted, *model.get_weights())
    assert ("whale_tf" in sys.modules) == (plan != "none")
    if plan != "none":
        found = wh.current_plan()
        assert found is not None and found.num_devices == 2, found


if __name__ == "__main__":
    main(*sys.argv[1:])
