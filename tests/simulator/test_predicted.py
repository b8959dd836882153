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
from tests.numeric.plans import SCHEDULES, SHAPES
from tests.numeric.script import Setting
from tests.simulator.predicted import Emitted, Played, Step, differences, parallelized, played

AXES: Dict[str, Any] = {
    "case": ("mlp_mean", "sum_with_l2", "momentum", "clipped_adam", "convolution", "tied_embedding", "sparse_embedding", "gan",
             "ragged_sum", "weighted_loss", "while_loop_v1", "gradient_penalty"),
    "shape": tuple(SHAPES), "micro_batches": (1, 2, 4), "schedule": SCHEDULES, "variables": ("auto", "mirrored"),
    "dataset": (False, True)}  # fmt: skip


def step_of(row: Dict[str, Any]) -> Step:
    shape = SHAPES[row["shape"]]
    config = {"num_micro_batch": row["micro_batches"], "pipeline.schedule": row["schedule"], "variables": row["variables"]}
    scopes = [functools.partial(wh.replicate, count) for count in shape.counts]
    return parallelized(row["case"], scopes, shape.devices, config, Setting(dataset=row["dataset"]))


def name_of(row: Dict[str, Any]) -> str:
    return "-".join([row["case"], row["shape"], f"m{row['micro_batches']}", row["schedule"], row["variables"],
                     "dataset" if row["dataset"] else "fed"])


@pytest.mark.parametrize("row", all_pairs(AXES), ids=name_of)
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


@pytest.mark.parametrize("config", [{"variables": "shared"}, {"num_micro_batch": 4}, {"pipeline.schedule": "gpipe"}])
def test_another_plan_is_played_differently(config: Dict[str, Any]) -> None:
    """The comparison sees what it is for."""
    base = {"num_micro_batch": 2, "pipeline.schedule": "backward_first", "variables": "mirrored"}
    scopes = [functools.partial(wh.replicate, 2), functools.partial(wh.replicate, 2)]
    one, other = (parallelized("mlp_mean", scopes, 4, chosen, Setting()) for chosen in (base, {**base, **config}))
    assert differences(Emitted(one).ran(), Played(other, played(other)).ran())
