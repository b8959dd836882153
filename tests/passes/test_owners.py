"""Which process updates a variable, and what the others leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Sequence

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.config import Config
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.units import GATE_ATTR
from whale_tf.passes import compile_program
from whale_tf.passes.owners import Owners, find_owners
from whale_tf.plan import GradientPlan, Plan
from whale_tf.planner.homes import TrainedVariable, with_homes
from whale_tf.program import UPDATE

pytestmark = pytest.mark.once


def divided(homes: Dict[str, int], processes: int = 2, micro_batches: int = 1, zero: str = "v1") -> Plan:
    """One device in each process."""
    return plan([1], micro_batches, processes, {0: {"variables": "shared", "homes": homes}}, zero=zero,
                processes=tuple((device,) for device in range(processes)))


def drawn(stages: int = 3, processes: int = 2, clip: bool = False) -> TrainingStep:
    return chain(stages, clip=clip, momentum=True, task_graphs=1)._replace(processes=processes)


def add(step: TrainingStep, name: str, type_: str, inputs: Sequence[str], waits: Sequence[str] = (), shape: Any = ()) -> None:
    """An op of the update."""
    graph = step.graph
    graph.add(name, type_, [graph.tensor(tensor) for tensor in inputs], [(shape, "float32")] if shape != "none" else (),
              [graph.op(wait).id for wait in waits], phase=Phase.APPLY)
    step.region.task_graph.append(-1)


def with_norms() -> TrainingStep:
    """Two variables, the norm of what the optimizer keeps for each, and the sum of both."""
    step = drawn(2)
    for i in range(2):
        add(step, f"read{i}", "ReadVariableOp", [f"m{i}"], shape=(2, 2))
        add(step, f"size{i}", "L2Loss", [f"read{i}"])
    add(step, "all", "AddN", ["size0", "size1"])
    return step


def of_each(step: TrainingStep, chosen: Plan) -> List[Owners]:
    return [find_owners(step, chosen.local_part(rank)) for rank in range(len(chosen.processes))]


def names(step: TrainingStep, ops: Any) -> List[str]:
    return sorted(step.graph.ops[op].name for op in ops)


def by_name(step: TrainingStep, found: Any) -> Dict[str, str]:
    return {step.graph.ops[op].name: step.graph.ops[variable].name for op, variable in found.items()}


def tensors(step: TrainingStep, found: Any) -> Dict[str, str]:
    return {step.graph.tensor_name(tensor): step.graph.ops[variable].name for tensor, variable in found.items()}


def test_each_update_runs_in_one_process() -> None:
    step = drawn(processes=3)
    owners = of_each(step, divided({"v0": 2, "v1": 0, "v2": 2}, 3))
    assert {name: owners[0].process[step.graph.op(name).id] for name in ("v0", "v1", "v2")} == {"v0": 2, "v1": 0, "v2": 2}
    assert by_name(step, owners[0].state) == {"m0": "v0", "m1": "v1", "m2": "v2"}
    assert by_name(step, owners[0].update) == {"update0": "v0", "update1": "v1", "update2": "v2"}
    assert [names(step, one.left_out) for one in owners] == [
        ["update0", "update2"], ["update0", "update1", "update2"], ["update1"]]
    assert [one._replace(rank=0, left_out=frozenset()) for one in owners] == [owners[0]._replace(left_out=frozenset())] * 3
    assert [one.rank for one in owners] == [0, 1, 2] and owners[2].is_own(step.graph.op("v0").id)
    writes = owners[1].writes(step.graph)
    assert {variable: names(step, found.value) for variable, found in writes.items()} == {
        step.graph.op(f"v{i}").id: [f"update{i}"] for i in range(3)}


def test_what_leads_to_an_update_alone_is_left_out_with_it() -> None:
    """Each process has all gradients, so it knows their norm, and clips by it what it updates."""
    step, chosen = drawn(2, clip=True), divided({"v0": 0, "v1": 1})
    assert [names(step, one.left_out) for one in of_each(step, chosen)] == [["clipped1", "update1"], ["clipped0", "update0"]]
    for rank in range(2):
        program = compile_program(step, chosen.local_part(rank))
        run = {step.graph.ops[op].name for body in program.bodies if body.step == UPDATE for op in body.ops}
        assert run == {"square0", "square1", "norm", f"clipped{rank}", f"update{rank}"}


def test_what_others_read_of_an_optimizer_s_state_is_sent() -> None:
    step = with_norms()
    owners = of_each(step, divided({"v0": 0, "v1": 1}))
    assert tensors(step, owners[0].sent) == {"size0:0": "v0", "size1:0": "v1"}
    assert names(step, owners[1].left_out) == ["read0", "size0", "update0"]
    step.graph.tensors[step.graph.tensor("size1")] = step.graph.tensors[step.graph.tensor("size1")]._replace(shape=None)
    with pytest.raises(UnsupportedOpError, match="'size1:0' depends on what only process 1 keeps for 'v1'"):
        of_each(step, divided({"v0": 0, "v1": 1}))


def test_gradients_meet_at_the_owner_of_their_variable_under_v2() -> None:
    step, homes = drawn(2), {"v0": 0, "v1": 1}
    at_once = of_each(step, divided(homes, micro_batches=2, zero="v2"))[0]
    assert tensors(step, at_once.gradients) == {"grad0:0": "v0", "grad1:0": "v1"}
    assert not of_each(step, divided(homes, zero="v2"))[0].gradients  # nothing to add up
    assert not of_each(step, divided(homes, micro_batches=2))[0].gradients
    clipped = drawn(2, clip=True)  # a norm is of all gradients: each owner sends what it adds
    found = of_each(clipped, divided(homes, micro_batches=2, zero="v2"))[1]
    assert tensors(clipped, found.sent) == {"square0:0": "v0", "square1:0": "v1"}
    assert names(clipped, found.left_out) == ["clipped0", "square0", "update0"]


def test_gradient_of_two_variables_belongs_to_neither_owner() -> None:
    """A sum of two variables hands its own gradient to both."""
    step = drawn(2)
    step = step._replace(gradients=tuple((step.graph.tensor("grad0"), variable) for _, variable in step.gradients))
    for zero in ("v1", "v2"):
        for owners in of_each(step, divided({"v0": 0, "v1": 1}, micro_batches=2, zero=zero)):
            assert (names(step, owners.update), owners.gradients) == (["update0", "update1"], {})


def test_no_owners() -> None:
    step = drawn(2)
    assert find_owners(step._replace(processes=1), divided({"v0": 0})) == Owners()
    assert find_owners(step, divided({}, zero="v1").local_part(1)) == Owners()
    of_another_graph = find_owners(step, divided({"elsewhere": 1}).local_part(0))
    assert of_another_graph == Owners()


def test_variable_without_a_home_is_updated_everywhere() -> None:
    step = drawn(2)
    assert [names(step, one.left_out) for one in of_each(step, divided({"v1": 1}))] == [["update1"], []]


@pytest.mark.parametrize("change, message", [
    (lambda step: add(step, "more", "AssignAddVariableOp", ["v0", "grad0"], shape="none"),
     "variable 'v0' has two updates .'update0' and 'more'. in no fixed order"),
    (lambda step: add(step, "both", "AssignAddVariableOp", ["v0", "grad1"], shape="none"),
     "op 'both' .AssignAddVariableOp. writes 'v0' and also depends on other variables"),
    (lambda step: add(step, "sometimes", "AssignAddVariableOp", ["v0", "taken"], ["update0"], "none"),
     "op 'sometimes' updates 'v0' in some steps only .'taken' decides."),
])
def test_refused(change: Any, message: str) -> None:
    step = drawn(2)
    add(step, "taken", "Switch", ["grad0"], shape=(2, 2))
    change(step)
    with pytest.raises(UnsupportedOpError, match=message):
        find_owners(step, divided({"v0": 0, "v1": 1}).local_part(0))


def test_updates_that_follow_each_other_are_one() -> None:
    step = drawn(1)
    add(step, "more", "AssignAddVariableOp", ["v0", "grad0"], ["update0"], "none")
    found, = of_each(step, divided({"v0": 1}))[0].writes(step.graph).values()
    assert (names(step, found.value), found.state, found.late) == (["more", "update0"], (), ())


def test_state_that_is_written_before_and_behind_the_variable() -> None:
    step = drawn(1)
    add(step, "before", "AssignAddVariableOp", ["m0", "grad0"], shape="none")
    add(step, "behind", "AssignAddVariableOp", ["m0", "grad0"], ["update0"], "none")
    found, = of_each(step, divided({"v0": 1}))[0].writes(step.graph).values()
    assert (names(step, found.value), names(step, found.state), names(step, found.late)) == (["update0"], ["before"], ["behind"])


class TestHomes:
    """Homes over the devices of all processes."""

    def over(self, sizes: Sequence[int], processes: int = 4, config: Any = None, names: Any = None) -> Plan:
        variables = [TrainedVariable(f"v{number}", 0, 0, size, 2 * size) for number, size in enumerate(sizes)]
        whole = plan([1], 1, processes, {0: {"variables": "shared"}}, processes=tuple((device,) for device in range(processes)))
        return with_homes(whole, variables, Config(config or {"zero": "v1"}))

    def test_bytes_are_balanced_over_processes(self) -> None:
        sizes = ([768 * 3072, 3072 * 768] + [768 * 768] * 4 + [3072] + [768] * 8) * 6
        done = self.over(sizes)
        load = [sum(3 * size for number, size in enumerate(sizes) if done.task_graphs[0].homes[f"v{number}"] == rank)
                for rank in range(4)]
        assert max(load) <= 1.05 * sum(load) / 4

    def test_all_processes_decide_alike(self) -> None:
        """A process' part of the plan keeps the homes of all, and equal sizes take the order of the variables."""
        done = self.over([5] * 6, 3)
        assert done.task_graphs[0].homes == {"v0": 0, "v1": 1, "v2": 2, "v3": 0, "v4": 1, "v5": 2}
        assert self.over([5] * 6, 3) == done
        assert {done.local_part(rank).task_graphs[0].homes == done.task_graphs[0].homes for rank in range(3)} == {True}

    def test_fewer_variables_than_processes(self) -> None:
        assert self.over([7]).task_graphs[0].homes == {"v0": 0}
        assert self.over([]).task_graphs[0].homes == {}
        step = drawn(1, 4)
        chosen = replace(self.over([7]), graph="drawn")
        assert [names(step, one.left_out) for one in of_each(step, chosen)] == [[], *[["update0"]] * 3]


