"""The harness itself: every case trains locally, and a wrong number anywhere is found."""
from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest

from tests.numeric.cases import CASES, SYNCHRONISED
from tests.numeric.equality import Outcome, assert_equal, deviation, differences, local_outcome, relative, run_local
from tests.numeric.script import Setting

pytestmark = pytest.mark.half
ALL = sorted(CASES) + sorted(SYNCHRONISED)
SETTING = Setting()


def changed(outcome: Outcome, field: str, name: str, change: Any) -> Outcome:
    """A copy in which ``change`` was applied to one value."""
    values: Dict[str, Any] = dict(getattr(outcome, field))
    values[name] = [change(values[name][0])] + values[name][1:] if isinstance(values[name], list) \
        else change(values[name])
    return outcome._replace(**{field: values})


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_case_trains(name: str) -> None:
    """Every variable moves (slots and moving averages too), so that no comparison in the matrix is of zeros."""
    outcome = local_outcome(name, SETTING, 1)
    assert not [v for v in outcome.final if np.array_equal(outcome.final[v], outcome.initial[v])]
    assert all(np.isfinite(values).all() for values in outcome.losses.values())


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"resource": False}, {"static_batch": False}, {"dataset": True},
                                    {"runner": "callable"}, {"runner": "monitored"}])
@pytest.mark.parametrize("name", ["clipped_adam", "ragged", "encoder"])
def test_settings_do_not_matter_locally(name: str, change: Dict[str, Any]) -> None:
    outcome, expected = (local_outcome(name, s, 1) for s in (SETTING._replace(**change), SETTING))
    if name == "ragged" and "dataset" in change:  # other sizes: only the last is ragged there
        assert differences(outcome, expected, 1e-10)
    else:
        assert_equal(outcome, expected, 1e-10)


@pytest.mark.slow
def test_nested_replicas_take_their_own_batches() -> None:
    """Twice the batch is not the same training."""
    setting = SETTING._replace(dataset=True)
    assert differences(local_outcome("mlp_mean", setting, 2), local_outcome("mlp_mean", setting, 1), 1e-5)


@pytest.mark.slow
def test_every_kind_of_wrong_number_is_found() -> None:
    outcome = local_outcome("momentum", SETTING, 1)
    assert not differences(run_local(CASES["momentum"], SETTING), outcome, 1e-10)
    for field, name in (("final", "one/kernel:0"), ("final", "one/kernel/Momentum:0"), ("initial", "one/bias:0"),
                        ("losses", "loss"), ("outputs", "logits")):
        for change in (lambda a: a * (1 + 3e-5), lambda a: a * np.nan, lambda a: np.stack([a, a])):
            assert len(differences(changed(outcome, field, name, change), outcome, 1e-5)) == 1, (field, name)
    lost = outcome._replace(final={k: v for k, v in outcome.final.items() if k != "one/kernel:0"})
    assert differences(lost, outcome, 1e-5)


def test_measures() -> None:
    ones, zeros = np.ones([2, 8]), np.zeros([2, 8])
    assert deviation(ones * (1 + 1e-3), ones) == pytest.approx(1e-3)
    assert deviation(zeros + 1e-6, zeros) == pytest.approx(1e-4)  # against 0.01 where the variable is zero
    assert deviation(np.ones([4, 4]), ones) == np.inf
    assert relative(np.float32(2.0), np.float32(1.0)) == 1.0
    assert relative(np.float32("nan"), np.float32("nan")) == np.inf
