"""ZeRO over several processes: the local numbers, state in one process only, checkpoints of the local form."""
from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.launch import WHALE_RUN, Starter
from tests.multiprocess.train_zero import LAYERS, OPTIMIZERS, STEPS, WIDTH, Found, examples, scaled_feeds, train, train_scaled


def assert_equal(one: Found, other: Found, first: int = 0) -> None:
    np.testing.assert_allclose(one.fetched[first:], other.fetched[first:], rtol=1e-10)
    assert one.variables.keys() == other.variables.keys()
    for name, value in one.variables.items():
        np.testing.assert_allclose(value, other.variables[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_zero(tmp_path: Path) -> None:
    """Processes restore a checkpoint of the local script, train, save, and train on."""
    local = {}
    for optimizer in OPTIMIZERS:
        for resource in (True, False):
            name = f"{optimizer}{resource}"
            train(optimizer, resource, examples(None), tmp_path, save=f"{name}_local")
            local[optimizer, resource] = train(optimizer, resource, examples(None), tmp_path, restore=f"{name}_local")
    with Starter() as starter:
        run = starter.start(*WHALE_RUN, "--workers", "2", "-m", "tests.multiprocess.train_zero", str(tmp_path))
        assert run.wait(120) == 0, run.output
    both = [pickle.loads((tmp_path / f"found.{rank}").read_bytes()) for rank in range(2)]
    assert [one.pop("steps") for one in both] == [[3, 2], []]
    for resource in (True, False):
        expected = train_scaled(resource, scaled_feeds(None))
        for one in both:
            found = one.pop(("scaled", resource))
            assert not np.isfinite(found.fetched.pop(1)), "all processes skip the step"
            assert found.variables.pop("global_step") == expected.variables["global_step"] == 3
            np.testing.assert_allclose(found.fetched, expected.fetched, rtol=1e-5)
            for name, value in found.variables.items():
                np.testing.assert_allclose(value, expected.variables[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for level in ("states", "v0"):
        expected = local["adam", level == "states"]
        for one in both:
            found = one.pop(level)
            assert_equal(found, expected)
            assert found.kept == 2 * LAYERS * WIDTH * WIDTH * 8  # in each process
            assert found.devices == "CPU:2", "the host, beside two devices"
        after = train("adam", level == "states", examples(None), tmp_path, restore=f"{level}_saved", steps=STEPS // 2)
        assert_equal(after, expected._replace(fetched=expected.fetched[STEPS:]))
    for (optimizer, resource), expected in local.items():
        found = [one[optimizer, resource] for one in both]
        for one in found:
            assert_equal(one, expected)
            assert 0 < one.kept < 2 * LAYERS * WIDTH * WIDTH * 8
            assert "trains, and also needs variable" in one.refused
        assert sum(one.kept for one in found) == 2 * LAYERS * WIDTH * WIDTH * 8  # each variable's two in one process only
        after = train(optimizer, resource, examples(None), tmp_path, restore=f"{optimizer}{resource}_divided", steps=STEPS // 2)
        assert_equal(after, expected._replace(fetched=expected.fetched[STEPS:]))
