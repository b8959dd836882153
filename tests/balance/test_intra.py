"""Intra-TaskGraph balance: every solver on every case, scored outside the solvers, certified by brute force."""
from __future__ import annotations

from typing import List, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balance import generate_cases
from benchmarks.papers.balance import SOLVERS, memory_utilisation, printed_units, waste
from whale_tf.balance import BalanceProblem, apportion, balance, fits, step_time_s
from whale_tf.errors import InfeasibleError, PlanError

NAMED = BalanceProblem((4.0, 1.0, 1.0), (10.0, 12.0, 12.0), 30.0, 64)

positive = st.one_of(st.sampled_from([1.0, 2.0, 3.0, 1 / 3]), st.floats(0.1, 10))


@st.composite
def problems(draw: st.DrawFn, devices: int = 4, units: int = 14) -> BalanceProblem:
    n = draw(st.integers(1, devices))
    minimum = draw(st.integers(0, 1))
    return BalanceProblem(
        tuple(draw(positive) for _ in range(n)), tuple(draw(st.floats(0, 12)) for _ in range(n)),
        draw(st.sampled_from([0.0, 5.0, 10.0, 17.3])), draw(st.integers(n, max(n, units))),
        draw(st.sampled_from([0.0, 0.5])), minimum=minimum)


def brute_force(problem: BalanceProblem) -> Optional[float]:
    """The smallest step time over all whole loads; None when none fits."""
    best: List[float] = []

    def place(units: List[int], left: int) -> None:
        if len(units) == len(problem.speeds):
            if left == 0 and fits(problem, units):
                best.append(step_time_s(problem, units))
            return
        for unit in range(problem.minimum, left + 1):
            place(units + [unit], left - unit)

    place([], problem.units)
    return min(best) if best else None


@pytest.mark.slow
@given(problems())
def test_exact_equals_brute_force(problem: BalanceProblem) -> None:
    optimum = brute_force(problem)
    if optimum is None:
        for name in ("exact", "repaired"):
            with pytest.raises(InfeasibleError):
                SOLVERS[name](problem)
        return
    found = balance(problem)
    assert fits(problem, found.units) and step_time_s(problem, found.units) == optimum
    assert fits(problem, SOLVERS["repaired"](problem).units)


@pytest.mark.slow
@given(problems(devices=9, units=400), st.sampled_from(sorted(SOLVERS)))
def test_every_answer_is_a_division_of_the_load(problem: BalanceProblem, name: str) -> None:
    try:
        found = SOLVERS[name](problem)
    except InfeasibleError:
        assert name in ("exact", "repaired")
        return
    assert sum(found.units) == problem.units and min(found.units) >= problem.minimum
    assert found.algorithm == name


@pytest.mark.slow
@given(problems(devices=9, units=400))
def test_exact_is_never_slower_than_an_answer_that_fits(problem: BalanceProblem) -> None:
    try:
        best = step_time_s(problem, balance(problem).units)
    except InfeasibleError:
        return
    for name in SOLVERS:
        units = SOLVERS[name](problem).units
        if fits(problem, units):
            assert best <= step_time_s(problem, units)


@pytest.mark.slow
def test_ten_thousand_generated_cases() -> None:
    """Repaired and exact are never over memory where some load fits (all generated cases are such)."""
    printed_over = 0
    for problem in generate_cases(10_000, seed=1):
        answers = {name: solve(problem) for name, solve in SOLVERS.items()}
        optimum = step_time_s(problem, answers["exact"].units)
        for name, found in answers.items():
            assert sum(found.units) == problem.units
            if name in ("exact", "repaired"):
                assert fits(problem, found.units) and max(memory_utilisation(problem, found.units)) <= 1 + 1e-9
            if fits(problem, found.units):
                assert step_time_s(problem, found.units) >= optimum
        printed = printed_units(problem)
        assert sum(printed) == pytest.approx(problem.units)
        printed_over += max(memory_utilisation(problem, printed)) > 1 + 1e-9
    assert printed_over > 1000  # the defect is not rare


