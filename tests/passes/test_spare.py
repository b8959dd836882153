"""What a called backward body takes, and what it does again."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Set, Tuple

from tests.passes.drawings import chain, plan
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.layout import partial, sharded
from whale_tf.ir.region import find_region
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.passes import compile_program
from whale_tf.passes.communicate import combined_in
from whale_tf.passes.outline import outline
from whale_tf.passes.spare import spare
from whale_tf.program import Body, Program


def step(forward: Sequence[Tuple[str, str, Sequence[str]]], backward: Sequence[Tuple[str, str, Sequence[str]]]) -> TrainingStep:
    """Ops (name, type, inputs) on [batch, 8] between input ``x``, ``loss`` and gradient ``grad`` of variable ``w``; backward
    ops are made by a gradient function."""
    graph, home = OpGraph(), []  # type: Tuple[OpGraph, List[int]]

    def op(name: str, type_: str, inputs: Sequence[str], task_graph: int, phase: Phase, shape: Any = (None, 8),
           **more: Any) -> None:
        graph.add(name, type_, [graph.tensor(i) for i in inputs], [(shape, "float32")], phase=phase, **more)
        home.append(task_graph)

    op("x", "Placeholder", [], -1, Phase.INPUT)
    op("w", "ReadVariableOp", [], 0, Phase.FORWARD, (8, 8))
    op("layer", "MatMul", ["x", "w"], 0, Phase.FORWARD)
    for name, type_, inputs in forward:
        op(name, type_, inputs, 0, Phase.FORWARD)
    op("loss", "Mean", [forward[-1][0] if forward else "layer"], 0, Phase.FORWARD, ())
    made_from = graph.op("loss").id
    op("begin", "Neg", ["loss"], 0, Phase.BACKWARD, forward=made_from)
    for name, type_, inputs in backward:
        op(name, type_, inputs, 0, Phase.BACKWARD, forward=made_from)
    op("grad", "MatMul", ["x", backward[-1][0]], 0, Phase.BACKWARD, (8, 8), forward=made_from)
    op("update", "ApplyGradientDescent", ["grad"], -1, Phase.APPLY, (8, 8))
    x = graph.tensor("x")
    batch = BatchAxis(graph, {x: 0}, None)
    batch.layouts[x] = sharded(0)
    batch.layouts[graph.tensor("grad")] = partial(1)
    region = find_region(graph, home, batch, [x])
    gradient = graph.tensor("grad")
    return TrainingStep(region, {x: 0}, find_update(region, {}, {gradient: 0}), ((gradient, graph.op("w").id),))


def bodies(given: TrainingStep, emit: str = "call") -> Dict[str, Body]:
    one = plan([1], 2, emit=emit, schedule="gpipe")  # the backward step does not follow the forward step at once
    return {body.step: body for body in spare(outline(Program(given.graph, ()), given, one), given, one).bodies}


def names(given: TrainingStep, tensors: Sequence[int]) -> Set[str]:
    return {given.graph.producer(tensor).name for tensor in tensors}


GATE = [("half", "Mul", ["layer", "layer"]), ("sum", "Erf", ["layer"]), ("product", "Mul", ["half", "sum"])]
GATE_BACK = [("b1", "Mul", ["begin", "half"]), ("b2", "Mul", ["b1", "sum"]), ("b3", "Mul", ["b2", "product"]),
             ("b4", "Mul", ["b3", "layer"])]


def test_cheap_ops_are_done_again_where_that_saves_arguments() -> None:
    given = step(GATE, GATE_BACK)
    found = bodies(given)
    assert names(given, found["forward"].outputs) == {"layer", "sum", "loss"}
    assert names(given, found["backward"].inputs) == {"layer", "sum", "loss", "x"}
    ops = [given.graph.ops[i].name for i in found["backward"].runs]
    assert ops == ["begin", "half", "b1", "b2", "product", "b3", "b4", "grad"]  # in an order in which they can run


def test_what_is_done_again_waits_for_the_gradient_that_its_first_reader_combines_it_with() -> None:
    given = step(GATE, GATE_BACK)
    waits = {given.graph.ops[a].name: given.graph.ops[b].name for a, b in bodies(given)["backward"].waits}
    assert waits == {"half": "begin", "product": "b2"}


def test_op_with_much_arithmetic_is_not_done_again() -> None:
    given = step([("a", "Erf", ["layer"])], [("b1", "Mul", ["begin", "a"]), ("b2", "Mul", ["b1", "layer"])])
    assert names(given, bodies(given)["backward"].inputs) == {"a", "layer", "loss", "x"}


def test_nothing_is_done_again_that_saves_less_than_it_takes() -> None:
    """Six ops in a row to save one argument."""
    row = [(f"a{i}", "Mul", [f"a{i - 1}" if i else "layer"] * 2) for i in range(6)]
    given = step(row, [("b1", "Mul", ["begin", "a5"]), ("b2", "Mul", ["b1", "layer"])])
    found = bodies(given)["backward"]
    assert names(given, found.inputs) == {"a5", "layer", "loss", "x"}
    assert found.runs == found.ops


def test_gradients_that_nothing_reads_are_neither_made_nor_returned_and_take_no_arguments() -> None:
    given = step([("a", "Erf", ["layer"])], [("dead", "Mul", ["begin", "a"]), ("b1", "Mul", ["begin", "layer"])])
    found = bodies(given)
    assert "dead" in {given.graph.ops[i].name for i in found["backward"].ops}
    assert "dead" not in {given.graph.ops[i].name for i in found["backward"].runs}
    assert names(given, found["backward"].inputs) == {"layer", "loss", "x"}
    assert names(given, found["backward"].outputs) == {"grad"}


def test_gradient_that_only_a_group_waits_for_is_not_made() -> None:
    """TensorFlow 1 lets the gradients of both operands wait for each other; inlined, the group stays."""
    given = step([("a", "Erf", ["layer"])], [("dead", "Mul", ["begin", "a"]), ("b1", "Mul", ["begin", "layer"])])
    graph = given.graph
    group = graph.add("group", "NoOp", [], [], [graph.op("dead").id, graph.op("b1").id], phase=Phase.BACKWARD)
    graph.op("grad").control_inputs = (group.id,)
    region = find_region(graph, [*given.region.task_graph, 0], given.region.batch, list(given.sources))
    given = given._replace(region=region, update=find_update(region, {}, {graph.tensor("grad"): 0}))
    found = bodies(given)["backward"]
    assert {"group", "dead"} <= {graph.ops[i].name for i in found.ops}
    assert [graph.ops[i].name for i in found.runs] == ["begin", "b1", "grad"]
    assert names(given, found.inputs) == {"layer", "loss", "x"}
    assert "group" in {graph.ops[i].name for i in bodies(given, "inline")["backward"].ops}


def test_inlined_bodies_stay_as_they_are() -> None:
    given = step(GATE, GATE_BACK)
    found = bodies(given, "inline")
    assert names(given, found["forward"].outputs) == {"layer", "half", "sum", "product", "loss"}
    assert not found["backward"].runs


def test_only_ops_that_run_take_values_of_all_clones() -> None:
    """The ops of a called body may all be dead."""
    given = chain(1, plain=True, reduces=("plain",))
    program = compile_program(given, plan([2], emit="call"))
    found = {(program.bodies[body].name, given.graph.tensor_name(tensor)) for body, tensor in combined_in(program, given)}
    assert found == {("t0_backward", "loss_grad:0")}
    dead = [body._replace(functions=((),)) if body.name == "t0_backward" else body for body in program.bodies]
    assert not combined_in(program._replace(bodies=tuple(dead)), given)
