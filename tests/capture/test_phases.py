"""Phases and the cut, on the small scripts of models.py: which ops are what."""
from __future__ import annotations

from typing import Any, Callable, List, Set, Tuple

import pytest
import tensorflow as tf

from tests.capture.models import MODELS, dense, placeholder
from whale_tf.capture.annotations import Annotations, annotations_of
from whale_tf.capture.phases import Phases, find_phases
from whale_tf.capture.record import record
from whale_tf.errors import GraphError
from whale_tf.ir.graph import Op, OpGraph, Phase

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("hooked")


@pytest.fixture(params=[False, True], ids=["reference", "resource"])
def found(request: Any, graph: Any) -> Callable[[str], Tuple[OpGraph, Phases]]:
    """``found(name)``: the op graph and phases of a model, with both kinds of variables."""
    def build(name: str) -> Tuple[OpGraph, Phases]:
        v1.get_variable_scope().set_use_resource(request.param)
        MODELS[name]()
        return phases_of(graph)
    return build


def phases_of(graph: Any) -> Tuple[OpGraph, Phases]:
    ops = record(graph)
    return ops, find_phases(ops, annotations_of(graph))


def in_phase(ops: OpGraph, phase: Phase) -> List[Op]:
    return [op for op in ops.ops if op.phase is phase]


def types(ops: OpGraph, phase: Phase) -> Set[str]:
    """Op types; TensorFlow 1.15 still makes Add in places where 2.x makes AddV2."""
    return {op.type.replace("AddV2", "Add") for op in in_phase(ops, phase)}


def names(ops: OpGraph, phase: Phase) -> Set[str]:
    return {op.name for op in in_phase(ops, phase)}


def targets(ops: OpGraph, phases: Phases) -> Set[Tuple[int, str]]:
    return {(target.call, ops.ops[target.variable].name) for target in phases.targets}


def test_forward_is_the_model(found: Any) -> None:
    ops, _ = found("mlp")
    computing = types(ops, Phase.FORWARD) - {"VariableV2", "VarHandleOp", "Identity", "ReadVariableOp"}
    assert computing == {"MatMul", "Add", "Relu", "SparseSoftmaxCrossEntropyWithLogits", "Const", "Mean"}
    assert {"x", "labels"} == names(ops, Phase.INPUT)
    assert {"hidden/w", "hidden/b", "logits/w", "logits/b", "loss"} <= names(ops, Phase.FORWARD)


def test_backward_is_what_the_gradient_call_made(found: Any) -> None:
    ops, _ = found("mlp")
    assert {name.split("/")[0] for name in names(ops, Phase.BACKWARD)} == {"gradients"}
    assert {"ReluGrad", "MatMul", "Sum", "Fill"} <= types(ops, Phase.BACKWARD)


def test_apply_is_what_follows_the_cut(found: Any) -> None:
    ops, phases = found("mlp")
    apply = names(ops, Phase.APPLY)
    kinds = types(ops, Phase.APPLY)
    assert any(kind.endswith("ApplyAdam") for kind in kinds)
    assert {"L2Loss", "Minimum", "Pow"} <= kinds  # clipping and the schedule
    assert {"train", "train/update", "clip/global_norm", "rate", "global_step", "beta1_power", "beta2_power",
            "hidden/w/Adam", "hidden/w/Adam_1"} <= apply
    assert not {"x", "loss", "summary_loss", "summary_norm", "summary_gradient", "accuracy/total"} & apply
    assert targets(ops, phases) == {(0, "hidden/w"), (0, "hidden/b"), (0, "logits/w"), (0, "logits/b")}
    entered = {ops.ops[edge.op].name for edge in phases.cut}
    assert {"clip/L2Loss", "summary_gradient"} <= entered


def test_cut_is_every_edge_of_a_gradient_that_leaves(found: Any) -> None:
    ops, phases = found("mlp")
    gradients = {tensor for target in phases.targets for tensor in target.tensors}
    region = {op.id for op in ops.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)}
    leaving = {(tensor, op, position) for tensor in gradients for op, position in ops.consumers(tensor)
               if op not in region}
    assert {tuple(edge) for edge in phases.cut} == leaving
    assert len(leaving) == 9  # 4 norms, 4 clipped gradients, 1 summary
    for op in region:
        assert all(ops.ops[source].phase in (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT)
                   for source in ops.predecessors(ops.ops[op]))


