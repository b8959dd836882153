from __future__ import annotations

import pytest

from benchmarks.papers_memory import MEGATRON_BYTES, layer, update_seconds, volume
from tests.simulator.synthetic import NO_RESERVE, KnownTimes, chain_model, flat_cluster, pipeline
from whale_tf.cluster import Cluster
from whale_tf.cluster.hardware import HOST_BYTES_PER_S
from whale_tf.simulator import Options, built_in_model, simulate, uniform_3d
from whale_tf.simulator.instructions import COMPUTATION
from whale_tf.simulator.memory import lifetimes
from whale_tf.simulator.network import Network
from whale_tf.simulator.tasks import Tasks
from whale_tf.simulator.zoo.transformers import transformer


def small(batch: int = 8):  # type: ignore[no-untyped-def]
    return transformer("small", batch, 4, 64, 8, 32, 128)


def peak(**options) -> float:  # type: ignore[no-untyped-def]
    return simulate(uniform_3d(small(), **options), Cluster.parse("hc1"), NO_RESERVE).peak_memory_bytes[0]


def test_what_is_held_all_the_time_is_sixteen_bytes_a_parameter_with_adam() -> None:
    model = small()
    result = simulate(uniform_3d(model), flat_cluster(1), NO_RESERVE)
    assert result.memory[0].bytes[0] == pytest.approx(16 * model.parameter_count)


@pytest.mark.parametrize("zero, held", [("none", 16.0), ("v1", 8 + 8 / 8.0), ("v2", 4 + 12 / 8.0), ("v3", 16 / 8.0)])
def test_zero_divides_what_its_stage_says(zero: str, held: float) -> None:
    model = small()
    result = simulate(uniform_3d(model, 8, zero=zero), Cluster.parse("hc1"), NO_RESERVE)
    assert result.memory[0].bytes[0] == pytest.approx(held * model.parameter_count)


def test_tensor_parallelism_divides_what_it_partitions() -> None:
    model = small()
    split = sum(model.tensors[op.inputs[1].tensor].size for op in model.ops if op.split and op.name != "head/logits")
    result = simulate(uniform_3d(model, 1, 4), Cluster.parse("hc1"), NO_RESERVE)
    biases = sum(
        t.size for t in model.tensors if t.name.endswith(("query_bias_b", "key_bias_b", "value_bias_b", "expand_bias_b"))
    )
    divided = split + biases
    assert result.memory[0].bytes[0] == pytest.approx(16 * (model.parameter_count - divided * 3 / 4.0))


def test_recomputation_and_offloading_save_memory() -> None:
    assert peak(recompute="full") < 0.7 * peak()
    assert peak(offload="states") < peak()
    assert peak(offload="v0") < peak(offload="states")


@pytest.mark.slow
def test_recomputation_costs_about_one_more_forward() -> None:
    plain, again = (
        simulate(uniform_3d(built_in_model("bert-large", 4), recompute=how), Cluster.parse("hc2")) for how in ("none", "full")
    )
    assert 1.2 < again.step_time_s / plain.step_time_s < 1.4


def test_buffer_lives_from_its_writer_to_its_last_reader() -> None:
    """One layer, 1 s forward, 2 s backward; the kept bytes are there from 0 to 3 s."""
    model = chain_model(1, kept_bytes=1000.0)
    result = simulate(pipeline(model, 1, 1, "gpipe", (1,)), flat_cluster(1), NO_RESERVE, KnownTimes(model, 1.0, 2.0))
    curve = result.memory[0]
    base = curve.bytes[0]
    assert [(t, size - base) for t, size in zip(curve.time_s, curve.bytes) if t == 0.0][-1] == (0.0, 1000.0)
    assert (curve.time_s[-1], curve.bytes[-1]) == (3.0, base)
    assert curve.at_peak["activations"] == 1000.0 and curve.largest == (("layer0/op (saved)", 1000.0),)


def test_largest_micro_batch_keeps_most() -> None:
    """Three quarters and a quarter of 2000 bytes, one after the other."""
    model = chain_model(1, kept_bytes=1000.0)
    strategy = pipeline(model, 1, 2, "backward_first", (1,))._replace(micro_batch_slices=(3, 1))
    curve = simulate(strategy, flat_cluster(1), NO_RESERVE, KnownTimes(model, 1.0, 2.0)).memory[0]
    assert curve.at_peak["activations"] == 1500.0


