"""What a user fetches is what the local script computes, whatever the clones have of it."""
from __future__ import annotations

from typing import Any, Dict, Optional

import numpy as np
import pytest

import whale_tf as wh
from tests.numeric.script import dense
from whale_tf._tf_compat import v1

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    wh.shutdown()


def build(batch: Optional[int], scope: Any) -> Dict[str, Any]:
    """One tensor of each layout, and what becomes of it behind the mini-batch."""
    x = v1.placeholder("float64", [batch, 3], name="x")
    with scope:
        h = v1.tanh(dense(x, 4, "layer"))
        loss, total = v1.reduce_mean(v1.square(h)), v1.reduce_sum(h)
        count = v1.shape(h)[0]
        row = v1.constant([2.0, 3.0], "float64")
        each = v1.reduce_sum(v1.square(h), 1) / v1.cast(count, "float64")
        found = {
            "x": x, "h": h, "loss": loss, "total": total, "product": v1.reduce_prod(h + 2.0, 0), "all": v1.reduce_all(h < 0.9),
            "most": v1.reduce_max(h, 0), "least": v1.reduce_min(h), "any": v1.reduce_any(h > 0.9, 1), "each": each,
            "sizes": v1.stack([2 * count + 1, count, 7]), "shape": v1.shape(h), "row": row * 2.0,
            "rows": 3 * v1.range(count), "chosen": v1.where(v1.greater(h, 0.0)), "kept": v1.boolean_mask(h, x[:, 0] > 0.0),
            "joined": v1.concat([h, -h], 0), "turned": v1.transpose(h), "inverse": 1.0 / v1.cast(count, "float64"),
        }
    gradient, = v1.gradients(loss + 0.01 * total, v1.trainable_variables()[:1])
    found["gradient"] = gradient
    found["train"] = v1.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, v1.trainable_variables()[0])])
    return found


def values(examples: Any, batch: Optional[int], config: Optional[Dict[str, Any]] = None,
           cluster: str = "cpu:2") -> Dict[str, Any]:
    if config is not None:
        wh.init(config, cluster=cluster)
    with v1.Graph().as_default():
        model = build(batch, v1.name_scope("") if config is None else wh.replicate(2))
        train = model.pop("train")
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            feed = {model.pop("x"): examples}
            found = session.run(model, feed)
            session.run(train, feed)
            return {**found, "variable": session.run(v1.trainable_variables()[0])}


@pytest.mark.parametrize("batch, config, cluster", [
    (8, {"num_micro_batch": 2}, "cpu:2"), (None, {"num_micro_batch": 2}, "cpu:2"),
    (None, {"num_micro_batch": 1, "io.nested_batch": "divide"}, "cpu:4")])
def test_values_of_every_layout(batch: Optional[int], config: Dict[str, Any], cluster: str) -> None:
    """An open mini-batch of 9 does not divide evenly, so each clone's part has its own weight."""
    examples = np.random.RandomState(1).randn(batch or 9, 3)
    expected = values(examples, batch)
    merged = values(examples, batch, config, cluster)
    assert expected.keys() == merged.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-12, atol=1e-14, err_msg=name)