def test_what_forward_ops_read_is_written_everywhere() -> None:
    """A moving average of a variable, and one of what its optimizer keeps, which the owner sends."""
    step = drawn(2)
    step.graph.op("m0").phase = Phase.OTHER
    add(step, "old", "ReadVariableOp", ["m0"], shape=(2, 2))
    for name, read in (("mean", "w0"), ("slow", "old")):
        step.graph.add(name, "VarHandleOp", [], [((), "resource")], phase=Phase.OTHER)
        step.graph.add(f"{name}/read", "ReadVariableOp", [step.graph.tensor(name)], [((2, 2), "float32")], phase=Phase.FORWARD)
        step.region.task_graph.extend([-1, 0])
        add(step, f"{name}/write", "AssignVariableOp", [name, read], shape="none")
    owners = of_each(step, divided({"v0": 0, "v1": 1}))
    assert by_name(step, owners[0].state) == {"m0": "v0", "m1": "v1"}
    assert [names(step, one.left_out) for one in owners] == [["update1"], ["old", "update0"]]
    assert tensors(step, owners[0].sent) == {"old:0": "v0"}


def test_one_op_may_decide_about_all_writes() -> None:
    step = drawn(2)
    add(step, "which", "Switch", ["grad0"], shape=(2, 2))
    step.graph.op("update0").control_inputs = (step.graph.op("which").id,)
    with pytest.raises(UnsupportedOpError, match="op 'update0' updates 'v0' in some steps only .'which' decides."):
        of_each(step, divided({"v0": 0, "v1": 1}))
    step.graph.op("which").attrs[GATE_ATTR] = True
    assert [names(step, one.left_out) for one in of_each(step, divided({"v0": 0, "v1": 1}))] == [["update1"], ["update0"]]


