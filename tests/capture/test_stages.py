"""Rhino's pipeline stages of captured graphs: units, what crosses, who fits whom."""
from __future__ import annotations

from typing import Any, Iterator

import pytest

import whale_tf as wh
from models import gpt2
from tests.capture.test_chain import chain_of_model
from whale_tf._tf_compat import v1
from whale_tf.cluster import Cluster
from whale_tf.planner.rhino.pipeline import crossing_bytes, stage_program
from whale_tf.planner.rhino.stages import pipelines, staged_chain, units_of
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import Source

FOUR = Cluster.parse("rhino-s1:4")
COLUMNS = ("forward_flops", "backward_flops", "traffic_bytes", "launches", "parameter_bytes", "activation_bytes")


@pytest.fixture(autouse=True)
def _hooks() -> Iterator[None]:
    wh.init({}, cluster="cpu:2")
    yield
    wh.shutdown()


def towers() -> Any:
    """Two towers of four layers each, added up at their ends; one is narrow behind its second layer, one behind its third."""
    ends = []
    for name, widths in (("left", (64, 8, 64, 64)), ("right", (64, 64, 8, 64))):
        h = v1.placeholder("float32", [32, 64], name=name + "_x")
        for i, width in enumerate(widths):
            w = v1.get_variable(f"{name}/w{i}", [h.shape[1], width])
            h = v1.nn.relu(v1.matmul(h, w, name=f"{name}/product{i}"))
        ends.append(h)
    return v1.reduce_sum(ends[0] + ends[1])


def tower_chain() -> Chain:
    return chain_of_model(towers, 32)[0]


@pytest.mark.slow
def test_branches_stay_apart_and_are_cut_where_each_is_narrow() -> None:
    chain = tower_chain()
    units = units_of(chain, FOUR.devices[0])
    assert len(units.problem.work) == 9, "four products in each tower, and the sum"
    found = stage_program(units.problem, 2, 0.5)
    assert found.is_optimal and found.bytes == crossing_bytes(units.problem, found.of) <= 2 * 4 * 32 * 8
    names = [{chain.graph.ops[op].name for segment in segments for op in chain.ops[segment]} for segments in units.segments]
    stage = {name: found.of[unit] for unit, members in enumerate(names) for name in members if "product" in name}
    for tower in ("left", "right"):
        stages = [stage[f"{tower}/product{i}"] for i in range(4)]
        assert stages == sorted(stages)


@pytest.mark.slow
def test_stages_hold_what_the_segments_held() -> None:
    chain = tower_chain()
    units = units_of(chain, FOUR.devices[0])
    found = stage_program(units.problem, 3, 0.3)
    staged = staged_chain(chain, units, found.of)
    assert staged.size == 3 and sorted(op for row in staged.ops for op in row) == sorted(op for row in chain.ops for op in row)
    for column in COLUMNS:
        assert getattr(staged, column).sum() == pytest.approx(getattr(chain, column).sum())
    assert staged.crossing_bytes[-1] == 0 and staged.crossing_bytes[0] > 0
    place = {op: stage for stage, ops in enumerate(staged.ops) for op in ops}
    for op, stage in place.items():
        for tensor in chain.graph.ops[op].outputs:
            assert all(place[reader] >= stage for reader, _ in chain.graph.consumers(tensor) if reader in place)


@pytest.mark.slow
def test_pipelines_of_a_transformer() -> None:
    """Every mesh with a pipeline, equal layers in equal stages."""
    config = gpt2.Gpt2Config(layers=4, hidden=64, heads=2, vocab=100, seq=16)
    chain, _ = chain_of_model(lambda: gpt2.build(gpt2.inputs(config, 16), config).loss, 16)
    found = pipelines(chain, Source("gpt"), FOUR, 16)
    shapes = {(len(p.stages), p.model_replicas, len(p.stages[0].devices[0])) for p in found}
    assert shapes == {(2, 2, 1), (2, 1, 2), (4, 1, 1)}
    for pipeline in found:
        assert pipeline.profile is not None
        assert pipeline.micro_batches > 1 and 16 % pipeline.micro_batches == 0
        assert len(pipeline.profile.layers) == len(pipeline.stages)
        assert sorted(d for stage in pipeline.stages for d in stage.all_devices) == [0, 1, 2, 3]
    flops = [[layer.forward_flops for layer in p.profile.layers] for p in found if p.profile and len(p.stages) == 2]
    assert min(max(stages) / sum(stages) for stages in flops) <= 0.55
    assert pipelines(chain, Source("gpt"), FOUR, 1) == [] and {p.micro_batches for p in pipelines(
        chain, Source("gpt"), FOUR, 16, micro_batches=4)} == {4}
