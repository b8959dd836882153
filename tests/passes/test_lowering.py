"""Which clones' values are added up where, and what goes over processes: recipes as the primitives of which they are made."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import pytest

from tests.passes.drawings import chain, plan
from tests.passes.lowered import WEIGHT, computed, of_kind, terms
from tests.passes.programs import PROGRAMS
from whale_tf.ir.batch_axis import EXTENT, Reduce
from whale_tf.ir.layout import Layout, partial, replicated, sharded
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program, parted
from whale_tf.passes.lowering import Lowering, Primitive
from whale_tf.passes.lowering import primitive as kinds
from whale_tf.plan import GradientPlan, Plan
from whale_tf.program import SYNCHRONISE, Clone, Copy


class Case:
    """A lowered step."""

    def __init__(self, step: TrainingStep, chosen: Plan, is_even: Optional[bool] = None) -> None:
        self.step, self.plan = parted(step, chosen), chosen
        self.program = compile_program(step, chosen)
        self.lowering = Lowering(self.step, chosen, self.program)
        if is_even is not None:
            self.lowering._is_even = is_even

    def tensor(self, name: str) -> int:
        return self.step.graph.tensor(name)

    def of_update(self, tensor: str, copy: Copy = Copy(0, 0)) -> Primitive:  # noqa: B008
        number = self.tensor(tensor)
        if self.lowering.is_synchronised(number, 0):
            return self.lowering.synchronised(number, 0, copy)
        return self.lowering.of_all_processes(number)

    def values(self) -> List[Primitive]:
        return [self.of_update(self.step.graph.tensor_name(tensor)) for tensor, _ in self.step.gradients]


def everywhere(micro_batches: int, replicas: int) -> Dict[Clone, float]:
    return {Clone(0, m, r): WEIGHT for m in range(micro_batches) for r in range(replicas)}


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_replicas_add_up_their_micro_batches_and_then_each_other(micro_batches: int, is_even: bool) -> None:
    """Each sum is weighted once, or each of its terms, on its replica's device."""
    case = Case(chain(1), plan([2], micro_batches), is_even)
    totals = [case.of_update("grad0", Copy(0, replica)) for replica in range(2)]
    assert totals[0] is totals[1] and totals[0].device == 0
    assert terms(totals[0]) == everywhere(micro_batches, 2)
    adds, scales = of_kind(totals, kinds.ADD), of_kind(totals, kinds.SCALE)
    each_replica = 1 if is_even else micro_batches
    assert {(each.clone, each.device) for each in adds} == {
        (Clone(0, m, r), r) for r in range(2) for m in range(1, micro_batches)}
    assert sorted(each.device for each in scales) == [0] * each_replica + [1] * each_replica
    calls = [case.program.calls[each.call] for each in adds]
    assert [call.clone for call in calls] == [each.clone for each in adds]


def test_devices_take_turns_at_adding() -> None:
    case = Case(chain(4, task_graphs=1), plan([2]))
    assert [case.of_update(f"grad{i}").device for i in (3, 2, 1, 0)] == [0, 1, 0, 1]


def test_a_collective_gives_each_replica_the_sum() -> None:
    sync = (GradientPlan(task_graph=0, backend="collective", buckets=(("w0",),)),)
    case = Case(chain(1), plan([2], gradients=sync))
    for replica in range(2):
        value = case.of_update("grad0", Copy(0, replica))
        assert value.kind == kinds.TAKE and value.device == replica and terms(value) == everywhere(1, 2)
        assert value.operands[0].detail.devices == (0, 1)


def test_one_replica_s_sum_is_merged() -> None:
    case = Case(chain(1), plan([1], 2))
    value = case.of_update("grad0")
    assert terms(value) == everywhere(2, 1) and value is case.lowering.whole(case.tensor("grad0"))


def test_gradients_are_added_up_at_home() -> None:
    """One chain over all clones, on the home's device."""
    case = Case(*PROGRAMS["zero_v3"])
    for tensor, home in (("grad0", 0), ("grad1", 1), ("grad2", 0)):
        value = case.of_update(tensor)
        assert terms(value) == everywhere(2, 2)
        adds = of_kind([value], kinds.ADD)
        assert len(adds) == 3 and {each.device for each in adds} == {home}


def test_a_home_without_micro_batches_gets_each_replica_s_gradient() -> None:
    step, chosen = chain(1), plan([2], zero="v3", tasks={0: {"variables": "shared", "homes": {"w0": 1}}})
    case = Case(step, chosen)
    value = case.of_update("grad0")
    assert terms(value) == everywhere(1, 2) and value.device == 1
    assert {each.device for each in of_kind([value], kinds.SCALE)} == {0, 1}


def buckets(*names: Tuple[str, ...], fp16: bool = False) -> Any:
    return (GradientPlan(task_graph=0, backend="local", buckets=names, fp16=fp16),)


def test_gradients_of_a_bucket_are_one_message() -> None:
    step = chain(3, task_graphs=1)._replace(processes=2)
    case = Case(step, plan([2], gradients=buckets(("w2", "w0"), ("w1",), fp16=True)))
    first, second, third = (case.of_update(f"grad{i}", Copy(0, 1)) for i in range(3))
    assert first.operands == third.operands and [first.detail, third.detail] == [1, 0]
    message, = first.operands
    assert message.detail.fp16 and [each.tensor for each in message.operands[0].operands] == [
        case.tensor("grad2"), case.tensor("grad0")]
    assert second.kind == kinds.ALL_REDUCE and second.detail.fp16
    assert all(terms(each) == everywhere(1, 2) for each in (first, second, third))


