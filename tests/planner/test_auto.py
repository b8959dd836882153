"""The automatic partition: against every contiguous partition, against equal op counts; devices; refusals."""
from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from whale_tf.balance import StagePartition, partition_fits, partition_latency_s
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ClusterError, ConfigError, InfeasibleError, PlanError
from whale_tf.planner.auto.choose import Request, candidates, choose
from whale_tf.planner.auto.settings import batch_to_plan_for, request_of, wants_search
from whale_tf.planner.measures import Allowed, Measures
from whale_tf.planner.partition import auto_partition, partition_problem, stage_devices
from whale_tf.planner.search import search
from whale_tf.planner.simulated import with_slices
from whale_tf.planner.slices import replica_slices
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.planner.virtual_device import dealt
from whale_tf.profiler.model_profile import ModelProfile

MIXED = "V100-32GB:2,P100-16GB:2"
GIB = 2.0 ** 30


def profile(flops: Sequence[float], parameters: Optional[Sequence[int]] = None, outputs: int = 10 ** 6,
            kept: int = 10 ** 7) -> ModelProfile:
    """Layers of these GFLOPs per sample."""
    sizes = parameters or [10 ** 7] * len(flops)
    return ModelProfile.parse({"name": "model", "batch_granularity": 1, "layers": [
        {"name": f"layer{i}", "forward_flops": work * 1e9, "parameter_bytes": int(size), "output_bytes": outputs,
         "activation_bytes": kept, "ops": [f"op{i}"]} for i, (work, size) in enumerate(zip(flops, sizes))]})


def random_profile(seed: int, layers: int) -> ModelProfile:
    random = np.random.RandomState(seed)
    return ModelProfile.parse({"name": "random", "batch_granularity": 1, "layers": [
        {"name": f"layer{i}", "forward_flops": float(random.gamma(1.0) * 1e9), "output_bytes": int(random.gamma(1) * 1e7),
         "parameter_bytes": int(random.gamma(1.0) * 1e7), "activation_bytes": int(random.gamma(1.0) * 1e8)}
        for i in range(layers)]})


PAIRS = [(random_profile(seed, layers), cluster, stages) for seed, layers, cluster, stages in (
    (0, 12, "V100-32GB:2", 2), (1, 12, "V100-32GB:4", 4), (2, 14, MIXED, 4), (3, 14, "V100-32GB:1,P100-16GB:1", 2),
    (4, 10, "2xV100-16GB:2", 4), (5, 10, "dapple-b:4", 4), (6, 16, "dapple-c:3", 3), (7, 12, "cpu:3", 3),
    (8, 12, "A100-80GB:2,T4:2", 4), (9, 9, "V100-32GB:2,P100-16GB:1", 3), (10, 16, MIXED, 2), (11, 20, "cpu:2", 2))]


def partitions(layers: int, stages: int) -> Iterator[Tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield (0,) + cuts + (layers,)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_within_two_percent_of_every_partition(number: int) -> None:
    model, name, stages = PAIRS[number]
    cluster = Cluster.parse(name)
    found = auto_partition(StageCosts(model, cluster), 64, stages, 8)
    problem = partition_problem(StageCosts(model, cluster), stage_devices(cluster, stages), 64, 8)
    best = min(partition_latency_s(problem, candidate)
               for cuts in partitions(len(model.layers), stages) for order in itertools.permutations(range(stages))
               for candidate in [StagePartition("all", cuts, order)] if partition_fits(problem, candidate))
    cuts = tuple(stage.first_layer for stage in found.stages) + (len(model.layers),)
    row = stage_devices(cluster, stages)[0]
    order = tuple(row.index(stage.devices[0][0]) for stage in found.stages)
    assert partition_latency_s(problem, StagePartition("found", cuts, order)) <= 1.02 * best


def test_cost_is_balanced_not_the_number_of_ops() -> None:
    """Heavy early layers: as many ops in each stage would make the first one three times as slow."""
    model = profile([6, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1])
    cluster = Cluster.parse("V100-32GB:2")
    found = auto_partition(StageCosts(model, cluster), 64, 2, 8)
    problem = partition_problem(StageCosts(model, cluster), stage_devices(cluster, 2), 64, 8)
    by_count = partition_latency_s(problem, StagePartition("count", (0, 6, 12), (0, 1)))
    assert found.stages[0].last_layer == 2 and by_count > 1.3 * found.latency_s


def test_unequal_devices_get_work_by_speed_and_replicas_the_same_mix() -> None:
    model, cluster = profile([1] * 24), Cluster.parse("V100-32GB:4,P100-16GB:4")
    found = auto_partition(StageCosts(model, cluster), 64, 2, 8)
    types = [{cluster.devices[index].type for index in stage.all_devices} for stage in found.stages]
    sizes = {types[i].pop(): stage.last_layer - stage.first_layer + 1 for i, stage in enumerate(found.stages)}
    assert set(sizes) == {"V100-32GB", "P100-16GB"} and found.model_replicas == 4
    speeds = [cluster.devices[index].peak_flops_per_s["fp32"] for index in (0, 4)]
    assert sizes["V100-32GB"] / 24 == pytest.approx(speeds[0] / sum(speeds), abs=1 / 24)


def test_memory_decides_where_speed_does_not() -> None:
    """Stage 0 of 2 keeps two micro-batches: it needs the larger device."""
    model = profile([1] * 8, kept=int(1.6 * GIB / 8), parameters=[1] * 8)
    types = {name: {"base": "V100-32GB", "memory_gib": size} for name, size in (("small", 1.8), ("large", 2.8))}
    nodes = [{"devices": ["small:1", "large:1"], "links": "default"}]
    cluster = Cluster.parse({"name": "c", "device_types": types, "nodes": nodes})
    found = auto_partition(StageCosts(model, cluster), 2, 2, 2)
    assert [stage.devices for stage in found.stages] == [((1,),), ((0,),)]


# -- devices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,size,by_memory,rows", [
    ("cpu:4", 2, True, [(0, 1), (2, 3)]),
    (MIXED, 2, True, [(0, 2), (1, 3)]),
    ("P100-16GB:2,V100-32GB:2", 2, True, [(2, 0), (3, 1)]),
    ("P100-16GB:2,V100-32GB:2", 2, False, [(0, 2), (1, 3)]),
    ("V100-32GB:3,P100-16GB:1", 2, True, [(0, 1), (2, 3)]),
])
def test_devices_are_dealt(name: str, size: int, by_memory: bool, rows: List[Tuple[int, ...]]) -> None:
    assert dealt(Cluster.parse(name), size, by_memory) == rows