def test_init_save_and_the_rest(found: Any) -> None:
    ops, _ = found("mlp")
    init, save, other = (names(ops, phase) for phase in (Phase.INIT, Phase.SAVE, Phase.OTHER))
    assert {variable + "/Assign" for variable in ("hidden/w", "global_step", "beta1_power", "logits/b/Adam")} <= init
    assert {"init", "hidden/w/Initializer/random_uniform"} <= init
    assert {"saver/SaveV2", "saver/RestoreV2", "saver/restore_all", "saver/Const", "saver/filename"} <= save
    assert {op.name for op in ops.ops if op.name.startswith("saver/")} <= save
    assert {"summary_loss", "summary_norm", "summary_gradient", "summaries/summaries", "accuracy/total"} <= other
    assert not {"MatMul", "ApplyAdam", "ResourceApplyAdam", "Assign", "AssignVariableOp"} & types(ops, Phase.OTHER)


def test_finding_phases_twice_gives_the_same(found: Any, graph: Any) -> None:
    ops, phases = found("mlp")
    first = [op.phase for op in ops.ops]
    again = find_phases(ops, annotations_of(graph))
    assert [op.phase for op in ops.ops] == first
    assert again[:4] == phases[:4]


def test_momentum_slots_are_apply(found: Any) -> None:
    ops, phases = found("momentum")
    assert {"a/w/Momentum", "a/b/Momentum", "train/momentum", "train/learning_rate", "train"} <= names(ops, Phase.APPLY)
    assert [len(target.tensors) for target in phases.targets] == [1, 1]
    assert not any(target.is_sparse for target in phases.targets)


def test_two_optimizers(found: Any) -> None:
    ops, phases = found("gan")
    assert targets(ops, phases) == {(0, "shared/discriminator/w"), (0, "shared/discriminator/b"), (1, "generator/w"),
                                    (1, "generator/b")}
    assert {"d_train", "g_train"} <= names(ops, Phase.APPLY)
    assert {"d_loss", "g_loss", "generator/MatMul"} <= names(ops, Phase.FORWARD)
    assert {ops.ops[edge.op].name.split("/")[0] for edge in phases.cut} == {"d_train", "g_train"}
    assert not any("gradients" in name for name in names(ops, Phase.APPLY))


def test_second_update_waits_for_the_first(found: Any) -> None:
    ops, phases = found("gan")
    assert phases.waits
    assert {ops.ops[wait.on].name for wait in phases.waits} == {"d_train"}
    assert {ops.ops[wait.op].phase for wait in phases.waits} == {Phase.BACKWARD}
    for wait in phases.waits:
        assert wait.on in ops.ops[wait.op].control_inputs


def test_gradient_penalty_has_no_inner_cut(found: Any) -> None:
    ops, phases = found("gradient_penalty")
    assert {call for call, _ in targets(ops, phases)} == {1}
    assert {"penalty", "Square", "norm/Sqrt", "loss"} <= names(ops, Phase.FORWARD)
    backward = names(ops, Phase.BACKWARD)
    assert "inner/a/MatMul_grad/MatMul" in backward
    assert {name.split("/")[0] for name in backward} == {"inner", "gradients"}
    assert {ops.ops[edge.op].name.split("/")[0] for edge in phases.cut} == {"train"}


def test_gradient_of_a_variable_on_the_way_to_another_loss_is_no_cut(found: Any) -> None:
    ops, phases = found("inner_update")
    assert targets(ops, phases) == {(0, "w"), (1, "w")}
    inner = next(target for target in phases.targets if target.call == 0)
    assert "stepped" in names(ops, Phase.FORWARD)
    assert [ops.ops[edge.op].name.split("/")[0] for edge in phases.cut] == ["train"]
    assert inner.tensors[0] not in {edge.tensor for edge in phases.cut}


def test_gradient_used_inside_and_applied_too_is_cut_only_where_it_leaves(graph: Any) -> None:
    x = placeholder()
    w = v1.get_variable("w", [8, 1])
    first = tf.reduce_mean(tf.square(tf.matmul(x, w)))
    inner = tf.gradients(first, w, name="inner")[0]
    second = tf.reduce_sum(tf.square(inner), name="second")
    outer = tf.gradients(second, w, name="outer")[0]
    v1.train.GradientDescentOptimizer(0.1).apply_gradients([(inner + outer, w)], name="train")
    ops, phases = phases_of(graph)
    edges = {(ops.tensor_name(edge.tensor), ops.ops[edge.op].name) for edge in phases.cut}
    assert edges == {(inner.name, "add"), (outer.name, "add")}
    assert "second" in names(ops, Phase.FORWARD)


def test_tied_and_sparse_gradients(found: Any) -> None:
    ops, phases = found("tied_embedding")
    assert targets(ops, phases) == {(0, "table"), (0, "hidden/w"), (0, "hidden/b")}


