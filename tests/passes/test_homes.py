"""What runs at the homes of variables, which optimizer variables follow them, and when a body's values are sent."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import GATHER_ATTR
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.homes import Homes, find_homes, is_value_at_home, kept_in_bodies, reads_anew
from whale_tf.plan import Plan


def add(graph: OpGraph, name: str, type_: str = "Relu", inputs: Sequence[str] = (), dtype: str = "float32", outputs: int = 1,
        **fields: Any) -> None:
    graph.add(name, type_, [graph.tensor(tensor) for tensor in inputs], [((2,), dtype)] * outputs, **fields)


# ----------------------------------------------------------------------------------------------- what runs at homes
def at_homes(homes: Mapping[str, int], model_replicas: int = 1, **more: Any) -> Plan:
    return plan([2], 1, model_replicas, {0: {"variables": "shared", "homes": homes}}, zero="v1", **more)


def names(step: TrainingStep, homes: Homes) -> Tuple[Dict[str, int], Dict[str, int]]:
    graph = step.graph
    return ({graph.ops[op].name: home for op, home in homes.ops.items()},
            {graph.tensor_name(tensor)[:-2]: home for tensor, home in homes.tensors.items()})


def test_values_updates_and_gradients_of_a_variable() -> None:
    """``norm`` reads both variables' squares; what each scales by it is its own again."""
    step = chain(2, task_graphs=1, momentum=True, clip=True)
    ops, tensors = names(step, find_homes(step, at_homes({"v0": 1, "v1": 0})))
    assert ops == {**dict.fromkeys(["v0", "m0", "w0", "square0", "clipped0", "update0"], 1),
                   **dict.fromkeys(["v1", "m1", "w1", "square1", "clipped1", "update1"], 0)}
    assert tensors == {"grad0": 1, "grad1": 0}


def test_variable_without_a_home_and_one_of_another_graph_have_nothing_there() -> None:
    step = chain(2, task_graphs=1, momentum=True)
    ops, tensors = names(step, find_homes(step, at_homes({"v1": 1, "elsewhere": 0})))
    assert ops == dict.fromkeys(["v1", "m1", "w1", "update1"], 1) and tensors == {"grad1": 1}
    assert find_homes(step, at_homes({"elsewhere": 0})) == find_homes(step, at_homes({})) == Homes()


def test_what_two_homes_have_a_part_in_runs_at_neither() -> None:
    step = chain(2, task_graphs=1, decay=True)
    graph, region = step.graph, step.region
    add(graph, "both", "Mul", ["w0", "w1"])
    add(graph, "again", "Mul", ["decay1", "decay1"])
    more = tuple(graph.op(name).id for name in ("both", "again"))
    step = step._replace(region=region._replace(ops=region.ops + more, task_graph=[*region.task_graph, 0, 0]))
    ops, _ = names(step, find_homes(step, at_homes({"w0": 0, "w1": 1})))
    assert ops["decay0"] == 0 and ops["decay1"] == ops["again"] == 1 and "both" not in ops


def test_value_of_the_clones_goes_to_the_only_home_that_reads_it() -> None:
    """Each update reads a value that is no gradient: ``back0`` goes home, ``back1`` to two of them, the loss to a summary."""
    step = chain(2, task_graphs=1, momentum=True)
    graph = step.graph
    for name, inputs in (("of0", ["back0", "m0"]), ("first", ["back1", "m0"]), ("second", ["back1", "m1"])):
        add(graph, name, "AssignAddVariableOp", inputs[::-1], phase=Phase.APPLY)
    add(graph, "summary", "ScalarSummary", ["loss"], phase=Phase.OTHER)
    step = step._replace(region=step.region._replace(task_graph=[*step.region.task_graph, -1, -1, -1, -1]))
    _, tensors = names(step, find_homes(step, at_homes({"v0": 1, "v1": 0})))
    assert tensors == {"grad0": 1, "grad1": 0, "back0": 1}


def test_gradient_goes_home_though_others_read_it_too() -> None:
    step = chain(2, task_graphs=1, momentum=True)
    add(step.graph, "summary", "ScalarSummary", ["grad1"], phase=Phase.OTHER)
    step = step._replace(region=step.region._replace(task_graph=[*step.region.task_graph, -1]))
    assert names(step, find_homes(step, at_homes({"v0": 1, "v1": 0})))[1] == {"grad0": 1, "grad1": 0}


def test_another_process_has_a_device_in_the_homes_place() -> None:
    step = chain(1, momentum=True)._replace(processes=2)
    whole = at_homes({"v0": 1}, 2, processes=((0, 1), (2, 3)))
    assert [names(step, find_homes(step, whole.local_part(rank)))[0]["v0"] for rank in range(2)] == [1, 3]


