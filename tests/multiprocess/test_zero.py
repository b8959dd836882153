"""ZeRO over several processes: the local numbers, state in one process only, checkpoints of the local form."""
from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

import numpy as np
import pytest

from tests.multiprocess.launch import RUN_S, WHALE_RUN, Starter
from tests.multiprocess.train_zero import LEVELS, OF_THREE, SIZE, STEPS, Found, examples, scaled_feeds, train, train_scaled


def assert_equal(one: Found, other: Found, first: int = 0) -> None:
    np.testing.assert_allclose(one.fetched[first:], other.fetched[first:], rtol=1e-10)
    assert one.variables.keys() == other.variables.keys()
    for name, value in one.variables.items():
        np.testing.assert_allclose(value, other.variables[name], rtol=1e-10, atol=1e-12, err_msg=name)


def locals_of(processes: int, directory: Path, trained: Iterable[Tuple[str, bool]] = tuple(LEVELS)) -> Dict[Any, Found]:
    """What the local script finds, from the checkpoint that processes restore."""
    found = {}
    for optimizer, resource in trained:
        name, feed = f"{optimizer}{resource}", examples(None, processes)
        train(optimizer, resource, feed, directory, save=f"{name}_local")
        found[optimizer, resource] = train(optimizer, resource, feed, directory, restore=f"{name}_local")
    return found


def run(processes: int, directory: Path) -> List[Dict[Any, Any]]:
    with Starter() as starter:
        started = starter.start(
            *WHALE_RUN, "--workers", str(processes), "-m", "tests.multiprocess.train_zero", str(directory))
        assert started.wait(RUN_S) == 0, started.output
    return [pickle.loads((directory / f"found.{rank}").read_bytes()) for rank in range(processes)]


def check(found: List[Found], expected: Found, is_v3: bool) -> None:
    """Equal to the local script, and each variable's state, under v3 its value as well, in one process only."""
    for one in found:
        assert_equal(one, expected)
        assert len(one.looked) == len(expected.looked)
        for value, local in zip(one.looked, expected.looked):
            np.testing.assert_allclose(value, local, rtol=1e-10, atol=1e-12)
        assert 0 < one.kept < 2 * SIZE
        assert one.values == (one.kept // 2 if is_v3 else SIZE)
        assert "trains, and also needs variable" in one.refused
    assert sum(one.kept for one in found) == 2 * SIZE


@pytest.mark.slow
def test_values_of_three_processes(tmp_path: Path) -> None:
    expected = locals_of(3, tmp_path, OF_THREE)
    found = run(3, tmp_path)
    for key, local in expected.items():
        check([one[key] for one in found], local, True)


@pytest.mark.slow
def test_zero(tmp_path: Path) -> None:
    """Processes restore a checkpoint of the local script, train, save, and train on."""
    local = locals_of(2, tmp_path)
    both = run(2, tmp_path)
    assert [one.pop("steps") for one in both] == [[3, 2], []]
    assert [one.pop("steps of v3") for one in both] == [[3, 2], []]
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
            assert (found.kept, found.values) == (2 * SIZE, SIZE)  # in each process
            assert found.devices == "CPU:2", "the host, beside two devices"
        after = train(
            "adam", level == "states", examples(None), tmp_path, restore=f"{level}_saved", steps=STEPS // 2, looks=False)
        assert_equal(after, expected._replace(fetched=expected.fetched[STEPS:]))
    for (optimizer, resource), expected in local.items():
        check([one[optimizer, resource] for one in both], expected, LEVELS[optimizer, resource] == "v3")
        after = train(optimizer, resource, examples(None), tmp_path, restore=f"{optimizer}{resource}_divided", steps=STEPS // 2,
                      looks=False)
        assert_equal(after, expected._replace(fetched=expected.fetched[STEPS:]))