def test_sparse_gradient_is_cut_at_values_and_indices(found: Any) -> None:
    ops, phases = found("sparse_embedding")
    target, = phases.targets
    assert target.is_sparse
    assert {edge.tensor for edge in phases.cut} >= set(target.tensors[:2])
    assert any("SparseApply" in kind for kind in types(ops, Phase.APPLY))
    assert "UnsortedSegmentSum" in types(ops, Phase.APPLY)  # the optimizer adds up repeated indices, after the cut


def test_batch_statistics_are_written_outside(found: Any) -> None:
    ops, phases = found("batch_norm")
    writes = [op for op in ops.ops if op.type in ("AssignSub", "AssignSubVariableOp")]
    assert [op.phase for op in writes] == [Phase.OTHER]
    assert {ops.ops[wait.on].name for wait in phases.waits} == {"updates"}
    assert {ops.ops[wait.op].phase for wait in phases.waits} == {Phase.FORWARD, Phase.BACKWARD}
    assert ops.op("average").phase is Phase.OTHER
    assert ops.op("updates").phase is Phase.OTHER
    assert ops.op("moments/mean").phase is Phase.FORWARD


@pytest.mark.parametrize("functional", [False, True])
def test_loop_helpers_of_the_gradient_are_forward(found: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    ops, phases = found("loop")
    helpers = {op.type.replace("AddV2", "Add") for op in in_phase(ops, Phase.FORWARD) if "_whale_phase" in op.attrs}
    if functional:
        assert helpers == {"Const", "EmptyTensorList"}
        assert {op.name: op.phase for op in ops.ops if op.type in ("While", "StatelessWhile")} == {
            "loop": Phase.FORWARD, "gradients/loop_grad/loop_grad": Phase.BACKWARD}
    else:
        counter = {"Const", "Enter", "Merge", "Switch", "Add", "Exit", "NextIteration"}
        assert helpers == counter | {"StackV2", "StackPushV2"}
        assert not {"StackPopV2", "TanhGrad"} & types(ops, Phase.FORWARD)
        assert {"StackPopV2", "TanhGrad"} <= types(ops, Phase.BACKWARD)
    assert targets(ops, phases) == {(0, "w")}
    assert phases.waits == phases.writes_inside == ()


@pytest.mark.parametrize("functional", [False, True])
def test_condition(found: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    ops, phases = found("condition")
    expected = {"If"} if functional else {"Switch", "Merge"}
    assert expected <= types(ops, Phase.FORWARD)
    assert {ops.ops[edge.op].name.split("/")[0] for edge in phases.cut} == {"train"}


def test_function_call(found: Any) -> None:
    ops, phases = found("function_call")
    assert "StatefulPartitionedCall" in types(ops, Phase.FORWARD)
    assert {"PartitionedCall", "StatefulPartitionedCall"} & types(ops, Phase.BACKWARD)
    assert targets(ops, phases) == {(0, "w")}
    assert phases.writes_inside == ()


@pytest.mark.parametrize("functional", [False, True])
def test_second_order_through_control_flow(found: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    ops, phases = found("second_order")
    assert targets(ops, phases) == {(1, "w")}
    assert {name.split("/")[0] for name in names(ops, Phase.BACKWARD)} == {"inner", "gradients"}
    assert {ops.ops[edge.op].name.split("/")[0] for edge in phases.cut} == {"train"}
    assert {"loss", "Square"} <= names(ops, Phase.FORWARD)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_rules_that_hold_for_every_graph(found: Any, graph: Any, name: str) -> None:
    ops, phases = found(name)
    region = {op.id for op in ops.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)}
    waits = {tuple(wait) for wait in phases.waits}
    for op_id in region:  # N needs nothing but inputs, and writes that it waits for
        for source in ops.predecessors(ops.ops[op_id]):
            assert source in region or ops.ops[source].phase is Phase.INPUT or (op_id, source) in waits
    for op in ops.ops:
        if op.phase is Phase.BACKWARD:
            assert op.attrs["_whale_phase"] == "backward"
        if op.phase is Phase.APPLY:  # the update needs no summaries, no initialisers, no checkpoints
            assert all(ops.ops[source].phase not in (Phase.INIT, Phase.SAVE) for source in ops.predecessors(op))
            assert all(ops.producer(tensor).phase is not Phase.OTHER for tensor in op.inputs)
    trained = {ops.ops[target.variable].name for target in phases.targets}
    assert trained == {variable.op.name for variable in v1.trainable_variables()}
    for variable in phases.variables:
        assert ops.ops[variable.initializer].phase is Phase.INIT


def test_input_pipeline(found: Any) -> None:
    ops, _ = found("dataset")
    assert {"IteratorGetNext", "IteratorV2"} <= types(ops, Phase.INPUT)
    assert all(op.phase is Phase.INPUT for op in ops.ops if op.type.endswith("Dataset"))
    assert "MakeIterator" in types(ops, Phase.INIT)
    assert {"scaled", "scaled/y"} <= names(ops, Phase.FORWARD)
    assert not {"scaled", "scaled/y", "a/w"} & names(ops, Phase.INPUT)


def test_queue_input(graph: Any) -> None:
    queue = tf.queue.FIFOQueue(10, [tf.float32], [[8]])
    produced = tf.ones([8], name="produced")
    queue.enqueue(produced, name="enqueue")
    x = queue.dequeue_many(4, name="dequeue")
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(dense(x, 1, "a"), name="loss"))
    ops, _ = phases_of(graph)
    assert {"produced", "enqueue", "dequeue", "fifo_queue"} <= names(ops, Phase.INPUT)


def test_placeholder_with_a_computed_default_is_part_of_the_model(graph: Any) -> None:
    rate = v1.placeholder_with_default(0.5, [], "rate")
    h = v1.placeholder_with_default(dense(placeholder(), 4, "a"), [None, 4], "h")
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(dense(h * rate, 1, "b")))
    ops, _ = phases_of(graph)
    assert ops.op("rate").phase is Phase.INPUT
    assert {"h", "a/MatMul", "b/MatMul"} <= names(ops, Phase.FORWARD)


