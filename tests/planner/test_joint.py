"""The search over partition, recomputation, ZeRO, offloading, precision and schedule."""
from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, List

import pytest

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.plan import OFFLOAD, ZERO, Plan
from whale_tf.planner.candidate import TIE, Candidate
from whale_tf.planner.joint import Joint
from whale_tf.planner.layers import Layers
from whale_tf.planner.measures import AUTO, Allowed, Measures
from whale_tf.planner.search import search, searched
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import LayerEstimator, Options, layer_names, layered_model, simulate, strategy_from_plan

pytestmark = pytest.mark.once
EVERYTHING = Allowed(AUTO, AUTO, AUTO)
GB = 1e9


def model(layers: int = 5, activations: float = 2.0, parameters: float = 0.5) -> ModelProfile:
    """``activations``: GB that a layer keeps of a sample; ``parameters``: GB of a layer."""
    return ModelProfile.parse({"name": "m", "batch_granularity": 1, "layers": [
        {"name": f"l{i}", "forward_flops": 3e12, "parameter_bytes": int(parameters * GB), "output_bytes": 4 * 10 ** 7,
         "activation_bytes": int(activations * GB)} for i in range(layers)]})


def every(profile: ModelProfile, cluster: Cluster, batch: int) -> List[Candidate]:
    """Every plan of every division, with and without a limit, all played with the least computed again that fits."""
    found, model = [], Layers(profile, cluster, lambda measures: [])
    for zero, offload in itertools.product(ZERO, OFFLOAD):
        for recompute, bounded in itertools.product(("none", "full"), (True, False)):
            measures = Measures(recompute, zero, offload, is_bounded=bounded)
            try:
                plans = searched(profile, cluster, batch, "dapple", measures)
            except InfeasibleError:
                continue
            found += [model.play(replace(one, profile=profile), measures._replace(recompute=AUTO)) for one in plans]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("limit, devices, activations, parameters", [
    (15.0, 2, 2.0, 0.5), (6.0, 2, 2.0, 0.5), pytest.param(15.0, 4, 1.0, 1.0, marks=pytest.mark.full), (6.0, 4, 1.0, 1.0),
    pytest.param(10.0, 4, 3.0, 0.1, marks=pytest.mark.full)])
def test_plan_is_as_fast_as_the_best_of_all_divisions(limit: float, devices: int, activations: float,
                                                           parameters: float) -> None:
    profile, cluster = model(4, activations, parameters), Cluster.parse(f"H200-141GB:{devices}").limited(limit * GB)
    best_s = min((one.latency_s for one in every(profile, cluster, 4) if one.fits), default=None)
    if best_s is None:
        with pytest.raises(InfeasibleError):
            search(profile, cluster, 4, "dapple", EVERYTHING)
    else:
        found = search(profile, cluster, 4, "dapple", EVERYTHING)
        assert found.fits and found.latency_s <= best_s * TIE


def short(limit: float, **allowed: Any) -> Candidate:
    return search(model(), Cluster.parse("V100-32GB:4").limited(limit * GB), 4, "dapple", Allowed(**allowed))


@pytest.mark.slow
def test_no_more_is_done_than_memory_asks_for() -> None:
    assert not short(30.0, zero=AUTO, offload=AUTO).measures.described()
    tight = short(9.0, zero=AUTO, offload=AUTO)
    assert tight.measures.described() and max(tight.peak_memory_bytes) <= 9.0 * GB
    assert len(tight.without) >= 1 and all(text.startswith("without ") for text in tight.without)


@pytest.mark.slow
def test_what_is_computed_again_is_the_least_that_fits() -> None:
    free, full = short(30.0, recompute="none"), short(30.0, recompute="full")
    found = short(max(free.peak_memory_bytes) / GB - 1.0)
    assert max(full.peak_memory_bytes) < max(found.peak_memory_bytes) < max(free.peak_memory_bytes)
    assert free.latency_s <= found.latency_s < full.latency_s


