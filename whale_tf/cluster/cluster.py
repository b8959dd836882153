"""The cluster: devices in nodes, and the links between any two of them."""
from __future__ import annotations

import copy
import itertools
import json
import os
from dataclasses import replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from whale_tf.cluster import hardware
from whale_tf.cluster.description import ClusterDescription, NodeDescription, part_of_node
from whale_tf.cluster.detect import detect, from_tensorflow
from whale_tf.cluster.devices import Device, Link
from whale_tf.cluster.parse import parse_description, parse_json
from whale_tf.cluster.topology import SELF, NodeTopology, Resource, slowest
from whale_tf.documents import plain
from whale_tf.errors import ClusterError, memory_text


class Cluster:
    """A frozen description of devices and links; clusters with equal descriptions are equal.

    Attributes:
        name: used in tables and messages.
        devices: all devices; ``devices[i].index == i``.
        nodes: device numbers of each node.
        description: the content of ``to_json``.
    """

    def __init__(self, description: ClusterDescription) -> None:
        """Builds devices and paths.  Raises ClusterError for an unknown device type or a missing link."""
        self.description = description
        self.name = description.name
        self._own_types = description.types()
        self.devices, self.nodes = _number_devices(description.nodes, self._own_types)
        self._topologies = _topologies(description.nodes, self._own_types)
        self._resources: Optional[Dict[str, Link]] = None
        if len(self.nodes) > 1:
            for number, node in enumerate(description.nodes):
                if node.nic is None:
                    raise ClusterError(
                        f'node {number} of {self.name!r} has no network adapter, but there are {len(self.nodes)} '
                        f'nodes; add "nic": '
                        '{"bandwidth_gbits_per_s": 50}')

    @classmethod
    def parse(cls, value: Union[Cluster, Mapping[str, Any], str]) -> Cluster:
        """A cluster from any form: a Cluster, a dict, JSON text, the path of a JSON file, a built-in name
        (``"dapple-a"``), or a short form (``"cpu:4"``, ``"V100-32GB:8,P100-16GB:8"``, ``"2xV100-32GB:8"``).

        Raises:
            ClusterError: the value cannot be parsed or is inconsistent.
        """
        return value if isinstance(value, Cluster) else cls(parse_description(value))

    @classmethod
    def local(cls, environ: Mapping[str, str] = os.environ) -> Cluster:
        """This machine: ``WHALE_CLUSTER`` if set, otherwise the GPUs that nvidia-smi lists, otherwise one CPU device."""
        text = environ.get("WHALE_CLUSTER")
        return cls.parse(text) if text else cls(detect(environ))

    @classmethod
    def from_tensorflow(cls, devices: Iterable[object]) -> Cluster:
        """The devices of TensorFlow's ``device_lib.list_local_devices()``: its GPUs, else its CPU devices."""
        return cls(from_tensorflow(devices))

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Reads the output of :meth:`to_json`, or any JSON in the documented format.  Raises ClusterError."""
        return cls(parse_json(text, "the cluster's JSON text"))

    def to_json(self, indent: Optional[int] = 1) -> str:
        """The cluster in the documented JSON format; equal consecutive nodes are written once with a count."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> Dict[str, Any]:
        """The JSON object of :meth:`to_json`."""
        nodes: List[Dict[str, Any]] = []
        for node in self.description.nodes:
            body = dict(plain(node, nulls=False), devices=_runs(node.devices))
            if nodes and {key: value for key, value in nodes[-1].items() if key != "count"} == body:
                nodes[-1]["count"] += 1
            else:
                nodes.append(dict(body, count=1))
        types = {name: plain(body) for name, body in self.description.device_types.items()}
        return dict({"name": self.name, "nodes": nodes}, **({"device_types": types} if types else {}))

    def __len__(self) -> int:
        return len(self.devices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self.description == other.description and self.devices == other.devices

    def __hash__(self) -> int:
        return hash((self.name, self.description.nodes))

    def __repr__(self) -> str:
        return "Cluster({!r}, {})".format(self.name, " + ".join(_node_texts(self.description.nodes)))

    @property
    def is_homogeneous(self) -> bool:
        """Whether all devices are of one type."""
        return len({device.type for device in self.devices}) == 1

    @property
    def total_memory_bytes(self) -> int:
        return sum(device.memory_bytes for device in self.devices)

    def device_type(self, name: str) -> hardware.DeviceType:
        """The hardware row of a type name, the cluster's own types first.  Raises ClusterError."""
        return hardware.device_type(name, self._own_types)

    def link(self, a: int, b: int) -> Link:
        """The path from device ``a`` to device ``b`` as one link, without contention: name and bandwidth are those of its
        narrowest link.  Raises ClusterError for a device the cluster does not have."""
        first, second = self._device(a), self._device(b)
        if a == b:
            return SELF
        if first.node == second.node:
            return self._topologies[first.node].links[first.local_index, second.local_index]
        out = self._topologies[first.node].out_links[first.local_index]
        into = self._topologies[second.node].into_links[second.local_index]
        narrow = out if out.bandwidth_bytes_per_s <= into.bandwidth_bytes_per_s else into
        return Link(narrow.bandwidth_bytes_per_s, max(out.latency_s, into.latency_s), narrow.name)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes per second from ``a`` to ``b`` (infinite on the same device)."""
        return self.link(a, b).bandwidth_bytes_per_s

    def latency(self, a: int, b: int) -> float:
        """Seconds for an empty message from ``a`` to ``b``."""
        return self.link(a, b).latency_s

    def bottleneck(self, devices: Iterable[int]) -> Link:
        """The slowest link on a ring over the group.

        Within a node see :meth:`NodeTopology.group_link`.  Between nodes a ring leaves and enters each node once per
        adapter, so a node contributes all adapters that its members use.
        """
        group = sorted(set(devices))
        if not group:
            raise ClusterError("an empty group of devices has no bottleneck; give at least one device")
        if len(group) == 1:
            self._device(group[0])
            return SELF
        by_node: Dict[int, List[int]] = {}
        for index in group:
            device = self._device(index)
            by_node.setdefault(device.node, []).append(device.local_index)
        links = [self._topologies[node].group_link(members) for node, members in by_node.items() if len(members) > 1]
        if len(by_node) > 1:
            links += [self._adapters(node, members) for node, members in by_node.items()]
        return slowest([Resource(link.name, link) for link in links])

    def path(self, a: int, b: int) -> Tuple[str, ...]:
        """Names of the resources a message from ``a`` to ``b`` uses, in order; empty on the same device."""
        first, second = self._device(a), self._device(b)
        if a == b:
            return ()
        if first.node == second.node:
            inside = self._topologies[first.node].paths[first.local_index, second.local_index]
            return _global_names(first.node, inside)
        out = self._topologies[first.node].out[first.local_index]
        into = self._topologies[second.node].into[second.local_index]
        return _global_names(first.node, out) + _global_names(second.node, into)

    def resource(self, name: str) -> Link:
        """The link with a name returned by :meth:`path`.  Raises ClusterError for an unknown name."""
        known = self.resources
        if name not in known:
            raise ClusterError("cluster {!r} has no link named {!r}; it has {}".format(
                self.name, name, ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")))
        return known[name]

    @property
    def resources(self) -> Mapping[str, Link]:
        """All resources by name."""
        if self._resources is None:
            self._resources = {f"node{number}/{name}": link
                               for number, topology in enumerate(self._topologies)
                               for name, link in topology.resources().items()}
        return self._resources

    def subset(self, indexes: Iterable[int]) -> Cluster:
        """The cluster of these devices only, renumbered densely in their old order; links are unchanged."""
        keep = sorted(set(indexes))
        for index in keep:
            self._device(index)
        if not keep:
            raise ClusterError("a subset of a cluster cannot be empty; give at least one device number")
        nodes = []
        for number, members in enumerate(self.nodes):
            kept = [self.devices[index].local_index for index in keep if index in members]
            if kept:
                nodes.append(part_of_node(self.description.nodes[number], kept))
        return Cluster(replace(self.description, nodes=tuple(nodes))).with_limits([self.devices[old].limit_bytes for old in keep])

    def with_hosts(self, processes: Sequence[Sequence[int]], count: int) -> Tuple[Cluster, Dict[int, int]]:
        """The first ``count`` devices, and for each process the host of its node as one more device of that node.

        Args:
            processes: devices of each.

        Returns:
            The cluster, and the new numbers in it: of each device by its old number, and of process ``r``'s host by
            ``count + r``.
        """
        part = self if count == len(self) else self.subset(range(count))
        kind = next((device.type for device in part.devices if device.kind == "CPU"), "CPU")
        ranks: Dict[int, List[int]] = {}
        for rank, devices in enumerate(processes):
            ranks.setdefault(part.devices[devices[0]].node, []).append(rank)
        nodes, numbers = [], {}  # type: List[Any], Dict[int, int]
        for number, (node, members) in enumerate(zip(part.description.nodes, part.nodes)):
            hosts = ranks.get(number, [])
            for old in (*members, *(count + rank for rank in hosts)):
                numbers[old] = len(numbers)
            nodes.append(replace(node, devices=(*node.devices, *[kind] * len(hosts))))
        limits: List[Optional[float]] = [None] * len(numbers)
        for device in part.devices:
            limits[numbers[device.index]] = device.limit_bytes
        return Cluster(replace(part.description, nodes=tuple(nodes))).with_limits(limits), numbers

    def _adapters(self, node: int, members: Sequence[int]) -> Link:
        """All adapters of ``node`` that ``members`` use, each reached from its nearest member."""
        topology = self._topologies[node]
        best: Dict[int, Link] = {}
        for member in members:
            link, nic = topology.out_links[member], topology.nic_of(member)
            if nic not in best or link.bandwidth_bytes_per_s > best[nic].bandwidth_bytes_per_s:
                best[nic] = link
        widest = max(best.values())
        return Link(sum(link.bandwidth_bytes_per_s for link in best.values()), widest.latency_s, widest.name)

    def limited(self, limit_bytes: float) -> Cluster:
        """The cluster whose devices have at most ``limit_bytes`` bytes for a step.

        Raises:
            ClusterError: the limit is not above zero.
        """
        if not limit_bytes > 0:
            raise ClusterError(f"the memory limit is {memory_text(limit_bytes)} a device, expected more than 0")
        return self.with_limits([float(limit_bytes)] * len(self))

    def tightened(self, share: float) -> Cluster:
        """The cluster whose devices have only this share of the memory that a step can use."""
        return self.with_limits([share * device.usable_bytes for device in self.devices])

    def with_limits(self, limits: Sequence[Optional[float]]) -> Cluster:
        """The cluster each of whose devices has at most so many bytes for a step; None: all that it can use."""
        made = copy.copy(self)
        made.devices = tuple(replace(device, limit_bytes=limit) for device, limit in zip(self.devices, limits))
        return made

    def _device(self, index: int) -> Device:
        if not 0 <= index < len(self.devices):
            raise ClusterError(f"cluster {self.name!r} has devices 0..{len(self.devices) - 1}, but no device {index}")
        return self.devices[index]


def _number_devices(nodes: Sequence[NodeDescription], own: Mapping[str, hardware.DeviceType]
                    ) -> Tuple[Tuple[Device, ...], Tuple[Tuple[int, ...], ...]]:
    devices: List[Device] = []
    numbers = {"CPU": 0, "GPU": 0}
    members: List[Tuple[int, ...]] = []
    for node, description in enumerate(nodes):
        local = {"CPU": 0, "GPU": 0}
        start = len(devices)
        for local_index, name in enumerate(description.devices):
            row = hardware.device_type(name, own)
            devices.append(Device(
                len(devices), node, local_index, row.name, row.memory_bytes, row.peak_flops_per_s,
                row.memory_bandwidth_bytes_per_s, row.kind, numbers[row.kind], local[row.kind]))
            numbers[row.kind] += 1
            local[row.kind] += 1
        members.append(tuple(range(start, len(devices))))
    return tuple(devices), tuple(members)


def _topologies(nodes: Sequence[NodeDescription], own: Mapping[str, hardware.DeviceType]) -> Tuple[NodeTopology, ...]:
    """One topology per node; equal nodes share one, so 1,024 devices cost no more than one node."""
    made: Dict[NodeDescription, NodeTopology] = {}
    for node in nodes:
        if node not in made:
            made[node] = NodeTopology(node, [hardware.device_type(name, own).kind for name in node.devices])
    return tuple(made[node] for node in nodes)


def _global_names(node: int, path: Sequence[Resource]) -> Tuple[str, ...]:
    return tuple(f"node{node}/{resource.name}" for resource in path)


def _node_texts(nodes: Sequence[NodeDescription]) -> List[str]:
    """``["2xV100-32GB:8", "T4:4"]``."""
    texts: List[List[Any]] = []
    for node in nodes:
        text = ",".join("{type}:{count}".format(**run) for run in _runs(node.devices))
        if texts and texts[-1][1] == text:
            texts[-1][0] += 1
        else:
            texts.append([1, text])
    return [f"{count}x{text}" if count > 1 else text for count, text in texts]


def _runs(names: Sequence[str]) -> List[Dict[str, Any]]:
    """``[{"type": "V100-32GB", "count": 8}]``."""
    return [{"type": name, "count": len(list(run))} for name, run in itertools.groupby(names)]
