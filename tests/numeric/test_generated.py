"""Generated models under generated plans equal the local script: 24 in `make test`, 5,000 in `make fuzz`."""
from __future__ import annotations

import pytest

from tests.numeric.equality import TOLERANCE, assert_equal, run_local, run_parallel
from tests.numeric.generated import Layer, Model, case_of, models
from tests.numeric.generated_losses import losses
from tests.numeric.generation import PARAMETERS, check_part
from tests.numeric.plans import Parallel, Shape
from tests.numeric.script import Setting

FEW = 8  # models with generated losses, outside of `make fuzz`

# Found by `make fuzz`.
KNOWN = {
    # the divisor in the gradient of a mean over `[B]` did not count the other model replicas' mini-batches
    "mean of sums": Model((Layer("attend", 0),), "mean_of_sums", "adam", (2, 2, 2),
                          Setting(dtype="float64", static_batch=True, dataset=True), Parallel(Shape((1,), 2), 1)),
    # all gradients of weights of the last stage are dead, and a value of the whole mini-batch was to be brought to them
    "dead gradients of weights": Model((Layer("mixed", 0),), "weighted", "adam", (4, 4, 4),
                                       Setting(dtype="float64", static_batch=True),
                                       Parallel(Shape((1, 1), 2), 2, "zero_bubble_h1", (1,), (("emit", "call"),))),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARAMETERS)
def test_generated_models(part: int) -> None:
    check_part(part, models(), compare)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARAMETERS)
def test_generated_losses(part: int) -> None:
    """Losses that need all examples together."""
    check_part(part, models(losses()), compare, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str) -> None:
    compare(KNOWN[name])


def compare(model: Model) -> None:
    case, nested = case_of(model), model.parallel.shape.model_replicas
    assert_equal(run_parallel(case, model.setting, model.parallel), run_local(case, model.setting, nested),
                 TOLERANCE[model.setting.dtype])
