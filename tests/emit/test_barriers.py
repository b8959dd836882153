"""Which ops wait for a barrier, and for which ops a barrier waits: the schedule's order, looked at node by node."""
from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import pytest

from tests.emit.staged import context_of
from tests.passes.drawings import chain, plan
from whale_tf.emit.order import Order
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Phase
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program
from whale_tf.plan import Plan
from whale_tf.program import Clone


def ordered(step: TrainingStep, chosen: Plan, is_called: bool = False, sources: Sequence[str] = ()) -> Tuple[Order, Any]:
    context = context_of(step, chosen, is_called)
    return Order(context, Nodes(context.edit), [step.graph.tensor(name) for name in sources]), context.edit


def barriers(edit: Any) -> Dict[str, List[str]]:
    """Barrier -> what it waits for, with the tensors that Identities hand on in their place."""
    def handed_on(wait: str) -> str:
        node = edit.nodes.get(wait)
        return node.input[0] if node is not None and node.op == "Identity" else wait

    return {name.replace("whale/order/", ""): [handed_on(wait) for wait in waits]
            for name, waits in edit.waits.items() if edit.nodes[name].op == "NoOp"}


def test_what_barriers_wait_for() -> None:
    """For the last floating results of a step, and for the additions of its gradients."""
    _, edit = ordered(chain(1), plan([1], 3))
    first = ["whale/g0_m0_r0/grad0:0", "whale/g0_m0_r0/back0:0"]
    later = ["whale/g0_m1_r0/grad0:0", "whale/g0_m1_r0/back0:0", "whale/g0_r0/accumulate/grad0_0/1"]
    assert barriers(edit) == {"t0_g0_r0/before_forward1": first, "t0_g0_r0/before_backward1": first,
                              "t0_g0_r0/before_forward2": later, "t0_g0_r0/before_backward2": later}


def test_first_op_waits_by_an_identity() -> None:
    order, edit = ordered(chain(1), plan([1], 2))
    clone = Clone(0, 1, 0)
    assert order.barriers(0, clone) is None and order.barriers(0, Clone(0, 0, 0)) is None
    order.gate(0, clone)
    gates = {name: (node.input[0], edit.waits[name]) for name, node in edit.nodes.items() if "/into/" in name}
    assert list(gates.values()) == [("x", ["whale/order/t0_g0_r0/before_forward1"]),
                                    ("loss", ["whale/order/t0_g0_r0/before_backward1"])]
    into = "whale/order/into/g0_m1_r0/"
    assert list(gates) == [into + "layer0", into + "loss_grad"]
    assert list(edit.node("whale/g0_m1_r0/layer0").input) == [into + "layer0", "w0"]
    assert list(edit.node("whale/g0_m1_r0/loss_grad").input) == [into + "loss_grad"]
    before = len(edit.nodes)
    order.gate(0, Clone(0, 0, 0))
    assert len(edit.nodes) == before


def with_first(step: TrainingStep, name: str, type_: str, inputs: Any, shape: Any, dtype: str, **fields: Any) -> TrainingStep:
    """The step with one more op that begins and ends the forward step."""
    graph, region = step.graph, step.region
    op = graph.add(name, type_, [graph.tensor(tensor) for tensor in inputs], [(shape, dtype)] if dtype else [],
                   phase=Phase.FORWARD, **fields)
    return step._replace(region=region._replace(
        ops=region.ops + (op.id,), task_graph=[*region.task_graph, 0], batch_level=region.batch_level | {op.id}))


