"""Moving edges: what consumers read afterwards, in the graph and in a fresh Session, and what is refused."""
from __future__ import annotations

import pytest

from tests.graph_editor.graphs import run, variable
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor import StagedEdit, add_control_inputs, replace_op, reroute_tensor, set_input, swap_tensors

FEED = {"x:0": [1.0, 2.0]}


@pytest.fixture
def graph():
    """a = x + 1, b = x * 10; fa = -a, ga = a * a, fb = -b; ``late`` waits for a."""
    built = tf.Graph()
    with built.as_default():
        x = v1.placeholder(tf.float32, [2], name="x")
        a = tf.add(x, 1.0, name="a")
        b = tf.multiply(x, 10.0, name="b")
        tf.negative(a, name="fa")
        tf.multiply(a, a, name="ga")
        tf.negative(b, name="fb")
        tf.zeros([3], name="three")
        tf.zeros([2], tf.int32, name="ints")
        with tf.control_dependencies([a]):
            tf.no_op(name="late")
    return built


def tensor(graph, name):
    return graph.get_tensor_by_name(name + ":0")


def op(graph, name):
    return graph.get_operation_by_name(name)


def values(graph, *names):
    return [list(value) for value in run(graph, [name + ":0" for name in names], FEED)]


def test_reroute_all_consumers(graph):
    moved = reroute_tensor(tensor(graph, "a"), tensor(graph, "b"))
    assert [(consumer.name, index) for consumer, index in moved] == [("fa", 0), ("ga", 0), ("ga", 1)]
    assert values(graph, "fa", "ga", "a") == [[-10, -20], [100, 400], [2, 3]]


def test_reroute_some_consumers(graph):
    reroute_tensor(tensor(graph, "a"), tensor(graph, "b"), [op(graph, "fa")])
    assert values(graph, "fa", "ga") == [[-10, -20], [4, 9]]


def test_rerouting_to_something_that_depends_on_the_old_tensor_inserts_it(graph):
    """a -> fa becomes the chain a -> scaled -> shifted -> fa; the chain itself keeps reading a."""
    edit = StagedEdit(graph)
    edit.add("AddV2", "shifted", [edit.add("Mul", "scaled", ["a", "b"]), "b"])
    new = edit.commit()
    moved = reroute_tensor(tensor(graph, "a"), new["shifted"].outputs[0])
    assert [consumer.name for consumer, _ in moved] == ["fa", "ga", "ga"]
    assert values(graph, "fa") == [[-(2 * 10 + 10), -(3 * 20 + 20)]]


def test_without_the_check_only_the_producer_of_the_new_tensor_keeps_its_input(graph):
    edit = StagedEdit(graph)
    edit.add("Mul", "scaled", ["a", "b"])
    scaled = edit.commit()["scaled"]
    moved = reroute_tensor(tensor(graph, "a"), scaled.outputs[0], check_cycles=False)
    assert [consumer.name for consumer, _ in moved] == ["fa", "ga", "ga"]
    assert scaled.inputs[0].name == "a:0"


def test_cycles_are_refused_by_name(graph):
    with graph.as_default():
        chain = tf.exp(tensor(graph, "fa"), name="chain")
    with pytest.raises(GraphEditError, match="'chain:0' depends on fa.*cycle"):
        reroute_tensor(tensor(graph, "a"), chain, [op(graph, "fa")])
    with pytest.raises(GraphEditError, match="one of 'a:0' and 'chain:0' depends on 'fa'.*cycle"):
        swap_tensors(tensor(graph, "a"), chain)
    assert [graph_op.inputs[0].name for graph_op in (op(graph, "fa"), chain.op)] == ["a:0", "fa:0"]


def test_ops_that_do_not_read_the_tensor_are_refused(graph):
    with pytest.raises(GraphEditError, match=r"\['fb'\] do not read 'a:0'; its consumers are \['fa', 'ga', 'ga'\]"):
        reroute_tensor(tensor(graph, "a"), tensor(graph, "b"), [op(graph, "fa"), op(graph, "fb")])


@pytest.mark.parametrize("new, words", [
    ("three", "shape.*StagedEdit.clone"), ("ints", "float32.*int32.*Cast")])
def test_edges_that_cannot_move_leave_all_edges_as_they_were(graph, new, words):
    with pytest.raises(GraphEditError, match=words):
        reroute_tensor(tensor(graph, "a"), tensor(graph, new))
    assert values(graph, "fa", "ga") == [[-2, -3], [4, 9]]


