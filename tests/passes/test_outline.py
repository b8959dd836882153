"""Which op is in which body, and what a body gives."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.ir.batch_axis import Reduce
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.passes.outline import outline, parted, read_elsewhere
from whale_tf.plan import Plan
from whale_tf.program import Body, Program


def bodies(step: TrainingStep, chosen: Optional[Plan] = None) -> Any:
    return {body.name: body for body in outline(Program(step.graph, ()), step, chosen or plan([1] * 2)).bodies}


def names(step: TrainingStep, body: Body) -> Any:
    return [step.graph.ops[op].name for op in body.ops]


def gives(step: TrainingStep, body: Body) -> Any:
    return [step.graph.tensor_name(tensor) for tensor in body.outputs]


def with_op(step: TrainingStep, name: str, inputs: Any, shape: Any = (None, 2), dtype: str = "float32", task_graph: int = 0,
            batch_level: bool = True, **fields: Any) -> TrainingStep:
    """The step with one more op of the region."""
    graph, region = step.graph, step.region
    op = graph.add(name, "Relu", [graph.tensor(tensor) for tensor in inputs], [(shape, dtype)], phase=Phase.FORWARD, **fields)
    more = {op.id} if batch_level else set()
    return step._replace(region=region._replace(
        ops=region.ops + (op.id,), task_graph=[*region.task_graph, task_graph], batch_level=region.batch_level | more))


def test_results_that_nothing_reads_are_given() -> None:
    step = with_op(chain(2), "prediction", ["layer0"])
    assert gives(step, bodies(step)["t0_forward"]) == ["layer0:0", "prediction:0"]


def test_scalars_are_given_but_for_those_of_gradient_functions() -> None:
    step = with_op(chain(2), "size", ["layer0"], shape=())
    step = with_op(step, "reader", ["size"])
    assert "size:0" in gives(step, bodies(step)["t0_forward"])
    step = with_op(chain(2), "size", ["layer0"], shape=(), forward=0)
    step = with_op(step, "reader", ["size"])
    assert "size:0" not in gives(step, bodies(step)["t0_forward"])


def test_handles_and_references_are_never_results() -> None:
    for dtype in ("resource", "variant", "float32_ref"):
        step = with_op(chain(2), "handle", ["layer0"], shape=(), dtype=dtype)
        assert "handle:0" not in gives(step, bodies(step)["t0_forward"])


def test_what_no_other_clone_reads_stays_inside() -> None:
    """One reader inside the body, one on the step level of another TaskGraph, which reads no clone's value."""
    step = with_op(chain(2), "inner", ["layer0"])
    step = with_op(step, "reader", ["inner"])
    step = with_op(step, "other", ["inner"], task_graph=1, batch_level=False)
    assert "inner:0" not in gives(step, bodies(step)["t0_forward"])
    step = with_op(chain(2), "inner", ["layer0"])
    step = with_op(step, "reader", ["inner"])
    step = with_op(step, "other", ["inner"], task_graph=1)
    assert "inner:0" in gives(step, bodies(step)["t0_forward"])


def test_bodies_are_listed_by_task_graph() -> None:
    found = list(bodies(chain(3)))
    assert found == sorted(found, key=lambda name: ("once" not in name, "update" in name, name[:2]))


def test_early_op_that_waits_for_one_of_a_later_round_is_in_that_round() -> None:
    step = chain(1, ["loss"])
    assert [step.graph.ops[op].name for op in bodies(step)["t0_early"].ops] == ["layer0"]
    step = with_early(chain(1, ["loss", "loss_grad"]), "waiting", ["x"], ["loss"])
    assert step.graph.op("waiting").id in bodies(step)["t0_early_1"].ops


def test_rounds_of_updates_follow_the_longest_way() -> None:
    """clipped0 follows from the norm, which comes after grad0's update body; update0 reads both."""
    step = chain(2, clip=True)
    found = bodies(step)
    assert names(step, found["update"]) == ["square0", "square1", "norm"]
    assert names(step, found["t0_update_1"]) == ["clipped0", "update0"]


