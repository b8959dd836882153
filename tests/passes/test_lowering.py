"""Which clones' values are added up where, and what goes over processes: recipes as the primitives of which they are made."""
from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

from tests.passes.drawings import chain, plan
from tests.passes.lowered import WEIGHT, Numbers, computed, of_kind, of_message, ops_of, terms
from tests.passes.programs import PROGRAMS
from tests.passes.test_owners import add, drawn, with_norms
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.ir.batch_axis import EXTENT, Reduce
from whale_tf.ir.extents import batch_size
from whale_tf.ir.layout import GROUPED, REFERENCE, Layout, Rows, partial, replicated, sharded
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program, parted
from whale_tf.passes.lowering import Lowering, Primitive, in_order
from whale_tf.passes.lowering import primitive as kinds
from whale_tf.passes.lowering.levels import agreed_batch, divide, is_even, levels, running
from whale_tf.passes.replicate import clones, device_at
from whale_tf.plan import GradientPlan, Plan
from whale_tf.program import BRIDGE, EVERY, SYNCHRONISE, Clone, Copy


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
    if is_even:
        assert [each.scope for each in scales] == [f"g0_r{r}/accumulate/{kinds.TENSOR}" for r in range(2)]
    calls = [case.program.calls[each.call] for each in adds]
    assert [call.clone for call in calls] == [each.clone for each in adds]


def test_devices_take_turns_at_adding() -> None:
    case = Case(chain(4, task_graphs=1), plan([2]))
    assert [case.of_update(f"grad{i}").device for i in (3, 2, 1, 0)] == [0, 1, 0, 1]


def test_collective_gives_each_replica_the_sum() -> None:
    sync = (GradientPlan(task_graph=0, backend="collective", buckets=(("w0",),)),)
    case = Case(chain(1), plan([2], gradients=sync))
    for replica in range(2):
        value = case.of_update("grad0", Copy(0, replica))
        assert value.kind == kinds.TAKE and value.device == replica and terms(value) == everywhere(1, 2)
        assert value.operands[0].detail.devices == (0, 1) and value.operands[0].device == 0


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


def test_home_without_micro_batches_gets_each_replica_s_gradient() -> None:
    step, chosen = chain(1), plan([2], zero="v3", tasks={0: {"variables": "shared", "homes": {"w0": 1}}})
    case = Case(step, chosen)
    value = case.of_update("grad0")
    assert terms(value) == everywhere(1, 2) and value.device == 1 and not of_kind([value], kinds.ADD)
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
    calls = [number for number, call in enumerate(case.program.calls) if case.program.step_of(call) == SYNCHRONISE]
    assert [case.lowering.collectives(number) for number in calls] == [[message], [second]]
    assert all(terms(each) == everywhere(1, 2) for each in (first, second, third))


def over_processes(homes: Dict[str, int], rank: int, replicas: int = 1, zero: str = "v2", **more: Any) -> Plan:
    devices = tuple(tuple(range(process * replicas, (process + 1) * replicas)) for process in range(2))
    whole = plan([replicas], 2, 2, {0: {"variables": "shared", "homes": homes}}, zero=zero, processes=devices, **more)
    return whole.local_part(rank)


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_owner_adds_up_what_all_processes_send_of_each_micro_batch(replicas: int, is_even: bool) -> None:
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
    assert other.call == other.operands[0].call == min(each.call for each in (*other.operands, *other.waits))


def test_gradients_of_one_owner_travel_together() -> None:
    step = chain(2, task_graphs=1, momentum=True)._replace(processes=2)
    case = Case(step, over_processes({"v0": 0, "v1": 0}, 0, gradients=buckets(("v0", "v1"))))
    values = case.values()
    assert [len(each.operands[0].operands) for each in of_kind(values, kinds.ALL_REDUCE)] == [2, 2]
    assert all(terms(each) == everywhere(2, 1) for each in values)


def test_sparse_gradient_is_put_together_on_every_copy() -> None:
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


def test_extreme_goes_over_processes_by_its_kind() -> None:
    step = chain(1)._replace(processes=2)
    case = Case(step, plan([2]))
    step.region.batch.layouts[case.tensor("loss")] = Layout("max")
    value = case.lowering.of_all_processes(case.tensor("loss"))
    assert value.kind == kinds.ALL_REDUCE and value.detail.kind == kinds.MAX
    assert computed(value, lambda clone: 3.0 + 4.0 * clone.r) == 7.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_value_that_all_clones_have_is_the_first_one_s(replicas: int) -> None:
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
    here, everywhere_else = of_kind([value], kinds.LESS_SURPLUS)
    assert (here.detail, everywhere_else.detail) == (2, 1) and here.operands[1].clone == Clone(0, 0, 0)


