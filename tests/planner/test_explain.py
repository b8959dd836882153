"""The words of an explanation that have cases of their own."""
from __future__ import annotations

from tests.passes.drawings import chain
from whale_tf.planner.explain import _sizes


def test_sizes_that_are_known_open_or_none() -> None:
    graph = chain(1).graph
    known = graph.add("known", "Relu", [], [((2, 2), "float32")]).outputs[0]
    open_ = graph.add("open", "Relu", [], [((None, 2), "float32")]).outputs[0]
    assert _sizes(graph, {known, open_}) == "16 B and tensors of open sizes"
    assert _sizes(graph, {known}) == "16 B" and _sizes(graph, {open_}) == "tensors of open sizes"
    assert _sizes(graph, set()) == "nothing"
