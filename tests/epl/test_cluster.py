"""epl.Env and epl.Cluster: the job, its devices, and layouts."""
from __future__ import annotations

from typing import Any

import pytest

from whale_tf import epl
from whale_tf.cluster import Processes
from whale_tf.epl import cluster as module
from whale_tf.epl.cluster import Cluster
from whale_tf.errors import ClusterError, WhaleError
from whale_tf.runtime import active

DEVICE = "/job:worker/replica:0/task:{}/device:CPU:{}"


def worker(rank: int, count: int, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> None:
    """Makes this process look like one of several."""
    monkeypatch.setenv("WHALE_CLUSTER", f"{count}xcpu:{devices}")
    epl.init()
    state = active.require("test")
    hosts = tuple(f"host{number // 2}:{4000 + number}" for number in range(count))
    monkeypatch.setattr(state, "processes", Processes(hosts, rank))


def test_nothing_before_init() -> None:
    env = epl.Env.get()
    assert env.cluster is None and env.config is None and not env.is_ready and env.parallel_information is None
    with pytest.raises(WhaleError, match="epl.Cluster needs epl.init"):
        Cluster()


def test_one_worker() -> None:
    epl.init()
    cluster = epl.Env.get().cluster
    assert (cluster.worker_num, cluster.worker_index, cluster.total_gpu_num, cluster.gpu_num_per_worker) == (1, 0, 4, 4)
    assert cluster.available_devices == [DEVICE.format(0, number) for number in range(4)]
    assert cluster.current_worker_chief_gpu() == DEVICE.format(0, 0) and epl.Env.get().is_ready
    epl.Env.get().parallel_information["mine"] = 1
    assert epl.Env.get().parallel_information == {"mine": 1}
    assert epl.Env.get().get_config_proto().gpu_options.allow_growth


def test_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    worker(2, 4, monkeypatch, 2)
    cluster = Cluster(layout="all")
    assert (cluster.worker_num, cluster.worker_index, cluster.total_gpu_num, cluster.gpu_num_per_worker) == (4, 2, 8, 2)
    assert cluster.available_devices == [DEVICE.format(2, 0), DEVICE.format(2, 1)] and cluster.get_local_rank(5) == 1
    device, = cluster.virtual_devices
    assert device.num_replicas == 8 and device.local_device_indices == (4, 5)
    assert device.local_devices == tuple(cluster.available_devices) and device.get_device(5, 0) == DEVICE.format(2, 1)


def test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker(1, 2, monkeypatch)
    hosts = "host0:4000,host0:4001"
    with Cluster(hosts, worker_index=1) as cluster:
        assert epl.Env.get().cluster is cluster and cluster.hosts == hosts
    assert Cluster("host0:4000", "host0:4001", "ps", 0).worker_index == 1
    for asked, message in (("a:1,b:2", "give one of both"), ("a:1", "leave worker_hosts out")):
        with pytest.raises(ClusterError, match=message):
            Cluster(asked)
    with pytest.raises(ClusterError, match="expected a number that is among them"):
        Cluster(hosts, worker_index=2)


def test_hosts_of_a_job_that_the_environment_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    epl.init()
    monkeypatch.setenv("TF_CONFIG", "{}")
    asked = []
    monkeypatch.setattr(module.api, "init", lambda *arguments: asked.append(arguments))
    Cluster("a:1,b:2", worker_index=1)
    import json
    import os
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}} and len(asked) == 1


def test_layout_of_annotations() -> None:
    epl.init()
    with epl.replicate(1):
        pass
    with epl.replicate(1):
        pass
    slices = [one.slice_devices for one in Cluster(layout="auto").virtual_devices]
    names = [DEVICE.format(0, number) for number in range(4)]
    assert slices == [[[names[0]], [names[2]]], [[names[1]], [names[3]]]]


def rows(*groups: Any) -> Any:
    return [[[DEVICE.format(number, 0)] for number in group] for group in groups]


def test_layout_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    worker(0, 4, monkeypatch)
    monkeypatch.setattr(active.require("test"), "config",
                        epl.Config({"cluster.device_place_prefer_intra_node": False}, {}).here({}))
    cluster = Cluster(layout={"aware_row": 2})
    assert [one.slice_devices for one in cluster.virtual_devices] == rows((0, 1), (2, 3))
    assert cluster.worker_num_per_machine == 2
    assert len(Cluster(layout={"specific": rows((0, 1), (2, 3))}).virtual_devices) == 2


@pytest.mark.parametrize("layout, message", [
    ({"aware_row": 2}, "puts TaskGraphs on other devices"), ({"specific": rows((1, 0), (2, 3))}, "puts TaskGraphs on other"),
    ({"aware_row": 3}, "divides by 3"), ("rows", "expected one of all, auto"), ({"all": True, "auto": True}, "expected one of")])
def test_layouts_that_cannot_be_had(layout: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(0, 4, monkeypatch)
    with pytest.raises(ClusterError, match=message):
        Cluster(layout=layout)
    assert Cluster(layout={"specific": rows((0, 2), (1, 3))}).virtual_devices[1].local_devices == ()


def test_run_config_of_an_estimator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """It knows of no cluster and no other distribution, and TF_CONFIG stays."""
    from whale_tf._tf_compat import estimators, tf

    found = estimators()
    if found is None:
        pytest.skip("whale_tf divides the Estimators of TensorFlow 1 alone")
    job = '{"cluster": {"worker": ["127.0.0.1:0"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", job)
    epl.init()
    with pytest.warns(UserWarning) as caught:
        config = found.run_config(model_dir=str(tmp_path), train_distribute=tf.distribute.MirroredStrategy(["CPU:0"]),
                                  device_fn=lambda op: "/job:ps/task:0")
    told = [str(one.message) for one in caught if "is left out" in str(one.message)]
    assert [text.partition("=")[0] for text in told] == ["RunConfig(train_distribute", "RunConfig(device_fn"]
    assert config.train_distribute is None and config.device_fn is None and config.num_worker_replicas == 1
    import os
    assert os.environ["TF_CONFIG"] == job