def test_what_a_process_contributes_to_a_sum() -> None:
    case = Case(chain(1)._replace(processes=2), plan([2], 2))
    assert terms(case.lowering.part(case.tensor("grad0"))) == everywhere(2, 2)


@pytest.mark.parametrize("processes", [1, 2])
def test_mean_of_one_process_is_weighted_by_its_share_of_all_examples(processes: int) -> None:
    case = Case(chain(1)._replace(processes=processes), plan([2]))
    value = case.lowering.whole(case.tensor("loss"))
    assert len(of_kind([value], kinds.SCALE_PROCESS)) == processes - 1


@pytest.mark.parametrize("batch", [None, 8])
def test_rows_of_all_processes_are_as_many_if_the_graph_says_how_many(batch: Optional[int]) -> None:
    step = chain(1)._replace(processes=2)
    x = step.graph.tensor("x")
    step.region.batch.batches[REFERENCE] = [x]
    step.graph.tensors[x] = step.graph.tensors[x]._replace(shape=(batch, 2))
    step.region.batch.layouts[step.graph.tensor("grad0")] = sharded(0)
    gather, = of_kind([Case(step, plan([2])).of_update("grad0")], kinds.ALL_GATHER)
    assert gather.detail == (batch is not None, batch is None)


def test_values_of_all_processes_and_of_any_clone() -> None:
    step = chain(1)._replace(processes=2)
    case = Case(step, plan([2]))
    tensor = case.tensor("loss")
    total = case.lowering.combined(tensor, Reduce("sum", 1))
    assert (total.kind, total.call, total.operands[0].kind) == (kinds.ALL_REDUCE, kinds.FETCHED, kinds.SUM)
    assert total.scope == f"reduce_sum/{kinds.TENSOR}/processes"
    step.region.batch.layouts[tensor] = replicated()
    same = case.lowering.combined(tensor, Reduce("same"))
    assert (same.kind, same.clone) == (kinds.VALUE, Clone(0, 0, 0))


@pytest.mark.parametrize("layout, kind", [(partial(1), kinds.SUM), (Layout("max"), kinds.MAX), (sharded(0), kinds.CONCAT)])
def test_values_of_all_clones(layout: Layout, kind: str) -> None:
    step = chain(1)
    case = Case(step, plan([2], 2))
    step.region.batch.layouts[case.tensor("loss")] = layout
    how = Reduce({kinds.SUM: "sum", kinds.MAX: "max", kinds.CONCAT: "concat"}[kind], layout.power)
    value = case.lowering.combined(case.tensor("loss"), how)
    assert value.kind == kind and value.device == 0 and len(value.operands) == 4
    assert [each.kind for each in value.operands] == [kinds.SCALE if layout.power else kinds.VALUE] * 4


BATCH = 24
UNEVEN: Dict[int, Any] = {1: None, 2: (1, 3), 3: (2, 1, 3)}  # replicas -> their slices


def two(counts: Tuple[int, int], slices: Any, micro_batches: int = 1) -> Plan:
    tasks = {number: {"slices": each} for number, each in enumerate(slices) if each}
    return plan(list(counts), micro_batches, 1, tasks)


