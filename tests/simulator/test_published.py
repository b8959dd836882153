"""The laws beside what a paper prints, and the benchmark where data are missing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.published import dapple_table, errors_of, every_point
from whale_tf.simulator.laws import KERNELS, default_laws

pytestmark = [pytest.mark.once, pytest.mark.slow]


def test_missing_sources_are_named_and_printed_ones_stay() -> None:
    console = Console(file=io.StringIO(), width=200)
    points = every_point(None, console)
    assert {point.source for point in points} == {"DAPPLE Table VI"}
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "DLPerf: no data" in shown and "DAPPLE's profiles: no data" in shown


def test_a_table_that_nothing_is_fitted_to() -> None:
    """DAPPLE Table VI with two micro-batches."""
    laws = default_laws()
    (found,) = errors_of([point for point in dapple_table() if point.measured in (5.10, 4.24)], lambda point: laws)
    assert found.times == KERNELS and found.points == 3 and found.largest < 0.2
