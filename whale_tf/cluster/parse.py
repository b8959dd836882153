"""Ways to write a cluster: dict, JSON text, file, built-in name, short form."""
from __future__ import annotations

import os
import re
from typing import Any, List, Mapping, NamedTuple, Union

from whale_tf.cluster import hardware
from whale_tf.cluster.builtin import BUILTIN, builtin_cluster
from whale_tf.cluster.defaults import default_cluster
from whale_tf.cluster.description import ClusterDescription
from whale_tf.cluster.detect import local_gpu, own_types, table_name
from whale_tf.cluster.reading import MAX_DEVICES, MAX_DEVICES_PER_NODE, at_most, from_json_value, whole
from whale_tf.documents import object_in, read_text
from whale_tf.errors import ClusterError, did_you_mean

MAX_GPUS_PER_NODE = 16
_PART = re.compile(r"^(?:(?P<nodes>-?\d+)x)?(?P<type>[A-Za-z][\w.+-]*?)(?::(?P<count>[^:]*))?$")


def parse_description(value: Union[Mapping[str, Any], str]) -> ClusterDescription:
    """``value`` as a description.  Raises ClusterError."""
    if isinstance(value, Mapping):
        return from_json_value(dict(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ClusterError("a cluster is a Cluster, a dict, a path, JSON text or a short form such as 'cpu:4' or "
                           f"'V100-32GB:8,P100-16GB:8'; got {value!r}")
    text = value.strip()
    if text.startswith("{"):
        return parse_json(text, "the cluster's JSON text")
    if os.path.isfile(text):
        return parse_json(read_text(text, text, ClusterError), text)
    if text.endswith(".json") or os.sep in text:
        raise ClusterError(f"there is no cluster file {text!r}; give the path of a JSON file (docs/cluster.md), or a short "
                           "form such as 'cpu:4'")
    known = builtin_cluster(text)
    return known if known is not None else parse_short_form(text)


def parse_json(text: str, where: str) -> ClusterDescription:
    """JSON text as a description; ``where`` names it in messages.  Raises ClusterError."""
    return from_json_value(object_in(text, where, ClusterError, "; the format is described in docs/cluster.md"))


def parse_short_form(text: str) -> ClusterDescription:
    """``"cpu:4"``, ``"gpu:8"``, ``"V100-32GB:8,P100-16GB:8"`` (each part a node), ``"2xV100-32GB:8"``.

    ``gpu`` is the type of this machine's GPUs, or V100-32GB if it has none (planning on a laptop).
    Raises ClusterError.
    """
    parts = [_part(part.strip(), text) for part in text.split(",")]
    at_most(sum(part.nodes * part.per_node for part in parts), MAX_DEVICES, f"the number of devices in {text!r}")
    gpu = local_gpu() if any(part.type.lower() == "gpu" for part in parts) else None
    own = own_types([gpu] if gpu else [])
    gpu_name = (table_name(gpu) or gpu.name) if gpu else "V100-32GB"
    nodes: List[List[str]] = []
    for part in parts:
        name = gpu_name if part.type.lower() == "gpu" else part.type
        row = _row(name, text, {key: body.row(key) for key, body in own.items()})
        if row.kind == "GPU" and part.per_node > MAX_GPUS_PER_NODE:
            raise ClusterError(
                f"{text!r} has {part.per_node} GPUs in one node, expected at most {MAX_GPUS_PER_NODE}; write the "
                f"nodes, e.g. '{max(1, part.per_node // 8)}x{row.name}:8'")
        at_most(part.per_node, MAX_DEVICES_PER_NODE, f"the number of devices of a node in {text!r}")
        nodes += [[row.name] * part.per_node] * part.nodes
    return default_cluster(nodes, text, own)


class _Part(NamedTuple):
    """``nodes`` equal nodes of ``per_node`` devices each."""

    nodes: int
    type: str
    per_node: int


def _part(part: str, text: str) -> _Part:
    match = _PART.match(part)
    if match is None:
        raise ClusterError(f"{part!r} in cluster {text!r} is not TYPE:COUNT or NODESxTYPE:COUNT, e.g. 'cpu:4', '2xV100-32GB:8'")
    nodes, name, count = match.group("nodes"), match.group("type"), match.group("count")
    return _Part(1 if nodes is None else whole(nodes, "the nodes in " + repr(part)), name,
                 1 if count is None else whole(count, "the count in " + repr(part)))


def _row(name: str, text: str, own: Mapping[str, hardware.DeviceType]) -> hardware.DeviceType:
    try:
        return hardware.device_type(name, own)
    except ClusterError as error:
        hint = did_you_mean(text.lower(), BUILTIN)
        raise ClusterError("{} Built-in clusters: {}.{}".format(error, ", ".join(BUILTIN), hint)) from None