@pytest.mark.parametrize("power, offset", [(0, 0), (1, 0), (0, 2)])
@pytest.mark.parametrize("blocks", [(1,), (3,), (1, 2)])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 3), (3, 2), (2, 2)])
@pytest.mark.parametrize("is_uneven", [False, True])
def test_rows_that_cross(counts: Tuple[int, int], blocks: Tuple[int, ...], power: int, offset: int, is_uneven: bool) -> None:
    """A consumer gets its own rows, on its device; cut off where they are if one producer has them all."""
    step = chain(2)
    chosen = two(counts, [UNEVEN[counts[0]] if is_uneven else None, None], 2)
    case, numbers = Case(step, chosen), Numbers(chosen, BATCH, blocks)
    tensor = case.tensor("layer0")
    step.region.batch.layouts[tensor] = sharded(0, blocks, power)
    step.region.batch.offsets[tensor] = offset
    whole = np.arange(10.0, 10.0 + BATCH * sum(blocks))

    def of(task_graph: int) -> Any:
        return lambda clone: (numbers.own(whole, task_graph, clone) * numbers.weight(task_graph, clone) ** -power
                              - offset * numbers.starts[task_graph][clone])

    for clone in clones(chosen, 1):
        value = case.lowering.bridges.bridged(tensor, 1, clone)
        assert value is case.lowering.bridges.bridged(tensor, 1, clone)
        np.testing.assert_allclose(numbers.computed(value, of(0)), of(1)(clone), rtol=1e-12)
        cuts, joins = of_kind([value], kinds.CUT), of_kind([value], kinds.CONCAT)
        here = device_at(chosen, 1, clone)
        assert {each.device for each in cuts} <= ({here} if joins and len(blocks) == 1 else {0, 1, 2, here})
        assert all(each.device == here for each in joins)
        assert all(each.device < 3 and each.operands[0].device == each.device for each in cuts if len(each.detail.pieces) == 1)
    np.testing.assert_allclose(numbers.computed(case.lowering.whole(tensor), of(0)), whole, rtol=1e-12)
    np.testing.assert_allclose(
        numbers.computed(case.lowering.combined(tensor, Reduce("concat", power, offset)), of(0)), whole, rtol=1e-12)


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("counts", [(1, 2), (3, 2)])
def test_sum_that_crosses_is_divided_again(counts: Tuple[int, int], power: int) -> None:
    step, chosen = chain(2), two(counts, [UNEVEN[counts[0]], UNEVEN[counts[1]]])
    case, numbers = Case(step, chosen), Numbers(chosen, BATCH)
    tensor = case.tensor("layer0")
    step.region.batch.layouts[tensor] = partial(power)
    given = {clone: 3.0 + clone.r ** 2 for clone in clones(chosen, 0)}
    expected = sum(numbers.weight(0, clone) ** power * value for clone, value in given.items())
    parts = [numbers.computed(case.lowering.bridges.bridged(tensor, 1, clone), given.__getitem__) for clone in clones(chosen, 1)]
    total = sum(numbers.weight(1, clone) ** power * part for clone, part in zip(clones(chosen, 1), parts))
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("layout", [Layout("max"), replicated(1), EXTENT])
def test_other_values_that_cross(layout: Layout) -> None:
    step, chosen = chain(2), two((2, 3), [UNEVEN[2], UNEVEN[3]])
    case, numbers = Case(step, chosen), Numbers(chosen, BATCH)
    tensor = case.tensor("layer0")
    step.region.batch.layouts[tensor] = layout
    step.region.batch.extents[tensor] = np.array([batch_size])
    for clone in clones(chosen, 1):
        value = case.lowering.bridges.bridged(tensor, 1, clone)
        if layout == EXTENT:
            assert (value.kind, value.clone, value.task_graph, value.operands) == (kinds.EXTENT_OF, clone, 1, ())
        elif layout.kind == "max":
            assert numbers.computed(value, lambda one: 5.0 + one.r) == 6.0
        else:
            found = numbers.computed(value, lambda one: 6.0 / numbers.weight(0, one))
            assert found == pytest.approx(6.0 / numbers.weight(1, clone))


def test_rows_without_known_blocks_cannot_be_cut() -> None:
    step = chain(2)
    step.region.batch.layouts[step.graph.tensor("layer0")] = sharded(0, None)
    case = Case(step, two((1, 1), [None, None]))
    assert case.lowering.whole(case.tensor("layer0")).kind == kinds.IDENTITY
    joined = Case(step, two((2, 1), [None, None])).lowering.bridges.bridged(case.tensor("layer0"), 1, Clone(0, 0, 0))
    assert [each.kind for each in (joined, *joined.operands)] == [kinds.CONCAT, kinds.VALUE, kinds.VALUE]
    with pytest.raises(UnsupportedOpError, match="goes from TaskGraph .* use equal replica counts, a static shape, or the same"):
        Case(step, two((2, 3), [None, None])).lowering.bridges.bridged(case.tensor("layer0"), 1, Clone(0, 0, 0))


@pytest.mark.parametrize("layout, unknown", [
    (EXTENT, "how it follows from the batch size"),
    (sharded(0, (Rows(1, f"{GROUPED}rows"),)), "which of its rows belong to whose examples")])
