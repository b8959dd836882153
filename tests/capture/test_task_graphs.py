"""Which TaskGraph an op is in, and whether TaskGraphs can be stages."""
from __future__ import annotations

from typing import Any, Dict, Tuple

import numpy as np
import pytest
import tensorflow as tf

from tests.capture.models import dense, placeholder
from whale_tf.capture.annotations import Annotations, annotate, annotations_of, forget_default_strategy, set_default_strategy
from whale_tf.capture.phases import find_phases
from whale_tf.capture.record import record
from whale_tf.capture.task_graphs import TaskGraphs, assign, check_convex, find_detour
from whale_tf.errors import AnnotationError
from whale_tf.ir.graph import OpGraph, Phase

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("hooked")


def minimize(loss: Any) -> None:
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")


def assigned(graph: Any) -> Tuple[OpGraph, TaskGraphs]:
    ops = record(graph)
    find_phases(ops, annotations_of(graph))
    return ops, assign(ops, annotations_of(graph))


def by_name(ops: OpGraph, task_graphs: TaskGraphs) -> Dict[str, int]:
    return {op.name: task_graphs.of[op.id] for op in ops.ops}


@pytest.mark.parametrize("resource", [False, True])
def test_two_stages(graph: Any, resource: bool) -> None:
    v1.get_variable_scope().set_use_resource(resource)
    x = placeholder()
    scaled = tf.multiply(x, 2.0, name="scaled")
    with annotate(graph, "replicate", 1):
        h = dense(scaled, 8, "first", tf.nn.relu)
    with annotate(graph, "replicate", 1):
        y = dense(h, 2, "second")
    minimize(tf.reduce_mean(tf.square(y), name="loss"))
    ops, task_graphs = assigned(graph)
    of = by_name(ops, task_graphs)
    assert of["scaled"] == of["scaled/y"] == of["first/MatMul"] == of["first/Relu"] == 0  # no producer: the consumer's
    assert of["second/MatMul"] == of["loss"] == of["Square"] == 1  # unannotated: the producer's
    assert of["gradients/first/Relu_grad/ReluGrad"] == of["gradients/first/MatMul_grad/MatMul_1"] == 0
    assert of["gradients/second/MatMul_grad/MatMul"] == of["gradients/Square_grad/Mul"] == 1
    initial = [op for op in ops.ops if op.type == "Fill" and op.phase is Phase.BACKWARD]  # the loss's own gradient
    assert [(op.forward, task_graphs.of[op.id]) for op in initial] == [(-1, 1)]
    assert of["x"] == of["train"] == of["first/w/Assign"] == -1
    homes = {ops.ops[variable].name: home for variable, home in task_graphs.of_variables.items()}
    assert homes == {"first/w": 0, "first/b": 0, "second/w": 1, "second/b": 1}
    assert of["first/w"] == 0
    for op in ops.ops:
        assert (task_graphs.of[op.id] >= 0) == (op.phase in (Phase.FORWARD, Phase.BACKWARD)), op
    assert find_detour(ops, task_graphs) is None
    check_convex(ops, task_graphs, [item.name for item in annotations_of(graph).items])


def test_backward_ops_follow_their_forward_ops_wherever_gradients_are_taken(graph: Any) -> None:
    with annotate(graph, "replicate", 1):
        h = dense(placeholder(), 8, "first")
    with annotate(graph, "replicate", 1):
        loss = tf.reduce_mean(dense(h, 2, "second"))
        minimize(loss)
    ops, task_graphs = assigned(graph)
    assert by_name(ops, task_graphs)["gradients/first/MatMul_grad/MatMul_1"] == 0


def test_sums_of_gradients_come_after_their_parts(graph: Any) -> None:
    """An activation used by stages 1 and 2: its gradients are added in stage 1, where backward comes later."""
    with annotate(graph, "replicate", 1):
        h = dense(placeholder(), 8, "first")
    with annotate(graph, "replicate", 1):
        k = dense(h, 8, "second")
    with annotate(graph, "replicate", 1):
        y = tf.add(dense(k, 8, "third"), h)
    minimize(tf.reduce_mean(y))
    ops, task_graphs = assigned(graph)
    sums = [task_graphs.of[op.id] for op in ops.ops if op.type == "AddN" and op.phase is Phase.BACKWARD]
    assert sums == [1]


