"""Clones of ops: what all clones of an op have in common, computed once however often it is cloned, and what differs."""
from __future__ import annotations

from typing import Callable, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Union

from whale_tf._tf_compat import GraphDef, NodeDef, tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.device import canonical_device
from whale_tf.graph_editor.edges import edges_of, take_colocation

Original = Union[tf.Operation, NodeDef]  # of a clone: an op of the graph, or a node that will be one
Device = Union[None, str, Callable[[Original], Optional[str]]]
Edit = Callable[[NodeDef, Original], None]


class Template(NamedTuple):
    """Attributes:
    node: the op's definition without its edges, and without the attributes that do not hold for clones.
    inputs: its edges.
    colocation: its ``_class`` entries.
    """

    op: Original
    name: str
    node: NodeDef
    inputs: Sequence[str]
    colocation: Sequence[bytes]


class Templates(List[Template]):
    """The templates of some ops, in order."""

    def __init__(self, ops: Iterable[Original], definitions: Mapping[str, NodeDef]) -> None:
        """Args:
        definitions: those of the ops, by name.
        """
        super().__init__()
        self._graph_def, self._serialized = v1.GraphDef(), b""
        for op in ops:
            node, name = self._graph_def.node.add(), op.name
            node.CopyFrom(definitions[name])
            self.append(Template(op, name, node, edges_of(node), forget_own(node)))
            del node.input[:]

    def copy_to(self, graph_def: GraphDef) -> List[NodeDef]:
        """Appends a copy of each node to a GraphDef.  Parsing them together takes a quarter of the time of one copy after the
        other."""
        self._serialized = self._serialized or self._graph_def.SerializeToString()
        first = len(graph_def.node)
        graph_def.MergeFromString(self._serialized)
        copies: List[NodeDef] = graph_def.node[first:]
        return copies


def forget_own(node: NodeDef) -> List[bytes]:
    """Remove the attributes of an original that do not hold for its clone; returns the ``_class`` entries."""
    if "_output_shapes" in node.attr:  # shapes are inferred again, because an input may be smaller than the original's
        del node.attr["_output_shapes"]
    return take_colocation(node)


def place_and_edit(templates: Sequence[Template], clones: Sequence[NodeDef], device: Device, edit: Optional[Edit]) -> None:
    """Give clones their devices, and then let ``edit`` change them; see :meth:`StagedEdit.clone`."""
    for template, node in zip(templates, clones):
        choice = device(template.op) if callable(device) else device
        if choice is not None:
            node.device = canonical_device(choice)
    if edit is None:
        return
    for template, node in zip(templates, clones):
        name = node.name
        edit(node, template.op)
        if node.name != name:
            renamed, node.name = node.name, name
            raise GraphEditError(f"`edit` renamed the clone {name!r} to {renamed!r}; `prefix` decides names")
