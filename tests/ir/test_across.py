"""What of a function is over all processes, and what of each process' own rows."""
from __future__ import annotations

from typing import Dict, Sequence, Tuple

import numpy as np
import pytest

from tests.passes.drawings import chain
from whale_tf.ir.across import SUMS, Across, batch_size, of_function, of_session
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep

Added = Tuple[str, str, Sequence[str], Tuple]  # name, type, inputs, shape of the result

pytestmark = pytest.mark.once

COUNTER: Added = ("counter", "VarHandleOp", (), ())
FIRST: Added = ("first", "Const", (), (1,))  # the axis of the batch


def among(step: TrainingStep, ops: Sequence[Added], results: Sequence[str], sums: bool = True) -> Tuple[TrainingStep, Across]:
    """A function with further ops outside of the clones."""
    graph = step.graph
    for name, type_, inputs, shape in ops:
        graph.add(name, type_, [graph.tensor(each) for each in inputs], [(shape, "float32")] * (type_[:6] != "Assign"),
                  phase=Phase.INPUT if type_ == "Placeholder" else Phase.OTHER, attrs={SUMS: sums}, value=np.zeros(shape, "int32") if type_ == "Const" else None)
    region = step.region._replace(task_graph=[*step.region.task_graph, *[-1] * len(ops)])
    return step._replace(region=region), of_function(region, step.sources, [graph.tensor(name) for name in results], False)


def described(step: TrainingStep, across: Across) -> Dict[str, object]:
    names = [op.name for op in step.graph.ops]
    return {"uses": sorted((names[op], step.graph.tensor_name(step.graph.ops[op].inputs[place])) for op, place in across.uses
                           if step.graph.ops[op].phase is Phase.OTHER),
            "added": [names[op] for op, _ in across.added], "twice": [names[op] for op in across.twice]}


def test_what_is_counted_on_own_rows_is_added_up() -> None:
    """The count of a metric reads rows; a mean of losses does not, and is the same in all processes without a sum."""
    step, across = among(chain(1), [
        COUNTER, FIRST, ("right", "Equal", ["layer0", "x"], (None, 2)), ("count", "Sum", ["right", "first"], (2,)),
        ("counted", "AssignAddVariableOp", ["counter", "count"], ()), ("averaged", "AssignAddVariableOp", ["counter", "loss"], ()),
        ("result", "Identity", ["loss"], ()), ("rows", "Identity", ["layer0"], (None, 2))], ["result", "rows"])
    assert described(step, across) == {"uses": [("averaged", "loss:0"), ("result", "loss:0")], "added": ["counted"], "twice": []}


def test_variable_that_is_assigned_a_sum_of_its_value_and_rows_counts() -> None:
    """As Keras 3 adds.  What follows from the variable, or is no plain sum over rows, is computed from all rows."""
    def across(*summed: Added, first: str = "value", second: str = "count") -> Dict[str, object]:
        step, found = among(chain(1), [
            COUNTER, FIRST, *summed, ("value", "ReadVariableOp", ["counter"], (2,)), ("new", "AddV2", [first, second], (2,)),
            ("counted", "AssignVariableOp", ["counter", "new"], ())], [])
        return described(step, found)

    count, mean = (("count", type_, ["layer0", "first"], (2,)) for type_ in ("Sum", "Mean"))
    assert across(count) == across(count, first="count", second="value") == {"uses": [], "added": ["new"], "twice": []}
    gathered = {"uses": [("count", "layer0:0")], "added": [], "twice": []}
    assert across(mean) == gathered
    assert across(count, ("again", "ReadVariableOp", ["counter"], (2,)), ("part", "Mul", ["count", "again"], (2,)),
                  second="part") == gathered


def test_other_writes_and_results_gather_rows() -> None:
    ops = [COUNTER, FIRST, ("right", "Equal", ["layer0", "x"], (None, 2)), ("count", "Sum", ["right", "first"], (2,)),
           ("counted", "AssignAddVariableOp", ["counter", "count"], ()), ("dead", "Sum", ["layer0", "first"], (2,))]
    step, across = among(chain(1), ops, [], sums=False)
    assert described(step, across) == {"uses": [("right", "layer0:0"), ("right", "x:0")], "added": [], "twice": []}
    step, across = among(chain(1), [*ops[1:4], ("result", "Identity", ["count"], ())], ["result"])
    assert described(step, across) == {"uses": [("right", "layer0:0"), ("right", "x:0")], "added": [], "twice": []}


def test_what_needs_rows_of_both_kinds_runs_twice() -> None:
    step, across = among(chain(1), [
        COUNTER, FIRST, ("right", "Equal", ["layer0", "x"], (None, 2)), ("count", "Sum", ["right", "first"], (2,)),
        ("counted", "AssignAddVariableOp", ["counter", "count"], ()), ("accuracy", "Mean", ["right", "first"], (2,))], ["accuracy", "right"])
    assert described(step, across) == {
        "uses": [("right", "layer0:0"), ("right", "x:0")], "added": ["counted"], "twice": ["right"]}


@pytest.mark.parametrize("result, expected", [
    (("result", "Identity", ["count"], (2,)), [("right", "layer0:0"), ("right", "x:0")]),
    (("result", "Sum", ["label", "first"], (2,)), [("result", "label:0")]),
    (("result", "Identity", ["grad0"], (2, 2)), [("result", "grad0:0")]), (("result", "Identity", ["layer0"], (2, 2)), []),
], ids=["count", "count of an input", "gradient", "rows"])
def test_sum_with_as_many_elements_as_the_batch_has_examples_is_of_all(result: Added, expected: Sequence[Tuple[str, str]]) -> None:
    step = chain(1)
    tensors = step.graph.tensors
    tensors[:] = [one._replace(shape=(2, 2)) if one.shape == (None, 2) else one for one in tensors]
    step, across = among(step, [COUNTER, FIRST, ("label", "Placeholder", [], (2, 2)), ("right", "Equal", ["layer0", "x"], (2, 2)),
                                ("count", "Sum", ["right", "first"], (2,)), result], ["result"])
    assert described(step, across)["uses"] == expected


def test_session_has_no_results() -> None:
    step = chain(1)
    assert of_session(step.region).added == of_session(step.region).twice == ()
    assert step.across == Across() and step._replace(processes=2).across == of_session(step.region)


def test_size_of_a_mini_batch() -> None:
    step = chain(1)
    assert batch_size(step.graph, step.sources) is None
    step.graph.tensors[0] = step.graph.tensors[0]._replace(shape=(8, 2))
    assert batch_size(step.graph, step.sources) == 8
