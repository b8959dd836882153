"""What process 0 tells the others about an Estimator's evaluation."""
from __future__ import annotations

import numpy as np
import pytest

from whale_tf.processes.estimators import _from_text, _to_text


@pytest.mark.parametrize("metrics", [None, {
    "loss": np.float32(0.1), "global_step": np.int64(2 ** 60), "nan": np.float64("nan"), "each": np.float32([1, 2]),
    "summary": b"\xff\x00"}], ids=["none", "metrics"])
@pytest.mark.parametrize("exports", [None, [b"/a/1", "/b/2", None]], ids=["none", "paths"])
def test_result_is_told_with_its_types(metrics: object, exports: object) -> None:
    told = _from_text(_to_text((metrics, exports)))
    assert told[1] == exports
    if not isinstance(metrics, dict):
        assert told[0] is None
        return
    assert told[0].keys() == metrics.keys()
    for name, value in metrics.items():
        assert type(told[0][name]) is type(value)
        np.testing.assert_array_equal(told[0][name], value)
