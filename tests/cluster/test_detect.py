"""Detection of this machine from what its tools print."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import pytest

from whale_tf.cluster import Cluster, detect
from whale_tf.cluster.detect import Gpu, read_nvidia_smi, table_name
from whale_tf.errors import ClusterError

SMI = """0, GPU-aaa1, Tesla V100-SXM2-32GB, 32510
1, GPU-bbb2, Tesla V100-SXM2-32GB, 32510
2, GPU-ccc3, Tesla T4, 15109
"""


@pytest.mark.parametrize("name, mebibytes, expected", [
    ("Tesla V100-SXM2-32GB", 32510, "V100-32GB"), ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
    ("Tesla V100S-PCIE-32GB", 32510, "V100S-PCIE-32GB"), ("Tesla P100-PCIE-16GB", 16280, "P100-16GB"),
    ("Tesla P100-SXM2-16GB", 16280, "P100-SXM2-16GB"), ("Tesla T4", 15109, "T4"), ("NVIDIA A10", 23028, "A10"),
    ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"), ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
    ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB"), ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
    ("NVIDIA H200", 143771, "H200-141GB"), ("NVIDIA L40S", 46068, "L40S"), ("NVIDIA TITAN Xp", 12196, "TitanXp"),
    ("NVIDIA GeForce RTX 3090", 24576, None), ("NVIDIA A10G", 23028, None)])
def test_marketing_names(name: str, mebibytes: int, expected: Any) -> None:
    assert table_name(Gpu(name, mebibytes << 20)) == expected


@pytest.mark.parametrize("visible, numbers", [
    (None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("-1", []), ("GPU-bbb", [1]), ("0,7,1", [0]), ("1", [1])])
def test_visible_devices(visible: Any, numbers: List[int]) -> None:
    every = read_nvidia_smi(SMI)
    assert read_nvidia_smi(SMI, visible) == [every[number] for number in numbers]


def test_gpu_whose_memory_is_not_known_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"'NVIDIA GB10' has '\[N/A\]' MiB of memory.*set WHALE_CLUSTER"):
        read_nvidia_smi("0, GPU-aaa1, NVIDIA GB10, [N/A]\n")


def _machine(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def run(command: List[str], **_: Any) -> SimpleNamespace:
        assert command[0] == "nvidia-smi"
        if not text:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=text)
    monkeypatch.setattr(detect.subprocess, "run", run)


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, SMI)
    assert [device.type for device in Cluster.local({}).devices] == ["V100-32GB", "V100-32GB", "T4"]
    assert len(Cluster.local({"CUDA_VISIBLE_DEVICES": "2"})) == 1


def test_without_gpus_one_cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, "")
    assert [device.kind for device in Cluster.local({}).devices] == ["CPU"]
    _machine(monkeypatch, SMI)
    assert [device.kind for device in Cluster.local({"CUDA_VISIBLE_DEVICES": ""}).devices] == ["CPU"]


def test_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, SMI)
    assert len(Cluster.local({"WHALE_CLUSTER": "cpu:3"})) == 3


def test_gpu_that_the_table_lacks_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, "0, GPU-a, NVIDIA GeForce RTX 3090, 24576\n")
    with pytest.warns(UserWarning, match="'NVIDIA GeForce RTX 3090' is not in the hardware table"):
        cluster = Cluster.local({})
    assert cluster.devices[0].memory_bytes == 24 << 30
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_tensorflow_s_device_list() -> None:
    cpu = SimpleNamespace(device_type="CPU", memory_limit=1 << 28, physical_device_desc="")
    gpu = SimpleNamespace(device_type="GPU", memory_limit=31 << 30, physical_device_desc=(
        "device: 0, name: Tesla V100-SXM2-32GB, pci bus id: 0000:1a:00.0, compute capability: 7.0"))
    assert [device.type for device in Cluster.from_tensorflow([cpu, gpu, gpu]).devices] == ["V100-32GB"] * 2
    assert [device.type for device in Cluster.from_tensorflow([cpu, cpu]).devices] == ["CPU"] * 2
    with pytest.raises(ClusterError, match="no CPU and no GPU"):
        Cluster.from_tensorflow([])
