"""How often to take snapshots: the interval is the best one, and the expected goodput that of simulated failures."""
from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.command_line import call
from whale_tf.cli import app
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.failures import Snapshots, snapshots
from whale_tf.planner.search import search
from whale_tf.profiler.model_profile import load_builtin


def found(cluster: Cluster) -> Candidate:
    return search(load_builtin("vgg-19@dapple"), cluster, 512, "data-parallel")


def lived(one: Snapshots, interval_s: float, mtbf_s: float, restart_s: float) -> float:
    """Share of simulated time that goes into steps that count, over many failures at random times."""
    rng, total, kept = np.random.RandomState(0), 0.0, 0.0
    for life in rng.exponential(mtbf_s, 100_000):
        complete = max(0, int((life - restart_s - one.stall_s - one.write_s) // (interval_s + one.stall_s)))
        total, kept = total + life, kept + complete * interval_s
    return kept / total


@pytest.mark.parametrize("mtbf_s", [3e3, 1e5])
def test_interval_and_goodput(mtbf_s: float) -> None:
    cluster = Cluster.parse("dapple-c:4")
    one = snapshots(found(cluster), cluster, mtbf_s, 1e9, 60.0)
    assert one.bytes == pytest.approx(1e9 * one.write_s) and one.interval_s > one.write_s
    assert lived(one, one.interval_s, mtbf_s, 60.0) == pytest.approx(one.goodput, abs=0.005)
    assert all(lived(one, factor * one.interval_s, mtbf_s, 60.0) < one.goodput for factor in (0.2, 5.0))


def test_slow_disk_and_refusals() -> None:
    """One snapshot is written at a time."""
    cluster = Cluster.parse("dapple-c:4")
    slow = snapshots(found(cluster), cluster, 3600.0, 1e6, 60.0)
    assert slow.interval_s == slow.write_s > 500 and slow.goodput < 0.8
    assert snapshots(found(cluster), cluster, 60.0, 1e6, 60.0).goodput == 0.0
    with pytest.raises(PlanError, match="--disk is 0, expected a number above 0"):
        snapshots(found(cluster), cluster, 3600.0, 0.0, 60.0)


def test_training_waits_for_all_stages_of_a_device() -> None:
    """Schedules such as interleaved put several on each."""
    cluster = Cluster.parse("dapple-c:4")
    whole = found(cluster)
    stage, middle = whole.stages[0], whole.stages[0].last_layer // 2
    folded = replace(whole, stages=(replace(stage, last_layer=middle), replace(stage, first_layer=middle + 1)))
    assert snapshots(folded, cluster, 3600.0, 1e9, 60.0) == pytest.approx(snapshots(whole, cluster, 3600.0, 1e9, 60.0))


def test_command() -> None:
    given = ["plan", "--model", "vgg-19@dapple", "--cluster", "dapple-c:4", "--global-batch", "512", "--search", "data-parallel",
             "--mtbf", "36000"]
    assert "expected goodput 99." in call(app, *given).stdout
    told = json.loads(call(app, *given, "--disk", "2", "--json").stdout)["snapshots"]
    assert told["write_s"] == pytest.approx(told["bytes"] / 2e9)
    refused = call(app, *given[:-1], "0")
    assert refused.exit_code == 1 and "--mtbf is 0, expected a number above 0" in refused.stderr