def test_writes_around_the_update(found: Any) -> None:
    """Weight decay before it and an average of the weights after it belong to it; a reset that a user runs does not."""
    ops, _ = found("decoupled_decay")
    phase_of_write = {op.name: op.phase for op in ops.ops
                      if op.type in ("AssignSub", "AssignSubVariableOp", "Assign", "AssignVariableOp")}
    decay = [phase for name, phase in phase_of_write.items() if name in ("decay", "AssignSubVariableOp")]
    average = [phase for name, phase in phase_of_write.items() if name.startswith("ExponentialMovingAverage/")]
    assert decay == [Phase.APPLY]
    assert average == [Phase.APPLY]
    assert [phase for name, phase in phase_of_write.items() if name.startswith("reset")] == [Phase.OTHER]
    assert phase_of_write["w/Assign"] is Phase.INIT


def test_write_inside_a_condition_of_the_forward_pass_is_reported(graph: Any, control_flow: Any) -> None:
    control_flow(True)
    x = placeholder()
    average = v1.get_variable("average", [], use_resource=True, trainable=False)

    def training() -> Any:
        with tf.control_dependencies([average.assign(tf.reduce_mean(x))]):
            return tf.identity(x)

    h = v1.cond(tf.reduce_sum(x) > 0, training, lambda: x, name="condition")
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(dense(h, 1, "a")))
    ops, phases = phases_of(graph)
    assert [ops.ops[op].type for op in phases.writes_inside] == ["If"]


def test_value_written_on_the_way_stays_outside(graph: Any) -> None:
    """A state whose new value the forward pass uses is written once, outside N."""
    x = placeholder()
    state = v1.get_variable("state", [], use_resource=True, trainable=False)
    with tf.control_dependencies([state.assign_add(1.0)]):
        scale = state.read_value()
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(dense(x * scale, 1, "a")))
    ops, phases = phases_of(graph)
    write, = [op for op in ops.ops if op.type == "AssignAddVariableOp"]
    assert write.phase is Phase.OTHER
    assert {ops.ops[wait.on].name for wait in phases.waits} == {write.name}


def test_written_reference_that_is_used_stays_outside(graph: Any) -> None:
    x = placeholder()
    state = v1.get_variable("state", [], use_resource=False, trainable=False)
    scale = v1.assign_add(state, 1.0, name="write")
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(dense(x * scale, 1, "a")))
    ops, phases = phases_of(graph)
    assert ops.op("write").phase is Phase.OTHER
    assert phases.writes_inside == ()


def test_state_of_the_forward_pass_is_no_part_of_an_update_that_waits_for_it(graph: Any) -> None:
    h = dense(placeholder(), 1, "a")
    average = v1.get_variable("average", [], use_resource=True, trainable=False)
    count = v1.get_variable("count", [], use_resource=True, trainable=False)
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(tf.reduce_mean(tf.square(h)))
    updates = [average.assign(tf.reduce_mean(h)).op, count.assign_add(1.0).op]
    with tf.control_dependencies(updates):
        optimizer.apply_gradients(pairs)
    ops, _ = phases_of(graph)
    assert [ops.op(update.name).phase for update in updates] == [Phase.OTHER, Phase.APPLY]
    assert [ops.op(name).phase for name in ("average", "count")] == [Phase.OTHER, Phase.APPLY]


