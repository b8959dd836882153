"""Predicted is executed: what the simulator plays for a captured step is what its Program says, one to one.

Sums count where an op of the step reads them; others are in the Program for whoever fetches them.  A gradient of unknown size is
not added (`conditional_v1` on TensorFlow 1.15).
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Tuple

import pytest

import whale_tf as wh
from tests.numeric.pairwise import all_pairs
from tests.numeric.plans import FOLDED, HOMES, SCHEDULES, SHAPES, fits
from tests.numeric.script import Setting
from tests.simulator.predicted import Emitted, Played, Step, differences, parallelized, played
from whale_tf.program import SECTION

AXES: Dict[str, Any] = {
    "case": ("mlp_mean", "sum_with_l2", "momentum", "clipped_adam", "convolution", "tied_embedding", "sparse_embedding", "gan",
             "ragged_sum", "weighted_loss", "while_loop_v1", "gradient_penalty"),
    "shape": tuple(SHAPES), "micro_batches": (1, 2, 4), "schedule": SCHEDULES + FOLDED, "variables": ("auto", "mirrored"),
    "dataset": (False, True), "homes": ("none",)}  # fmt: skip
HOME_AXES = dict(
    AXES, case=("clipped_adam", "tied_embedding", "sparse_embedding", "sum_with_l2"), variables=("auto",), homes=tuple(HOMES),
    shape=("replicate4", "nested2x2", "counts3:1", "counts2:1:1"), schedule=SCHEDULES)


def allowed(row: Dict[str, Any]) -> bool:
    """Not what is refused (gradients of gradients across TaskGraphs in turn on one device), nor loops of version 1, which stay
    whole where gradients of weights are apart, and which the simulator takes for straight-line code."""
    case, schedule = row.get("case"), row.get("schedule", "")
    if (case in ("gradient_penalty", "while_loop_v1") and schedule in FOLDED) or (
            case == "while_loop_v1" and schedule.startswith("zero_bubble")):
        return False
    return fits(row) and not (case in ("gradient_penalty", "while_loop_v1") and SHAPES[row.get("shape", "one")].each > 1)


def needed(row: Dict[str, Any]) -> bool:
    """A model meets every third shape and every second schedule, and each of both meets every other choice."""
    number = AXES["case"].index(row["case"]) if "case" in row else 0
    if set(row) == {"case", "shape"}:
        return (number + AXES["shape"].index(row["shape"])) % 3 == 0
    return set(row) != {"case", "schedule"} or (number + AXES["schedule"].index(row["schedule"])) % 2 == 0


def step_of(row: Dict[str, Any]) -> Step:
    shape = SHAPES[row["shape"]]
    config = {"num_micro_batch": row["micro_batches"], "pipeline.schedule": row["schedule"], "variables": row["variables"],
              **HOMES.get(row["homes"], {})}
    scopes = [functools.partial(wh.replicate, count) for count in shape.counts]
    return parallelized(row["case"], scopes, shape.devices, config, Setting(dataset=row["dataset"]))


def name_of(row: Dict[str, Any]) -> str:
    return "-".join([row["case"], row["shape"], f"m{row['micro_batches']}", row["schedule"], row["variables"],
                     "dataset" if row["dataset"] else "fed"] + [row["homes"]] * (row["homes"] != "none"))


@pytest.mark.half
@pytest.mark.parametrize("row", all_pairs(AXES, allowed, needed) + all_pairs(HOME_AXES, allowed), ids=name_of)
def test_the_simulator_plays_the_program(row: Dict[str, Any]) -> None:
    step = step_of(row)
    emitted = Emitted(step).ran()
    assert emitted.ops and emitted.updates
    assert not differences(emitted, Played(step, played(step)).ran())


@pytest.mark.parametrize("case, counts, devices, micro_batches", [
    ("mlp_mean", (-2,), 2, 1), ("mlp_mean", (-2,), 4, 1), ("mlp_mean", (2, -2), 4, 1), ("mlp_mean", (-2, 2), 4, 2),
    ("mlp_mean", (-2, -2), 4, 2), ("convolution", (1, -2), 3, 2), ("encoder", (1, 2), 3, 2)])
def test_divided_ops(case: str, counts: Tuple[int, ...], devices: int, micro_batches: int) -> None:
    """``-n``: ``wh.split(n)``."""
    scopes = [functools.partial(wh.split, -n) if n < 0 else functools.partial(wh.replicate, n) for n in counts]
    step = parallelized(case, scopes, devices, {"num_micro_batch": micro_batches}, Setting())
    assert not differences(Emitted(step).ran(), Played(step, played(step)).ran())


@pytest.mark.parametrize("case, counts, devices, micro_batches", [
    ("contrastive", (2,), 2, 2), ("several", (1, 1), 2, 2), ("segment_means", (1, 1), 4, 1)])
def test_sections(case: str, counts: Tuple[int, ...], devices: int, micro_batches: int) -> None:
    """What needs all examples runs once, on values of all clones."""
    scopes = [functools.partial(wh.replicate, n) for n in counts]
    step = parallelized(case, scopes, devices, {"num_micro_batch": micro_batches}, Setting())
    assert step.plan.num_micro_batch == micro_batches and any(body.step == SECTION for body in step.program.bodies)
    assert not differences(Emitted(step).ran(), Played(step, played(step)).ran())


@pytest.mark.parametrize("config", [{"variables": "shared"}, {"num_micro_batch": 4}, {"pipeline.schedule": "gpipe"}])
def test_another_plan_is_played_differently(config: Dict[str, Any]) -> None:
    """The comparison sees what it is for."""
    base = {"num_micro_batch": 2, "pipeline.schedule": "backward_first", "variables": "mirrored"}
    scopes = [functools.partial(wh.replicate, 2), functools.partial(wh.replicate, 2)]
    one, other = (parallelized("mlp_mean", scopes, 4, chosen, Setting()) for chosen in (base, {**base, **config}))
    assert differences(Emitted(one).ran(), Played(other, played(other)).ran())