def buckets(*names: Any) -> Any:
    return (GradientPlan(task_graph=0, backend="collective", buckets=names),)


class TestMessages:
    def of(self, step: TrainingStep, homes: Dict[str, int], *shared: Any, **more: Any) -> List[Any]:
        """Names, and the device that sends."""
        both = of_each(step, replace(divided(homes, **more), gradients=buckets(*shared)))
        assert both[0].messages == both[1].messages
        return [(names_of(step, one), one.home) for one in both[0].messages]

    def test_variables_of_a_bucket_by_owner(self) -> None:
        homes = {"v0": 0, "v1": 1, "v2": 0, "v3": 1}
        assert self.of(drawn(4), homes, ("v0", "v1", "v2", "v3")) == [(["v0", "v2"], 0), (["v1", "v3"], 1)]
        assert self.of(drawn(4), homes, ("v0", "v1"), ("v3",), ("v2",)) == [(["v0"], 0), (["v1"], 1), (["v2"], 0), (["v3"], 1)]

    def test_updates_that_follow_each_other_travel_alone(self) -> None:
        step = drawn(3)
        step.graph.op("update2").control_inputs = (step.graph.op("update0").id,)
        assert self.of(step, dict.fromkeys(("v0", "v1", "v2"), 1), ("v0", "v1", "v2")) == [(["v0"], 1), (["v1"], 1), (["v2"], 1)]

    def test_variables_of_another_type_travel_alone(self) -> None:
        step = drawn(2)
        step.graph.op("v1").attrs["dtype"] = "float64"
        assert self.of(step, {"v0": 0, "v1": 0}, ("v0", "v1")) == [(["v0"], 0), (["v1"], 0)]

    def test_numbers_share_a_message_with_those_of_the_same_round(self) -> None:
        step, homes = drawn(3, clip=True), {"v0": 0, "v1": 1, "v2": 0}
        found = self.of(step, homes, micro_batches=2, zero="v2")
        assert found == [(["square0", "square2"], 0), (["square1"], 1), (["v0"], 0), (["v1"], 1), (["v2"], 0)]
        for i in (0, 2):
            add(step, f"again{i}", "Mul", [f"grad{i}", "norm"])
        add(step, "total", "AddN", ["again0", "again2"])
        assert self.of(step, homes, micro_batches=2, zero="v2")[:3] == [*found[:2], (["again0", "again2"], 0)]
        for square in ("square0", "square2"):
            tensor = step.graph.tensor(f"{square}:0")
            step.graph.tensors[tensor] = step.graph.tensors[tensor]._replace(shape=(2,))  # may be large
        assert self.of(step, homes, micro_batches=2, zero="v2")[:2] == [(["square0"], 0), (["square1"], 1)]

    def test_what_is_late_has_a_message_of_its_own(self) -> None:
        step = drawn(3)
        for i in (0, 2):
            add(step, f"behind{i}", "AssignAddVariableOp", [f"m{i}", f"grad{i}"], [f"update{i}"], "none")
        found = self.of(step, {"v0": 0, "v1": 1, "v2": 0}, ("v0", "v1", "v2"))
        assert found == [(["v0", "v2"], 0), (["v1"], 1), (["v0", "v2", "late"], 0)]

    def test_values_go_before_the_step_under_v3(self) -> None:
        """Those of a bucket and owner together; and after it what says that they are updated."""
        step, homes = drawn(3), {"v0": 0, "v1": 1, "v2": 0}
        found = of_each(step, replace(divided(homes, zero="v3"), gradients=buckets(("v0", "v1", "v2"))))[0].messages
        assert [(names_of(step, one), one.kind) for one in found] == [
            (["v0", "v2"], "values"), (["v1"], "values"), (["v0", "v2"], "done"), (["v1"], "done")]
        assert [len(one.reads(step.graph)) for one in found] == [2, 1, 0, 0]

    def test_optimizers_do_not_wait_for_each_other_under_v3(self) -> None:
        step, homes = drawn(2), {"v0": 0, "v1": 0}
        found = of_each(step, divided(homes, zero="v3"))[0].messages
        assert [names_of(step, one) for one in found] == [["v0"], ["v1"]] * 2


