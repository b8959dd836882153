"""The example of the package's docstring."""
from __future__ import annotations

import numpy as np

import whale_tf.graph_editor as ge
from tests.graph_editor.graphs import run
from whale_tf._tf_compat import tf, v1


def test_the_example_does_what_it_draws():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2], name="x")
        tf.reduce_sum(tf.nn.relu(x, name="relu"), name="loss")
    relu = graph.get_operation_by_name("relu")
    edit = ge.StagedEdit(graph)
    edit.clone([relu], "second", device="/device:CPU:1")
    edit.add("Square", "square", ["second/relu"], device="/device:CPU:1")
    edit.add("AddV2", "both", ["relu", "square"])
    new = edit.commit()
    ge.reroute_tensor(relu.outputs[0], new["both"].outputs[0])
    np.testing.assert_allclose(run(graph, "loss:0", {"x:0": [3.0, -1.0]}), 12.0)


def test_everything_exported_exists():
    assert all(hasattr(ge, name) for name in ge.__all__)
