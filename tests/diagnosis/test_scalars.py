"""Scalars and pictures of hand-made traced steps."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis.test_diagnose import record
from tests.simulator.test_step_graph import ONE, apart, plan
from whale_tf.cluster import Cluster
from whale_tf.diagnosis import scalars
from whale_tf.diagnosis.record import HOST, Ran, Record, parse, to_json
from whale_tf.diagnosis.scalars import Arithmetic, arithmetic_of, known_peak, predicted, traced
from whale_tf.diagnosis.traces import measured_of, row_names, simulated_of

# Two micro-batches through two stages: device 0 computes 4 s of 8, device 1 3 s and waits 1 s for a tensor.
TIMELINE = (Ran("forward_a", "MatMul", 0, 0.0, 1.0, 0), Ran("forward_a", "MatMul", 0, 1.0, 1.0, 1),
            Ran("forward_a (message)", "RecvTensor", 1, 0.0, 1.0, 0), Ran("forward_b", "MatMul", 1, 1.0, 2.0, 0),
            Ran("forward_b", "MatMul", 1, 3.0, 1.0, 1), Ran("weight_a", "MatMul", 0, 6.0, 2.0, 0))


def of_pipeline(**more: Any) -> Record:
    measured = record(plan([0], [1], micro_batches=2), {}, **more)
    return measured._replace(processes=(measured.processes[0]._replace(timeline=TIMELINE),))


def test_devices_of_a_traced_step_compute_exchange_and_wait() -> None:
    found = traced(of_pipeline())
    assert found == {scalars.TRACED_S: 8.0, scalars.BUBBLE: pytest.approx(1 - (4 + 3) / 2 / 8),
                     scalars.EXPOSED: pytest.approx(1 / 2 / 8)}
    assert traced(record(plan([0], names=ONE), {})) == {}


@pytest.mark.parametrize("cluster, in_tf32, peak", [
    ("2xV100-32GB:1", True, 2 * 15.7e12), ("2xA100-80GB:1", True, 2 * 156e12), ("2xA100-80GB:1", False, 2 * 19.5e12),
    ("cpu:8", False, None)])
def test_arithmetic_of_a_pipeline(cluster: str, in_tf32: bool, peak: Any) -> None:
    """Seven ops of 100 FLOPs for 8 examples."""
    found = arithmetic_of(of_pipeline(cluster=cluster), in_tf32)
    assert found.flops == pytest.approx(7 * 100.0 / 8)
    assert found.peak_flops_per_s == (None if peak is None else pytest.approx(peak))


def test_process_with_a_mini_batch_of_its_own_has_its_own_devices() -> None:
    found = arithmetic_of(record(apart(), {}, cluster="2xT4:1"), False)
    assert found.peak_flops_per_s == pytest.approx(8.1e12)
    assert found.mfu(4.05e12 / found.flops) == pytest.approx(0.5)
    assert Arithmetic(1.0, None).mfu(1.0) is None


@pytest.mark.parametrize("described, peak", [
    ({"device_types": {"fast": {"kind": "CPU", "fp32": 3e12, "memory_gib": 8, "memory_bandwidth_bytes_per_s": 1e11}}}, 3e12),
    ({"device_types": {"fast": {"base": "T4", "source": "nvidia-smi; rates of the T4"}}}, None)])
def test_peak_is_that_of_the_description_unless_it_is_a_guess(described: Any, peak: Any) -> None:
    cluster = Cluster.parse(dict(described, name="own", nodes=[{"devices": [{"type": "fast", "count": 1}]}]))
    assert known_peak(cluster, 0, "fp32") == peak


def test_prediction_is_of_a_process_own_devices() -> None:
    measured = of_pipeline()
    both = predicted(measured, {0, 1})
    assert sorted(both) == [scalars.PREDICTED_PEAK.format(device) for device in (0, 1)] and min(both.values()) >= 8e3
    assert predicted(measured, {1}) == {name: size for name, size in both.items() if "1" in name}


def of_offloaded(cluster: str = "2xcpu:1") -> Record:
    """Two processes, whose updates run on their hosts; these are behind the devices of their nodes."""
    tasks = (replace(apart().task_graphs[0], variables="shared", homes={"a": 2, "b": 2}),)
    return record(replace(apart(), offload="states", task_graphs=tasks), {}, cluster=cluster)


def test_prediction_is_of_devices_beside_hosts() -> None:
    here, there = (predicted(of_offloaded(), {device}) for device in (0, 1))
    assert list(there) == [scalars.PREDICTED_PEAK.format(1)] and [*there.values()] == [*here.values()]


def test_updates_run_on_the_host_of_each_process() -> None:
    events = simulated_of(of_offloaded()).events
    assert [event.device for event in events if event.name == "update_a"] == [HOST, HOST]
    assert {event.device for event in events if event.name == "forward_a"} == {0, 1}


def test_traces_have_micro_batches_and_stages() -> None:
    measured, simulated = measured_of(of_pipeline()), simulated_of(of_pipeline())
    names = ("forward_a", "forward_b", "weight_a")
    for trace in (measured, simulated):
        calls = {(one.name, one.kind, one.device, one.stage, one.micro_batch) for one in trace.events if one.name in names}
        expected = {("forward_a", "forward", 0, 0, 0), ("forward_a", "forward", 0, 0, 1), ("forward_b", "forward", 1, 1, 0),
                    ("forward_b", "forward", 1, 1, 1), ("weight_a", "backward", 0, 0, 0)}
        assert expected <= calls, (trace.name, calls)
    assert row_names(of_pipeline(), measured) == {0: "stage 0, device 0", 1: "stage 1, device 1"}
    assert parse(to_json(of_pipeline())) == of_pipeline()


def test_picture_has_a_bar_for_each_call() -> None:
    from whale_tf.viz.diagnosis import step_figure
    from whale_tf.viz.timeline import blocks_of, svg_text

    measured = of_pipeline()
    traces = [measured_of(measured), simulated_of(measured)]
    blocks = [(one.device, one.kind, one.micro_batch, one.stage) for one in blocks_of(traces[0].events, 0.08) if not one.lane]
    assert blocks == [(0, "forward", 0, 0), (0, "forward", 1, 0), (0, "backward", 0, 0), (1, "forward", 0, 1),
                      (1, "forward", 1, 1)]
    text = svg_text(step_figure(measured, traces))
    assert text.count("stage 0, device 0</text>") == 2 and "measured: 8.000 s" in text and "simulated: " in text
