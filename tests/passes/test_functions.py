"""Called backward bodies in several functions."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.passes import compile_program
from whale_tf.passes.functions import _cut, in_functions
from whale_tf.passes.redo import one_example
from whale_tf.program import BACKWARD, Body, Program


def backward(emit: str = "call") -> Tuple[Program, Body]:
    """Four layers in one TaskGraph, with gradients of 16 bytes each.  The backward step does not follow its forward step at
    once."""
    program = compile_program(chain(4, task_graphs=1), plan([1], 2, emit=emit, schedule="gpipe"))
    body = program.body(0, BACKWARD)
    assert body is not None
    return program, body


def gradients(program: Program, body: Body) -> List[List[str]]:
    """Those of each function."""
    names = [[program.graph.ops[op].name for op in ops] for ops in body.functions]
    return [[name for name in each if name.startswith("grad")] for each in names]


@pytest.mark.parametrize("late,room,expected", [
    ({1: 4, 3: 4, 4: 4}, 12, [(0, 1, 2, 3, 4, 5)]),
    ({1: 4, 3: 4, 4: 4}, 7, [(0, 1, 2, 3), (4, 5)]),
    ({1: 4, 3: 4, 4: 4}, 8, [(0, 1, 2, 3, 4, 5)]),
    ({1: 4, 3: 4, 4: 4}, 3, [(0, 1), (2, 3), (4, 5)]),
    ({0: 1, 2: 9, 5: 1}, 9, [(0, 1, 2), (3, 4, 5)]),
    ({}, 0, [(0, 1, 2, 3, 4, 5)]),
])
def test_function_ends_when_it_holds_more_than_there_is_room_for(
    late: Dict[int, float], room: int, expected: List[Sequence[int]]
) -> None:
    assert _cut(range(6), late, room) == expected


def test_gradients_and_activations_are_held_for_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the sums (4 x 16 bytes) and of what the forward pass leaves (4 x 64 bytes) is less than one layer has."""
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    program, body = backward()
    assert gradients(program, body) == [["grad3"], ["grad2"], ["grad1"], ["grad0"]]
    assert "in 4 functions" in program.to_text()


@pytest.mark.parametrize("micro_batches,warmup,layers", [
    (2, 1, [[3, 2], [1, 0]]),
    (1, 1, [[3], [2], [1], [0]]),
    (2, 2, [[3, 2, 1], [0]]),
])
def test_room_grows_with_the_sums_and_the_micro_batches_in_flight(
    micro_batches: int, warmup: int, layers: List[List[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    monkeypatch.setattr("whale_tf.passes.functions.SHARE", 0.3)
    program, body = backward()
    called = body._replace(functions=(body.runs,))
    one = plan([1], micro_batches, emit="call", tasks={0: {"warmup": warmup}})
    body = in_functions(chain(4, task_graphs=1), one, one_example(program.graph), called, called,
                        {tensor for tensor, _ in body.donated})
    assert gradients(program, body) == [[f"grad{layer}" for layer in each] for each in layers]


@pytest.mark.parametrize("warmup,count", [(1, 4), (3, 2)])
def test_what_calls_save_counts_for_the_other_micro_batches_in_flight(
    warmup: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inlined step would keep another 64 bytes; a layer has 80."""
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    monkeypatch.setattr("whale_tf.passes.functions.SHARE", 0.0)
    step, two = chain(4, task_graphs=1), plan([1], 2, emit="call", tasks={0: {"warmup": warmup}})
    _, body = backward()
    called = body._replace(functions=(body.runs,))
    inlined = called._replace(inputs=(*called.inputs, step.graph.tensor("layer3")))
    assert len(in_functions(step, two, one_example(step.graph), inlined, called).functions) == count


def test_small_ones_are_not_worth_a_call() -> None:
    program, body = backward()
    assert len(body.functions) == 1 and program.functions(body) == [body]


def test_functions_give_what_the_body_gives_and_what_later_ones_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    program, body = backward()
    given = [(part.name, [program.graph.tensor_name(t) for t in part.outputs]) for part in program.functions(body)]
    assert given == [("t0_backward/0", ["loss_grad:0", "grad3:0"]), ("t0_backward/1", ["back3:0", "grad2:0"]),
                     ("t0_backward/2", ["back2:0", "grad1:0"]), ("t0_backward", ["grad0:0", "back0:0"])]


def test_inlined_bodies_have_no_functions() -> None:
    program, body = backward("inline")
    assert body.functions == () and program.functions(body) == [body]
    assert "functions" not in program.to_text()