@pytest.mark.slow
def test_limit_below_the_smallest_peak_says_that() -> None:
    with pytest.raises(InfeasibleError, match="needs [0-9.]+ GiB on its fullest device") as caught:
        short(0.2)
    least = caught.value.least_bytes
    assert least is not None and short(1.1 * least / GB + 0.5).fits


def test_zero_needs_replicas() -> None:
    with pytest.raises(PlanError, match="zero is 'v2', which divides over replicas"):
        search(model(), Cluster.parse("V100-32GB:1"), 4, "dapple", Allowed(zero="v2"))


@pytest.mark.parametrize("schedule, stages", [
    ("zero_bubble_h1", "several stages,"), ("gpipe", "several stages,"), ("interleaved", "several stages on each device,")])
def test_schedule_for_which_no_plan_has_enough_stages(schedule: str, stages: str) -> None:
    """Also where ZeRO would have replicas: a search that finds data parallelism alone has no pipeline to play."""
    with pytest.raises(InfeasibleError, match=f"found no plan of 'm' with {stages} as schedule '{schedule}' needs"):
        search(model(), Cluster.parse("V100-32GB:2"), 4, "data-parallel", Allowed(zero="v2", schedule=schedule))


@pytest.mark.slow
def test_schedule_is_chosen_by_playing() -> None:
    profile, cluster = model(8, 0.1, 1.0), Cluster.parse("4xV100-32GB:1")  # gradients too large for data parallelism
    plain = search(profile, cluster, 8, "dapple", Allowed())
    found = search(profile, cluster, 8, "dapple", Allowed(schedule=AUTO))
    assert len(found.stages) > 1 and found.measures.schedule.startswith("zero_bubble") and found.latency_s < plain.latency_s


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble_v"])
def test_several_stages_on_each_device(schedule: str) -> None:
    profile, cluster = model(8, 0.1, 1.0), Cluster.parse("2xV100-32GB:1")
    found = search(profile, cluster, 8, "dapple", Allowed("none", schedule=schedule))
    assert found.measures.schedule == schedule and found.is_played and found.fits
    assert len(found.stages) >= 2 * len({stage.devices for stage in found.stages})
    assert [stage.first_layer for stage in found.stages[1:]] == [stage.last_layer + 1 for stage in found.stages[:-1]]
    assert found.profile is not None
    plan = Plan.parse(found.to_plan(found.profile).to_json())
    graph = layered_model(found.profile, 8 // plan.num_micro_batch // plan.num_model_replicas)
    strategy = strategy_from_plan(plan, graph, layer_names(found.profile))
    result = simulate(strategy, cluster, Options(steady_state=True), LayerEstimator(graph, found.profile))
    assert result.step_time_s == pytest.approx(found.latency_s)


@pytest.mark.slow
def test_sixteen_bits_are_faster_and_smaller() -> None:
    own, half = (search(model(), "V100-32GB:4", 4, "dapple", Allowed("none", precision=name)) for name in ("own", "float16"))
    assert half.latency_s < own.latency_s and max(half.peak_memory_bytes) < max(own.peak_memory_bytes)
    assert half.profile is not None and half.to_plan(half.profile).precision == "float16"


@pytest.mark.slow
def test_plan_says_what_was_played() -> None:
    """Written, read and simulated again, it takes as long and as much."""
    cluster = Cluster.parse("V100-32GB:4").limited(6.5 * GB)
    found = search(model(), cluster, 4, "dapple", EVERYTHING)
    assert found.profile is not None and len(found.measures.described()) > 1
    plan = Plan.parse(found.to_plan(found.profile).to_json())
    graph = layered_model(found.profile, 4 // plan.num_micro_batch)
    strategy = strategy_from_plan(plan, graph, layer_names(found.profile))
    result = simulate(strategy, cluster, Options(), LayerEstimator(graph, found.profile))
    assert result.step_time_s == pytest.approx(found.latency_s) and not result.oom
    assert max(result.peak_memory_bytes) == pytest.approx(max(found.peak_memory_bytes), abs=2)


@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "zero_bubble_v"])
def test_model_without_parameters_under_schedules_that_separate_their_gradients(schedule: str) -> None:
    found = search(model(parameters=0.0), Cluster.parse("V100-32GB:2"), 4, "dapple", Allowed("none", schedule=schedule))
    assert found.measures.schedule == schedule and found.is_played


