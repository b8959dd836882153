from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.simulator import (
    Simulation,
    built_in_model,
    simulate,
    to_chrome,
    trace_of,
    uniform_3d,
    write_chrome,
)
from whale_tf.simulator.trace import executed_s, op_name
from whale_tf.simulator.zoo.vision import mlp
from whale_tf.viz.report import html_report
from whale_tf.viz.timeline import blocks_of, memory_figure, svg_text, timeline_figure


def pipeline(count: int = 8) -> Simulation:
    return simulate(uniform_3d(mlp(8), 1, 1, 4, count), Cluster.parse("hc2"))


def test_every_simulated_task_is_an_event_on_each_of_its_devices() -> None:
    result = pipeline()
    expected = sum(len(slots) for slots, lane in zip(result.graph.slots, result.graph.lane) if lane >= 0)
    trace = trace_of(result)
    assert len(trace.events) == expected and trace.end_s == result.step_time_s


def test_chrome_trace() -> None:
    trace = trace_of(pipeline())
    rows = to_chrome(trace)["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "C"}
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names == [f"predicted: device {device}" for device in range(4)]
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == len(trace.events)
    assert max(row["ts"] + row["dur"] for row in spans) == pytest.approx(trace.end_s * 1e6)
    assert {row["args"]["micro_batch"] for row in spans} == set(range(-1, 8))


def test_chrome_file(tmp_path: Any) -> None:
    path = str(tmp_path / "trace.json")
    write_chrome(path, trace_of(pipeline()))
    with open(path, encoding="utf8") as handle:
        assert json.load(handle)["displayTimeUnit"] == "ms"


def test_one_forward_one_backward_can_be_read_off_the_blocks() -> None:
    """What the picture shows: DAPPLE's order on each of four stages."""
    trace = trace_of(pipeline())
    for stage in range(4):
        events = [event for event in trace.events if event.device == stage and event.lane == 0]
        blocks = [block for block in blocks_of(events, trace.end_s / 2000) if block.micro_batch >= 0]
        order = " ".join(f"{block.kind[0].upper()}{block.micro_batch}" for block in blocks)
        depth = 4 - stage
        expected = [f"F{m}" for m in range(depth)]
        for m in range(8):
            expected += [f"B{m}"] + ([f"F{m + depth}"] if m + depth < 8 else [])
        assert order == " ".join(expected)


@pytest.mark.slow
def test_pictures_have_a_row_per_device_and_the_same_bytes_every_time() -> None:
    trace = trace_of(pipeline())
    figure = timeline_figure(trace)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        f"stage {stage}, device {stage}" for stage in range(4)
    ]
    assert svg_text(figure) == svg_text(timeline_figure(trace))
    lines = memory_figure(trace, {0: 1 << 20}).axes[0].lines
    assert len(lines) >= 4


@pytest.mark.slow
def test_the_report_needs_no_network() -> None:
    page = html_report(pipeline())
    assert page.count("<svg") == 2 and "<script" not in page and "src=" not in page and "@import" not in page
    outside = [piece for piece in page.split("http")[1:] if not piece.startswith(("://www.w3.org/", "s://matplotlib.org/"))]
    assert outside == []
    assert 'href="http' not in page and "url(http" not in page
    assert "<!DOCTYPE html>" in page and "bottleneck" in page


@pytest.mark.slow
def test_a_plan_out_of_memory_has_no_trace_but_a_report() -> None:
    result = simulate(uniform_3d(built_in_model("m6-moe-1t", 8), 8), Cluster.parse("hc2"))
    with pytest.raises(PlanError, match="no trace of an infeasible plan: out of memory: device"):
        trace_of(result)
    page = html_report(result)
    assert "<svg" not in page and "out of memory: device" in page


def test_nanoseconds_are_taken_where_they_are() -> None:
    coarse = SimpleNamespace(op_start_rel_micros=1, op_end_rel_micros=1, op_start_rel_nanos=0, op_end_rel_nanos=0)
    assert executed_s(coarse) == pytest.approx(0.0)
    coarse.op_start_rel_nanos, coarse.op_end_rel_nanos = 1200, 1700
    assert executed_s(coarse) == pytest.approx(0.5e-6)


def test_ops_that_the_graph_optimizer_replaced_keep_their_names() -> None:
    assert op_name("a/b/ArithmeticOptimizer/ReplaceMulWithSquare_mul") == "a/b/mul"
    assert op_name("a/mul_1:Mul") == "a/mul_1"
