"""Parts of variables: where they are, and that a value is never lost."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_tf.patterns.spread import once, shard, tiles
from whale_tf.runtime import variable_parts
from whale_tf.runtime.variable_parts import VariableParts

if tf.__version__.startswith("1."):
    pytest.skip("TensorFlow 1.15 has no functions that can be divided", allow_module_level=True)

CPU = "/device:CPU:0"
WHOLE = np.arange(15.0).reshape(5, 3)


@pytest.mark.parametrize("spread", [once, shard(1, (2, 1)), tiles((5, 3), {0: 2, 1: 2}, lambda place: (0, 0))], ids=str)
def test_parts_for_a_snapshot_are_all_of_the_variable(spread: Any) -> None:
    variable, parts = tf.Variable(WHOLE), VariableParts()
    parts.divide(variable, spread, [CPU] * len(spread.parts))
    record = vars(variable)["_whale_parts"]
    with record.in_use(next(iter(record.parts))):
        pass
    found, held = np.full_like(WHOLE, np.nan), parts.held(variable)
    assert held is not None and [number for number, _, _ in held] == list(range(len(spread.parts)))
    for _, start, value in held:
        found[tuple(slice(first, first + size) for first, size in zip(start, value.shape))] = value
    np.testing.assert_array_equal(found, WHOLE)
    parts.close()
    np.testing.assert_array_equal(variable.numpy(), WHOLE)


@pytest.mark.parametrize("is_divided", [False, True])
def test_value_remains_where_a_move_fails(monkeypatch: Any, is_divided: bool) -> None:
    """A device has too little memory for its part, or a process that has a part has ended."""
    variable, parts = tf.Variable(WHOLE), VariableParts()
    own = [part.handle for part in parts.divide(variable, shard(0, (3, 2)), [CPU, CPU])]
    record = vars(variable)["_whale_parts"]
    division = next(iter(record.parts))
    assign, read = tf.raw_ops.AssignVariableOp, record._part
    if is_divided:
        record.divide(division)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    with monkeypatch.context() as patch, pytest.raises(tf.errors.ResourceExhaustedError):
        if is_divided:
            patch.setattr(record, "_part", lambda division, number: fail() if number else read(division, number))
            variable.numpy()
        else:
            patch.setattr(variable_parts.tf.raw_ops, "AssignVariableOp", lambda resource, value: (
                fail() if resource is own[1] else assign(resource=resource, value=value)))
            record.divide(division)
    np.testing.assert_array_equal(variable.numpy(), WHOLE)
