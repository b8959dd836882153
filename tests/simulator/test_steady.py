from __future__ import annotations

import pytest

from tests.simulator.synthetic import NO_RESERVE, KnownTimes, chain_model, flat_cluster, pipeline
from whale_tf.cluster import Cluster
from whale_tf.schedule import warmup_depths
from whale_tf.simulator import Options, Simulation, Simulator, simulate, uniform_3d
from whale_tf.simulator.zoo.vision import mlp

STEADY = NO_RESERVE._replace(steady_state=True)


def same(short: Simulation, full: Simulation) -> None:
    assert short.step_time_s == pytest.approx(full.step_time_s, rel=1e-9)
    assert short.samples_per_s == pytest.approx(full.samples_per_s, rel=1e-9)
    assert short.bubble == pytest.approx(full.bubble, rel=1e-6, abs=1e-9)
    assert short.mfu == pytest.approx(full.mfu, rel=1e-6, abs=1e-12)
    assert short.exposed_communication_s == pytest.approx(full.exposed_communication_s, rel=1e-6, abs=1e-9)
    assert short.peak_memory_bytes == full.peak_memory_bytes
    links = {use.name: use for use in full.links}
    for use in short.links:
        assert use.bytes == pytest.approx(links[use.name].bytes, rel=1e-9)
        assert use.utilisation == pytest.approx(links[use.name].utilisation, rel=1e-9)


@pytest.mark.parametrize("policy", ["PA", "PB"])
@pytest.mark.parametrize("factors", [None, (1.0, 2.0, 1.5, 0.0), (2.0, 1.0, 1.0, 0.0)])
@pytest.mark.parametrize("count", [100, 101])
def test_many_micro_batches_follow_from_few(policy: str, factors, count: int) -> None:  # type: ignore[no-untyped-def]
    model = chain_model(3, 3e8, kept_bytes=1e6)
    strategy = pipeline(model, 3, count, "backward_first", warmup_depths(policy, 3, None, count))
    estimator = KnownTimes(model, 1.0, 2.0, factors)
    short = simulate(strategy, flat_cluster(3), STEADY, estimator)
    assert short.steady and len(short.graph.seconds) < 60 * count / 2
    same(short, simulate(strategy, flat_cluster(3), NO_RESERVE, estimator))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
@pytest.mark.parametrize("shape", [(4, 1, 2), (2, 2, 2), (1, 1, 4), (2, 1, 4)])
def test_answers_agree_whether_or_not_a_plan_becomes_periodic(schedule: str, shape: tuple) -> None:
    strategy = uniform_3d(mlp(8, 4, 256), *shape, 120, schedule)
    cluster = Cluster.parse("hc2")
    same(simulate(strategy, cluster, STEADY), simulate(strategy, cluster, NO_RESERVE))


@pytest.mark.parametrize("zero", ["none", "v2"])
def test_waiting_for_gradients_of_each_micro_batch_follows_from_few(zero: str) -> None:
    """Under v2 each micro-batch has collectives; devices agree on each."""
    strategy, cluster = uniform_3d(mlp(8, 4, 256), 2, num_micro_batch=100, zero=zero), Cluster.parse("V100-32GB:2")
    short, full = (simulate(strategy, cluster, options._replace(xla=False)) for options in (STEADY, NO_RESERVE))
    assert short.steady and max(use.sums for use in full.devices) >= (100 if zero == "v2" else 1)
    same(short, full)


def test_few_micro_batches_are_simulated_as_they_are() -> None:
    assert not simulate(uniform_3d(mlp(8), 1, 1, 2, 4), flat_cluster(2), Options(steady_state=True)).steady


def test_thousands_of_changed_plans_reuse_the_compiled_one() -> None:
    """What the planners do: the same partition under many schedules; only one is compiled."""
    simulator = Simulator(flat_cluster(2))
    strategy = uniform_3d(mlp(8), 1, 1, 2, 4)
    first = simulator.run(strategy)
    for count in range(1, 9):
        result = simulator.run(strategy._replace(num_micro_batch=count))
        assert result.program.instructions is first.program.instructions


def test_compiled_plan_is_not_reused_for_another_estimator() -> None:
    """Each estimator is gone before the next is made, which may then stand at the same address."""
    model = chain_model(2)
    simulator = Simulator(flat_cluster(2), NO_RESERVE)
    strategy = pipeline(model, 2, 1, "backward_first", (1, 1))
    for seconds in range(1, 11):
        assert simulator.run(strategy, KnownTimes(model, seconds, 2 * seconds)).step_time_s == pytest.approx(6 * seconds)
