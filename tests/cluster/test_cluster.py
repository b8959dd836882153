"""Devices, links, paths, groups and subsets."""
from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_tf.cluster import BUILTIN, DEVICE_TYPES, PRECISIONS, Cluster, Device, Link
from whale_tf.errors import ClusterError

ALL_TEXTS = sorted(BUILTIN) + ["cpu:4", "cpu:2,cpu:3", "2xV100-32GB:8", "V100-32GB:8,P100-16GB:8", "T4:3,A100-40GB:2"]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to three nodes of up to ten devices of any types, also mixed."""
    names = st.sampled_from(sorted(DEVICE_TYPES))
    nodes = []
    for _ in range(draw(st.integers(1, 3))):
        runs = draw(st.lists(st.tuples(names, st.integers(1, 5)), min_size=1, max_size=2))
        nodes.append({"devices": [{"type": name, "count": count} for name, count in runs], "links": "default",
                      "nic": {"bandwidth_gbits_per_s": draw(st.sampled_from([1, 10, 50, 200])),
                              "count": draw(st.integers(1, 4))}})
    return Cluster.parse({"nodes": nodes})


@pytest.mark.parametrize("text", ALL_TEXTS)
def test_json_round_trip(text: str) -> None:
    cluster = Cluster.parse(text)
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster and hash(again) == hash(cluster)
    assert Cluster.parse(cluster.to_json(None)) == cluster == Cluster.parse(cluster.to_dict())
    assert pickle.loads(pickle.dumps(cluster)).devices == cluster.devices
    assert copy.deepcopy(cluster) == cluster


@pytest.mark.slow
@given(clusters())
def test_links_agree_with_paths(cluster: Cluster) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster
    for a in range(len(cluster)):
        for b in range(len(cluster)):
            path, link = cluster.path(a, b), cluster.link(a, b)
            if a == b:
                assert path == () and link.seconds(1e9) == 0
                continue
            resources = [cluster.resource(name) for name in path]
            assert len(set(path)) == len(path) > 0
            assert link.bandwidth_bytes_per_s == min(resource.bandwidth_bytes_per_s for resource in resources)
            assert link.latency_s == max(resource.latency_s for resource in resources)
            assert link.name in {resource.name for resource in resources}
            assert cluster.bandwidth(a, b) == cluster.bandwidth(b, a) and cluster.latency(a, b) == link.latency_s
            assert {name.split("/")[0] for name in path} == {
                f"node{cluster.devices[device].node}" for device in (a, b)}


@pytest.mark.slow
@given(clusters(), st.data())
def test_subset_keeps_devices_and_links(cluster: Cluster, data: st.DataObject) -> None:
    keep = sorted(data.draw(st.sets(st.sampled_from(range(len(cluster))), min_size=1)))
    part = cluster.subset(keep)
    assert [device.type for device in part.devices] == [cluster.devices[index].type for index in keep]
    assert part.total_memory_bytes == sum(cluster.devices[index].memory_bytes for index in keep)
    single_nic = all(node.nic is not None and node.nic.count == 1 for node in cluster.description.nodes)
    for a, old_a in enumerate(keep):
        for b, old_b in enumerate(keep):
            if cluster.devices[old_a].node == cluster.devices[old_b].node or single_nic:
                assert part.link(a, b) == cluster.link(old_a, old_b)
    assert Cluster.from_json(part.to_json()) == part


@pytest.mark.slow
@given(clusters(), st.data())
def test_group_is_never_faster_than_its_members_allow(cluster: Cluster, data: st.DataObject) -> None:
    group = sorted(data.draw(st.sets(st.sampled_from(range(len(cluster))), min_size=2, max_size=6))
                   ) if len(cluster) > 1 else []
    if not group:
        return
    got = cluster.bottleneck(group)
    nodes = {cluster.devices[index].node for index in group}
    assert 0 < got.bandwidth_bytes_per_s < float("inf") and got.latency_s >= 0
    for node in nodes:
        inside = [index for index in group if cluster.devices[index].node == node]
        if len(inside) > 1:
            assert got.bandwidth_bytes_per_s <= cluster.bottleneck(inside).bandwidth_bytes_per_s
        if len(nodes) > 1:
            nic = cluster.description.nodes[node].nic
            assert nic is not None
            assert got.bandwidth_bytes_per_s <= nic.bandwidth_bytes_per_s * min(nic.count, len(inside))


def test_devices_are_numbered_densely() -> None:
    cluster = Cluster.parse("V100-32GB:2,cpu:3")
    assert [device.index for device in cluster.devices] == list(range(5))
    assert cluster.nodes == ((0, 1), (2, 3, 4))
    assert [device.local_index for device in cluster.devices] == [0, 1, 0, 1, 2]
    assert not cluster.is_homogeneous and Cluster.parse("cpu:3").is_homogeneous
    assert [device.tf_name() for device in cluster.devices[1:3]] == [
        "/job:localhost/replica:0/task:0/device:GPU:1", "/job:localhost/replica:0/task:0/device:CPU:0"]
    assert Cluster.parse("cpu:2,cpu:2").devices[3].tf_name() == "/job:localhost/replica:0/task:0/device:CPU:3"
    assert Cluster.parse("cpu:2,cpu:2").devices[3].tf_name("worker", 1) == "/job:worker/replica:0/task:1/device:CPU:1"


def test_clusters_with_other_limits_of_memory_differ() -> None:
    cluster = Cluster.parse("T4:2")
    limited = cluster.limited(1e9)
    assert limited != cluster and limited != cluster.limited(2e9) and limited == cluster.limited(1e9)
    assert cluster == Cluster.parse("T4:2") and cluster.tightened(0.5) != cluster
    for part in (limited.subset([1]), limited.with_hosts([[0, 1]], 2)[0]):
        limits = [device.limit_bytes for device in part.devices if device.kind == "GPU"]
        assert limits == [1e9] * len(limits) and limits


def test_hosts_take_no_link_from_devices() -> None:
    """Eight GPUs and eight adapters in each node."""
    cluster = Cluster.parse("a100:16")
    beside, numbers = cluster.with_hosts([range(8), range(8, 16)], 16)
    for a, b in ((0, 1), (1, 9), (7, 15), (14, 3)):
        assert beside.path(numbers[a], numbers[b]) == cluster.path(a, b)


def test_device_is_frozen_and_hashable() -> None:
    device = Cluster.parse("T4:1").devices[0]
    assert hash(device) == hash(copy.deepcopy(device)) and device in {device}
    assert set(device.peak_flops_per_s) == set(PRECISIONS)
    with pytest.raises(TypeError):
        device.peak_flops_per_s["fp32"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        device.memory_bytes = 1  # type: ignore[misc]
    plain = Device(3, 0, 3, "X", 1, {"fp32": 1.0}, 1.0, kind="CPU")
    assert plain.tf_name().endswith("device:CPU:3")


def test_link_time_is_alpha_beta() -> None:
    assert Link(1e9, 1e-3, "nic").seconds(2e9) == pytest.approx(2.001)


class TestCubeMesh:
    """8 V100: direct lanes where there are some, PCIe and the socket link elsewhere."""

    cluster = Cluster.parse("hc2")

    def test_every_gpu_has_six_lanes(self) -> None:
        lane = 20e9
        for a in range(8):
            lanes = [self.cluster.bandwidth(a, b) / lane for b in range(8)
                     if b != a and self.cluster.link(a, b).name == "nvlink"]
            assert sum(lanes) == 6 and len(lanes) == 4
        assert self.cluster.bottleneck(range(8)) == Link(6 * lane, 3.4e-6, "nvlink")

    def test_no_lane_means_pcie(self) -> None:
        assert self.cluster.path(0, 5) == (
            "node0/device0/pcie-out", "node0/pcie-switch0/up", "node0/qpi/0>1", "node0/pcie-switch2/down",
            "node0/device5/pcie-in")
        assert self.cluster.bottleneck([0, 5]).name == "pcie"

    def test_between_nodes(self) -> None:
        assert self.cluster.path(0, 8)[2:4] == ("node0/nic0/out", "node1/nic0/in")
        assert self.cluster.link(0, 8).bandwidth_bytes_per_s == 10e9  # the root complex is narrower than 100 Gbit/s
        assert Cluster.parse("dapple-a").link(0, 8) == Link(25e9 / 8, 9.6e-6, "nic")


def test_pcie_paths_meet_at_the_switch_the_socket_or_the_socket_link() -> None:
    cluster = Cluster.parse("hc1")
    assert len(cluster.path(0, 1)) == 2 and cluster.bandwidth(0, 1) == 12e9
    assert len(cluster.path(0, 2)) == 4 and cluster.bandwidth(0, 2) == 10e9
    assert len(cluster.path(0, 4)) == 5 and cluster.link(0, 4).name == "qpi" and cluster.bandwidth(0, 4) == 6e9
    shared = set(cluster.path(0, 4)) & set(cluster.path(1, 5))
    assert shared == {"node0/pcie-switch0/up", "node0/qpi/0>1", "node0/pcie-switch2/down"}
    assert not set(cluster.path(0, 4)) & set(cluster.path(4, 0))  # full duplex


def test_switch_gives_every_pair_the_whole_port() -> None:
    cluster = Cluster.parse("a100")
    assert {cluster.bandwidth(a, b) for a in range(8) for b in range(8) if a != b} == {240e9}
    assert cluster.path(2, 6) == ("node0/device2/nvlink-out", "node0/device6/nvlink-in")


def test_several_adapters_serve_their_own_devices() -> None:
    cluster = Cluster.parse("a100:16")
    assert cluster.path(3, 12) == (
        "node0/device3/pcie-out", "node0/pcie-switch1/up", "node0/nic3/out", "node1/nic4/in",
        "node1/pcie-switch2/down", "node1/device4/pcie-in")
    one, all_of_them = cluster.bottleneck([0, 8]), cluster.bottleneck(range(16))
    assert all_of_them.bandwidth_bytes_per_s == 8 * one.bandwidth_bytes_per_s


def test_thousand_devices() -> None:
    cluster = Cluster.parse("a100:1024")
    assert len(cluster) == 1024 and len(cluster.nodes) == 128 and len(cluster.to_json()) < 2000
    assert cluster.link(0, 1023) == cluster.link(0, 8)


@pytest.mark.parametrize("ask, message", [
    (lambda c: c.link(0, 4), "devices 0..3, but no device 4"),
    (lambda c: c.path(-1, 0), "but no device -1"),
    (lambda c: c.resource("node0/qpi"), "no link named 'node0/qpi'; it has node0/local"),
    (lambda c: c.subset([]), "give at least one device"),
    (lambda c: c.bottleneck([]), "give at least one device"),
    (lambda c: c.bottleneck([9]), "but no device 9")])
def test_questions_about_what_is_not_there(ask, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ClusterError, match=message.replace("(", "\\(")):
        ask(Cluster.parse("cpu:4"))
