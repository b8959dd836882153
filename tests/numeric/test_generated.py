"""Generated models under generated plans equal the local script: a few in `make test`, 5,000 in `make fuzz`."""
from __future__ import annotations

import pytest

from tests.numeric.equality import TOLERANCE, assert_equal, run_local, run_parallel
from tests.numeric.generated import Layer, Model, case_of, models
from tests.numeric.generated_losses import losses
from tests.numeric.generation import PARAMETERS, check_part, compare
from tests.numeric.plans import Parallel, Shape
from tests.numeric.script import Setting

FEW = 4  # models with generated losses, outside of `make fuzz`

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
    check_part(part, models(), check)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARAMETERS)
def test_generated_losses(part: int) -> None:
    """Losses that need all examples together."""
    check_part(part, models(losses()), check, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str) -> None:
    check(KNOWN[name])


@pytest.mark.slow
def test_model_that_amplifies_rounding_is_compared_as_it_allows() -> None:
    """Its loss falls to -1e13. The local script's differs by 1e-8 if its inputs change in the last bit."""
    plan = Parallel(Shape((1,), 1), 4, extra=(("variables", "mirrored"), ("emit", "inline")))
    layers = (Layer("tanh", 0), Layer("loop", 1), Layer("pack", 1), Layer("relu", 0))
    model = Model(layers, "centre+condition+ranked>product", "sgd", (24, 24, 24), Setting(dataset=True, runner="monitored"), plan)
    case = case_of(model)
    outcome = run_parallel(case, model.setting, plan)
    with pytest.raises(AssertionError, match="differs from the local script"):
        assert_equal(outcome, run_local(case, model.setting), TOLERANCE["float64"])
    check(model)
    wrong = outcome._replace(losses={"loss": [1.001 * loss for loss in outcome.losses["loss"]]})
    with pytest.raises(AssertionError, match="loss of run 0 is off by 1.0e-03"):
        compare(wrong, case, model.setting)


def check(model: Model) -> None:
    case = case_of(model)
    compare(run_parallel(case, model.setting, model.parallel), case, model.setting, model.parallel.shape.model_replicas)