def test_values_at_homes() -> None:
    """Neither a handle nor a reference is a value."""
    graph = OpGraph()
    for dtype in ("float32", "resource", "float32_ref"):
        add(graph, dtype, "ReadVariableOp", dtype=dtype)
    homes = Homes(ops={op.id: 0 for op in graph.ops})
    assert [is_value_at_home(graph, homes, tensor) for tensor in range(3)] == [True, False, False]
    assert not is_value_at_home(graph, Homes(), 0)


# ----------------------------------------------------------------------- variables that bodies of conditions update
def body(arguments: str, *rows: Any) -> OpGraph:
    """A function; those of its arguments that are variables have names in capitals."""
    graph = OpGraph()
    for index, name in enumerate(arguments.split()):
        add(graph, name, "_Arg", dtype="resource" if name.isupper() else "float32", attrs={"index": index})
    for name, type_, inputs, *more in rows:
        inner: Dict[str, Any] = {"body": {"f": more[0]}} if more and isinstance(more[0], OpGraph) else {}
        add(graph, name, type_, inputs, outputs=len(inputs) if type_ == "IdentityN" else 1, **inner)
    return graph


def kept(function: OpGraph, type_: str = "If", phase: Phase = Phase.APPLY, through: str = "") -> Dict[str, int]:
    """Which variables, other than those at home, the update of an op with this body keeps there.

    The op reads the function's arguments by name: ``V0`` and its gradient ``g0`` are at home 0, ``V1`` and ``g1`` at 1;
    ``through`` is a variable that is handed on by an Identity.
    """
    graph, arguments = OpGraph(), [op.name for op in function.ops if op.type == "_Arg"]
    add(graph, "taken", "Placeholder", dtype="bool", phase=Phase.OTHER)
    for name in arguments:
        add(graph, name, "VarHandleOp" if name.isupper() else "MatMul", dtype="resource" if name.isupper() else "float32",
            phase=Phase.OTHER if name.isupper() else Phase.BACKWARD)
    if through:
        add(graph, "handed", "Identity", [through], "resource", phase=Phase.APPLY)
    inputs = ["handed" if name == through else name for name in arguments]
    add(graph, "update", type_, (["taken"] if type_ == "If" else []) + inputs, phase=phase, body={"then_branch": function})
    homes = Homes({graph.op(name).id: int(name[1]) for name in ("V0", "V1") if name in graph},
                  {graph.tensor(name): int(name[1]) for name in ("g0", "g1") if name in graph})
    return {graph.ops[op].name: home for op, home in kept_in_bodies(graph, homes).items()}


@pytest.mark.parametrize("type_", ["If", "PartitionedCall"])
def test_update_inside_a_condition_keeps_the_optimizers_variables_at_home(type_: str) -> None:
    function = body("V0 M g0 V1 N g1", ("one", "ResourceApplyMomentum", ["V0", "M", "g0"]),
                    ("two", "ResourceApplyMomentum", ["V1", "N", "g1"]))
    assert kept(function, type_) == {"M": 0, "N": 1} and kept(function, type_, Phase.FORWARD) == {}


def test_variable_that_is_handed_on_is_not_followed() -> None:
    assert kept(body("V0 M g0", ("one", "ResourceApplyMomentum", ["V0", "M", "g0"])), through="M") == {}


def test_what_follows_from_a_home_and_from_several_is_the_homes() -> None:
    """As gradients are that are clipped by the global norm."""
    clip = [("norm", "AddN", ["g0", "g1"]), ("clipped", "Mul", ["g1", "norm"])]
    assert kept(body("M g0 g1", *clip, ("write", "AssignAddVariableOp", ["M", "clipped"]))) == {"M": 1}
    assert kept(body("M g0 g1", *clip, ("write", "AssignAddVariableOp", ["M", "norm"]))) == {}
    assert kept(body("M g0 g1", ("write", "ResourceApplyMomentum", ["M", "g0", "g1"]))) == {}


def test_variables_that_are_only_read_have_no_home() -> None:
    assert kept(body("M g0", ("rows", "ResourceGather", ["M", "g0"]))) == {}
    assert kept(body("M x", ("write", "AssignAddVariableOp", ["M", "x"]))) == {}


def test_values_are_followed_one_by_one_through_an_identity_of_several() -> None:
    function = body("M N g0 g1", ("both", "IdentityN", ["g0", "g1"]), ("first", "AssignAddVariableOp", ["M", "both:0"]),
                    ("second", "AssignAddVariableOp", ["N", "both:1"]))
    assert kept(function) == {"M": 0, "N": 1}


def test_what_follows_from_a_variable_that_is_kept_is_kept_too() -> None:
    """Though its first use comes before what decides about it."""
    function = body("S M g1", ("old", "ReadVariableOp", ["M"]), ("slow", "AssignVariableOp", ["S", "old"]),
                    ("write", "AssignAddVariableOp", ["M", "g1"]))
    assert kept(function) == {"S": 1, "M": 1}


