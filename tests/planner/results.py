"""A small profile, and what holds for the result of every search of it."""
from __future__ import annotations

import json
from typing import Any

from whale_tf.plan import Plan
from whale_tf.planner.candidate import Candidate
from whale_tf.profiler.model_profile import ModelProfile


def profile(ops: bool = False, **changes: Any) -> ModelProfile:
    layers = [{"name": f"layer_{i}", "forward_flops": 1e9, "parameter_bytes": 4 * 10 ** 6, "output_bytes": 1000,
               "activation_bytes": 10 ** 6, "tensor_parallel_bytes": 1000,
               "ops": [f"m/a{i}", f"m/b{i}"] if ops else []} for i in range(6)]
    return ModelProfile.parse(dict({"name": "small", "batch_granularity": 1, "layers": layers,
                                    "graph": "f1" if ops else ""}, **changes))


def check(found: Candidate, method: str) -> None:
    """A legal plan of :func:`profile` on four devices with a batch of 16, which can be written and read."""
    devices = sorted(device for stage in found.stages for device in stage.all_devices)
    each = 2 if found.search == "replicate-split" and len(found.stages) == 2 else 1  # both TaskGraphs are on all devices
    assert devices == sorted([0, 1, 2, 3] * each)
    assert found.stages[0].first_layer == 0 and found.stages[-1].last_layer == 5
    assert all(b.first_layer == a.last_layer + 1 for a, b in zip(found.stages, found.stages[1:]))
    assert found.micro_batches * found.model_replicas <= 16 and found.fits
    value = json.loads(found.to_json())
    assert value["search"] == method and value["kind"] in ("dp", "straight", "hybrid")
    assert set(value) >= {"stages", "micro_batches", "latency_s", "peak_memory_bytes", "search_seconds", "runners_up"}
    assert set(value["stages"][0]) >= {"first_layer", "last_layer", "devices"}
    assert len(value["peak_memory_bytes"]) == 4
    plan = found.to_plan(profile())
    assert Plan.parse(plan.to_json()) == plan
    assert plan.estimate.search == method and plan.estimate.latency_s == found.latency_s