def test_what_cannot_cross_is_refused(layout: Layout, unknown: str) -> None:
    step = chain(2)
    step.region.batch.layouts[step.graph.tensor("layer0")] = layout
    with pytest.raises(UnsupportedOpError, match=f"does not know {unknown}; use equal replica counts"):
        Case(step, two((2, 1), [None, None])).lowering.bridges.bridged(step.graph.tensor("layer0"), 1, Clone(0, 0, 0))


def test_one_clone_s_blocks_stay_together() -> None:
    step = chain(2)
    case = Case(step, two((1, 2), [None, None]))
    step.region.batch.layouts[case.tensor("layer0")] = sharded(0, (1, 2))
    assert not of_kind([case.lowering.whole(case.tensor("layer0"))], kinds.BLOCK)


@pytest.mark.parametrize("blocks, gathers", [(None, 1), ((1,), 1), ((1, 1), 2)])
def test_all_examples_of_all_processes(blocks: Any, gathers: int) -> None:
    """Block by block; a fetch or a section reads them, and no call of the Program."""
    step = chain(1)._replace(processes=2)
    case = Case(step, plan([2]))
    step.region.batch.layouts[case.tensor("loss")] = sharded(0, blocks)
    value = case.lowering.combined(case.tensor("loss"), Reduce("concat"))
    found = of_kind([value], kinds.ALL_GATHER)
    assert [(each.call, tuple(each.detail)) for each in found] == [(kinds.FETCHED, (False, False))] * gathers
    assert all("/processes" in each.scope for each in found)


def test_sum_crosses_to_the_first_device_of_a_divided_consumer() -> None:
    step, chosen = PROGRAMS["split_after_replicas"]
    case = Case(step, chosen)
    tensor = next(body.inputs[0] for body in case.program.bodies if body.step == BRIDGE and body.task_graph == 1)
    step.region.batch.layouts[tensor] = partial()
    values = [case.lowering.bridges.bridged(tensor, 1, Clone(0, 0, 0), shard) for shard in range(2)]
    step.region.batch.layouts[tensor] = sharded(0)
    assert values[0] is values[1] and values[0].device == chosen.task_graphs[1].devices[0][0]


def test_each_device_of_a_divided_consumer_puts_rows_together_itself() -> None:
    step, chosen = PROGRAMS["split_after_replicas"]
    case = Case(step, chosen)
    tensor = next(body.inputs[0] for body in case.program.bodies if body.step == BRIDGE and body.task_graph == 1)
    values = [case.lowering.bridges.bridged(tensor, 1, Clone(0, 0, 0), shard) for shard in range(2)]
    assert [each.device for each in values] == list(chosen.task_graphs[1].devices[0]) and values[0] is not values[1]
    assert case.lowering.bridges.bridged(tensor, 1, Clone(0, 0, 0)) is values[0]
    assert values[1].scope != values[0].scope


@pytest.mark.parametrize("micro, counts, batch, expected", [
    (None, (2,), 8, True), (None, (2,), 9, False), (None, (2,), None, False), ((1, 3), (1,), 8, False), (None, (3, 2), 12, True),
    (None, (3, 2), 8, False)])
def test_clones_are_even_if_the_graph_says_so(micro: Any, counts: Tuple[int, ...], batch: Optional[int], expected: bool) -> None:
    step, x = chain(len(counts)), chain(1).graph.tensor("x")
    step.region.batch.batches[REFERENCE] = [x]
    step.graph.tensors[x] = step.graph.tensors[x]._replace(shape=(batch, 2))
    chosen = plan(list(counts), 1 if micro is None else len(micro))
    chosen = dataclasses.replace(chosen, micro_batch_slices=micro)
    assert is_even(step, chosen) is expected


def test_parts_of_a_mini_batch() -> None:
    """Two model replicas share it; then micro-batches, one twice as large; then replicas."""
    assert divide(24, [[0, 1, 2], [0, 1, 3], [0, 1]]) == [4, 8, 4, 8]
    assert divide(7, [[0, 1, 2], [0, 1, 2, 3]]) == [1, 1, 1, 1, 1, 2]
    assert running((2, 1), 2) == [0, 2, 3] and running(None, 3) == [0, 1, 2, 3]


@pytest.mark.parametrize("nested_batch, own, expected", [
    ("divide", False, [[0, 1, 2], [0, 1, 2, 3], [0, 2, 3]]), ("micro", False, [[0, 1, 2], [0, 1, 2, 3], [0, 2, 3]]),
    ("own", True, [[0, 1, 2, 3], [0, 2, 3]]), ("micro", True, [[0, 2, 3]])])