class TestNamedCase:
    """Speeds 4:1:1, memories 10/12/12, need 30, batch 64."""

    def test_printed_algorithm_ends_at_134_percent(self) -> None:
        printed = printed_units(NAMED)
        assert printed == pytest.approx((42 + 2 / 3 - 14, 10 + 2 / 3 + 14, 64 / 6))
        assert max(memory_utilisation(NAMED, printed)) == pytest.approx(1.34375)
        assert not fits(NAMED, SOLVERS["paper"](NAMED).units)

    def test_repaired_and_exact_fit(self) -> None:
        assert NAMED.capacities == (21, 25, 25)
        for name in ("repaired", "exact"):
            assert max(memory_utilisation(NAMED, SOLVERS[name](NAMED).units)) <= 1
        assert balance(NAMED).units == (21, 22, 21)
        assert SOLVERS["repaired"](NAMED).units == (21, 25, 18)

    def test_formula_1(self) -> None:
        assert waste(NAMED, (21, 22, 21)) == pytest.approx(2 * (2 / 3 - 21 / 64))
        assert waste(NAMED, balance(NAMED, "proportional").units) < waste(NAMED, balance(NAMED, "even").units)


def test_without_memory_pressure_all_aware_solvers_agree() -> None:
    problem = BalanceProblem((2.0, 1.0), (1e9, 1e9), 1.0, 12)
    assert {SOLVERS[name](problem).units for name in ("exact", "repaired", "paper", "proportional")} == {(8, 4)}
    assert balance(problem, "even").units == (6, 6)


def test_paper_speed_ratio_of_whale_section_5_2() -> None:
    """8 V100 and 8 P100: the hardware-aware step is (sum of speeds) / (n x slowest) shorter than the even one."""
    speeds = (15.7e12,) * 8 + (9.3e12,) * 8
    problem = BalanceProblem(speeds, (32e9,) * 8 + (16e9,) * 8, 64e9, 8000, flops=1e15)
    ratio = step_time_s(problem, balance(problem, "even").units) / step_time_s(problem, balance(problem).units)
    assert ratio == pytest.approx(sum(speeds) / (16 * 9.3e12), rel=1e-2)


@pytest.mark.slow
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 3), st.integers(0, 200))
def test_apportion(weights: List[float], minimum: int, extra: int) -> None:
    total = minimum * len(weights) + extra
    units = apportion(weights, total, minimum)
    assert sum(units) == total and min(units) >= minimum
    if minimum == 0:
        for unit, weight in zip(units, weights):
            assert abs(unit - total * weight / sum(weights)) < 1 + 1e-6


@pytest.mark.parametrize("changes, error, message", [
    ({"speeds": (1.0,)}, PlanError, "one speed and one memory size for each device, got 1 and 3"),
    ({"speeds": (0.0, 1.0, 1.0)}, PlanError, "speeds must be positive"),
    ({"memory_bytes": (-1.0, 1.0, 1.0)}, PlanError, "not negative"),
    ({"load_bytes": float("nan")}, PlanError, "not negative"),
    ({"units": 2}, PlanError, "2 units cannot give each of 3 devices at least 1; use fewer devices"),
    ({"memory_bytes": (10.0, 5.0, 5.0)}, InfeasibleError, "64 units do not fit: .* Use a batch of at most 41"),
    ({"fixed_bytes": 11.0}, InfeasibleError, "device 0 has 10 bytes, its smallest share needs 11.47")])
def test_refusals(changes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        balance(BalanceProblem(**dict(NAMED.__dict__, **changes)))


def test_unknown_algorithm() -> None:
    with pytest.raises(PlanError, match="unknown balance algorithm 'exat'.*Did you mean 'exact'"):
        balance(NAMED, "exat")
