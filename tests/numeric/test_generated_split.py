"""Generated models under generated ``wh.split`` and ``wh.replicate`` equal the local script: a few, and 5,000 in `make fuzz`."""
from __future__ import annotations

import pytest

from tests.numeric.generated_split import Model, case_of, models
from tests.numeric.generation import PARAMETERS, check_part, compare
from tests.numeric.split import run_split


def check(model: Model) -> None:
    case = case_of(model)
    compare(run_split(case, model.setting, model.split).outcome, case, model.setting._replace(runner="session"))


@pytest.mark.slow
@pytest.mark.parametrize("part", PARAMETERS)
def test_generated_models(part: int) -> None:
    check_part(part, models(), check)