def test_slices_by_speed() -> None:
    cluster = Cluster.parse("V100-32GB:1,P100-16GB:1")
    fast, slow = (device.peak_flops_per_s["fp32"] for device in cluster.devices)
    found = replica_slices("t", [(0, 1)], cluster, 100, 0.0, 0.0, "exact", "fp32")
    assert found is not None and found[0] / sum(found) == pytest.approx(fast / (fast + slow), abs=0.01)
    assert replica_slices("t", [(0, 1)], cluster, 100, 0.0, 0.0, "even", "fp32") is None
    assert replica_slices("t", [(0,)], cluster, 100, 0.0, 0.0, "exact", "fp32") is None
    assert replica_slices("t", [(0, 1), (1, 0)], cluster, 100, 0.0, 0.0, "exact", "fp32") is None, "each place has a slow device"


@pytest.mark.parametrize("name,samples,slices", [("V100-32GB:1,P100-16GB:1", 8, (5, 3)), ("V100-32GB:2", 8, None),
                                                 ("V100-32GB:2", 7, (4, 3))])
def test_plans_of_searches_get_slices(name: str, samples: int, slices: Any) -> None:
    model, cluster = profile([1] * 4), Cluster.parse(name)
    result = search(model, cluster, samples, "data-parallel", micro_batches=1)
    assert with_slices(result, model, cluster, "exact").task_graphs[0].slices == slices


def test_slices_follow_the_speed_in_the_precision_of_the_model() -> None:
    """Tensor cores: in float32 the V100 is 1.7 times as fast as the P100, in float16 6.7 times."""
    model, cluster = replace(profile([1] * 4), precision="fp16"), Cluster.parse("V100-32GB:1,P100-16GB:1")
    found = search(model, cluster, 100, "data-parallel", micro_batches=1)
    slices = with_slices(found, model, cluster, "exact").task_graphs[0].slices
    fast, slow = (device.peak_flops_per_s["fp16"] for device in cluster.devices)
    assert slices is not None and slices[0] / sum(slices) == pytest.approx(fast / (fast + slow), abs=0.01)


# -- choosing --------------------------------------------------------------------------------------------------------------


def request(**fields: Any) -> Request:
    values: Dict[str, Any] = dict(dict(method="all", num_stages=None, micro_batches=None, global_batch=64), **fields)
    return Request(**values)


def test_small_parameters_make_data_parallelism_best() -> None:
    model = profile([10] * 8, parameters=[1000] * 8)
    found = choose(model, model, Cluster.parse("V100-32GB:4"), request())
    assert found.kind == "dp" and found.search == "data-parallel" and found.runners_up


def test_large_parameters_on_a_slow_network_make_a_pipeline_best() -> None:
    model = profile([1] * 8, parameters=[4 * 10 ** 8] * 8, outputs=10 ** 5)
    found = choose(model, model, Cluster.parse("dapple-c:4"), request(method="auto"))
    assert found.kind == "straight" and len(found.stages) == 4 and found.micro_batches > 1


