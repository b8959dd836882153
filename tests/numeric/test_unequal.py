"""Unequal devices: uneven parts of every micro-batch, uneven shards, and still the local script's numbers."""
from __future__ import annotations

import functools
import json
from typing import Any, Dict, List, Sequence, Tuple

import pytest

import whale_tf as wh
from tests.numeric import equality
from tests.numeric.equality import TOLERANCE, assert_equal, find_case, local_outcome, reference, run_local
from tests.numeric.script import Setting, Stages
from tests.numeric.split import Split, run_split
from tests.numeric.unequal import described

pytestmark = pytest.mark.half
GIB = 1024
TWO_TO_ONE = ((200, GIB), (100, GIB))
FIVE_TO_THREE = ((500, GIB), (300, GIB))
THREE = ((100, GIB), (300, GIB), (200, GIB))
Devices = Tuple[Tuple[float, float], ...]


def check_unequal(name: str, devices: Sequence[Tuple[float, float]], counts: Sequence[Any] = (None,),
                  setting: Setting = Setting(), config: Any = None) -> wh.Plan:
    """The case annotated with ``wh.replicate(count)`` for each count, on these devices."""
    case = find_case(name)
    values: Dict[str, Any] = dict(config or {}, **(case.config or {}))
    wh.init(values, cluster=described(devices))
    try:
        outcome = equality.run_script(case, setting, Stages([functools.partial(wh.replicate, count) for count in counts]), 1, 1)
        plan = wh.current_plan()
    finally:
        wh.shutdown()
    assert_equal(outcome, local_outcome(name, reference(setting), 1), TOLERANCE[setting.dtype])
    assert plan is not None
    return plan


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_mean", "sum_with_l2", "weighted_loss", "clipped_adam", "sparse_embedding", "batch_norm"])
@pytest.mark.parametrize("devices,slices", [(TWO_TO_ONE, (2, 1)), (FIVE_TO_THREE, (5, 3)), (THREE, (1, 3, 2))])
def test_slices_follow_speed(name: str, devices: Sequence[Tuple[float, float]], slices: Tuple[int, ...]) -> None:
    plan = check_unequal(name, devices)
    assert [task.slices for task in plan.task_graphs] == [slices]


@pytest.mark.slow
def test_gradients_accumulate_over_uneven_micro_batches() -> None:
    plan = check_unequal("clipped_adam", THREE, config={"num_micro_batch": 4}, setting=Setting(dtype="float32"))
    assert plan.task_graphs[0].slices == (1, 3, 2)


@pytest.mark.slow
def test_unknown_batch_size_and_ragged_batches() -> None:
    plan = check_unequal("ragged", TWO_TO_ONE, setting=Setting(static_batch=False))
    slices = plan.task_graphs[0].slices
    assert slices is not None and slices[0] == pytest.approx(2 * slices[1], abs=1)


@pytest.mark.slow
def test_stages_with_uneven_replicas() -> None:
    """One device, then two unequal ones: the bridge cuts as the slices do."""
    plan = check_unequal("momentum", [(100, 2 * GIB), (200, GIB), (100, GIB)], (1, 2), config={"num_micro_batch": 2})
    assert plan.task_graphs[0].slices is None and plan.task_graphs[1].slices == (2, 1)


@pytest.mark.slow
def test_early_stages_get_the_devices_with_more_memory() -> None:
    plan = check_unequal("mlp_sum", [(100, GIB), (100, 4 * GIB)], (1, 1), config={"num_micro_batch": 4})
    assert [task.devices for task in plan.task_graphs] == [((1,),), ((0,),)]


@pytest.mark.slow
def test_every_model_replica_has_the_same_mix() -> None:
    devices = [(200, 2 * GIB), (200, 2 * GIB), (100, GIB), (100, GIB)]
    plan = check_unequal("momentum", devices, (1, 1), config={"num_micro_batch": 2, "io.nested_batch": "divide"})
    assert [task.devices for task in plan.task_graphs] == [((0,), (1,)), ((2,), (3,))]


@pytest.mark.slow
def test_even_parts_on_request() -> None:
    plan = check_unequal("mlp_mean", TWO_TO_ONE, config={"balance.algorithm": "even"})
    assert plan.task_graphs[0].slices is None


@pytest.mark.slow
def test_memory_bounds_a_slice() -> None:
    """The fast device has room for few examples, so the slow one takes more than its speed says."""
    plan = check_unequal("mlp_mean", [(400, 0.008), (100, GIB)])
    slices = plan.task_graphs[0].slices
    assert slices is not None and slices[0] < slices[1]


@pytest.mark.slow
def test_model_that_fits_no_division_is_refused() -> None:
    with pytest.raises(wh.WhaleError, match=r"TaskGraph 'replicate_0' on devices \[0, 1\]: "):
        check_unequal("mlp_mean", [(400, 0.001), (100, 0.001)])


# -- shards ------------------------------------------------------------------------------------------------------------

SHARDS: Dict[str, Tuple[str, Tuple[int, ...], Devices, Dict[str, Any], List[Any]]] = {
    "two to one": ("clipped_adam", (-2,), TWO_TO_ONE, {}, [(11, 5)]),
    "five to three, rows": ("classifier_adagrad", (-2,), FIVE_TO_THREE, {"patterns.force": "row"}, [(5, 3)]),
    "three devices, initial values in parts": ("classifier_adam", (-3,), THREE, {"init": "sharded"}, [(1, 3, 2)]),
    "whole heads": ("transformer", (-2,), TWO_TO_ONE, {}, [(3, 1)]),
    "a stage before it, micro-batches": (
        "transformer", (1, -2), ((100, 2 * GIB), (200, GIB), (100, GIB)), {"num_micro_batch": 2}, [None, (11, 5)]),
    "replicas and shards on the same devices": ("classifier_momentum", (2, -2), TWO_TO_ONE, {}, [(2, 1), (11, 5), (2, 1)]),
    "model replicas of the same mix": ("look_up_adam", (-2,), TWO_TO_ONE * 2, {}, [(11, 5)]),
    "not enough memory for its speed": ("clipped_adam", (-2,), ((400, 0.003), (100, GIB)), {}, [(3, 5)]),
    "equal on request": ("clipped_adam", (-2,), TWO_TO_ONE, {"balance.algorithm": "even"}, [None]),
}


def run_shards(name: str, setting: Setting, plan: Any = None) -> wh.Plan:
    """A case of ``SHARDS`` equals the local script; ``plan`` in place of the planner's."""
    case, counts, devices, config, _ = SHARDS[name]
    ran = run_split(find_case(case), setting, Split(counts, len(devices), tuple(config.items()), devices), plan)
    assert_equal(ran.outcome, run_local(find_case(case), setting, 1), TOLERANCE[setting.dtype])
    return ran.plan


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDS)
def test_shards_follow_speed(name: str) -> None:
    plan = run_shards(name, Setting())
    assert [task.slices for task in plan.task_graphs] == SHARDS[name][-1]


@pytest.mark.slow
def test_saved_plan_has_its_shares_and_they_can_be_edited() -> None:
    plan = run_shards("two to one", Setting())
    assert run_shards("two to one", Setting(), plan.to_json()) == plan
    edited = json.loads(plan.to_json())
    edited["task_graphs"][0]["slices"] = [1, 3]
    assert run_shards("two to one", Setting(), json.dumps(edited)).task_graphs[0].slices == (1, 3)
    edited["task_graphs"][0]["slices"] = [1, 1, 3]
    with pytest.raises(wh.PlanError, match="needs 2 slice sizes of at least 1"):
        run_shards("two to one", Setting(), json.dumps(edited))
