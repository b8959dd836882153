"""In which order a pipeline stage runs its micro-batches: pure generators, wired elsewhere.

>>> " ".join(str(step) for step in schedule("backward_first", stage=0, num_stages=2, num_micro_batch=4, warmup=2))
'F0 F1 B0 F2 B1 F3 B2 B3'
"""

from __future__ import annotations

from typing import Callable, Dict, Iterator

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.schedule.backward_first import backward_first
from whale_tf.schedule.gpipe import gpipe
from whale_tf.schedule.step import BACKWARD, FORWARD, Step
from whale_tf.schedule.warmup import POLICY_B_RATIO, auto_policy, check_warmups, warmup_depths

__all__ = [
    "BACKWARD",
    "FORWARD",
    "POLICY_B_RATIO",
    "SCHEDULES",
    "Step",
    "auto_policy",
    "check_warmups",
    "schedule",
    "warmup_depths",
]

SCHEDULES: Dict[str, Callable[[int, int], Iterator[Step]]] = {
    "backward_first": backward_first,
    "gpipe": gpipe,
}


def schedule(name: str, stage: int, num_stages: int, num_micro_batch: int, warmup: int) -> Iterator[Step]:
    """The order of steps on one stage.

    Args:
        name: a key of :data:`SCHEDULES`.
        stage: the stage, from 0 to ``num_stages - 1``.
        warmup: forward micro-batches started before the first backward one (``backward_first``); see
            :func:`check_warmups` for which depths go together.

    Raises:
        PlanError: unknown schedule, or a number out of its range.
    """
    if name not in SCHEDULES:
        raise PlanError(
            "schedule is {!r}, expected one of {}.{}".format(name, ", ".join(sorted(SCHEDULES)), did_you_mean(name, SCHEDULES))
        )
    if not 0 <= stage < num_stages:
        raise PlanError(f"stage is {stage}, expected 0 to {num_stages - 1}")
    if num_micro_batch < 1 or warmup < 1:
        raise PlanError(f"num_micro_batch is {num_micro_batch} and warmup is {warmup}, expected at least 1 each")
    return SCHEDULES[name](num_micro_batch, warmup)