def over_processes(homes: Dict[str, int], rank: int, replicas: int = 1, zero: str = "v2", **more: Any) -> Plan:
    devices = tuple(tuple(range(process * replicas, (process + 1) * replicas)) for process in range(2))
    whole = plan([replicas], 2, 2, {0: {"variables": "shared", "homes": homes}}, zero=zero, processes=devices, **more)
    return whole.local_part(rank)


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_owner_adds_up_what_all_processes_send_of_each_micro_batch(replicas: int, is_even: bool) -> None:
    step = chain(2, task_graphs=1, momentum=True)._replace(processes=2)
    case = Case(step, over_processes({"v0": 0, "v1": replicas}, 0, replicas), is_even)  # the first device of each process
    own, other = case.of_update("grad0"), case.of_update("grad1")
    assert terms(own) == everywhere(2, replicas)
    assert len(of_kind([own], kinds.ALL_REDUCE)) == 2
    assert other.kind == kinds.IDENTITY and [each.kind for each in (*other.operands, *other.waits)] == [kinds.ALL_REDUCE] * 2
    adds = [each for each in of_kind([own], kinds.ADD) if "accumulate" in each.scope]
    assert {each.clone for each in adds} == {Clone(0, m, r) for r in range(1, replicas) for m in range(2)}
    calls = [number for number, call in enumerate(case.program.calls) if case.program.step_of(call) == SYNCHRONISE]
    assert {each.call for each in of_kind([own, other], kinds.ALL_REDUCE)} == set(calls)


def test_gradients_of_one_owner_travel_together() -> None:
    step = chain(2, task_graphs=1, momentum=True)._replace(processes=2)
    case = Case(step, over_processes({"v0": 0, "v1": 0}, 0, gradients=buckets(("v0", "v1"))))
    values = case.values()
    assert [len(each.operands[0].operands) for each in of_kind(values, kinds.ALL_REDUCE)] == [2, 2]
    assert all(terms(each) == everywhere(2, 1) for each in values)


def test_a_sparse_gradient_is_put_together_on_every_copy() -> None:
    step = chain(1)
    step.region.batch.layouts[step.graph.tensor("grad0")] = sharded(0)
    case = Case(step, plan([2]))
    for replica in range(2):
        value = case.of_update("grad0", Copy(0, replica))
        assert value.device == replica and computed(value, lambda clone: [float(clone.r)]).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("blocks", [(1,), (1, 1)])
def test_rows_of_all_processes_are_gathered(is_static: bool, blocks: Tuple[int, ...]) -> None:
    """Block by block; how many rows follows from the examples, or is asked."""
    step = chain(1)._replace(processes=2)
    step.region.batch.layouts[step.graph.tensor("grad0")] = sharded(0, blocks)
    case = Case(step, plan([2]))
    case.lowering._is_static = is_static
    gathers = of_kind([case.of_update("grad0")], kinds.ALL_GATHER)
    assert [each.detail.is_equal for each in gathers] == [is_static] * len(blocks)
    assert gathers[0].detail.is_counted == (not is_static and len(blocks) == 1)
    cuts = of_kind(gathers, kinds.BLOCK)
    assert [each.detail for each in cuts] == ([0, 0, 1, 1] if len(blocks) > 1 else [])


def test_an_extreme_goes_over_processes_by_its_kind() -> None:
    step = chain(1)._replace(processes=2)
    case = Case(step, plan([2]))
    step.region.batch.layouts[case.tensor("loss")] = Layout("max")
    value = case.lowering.of_all_processes(case.tensor("loss"))
    assert value.kind == kinds.ALL_REDUCE and value.detail.kind == kinds.MAX
    assert computed(value, lambda clone: 3.0 + 4.0 * clone.r) == 7.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_value_that_all_clones_have_is_the_first_one_s(replicas: int) -> None:
    """What reads it waits for all."""
    step = chain(1)
    case = Case(step, plan([replicas]))
    step.region.batch.layouts[case.tensor("loss")] = replicated()
    value = case.lowering.whole(case.tensor("loss"))
    assert computed(value, lambda clone: 5.0 + clone.r) == 5.0
    assert [each.clone.r for each in value.waits] == list(range(1, replicas))


def test_sizes_are_sums_without_a_surplus() -> None:
    step = chain(1)._replace(processes=2)
    case = Case(step, plan([3]))
    step.region.batch.layouts[case.tensor("loss")] = EXTENT
    value = case.lowering.of_all_processes(case.tensor("loss"))
    assert [each.detail for each in of_kind([value], kinds.LESS_SURPLUS)] == [2, 1]


def test_what_a_process_contributes_to_a_sum() -> None:
    case = Case(chain(1)._replace(processes=2), plan([2], 2))
    assert terms(case.lowering.part(case.tensor("grad0"))) == everywhere(2, 2)


@pytest.mark.parametrize("layout, kind", [(partial(1), kinds.SUM), (Layout("max"), kinds.MAX), (sharded(0), kinds.CONCAT)])
def test_values_of_all_clones(layout: Layout, kind: str) -> None:
    step = chain(1)
    case = Case(step, plan([2], 2))
    step.region.batch.layouts[case.tensor("loss")] = layout
    how = Reduce({kinds.SUM: "sum", kinds.MAX: "max", kinds.CONCAT: "concat"}[kind], layout.power)
    value = case.lowering.combined(case.tensor("loss"), how)
    assert value.kind == kind and value.device == 0 and len(value.operands) == 4
    assert [each.kind for each in value.operands] == [kinds.SCALE if layout.power else kinds.VALUE] * 4