def test_ops_that_the_optimizer_does_not_fuse_wait_themselves() -> None:
    """Those that compute no floating point numbers, or from none, and those of loops, which no barrier waits for."""
    step = with_first(chain(1), "count", "Size", ["x"], (), "int32")
    step = with_first(step, "drawn", "RandomUniform", [], (2,), "float32")
    step = with_first(step, "enter", "Enter", ["x"], (None, 2), "float32", attrs={"frame_name": "loop"})
    order, edit = ordered(step, plan([1], 2))
    waits = {name: ["whale/order/t0_g0_r0/before_forward1"] for name in ("count", "drawn", "enter")}
    assert order.barriers(0, Clone(0, 1, 0)) == waits
    order.gate(0, Clone(0, 1, 0))
    assert [name.rpartition("/")[2] for name in edit.nodes if "/into/" in name] == ["layer0", "loss_grad"]
    chosen = plan([1], 2, schedule="gpipe")  # where a forward step comes after another
    _, edit = ordered(step, chosen)
    ends = barriers(edit)["t0_g0_r0/before_forward1"]
    assert ends == ["whale/g0_m0_r0/loss:0", "whale/g0_m0_r0/count", "whale/g0_m0_r0/drawn:0"]


@pytest.mark.parametrize("first", ["Cast", "Reshape"])
def test_parts_of_the_mini_batch_are_waited_for_by_what_the_optimizer_does_not_move(first: str) -> None:
    """It would compute an Identity, or an elementwise op, of all parts before they are divided, and so make a cycle."""
    step = with_first(chain(1), "label", first, ["x"], (None, 2), "int32")
    order, edit = ordered(step, plan([1], 2), sources=["x"])
    order.gate(0, Clone(0, 1, 0))
    types = {name.rpartition("/")[2]: node.op for name, node in edit.nodes.items() if "/into/" in name}
    assert types == {"layer0": "EnsureShape", "label": "EnsureShape", "loss_grad": "Identity"}
    assert not order.barriers(0, Clone(0, 1, 0))
    assert list(edit.node("whale/g0_m1_r0/label").input) == ["whale/order/into/g0_m1_r0/label"]


def test_first_floating_operand_is_no_reference() -> None:
    step = chain(1)
    layer, variable = step.graph.op("layer0"), step.graph.tensor("w0")
    layer.inputs = (variable, step.graph.tensor("x"))
    step.graph.tensors[variable] = step.graph.tensors[variable]._replace(dtype="float32_ref")
    order, edit = ordered(step, plan([1], 2))
    order.gate(0, Clone(0, 1, 0))
    assert list(edit.node("whale/g0_m1_r0/layer0").input) == ["w0", "whale/order/into/g0_m1_r0/layer0"]


def test_calls_wait_themselves() -> None:
    order, edit = ordered(chain(1), plan([1], 2), is_called=True)
    clone, barrier = Clone(0, 1, 0), "whale/order/t0_g0_r0/before_"
    assert order.barriers(0, clone) == {"t0_forward": [barrier + "forward1"], "t0_backward": [barrier + "backward1"]}
    assert barriers(edit) == {"t0_g0_r0/before_forward1": ["whale/g0_m0_r0/t0_backward"],
                              "t0_g0_r0/before_backward1": ["whale/g0_m0_r0/t0_backward"]}
    program = compile_program(chain(1), plan([1], 2))
    found = [order.before(body, clone) for body in program.bodies if body.name in ("t0_once", "t0_forward")]
    assert found == [[], [barrier + "forward1"]]


def test_each_barrier_is_on_the_device_of_its_stage() -> None:
    _, edit = ordered(chain(2), plan([1, 1], 2, schedule="gpipe"))
    devices = {name: node.device for name, node in edit.nodes.items() if node.op == "NoOp"}
    assert devices == {f"whale/order/t{stage}_g0_r0/before_{kind}": f"CPU:{stage}"
                       for stage in range(2) for kind in ("forward1", "backward0", "backward1")}


def test_update_over_processes_is_sent_without_a_barrier() -> None:
    """A broadcast waits for the variables' writes instead."""
    step = chain(1, momentum=True)._replace(processes=2)
    chosen = plan([1], 1, 2, zero="v1", processes=((0,), (1,)), tasks={
        0: {"variables": "shared", "homes": {"v0": 0}}}).local_part(0)
    program = compile_program(step, chosen)
    assert [call for call in program.calls if call.after]
    assert not ordered(step, chosen)[1].nodes