def test_values_are_kept_by_their_owner_under_v3() -> None:
    step = drawn(2)
    for i in range(2):
        add(step, f"after{i}", "ReadVariableOp", [f"v{i}"], [f"update{i}"], (2, 2))
    add(step, "all", "AddN", ["after0", "after1"])
    owners = of_each(step, divided({"v0": 0, "v1": 1}, zero="v3"))
    assert by_name(step, owners[0].state) == {"v0": "v0", "v1": "v1", "m0": "v0", "m1": "v1"}
    assert tensors(step, owners[0].sent) == {"after0:0": "v0", "after1:0": "v1"}  # read behind the update, so only there
    assert names(step, owners[0].gathered) == names(step, owners[1].gathered) != []
    for rank in range(2):
        program = compile_program(step, divided({"v0": 0, "v1": 1}, zero="v3").local_part(rank))
        gathers = [program.bodies[call.body] for call in program.calls if program.step_of(call) == "gather"]
        assert [len(body.inputs) for body in gathers] == [1 - rank, rank] and [len(body.outputs) for body in gathers] == [1, 1]


def test_what_takes_a_variable_itself_is_refused_under_v3() -> None:
    """In the passes, such as a functional loop over the handle, and in the update an op of several variables."""
    step = drawn(2)
    add(step, "both", "AddN", ["v0", "v1"], shape=(2, 2))
    with pytest.raises(UnsupportedOpError, match="op 'both' .AddN. takes variable 'v0' itself, which only one process has"):
        of_each(step, divided({"v0": 0, "v1": 1}, zero="v3"))
    step = drawn(1)
    handle = step.graph.tensor("v0")
    step.graph.tensors[handle] = step.graph.tensors[handle]._replace(dtype="resource")
    read = next(step.graph.ops[op] for op, _ in step.graph.consumers(handle) if step.region.contains(step.graph.ops[op]))
    read.type = "While"
    with pytest.raises(UnsupportedOpError, match="While. takes variable 'v0' itself, whose value only process 1 has"):
        of_each(step, divided({"v0": 1}, zero="v3"))


def names_of(step: TrainingStep, message: Any) -> List[str]:
    found = [step.graph.ops[variable].name for variable in message.variables]
    return found + [step.graph.producer(tensor).name for tensor in message.tensors] + ["late"] * (message.kind == "late")
