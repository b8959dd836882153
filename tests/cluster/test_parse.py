"""Spellings of a cluster, the JSON format, and what is refused."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whale_tf.cluster import BUILTIN, Cluster
from whale_tf.cluster.detect import Gpu
from whale_tf.errors import ClusterError

PCIE = {"pcie": {"bandwidth_gbytes_per_s": 12}}


@pytest.mark.parametrize("text, types", [
    ("cpu:4", [["CPU"] * 4]),
    ("cpu", [["CPU"]]),
    ("V100-32GB:8,P100-16GB:8", [["V100-32GB"] * 8, ["P100-16GB"] * 8]),
    ("2xV100-32GB:3", [["V100-32GB"] * 3] * 2),
    ("t4:2, 2xcpu:1", [["T4"] * 2, ["CPU"], ["CPU"]]),
    ("v100:2", [["V100-32GB"] * 2]),
    ("dapple-a:8", [["V100-16GB"] * 8]),
    ("dapple-a:32", [["V100-16GB"] * 8] * 4),
    ("amp-het:16", [["V100-16GB"] * 4] * 3 + [["T4"] * 4]),
    ("HC1:2", [["TitanXp"] * 2])])
def test_short_forms(text: str, types: Any) -> None:
    cluster = Cluster.parse(text)
    assert [[cluster.devices[index].type for index in node] for node in cluster.nodes] == types


def test_gpu_is_this_machine_s_type_or_a_v100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.cluster.parse.local_gpu", lambda: None)
    assert {device.type for device in Cluster.parse("gpu:8").devices} == {"V100-32GB"}
    monkeypatch.setattr("whale_tf.cluster.parse.local_gpu", lambda: Gpu("Tesla T4", 15 << 30))
    assert {device.type for device in Cluster.parse("2xgpu:8,cpu:1").devices} == {"T4", "CPU"}
    monkeypatch.setattr("whale_tf.cluster.parse.local_gpu", lambda: Gpu("NVIDIA GeForce RTX 3090", 24 << 30))
    with pytest.warns(UserWarning, match="not in the hardware table"):
        cluster = Cluster.parse("GPU:2,T4:1")
    assert [device.memory_bytes >> 30 for device in cluster.devices] == [24, 24, 16]
    assert Cluster.from_json(cluster.to_json()) == cluster


PAPERS = {  # name: (nodes, devices of the first node, first type, narrowest link between nodes in Gbit/s)
    "hc1": (1, 8, "TitanXp", None), "hc2": (4, 8, "V100-32GB", 80), "hc3": (2, 8, "A100-40GB", 192),
    "dapple-a": (2, 8, "V100-16GB", 25), "dapple-b": (16, 1, "V100-16GB", 25), "dapple-c": (16, 1, "V100-16GB", 10),
    "amp-homogeneous": (4, 4, "T4", 50), "amp-het": (4, 4, "V100-16GB", 10), "amp-p3": (4, 4, "V100-16GB", 10),
    "rhino-m8": (2, 8, "V100-32GB", 80), "rhino-s1": (8, 1, "V100S-PCIE-32GB", 80),
    "whale-v100": (4, 8, "V100-32GB", 50), "whale-8v100-8p100": (2, 8, "V100-32GB", 50),
    "whale-4v100-4p100": (2, 4, "V100-32GB", 50), "a100": (1, 8, "A100-80GB", None), "h100": (1, 8, "H100-80GB", None)}


def test_every_built_in_cluster_is_as_described() -> None:
    assert set(PAPERS) == set(BUILTIN)
    for name, (nodes, per_node, kind, gbits) in PAPERS.items():
        cluster = Cluster.parse(name)
        assert (len(cluster.nodes), len(cluster.nodes[0]), cluster.devices[0].type) == (nodes, per_node, kind), name
        if gbits is not None:
            assert cluster.bottleneck(range(len(cluster))).bandwidth_bytes_per_s == gbits * 1e9 / 8, name


def test_amp_clusters_have_the_paper_s_bandwidth_between_every_pair() -> None:
    cluster = Cluster.parse("amp-het")
    for a in range(16):
        for b in range(16):
            if a == b:
                continue
            inside = a // 4 == b // 4
            gbits = (170 if a < 12 else 50) if inside else 10
            assert cluster.bandwidth(a, b) == gbits * 1e9 / 8


def test_files_and_text(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(Cluster.parse("hc2").to_json())
    assert Cluster.parse(str(path)) == Cluster.parse(path) == Cluster.parse("hc2")  # type: ignore[arg-type]
    assert Cluster.parse(Cluster.parse("hc2")) is not None


def test_documented_example_is_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```json\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        Cluster.parse(json.loads(block))


def test_units_say_the_same_thing() -> None:
    def with_nic(nic: Any) -> Cluster:
        return Cluster.parse({"nodes": [{"devices": "T4:1", "count": 2, "nic": nic}]})
    assert with_nic({"bandwidth_gbits_per_s": 8}) == with_nic({"bandwidth_gbytes_per_s": 1}) == with_nic(
        {"bandwidth_bytes_per_s": 1e9, "latency_us": 9.6})


def test_own_device_types_and_calibration() -> None:
    cluster = Cluster.parse({
        "device_types": {"Mine": {"memory_gib": 2, "fp32": 1e12, "memory_bandwidth_bytes_per_s": 1e11},
                         "T4": {"base": "T4", "fp32": 4e12, "source": "whale profile"},
                         "Big": {"base": "V100-32GB", "memory_gib": 64}, "Core": {"base": "CPU", "fp32": 1e9}},
        "nodes": [{"devices": ["Mine:2", "T4", "big", "core"], "links": "default"}]})
    mine, _, t4, big, core = cluster.devices
    assert mine.memory_bytes == 2 << 30 and mine.peak_flops_per_s["bf16"] == 1e12
    assert t4.peak_flops_per_s["fp32"] == 4e12 and t4.peak_flops_per_s["fp16"] == 65e12
    assert big.memory_bytes == 64 << 30 and big.type == "Big"
    assert core.kind == "CPU" and core.tf_name().endswith("CPU:0") and cluster.device_type("t4").fp32 == 4e12
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize("value, message", [
    ("cpu:-1", "'cpu:-1' is '-1', expected a whole number of at least 1"),
    ("cpu:0", "expected a whole number of at least 1"),
    ("cpu:two", "expected a whole number of at least 1"),
    ("cpu:--5", "is '--5', expected a whole number of at least 1"),
    ("0xcpu:2", "the nodes in '0xcpu:2'"),
    ("V10-32GB:8", "unknown device type 'V10-32GB'.*Did you mean 'V100-32GB'"),
    ("hc4", "unknown device type 'hc4'.*Did you mean 'hc3'"),
    ("cpu:4;cpu:4", "not TYPE:COUNT or NODESxTYPE:COUNT"),
    ("", "not TYPE:COUNT"),
    ("gpu:1024", "1024 GPUs in one node, expected at most 16"),
    ("dapple-a:12", "nodes of 8 devices, so it cannot have 12.*'dapple-a:8'"),
    ("amp-het:24", "cannot have 24 devices"),
    ("dapple-a:0", "cannot have 0 devices"),
    ("cpu:1000000000", "the count in 'cpu:1000000000' is 1000000000, expected at most 65536"),
    ("gpu:" + "9" * 5000, "expected at most 65536"),
    ("cpu:513", "the number of devices of a node in 'cpu:513' is 513, expected at most 512"),
    ("1000000000xcpu:1", "the nodes in '1000000000xcpu:1' is 1000000000, expected at most 65536"),
    ("65536xcpu:4", "the number of devices in '65536xcpu:4' is 262144, expected at most 65536"),
    ("32768xT4:1,32769xT4:1", "is 65537, expected at most 65536"),
    ("a100:1000000000", "the number of devices in 'a100:1000000000' is 1000000000, expected at most 65536"),
    ("a100:1" + "0" * 30, "expected at most 65536"),
    ("a100:\u00b2", "the count in 'a100:\u00b2' is '\u00b2', expected a whole number"),
    ("missing.json", "no cluster file 'missing.json'"),
    ("{nope", "not valid JSON"),
    (7, "a cluster is a Cluster, a dict, a path.*got 7"),
    ({"nodez": []}, "unknown key 'nodez'.*Did you mean 'nodes'"),
    ({}, '"nodes" is None'),
    ({"nodes": []}, "at least one node"),
    ({"nodes": [3]}, r"nodes\[0\] is 3, expected an object"),
    ({"nodes": [{}]}, r"nodes\[0\].devices is None"),
    ({"nodes": [{"devices": "T4:2"}]}, '2 devices but no "links".*"links": "default"'),
    ({"nodes": [{"devices": "T4:2", "links": PCIE, "count": 2}]}, "no network adapter, but there are 2 nodes"),
    ({"nodes": [{"devices": "T4:2", "links": PCIE, "count": -1}]}, r"nodes\[0\].count is -1"),
    ({"nodes": [{"devices": "T4:2", "links": PCIE, "count": True}]}, r"nodes\[0\].count is True"),
    ({"nodes": [{"devices": "T4:-2", "links": PCIE}]}, "is '-2', expected a whole number"),
    ({"nodes": [{"devices": "T4:1000000000", "links": PCIE}]}, r"nodes\[0\].devices is 1000000000, expected at most 65536"),
    ({"nodes": [{"devices": [{"type": "T4", "count": 10**30}], "links": PCIE}]}, "is 10{30}, expected at most 65536"),
    ({"nodes": [{"devices": ["T4:300", "P100:300"], "links": PCIE}]}, r"nodes\[0\].devices is 600, expected at most 512"),
    ({"nodes": [{"devices": "T4", "count": 10**9}]}, r"nodes\[0\].count is 1000000000, expected at most 65536"),
    ({"nodes": [{"devices": "T4:2", "links": PCIE, "count": 30000}, {"devices": "T4:2", "links": PCIE, "count": 30000}]},
     r"the number of devices up to nodes\[1\] is 120000, expected at most 65536"),
    ({"nodes": [{"devices": [{"type": "A100-40G"}]}]}, "unknown device type 'A100-40G'.*Did you mean 'A100-40GB'"),
    ({"nodes": [{"devices": [{"typ": "T4"}]}]}, "unknown key 'typ'"),
    ({"nodes": [{"devices": [{"count": 1}]}]}, "has no device type"),
    ({"nodes": [{"devices": "T4:2", "links": {"pcei": {}}}]}, r"nodes\[0\].links.pcei is an unknown key .did you mean 'pcie'"),
    ({"nodes": [{"devices": "T4:2", "links": {"pcie": {}}}]}, "needs one of bandwidth_bytes_per_s"),
    ({"nodes": [{"devices": "T4:2", "links": {"pcie": {"bandwidth_gbits_per_s": -3}}}]},
     "bandwidth_gbits_per_s is -3, expected a positive number"),
    ({"nodes": [{"devices": "T4:2", "links": {"pcie": {"bandwidth_bytes_per_s": 0}}}]},
     "is 0.0, expected a finite number above 0"),
    ({"nodes": [{"devices": "T4:2", "links": {"pcie": {"bandwidth_bytes_per_s": "fast"}}}]},
     "'fast', expected a number"),
    ({"nodes": [{"devices": "T4:2", "links": {"pcie": {"bandwidth_bytes_per_s": 1, "bandwidth_gbits_per_s": 1}}}]},
     "mean the same"),
    ({"nodes": [{"devices": "T4:4", "links": {"pcie": {"bandwidth_gbytes_per_s": 1, "switches": [[0, 1], [1]]}}}]},
     "under two switches"),
    ({"nodes": [{"devices": "T4:4", "links": {"pcie": {"bandwidth_gbytes_per_s": 1, "switches": [[0, 1], [2, 3]],
                                                       "sockets": [[0], [1]]}}}]}, '2 sockets need "socket_link"'),
    ({"nodes": [{"devices": "T4:4", "links": {"pcie": {"bandwidth_gbytes_per_s": 1, "switches": [[0, 1], [2, 3]],
                                                       "sockets": [[0]]}}}]}, "expected each of 0..1 once"),
    ({"nodes": [{"devices": "T4:2", "links": {"nvlink": {"bandwidth_gbytes_per_s": 1, "lanes": [[0, 5, 1]]}}}]},
     "name device 5, but the node has devices 0..1"),
    ({"nodes": [{"devices": "T4:2", "links": {"nvlink": {"bandwidth_gbytes_per_s": 1, "lanes": [[0, 0, 1]]}}}]},
     "lane .0, 0, 1. is not"),
    ({"nodes": [{"devices": "T4:3", "links": {"nvlink": {"bandwidth_gbytes_per_s": 1, "lanes": [[0, 1, 1]]}}}]},
     "no link between devices 0 and 2"),
    ({"nodes": [{"devices": "X:1"}], "device_types": {"X": {"fp32": 1}}}, "needs one of memory_bytes, memory_gib"),
    ({"nodes": [{"devices": "X:1"}], "device_types": {"X": {"base": "V99"}}}, "unknown device type 'V99'"),
    ({"nodes": [{"devices": "X:1"}], "device_types": {"X": {"base": "T4", "kind": "TPU"}}}, "expected 'CPU' or 'GPU'"),
    ({"nodes": [{"devices": "X:1"}], "device_types": {"X": {"base": "T4", "fabric": "tape"}}}, "fabric is 'tape'"),
    ({"nodes": [{"devices": "X:1"}], "device_types": []}, r"device_types is \[\], expected an object")])
def test_refused_with_value_expectation_and_fix(value: Any, message: str) -> None:
    with pytest.raises(ClusterError, match="(?s)" + message):
        Cluster.parse(value)