def test_update_inside_two_conditions() -> None:
    inner = body("M g0 g1", ("write", "AssignAddVariableOp", ["M", "g1"]))
    outer = body("g0 N g1 M taken", ("both", "AddN", ["g0", "g1"]), ("again", "If", ["taken", "M", "both", "g1"], inner))
    assert kept(outer) == {"M": 1}
    of_both = body("M g0 g1", ("write", "AssignAddVariableOp", ["M", "g0"]))
    outer = body("g0 g1 M taken", ("both", "AddN", ["g0", "g1"]), ("again", "If", ["taken", "M", "both", "g1"], of_both))
    assert kept(outer) == {}


# --------------------------------------------------------------------------------- when a body's values are sent
def sent(*rows: Any) -> Dict[str, Optional[str]]:
    """Value at home -> the op after which it is sent.  Names of such values begin with w, names outside of the body with x."""
    graph = OpGraph()
    for name, type_, inputs, *attrs in rows:
        add(graph, name, type_, inputs, attrs=attrs[0] if attrs else {})
    homes = Homes(ops={op.id: 0 for op in graph.ops if op.name[0] == "w"})
    found = reads_anew(graph, homes, [op.id for op in graph.ops if op.name[0] not in "wx"])
    return {graph.tensor_name(tensor)[:-2]: graph.ops[op].name if op != -1 else None for tensor, op in found}


VALUES = [(f"w{i}", "ReadVariableOp", []) for i in range(4)]


def test_value_is_sent_after_the_reader_before_the_last() -> None:
    """The first two after an op from which their reader follows; the one that reads the value twice waits once."""
    assert sent(*VALUES, ("x", "Placeholder", []), ("a", "Relu", ["x"]), ("b", "Relu", ["x"]), ("r0", "Mul", ["a", "b", "w0"]),
                ("c", "Relu", ["r0"]), ("r1", "Mul", ["c", "w1"]), ("r2", "Mul", ["r1", "w2"]), ("r3", "Mul", ["r2", "w3"]),
                ("again", "Mul", ["r3", "w0"])) == {"w0": "b", "w1": "c", "w2": "r0", "w3": "r1"}


def test_nothing_is_waited_for_where_nothing_leads_to_the_first_readers() -> None:
    assert sent(*VALUES[:2], ("r0", "Mul", ["w0"]), ("r1", "Mul", ["r0", "w1"])) == {"w0": None, "w1": None}
    assert sent(*VALUES[:2], ("x", "Placeholder", []), ("a", "Relu", ["x"]), ("r0", "Mul", ["a", "w0"]),
                ("r1", "Mul", ["r0", "w1"])) == {"w0": "a", "w1": "a"}


JOIN = {GATHER_ATTR: True}


def test_what_joins_the_parts_of_a_variable_reads_when_its_first_user_does() -> None:
    """The body's readers are ``r0`` and then ``r1``, though ``join`` comes before both."""
    assert sent(*VALUES, ("x", "Placeholder", []), ("join", "ConcatV2", ["w0", "w1"], JOIN), ("a", "Relu", ["x"]),
                ("r0", "Mul", ["a", "w2"]), ("c", "Relu", ["r0"]), ("r1", "Mul", ["join", "c"]),
                ("r2", "Mul", ["join", "r1", "w3"]), ("x2", "Relu", ["join"])) == {"w2": "a", "w0": "c", "w1": "c", "w3": "r0"}


def test_parts_that_nobody_reads_are_joined_where_they_are() -> None:
    assert sent(("w0", "ReadVariableOp", []), ("x", "Placeholder", []), ("a", "Relu", ["x"]),
                ("join", "ConcatV2", ["w0", "a"], JOIN), ("x2", "Relu", ["join"])) == {"w0": "a"}


def test_no_value_waits_for_the_padding_of_its_reader_or_for_another_variables_parts() -> None:
    assert sent(*VALUES[:2], ("x", "Placeholder", []), ("a", "Relu", ["x"]), ("b", "Relu", ["x"]), ("pad", "PadV2", ["a", "x"]),
                ("join", "ConcatV2", ["w1", "w1"], JOIN), ("r0", "Mul", ["pad", "w0", "join"]),
                ("r1", "Mul", ["join", "b", "r0"])) == {"w0": "a", "w1": "a"}


def test_nothing_waits_for_ops_of_loops_or_of_branches_that_may_not_be_taken() -> None:
    def behind(name: str) -> Optional[str]:
        return sent(("w0", "ReadVariableOp", []), ("x", "Placeholder", []), ("enter", "Enter", ["x"], {"frame_name": "loop"}),
                    ("inside", "Relu", ["enter"]), ("exit", "Exit", ["inside"]), ("switch", "Switch", ["x"]),
                    ("branch", "Relu", ["switch"]), ("merge", "Merge", ["branch", "x"]), ("late", "Relu", ["merge"]),
                    ("r0", "Mul", [name, "w0"]))["w0"]

    assert [behind(name) for name in ("inside", "switch", "branch")] == [None] * 3
    assert [behind(name) for name in ("merge", "late")] == ["merge", "late"]