@pytest.mark.parametrize("waits, size, died", [(True, 8.0, 2.0), (True, 4.0, 3.0), (False, 8.0, 2.0)])
def test_task_overwrites_an_operand_of_its_size_that_all_others_have_read(waits: bool, size: float, died: float) -> None:
    """``made`` ends after 1 s; ``other`` reads it for 1 s, or half a second beside ``last``, which takes 1 s."""
    cluster = Cluster.parse("cpu:2")
    tasks = Tasks(cluster, Network(cluster))
    made = tasks.add(COMPUTATION, 1.0, (0,))
    other = tasks.add(COMPUTATION, 1.0 if waits else 0.5, (1,), [made])
    last = tasks.add(COMPUTATION, 1.0, (0,), [made, other] if waits else [made])
    buffer = tasks.buffer("made", "activations", made, 0, 8.0)
    tasks.buffer("result", "activations", last, 0, size)
    tasks.read(other, buffer)
    tasks.read(last, buffer, may_overwrite=True)
    graph = tasks.graph()
    assert lifetimes(graph, tasks.times(graph))[1][buffer] == died


@pytest.mark.slow
def test_reserved_memory_decides_about_the_last_gigabyte() -> None:
    strategy = uniform_3d(built_in_model("bert-48", 2), 1, 1, 2, 3, "gpipe")
    cluster = Cluster.parse("dapple-b")
    assert simulate(strategy, cluster).oom and not simulate(strategy, cluster, NO_RESERVE).oom
    assert "out of memory" in simulate(strategy, cluster).bottleneck()
    assert simulate(strategy, cluster, Options(reserved_bytes={"GPU": 10 << 30})).oom


@pytest.mark.slow
def test_what_runs_out_is_named_with_advice() -> None:
    result = simulate(uniform_3d(built_in_model("m6-10b", 8), 8), Cluster.parse("hc2"))
    assert result.oom and "optimizer state: shard it (ZeRO)" in result.bottleneck()


@pytest.mark.slow
def test_selective_recomputation_is_megatrons() -> None:
    """Korthikanti et al. 2022: a layer of the 22B model keeps s b h (10 + 24 / t + 5 a s / (h t)) bytes, without attention's
    inside s b h (10 + 24 / t) (Table 2), and takes 39% longer with everything computed again, 7% with attention (Table 4)."""
    base = {name: layer(name) for name in ("none", "selective", "full")}
    for name, held in MEGATRON_BYTES.items():
        assert base[name][1] == pytest.approx(held, rel=0.01)
    assert base["full"][0] / base["none"][0] - 1 == pytest.approx(0.39, abs=0.03)
    assert base["selective"][0] / base["none"][0] - 1 == pytest.approx(0.07, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("zero, times", [("v1", 1.0), ("v2", 1.0), ("v3", 1.5)])
def test_zero_sends_what_its_paper_says(zero: str, times: float) -> None:
    """Rajbhandari et al. 2020, section 7; with several micro-batches v2 and v3 have no room for sums of whole gradients."""
    model, cluster = transformer("t", 8, 2, 256, 8, 64, 512), Cluster.parse("hc1")
    assert volume(model, cluster, zero) / volume(model, cluster, "none") == pytest.approx(times, rel=0.01)
    rows = [simulate(uniform_3d(model, 8, num_micro_batch=count, zero=zero), cluster) for count in (1, 3)]
    labels = [[row.program.instructions[number].label for number in row.graph.instruction if number >= 0] for row in rows]
    scattered = [row.count("reduce_scatter") for row in labels]
    assert scattered[1] == scattered[0] * (1 if zero == "v1" else 3)


def test_offloaded_update_takes_its_copies_or_the_hosts_memory() -> None:
    model, cluster = transformer("t", 8, 2, 1024, 8, 64, 512), Cluster.parse("hc1")
    seconds = {name: update_seconds(simulate(uniform_3d(model, 8, offload=name), cluster)) for name in ("none", "states")}
    size = sum(t.bytes for t in model.tensors if t.role == "parameter")
    assert seconds["states"] == pytest.approx(max(7 * size * 8 / HOST_BYTES_PER_S, size / 12e9), rel=0.02)
    assert seconds["none"] < seconds["states"]
