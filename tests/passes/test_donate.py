"""What forward bodies donate to the functions of their backward pass."""

from __future__ import annotations

from typing import Any, Set, Tuple

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.ir.batch_axis import Localise, Reduce
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program
from whale_tf.passes.donate import donate
from whale_tf.program import BACKWARD, Body, Program

pytestmark = pytest.mark.usefixtures("_any_size")


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.passes.donate.LEAST", 1)


def backward(step: TrainingStep, emit: str = "call", stages: int = 1, **more: Any) -> Tuple[Program, Body]:
    """The backward body of the last stage, of which each device has one.  Other steps come between it and the forward body."""
    program = compile_program(step, plan([1] * stages, 2, emit=emit, schedule="gpipe", **more))
    body = program.body(stages - 1, BACKWARD)
    assert body is not None
    return program, body


def donated(program: Program, body: Body) -> Set[Tuple[str, int]]:
    return {(program.graph.producer(tensor).name, place) for tensor, place in body.donated}


def test_tensors_of_the_batch_that_the_forward_body_makes_or_takes() -> None:
    """``x`` and ``layer0`` are those for which ``grad0`` and ``grad1`` ask; variables are not of the batch, nor is the loss."""
    program, body = backward(chain(2, task_graphs=1))
    assert donated(program, body) == {("x", 0), ("layer0", 0)}
    assert "  owns layer0:0, x:0\n" in program.to_text() or "  owns x:0, layer0:0\n" in program.to_text()


def test_next_stage_owns_what_it_was_sent_and_not_the_gradient_that_comes_back() -> None:
    program, body = backward(chain(2), stages=2)
    assert donated(program, body) == {("layer0", 0)}
    first = program.body(0, BACKWARD)
    assert first is not None and donated(program, first) == {("x", 0)}


def test_each_function_that_reads_a_tensor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    program, body = backward(chain(3, task_graphs=1))
    place = {program.graph.ops[op].name: number for number, ops in enumerate(body.functions) for op in ops}
    assert donated(program, body) == {("layer1", place["grad2"]), ("layer0", place["grad1"]), ("x", place["grad0"])}
    assert [donated(program, one) for one in program.functions(body)] == [{("layer1", 0), ("layer0", 0)}, {("x", 0)}]


def test_no_tensors_in_whose_place_the_clone_reads_something_else() -> None:
    step = chain(2, task_graphs=1)
    batch, graph = step.region.batch, step.graph
    program, body = backward(step)
    owned = {tensor for tensor, _ in body.donated}
    assert donate(step.region, body, owned) == body
    batch.localise[graph.op("grad1").id, 0] = Localise(())
    batch.conversions[graph.op("grad0").id, 0] = (Reduce("sum"),)
    assert not donate(step.region, body, owned).donated


def test_no_small_tensors_and_none_of_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    step = chain(2, task_graphs=1)
    step.graph.tensors[step.graph.tensor("layer0")] = step.graph.tensors[step.graph.tensor("layer0")]._replace(dtype="int32")
    program, body = backward(step)
    assert donated(program, body) == {("x", 0)}
    monkeypatch.setattr("whale_tf.passes.donate.LEAST", 1 << 14)
    program, body = backward(chain(2, task_graphs=1))
    assert not body.donated and "owns" not in program.to_text()


def test_nothing_where_steps_are_inlined_or_xla_compiles_functions() -> None:
    assert not backward(chain(2, task_graphs=1), "inline")[1].donated
    assert not backward(chain(2, task_graphs=1), tasks={0: {"xla": True}})[1].donated