def test_levels_at_which_a_mini_batch_is_divided(nested_batch: str, own: bool, expected: List[List[int]]) -> None:
    """Two model replicas, three micro-batches, and two replicas of which one has twice as many examples."""
    chosen = plan([2], 3, 2, {0: {"slices": (2, 1)}}, nested_batch=nested_batch)
    assert levels(chosen, 0, own) == expected


def test_inputs_agree_on_the_size_of_a_mini_batch() -> None:
    graph = chain(1, labels=True).graph
    sources = {graph.tensor("x"): 0, graph.tensor("y"): 0}
    layouts = {graph.tensor("x"): sharded(0, (3,)), graph.tensor("y"): sharded(0, None)}

    def sized(x: Any, y: Any) -> Optional[int]:
        for name, rows in (("x", x), ("y", y)):
            tensor = graph.tensor(name)
            graph.tensors[tensor] = graph.tensors[tensor]._replace(shape=None if rows is None else (rows, 2))
        return agreed_batch(graph, sources, layouts)

    assert [sized(None, None), sized(12, None), sized(12, 4), sized(None, 5)] == [None, 4, 4, 5]
    with pytest.raises(PlanError, match="inputs have different batch sizes: x:0"):
        sized(12, 5)


class TestMessages:
    """What the owners of variables send, as primitives of each process's own Program."""

    def of_each(self, step: TrainingStep, homes: Dict[str, int], zero: str = "v1", micro_batches: int = 1) -> List[Case]:
        """Two processes with two devices each; all gradients in one bucket."""
        names = tuple(sorted(homes, reverse=True))
        whole = plan([2], micro_batches, 2, {0: {"variables": "shared", "homes": homes}}, zero=zero,
                     processes=((0, 1), (2, 3)), gradients=(GradientPlan(task_graph=0, backend="collective", buckets=(names,)),))
        return [Case(step, whole.local_part(rank)) for rank in range(2)]

    def sides(self, cases: List[Case], place: int) -> List[Tuple[Primitive, Dict[str, Primitive]]]:
        """A message's broadcast in each process, and what it means there, by the names of tensors."""
        found = []
        for case in cases:
            number = case.lowering.messages.calls[place]
            values = case.lowering.messages.values(number)
            assert case.lowering.values_of(number) == list(dict.fromkeys(values.values()))
            assert all(case.lowering.of_call(number, tensor) is value for tensor, value in values.items())
            assert {each.call for each in in_order(list(values.values()), {}) if each.kind != kinds.OP} == {number}
            found.append((case.lowering.messages.sent(number),
                          {case.step.graph.tensor_name(tensor): value for tensor, value in values.items()}))
        return found

    @pytest.mark.parametrize("zero, count", [("v1", 4), ("v3", 6)])
    def test_what_arrives_is_what_was_sent(self, zero: str, count: int) -> None:
        """Both processes know the same messages in one order, and one of them sends."""
        cases = self.of_each(with_norms(), {"v0": 0, "v1": 3}, zero)
        given = {"v0:0": 2.0, "v1:0": 3.0, "size0:0": 5.0, "size1:0": 7.0}
        assert [len(case.lowering.messages.calls) for case in cases] == [count] * 2
        for place in range(count):
            sides = self.sides(cases, place)
            detail = sides[0][0].detail
            assert sides[1][0].detail == detail and sides[0][1].keys() == sides[1][1].keys()
            assert [bool(each.operands) for each, _ in sides] == [rank == detail.root for rank in range(2)]
            owner, other = (cases[rank].step.graph for rank in (detail.root, 1 - detail.root))
            sent = of_message(owner, {"": sides[detail.root][0]}, given)[""]
            if detail.tensors:
                names = [owner.tensor_name(tensor) for tensor in detail.tensors]
                assert of_message(other, sides[1 - detail.root][1], {}, sent) == {name: given[name] for name in names}

    def test_new_values(self) -> None:
        cases = self.of_each(drawn(3), {"v0": 0, "v1": 1, "v2": 3})
        graph = cases[0].step.graph
        (sent, ends), (arrived, assigned) = self.sides(cases, 0)
        packed, = sent.operands
        assert packed.kind == kinds.PACK and packed.tensor == graph.tensor("v0") and ends == {"v0:0": sent, "v1:0": sent}
        assert [(each.kind, each.tensor, each.device, ops_of(graph, each.waits)) for each in packed.operands] == [
            (kinds.READ, graph.tensor("v0"), 0, ["update0"]), (kinds.READ, graph.tensor("v1"), 1, ["update1"])]
        assert sent.detail == arrived.detail == (0, (graph.tensor("v0"), graph.tensor("v1")))
        assert (sent.device, packed.device, arrived.device) == (0, 0, 2) and not arrived.operands and not arrived.waits
        for place, (name, device) in enumerate((("v0:0", 2), ("v1:0", 3))):
            value, (taken,) = assigned[name], assigned[name].operands
            assert (value.kind, value.device, ops_of(graph, value.waits)) == (kinds.ASSIGN, device, [f"update{name[1]}"])
            assert (taken.kind, taken.device, taken.detail, taken.operands) == (kinds.UNPACK, 2, place, (arrived,))
        (alone, other), (sent, _) = self.sides(cases, 1)
        assert other["v2:0"].operands == (alone,) and [each.kind for each in sent.operands] == [kinds.READ]

    def test_tensors(self) -> None:
        """Numbers that the same op reads."""
        cases = self.of_each(with_norms(), {"v0": 0, "v1": 1})
        graph = cases[0].step.graph
        (sent, own), (arrived, others) = self.sides(cases, 0)
        packed, = sent.operands
        assert [(each.kind, each.tensor, each.clone) for each in packed.operands] == [
            (kinds.VALUE, graph.tensor(f"size{i}"), EVERY) for i in range(2)]
        assert [(each.kind, each.operands, each.waits, each.device) for each in own.values()] == [
            (kinds.IDENTITY, (packed.operands[i],), (sent,), i) for i in range(2)]
        assert ops_of(graph, arrived.waits) == ["size0", "size1"]
        assert [(each.kind, each.detail, each.operands) for each in others.values()] == [
            (kinds.UNPACK, i, (arrived,)) for i in range(2)]

    def test_state_that_is_written_before_and_behind_the_variable(self) -> None:
        """The new value leaves behind the first, and a message of its own says that the other is written."""
        step = drawn(1)
        add(step, "before", "AssignAddVariableOp", ["m0", "grad0"], shape="none")
        add(step, "behind", "AssignAddVariableOp", ["m0", "grad0"], ["update0"], "none")
        cases = self.of_each(step, {"v0": 1})
        graph = cases[0].step.graph
        (sent, _), (_, assigned) = self.sides(cases, 0)
        assert ops_of(graph, sent.operands[0].waits) == ["update0", "before"]
        assert ops_of(graph, assigned["v0:0"].waits) == ["update0", "before", "behind"]
        (late, ends), (arrived, others) = self.sides(cases, 1)
        token, = late.operands
        assert (token.kind, ops_of(graph, token.waits), ends) == (kinds.TOKEN, ["behind"], {"v0:0": late})
        assert others == {"v0:0": arrived} and late.detail == arrived.detail == (0, ())

    def test_values_before_the_step_and_tokens_behind_it(self) -> None:
        cases = self.of_each(drawn(2), {"v0": 2, "v1": 3}, "v3")
        graph = cases[0].step.graph
        (arrived, others), (sent, own) = self.sides(cases, 0)
        packed, = sent.operands
        assert sent.scope == "values/{}/bucket"  # what follows the update has other names
        assert [(each.kind, each.device, each.waits) for each in packed.operands] == [(kinds.READ, 2, ()), (kinds.READ, 3, ())]
        assert [(each.kind, each.operands, each.waits, each.device) for each in own.values()] == [
            (kinds.IDENTITY, (packed.operands[i],), (sent,), 2 + i) for i in range(2)]
        assert [(each.kind, each.operands) for each in others.values()] == [(kinds.UNPACK, (arrived,))] * 2 and not arrived.waits
        (arrived, others), (sent, ends) = self.sides(cases, 1)
        token, = sent.operands
        assert (token.kind, token.device, ops_of(graph, token.waits)) == (kinds.TOKEN, 2, ["update0", "update1"])
        assert list(ends.values()) == [sent, sent] and arrived.detail == sent.detail == (1, ())
        assert [(each.kind, each.device, each.operands, ops_of(graph, each.waits)) for each in others.values()] == [
            (kinds.TOKEN, 0, (arrived,), ["update0"]), (kinds.TOKEN, 1, (arrived,), ["update1"])]