def test_backward_ops_without_a_forward_op_on_a_hand_made_graph() -> None:
    ops = OpGraph()

    def add(name: str, phase: Phase, inputs: Tuple[int, ...] = (), task_graph: int = -1) -> int:
        return ops.add(name, "Any", inputs, [((), "float32")], phase=phase, task_graph=task_graph).outputs[0]

    first = add("first", Phase.FORWARD, (), 0)
    second = add("second", Phase.FORWARD, (first,), 1)
    third = add("third", Phase.FORWARD, (second,), 2)
    constant = add("constant", Phase.BACKWARD)
    start = add("start", Phase.BACKWARD, (first, third))
    add("from_constant", Phase.BACKWARD, (constant, start))
    annotations = Annotations()
    for _ in range(3):
        annotations.enter("replicate", 1, None)
    of = by_name(ops, assign(ops, annotations))
    assert of == {"first": 0, "second": 1, "third": 2, "start": 2, "from_constant": 2, "constant": 2}


def test_shared_variable_lives_with_its_first_reader(graph: Any) -> None:
    ids = placeholder([None, 5], "ids", tf.int32)
    for resource in (False, True):
        with v1.variable_scope("resource" if resource else "reference", use_resource=resource):
            table = v1.get_variable("table", [11, 4])
            unread = v1.get_variable("unread", [11, 4])
            with annotate(graph, "replicate", 1, "embed"):
                h = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
            with annotate(graph, "replicate", 1, "middle"):
                h = dense(h, 4, "middle", tf.tanh)
            with annotate(graph, "replicate", 1, "logits"):
                logits = tf.matmul(h, table, transpose_b=True)
            minimize(tf.reduce_mean(logits))
        ops, task_graphs = assigned(graph)
        home = {ops.ops[variable].name: index for variable, index in task_graphs.of_variables.items()}
        assert home[table.op.name] == 0
        assert unread.op.name not in home
        assert find_detour(ops, task_graphs) is None


def test_variable_created_in_a_later_stage_than_its_first_reader(graph: Any) -> None:
    v1.get_variable_scope().set_use_resource(False)
    x = placeholder()
    with annotate(graph, "replicate", 1, "first"):
        h = tf.tanh(x)
    with annotate(graph, "replicate", 1, "second"):
        w = v1.get_variable("w", [8, 8])
        k = tf.matmul(h, w)
    with annotate(graph, "replicate", 1, "first"):
        again = tf.matmul(x, w)
    minimize(tf.reduce_mean(k) + tf.reduce_mean(again))
    ops, task_graphs = assigned(graph)
    assert task_graphs.of_variables == {ops.op("w").id: 0}
    assert find_detour(ops, task_graphs) is None  # reading a variable is no way from one TaskGraph to another


@pytest.mark.parametrize("resource", [False, True])
def test_block_of_variables_joins_the_block_that_uses_them(graph: Any, resource: bool) -> None:
    v1.get_variable_scope().set_use_resource(resource)
    with annotate(graph, "replicate", 2):
        h = dense(placeholder(), 8, "first")
    with annotate(graph, "split", 2):
        w = v1.get_variable("w", [4, 16])
        w = tf.reshape(w, [8, 8], name="moved")
    with annotate(graph, "split", 2):
        h = tf.matmul(h, w, name="product")
    with annotate(graph, "split", 2, "alone"):  # what no other annotation uses, un-annotated ops follow
        v = v1.get_variable("v", [8, 8])
    minimize(tf.reduce_mean(tf.matmul(h, v, name="last")) + tf.nn.l2_loss(w))
    ops, task_graphs = assigned(graph)
    assert [block.name for block in task_graphs.blocks] == ["replicate_0", "split_2", "alone"]
    of = by_name(ops, task_graphs)
    assert (of["w"], of["moved"], of["product"], of["v"], of["last"]) == (1, 1, 1, 2, 2)


