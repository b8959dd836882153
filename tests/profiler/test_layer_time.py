"""Seconds of a layer: the roofline, and what measurements change."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.profiler.layer_time import LayerTime, layer_seconds
from whale_tf.profiler.model_profile import LayerProfile, Measurement, ModelProfile

V100 = Cluster.parse("V100-16GB:1").devices[0]
PEAK, MEMORY = 15.7e12, 900e9


def seconds(layer: LayerProfile, batch: float, tensor_parallel: int = 1, granularity: int = 1) -> LayerTime:
    profile = ModelProfile(name="m", layers=(layer,), batch_granularity=granularity)
    return layer_seconds(profile, layer, V100, batch, tensor_parallel)


def counted(**changes: Any) -> LayerProfile:
    return LayerProfile(**dict({"name": "l", "forward_flops": 1e9, "traffic_bytes": 9e6, "utilization": 0.5,
                                "parameter_bytes": 9000000, "tensor_parallel_bytes": 8}, **changes))


def test_roofline() -> None:
    time = seconds(counted(), 4)
    forward = 4 * (1e9 / (0.5 * PEAK) + 9e6 / MEMORY)
    assert time.forward_s == pytest.approx(1e-5 + forward)
    assert time.backward_s == pytest.approx(2e-5 + 2 * forward)
    assert seconds(counted(backward_flops=0.0), 4).backward_s == pytest.approx(2e-5 + 8 * 9e6 / MEMORY)


def test_launching_kernels_takes_its_time_whatever_the_batch() -> None:
    for batch in (1, 64):
        with_launches, without = seconds(counted(overhead_s=1e-3), batch), seconds(counted(), batch)
        assert with_launches.forward_s - without.forward_s == pytest.approx(1e-3)
        assert with_launches.backward_s - without.backward_s == pytest.approx(2e-3)


def test_tensor_parallelism_divides_what_can_be_split() -> None:
    whole, half = seconds(counted(), 4), seconds(counted(), 4, tensor_parallel=2)
    assert half.forward_s == pytest.approx(whole.forward_s / 2)
    assert seconds(counted(tensor_parallel_bytes=None), 4, tensor_parallel=2) == seconds(
        counted(tensor_parallel_bytes=None), 4)


def test_below_granularity_costs_as_much() -> None:
    assert seconds(counted(), 1, granularity=4) == seconds(counted(), 4, granularity=4)
    assert seconds(counted(), 5, granularity=4).forward_s > seconds(counted(), 4, granularity=4).forward_s


def points(*batches: Any) -> Any:
    return tuple(Measurement(device="V100-16GB", batch=b, forward_s=f, backward_s=2 * f) for b, f in batches)


def test_between_measurements_linear_and_beyond_on_the_last_line() -> None:
    layer = LayerProfile(name="l", measured=points((2, 1.0), (4, 1.5), (8, 3.0)))
    assert [seconds(layer, b).forward_s for b in (1, 2, 3, 6, 8, 10)] == pytest.approx([0.5, 1.0, 1.25, 2.25, 3.0, 3.75])
    assert seconds(layer, 3).backward_s == pytest.approx(2.5)
    assert [seconds(layer, b).measured_batch for b in (1, 3, 10)] == [1, 3, 8]


def test_beyond_measurements_that_fall_more_samples_take_longer() -> None:
    """Small batches take about the same time, and noise decides which takes more.  On their line 100 samples would end before
    they begin."""
    layer = LayerProfile(name="l", measured=points((1, 1.0), (2, 0.9)))
    assert [seconds(layer, b).forward_s for b in (1.5, 2, 100)] == pytest.approx([0.95, 0.9, 0.9 + 98 * 0.45])
    assert seconds(replace(layer, forward_flops=1e9), 100).forward_s == pytest.approx(0.9 + 98 * 1e9 / (0.75 * PEAK))


def test_one_measurement_pays_launch_overhead_once() -> None:
    """Tensor-parallel time at batch 1 is launch overhead: more samples cost FLOPs, but no more than one device needs."""
    alone = Measurement(device="V100-16GB", batch=1, forward_s=2e-3, backward_s=4e-3)
    split = Measurement(device="V100-16GB", tensor_parallel=2, batch=1, forward_s=3e-3, backward_s=6e-3)
    layer = counted(traffic_bytes=0.0, measured=(alone, split))
    per_sample = 1e9 / (0.5 * PEAK) / 2
    assert seconds(layer, 5, tensor_parallel=2).forward_s == pytest.approx(3e-3 + 4 * per_sample)
    heavy = counted(traffic_bytes=0.0, forward_flops=1e12, measured=(alone, split))
    assert seconds(heavy, 5, tensor_parallel=2).forward_s == pytest.approx(3e-3 + 4 * 1e-3)
    assert seconds(heavy, 5).forward_s == pytest.approx(10e-3)


def test_device_nobody_measured() -> None:
    layer = LayerProfile(name="l", measured=(Measurement(device="T4", batch=1, forward_s=1.0, backward_s=1.0),))
    with pytest.raises(PlanError) as caught:
        seconds(layer, 1)
    assert "measured on T4" in str(caught.value) and "V100-16GB" in str(caught.value)
    assert seconds(replace(layer, forward_flops=1e9), 1).forward_s > 0
