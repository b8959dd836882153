"""Parallel equals local: every model under every plan; by default a subset in which pairs of choices meet."""
from __future__ import annotations

import sys
import warnings
from typing import Any, Dict, Iterable, List

import pytest

import whale_tf as wh
from tests import graph_optimizer
from tests.numeric.cases import CASES, SYNCHRONISED
from tests.numeric.equality import check
from tests.numeric.pairwise import all_pairs, full_product
from tests.numeric.plans import FOLDED, HOMES, MICRO_BATCHES, SCHEDULES, SHAPES, Parallel, fits
from tests.numeric.script import Setting

BOTH = (True, False)
IS_OLD = sys.version_info < (3, 8)
AXES: Dict[str, Any] = {
    "case": tuple(CASES), "shape": tuple(SHAPES), "micro_batches": MICRO_BATCHES, "schedule": SCHEDULES + FOLDED,
    "dtype": ("float32", "float64"), "resource": BOTH, "static_batch": BOTH, "dataset": BOTH,
    "runner": ("session", "callable", "monitored"), "variables": ("auto", "mirrored"),
    "emit": ("inline", "call"), "recompute": ("none", "full"), "homes": ("none",)}
HOME_AXES = dict(
    AXES, case=("sum_with_l2", "clipped_adam", "momentum", "encoder", "tied_embedding", "sparse_embedding"),
    shape=("replicate2", "nested2x2", "counts3:1", "counts2:1:1"), micro_batches=(1, 2, 4), variables=("auto",),
    schedule=SCHEDULES, dtype=("float64", "float32"), homes=tuple(HOMES))
SYNC_AXES = dict(AXES, case=tuple(SYNCHRONISED), micro_batches=(1,), schedule=SCHEDULES[:1],
                 shape=tuple(name for name, shape in SHAPES.items() if shape.each == 1))


def allowed(row: Dict[str, Any]) -> bool:
    """A ragged last mini-batch of several model replicas, each with its own, has no local counterpart."""
    ragged = "case" in row and row["case"] in CASES and CASES[row["case"]].ragged
    nested = "shape" in row and SHAPES[row["shape"]].model_replicas > 1
    return fits(row) and not (ragged and nested and row.get("dataset", False))


# Of each kind a model meets one; the longest two axes would make most of the rows.
KINDS = (("one",), ("replicate2", "replicate4"), ("pipeline2", "pipeline4"), ("nested2x2",),
         ("counts1:3", "counts3:1", "counts2:3", "counts3:2", "counts2:1:1"), ("folded2x2",))


def needed(row: Dict[str, Any]) -> bool:
    """A model meets one shape of each kind, in turn; on Python 3.7 any shapes and schedules.  How a session is run does not
    depend on the shape."""
    if set(row) == {"case", "shape"}:
        number = list(CASES).index(row["case"])
        return not IS_OLD and any(kind[number % len(kind)] == row["shape"] for kind in KINDS)
    return set(row) != {"shape", "runner"} and not (IS_OLD and set(row) == {"case", "schedule"})


def divides(row: Dict[str, Any]) -> bool:
    """A mini-batch of static size divides evenly over all clones; other sizes are refused (tests/numeric/test_bad_input.py)."""
    case, shape = CASES[row["case"]], SHAPES[row["shape"]]
    if not row["static_batch"] or case.ragged:
        return True
    replicas = 1 if row["dataset"] else shape.model_replicas  # a fed mini-batch is divided over them, too
    return all(size % (replicas * row["micro_batches"] * count) == 0 for size in case.sizes for count in shape.counts)


def trains(row: Dict[str, Any]) -> bool:
    """Allowed, and the mini-batch divides, as far as that is decided."""
    inputs = (row["dataset"],) if "dataset" in row else BOTH
    is_open = not {"case", "shape", "micro_batches", "static_batch"}.issubset(row)
    return allowed(row) and (is_open or any(divides(dict(row, dataset=dataset)) for dataset in inputs))


