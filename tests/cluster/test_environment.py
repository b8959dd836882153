"""Node lists from TF_CONFIG, SLURM and Kubernetes."""
from __future__ import annotations

import json
from typing import Any, Dict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_tf.cluster import Cluster, read_environment
from whale_tf.cluster.environment import expand_host_list, host_of
from whale_tf.errors import ClusterError


def _tf(cluster: Any, kind: str = "worker", index: Any = 0) -> Dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_nothing_there() -> None:
    assert read_environment({}) is None
    assert read_environment({"TF_CONFIG": "{}"}) is None and read_environment({"TF_CONFIG": " "}) is None
    assert read_environment({"WORLD_SIZE": "4", "RANK": "0"}) is None


class TestTfConfig:
    def test_chief_comes_first(self) -> None:
        found = read_environment(_tf({"worker": ["b:1", "c:1"], "chief": ["a:1"], "ps": ["p:1"]}, "worker", 1))
        assert found is not None
        assert found.addresses == ("a:1", "b:1", "c:1") and found.rank == 2 and found.node == 2
        assert found.parameter_servers == ("p:1",) and found.source == "TF_CONFIG"

    def test_two_processes_on_one_host_are_one_node(self) -> None:
        found = read_environment(_tf({"worker": ["a:1", "a:2", "b:1", "b:2"]}, index="3"))
        assert found is not None and found.nodes == ("a", "b") and found.node == 1
        assert found.short_form() == "2xcpu:2" and len(Cluster.parse(found.short_form())) == 4
        assert found.short_form("T4:8") == "2xT4:8"

    @pytest.mark.parametrize("kind", ["ps", "evaluator"])
    def test_roles_that_do_not_train(self, kind: str) -> None:
        found = read_environment(_tf({"worker": ["a:1"], "ps": ["p:1"]}, kind))
        assert found is not None and found.rank is None and found.node is None and found.role == kind

    @pytest.mark.parametrize("text, message", [
        ("{", "not valid JSON"), ("[1]", "expected"), ('{"cluster": [1]}', '"cluster" is'),
        ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker"}}', 'expected a list of "host:port"')])
    def test_malformed(self, text: str, message: str) -> None:
        with pytest.raises(ClusterError, match=message):
            read_environment({"TF_CONFIG": text})

    @pytest.mark.parametrize("environ, message", [
        (_tf({"worker": ["a:1", "a:1"]}), "names the address a:1 more than once"),
        (_tf({"worker": ["a:1"]}, index=1), "there are 1 of them .0..0.: its own address is missing"),
        (_tf({"worker": ["a:1"]}, index=True), "number True"),
        (_tf({"worker": ["a:1"]}, "chief"), "a 'chief', but its cluster has only worker"),
        (_tf({"wroker": ["a:1"]}, "wroker"), "unknown role 'wroker'.*Did you mean 'worker'"),
        (_tf({"ps": ["a:1"]}, "ps"), "no worker and no chief"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, '"task" is')])
    def test_inconsistent(self, environ: Dict[str, str], message: str) -> None:
        with pytest.raises(ClusterError, match=message):
            read_environment(environ)


class TestSlurm:
    def test_nodes_and_tasks(self) -> None:
        found = read_environment({
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02],big", "SLURM_TASKS_PER_NODE": "2(x2),1",
            "SLURM_PROCID": "3", "SLURM_GPUS_ON_NODE": "8"})
        assert found is not None and found.addresses == ("gpu01", "gpu01", "gpu02", "gpu02", "big")
        assert found.nodes == ("gpu01", "gpu02", "big") and found.node == 1 and found.rank == 3
        assert found.short_form() == "3xgpu:8"

    def test_one_node(self) -> None:
        found = read_environment({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1"})
        assert found is not None and found.short_form() == "cpu:1" and found.rank == 0

    @pytest.mark.parametrize("environ, message", [
        ({"SLURM_JOB_NODELIST": "a[1-2"}, "brackets do not match"), ({"SLURM_JOB_NODELIST": "a[1-2]]"}, "brackets"),
        ({"SLURM_JOB_NODELIST": "a[2-1]"}, "'2-1'"), ({"SLURM_JOB_NODELIST": "a[x]"}, "'x'"),
        ({"SLURM_JOB_NODELIST": ","}, "is empty"),
        ({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2"}, "names 2 nodes .* describes 1"),
        ({"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "two"}, "not like"),
        ({"SLURM_JOB_NODELIST": "a", "SLURM_PROCID": "1"}, "SLURM_PROCID=1, but there are 1 processes"),
        ({"SLURM_JOB_NODELIST": "a", "SLURM_PROCID": "x"}, "SLURM_PROCID='x'")])
    def test_refused(self, environ: Dict[str, str], message: str) -> None:
        with pytest.raises(ClusterError, match=message):
            read_environment(dict(environ, SLURM_JOB_ID="1"))

    @pytest.mark.slow
    @given(st.integers(0, 150), st.integers(0, 30), st.integers(1, 4))
    def test_ranges_expand(self, first: int, count: int, width: int) -> None:
        last = first + count
        hosts = expand_host_list(f"n[{str(first).zfill(width)}-{str(last).zfill(width)}]-ib,x")
        width = len(str(first).zfill(width))
        assert hosts == tuple(f"n{str(k).zfill(width)}-ib" for k in range(first, last + 1)) + ("x",)

    def test_two_brackets(self) -> None:
        assert expand_host_list("r[1-2]n[3,5]") == ("r1n3", "r1n5", "r2n3", "r2n5")


class TestKubernetes:
    kube = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}

    def test_kubeflow_pytorch_job(self) -> None:
        found = read_environment(dict(
            self.kube, MASTER_ADDR="job-master-0", MASTER_PORT="23456", WORLD_SIZE="3", RANK="2"))
        assert found is not None and found.source == "Kubernetes" and found.rank == 2
        assert found.addresses == ("job-master-0:23456", "job-worker-0:23456", "job-worker-1:23456")

    def test_stateful_set(self) -> None:
        found = read_environment(dict(self.kube, MASTER_ADDR="w-0.svc.ns", WORLD_SIZE="2", RANK="1"))
        assert found is not None and found.addresses == ("w-0.svc.ns", "w-1.svc.ns") and found.nodes[1] == "w-1.svc.ns"

    def test_volcano(self) -> None:
        found = read_environment({"VC_WORKER_HOSTS": "w0.j,w1.j", "VC_TASK_INDEX": "1"})
        assert found is not None and found.addresses == ("w0.j", "w1.j") and found.rank == 1
        found = read_environment({"VC_WORKER_HOSTS": "w0.j", "VC_MASTER_HOSTS": "m0.j", "VC_TASK_INDEX": "0",
                                  "HOSTNAME": "w0"})
        assert found is not None and found.addresses == ("m0.j", "w0.j") and found.rank == 1

    @pytest.mark.parametrize("environ, message", [
        ({"MASTER_ADDR": "10.0.0.2", "WORLD_SIZE": "2", "RANK": "0"}, "not a pod name ending in -0"),
        ({"MASTER_ADDR": "a-0", "WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE='0'"),
        ({"MASTER_ADDR": "a-0", "WORLD_SIZE": "2", "RANK": "2"}, "RANK=2, but there are 2"),
        ({"VC_WORKER_HOSTS": "a", "VC_TASK_INDEX": "1"}, "VC_TASK_INDEX=1"),
        ({"VC_WORKER_HOSTS": "", "VC_TASK_INDEX": "0"}, "are empty"),
        ({"VC_WORKER_HOSTS": "a", "VC_PS_HOSTS": "b", "VC_TASK_INDEX": "0", "HOSTNAME": "c"},
         "not one of Volcano's hosts")])
    def test_refused(self, environ: Dict[str, str], message: str) -> None:
        with pytest.raises(ClusterError, match=message):
            read_environment(dict(self.kube, **environ))


def test_hosts() -> None:
    assert [host_of(text) for text in ("a", "a:1", "[::1]:5", "::1")] == ["a", "a", "::1", "::1"]


class TestRanksOnly:
    """Launchers that name no hosts."""

    @pytest.mark.parametrize("environ, source, address", [
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, "Horovod", "127.0.0.1"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI",
         "127.0.0.1"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}, "torchrun",
         "127.0.0.1:29502")])
    def test_one_host(self, environ: Dict[str, str], source: str, address: str) -> None:
        found = read_environment(environ)
        assert found is not None and found.source == source and found.rank == 1
        assert len(found.addresses) == 2 and found.addresses[1] == address

    def test_several_hosts(self) -> None:
        with pytest.raises(ClusterError, match="Horovod started 4 processes .*2 of them on this host.*set TF_CONFIG"):
            read_environment({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"})

    def test_rank_too_many(self) -> None:
        with pytest.raises(ClusterError, match="OMPI_COMM_WORLD_RANK=2, but there are 2 processes"):
            read_environment({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})

    def test_mpi_within_slurm(self) -> None:
        environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
                   "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        found = read_environment(environ)
        assert found is not None and found.source == "Open MPI"
