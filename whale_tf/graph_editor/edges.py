"""Edges as a NodeDef names them: ``"op"`` (first output), ``"op:1"``, ``"^op"`` (control); a clone's edges."""
from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Optional

from whale_tf._tf_compat import NodeDef

COLOCATE = b"loc:@"  # prefix of the entries of a ``_class`` attribute that name another op


class CloneEdges(Dict[str, str]):
    """Edge of an original -> the clone's edge, computed on first use: ``edges["x:1"]``, ``edges["^x"]``."""

    def __init__(self, names: Mapping[str, str], input_map: Mapping[str, str],
                 control_map: Mapping[str, Optional[str]]) -> None:
        super().__init__()
        self._names = names
        self._input_map = {canonical_edge(old): canonical_edge(new) for old, new in input_map.items()}
        self._control_map = control_map
        self.drops = any(new is None for new in control_map.values())

    def __missing__(self, edge: str) -> str:
        if edge[0] == "^":
            old = edge[1:]
            new = self._control_map[old] if old in self._control_map else self._names.get(old, old)
            result = "" if new is None else "^" + new
        elif canonical_edge(edge) in self._input_map:
            result = self._input_map[canonical_edge(edge)]
        else:
            old, colon, index = edge.partition(":")
            result = self._names.get(old, old) + colon + index
        self[edge] = result
        return result


def canonical_edge(edge: str) -> str:
    """``"x:0"`` as NodeDefs spell it: ``"x"``."""
    return edge[:-2] if edge.endswith(":0") else edge


def tensor_name(edge: str) -> str:
    """``"x"`` as TensorFlow names the tensor: ``"x:0"``."""
    return edge if ":" in edge else edge + ":0"


def edges_of(node: NodeDef) -> List[str]:
    """A node's edges.  A slice of a protocol buffer's list takes half the time of one element after the other."""
    edges: List[str] = node.input[:]
    return edges


def control_edges(names: Iterable[str]) -> List[str]:
    """Names of ops as the control edges of a NodeDef, each once."""
    return ["^" + name.lstrip("^") for name in dict.fromkeys(names)]


def take_colocation(node: NodeDef) -> List[bytes]:
    """Remove the ``_class`` entries of a node, and return them."""
    if "_class" not in node.attr:
        return []
    entries = list(node.attr["_class"].list.s)
    del node.attr["_class"]
    return entries


def follow_colocation(node: NodeDef, entries: Iterable[bytes], names: Mapping[str, str]) -> None:
    """Give a clone the ``_class`` entries of its original that hold for it: those that name a cloned op, and those without
    ``loc:@``."""
    kept = []
    for entry in entries:
        if not entry.startswith(COLOCATE):
            kept.append(entry)
        else:
            target = names.get(entry[len(COLOCATE):].decode())
            if target is not None:
                kept.append(COLOCATE + target.encode())
    if kept:
        node.attr["_class"].list.s.extend(kept)
