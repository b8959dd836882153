"""Arrangements of processes, devices and TaskGraphs, each with every kind of model, variable and input."""
from __future__ import annotations

import itertools
from typing import Any, Dict, List, NamedTuple, Tuple

from tests.multiprocess.jobs import Job
from tests.numeric.pairwise import all_pairs
from tests.numeric.script import Setting


class Arrangement(NamedTuple):
    """``workers`` processes of ``devices`` devices; the other fields are those of :class:`Job`."""

    workers: int
    devices: int
    counts: Tuple[Any, ...]
    split: Tuple[int, ...] = ()
    micro_batches: int = 1


ARRANGEMENTS: Dict[str, Arrangement] = {
    "2x1 data parallel": Arrangement(2, 1, (None,)),
    "2x1 pipeline": Arrangement(2, 1, (1, 1), micro_batches=2),
    "2x1 split": Arrangement(2, 1, (2,), split=(0,)),
    "2x2 data parallel": Arrangement(2, 2, (None,)),
    "2x2 pipeline of replicated stages": Arrangement(2, 2, (2, 2), micro_batches=2),
    "2x2 split": Arrangement(2, 2, (4,), split=(0,)),
    "2x2 nested": Arrangement(2, 2, (1,)),
    "2x2 pipeline in each": Arrangement(2, 2, (1, 1), micro_batches=4),
    "4x1 data parallel": Arrangement(4, 1, (None,), micro_batches=2),
    "4x1 pipeline": Arrangement(4, 1, (1, 1, 1, 1), micro_batches=4),
    "4x1 split": Arrangement(4, 1, (4,), split=(0,)),
    "4x1 nested pipelines": Arrangement(4, 1, (1, 1), micro_batches=2),
    "4x1 replicated stage before a split one": Arrangement(4, 1, (2, 2), split=(1,)),
}
BOTH = (True, False)
SETTINGS: Dict[str, Any] = {"dtype": ("float32", "float64"), "resource": BOTH, "static_batch": BOTH, "dataset": BOTH}
CASES = ("clipped_adam", "weighted_loss")
MORE_CASES = (
    "momentum", "mlp_mean", "sum_with_l2", "convolution", "tied_embedding", "sparse_embedding", "gan", "gradient_penalty")


def pairwise() -> List[Job]:
    """Jobs in which every two values of two axes meet."""
    return [_job(row, row["arrangement"], row["case"])
            for row in all_pairs(dict(SETTINGS, arrangement=tuple(ARRANGEMENTS), case=CASES))]


def every_case() -> List[Job]:
    """Every case in every arrangement, each with either value of every setting."""
    models = tuple(itertools.product(ARRANGEMENTS, CASES + MORE_CASES))
    return [_job(row, *row["model"]) for row in all_pairs(dict(SETTINGS, model=models))]


def _job(row: Dict[str, Any], name: str, case: str) -> Job:
    arrangement = ARRANGEMENTS[name]
    setting = Setting(**{field: row[field] for field in Setting._fields if field in row})
    return Job(case, setting, arrangement.counts, arrangement.devices, arrangement.micro_batches, split=arrangement.split,
               workers=arrangement.workers)


def groups(jobs: List[Job], size: int) -> List[List[Job]]:
    """Jobs that may run one after the other in the same processes, at most ``size``; the first has the most devices, for which
    the processes' servers are made."""
    found: Dict[Tuple[int, bool], List[Job]] = {}
    for job in sorted(jobs, key=lambda each: -each.devices - each.has_host):
        found.setdefault((job.workers, job.spans), []).append(job)
    return [group[first:first + size] for group in found.values() for first in range(0, len(group), size)]
