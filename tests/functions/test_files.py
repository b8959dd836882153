"""Saved models between processes with and without whale_tf, and between plans."""
from __future__ import annotations

import shutil
from typing import Any, Iterator, List

import numpy as np
import pytest

from tests.multiprocess.launch import Starter
from whale_tf._tf_compat import function_tracing, tf

if function_tracing() is None or not hasattr(tf.keras.optimizers, "AdamW"):
    pytest.skip(f"TensorFlow {tf.__version__} does not save Keras models in all formats", allow_module_level=True)

TIMEOUT_S = 240


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter() as found:
        yield found


@pytest.fixture(scope="module")
def local(tmp_path_factory: Any) -> Any:
    """Where the local script has made a model and gone on with it."""
    directory = tmp_path_factory.mktemp("local")
    with Starter() as starter:
        for what in ("make", "go_on"):
            run(starter, what, "none", directory)
    return directory


def run(starter: Starter, what: str, plan: str, directory: Any) -> List[List[np.ndarray]]:
    """Losses, predictions and weights of each process."""
    script = ("-m", "tests.functions.saved", what, plan, str(directory))
    started = [one(*script) for one in starter.workers(2)] if plan == "two processes" else [starter.start(*script)]
    for process in started:
        assert process.wait(TIMEOUT_S) == 0, process.output
    return [read(directory, what, rank) for rank in range(len(started))]


def read(directory: Any, what: str, rank: int = 0) -> List[np.ndarray]:
    return list(np.load(directory / f"{what}.{rank}.npz").values())


def equal(expected: List[np.ndarray], found: List[List[np.ndarray]]) -> None:
    for outcome in found:
        assert len(outcome) == len(expected)
        for one, other in zip(expected, outcome):
            np.testing.assert_allclose(other, one, rtol=1e-6 if one.ndim == 0 else 1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("plan, next_plan", [
    ("pipeline", "none"), ("none", "split of everything"), ("split", "two processes"),
    pytest.param("two processes", "pipeline", marks=pytest.mark.full), pytest.param("none", "search", marks=pytest.mark.full),
    pytest.param("none", "data parallel", marks=pytest.mark.full), pytest.param("search", "none", marks=pytest.mark.full)])
def test_saved_and_loaded(starter: Starter, plan: str, next_plan: str, local: Any, tmp_path: Any) -> None:
    """A model is made, trained and saved under one plan, and loaded and trained on in a fresh process under another; as without
    whale_tf."""
    if "two processes" in (plan, next_plan) and function_tracing().compilation is None:  # type: ignore[union-attr]
        pytest.skip("no functions in several processes before TensorFlow 2.15")
    divided = tmp_path / "divided"
    if plan == "none":
        shutil.copytree(local, divided)
    else:
        divided.mkdir()
        equal(read(local, "make"), run(starter, "make", plan, divided))
    equal(read(local, "go_on"), run(starter, "go_on", next_plan, divided))
