"""Generated models under generated plans equal the local script: 200 in `make test`, 5,000 in `make fuzz`."""
from __future__ import annotations

import random

import hypothesis
import pytest

from tests.numeric.equality import TOLERANCE, assert_equal, run_local, run_parallel
from tests.numeric.generated import Model, case_of, models

PARTS = 4  # so that several processes can share the work


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_generated_models(part: int) -> None:
    default = hypothesis.settings.default
    seed = part if default.derandomize else random.SystemRandom().getrandbits(32)

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=-(-default.max_examples // PARTS), derandomize=False, database=None)
    @hypothesis.given(models())
    def check(model: Model) -> None:
        case, nested = case_of(model), model.parallel.shape.model_replicas
        assert_equal(run_parallel(case, model.setting, model.parallel), run_local(case, model.setting, nested),
                     TOLERANCE[model.setting.dtype])

    check()
