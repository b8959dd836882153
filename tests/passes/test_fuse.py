"""Called forward and backward bodies that run as one."""

from __future__ import annotations

from typing import Dict, List, Sequence

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.ir.batch_axis import Reduce
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program
from whale_tf.passes.fuse import joinable
from whale_tf.passes.outline import outline
from whale_tf.plan import Plan
from whale_tf.program import CLONED, Body, Program


def names(step: TrainingStep, one: Plan) -> List[str]:
    return [body.name for body in compile_program(step, one).bodies if body.step in CLONED]


def test_model_without_stages_keeps_its_activations_in_one_function() -> None:
    step = chain(2, task_graphs=1)
    program = compile_program(step, plan([2], 2, emit="call"))
    body, = [body for body in program.bodies if body.step in CLONED]
    assert body.with_forward and "gives loss:0, grad1:0, grad0:0, 1 more  with forward\n" in program.to_text()
    tensors = [[step.graph.tensor_name(t) for t in each] for each in (body.inputs, body.outputs)]
    assert tensors == [["x:0", "w0:0", "w1:0"], ["loss:0", "grad1:0", "grad0:0", "back0:0"]]
    assert [step.graph.ops[op].name for op in body.runs] == [
        "layer0", "layer1", "loss", "loss_grad", "grad1", "back1", "grad0", "back0"]


@pytest.mark.parametrize("counts,micro_batches,schedule,expected", [
    ([1, 1], 2, "backward_first", ["t0_forward", "t0_backward", "t1_backward"]),
    ([1, 1], 1, "backward_first", ["t0_forward", "t0_backward", "t1_backward"]),
    ([1, 1], 2, "gpipe", ["t0_forward", "t0_backward", "t1_forward", "t1_backward"]),
    ([1, 1], 2, "zero_bubble_h1", ["t0_forward", "t0_backward", "t1_forward", "t1_backward", "t1_weight"]),
], ids=str)
def test_only_where_each_backward_step_follows_its_own_forward_step(
    counts: Sequence[int], micro_batches: int, schedule: str, expected: List[str]
) -> None:
    assert names(chain(len(counts)), plan(counts, micro_batches, emit="call", schedule=schedule)) == expected


def test_inlined_recomputing_and_compiled_bodies_stay_apart() -> None:
    assert names(chain(1), plan([1])) == ["t0_forward", "t0_backward"]
    for fields in ({"kept": ()}, {"xla": True}):
        assert names(chain(1), plan([1], emit="call", tasks={0: fields})) == ["t0_forward", "t0_backward"]


def bodies(step: TrainingStep, one: Plan) -> Dict[str, Body]:
    """As one function each."""
    found = [body for body in outline(Program(step.graph, ()), step, one).bodies if body.step in CLONED]
    return {body.name: body._replace(functions=(body.ops,)) for body in found}


def test_ops_are_in_graph_order_and_run_forward_first() -> None:
    """Also if a gradient was taken before the last forward op was made."""
    step, one = chain(1), plan([1], emit="call")
    forward, backward = bodies(step, one).values()
    late = forward._replace(ops=forward.ops + backward.ops[-1:], functions=(forward.ops + backward.ops[-1:],))
    first = backward._replace(ops=backward.ops[:-1], functions=(backward.ops[:-1],))
    (_, _, both), = joinable([late, first], step, one)
    assert both.ops == tuple(sorted(both.ops)) and both.runs == late.runs + first.runs


def test_bodies_that_read_variables_anew_stay_apart() -> None:
    step, one = chain(1), plan([1], emit="call")
    found = bodies(step, one)
    assert len(list(joinable(list(found.values()), step, one))) == 1
    for name in found:
        other = dict(found, **{name: found[name]._replace(reads=((step.graph.tensor("w0"), -1),))})
        assert not list(joinable(list(other.values()), step, one))


def test_forward_body_that_draws_random_numbers_stays_apart() -> None:
    step = chain(1)
    step.region.batch.own_seed.append(step.graph.op("layer0").id)
    assert names(step, plan([1], emit="call")) == ["t0_forward", "t0_backward"]


@pytest.mark.parametrize("op", ["plain", "back0"])
def test_value_of_all_clones_comes_between(op: str) -> None:
    """The forward body's, and the backward body's own."""
    step, one = chain(1, plain=True), plan([2], emit="call")
    step.region.batch.conversions[step.graph.op(op).id, 0] = (Reduce("sum"),)
    assert not list(joinable(list(bodies(step, one).values()), step, one))


def test_op_of_another_stage_comes_between() -> None:
    """The first stage waits for the gradient of the second one, although one micro-batch runs both its steps in a row."""
    assert names(chain(2), plan([1, 1], emit="call"))[:2] == ["t0_forward", "t0_backward"]


@pytest.mark.parametrize("width,expected", [(2, ["t0_backward"]), (8, ["t0_forward", "t0_backward"])])
def test_gradients_take_no_more_room_than_the_forward_ops_leave(
    width: int, expected: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function holds ``x`` (64 bytes) and all gradients (16 bytes each) to its end.  Three activations are freed before."""
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    step = chain(4, task_graphs=1)
    gradient = step.graph.tensor("grad0")
    step.graph.tensors[gradient] = step.graph.tensors[gradient]._replace(shape=(width, width))
    assert names(step, plan([1], 2, emit="call")) == expected
