"""Lower bounds of the time of plans of layers, worked out by hand.  Links carry one byte a second."""
from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

import pytest

from whale_tf.cluster import Cluster
from whale_tf.planner.bounds import Bounds
from whale_tf.planner.candidate import Candidate, Stage
from whale_tf.planner.measures import Measures
from whale_tf.planner.simulated import ALGORITHM
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Simulator
from whale_tf.simulator.network import Network
from whale_tf.simulator.transformation import ALL_REDUCE

SAMPLES = 18  # for which all times are given; fewer take proportionally less


def cluster(*types: str, latency_s: float = 0.0, bandwidth: float = 1.0) -> Cluster:
    """Nodes with devices of D (slow) and F (twice the arithmetic), and one adapter each."""
    kinds = {name: {"kind": "CPU", "memory_gib": 4, "fp32": rate, "memory_bandwidth_bytes_per_s": 1e9}
             for name, rate in (("D", 1e9), ("F", 2e9))}
    nic = {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s}
    nodes = [{"devices": list(each), "nic": nic, "links": "default"} for each in types]
    return Cluster.parse({"name": "slow", "device_types": kinds, "nodes": nodes})


def layer(name: str, forward_s: float, backward_s: float, parameter_bytes: int = 0, **more: Any) -> Dict[str, Any]:
    """F takes a quarter of the time; two devices take half of it each."""
    measured = [{"device": device, "tensor_parallel": degree, "batch": SAMPLES, "forward_s": forward_s / by / degree,
                 "backward_s": backward_s / by / degree} for device, by in (("D", 1), ("F", 4)) for degree in (1, 2)]
    return {"name": name, "output_bytes": 0, "parameter_bytes": parameter_bytes, "measured": measured, **more}


def seconds(layers: Sequence[Dict[str, Any]], stages: Sequence[Tuple], machines: Cluster, count: int = 1, measures: Any = None,
            **network: Any) -> float:
    """The bound of stages (layers, devices of a model replica, ...), with micro-batches of SAMPLES in all."""
    profile = ModelProfile.parse({"name": "drawn", "layers": list(layers)})
    found, first = [], 0
    for size, rows, *strategy in stages:
        found.append(Stage(first, first + size - 1, rows, *strategy, warmup=len(stages) - len(found)))  # type: ignore[misc]
        first += size
    candidate = Candidate("given", "", "drawn", global_batch=SAMPLES * count, num_devices=len(machines), stages=tuple(found),
                          micro_batches=count, model_replicas=len(found[0].devices), profile=profile,
                          measures=Measures(**(measures or {})))
    simulator = Simulator(machines)
    simulator.network = Network(machines, **network)
    return Bounds(machines, simulator, ALGORITHM).seconds(candidate)


SHORT, LONG = layer("a", 1.0, 2.0), layer("b", 3.0, 5.0)


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
def test_slowest_stage_and_the_way_to_it_and_back(schedule: str) -> None:
    def of(*layers: Any) -> float:
        return seconds(layers, [(1, ((0,),)), (1, ((1,),))], cluster("D", "D"), 3, {"schedule": schedule})

    assert of(SHORT, LONG) == 1 + 3 * (3 + 5) + 2
    assert of(LONG, SHORT) == 3 * (3 + 5)
    assert of(layer("c", 1.0, 2.0), SHORT) == 1 + 3 * (1 + 2) + 2


def test_other_schedules_are_bounded_by_the_busiest_device() -> None:
    layers = [SHORT, LONG, layer("c", 4.0, 1.0), layer("d", 2.0, 2.0)]
    stages = [(1, ((device,),)) for device in (0, 1, 0, 1)]
    assert seconds(layers, stages, cluster("D", "D"), 2, {"schedule": "interleaved"}) == 2 * (3 + 5 + 2 + 2)
    assert seconds(layers[::-1], stages, cluster("D", "D"), 2, {"schedule": "interleaved"}) == 2 * (3 + 5 + 2 + 2)


def test_unequal_devices() -> None:
    """Parts follow the arithmetic: D has a third of them.  The slower one counts for the stage, the faster one for others."""
    machines = cluster("D", "F", "D")
    alone = seconds([SHORT], [(1, ((0, 1),))], machines, 2)
    assert alone == pytest.approx(2 * 3 / 9 * (1 + 2), rel=1e-12)
    both = seconds([SHORT, LONG], [(1, ((0, 1),)), (1, ((2,),))], machines, 2)
    assert both == pytest.approx(6 / 9 / 4 * (1 + 2) + 2 * (3 + 5), rel=1e-12)


def test_gradients_are_summed_behind_the_last_backward_step() -> None:
    """Each of two replicas has half of the work."""
    machines = cluster("D", "D", "D", "D")
    one = [layer("a", 1.0, 2.0, 4)]
    assert seconds(one, [(1, ((0, 1),))], machines, 3) == 3 * 0.5 + 2 * 1.0 + 4
    two = [layer("a", 1.0, 2.0, 1), layer("b", 3.0, 5.0, 8)]
    stages = [(1, ((0, 1),)), (1, ((2, 3),))]
    assert seconds(two, stages, machines, 2) == 0.5 + 2 * 1.5 + 2.5 + 8
    assert seconds(two[::-1], stages, machines, 2) == 2 * 1.5 + 2.5 + 8
    slow = {ALL_REDUCE: 2.0}  # how long sums take, relative to what their links say
    assert seconds(one, [(1, ((0, 1),))], machines, 3, correction=slow) == 3 * 0.5 + 2 * 1.0 + 2 * 4
    assert seconds([layer("a", 0.1, 0.2)], [(1, ((0, 1),))], machines) == pytest.approx(0.15)


