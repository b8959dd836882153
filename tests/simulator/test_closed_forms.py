"""Pipelines against what can be computed by hand (DAPPLE sections II-A, III-B and V-C)."""

from __future__ import annotations

import pytest

from tests.simulator.synthetic import NO_RESERVE, KnownTimes, chain_model, flat_cluster, pipeline
from whale_tf.schedule import warmup_depths
from whale_tf.simulator import Simulation, simulate, uniform_3d

FORWARD_S, BACKWARD_S, BANDWIDTH = 1.0, 2.0, 1e9


def run(
    stages: int,
    num_micro_batch: int,
    schedule: str,
    transfer_s: float = 0.0,
    policy: str = "PA",
    kept_bytes: float = 0.0,
) -> Simulation:
    """``transfer_s`` per tensor and direction."""
    model = chain_model(stages, transfer_s * BANDWIDTH, kept_bytes=kept_bytes)
    strategy = pipeline(model, stages, num_micro_batch, schedule, warmup_depths(policy, stages, None, num_micro_batch))
    return simulate(strategy, flat_cluster(stages, BANDWIDTH), NO_RESERVE, KnownTimes(model, FORWARD_S, BACKWARD_S))


@pytest.mark.parametrize("schedule", ["gpipe", "backward_first"])
@pytest.mark.parametrize("stages, num_micro_batch", [(1, 1), (2, 1), (2, 4), (3, 5), (4, 8), (8, 8)])
def test_bubble_without_communication(schedule: str, stages: int, num_micro_batch: int) -> None:
    result = run(stages, num_micro_batch, schedule)
    bubble_ratio = (stages - 1) / num_micro_batch
    assert result.step_time_s == pytest.approx(num_micro_batch * (FORWARD_S + BACKWARD_S) * (1 + bubble_ratio), rel=1e-12)
    assert 1 - result.bubble == pytest.approx(1 / (1 + bubble_ratio), rel=1e-12)


@pytest.mark.parametrize("stages, num_micro_batch", [(2, 2), (2, 8), (3, 5), (4, 8), (5, 9)])
def test_zero_bubbles(stages: int, num_micro_batch: int) -> None:
    """Half of a layer's backward is that of its weight.  The last stage begins ``stages - 1`` forwards late, and that is all;
    what waits for its weights' gradients is held."""
    memory = []
    for schedule, policy in (("zero_bubble_h1", "PA"), ("zero_bubble_h2", "PB")):
        result = run(stages, num_micro_batch, schedule, 0.0, policy, 1000.0)
        expected = num_micro_batch * (FORWARD_S + BACKWARD_S) + (stages - 1) * FORWARD_S
        assert result.step_time_s == pytest.approx(expected, rel=1e-12)
        memory.append([use.peak_memory_bytes for use in result.devices])
    held = [min(num_micro_batch, stages), min(num_micro_batch, 2 * stages - 1)]
    assert memory[1][-1] - memory[0][-1] == pytest.approx(1000.0 * (held[1] - held[0]), abs=100.0)


@pytest.mark.parametrize("stages, num_micro_batch", [(2, 4), (3, 5), (4, 8)])
@pytest.mark.parametrize("transfer_s", [0.1, 0.5, 1.0])
def test_gpipe_bubble_with_communication(stages: int, num_micro_batch: int, transfer_s: float) -> None:
    """P = (1 + alpha)(S - 1) / M, with alpha the communication of both directions over the computation of a stage."""
    alpha = 2 * transfer_s / (FORWARD_S + BACKWARD_S)
    bubble_ratio = (1 + alpha) * (stages - 1) / num_micro_batch
    result = run(stages, num_micro_batch, "gpipe", transfer_s)
    assert 1 - result.bubble == pytest.approx(1 / (1 + bubble_ratio), rel=1e-9)


@pytest.mark.parametrize("policy, depth", [("PA", 2), ("PB", 3)])
@pytest.mark.parametrize("transfer_s", [0.0, 0.3, 1.2])
def test_policies_hide_as_much_communication_as_their_depth_allows(policy: str, depth: int, transfer_s: float) -> None:
    """Two stages: a micro-batch leaves stage 0 and comes back after F + c + F + B + c + B, ``depth`` are under way."""
    period_s = max(FORWARD_S + BACKWARD_S, (2 * (FORWARD_S + BACKWARD_S) + 2 * transfer_s) / depth)
    few = run(2, 24, "backward_first", transfer_s, policy).step_time_s
    many = run(2, 48, "backward_first", transfer_s, policy).step_time_s
    assert (many - few) / 24 == pytest.approx(period_s, rel=1e-9)


def test_policy_b_pays_only_with_communication() -> None:
    assert run(4, 16, "backward_first", 0.6, "PB").step_time_s < run(4, 16, "backward_first", 0.6, "PA").step_time_s
    assert run(4, 16, "backward_first", 0.0, "PB").step_time_s == run(4, 16, "backward_first", 0.0, "PA").step_time_s


@pytest.mark.parametrize("num_micro_batch", [4, 8, 16])
def test_memory_is_flat_with_backward_first_and_grows_with_gpipe(num_micro_batch: int) -> None:
    kept = 1e6
    early = run(4, num_micro_batch, "backward_first", kept_bytes=kept)
    late = run(4, num_micro_batch, "gpipe", kept_bytes=kept)
    fixed = [curve.bytes[0] for curve in early.memory]
    assert [round((curve.peak_bytes - base) / kept) for curve, base in zip(early.memory, fixed)] == [4, 3, 2, 1]
    assert [round((curve.peak_bytes - base) / kept) for curve, base in zip(late.memory, fixed)] == [num_micro_batch] * 4


def test_uneven_stages_are_paced_by_the_slowest() -> None:
    model = chain_model(3)
    strategy = pipeline(model, 3, 10, "backward_first", (3, 2, 1))
    result = simulate(strategy, flat_cluster(3), NO_RESERVE, KnownTimes(model, 1.0, 1.0, [1.0, 3.0, 1.0, 0.0]))
    filling, draining = 1.0, 1.0  # stage 0's forward before, its backward after
    assert result.step_time_s == pytest.approx(filling + 10 * 6.0 + draining, rel=1e-9)
    assert "stage 1 has 3.0 times the work" in result.bottleneck()


@pytest.mark.parametrize("stages, num_micro_batch", [(2, 2), (2, 8), (4, 4), (4, 8)])
def test_gradients_of_weights_fill_bubbles(stages: int, num_micro_batch: int) -> None:
    """F, B and W one second each: 3 M + S - 1 (Qi et al., section 2), where 1F1B takes 3 (M + S - 1); the V schedule half a
    bubble, interleaved 1F1B of two stages a device one and a half (Narayanan et al., section 2.2)."""
    expected = {"backward_first": 3 * (stages - 1), "zero_bubble_h1": stages - 1, "zero_bubble_h2": stages - 1,
                "zero_bubble_v": (stages - 1) / 2, "interleaved": 1.5 * (stages - 1)}
    for schedule, bubble_s in expected.items():
        model = chain_model(2 * stages + 1)
        ops = tuple(op._replace(flops=float(op.kind == "layer" and op.path[0] != "layer0")) for op in model.ops)
        model = model._replace(ops=ops)
        factors = [0.5 * op.flops for op in ops]
        strategy = uniform_3d(model, 1, 1, stages, num_micro_batch, schedule)
        result = simulate(strategy, flat_cluster(stages, 1e15), NO_RESERVE, KnownTimes(model, 1.0, 2.0, factors))
        assert result.step_time_s == pytest.approx(3 * num_micro_batch + bubble_s), schedule