def test_edges_moved_before_a_failure_move_back(graph):
    """The wide consumer takes any shape, the narrow one only [2]."""
    with graph.as_default():
        v1.placeholder(tf.float32, name="any")
        wide = tf.identity(tensor(graph, "any"), name="wide")
        other = tf.negative(wide, name="other")
    narrow = op(graph, "fa")
    set_input(narrow, 0, wide)  # fa reads wide; its own shape stays [2]
    with pytest.raises(GraphEditError, match="input 0 of 'fa' has shape"):
        reroute_tensor(wide, tensor(graph, "three"), [other.op, narrow])
    assert [narrow.inputs[0].name, other.op.inputs[0].name] == ["wide:0", "wide:0"]


def test_set_input_refuses_positions_and_foreign_tensors(graph):
    with pytest.raises(GraphEditError, match="has 2 inputs, so there is none at position 2"):
        set_input(op(graph, "ga"), 2, tensor(graph, "b"))
    with tf.Graph().as_default():
        foreign = tf.zeros([2], name="foreign")
    with pytest.raises(GraphEditError, match="'foreign:0' is not in the graph of 'ga'"):
        set_input(op(graph, "ga"), 0, foreign)


def test_swap(graph):
    swap_tensors(tensor(graph, "a"), tensor(graph, "b"))
    assert values(graph, "fa", "ga", "fb") == [[-10, -20], [100, 400], [-2, -3]]


def test_swap_that_fails_half_way_is_undone(graph):
    with graph.as_default():
        unknown = v1.placeholder(tf.float32, name="unknown")
        reader = tf.negative(tf.reshape(unknown, [3], name="to3"), name="reader")
    with pytest.raises(GraphEditError, match="shape"):
        swap_tensors(tensor(graph, "a"), reader.op.inputs[0])
    assert values(graph, "fa", "ga") == [[-2, -3], [4, 9]]
    assert reader.op.inputs[0].name == "to3:0"


def test_replace_op_takes_over_consumers_and_waiting_ops(graph):
    edit = StagedEdit(graph)
    edit.add("Mul", "a2", ["x", "x"])
    moved = replace_op(op(graph, "a"), edit.commit()["a2"])
    assert [consumer.name for consumer, _ in moved] == ["fa", "ga", "ga"]
    assert [waited.name for waited in op(graph, "late").control_inputs] == ["a2"]
    assert values(graph, "fa", "ga") == [[-1, -4], [1, 16]]


def test_replace_op_by_one_that_reads_the_old_op(graph):
    with graph.as_default():
        doubled = tf.multiply(tensor(graph, "a"), 2.0, name="doubled")
    add_control_inputs(doubled.op, [op(graph, "a")])
    replace_op(op(graph, "a"), doubled.op)
    assert values(graph, "fa") == [[-4, -6]]
    assert [waited.name for waited in doubled.op.control_inputs] == ["a"]
    assert [waited.name for waited in op(graph, "late").control_inputs] == ["doubled"]


def test_replace_op_needs_an_output_for_every_one_that_is_read(graph):
    with graph.as_default():
        split = tf.split(tensor(graph, "a"), 2, name="halves")
        tf.negative(split[1], name="second")
    with pytest.raises(GraphEditError, match="'b' has 1 outputs, but output 1 of 'halves' is read by 'second'"):
        replace_op(op(graph, "halves"), op(graph, "b"))


def test_replace_op_that_fails_half_way_is_undone(graph):
    with graph.as_default():
        tf.split(tensor(graph, "a"), 2, name="halves")
        edit = StagedEdit(graph)
        edit.add("IdentityN", "pair", ["halves:0", "ints"])
        edit.add("Neg", "first", ["halves:0"])
        edit.add("Neg", "second", ["halves:1"])
        new = edit.commit()
    with pytest.raises(GraphEditError, match="int32"):
        replace_op(op(graph, "halves"), new["pair"])
    assert [new["first"].inputs[0].name, new["second"].inputs[0].name] == ["halves:0", "halves:1"]


def test_writer_cannot_be_given_something_that_is_no_variable():
    built = tf.Graph()
    with built.as_default():
        w = variable("w", [1.0, 2.0], resource=False)
        plain = tf.constant([5.0, 5.0], name="plain")
        write = w.assign([3.0, 4.0]).op
        with pytest.raises(GraphEditError, match="writes to the variable 'w:0'.*'plain:0'"):
            set_input(write, 0, plain)
        read = [consumer for consumer in w._ref().consumers() if consumer.type == "Identity"][0]
        set_input(read, 0, plain)
    assert list(run(built, read.name + ":0")) == [5.0, 5.0]
