"""Which of the optimizer's ops belong to which TaskGraph, and which variables have copies."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import pytest

from tests.passes.drawings import chain
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep, find_update

Ops = Sequence[Tuple[str, str, Sequence[str]]]


def found(ops: Ops, variables: Mapping[str, int] = {}) -> Tuple[Dict[str, int], Dict[str, int]]:
    """TaskGraphs of the APPLY ops that run on every copy, and homes of the variables, by name.

    Args:
        ops: (name, type, inputs) in the place of the updates of a chain of two TaskGraphs; variables are of no phase of the step.
    """
    step = chain(2)
    graph = step.graph
    for op in [op for op in graph.ops if op.phase is Phase.APPLY]:
        op.phase, op.type = Phase.OTHER, "Identity"
    for name, type_, inputs in ops:
        phase = Phase.OTHER if type_ == "VarHandleOp" else Phase.APPLY
        graph.add(name, type_, [graph.tensor(tensor) for tensor in inputs], [((2, 2), "float32")], phase=phase)
    region = step.region._replace(task_graph=[*step.region.task_graph, *([-1] * len(ops))])
    gradients = {graph.tensor("grad0"): 0, graph.tensor("grad1"): 1}
    update = find_update(region, {graph.op(name).id: home for name, home in variables.items()}, gradients)
    names = [{graph.ops[op].name: home for op, home in part.items()} for part in (update.task_graph, update.variables)]
    return names[0], names[1]


def test_what_leads_to_a_write_of_one_task_graph() -> None:
    homes, _ = found([
        ("clipped", "Minimum", ["grad1"]), ("watched", "Abs", ["grad1"]), ("write", "ApplyGradientDescent", ["clipped"])])
    assert homes == {"clipped": 1, "write": 1}


def test_what_follows_from_both_or_none_runs_once() -> None:
    homes, _ = found([
        ("rate", "Const", []), ("norm", "AddN", ["grad0", "grad1"]), ("scaled", "Mul", ["grad0", "norm"]),
        ("write", "ApplyGradientDescent", ["scaled", "rate"]), ("count", "AssignAdd", ["rate"])])
    assert homes == {"scaled": 0, "write": 0}


def test_op_with_two_readers_leads_to_a_write_if_one_does() -> None:
    homes, _ = found([("clipped", "Minimum", ["grad0"]), ("write", "ApplyGradientDescent", ["clipped"]), ("seen", "Abs", ["clipped"])])
    assert set(homes) == {"clipped", "write"}


def test_slots_have_the_home_of_what_they_are_updated_with() -> None:
    """The slot of a slot, too: an average of the moment."""
    _, variables = found([
        ("moment", "VarHandleOp", []), ("average", "VarHandleOp", []), ("other", "VarHandleOp", []),
        ("write", "ResourceApplyMomentum", ["moment", "grad1"]), ("smooth", "AssignSubVariableOp", ["average", "write"]),
        ("count", "AssignAddVariableOp", ["other"])])
    assert variables == {"moment": 1, "average": 1}


def test_what_reads_a_slot_alone_belongs_to_it() -> None:
    homes, variables = found([
        ("moment", "VarHandleOp", []), ("write", "ResourceApplyMomentum", ["moment", "grad1"]),
        ("read", "ReadVariableOp", ["moment"]), ("decayed", "AssignVariableOp", ["moment", "read"])])
    assert variables == {"moment": 1} and homes == {"write": 1, "read": 1, "decayed": 1}


def test_variable_that_is_written_with_values_of_both_has_no_copies() -> None:
    _, variables = found([("total", "VarHandleOp", []), ("write", "AssignAddVariableOp", ["total", "grad0", "grad1"])])
    assert variables == {}


def test_read_is_no_write() -> None:
    _, variables = found([("table", "VarHandleOp", []), ("looked_up", "ResourceGather", ["table", "grad0"])])
    assert variables == {}


def test_homes_of_the_region_are_kept() -> None:
    homes, variables = found([("write", "ApplyGradientDescent", ["w1", "grad1"])], {"w1": 1})
    assert (homes, variables) == ({"write": 1}, {"w1": 1})


@pytest.mark.parametrize("pulled", [False, True])
def test_whether_inputs_are_pulled(pulled: bool) -> None:
    step: TrainingStep = chain(2, labels=True, pulled=pulled)  # the labels are fed
    assert step.is_pulled is pulled


def test_home_of_a_tensor() -> None:
    step: Any = chain(2)
    assert [step.task_graph_of(step.graph.tensor(name)) for name in ("layer0", "loss", "grad0")] == [0, 1, 0]