@pytest.mark.parametrize("functional", [False, True])
def test_loops_and_their_helpers_are_in_one_task_graph(graph: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    with annotate(graph, "replicate", 1):
        h = dense(placeholder(), 8, "first")
    with annotate(graph, "replicate", 1):
        _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(2.0 * h)), [0, h], name="loop")
    with annotate(graph, "replicate", 1):
        loss = tf.reduce_mean(dense(h, 2, "last"))
        minimize(loss)
    ops, task_graphs = assigned(graph)
    found = {task_graphs.of[op.id] for op in ops.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)
             and (op.type in ("While", "StatelessWhile", "Merge", "StackPushV2", "StackV2", "StackPopV2", "TanhGrad",
                              "EmptyTensorList"))}
    assert found == {1}
    assert find_detour(ops, task_graphs) is None


def test_loops_of_two_stages_use_one_array(graph: Any, control_flow: Any) -> None:
    control_flow(False)
    w = v1.get_variable("w", [], use_resource=True)
    with annotate(graph, "replicate", 1):
        array = v1.TensorArray(tf.float32, 3, name="array")
        _, array = v1.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.write(i, w)), [0, array], name="first")
    with annotate(graph, "replicate", 1):
        _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * array.read(i)), [0, w], name="second")
    minimize(h)
    with pytest.raises(AnnotationError, match="loops of TaskGraphs 0, 1 use the tensor array 'array', which only one device can"):
        assigned(graph)


def test_default_strategy_takes_what_is_not_annotated(graph: Any) -> None:
    h = dense(placeholder(), 8, "first")
    with annotate(graph, "split", 2, "experts"):
        h = dense(h, 8, "second")
    minimize(tf.reduce_mean(dense(h, 2, "third"), name="loss"))
    set_default_strategy(graph, "replicate", 2)
    ops, task_graphs = assigned(graph)
    of = by_name(ops, task_graphs)
    assert (of["first/MatMul"], of["second/MatMul"], of["third/MatMul"], of["loss"]) == (1, 0, 1, 1)
    detour = find_detour(ops, task_graphs)
    assert detour is not None  # legal without micro-batches; who plans decides


def test_default_strategy_takes_nothing_that_a_gradient_adds_to_a_loop(graph: Any) -> None:
    """The forward loop counts its iterations and keeps tensors for the backward one."""
    before = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        set_default_strategy(graph, "replicate", 2)
        h = dense(placeholder(), 8, "first")
        with annotate(graph, "split", 2, "experts"):
            h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(dense(h, 8, "second"))), (0, h))[1]
        minimize(tf.reduce_mean(dense(h, 2, "third"), name="loss"))
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    ops, task_graphs = assigned(graph)
    of, added = by_name(ops, task_graphs), [op for op in ops.ops if op.name.startswith("gradients") and op.phase is Phase.FORWARD]
    assert {"StackV2", "StackPushV2", "Enter", "Merge", "Const"} <= {op.type for op in added}
    assert {of[op.name] for op in added} == {of["while/second/MatMul"]} != {of["third/MatMul"]}


def test_default_strategy_that_was_taken_back_takes_nothing(graph: Any) -> None:
    set_default_strategy(graph, "replicate", 2)
    h = dense(placeholder(), 8, "first")
    with annotate(graph, "split", 2, "experts"):
        h = dense(h, 8, "second")
    with annotate(graph, "replicate", 2, "rest"):
        loss = tf.reduce_mean(dense(h, 2, "third"), name="loss")
    minimize(loss)
    forget_default_strategy(graph)
    ops, task_graphs = assigned(graph)
    of = by_name(ops, task_graphs)
    assert (of["first/MatMul"], of["second/MatMul"], of["third/MatMul"], of["loss"]) == (0, 0, 1, 1)


def test_without_annotations_nothing_is_assigned(graph: Any) -> None:
    minimize(tf.reduce_mean(dense(placeholder(), 1, "a")))
    ops, task_graphs = assigned(graph)
    assert set(task_graphs.of) == {-1}
    assert task_graphs.of_variables == {}


