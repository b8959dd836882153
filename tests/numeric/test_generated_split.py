"""Generated models under generated ``wh.split`` and ``wh.replicate`` equal the local script: 200, 5,000 in `make fuzz`."""
from __future__ import annotations

import random

import hypothesis
import pytest

from tests.numeric.equality import TOLERANCE, assert_equal, run_local
from tests.numeric.generated_split import Model, case_of, models
from tests.numeric.split import run_split

PARTS = 4  # so that several processes can share the work


def check(model: Model) -> None:
    case = case_of(model)
    expected = run_local(case, model.setting._replace(runner="session"))
    assert_equal(run_split(case, model.setting, model.split).outcome, expected, TOLERANCE["float64"])


@pytest.mark.slow
def test_a_few_generated_models() -> None:
    """The first of those of `make test-all`, for every run."""
    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=8, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(models())
    def run(model: Model) -> None:
        check(model)

    run()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_generated_models(part: int) -> None:
    default = hypothesis.settings.default
    seed = part if default.derandomize else random.SystemRandom().getrandbits(32)

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=(200 if default.derandomize else 5000) // PARTS, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(models())
    def run(model: Model) -> None:
        check(model)

    run()
