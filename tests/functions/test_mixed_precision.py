"""Mixed precision under Keras' ``fit``: ours on two devices as on one, beside Keras' own."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple

import numpy as np
import pytest

import whale_tf as wh
from tests.functions.equality import clear_keras
from whale_tf.emit import joined_gradients

keras = pytest.importorskip("keras", minversion="3.0")
RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(48, 8).astype(np.float32), RNG.randint(0, 3, 48)


class Fitted(NamedTuple):
    losses: Any
    weights: Any
    steps: int
    text: str


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
    clear_keras()


def fit(config: Dict[str, Any], devices: int, policy: str = "float32", x: Any = X) -> Fitted:
    wh.init(config, cluster=f"cpu:{devices}")
    try:
        keras.config.set_dtype_policy(policy)
        kernels = [keras.initializers.GlorotUniform(seed) for seed in range(2)]
        with wh.replicate(devices):
            model = keras.Sequential([
                keras.layers.Dense(16, activation="relu", kernel_initializer=kernels[0]), keras.layers.LayerNormalization(),
                keras.layers.Dense(3, kernel_initializer=kernels[1], dtype="float32")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = model.fit(x, LABELS, batch_size=16, epochs=2, verbose=0, shuffle=False).history["loss"]
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        return Fitted(losses, model.get_weights(), int(optimizer.iterations), " ".join(wh.explain().split()))
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_two_devices_as_one_and_as_keras_own_policy() -> None:
    one, two = fit({"amp": "bfloat16"}, 1), fit({"amp": "bfloat16"}, 2)
    own = fit({}, 2, "mixed_bfloat16")
    for found in (one, own):
        np.testing.assert_allclose(found.losses, two.losses, rtol=5e-3)
        for a, b in zip(found.weights, two.weights):
            assert np.linalg.norm(a - b) <= 5e-2 * max(np.linalg.norm(b), 0.1)
    assert "Mixed precision: bfloat16 in" in two.text and "Mixed" not in own.text


@pytest.mark.slow
def test_steps_that_overflow_are_skipped() -> None:
    large = np.array(X)
    large[20] *= 1e6  # in the second mini-batch of three
    found, without = fit({"amp": "float16"}, 2, x=large), fit({"amp": "float16"}, 2)
    assert (found.steps, without.steps) == (4, 6) and all(np.isfinite(weight).all() for weight in found.weights)


@pytest.mark.slow
@pytest.mark.parametrize("config, counts", [({}, [6]), ({"zero": "v2"}, [2, 3])], ids=["", "zero"])
def test_gradients_that_are_unscaled_together(config: Dict[str, Any], counts: List[int], monkeypatch: Any) -> None:
    """The numbers are those of gradients one by one, where the update is, and a step that overflows is skipped."""
    large, joined = np.array(X), []
    large[20] *= 1e6
    original = joined_gradients._join
    monkeypatch.setattr(joined_gradients, "_join", lambda context, nodes, ops, *rest: joined.append(len(ops)) or original(
        context, nodes, ops, *rest))
    together = fit({"amp": "float16", **config}, 2, x=large)
    assert joined == counts
    monkeypatch.setattr(joined_gradients, "LARGEST", 0)
    alone = fit({"amp": "float16", **config}, 2, x=large)
    assert joined == counts and together.steps == alone.steps == 4
    for one, other in zip([together.losses, *together.weights], [alone.losses, *alone.weights]):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_optimizer_that_scales_its_loss_is_left_alone() -> None:
    found = fit({"amp": "float16"}, 2, "mixed_float16")
    assert "gradients with no scale" in found.text and np.isfinite(found.losses).all() and found.losses[1] < found.losses[0]