def test_path_out_and_back_in_is_shown(graph: Any) -> None:
    x = placeholder()
    with annotate(graph, "replicate", 1, "outer"):
        h = tf.tanh(dense(x, 8, "a"), name="leaves")
    with annotate(graph, "replicate", 1, "inner"):
        k = tf.sigmoid(h, name="between")
    with annotate(graph, "replicate", 1, "outer"):
        y = tf.add(k, h, name="returns")
    minimize(tf.reduce_mean(y))
    ops, task_graphs = assigned(graph)
    detour = find_detour(ops, task_graphs)
    assert detour is not None
    assert detour.task_graph == 0
    assert [ops.ops[op].name for op in detour.path] == ["leaves", "between", "returns"]
    with pytest.raises(AnnotationError, match=r"TaskGraph 0 \('outer'\) is not convex: .*leaves \(TaskGraph 0\) -> "
                                              r"between \(TaskGraph 1\) -> returns \(TaskGraph 0\)\. Put the ops"):
        check_convex(ops, task_graphs, [item.name for item in annotations_of(graph).items])


def test_task_graphs_that_wait_for_each_other_without_a_path(graph: Any) -> None:
    x = placeholder()
    with annotate(graph, "replicate", 1, "left"):
        a, b = tf.tanh(x, name="a"), tf.exp(x, name="b")
    with annotate(graph, "replicate", 1, "right"):
        c, d = tf.tanh(a, name="c"), tf.exp(x, name="d")
    with annotate(graph, "replicate", 1, "left"):
        e = tf.add(d, b, name="e")
    w = v1.get_variable("w", [8, 1])
    minimize(tf.reduce_mean(tf.matmul(c, w)) + tf.reduce_mean(tf.matmul(e, w)))
    ops, task_graphs = assigned(graph)
    detour = find_detour(ops, task_graphs)
    assert detour is not None
    assert {ops.ops[op].name for op in detour.path} == {"a", "c", "d", "e"}


def test_annotation_of_backward_ops_only(graph: Any) -> None:
    with annotate(graph, "replicate", 1):
        loss = tf.reduce_mean(dense(placeholder(), 1, "a"))
    with annotate(graph, "replicate", 1, "optimizer"):
        minimize(loss)
    with pytest.raises(AnnotationError, match="'optimizer'.* contains only backward ops.*put it around the part"):
        assigned(graph)


def test_annotation_without_a_forward_op(graph: Any) -> None:
    with annotate(graph, "replicate", 1, "inputs"):
        x = placeholder()
    minimize(tf.reduce_mean(dense(x, 1, "a")))
    with pytest.raises(AnnotationError, match="'inputs'.* contains no op of the forward pass"):
        assigned(graph)


def test_annotation_inside_a_function_body(graph: Any, control_flow: Any) -> None:
    control_flow(True)

    def body(i: Any, h: Any) -> Any:
        with annotate(v1.get_default_graph(), "replicate", 1):
            return i + 1, tf.tanh(h, name="deep")

    _, h = v1.while_loop(lambda i, h: i < 3, body, [0, placeholder()], name="loop")
    minimize(tf.reduce_mean(dense(h, 1, "a")))
    with pytest.raises(AnnotationError, match="annotated inside the function body of 'loop'.*around the whole call"):
        assigned(graph)


@pytest.mark.parametrize("iterator", [v1.data.make_one_shot_iterator, v1.data.make_initializable_iterator])
def test_input_pipeline_made_under_an_annotation(graph: Any, iterator: Any) -> None:
    with annotate(graph, "replicate", 1):
        dataset = v1.data.Dataset.from_tensor_slices(np.ones([8, 2], "float32")).map(lambda x: x * 2.0).batch(4)
        loss = tf.reduce_mean(dense(iterator(dataset).get_next(), 1, "a"))
    minimize(loss)
    ops, task_graphs = assigned(graph)
    assert task_graphs.of[ops.op("IteratorGetNext").id] == -1
    assert task_graphs.of[ops.op(loss.op.name).id] == 0


def test_annotation_inside_a_v1_loop_is_not_convex(graph: Any, control_flow: Any) -> None:
    control_flow(False)

    def body(i: Any, h: Any) -> Any:
        with annotate(graph, "replicate", 1, "inside"):
            return i + 1, tf.tanh(h)

    with annotate(graph, "replicate", 1, "before"):
        x = dense(placeholder(), 8, "b")
    _, h = v1.while_loop(lambda i, h: i < 3, body, [0, x], name="loop")
    minimize(tf.reduce_mean(dense(h, 1, "a")))
    ops, task_graphs = assigned(graph)
    with pytest.raises(AnnotationError, match="not convex"):
        check_convex(ops, task_graphs, [item.name for item in annotations_of(graph).items])
