"""Which processes a job has, and which devices each of them has."""
from __future__ import annotations

import json
import socket
import sys
from typing import Any, Dict

import pytest

from whale_tf.cluster import ONE_PROCESS, Cluster, Processes, device_names, devices_of_processes, find_processes, whole_cluster
from whale_tf.cluster.processes import free_ports, tf_configs
from whale_tf.errors import ClusterError

TWO = Processes(("a:1", "b:1"), 1)


def tf_config(cluster: Dict[str, Any], kind: str = "worker", index: int = 0) -> Dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_from_the_environment() -> None:
    found = find_processes(tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, index=1))
    assert found == Processes(("a:1", "b:1", "c:1"), 2) and not found.is_chief
    assert found.prefix(1) == "/job:worker/replica:0/task:1"


@pytest.mark.parametrize("environ", [{}, tf_config({"worker": ["a:1"]}), tf_config({"worker": ["a:1", "b:1"]}, "evaluator")])
def test_one_process(environ: Dict[str, str]) -> None:
    found = find_processes(environ)
    assert found.count == 1 and found.is_chief and found.host_device == "/job:localhost/replica:0/task:0/device:CPU:0"


def test_parameter_servers_are_refused() -> None:
    with pytest.raises(ClusterError, match="names parameter servers .p:1."):
        find_processes(tf_config({"worker": ["a:1", "b:1"], "ps": ["p:1"]}))


def test_hosts_without_ports_get_one_for_each_process() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3"}
    assert find_processes(environ) == Processes(("n1:27182", "n1:27183", "n2:27182", "n2:27183"), 3)


def test_node_for_each_process() -> None:
    cluster = whole_cluster(Cluster.parse("cpu:2"), TWO)
    assert [len(node) for node in cluster.nodes] == [2, 2]
    assert devices_of_processes(cluster, TWO) == ((0, 1), (2, 3))
    assert device_names(cluster, TWO)[1:3] == (
        "/job:worker/replica:0/task:0/device:CPU:1", "/job:worker/replica:0/task:1/device:CPU:0")


def test_one_node_is_dealt_out() -> None:
    assert devices_of_processes(Cluster.parse("cpu:4"), TWO) == ((0, 1), (2, 3))
    assert device_names(Cluster.parse("cpu:4"), TWO)[2] == "/job:worker/replica:0/task:1/device:CPU:0"


def test_nodes_of_different_sizes() -> None:
    assert devices_of_processes(Cluster.parse("V100-32GB:2,P100-16GB:3"), TWO) == ((0, 1), (2, 3, 4))


def test_one_process_keeps_the_local_names() -> None:
    assert device_names(Cluster.parse("cpu:2"), Processes())[1] == "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize("text", ["cpu:3", "cpu:1"])
def test_devices_that_do_not_divide(text: str) -> None:
    with pytest.raises(ClusterError, match="there are 2 processes .a:1, b:1., but the cluster"):
        devices_of_processes(Cluster.parse(text), TWO)


def test_single_process_is_alone_whatever_the_environment_says() -> None:
    """TensorFlow reads the text, too: it has to be an object."""
    alone, = tf_configs([7000])
    assert json.loads(alone["TF_CONFIG"]) == {}
    assert find_processes(dict(alone, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="a,b", SLURM_PROCID="1")) == ONE_PROCESS


@pytest.mark.skipif(sys.platform != "linux", reason="two sockets share a port")
def test_free_ports_are_held_for_servers() -> None:
    """Nobody else gets them, and a server that shares its port does."""
    first, second = free_ports(2)
    assert first != second
    with socket.socket() as one, pytest.raises(OSError):
        one.bind(("", first))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", first))
        server.listen(1)
        socket.create_connection(("127.0.0.1", first), 5).close()


@pytest.mark.parametrize("count, mini_batches", [(1, 4), (2, 4), (4, 4), (5, 5)])
def test_job_whose_number_of_processes_changes(count: int, mini_batches: int) -> None:
    """A step has as many mini-batches as the job has processes at the most; one process has no TF_CONFIG."""
    environ = tf_config({"worker": [f"a:{port}" for port in range(1, count + 1)]}, index=0) if count > 1 else {}
    found = find_processes(dict(environ, WHALE_MAX_WORKERS="4"))
    assert (found.count, found.most, found.mini_batches) == (count, 4, mini_batches)
    fixed = find_processes(environ)
    assert (fixed.most, fixed.mini_batches) == (0, count)