def with_early(step: TrainingStep, name: str, inputs: Any, controls: Any = ()) -> TrainingStep:
    step = with_op(step, name, inputs)
    op = step.graph.op(name)
    op.control_inputs = tuple(step.graph.op(control).id for control in controls)
    return step._replace(region=step.region._replace(early=step.region.early | {op.id}))


@pytest.mark.parametrize("inputs,controls", [([], []), ([], ["x"]), (["x"], ["x"])])
def test_early_op_that_waits_for_nothing_of_the_clones_is_in_the_first_round(inputs: Any, controls: Any) -> None:
    step = with_early(chain(1, ["loss_grad"]), "free", inputs, controls)
    assert step.graph.op("free").id in bodies(step)["t0_early"].ops


def test_second_output_that_nothing_reads_is_no_result() -> None:
    step = chain(1)
    op = step.graph.add("two", "Split", [step.graph.tensor("layer0")], [((None, 1), "float32")] * 2, phase=Phase.FORWARD)
    region = step.region
    step = step._replace(region=region._replace(
        ops=region.ops + (op.id,), task_graph=[*region.task_graph, 0], batch_level=region.batch_level | {op.id}))
    step = with_op(step, "reader", ["two:0"])
    assert gives(step, bodies(step)["t0_forward"]) == ["loss:0", "reader:0"]


def test_what_follows_from_updates_of_two_task_graphs_comes_after_both() -> None:
    step = chain(2, clip=True)
    graph = step.graph
    graph.add("sum", "AddN", [graph.tensor(name) for name in ("norm", "clipped0", "clipped1")], [((2, 2), "float32")],
              phase=Phase.APPLY)
    step = step._replace(region=step.region._replace(task_graph=[*step.region.task_graph, -1]))
    assert graph.op("sum").id in bodies(step)["update_2"].ops


def test_optimizers_variables_are_in_no_body() -> None:
    step = chain(1)
    op = step.graph.add("moment", "VarHandleOp", [], [((), "resource")], phase=Phase.APPLY)
    step = step._replace(region=step.region._replace(task_graph=[*step.region.task_graph, -1]))
    assert not any(op.id in body.ops for body in bodies(step).values())


def test_what_is_read_by_a_variables_handle_is_given_though_an_op_reads_it() -> None:
    step = with_op(chain(2), "table", [], dtype="resource")
    step = with_op(step, "rows", ["table", "x"])
    step = with_op(step, "reader", ["rows"])
    assert "rows:0" in gives(step, bodies(step)["t0_forward"])


def test_what_is_combined_over_all_clones_is_read_elsewhere() -> None:
    """``loss_grad`` reads the sum of what the clones have of ``loss``, after each has scaled its own."""
    assert chain(1, ["loss_grad"]).graph.tensor("loss") in read_elsewhere(chain(1, ["loss_grad"]).region)
    assert chain(1).graph.tensor("loss") not in read_elsewhere(chain(1).region)


def test_what_runs_once_is_listed_by_home() -> None:
    step = chain(2, task_graphs=1, clip=True)
    found = bodies(step, plan([2], 2, zero="v3", tasks={0: {"variables": "shared", "homes": {"w0": 1, "w1": 0}}}))
    assert [name for name in found if "once" in name] == ["t0_once_on0", "t0_once_on1"]


def test_updates_are_listed_by_task_graph() -> None:
    step = chain(2)
    swapped = {step.graph.tensor("grad0"): 1, step.graph.tensor("grad1"): 0}  # update0, the first op, belongs to TaskGraph 1
    found = bodies(step._replace(update=find_update(step.region, {}, swapped)))
    assert [(name, names(step, body)) for name, body in found.items() if "update" in name] == [
        ("t0_update", ["update1"]), ("t1_update", ["update0"])]


def with_back(step: TrainingStep, name: str, type_: str, inputs: Sequence[str] = (), controls: Sequence[str] = (),
              task_graph: int = 1, outputs: int = 1) -> TrainingStep:
    """The step with one more op of the backward pass."""
    graph, region = step.graph, step.region
    op = graph.add(name, type_, [graph.tensor(tensor) for tensor in inputs], [((None, 2), "float32")] * outputs,
                   [graph.op(control).id for control in controls], phase=Phase.BACKWARD)
    return step._replace(region=region._replace(
        ops=region.ops + (op.id,), task_graph=[*region.task_graph, task_graph],
        batch_level=region.batch_level | {op.id}, late=region.late | {op.id}))


