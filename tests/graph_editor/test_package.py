"""The example of the package's docstring, and those of its page."""
from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np

import whale_tf.graph_editor as ge
from tests.graph_editor.graphs import run
from whale_tf._tf_compat import tf, v1


def test_example_does_what_it_draws():
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


def test_page_runs_and_names_everything():
    """Its examples are tests: what each prints is what the page says."""
    page = (Path(__file__).parents[2] / "docs" / "graph_editor.md").read_text(encoding="utf8")
    assert [name for name in ge.__all__ if not (hasattr(ge, name) and re.search(rf"\b{name}\b", page))] == []
    was_v2 = v1.control_flow_v2_enabled()
    try:
        test = doctest.DocTestParser().get_doctest(page, {}, "graph_editor.md", None, 0)
        report = []
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test, out=report.append)
    finally:
        (v1.enable_control_flow_v2 if was_v2 else v1.disable_control_flow_v2)()
    assert not runner.failures and len(test.examples) > 50, "".join(report)
