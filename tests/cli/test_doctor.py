"""``wh.doctor``, ``whale run --doctor`` and ``whale doctor``: what a small Session measures."""
from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

import whale_tf as wh
from tests.command_line import call
from tests.multiprocess.launch import RUN_S, WHALE_RUN, Starter
from whale_tf._tf_compat import v1
from whale_tf.capture.captured import capture
from whale_tf.cli import app
from whale_tf.diagnosis.record import MESSAGE, Record, parse
from whale_tf.errors import PlanError
from whale_tf.runtime.doctor import Event, events_of, exchanging_seconds, stalled_seconds, usual

SCRIPT = '''
import os, sys, time
import numpy as np
import tensorflow.compat.v1 as tf
import whale_tf as wh
tf.disable_eager_execution()
wh.init({config}{cluster})
{doctor}
with tf.Graph().as_default():
    tf.set_random_seed(1)
    x = tf.placeholder_with_default(np.ones([8, {width}], "float32"), [{batch}, {width}], name="x")
    with wh.replicate({devices}):
        h = tf.tanh(tf.matmul(x, tf.get_variable("w", [{width}, {width}])), name="h")
    with {second}:
        loss = tf.reduce_mean(tf.square(tf.matmul(h, tf.get_variable("v", [{width}, 3]), name="product")))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        made = session.make_callable([loss, train], {feeds})
        losses = []
        for step in range({steps}):
            time.sleep({sleep})
            session.run(h, {{x: np.ones([8, {width}])}})
            losses.append({step_text}[0])
wh.shutdown()
'''
PIPELINE: Dict[str, Any] = {"config": {"num_micro_batch": 2}, "cluster": ", cluster='cpu:2'", "batch": 8, "width": 6,
                            "devices": 1, "second": "wh.replicate(1)", "steps": 15, "sleep": 0,
                            "feeds": "[x]", "step_text": "session.run([loss, train], {x: np.ones([8, 6])})"}
WORKERS: Dict[str, Any] = {**PIPELINE, "config": {}, "cluster": "", "devices": 2, "second": "tf.name_scope('rest')", "doctor": ""}


def measured(tmp_path: Path, **changes: Any) -> Record:
    """What the script's wh.doctor leaves."""
    path = tmp_path / "record.json"
    losses_of(tmp_path, doctor=f"wh.doctor(9, path={str(path)!r})", **changes)
    return parse(str(path))


def losses_of(tmp_path: Path, **changes: Any) -> List[float]:
    """Those of the script's steps."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**{**PIPELINE, **changes}))
    return list(runpy.run_path(str(script), run_name="__main__")["losses"])


@pytest.mark.slow
def test_products_with_other_numbers_of_micro_batches(tmp_path: Path) -> None:
    process, = measured(tmp_path, width=1024, step_text="session.run([loss, train])").processes
    assert {count for name, count, seconds in process.products if name == "MatMul" and seconds > 0} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"batch": 8}, {"batch": None}, {"batch": None, "step_text": "made(np.ones([8, 6]))"},
    {"batch": 8, "step_text": "made()", "feeds": None},
    {"batch": 8, "step_text": "session.run([loss, train], {tf.sparse_placeholder(tf.float32): ([[0]], [1.0], [1])})"}],
    ids=["static", "open", "callable", "callable without feeds", "sparse feed"])
def test_session(tmp_path: Path, changes: Dict[str, Any]) -> None:
    found = measured(tmp_path, **changes)
    process, = found.processes
    assert (process.steps, process.traced, found.step.batch) == (6, 3, 8)
    assert 0 < process.run_s <= process.period_s
    runs = {(op.name, op.device): op.runs for op in process.ops if op.is_known and op.seconds > 0}
    assert runs["MatMul", 0] == 2 and runs["product", 1] == 2, runs  # once for each micro-batch
    assert ("MatMul", 1) not in runs and ("product", 0) not in runs
    updates = {name.split("/")[1]: (device, count) for (name, device), count in runs.items() if "ApplyGradientDescent" in name}
    assert not updates or updates["update_v"] == (1, 1)  # a variable is updated once, where it is
    assert any(op.type.endswith("ApplyGradientDescent") and op.device == 1 and op.runs == 1 for op in process.ops)


@pytest.mark.slow
@pytest.mark.half
@pytest.mark.parametrize("feeds, step_text", [("[x]", "made(np.ones([8, 6]))"), (None, "made()")])
def test_measuring_a_callable_changes_no_number(tmp_path: Path, feeds: Any, step_text: str) -> None:
    """Traced calls are runs."""
    doctor = f"wh.doctor(9, path={str(tmp_path / 'r.json')!r})"
    found = [losses_of(tmp_path, feeds=feeds, step_text=step_text, doctor=text) for text in ("", doctor)]
    assert len(found[0]) == 15 and found[0] == found[1] and found[0][-1] < found[0][0]


@pytest.mark.slow
def test_slow_script_waits_for_its_input(tmp_path: Path) -> None:
    record = measured(tmp_path, sleep=0.1, steps=13)
    process, = record.processes
    assert process.input_s > 0.09
    trace = tmp_path / "trace.json"
    called = call(app, "doctor", str(tmp_path / "record.json"), "--trace", str(trace))
    assert called.exit_code == 0 and "1. input pipeline" in called.output, called.output
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X" and one["name"] == "product"]
    assert len(events) == 4  # two micro-batches, measured and simulated
    as_json = json.loads(call(app, "doctor", str(tmp_path / "record.json"), "--json").stdout)
    assert as_json["causes"][0]["kind"] == "input pipeline" and as_json["causes"][0]["gain_s"] > 0.09


@pytest.mark.slow
@pytest.mark.half
def test_script_that_ends_early_is_measured_as_far_as_it_went(tmp_path: Path) -> None:
    assert measured(tmp_path, steps=9).processes[0].steps < 6


@pytest.mark.slow
@pytest.mark.once
def test_whale_run_puts_the_processes_together(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**WORKERS))
    with Starter(anew=True) as starter:
        run = starter.start(*WHALE_RUN, "--workers", "2", "--doctor", "--doctor-steps", "8", "--record", str(tmp_path / "r.json"),
                            str(script))
        assert run.wait(RUN_S) == 0, run.output
        assert "2 processes, 2 devices" in run.output
    found = parse(str(tmp_path / "r.json"))
    assert [one.rank for one in found.processes] == [0, 1]
    for rank, process in enumerate(found.processes):
        assert {op.device for op in process.ops if op.name == "MatMul" and op.is_known} == {rank}
        assert process.message_s + process.collective_s > 0
        assert not [op for op in process.ops if op.type == MESSAGE and op.is_known]  # a message's time is not its op's


@pytest.mark.slow
@pytest.mark.once
def test_status_of_a_script_that_fails_remains(tmp_path: Path) -> None:
    """Nothing was measured, which is said."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    with Starter() as starter:
        run = starter.start(*WHALE_RUN, "--doctor", str(script))
        assert run.wait(RUN_S) == 7 and "no process has left a record" in run.output, run.output