def zero_bubble(micro_batches: int) -> Plan:
    return plan([1, 1], micro_batches, schedule="zero_bubble_h1")


def test_gradients_of_weights_are_apart_where_there_are_several_micro_batches() -> None:
    """Stage 1 sends back1, which stage 0 waits for; nobody waits for stage 0."""
    step = chain(2)
    assert {name: names(step, body) for name, body in bodies(step, zero_bubble(2)).items() if "weight" in name} == {
        "t1_weight": ["grad1"]}
    assert not [name for name in bodies(step, zero_bubble(1)) if "weight" in name]


def test_what_shares_a_stack_with_what_is_sent_is_not_apart() -> None:
    """A value that is only for the weights' gradients is popped off the stack that also has one for those of activations, and
    another one off a stack of its own."""
    step = chain(2)
    for name in ("stack", "own"):
        stack = step.graph.add(name, "StackV2", [], [((), "resource")], phase=Phase.FORWARD)
        step = step._replace(region=step.region._replace(
            ops=step.region.ops + (stack.id,), task_graph=[*step.region.task_graph, 1],
            batch_level=step.region.batch_level | {stack.id}))
    step = with_back(step, "popped", "StackPopV2", ["stack"])
    step = with_back(step, "sent", "Mul", ["popped", "back1"])
    step = with_back(step, "received", "Relu", ["sent"], task_graph=0)
    step = with_back(step, "other", "StackPopV2", ["stack"])
    step = with_back(step, "late", "StackPopV2", ["own"])
    step = with_back(step, "alone", "Mul", ["other", "late"])
    found = bodies(step, zero_bubble(2))
    assert names(step, found["t1_weight"]) == ["grad1", "late", "alone"]
    assert {"popped", "sent", "other"} <= set(names(step, found["t1_backward"]))


def test_nothing_that_is_sent_waits_for_a_group_where_gradients_of_weights_are_apart() -> None:
    step = with_back(chain(2), "group", "NoOp", controls=["grad1", "back1"], outputs=0)
    step = with_back(step, "sent", "Identity", ["back1"], ["group"])
    step = with_back(step, "received", "Relu", ["sent"], task_graph=0)
    assert parted(step, plan([1, 1], 2)) is step and parted(step, zero_bubble(1)) is step
    assert step.graph.op("sent").control_inputs == (step.graph.op("group").id,)
    assert parted(step, zero_bubble(2)).graph.op("sent").control_inputs == ()


def with_loop(step: TrainingStep, entering: str, reads: str) -> TrainingStep:
    """The step with an early loop, in which ``reads`` is added to what enters."""
    graph, region = step.graph, step.region
    first = len(graph.ops)
    for name, type_, inputs in (
            ("enter", "Enter", [entering]), ("invariant", "Enter", [reads]), ("merge", "Merge", ["enter"]),
            ("switch", "Switch", ["merge"]), ("plain", "Tanh", ["switch"]), ("body", "Add", ["plain", "invariant"]),
            ("next", "NextIteration", ["body"]), ("exit", "Exit", ["switch"])):
        graph.add(name, type_, [graph.tensor(tensor) for tensor in inputs], [((None, 2), "float32")],
                  attrs={"frame_name": "loop"} if type_ == "Enter" else {}, phase=Phase.FORWARD)
    graph.op("merge").inputs += graph.op("next").outputs
    more = range(first, len(graph.ops))
    return step._replace(region=region._replace(
        ops=(*region.ops, *more), task_graph=[*region.task_graph, *[0] * len(more)],
        batch_level=region.batch_level.union(more), early=region.early.union(more)))


LOOP = ["enter", "invariant", "merge", "switch", "plain", "body", "next", "exit"]


def test_loop_that_reads_the_value_of_the_whole_mini_batch_is_of_one_round() -> None:
    step = with_loop(chain(1, ["loss", "loss_grad"]), "x", "x")
    assert names(step, bodies(step)["t0_early"])[-8:] == LOOP
    step = with_loop(chain(1, ["loss", "loss_grad"]), "x", "loss")
    assert names(step, bodies(step)["t0_early_1"])[-8:] == LOOP