def test_what_the_model_enqueues_is_no_input(graph: Any) -> None:
    h = dense(placeholder(), 4, "a")
    tf.queue.FIFOQueue(10, [tf.float32]).enqueue(h)
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h))
    ops, _ = phases_of(graph)
    assert ops.op(h.op.name).phase is Phase.FORWARD
    assert ops.op("a/MatMul").phase is Phase.FORWARD


def test_update_under_a_condition(graph: Any, control_flow: Any) -> None:
    """Loss scaling applies the gradients only if they are finite."""
    control_flow(False)
    v1.get_variable_scope().set_use_resource(True)
    loss = tf.reduce_mean(dense(placeholder(), 1, "a"))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss)
    finite = tf.reduce_all(tf.math.is_finite(pairs[0][0]), name="finite")
    v1.cond(finite, lambda: optimizer.apply_gradients(pairs), tf.no_op, name="guarded")
    ops, _ = phases_of(graph)
    applies = [op for op in ops.ops if op.type == "ResourceApplyGradientDescent"]
    assert [op.phase for op in applies] == [Phase.APPLY, Phase.APPLY]
    assert {"finite", "guarded/pred_id"} <= names(ops, Phase.APPLY)


def test_without_gradient_calls_nothing_is_forward(graph: Any) -> None:
    dense(placeholder(), 2, "a")
    v1.global_variables_initializer()
    ops, phases = phases_of(graph)
    assert phases.targets == phases.cut == ()
    assert {op.phase for op in ops.ops} == {Phase.INPUT, Phase.INIT, Phase.OTHER}


def test_annotations_of_another_graph_are_refused(graph: Any) -> None:
    MODELS["momentum"]()
    with tf.Graph().as_default() as other:
        ops = record(other)
    with pytest.raises(GraphError, match="'a/w:0'.*another graph"):
        find_phases(ops, annotations_of(graph))
    assert find_phases(ops, Annotations()).targets == ()


@pytest.mark.parametrize("lost", [None, (None, 3)])
@pytest.mark.parametrize("resource", [False, True])
def test_gradient_has_the_shape_of_its_variable(graph: Any, lost: Any, resource: bool) -> None:
    """Tapes lose it where the batch has any size (the kernel's in ``tf.tensordot``)."""
    w = v1.get_variable("w", [8, 3], use_resource=resource)
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(tf.reduce_mean(tf.matmul(placeholder(), w)))
    optimizer.apply_gradients(pairs)
    ops = record(graph)
    gradient = ops.tensor(pairs[0][0].name)
    ops.tensors[gradient] = ops.tensors[gradient]._replace(shape=lost)
    assert find_phases(ops, annotations_of(graph)).targets[0].tensors == (gradient,)
    assert ops.tensors[gradient].shape == (8, 3)


def test_gradient_of_a_python_function_brings_in_no_data(graph: Any) -> None:
    """It takes the values from where Python has kept them, and from no variable."""
    w = v1.get_variable("w", [3, 1], use_resource=True)
    loss = tf.ensure_shape(tf.py_function(tf.reduce_sum, [tf.matmul(v1.placeholder(tf.float32, [None, 3]), w)], tf.float32), [])
    v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    ops, _ = phases_of(graph)
    assert [op.phase for op in ops.ops if op.type == "EagerPyFunc"] == [Phase.FORWARD, Phase.BACKWARD]


def test_gradients_that_nobody_asked_for_are_unused(graph: Any) -> None:
    """TensorFlow makes the gradient of the constant, too; that of the input is asked for, and may be fetched."""
    x = v1.placeholder(tf.float32, [None, 3])
    w = v1.get_variable("w", [3, 1], use_resource=True)
    loss = tf.reduce_sum(tf.matmul(x, w) * tf.constant(0.5, name="half"))
    asked = tf.gradients(loss, [x])[0]
    v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    ops, _ = phases_of(graph)
    unused = in_phase(ops, Phase.UNUSED)
    assert any("mul_grad" in op.name for op in unused)
    assert all(ops.ops[user].phase is Phase.UNUSED for op in unused for t in op.outputs for user, _ in ops.consumers(t))
    assert not {asked.op.name, asked.op.inputs[0].op.name} & names(ops, Phase.UNUSED)