def test_too_few_steps_are_refused() -> None:
    wh.init(cluster="cpu:2")
    try:
        with pytest.raises(PlanError, match="at least 6"):
            wh.doctor(3)
        with pytest.raises(PlanError, match="there is no directory 'nowhere'"):
            wh.doctor(path="nowhere/record.json")
    finally:
        wh.shutdown()


def test_stalls_are_what_no_op_covers() -> None:
    """A message between processes is in a queue, too, and is no input."""
    events = [Event(name, kind, "", start_s, seconds) for name, kind, start_s, seconds in (
        ("next", "IteratorGetNext", 0.0, 10.0), ("a", "MatMul", 2.0, 3.0), ("b", "Add", 4.0, 2.0),
        ("whale/part/receive", "QueueDequeueV2", 9.0, 20.0), ("c", "MatMul", 30.0, 1.0))]
    assert stalled_seconds(events) == pytest.approx(6.0)


def test_file_that_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    called = call(app, "doctor", str(path))
    assert called.exit_code == 2 and "not what wh.doctor() writes" in called.stderr


def test_message_has_another_name_than_the_op_that_made_its_tensor() -> None:
    """As rows of a worker's trace say it: ops in one, messages in another."""
    metadata, device = v1.RunMetadata(), "/job:worker/replica:0/task:0/device:CPU:0"
    for name, label in (("whale/g0_m0_r0/h", "whale/g0_m0_r0/h = Tanh(x)"),
                        (MESSAGE, f"[1.0MB] [9.0Mb/s] edge_7_whale/g0_m0_r0/h from {device} to {device}")):
        row = metadata.step_stats.dev_stats.add()
        row.device = device
        row.node_stats.add(node_name=name, timeline_label=label, all_end_rel_micros=1000, op_end_rel_micros=1000)
    assert [(one.name, one.type) for one in events_of(metadata)] == [
        ("whale/g0_m0_r0/h", "Tanh"), ("whale/g0_m0_r0/h (message)", MESSAGE)]


def test_exchanges_that_overlap_count_once() -> None:
    events = [Event(name, kind, "", start_s, seconds) for name, kind, start_s, seconds in (
        ("a", "CollectiveReduceV2", 0.0, 10.0), ("b", "CollectiveReduceV2", 2.0, 10.0), ("c", "MatMul", 0.0, 30.0),
        ("d", "CollectiveReduceV2", 20.0, 1.0))]
    assert exchanging_seconds(events, ("Collective",)) == pytest.approx(13.0)


def test_steps_that_something_else_disturbed_are_left_out() -> None:
    traces = [[Event("a", "MatMul", "", 0.0, seconds)] for seconds in (1.0, 9.0, 1.2, 1.1, 0.1)]
    assert [trace[0].seconds for trace in usual(traces)] == [1.0, 1.1, 1.2]
    profile = [traces[0], [], []]  # three steps in one trace
    assert usual(profile) == profile


def test_rows_of_which_an_example_has_several() -> None:
    with v1.Graph().as_default() as graph:
        words, x = v1.placeholder("float64", [None], name="words"), v1.placeholder("float64", [None, 5, 3], name="x")
        w = v1.get_variable("w", initializer=np.ones([3]), use_resource=True)
        wh.init(cluster="cpu:2")
        v1.train.GradientDescentOptimizer(0.1).minimize(v1.reduce_mean(v1.square(v1.reshape(x, [-1, 3]) * w - words[:, None])))
        found = capture(graph)
        wh.shutdown()
    assert [found.examples_of(given) for given in ({"words:0": (40,)}, {"x:0": (8, 5, 3)}, {})] == [8, 8, None]