def test_best_of_all_is_no_slower_than_each() -> None:
    model, cluster = random_profile(3, 12), Cluster.parse("dapple-b:4")
    every = [choose(model, model, cluster, request(method=method)) for method in ("auto", "dapple", "amp")]
    best = choose(model, model, cluster, request())
    assert best.latency_s <= 1.01 * min(result.latency_s for result in every)


def test_cuts_inside_blocks_have_to_pay() -> None:
    layers = profile([2] * 8)
    pieces = profile([1] * 16)
    found = choose(layers, pieces, Cluster.parse("V100-32GB:4"), request(method="auto", num_stages=4))
    assert found.profile is layers
    layers = profile([3] * 3)
    pieces = profile([1] * 9)
    found = choose(layers, pieces, Cluster.parse("V100-32GB:2"), request(method="auto", num_stages=2))
    assert found.profile is pieces, "1:2 layers against 4:5 pieces"


def test_cuts_between_blocks_count_if_finer_ones_do_not_fit() -> None:
    """Two layers of 24 GB with their state; of three pieces of 16 GB, two would be on one device."""
    layers, pieces = profile([3] * 2, [6 * 10 ** 9] * 2), profile([2] * 3, [4 * 10 ** 9] * 3)
    cluster, asked = Cluster.parse("V100-32GB:2").limited(30e9), request(method="auto", num_stages=2)
    assert [one.profile for one in candidates(layers, pieces, cluster, asked, Measures())] == [layers] * 3


def test_micro_batches_are_chosen_and_kept_when_given() -> None:
    model, cluster = profile([1] * 8), Cluster.parse("V100-32GB:4")
    chosen = choose(model, model, cluster, request(method="auto", num_stages=4))
    assert chosen.micro_batches >= 8 and 64 % chosen.micro_batches == 0
    assert choose(model, model, cluster, request(method="auto", num_stages=4, micro_batches=2)).micro_batches == 2
    assert choose(model, model, cluster, request(num_stages=None, micro_batches=4)).micro_batches == 4


@pytest.mark.parametrize("fields,error,match", [
    ({"num_stages": 9, "method": "auto"}, InfeasibleError, "num_task_graph is 9, but 'model' can be cut into at most 8 parts"),
    ({"num_stages": 3, "method": "auto"}, PlanError, "3 TaskGraphs with a device each do not divide the 4 devices"),
    ({"num_stages": 2, "method": "auto", "global_batch": 7}, InfeasibleError, "7 examples does not divide over 2 model replicas"),
])
def test_refusals(fields: Dict[str, Any], error: Any, match: str) -> None:
    model = profile([1] * 8)
    with pytest.raises(error, match=match):
        choose(model, model, Cluster.parse("V100-32GB:4"), request(**fields))


@pytest.mark.parametrize("method", ["all", "auto", "dapple", "amp"])
def test_model_that_fits_no_device_is_refused(method: str) -> None:
    model = profile([1] * 8, parameters=[60 * 10 ** 9] * 8)
    with pytest.raises(InfeasibleError, match="fits? "):
        choose(model, model, Cluster.parse("V100-32GB:4"), request(method=method))


def test_unknown_device_type_suggests_the_nearest() -> None:
    with pytest.raises(ClusterError, match="Did you mean 'V100-32GB'"):
        Cluster.parse("V100-23GB:4")


# -- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values,method,stages", [
    ({"auto_parallel": True}, "all", None), ({"num_task_graph": 2}, "auto", 2), ({"auto_parallel": "amp"}, "amp", None),
    ({"auto_parallel": True, "num_task_graph": 2, "num_micro_batch": 4}, "auto", 2)])
def test_requests(values: Dict[str, Any], method: str, stages: Optional[int]) -> None:
    config = Config(values)
    found = request_of(config, 64)
    assert found.allowed == Allowed("none") and request_of(Config(dict(values, recompute="auto")), 64).allowed == Allowed("auto")
    assert wants_search(config) and (found.method, found.num_stages, found.global_batch) == (method, stages, 64)


def test_no_search_is_asked_for_by_default() -> None:
    assert not wants_search(Config()) and not wants_search(Config({"num_micro_batch": 4}))


def test_search_that_counts_for_itself_takes_no_count() -> None:
    with pytest.raises(ConfigError, match="chooses the number of TaskGraphs itself, but pipeline.num_stages is 2"):
        request_of(Config({"auto_parallel": "dapple", "num_task_graph": 2}), 64)


def test_batch_sizes() -> None:
    cluster = Cluster.parse("cpu:3")
    assert batch_to_plan_for(Config({"auto.batch_size": 5}), cluster, 48) == 48
    assert batch_to_plan_for(Config({"auto.batch_size": 5}), cluster, None) == 5
    assert batch_to_plan_for(Config({"num_micro_batch": 4}), cluster, None) == 36