def test_ring_of_three_sends_four_thirds_of_the_bytes() -> None:
    found = seconds([layer("a", 1.0, 2.0, 6)], [(1, ((0, 1, 2),))], cluster("D", "D", "D", bandwidth=2.0))
    assert found == pytest.approx(1 / 3 + 6 * 4 / 3 / 2, rel=1e-12)


def test_slower_replica_decides_when_gradients_are_summed() -> None:
    found = seconds([layer("a", 1.0, 2.0, 4)], [(1, ((0, 1),))], cluster("D", "F"), 2)
    assert found == pytest.approx(2 * 3 / 9 + 3 / 9 * 2 + 4, rel=1e-12)


def test_sums_of_two_stages_share_a_link() -> None:
    """From when the first stage begins its sum; alone, the second one would end after 6 + 4 seconds."""
    layers, stages = [layer("a", 1.0, 2.0, 6), layer("b", 3.0, 5.0, 4)], [(1, ((0, 2),)), (1, ((1, 3),))]
    assert seconds(layers, stages, cluster("DD", "DD"), 2) == pytest.approx(2 + 6 + 4, rel=1e-9)
    layers, stages = [layer("a", 1.0, 2.0, 6), layer("b", 3.0, 5.0, 3)], [(1, ((0, 2, 4),)), (1, ((1, 3, 5),))]
    found = seconds(layers, stages, cluster("DD", "DD", "DD"), 2)
    assert found == pytest.approx(2 * 1 / 3 + 2 / 3 + (6 + 3) * 4 / 3, rel=1e-9)


def test_zero_reduces_and_gathers_half_of_what_a_sum_sends() -> None:
    """Under v2 every micro-batch reduces its gradients, from its first backward step on; under v3 each also gathers values, over
    the same links."""
    def of(count: int, zero: str) -> float:
        return seconds([layer("a", 0.1, 0.2, 4)], [(1, ((0, 1),))], cluster("D", "D"), count, {"zero": zero})

    assert [of(1, zero) for zero in ("none", "v1", "v2")] == [0.05 + 4, 0.05 + 4 / 2, 0.05 + 4 / 2]
    assert of(3, "v1") == pytest.approx(3 * 0.05 + 2 * 0.1 + 4 / 2) and of(3, "v2") == 0.05 + 3 * 4 / 2
    assert of(3, "v3") == 3 * (4 / 2 + 4 / 2)


def test_round_trips_of_micro_batches() -> None:
    """Two micro-batches of the first stage are on their way at once, one of the second.  Adapters of the second stage's node
    receive both devices' shares, and under tensor parallelism all examples for each."""
    layers = [layer("a", 1.0, 2.0, output_bytes=1), layer("b", 3.0, 5.0, tensor_parallel_bytes=0)]
    trip_s = (1 + 2) + (3 + 5) + 2 * SAMPLES  # SAMPLES bytes there, and back
    assert seconds(layers, [(1, ((0,),)), (1, ((1,),))], cluster("D", "D"), 6) == 6 / 2 * trip_s
    halves_s = (1 + 2) + (3 + 5) / 2 + 2 * SAMPLES
    assert seconds(layers, [(1, ((0,),)), (1, ((1, 2),))], cluster("D", "DD"), 6) == 6 / 2 * halves_s


def test_tied_parameter_is_summed_once() -> None:
    layers = [layer("a", 0.0, 0.0, 1), layer("b", 0.0, 0.0, 4, tied="w"), layer("c", 0.0, 0.0, 2),
              layer("d", 0.0, 0.0, 4, tied="w"), layer("e", 0.0, 0.0, 4, tied="w")]
    assert seconds(layers, [(5, ((0, 1),))], cluster("D", "D")) == 1 + 4 + 2


def test_tensor_parallelism() -> None:
    """The next layer waits for the sum of a divided layer.  One without parameters, and one that cannot be divided, are computed
    whole by each device."""
    layers = [layer("first", 2.0, 4.0, 4, tensor_parallel_bytes=0), layer("second", 0.0, 0.0, 4, tensor_parallel_bytes=1),
              layer("free", 1.0, 1.0, 0, tensor_parallel_bytes=5), layer("whole", 3.0, 5.0, 6),
              layer("third", 0.0, 0.0, 4, tensor_parallel_bytes=3), layer("last", 4.0, 6.0, 4, tensor_parallel_bytes=2)]
    machines, latency_s = cluster("D", "D", latency_s=0.25), 2 * 0.25  # there and back
    forward_s = 2 / 2 + 1 + 3 + 4 / 2 + 3 * latency_s + (0 + 1 + 3) * SAMPLES
    backward_s = 4 / 2 + 1 + 5 + 6 / 2 + 3 * latency_s + (1 + 3 + 2) * SAMPLES
    found = seconds(layers, [(6, ((0, 1),), "split")], machines, 2)
    assert found == pytest.approx(2 * (forward_s + backward_s), rel=1e-12)
    assert seconds(layers[:1], [(1, ((0,),))], machines) == 2 + 4  # a replica has all of it


def test_replicas_of_divided_layers_sum_their_parts() -> None:
    """Each device meets its counterpart in the other model replica, which has half of the samples."""
    layers = [layer("first", 0.0, 0.0, 40, tensor_parallel_bytes=0), layer("whole", 1.0, 2.0, 60)]
    found = seconds(layers, [(2, ((0, 1), (2, 3)), "split")], cluster("D", "D", "D", "D"), 2)
    assert found == pytest.approx(2 * 0.5 + 1.0 + 40 / 2, rel=1e-9)