def test_what_reads_a_variable_anew_is_of_the_round_after_its_update() -> None:
    step = with_early(chain(1, ["loss_grad"]), "written", ["x"])
    step = with_early(step, "reads", ["x"], ["written"])
    assert {"written", "reads"} <= set(names(step, bodies(step)["t0_early"]))
    again, before = (step.graph.op(name).id for name in ("reads", "written"))
    step = step._replace(region=step.region._replace(rereads={again: frozenset({before})}))
    assert names(step, bodies(step)["t0_early_1"]) == ["reads"]


def test_what_reads_a_variable_anew_waits_for_the_updates_round_but_no_further() -> None:
    """Whatever else it reads or waits for only has to be of the same round or an earlier one."""
    for update, expected in (("layer0", "t0_early_1"), ("loss", "t0_early_2")):
        step = with_early(chain(1, ["loss", "loss_grad"]), "reads", ["layer0"], ["layer0", "loss"])
        again, before = (step.graph.op(name).id for name in ("reads", update))
        step = step._replace(region=step.region._replace(rereads={again: frozenset({before})}))
        assert "reads" in names(step, bodies(step)[expected])


def with_combined(step: TrainingStep, name: str, inputs: Sequence[str]) -> TrainingStep:
    """The step with one more early op, whose first operand is a sum over all clones."""
    step = with_early(step, name, inputs)
    step.region.batch.conversions[step.graph.op(name).id, 0] = (Reduce("sum"),)
    return step


def two_rounds() -> TrainingStep:
    """Of the early ops, ``one`` is in round 1 and ``two`` in round 2."""
    return with_combined(with_combined(chain(1), "one", ["x"]), "two", ["one"])


def test_operand_that_is_not_combined_does_not_raise_the_round() -> None:
    step = with_combined(two_rounds(), "mixed", ["one", "two"])
    assert names(step, bodies(step)["t0_early_2"]) == ["two", "mixed"]


@pytest.mark.parametrize("inputs", [["one", "two"], ["two", "one"], ["two", "x"]])
def test_longest_way_to_an_early_op_counts(inputs: Any) -> None:
    step = with_early(two_rounds(), "both", inputs)
    assert names(step, bodies(step)["t0_early_2"]) == ["two", "both"]


def with_section(step: TrainingStep, name: str, inputs: Sequence[str]) -> TrainingStep:
    """The step with one more op that runs once, on all examples."""
    step = with_op(step, name, inputs)
    return step._replace(region=step.region._replace(sections=step.region.sections | {step.graph.op(name).id}))


def test_section_is_of_the_round_after_the_early_ops_that_it_reads() -> None:
    """``further`` reads another section, and ``alone`` nothing."""
    step = two_rounds()
    more: Any = (("alone", []), ("whole", ["one", "x"]), ("further", ["whole", "x"]), ("last", ["one", "two"]))
    for name, inputs in more:
        step = with_section(step, name, inputs)
    sections = {name: names(step, body) for name, body in bodies(step).items() if "section" in name}
    assert sections == {"t0_section": ["alone"], "t0_section_2": ["whole", "further"], "t0_section_3": ["last"]}


def test_all_ops_of_a_loop_are_of_the_round_of_its_latest() -> None:
    """``one`` enters, and ``two`` is added to it."""
    step = with_early(with_loop(two_rounds(), "one", "two"), "after", ["exit"])
    assert names(step, bodies(step)["t0_early_2"]) == ["two", *LOOP, "after"]


def test_what_ops_outside_the_clones_count_for_all_is_of_the_next_round() -> None:
    """``seed`` follows from ``size``, which every clone has of its own examples."""
    step = with_early(with_early(chain(1), "size", ["x"]), "own", ["size"])
    step = with_op(step, "count", ["size"], batch_level=False)
    step = with_op(step, "seed", ["count"], batch_level=False)
    step = with_early(step, "drawn", ["seed"])
    found = bodies(step)
    assert names(step, found["t0_early"]) == ["size", "own"] and names(step, found["t0_early_1"]) == ["drawn"]
