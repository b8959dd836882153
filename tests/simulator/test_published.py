"""The laws beside what a paper prints, and the benchmark where data are missing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.published import (
    HOPPER,
    MEGATRON,
    OWN_OPS,
    answered,
    dapple_table,
    errors_of,
    every_point,
    megatron_tflops,
    nvidia,
)
from whale_tf.simulator.instructions import GRADIENT
from whale_tf.simulator.laws import KERNELS, default_laws
from whale_tf.simulator.result import Simulation

pytestmark = [pytest.mark.once, pytest.mark.slow]


def test_missing_sources_are_named_and_printed_ones_stay() -> None:
    console = Console(file=io.StringIO(), width=200)
    points = every_point(None, console)
    assert {point.source for point in points} == {"DAPPLE Table VI", "NVIDIA's examples", "tensorflow.org"}
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "DLPerf: no data" in shown and "DAPPLE's profiles: no data" in shown


def test_table_that_nothing_is_fitted_to() -> None:
    """DAPPLE Table VI with two micro-batches."""
    laws = default_laws()
    (found,) = errors_of(answered([point for point in dapple_table() if point.measured in (5.10, 4.24)], lambda point: laws))
    assert found.times == KERNELS and found.points == 3 and found.largest < 0.2


def test_kind_of_device_that_nothing_is_fitted_to() -> None:
    """NVIDIA's runs on one A100."""
    laws = default_laws()
    alone = [point for point in nvidia() if point.gpus == 1 and point.cluster.devices[0].type.startswith("A100")]
    found = errors_of(answered(alone, lambda point: laws))
    assert {(one.device, one.precision, one.points) for one in found} == {("A100", "tf32", 3), ("A100", "fp16", 3)}
    assert all(one.mean < 0.25 for one in found)


def test_packages_laws_know_the_errors_of_our_own_measurements() -> None:
    assert HOPPER and {*HOPPER, OWN_OPS} <= set(default_laws().errors)


def summed_bytes(found: Simulation) -> float:
    return sum(one.size_bytes for one in found.program.instructions if one.lane == GRADIENT)


def test_gradients_in_16_bits_take_half_the_bytes() -> None:
    point = next(point for point in nvidia() if point.gpus == 8 and point.strategy.fp16_gradients)
    whole = point._replace(strategy=point.strategy._replace(fp16_gradients=False))
    laws = default_laws()
    half, full = point.predict(laws), whole.predict(laws)
    assert summed_bytes(half) == pytest.approx(summed_bytes(full) / 2)
    assert half.step_time_s < full.step_time_s


def test_rows_of_megatrons_table() -> None:
    """The smallest, without a pipeline, and the first with one: both within 6% of the paper."""
    for row in (MEGATRON[0], MEGATRON[4]):
        assert megatron_tflops(row) == pytest.approx(row.measured, rel=0.06)