def name_of(row: Dict[str, Any]) -> str:
    words = [row["case"], row["shape"], "m{}".format(row["micro_batches"]), row["schedule"], row["dtype"],
             "resource" if row["resource"] else "ref", "static" if row["static_batch"] else "unknown",
             "dataset" if row["dataset"] else "fed", row["runner"], row["variables"], row["emit"]]
    words += ["again"] * (row["recompute"] == "full") + [row["homes"]] * (row["homes"] != "none")
    return "-".join(words)


def run(row: Dict[str, Any]) -> None:
    setting = Setting(**{field: row[field] for field in Setting._fields if field in row})
    if row["emit"] == "call" and not row["resource"]:  # results only: tests/emit/test_calls.py shows why
        setting = setting._replace(outputs=False)
    parallel = Parallel(SHAPES[row["shape"]], row["micro_batches"], row["schedule"],
                        extra=(("variables", row["variables"]), ("emit", row["emit"]), ("recompute", row["recompute"]),
                               *HOMES.get(row["homes"], {}).items()))
    with warnings.catch_warnings():
        if not (IS_OLD and row["case"] == "while_loop_v2"):  # the gradient's body has unknown ranks there, so the loop runs whole
            warnings.simplefilter("error", wh.IdleWarning)
        if row["case"] == "gradient_penalty" and row["schedule"] in FOLDED and row["micro_batches"] > 1:
            with pytest.raises(wh.PlanError, match="cannot order this graph"):
                check(row["case"], setting, parallel)
        else:
            check(row["case"], setting, parallel)


def named(rows: Iterable[Dict[str, Any]]) -> List[Any]:
    """The rows under their names, a fixed half of them with TensorFlow's graph optimizer."""
    return [pytest.param(row, id=name_of(row), marks=graph_optimizer.marks(name_of(row))) for row in rows]


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("row", named(all_pairs(AXES, trains, needed)))
def test_pairs(row: Dict[str, Any]) -> None:
    run(row)


@pytest.mark.slow
def test_reference_variables_are_updated_after_they_are_read() -> None:
    """The backward steps recompute all that they read, so that data does not order them behind the forward steps."""
    run(dict(case="convolution", shape="counts3:1", micro_batches=2, schedule="zero_bubble_h1", dtype="float32", resource=False,
             static_batch=True, dataset=False, runner="session", variables="auto", emit="inline", recompute="full", homes="none"))


@pytest.mark.slow
@pytest.mark.graph_optimizer
def test_reference_variables_are_updated_after_they_are_read_in_runs_of_some_updates() -> None:
    """Closed gates must not cut the only path from a reader to an update."""
    run(dict(case="gan", shape="folded2x2", micro_batches=2, schedule="zero_bubble_v", dtype="float64", resource=False,
             static_batch=True, dataset=False, runner="session", variables="mirrored", emit="inline", recompute="none",
             homes="none"))


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("row", named(all_pairs(HOME_AXES, allowed)))
def test_homes_of_variables(row: Dict[str, Any]) -> None:
    run(row)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("row", named(all_pairs(SYNC_AXES, needed=lambda row: set(row) != {"shape", "runner"})))
def test_synchronised_batch_norm(row: Dict[str, Any]) -> None:
    run(row)


def full_matrix() -> Any:
    """Every model x plan x precision; the remaining choices alternate along the list."""
    axes = {name: AXES[name] for name in ("case", "shape", "micro_batches", "schedule", "dtype")}
    rest = {name: AXES[name] for name in AXES if name not in axes}
    others = full_product(rest)
    for index, row in enumerate(full_product(axes)):
        if (row["micro_batches"] == 1 and row["schedule"] in SCHEDULES[1:]) or not fits(row):
            continue  # one micro-batch has one order
        choices = (dict(row, **others[(index + shift) % len(others)]) for shift in range(len(others)))
        yield next(choice for choice in choices if allowed(choice) and divides(choice))


def pytest_generate_tests(metafunc: Any) -> None:
    """Thousands of rows, which are only made where they run."""
    if metafunc.function is test_all:
        metafunc.parametrize("row", named(full_matrix()))


@pytest.mark.full
@pytest.mark.slow
def test_all(row: Dict[str, Any]) -> None:
    run(row)
