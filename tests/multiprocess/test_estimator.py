"""Estimators over several processes: what they train, evaluate and predict is what a local script does with all mini-batches."""
from __future__ import annotations

import json
from typing import Any, Dict, List

import numpy as np
import pytest

from tests.multiprocess.launch import RUN_S, Starter
from whale_tf._tf_compat import estimators
from whale_tf.cluster.processes import free_ports

ROWS = 16
needs_estimators = pytest.mark.skipif(estimators() is None, reason="Estimators of TensorFlow 1")


def jobs() -> List[Dict[str, str]]:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    tasks = [{"type": role, "index": 0} for role in cluster]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), "WHALE_CLUSTER": "2xcpu:1"} for task in tasks]


def numbers(value: Any) -> List[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    return list(np.ravel(value))


@needs_estimators
@pytest.mark.slow
def test_chief_and_worker_equal_local() -> None:
    script = ("-m", "tests.multiprocess.train_estimator")
    with Starter() as starter:
        running = [starter.start(*script, str(ROWS // 2), **variables) for variables in jobs()]
        running.append(starter.start(*script, str(ROWS), WHALE_CLUSTER="cpu:1"))
        for process in running:
            assert process.wait(RUN_S) == 0, process.output
        first, second, local = [json.loads(process.output.partition("RESULTS ")[2].splitlines()[0]) for process in running]
    assert first == second
    assert local["after"]["global_step"] == 10 and local["after"]["loss"] < local["before"]["loss"]
    np.testing.assert_allclose(numbers(first), numbers(local), rtol=1e-5)


@needs_estimators
@pytest.mark.parametrize("role, expected", [("worker", (False, True, 1)), ("evaluator", (True, False, 0))])
def test_run_config_of_workers_without_a_chief(role: str, expected: Any, monkeypatch: Any) -> None:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": {"type": role, "index": 0}}))
    wh.init(cluster="2xcpu:1" if role == "worker" else "cpu:1")
    try:
        config = tf.estimator.RunConfig()
    finally:
        wh.shutdown()
    assert (config.task_type == "evaluator", config.is_chief, config.num_worker_replicas) == expected
