from __future__ import annotations

import json
from typing import Any, Dict

import pytest

from tests.command_line import call
from whale_tf.cli import app
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.simulator import Calibration, Options, calibrated, simulate, uniform_3d
from whale_tf.simulator.costs import DEFAULT_GAMMA
from whale_tf.simulator.simulate import gamma_of
from whale_tf.simulator.zoo.vision import mlp

GIVEN: Dict[str, Any] = {
    "device": "CPU",
    "cores": 2,
    "arithmetic": [[1e6, 1e-5], [1e8, 1e-3]],
    "memory": [[1e4, 1e-6], [1e6, 5e-5], [1e7, 1e-3]],
    "launch_s": 1e-6,
    "step_s": 1e-4,
    "wake": [[5e-5, 2e-6], [1e-4, 2e-5]],
    "slow_down": {"arithmetic-memory": 1.25},
    "communicators": {
        "local": {"alpha_s": 3e-6, "bandwidth_bytes_per_s": 1e12},
        "processes": {"alpha_s": 1e-4, "bandwidth_bytes_per_s": 1e9},
    },
}
CALIBRATION = Calibration.parse(GIVEN)


def test_json_round_trip() -> None:
    assert Calibration.parse(CALIBRATION.to_json()) == CALIBRATION


@pytest.mark.parametrize(
    "work, kind, seconds",
    [
        (5e5, "arithmetic", 5e-6),  # below the smallest: in proportion
        (1e6, "arithmetic", 1e-5),
        (5.05e5, "memory", 2.55e-5),  # half-way between two
        (1.9e7, "memory", 1.95e-3),  # along the last two
    ],
)
def test_seconds(work: float, kind: str, seconds: float) -> None:
    assert CALIBRATION.seconds(work, kind) == pytest.approx(seconds)


def test_thread_that_sleeps_wakes_up() -> None:
    assert [CALIBRATION.wake_s(waited) for waited in (1e-6, 7.5e-5, 1.0)] == pytest.approx([2e-6, 1.1e-5, 2e-5])
    assert Calibration.parse(dict(GIVEN, wake=[])).wake_s(1.0) == 0.0, "where it was not measured"


def test_operands_from_another_core() -> None:
    assert CALIBRATION.far_s(1e6) == 0.0, "where it was not measured"
    measured = Calibration.parse(dict(GIVEN, far=[[1e4, 2e-6], [1e6, 3e-5]]))
    assert [measured.far_s(size) for size in (5e3, 5.05e5)] == pytest.approx([1e-6, 1.6e-5])


def test_overlap_is_symmetric_and_1_where_it_was_not_measured() -> None:
    assert CALIBRATION.slowed("memory", "arithmetic") == CALIBRATION.slowed("arithmetic", "memory") == 1.25
    assert CALIBRATION.slowed("memory", "memory") == 1.0 and CALIBRATION.gamma == pytest.approx(0.25)
    measured = Calibration.parse(dict(GIVEN, slow_down={"arithmetic-memory": 1.25, "arithmetic-communication": 1.8}))
    assert measured.gamma == pytest.approx(0.8), "what was measured beside an exchange comes first"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"launch_s": -1.0}, "launch_s is -1.0, expected a finite number of at least 0"),
        ({"arithmetic": [[1e6, 1e-3], [1e5, 1e-4]]}, "in order of their work"),
        ({"memory": []}, r"memory is \[\], expected one or more"),
        ({"far": [[1e6, 1e-5], [1e4, 1e-6]]}, "far.*in order of their work"),
        ({"slow_down": {"memory-arithmetic": 1.1}}, "slow_down has 'memory-arithmetic'"),
        ({"slow_down": {"memory-memory": 0.9}}, "at least 1"),
        ({"communicators": {"locale": {"alpha_s": 0, "bandwidth_bytes_per_s": 1}}}, "did you mean 'local'"),
        ({"version": 1, "wake_s": 1e-5}, "version is 1, .*measure the machine again with `whale calibrate`"),
        ({"gamma": 3}, "gamma is an unknown key"),
    ],
)
def test_bad_values_are_named(change: Dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match="(?i)not a valid calibration: .*" + message):
        Calibration.parse(dict(GIVEN, **change))


def test_missing_or_broken_file(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match="does not exist; write one with `whale calibrate"):
        Calibration.parse(str(tmp_path / "none.json"))
    path = tmp_path / "broken.json"
    path.write_text("nothing")
    with pytest.raises(PlanError, match="broken.json' is not valid JSON"):
        Calibration.parse(str(path))


def test_cluster_takes_measured_rates_and_links() -> None:
    cluster = calibrated(Cluster.parse("2xcpu:2"), CALIBRATION)
    device = cluster.devices[0]
    assert device.peak_flops_per_s["fp32"] == pytest.approx(1e11) and device.memory_bandwidth_bytes_per_s == pytest.approx(1e10)
    assert cluster.link(0, 1)[:2] == (1e12, 3e-6) and cluster.link(0, 2)[:2] == (1e9, 1e-4)
    assert [device.limit_bytes for device in calibrated(Cluster.parse("cpu:2").limited(1e9), CALIBRATION).devices] == [1e9, 1e9]
    with pytest.raises(PlanError, match="is for 'CPU', but cluster 'V100:2' has V100-32GB"):
        calibrated(Cluster.parse("V100:2"), CALIBRATION)


def test_simulation_takes_op_times_and_gamma() -> None:
    strategy, cluster = uniform_3d(mlp(64)), Cluster.parse("cpu:1")
    plain, measured = simulate(strategy, cluster), simulate(strategy, cluster, Options(calibration=CALIBRATION))
    slow = Calibration.parse(dict(GIVEN, arithmetic=[[1e6, 1e-4], [1e8, 1e-2]]))
    assert measured.step_time_s != plain.step_time_s
    assert simulate(strategy, cluster, Options(calibration=slow)).step_time_s > 5 * measured.step_time_s
    gammas = [gamma_of(Cluster.parse(name).devices[0], CALIBRATION) for name in ("cpu:1", "V100:1")]
    assert gammas == [pytest.approx(0.25), DEFAULT_GAMMA["GPU"]]


def test_command_line(tmp_path: Any) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(GIVEN))
    arguments = "simulate --model mlp --cluster cpu:2 --dp 2 --json --calibration".split()
    done = call(app, *arguments, str(path))
    assert done.exit_code == 0, done.output
    expected = simulate(uniform_3d(mlp(2), 2), Cluster.parse("cpu:2"), Options(calibration=CALIBRATION)).step_time_s
    assert json.loads(done.stdout)["step_time_s"] == pytest.approx(expected)
    failed = call(app, *arguments, "nowhere.json")
    assert failed.exit_code == 1 and "nowhere.json" in failed.output