@pytest.mark.parametrize("allowed", [Allowed(), Allowed(offload="states"), Allowed(AUTO, "v1"), Allowed("none", AUTO, "v0")])
def test_one_example_on_two_devices_is_refused_under_all_measures(allowed: Allowed) -> None:
    with pytest.raises(InfeasibleError, match="1 units cannot give each of 2 devices at least 1"):
        search(model(), Cluster.parse("V100-32GB:2"), 1, "data-parallel", allowed)


def test_interrupted_search_answers_the_best_so_far() -> None:
    profile, cluster = model(), Cluster.parse("V100-32GB:4").limited(9.0 * GB)
    layers = Layers(profile, cluster, lambda measures: searched(profile, cluster, 4, "dapple", measures))
    play, played = layers.play, []

    def until_interrupted(found: Candidate, measures: Measures) -> Candidate:
        if any(one.fits for one in played):
            raise KeyboardInterrupt
        played.append(play(found, measures))
        return played[-1]

    layers.play = until_interrupted  # type: ignore[method-assign]
    taken = Joint(layers).best(EVERYTHING)
    assert taken.latency_s == min(
        one.latency_s for one in played if one.fits) and taken.without[0].startswith("interrupted: the best of 1 ")


def test_interrupted_search_answers_nothing_under_other_measures() -> None:
    """Plans are first played without ZeRO, as bounds."""
    profile, cluster = model(), Cluster.parse("V100-32GB:4").limited(30.0 * GB)
    layers = Layers(profile, cluster, lambda measures: searched(profile, cluster, 4, "dapple", measures))
    play, played = layers.play, []

    def until_interrupted(found: Candidate, measures: Measures) -> Candidate:
        if measures.zero != "none":
            raise KeyboardInterrupt
        played.append(play(found, measures))
        return played[-1]

    layers.play = until_interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        Joint(layers).best(Allowed(AUTO, "v1"))
    assert any(one.fits for one in played)


def test_answer_stays_if_the_search_is_interrupted_when_it_is_there() -> None:
    """While the step time without each of its measures is found."""
    profile, cluster = model(), Cluster.parse("V100-32GB:4").limited(6.5 * GB)
    joint = Joint(Layers(profile, cluster, lambda measures: searched(profile, cluster, 4, "dapple", measures)))
    searches = [joint.played]

    def once(allowed: Allowed) -> List[Candidate]:
        if not searches:
            raise KeyboardInterrupt
        return searches.pop()(allowed)

    joint.played = once  # type: ignore[method-assign]
    taken = joint.best(Allowed(AUTO))
    assert taken.fits and taken.measures.described() and taken.without == (
        "interrupted: what it takes without its other measures is not known",)


@pytest.mark.slow
def test_data_parallelism_with_zero_is_always_a_candidate() -> None:
    """Although data parallelism fits without: dividing the updates of many parameters makes it faster."""
    heavy, cluster = model(4, 0.01, 1.0), Cluster.parse("A100-80GB:8")
    profile = replace(heavy, layers=tuple(replace(layer, forward_flops=1e11) for layer in heavy.layers))
    plain = search(profile, cluster, 8, "data-parallel", Allowed())
    found = search(profile, cluster, 8, "amp", Allowed(zero=AUTO))
    divided = [search(profile, cluster, 8, "data-parallel", Allowed(zero=level)) for level in ZERO[1:]]
    assert not plain.measures.described() and min(one.latency_s for one in divided) < plain.latency_s / TIE
    assert found.latency_s <= TIE * min(one.latency_s for one in divided)
