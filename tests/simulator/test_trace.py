from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, List

import pytest

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError, memory_text
from whale_tf.simulator import (
    Simulation,
    built_in_model,
    simulate,
    to_chrome,
    trace_of,
    trace_of_run_metadata,
    uniform_3d,
    write_chrome,
)
from whale_tf.simulator.trace import executed_s
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
    assert len(trace_of(result, devices=[0]).devices) == 1


def test_chrome_trace() -> None:
    trace = trace_of(pipeline())
    rows = to_chrome([trace, trace._replace(name="measured")])["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "C"}
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names[0] == "predicted: device 0" and names[4] == "measured: device 0" and len(names) == 8
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == 2 * len(trace.events)
    assert max(row["ts"] + row["dur"] for row in spans) == pytest.approx(trace.end_s * 1e6)
    assert {row["args"]["micro_batch"] for row in spans} == set(range(-1, 8))


def test_chrome_file(tmp_path: Any) -> None:
    path = str(tmp_path / "trace.json")
    write_chrome(path, [trace_of(pipeline())])
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
def test_limit_in_a_picture_is_that_of_the_step() -> None:
    strategy, cluster = uniform_3d(mlp(8)), Cluster.parse("hc2")
    limit = 2.0 * simulate(strategy, cluster).peak_memory_bytes[0]
    result = simulate(strategy, cluster.limited(limit))
    texts = memory_figure(trace_of(result), result.limits_bytes).axes[0].texts
    assert [text.get_text() for text in texts] == [f"limit {memory_text(limit)}"]


@pytest.mark.slow
def test_report_needs_no_network() -> None:
    page = html_report(pipeline())
    assert page.count("<svg") == 2 and "<script" not in page and "src=" not in page and "@import" not in page
    outside = [piece for piece in page.split("http")[1:] if not piece.startswith(("://www.w3.org/", "s://matplotlib.org/"))]
    assert outside == []
    assert 'href="http' not in page and "url(http" not in page
    assert "<!DOCTYPE html>" in page and "bottleneck" in page


@pytest.mark.slow
def test_plan_out_of_memory_has_no_trace_but_a_report() -> None:
    result = simulate(uniform_3d(built_in_model("m6-moe-1t", 8), 8), Cluster.parse("hc2"))
    with pytest.raises(PlanError, match="no trace of an infeasible plan: out of memory: device"):
        trace_of(result)
    page = html_report(result)
    assert "<svg" not in page and "out of memory: device" in page


def node(name: str, label: str, start: int, begin: int, end: int, memory: List[Any] = ()) -> Any:  # type: ignore
    return SimpleNamespace(
        node_name=name,
        timeline_label=label,
        all_start_micros=start,
        op_start_rel_micros=begin,
        op_end_rel_micros=end,
        op_start_rel_nanos=0,
        op_end_rel_nanos=0,
        memory=memory,
    )


def test_nanoseconds_are_taken_where_they_are() -> None:
    coarse = node("Add", "Add", 1000, 1, 1)
    assert executed_s(coarse) == pytest.approx((1e-6, 0.0))
    coarse.op_start_rel_nanos, coarse.op_end_rel_nanos = 1200, 1700
    assert executed_s(coarse) == pytest.approx((1.2e-6, 0.5e-6))


def test_real_step_s_metadata_gives_the_same_events() -> None:
    """The fields of RunMetadata.step_stats, as a Session fills them."""
    records = [SimpleNamespace(alloc_micros=1005, alloc_bytes=64), SimpleNamespace(alloc_micros=1030, alloc_bytes=-64)]
    rows = [
        SimpleNamespace(
            device="/device:CPU:1",
            node_stats=[
                node("gradients/MatMul_grad", "MatMul", 1020, 1, 9),
                node("all/CollectiveReduce", "CollectiveReduce(...)", 1030, 0, 20),
            ],
        ),
        SimpleNamespace(
            device="/device:CPU:0",
            node_stats=[
                node("dense/MatMul", "dense/MatMul = MatMul(x, w)", 1000, 2, 10, [SimpleNamespace(allocation_records=records)])
            ],
        ),
        SimpleNamespace(device="/device:GPU:0/stream:all", node_stats=[node("x", "x", 900, 0, 1)]),
    ]
    trace = trace_of_run_metadata(SimpleNamespace(step_stats=SimpleNamespace(dev_stats=rows)))
    found = {
        event.name: (event.device, event.lane, event.kind, round(event.start_s * 1e6), round(event.duration_s * 1e6))
        for event in trace.events
    }
    assert found == {
        "dense/MatMul": (0, 0, "forward", 2, 8),
        "gradients/MatMul_grad": (1, 0, "backward", 21, 8),
        "all/CollectiveReduce": (1, 2, "all_reduce", 30, 20),
    }
    assert trace.memory[0][1] == [0.0, 64.0, 0.0]
    assert to_chrome([trace])["traceEvents"] and timeline_figure(trace).axes


def test_metadata_without_statistics_is_refused() -> None:
    with pytest.raises(PlanError, match="FULL_TRACE"):
        trace_of_run_metadata(SimpleNamespace(step_stats=SimpleNamespace(dev_stats=[])))
