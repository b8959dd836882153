"""Reads the JSON format (docs/cluster.md) into a description, with one clear message for any error."""
from __future__ import annotations

import re
from typing import Any, List, Mapping, Optional, Sequence, Type, TypeVar, Union

from whale_tf.cluster import hardware
from whale_tf.cluster.defaults import default_links
from whale_tf.cluster.description import ClusterDescription, DeviceTypeDescription, NodeDescription
from whale_tf.documents import Invalid, Record, read
from whale_tf.errors import ClusterError, did_you_mean

_R = TypeVar("_R", bound=Record)

_CLUSTER_KEYS = ("name", "nodes", "device_types")
_NODE_KEYS = ("count", "devices", "links", "nic")
MAX_DEVICES = 1 << 16  # per cluster; building one of this size takes seconds
MAX_DEVICES_PER_NODE = 512  # every pair has its own path


def from_json_value(value: Any) -> ClusterDescription:
    """Validates a parsed JSON object.  Raises ClusterError with the place, the value and the expected form."""
    if not isinstance(value, dict):
        raise ClusterError(f'a cluster description is a JSON object {{"nodes": [...]}}, got {value!r}')
    _known_keys(value, _CLUSTER_KEYS, "the cluster description")
    types = value.get("device_types", {})
    if not isinstance(types, dict):
        raise ClusterError(f'device_types is {types!r}, expected an object {{"name": {{...}}}}')
    types = {name: _part(DeviceTypeDescription, body, f"device_types.{name}") for name, body in types.items()}
    own = {name: body.row(name) for name, body in types.items()}
    nodes = value.get("nodes")
    if not isinstance(nodes, (list, tuple)) or not nodes:
        raise ClusterError(f'"nodes" is {nodes!r}, expected a list of at least one node, e.g. '
                           '[{"devices": "V100-32GB:8", "links": "default"}]')
    expanded: List[NodeDescription] = []
    total = 0
    for number, body in enumerate(nodes):
        same = _expand_node(body, f"nodes[{number}]", own)
        total += len(same) * len(same[0].devices)
        at_most(total, MAX_DEVICES, f"the number of devices up to nodes[{number}]")
        expanded += same
    return _part(ClusterDescription, {
        "name": value.get("name", "cluster"), "nodes": expanded, "device_types": types}, "cluster")


def _known_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise ClusterError("unknown key {!r} in {}; known keys: {}.{}".format(
                key, where, ", ".join(known), did_you_mean(str(key), known)))


def _expand_node(body: Any, where: str, own: Mapping[str, hardware.DeviceType]) -> List[NodeDescription]:
    """Expands one entry of ``nodes`` into ``count`` nodes."""
    if not isinstance(body, dict):
        raise ClusterError(f'{where} is {body!r}, expected an object {{"devices": ...}}')
    _known_keys(body, _NODE_KEYS, where)
    count = whole(body.get("count", 1), where + ".count")
    types = _device_list(body.get("devices"), where + ".devices", own)
    links = body.get("links")
    if links is None and len(types) > 1:
        raise ClusterError(f'{where} has {len(types)} devices but no "links"; give them, or "links": "default" for '
                           f"the usual links of {types[0]}")
    if links is None or links == "default":
        links = default_links([hardware.device_type(name, own) for name in types])
    return [_part(NodeDescription, {"devices": types, "links": links, "nic": body.get("nic")}, where)] * count


def _device_list(value: Any, where: str, own: Mapping[str, hardware.DeviceType]) -> List[str]:
    """Type names from ``"V100-32GB:8"``, ``[{"type": ..., "count": ...}, ...]`` or ``["T4", "T4"]``."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise ClusterError(f'{where} is {value!r}, expected "V100-32GB:8" or [{{"type": "V100-32GB", "count": 8}}]')
    names: List[str] = []
    for entry in value:
        if isinstance(entry, dict):
            _known_keys(entry, ("type", "count"), where)
            kind, count = entry.get("type"), entry.get("count", 1)
        else:
            kind, _, text = str(entry).partition(":")
            count = text if text else 1
        if not isinstance(kind, str):
            raise ClusterError(f'{where} has no device type: {entry!r}; expected {{"type": "V100-32GB", "count": 8}}')
        same = whole(count, where)
        at_most(len(names) + same, MAX_DEVICES_PER_NODE, where)
        names += [hardware.device_type(kind, own).name] * same
    return names


def whole(value: Union[int, str, Any], where: str) -> int:
    """``value`` as a count from 1 to :data:`MAX_DEVICES`."""
    number: Optional[int] = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        number = int(value[:20])  # longer numbers exceed the limit anyway
    if number is None or number < 1:
        raise ClusterError(f"{where} is {value!r}, expected a whole number of at least 1")
    at_most(number, MAX_DEVICES, where)
    return number


def at_most(number: int, limit: int, where: str) -> None:
    """Refuses a count that is too large."""
    if number > limit:
        raise ClusterError(f"{where} is {number}, expected at most {limit}")


def _part(cls: Type[_R], data: Any, where: str) -> _R:
    """A part of the description.  Raises ClusterError with every problem and its place, ``nodes[0].links.pcie``."""
    try:
        return read(cls, data)
    except Invalid as error:
        raise ClusterError(Invalid(error.below(where)).text("") + "; docs/cluster.md describes the format") from None
