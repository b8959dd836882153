"""Ops and tensors of another graph are refused by name, and nothing is changed."""
from __future__ import annotations

import pytest

import whale_tf.graph_editor as ge
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError


def chain(prefix):
    """x -> a -> b, and c, which nothing reads."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2], name=prefix + "x")
        a = tf.negative(x, name=prefix + "a")
        tf.negative(a, name=prefix + "b")
        tf.negative(x, name=prefix + "c")
    return graph


class Side:
    def __init__(self, prefix):
        self.graph = chain(prefix)
        self.x, self.a, self.b, self.c = (self.graph.get_operation_by_name(prefix + name) for name in "xabc")


CALLS = {
    "StagedEdit": [lambda we, they: ge.StagedEdit(we.graph).clone([we.a, they.a], "copy"),
                   lambda we, they: ge.StagedEdit(we.graph).copy(they.a, "copy", ["x"])],
    "add_control_inputs": [lambda we, they: ge.add_control_inputs(we.b, [we.a, they.a])],
    "backward": [lambda we, they: ge.backward([we.b, they.a]), lambda we, they: ge.backward([we.b], stop=[they.a]),
                 lambda we, they: ge.backward([we.b], within=[we.b, they.a])],
    "barrier": [lambda we, they: ge.barrier([we.a, they.a], "gate")],
    "between": [lambda we, they: ge.between([we.x], [they.a]), lambda we, they: ge.between([we.x, they.a], [we.b])],
    "boundary": [lambda we, they: ge.boundary([we.a, they.a])],
    "by_device": [lambda we, they: ge.by_device([we.a, they.a])],
    "drop_colocation": [lambda we, they: ge.drop_colocation([we.a, they.a])],
    "forward": [lambda we, they: ge.forward([we.x.outputs[0], they.a.outputs[0]]),
                lambda we, they: ge.forward([we.x], stop=[they.a]), lambda we, they: ge.forward([we.x], within=[we.x, they.a])],
    "order": [lambda we, they: ge.order([we.a], [they.a]), lambda we, they: ge.order([we.a, they.a], [we.b]),
              lambda we, they: ge.order([we.x, we.c], [we.b, they.a], check_cycles=False)],
    "place": [lambda we, they: ge.place([we.a, they.a], "/device:CPU:1")],
    "remove_control_inputs": [lambda we, they: ge.remove_control_inputs(we.b, [they.a])],
    "replace_op": [lambda we, they: ge.replace_op(we.a, they.a)],
    "reroute_tensor": [lambda we, they: ge.reroute_tensor(we.a.outputs[0], they.a.outputs[0]),
                       lambda we, they: ge.reroute_tensor(we.a.outputs[0], we.c.outputs[0], [we.b, they.a])],
    "set_input": [lambda we, they: ge.set_input(we.b, 0, they.a.outputs[0])],
    "swap_tensors": [lambda we, they: ge.swap_tensors(we.c.outputs[0], they.a.outputs[0])],
}
TAKE_ONE_THING = {"Boundary", "Frame", "FunctionCopy", "call_functions", "canonical_device", "colocated_with", "consumers",
                  "find_ops", "forget_output_shapes", "frame_name", "frames", "function_def", "function_names", "merge_device",
                  "predecessors", "successors"}


@pytest.mark.parametrize("name", ge.__all__)
def test_what_belongs_to_another_graph_is_refused(name):
    assert (name in CALLS) != (name in TAKE_ONE_THING), "say how it is called with ops of two graphs"
    for call in CALLS.get(name, ()):
        we, they = Side(""), Side("their/")
        before = [side.graph.as_graph_def() for side in (we, they)]
        with pytest.raises(GraphEditError, match="'their/a(:0)?' is not in the graph of|another graph.*'their/a(:0)?'"):
            call(we, they)
        assert [side.graph.as_graph_def() for side in (we, they)] == before
