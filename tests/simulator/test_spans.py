"""Functions of called bodies in simulation: when they begin, and what they hold."""

from __future__ import annotations

from typing import Tuple

import pytest

from whale_tf.cluster import Cluster
from whale_tf.simulator.instructions import COMPUTATION, Instructions
from whale_tf.simulator.memory import memory_curves
from whale_tf.simulator.network import Network
from whale_tf.simulator.spans import Spans
from whale_tf.simulator.tasks import About, Tasks


def played(is_called: bool, is_donated: bool = False) -> Tuple[float, float]:
    """Seconds and peak of a value of 100 bytes, which the first of two ops of one second may overwrite, while another argument
    takes two seconds; they make 100 and 50 bytes."""
    cluster = Cluster.parse("cpu:1")
    tasks = Tasks(cluster, Network(cluster), in_queues=False)
    spans = Spans(tasks)
    if is_called:
        spans.add(0, 1, 0, About())
    early, late = (tasks.add(COMPUTATION, seconds, (0,)) for seconds in (1.0, 2.0))
    value = tasks.buffer("value", "activations", early, 0, 100.0)
    first = tasks.add(COMPUTATION, 1.0, (0,), [early])
    tasks.read(first, value, may_overwrite=True)
    between = tasks.buffer("between", "activations", first, 0, 100.0)
    second = tasks.add(COMPUTATION, 1.0, (0,), [first, late])
    tasks.read(second, between)
    tasks.buffer("result", "activations", second, 0, 50.0)
    for task in (first, second):
        spans.run(0, 0, task)
    if is_called:
        spans.take(0, 0, [(early, -1 if is_donated else value), (late, -1), (first, between)])
    graph = tasks.graph()
    times = tasks.times(graph)
    curve, = memory_curves(Instructions(tuple(tasks.instructions), tuple(tasks.buffers), {0: {}}, ()), graph, times)
    return times.makespan, curve.peak_bytes


def test_function_begins_with_its_last_argument_and_overwrites_none() -> None:
    assert played(is_called=False) == pytest.approx((3.0, 150.0))
    assert played(is_called=True) == pytest.approx((4.0, 250.0))


def test_function_overwrites_what_is_donated_to_it() -> None:
    assert played(is_called=True, is_donated=True) == pytest.approx((4.0, 150.0))


def test_functions_of_a_call_run_one_after_another() -> None:
    cluster = Cluster.parse("cpu:2")
    tasks = Tasks(cluster, Network(cluster), in_queues=False)
    spans = Spans(tasks)
    spans.add(7, 2, 1, About())
    for function in (0, 1):
        spans.run(7, function, tasks.add(COMPUTATION, 1.0, (1,)))
    times = tasks.times(tasks.graph())
    assert 7 in spans and 0 not in spans
    assert [times.end[task] for task in (spans.first(7), spans.end(7, 0), spans.last(7))] == pytest.approx([0.0, 1.0, 2.0])
