"""Functions and Keras under plans whose model replicas span processes, each of which runs its part: equal to the local script."""
from __future__ import annotations

from typing import Tuple

import pytest

from tests.multiprocess.launch import WHALE_RUN, Starter
from whale_tf._tf_compat import function_tracing

if function_tracing() is None or function_tracing().compilation is None:  # type: ignore[union-attr]
    pytest.skip("no functions in several processes before TensorFlow 2.15", allow_module_level=True)

SCRIPT = ("-m", "tests.multiprocess.train_functions")
SAMPLE = {
    (2, 1): ("mlp/fit/pipeline", "embeddings/custom/zero v3", "mlp/custom/split after replicas", "loss scale/custom/one stage",
             "accumulated, clipped together/fit/pipeline"),
    (2, 2): ("mlp/custom/auto_parallel", "mlp/custom/at their stages", "gan/custom/data parallel", "texts/custom/pipeline"),
}
EVERY = [(2, 1), (2, 2), (4, 1)]


def check(workers: int, devices: int, rows: Tuple[str, ...], bound_s: int, *options: str) -> str:
    """Returns what the processes print."""
    with Starter() as starter:
        job = starter.start(*WHALE_RUN, "--workers", str(workers), *options, *SCRIPT, str(devices), *rows)
        status = job.wait(bound_s)
        assert status == 0 and job.output.count("finished") == workers, job.output
        return job.output


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("workers, devices", SAMPLE)
def test_equals_local(workers: int, devices: int) -> None:
    """The first step of each is also compared by whale_tf itself."""
    rows = SAMPLE[workers, devices]
    output = check(workers, devices, rows, 300, "--verify")
    assert output.count("equals the local one in") >= len(rows) // 2, output


@pytest.mark.once
@pytest.mark.slow
def test_keras_distribution_equals_local() -> None:
    with Starter() as starter:
        job = starter.start(*WHALE_RUN, "--workers", "2", "-m", "tests.multiprocess.train_distribution", "2", "data parallel",
                            "replicas in processes", "tiles in both processes")
        assert job.wait(300) == 0 and job.output.count("finished") == 2, job.output


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("workers, devices", EVERY)
def test_every_model_and_plan_equals_local(workers: int, devices: int) -> None:
    check(workers, devices, ("*/*/*",), 7200)
