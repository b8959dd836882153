"""The words of an explanation that have cases of their own."""
from __future__ import annotations

from typing import Any

import rich.console

from tests.passes.drawings import chain, plan
from whale_tf.planner.explain import _short, _sizes, explain_plan


def test_sizes_that_are_known_open_or_none() -> None:
    graph = chain(1).graph
    known = graph.add("known", "Relu", [], [((2, 2), "float32")]).outputs[0]
    open_ = graph.add("open", "Relu", [], [((None, 2), "float32")]).outputs[0]
    assert _sizes(graph, {known, open_}) == "16 B and tensors of open sizes"
    assert _sizes(graph, {known}) == "16 B" and _sizes(graph, {open_}) == "tensors of open sizes"
    assert _sizes(graph, set()) == "nothing"


def test_devices_of_several_processes_have_their_numbers() -> None:
    of_one = [f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in range(2)]
    of_two = [f"/job:worker/replica:0/task:{process}/device:CPU:0" for process in range(2)]
    assert _short(of_one) == _short(["CPU:0", "CPU:1"]) == "CPU:0, CPU:1"
    assert _short(of_two) == "0/CPU:0, 1/CPU:0"


def test_whole_text_in_a_notebook(monkeypatch: Any) -> None:
    """Rich shows tables by itself in Jupyter, and would leave them out of the text."""
    text = explain_plan(plan([1, 1]), None, ["CPU:0", "CPU:1"])
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert explain_plan(plan([1, 1]), None, ["CPU:0", "CPU:1"]) == text and "stage1" in text
