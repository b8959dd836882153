"""Which op is in which body, and what a body gives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.outline import outline
from whale_tf.program import Body, Program


def bodies(step: TrainingStep) -> Any:
    return {body.name: body for body in outline(Program(step.graph, ()), step, plan([1] * 2)).bodies}


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


def test_an_early_op_that_waits_for_one_of_a_later_round_is_in_that_round() -> None:
    step = chain(1, ["loss"])
    assert [step.graph.ops[op].name for op in bodies(step)["t0_early"].ops] == ["layer0"]
    step = with_early(chain(1, ["loss", "loss_grad"]), "waiting", ["x"], ["loss"])
    assert step.graph.op("waiting").id in bodies(step)["t0_early_1"].ops


def test_rounds_of_updates_follow_the_longest_way() -> None:
    """clipped0 follows from the norm, which comes after grad0's update body; update0 reads both."""
    step = chain(2, clip=True)
    found = bodies(step)
    names = {name: [step.graph.ops[op].name for op in body.ops] for name, body in found.items()}
    assert names["update"] == ["square0", "square1", "norm"] and names["t0_update_1"] == ["clipped0", "update0"]


def with_early(step: TrainingStep, name: str, inputs: Any, controls: Any = ()) -> TrainingStep:
    step = with_op(step, name, inputs)
    op = step.graph.op(name)
    op.control_inputs = tuple(step.graph.op(control).id for control in controls)
    return step._replace(region=step.region._replace(early=step.region.early | {op.id}))


@pytest.mark.parametrize("inputs,controls", [([], []), ([], ["x"]), (["x"], ["x"])])
def test_an_early_op_that_waits_for_nothing_of_the_clones_is_in_the_first_round(inputs: Any, controls: Any) -> None:
    step = with_early(chain(1, ["loss_grad"]), "free", inputs, controls)
    assert step.graph.op("free").id in bodies(step)["t0_early"].ops


def test_a_second_output_that_nothing_reads_is_no_result() -> None:
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


def test_an_optimizers_variables_are_in_no_body() -> None:
    step = chain(1)
    op = step.graph.add("moment", "VarHandleOp", [], [((), "resource")], phase=Phase.APPLY)
    step = step._replace(region=step.region._replace(task_graph=[*step.region.task_graph, -1]))
    assert not any(op.id in body.ops for body in bodies(step).values())
