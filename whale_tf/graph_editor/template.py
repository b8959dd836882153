"""What all clones of an op have in common, computed once however often the op is cloned."""
from __future__ import annotations

from typing import Iterable, List, Mapping, NamedTuple, Sequence, Union

from whale_tf._tf_compat import NodeDef, tf, v1
from whale_tf.graph_editor.edges import edges_of, take_colocation

Original = Union[tf.Operation, NodeDef]  # of a clone: an op of the graph, or a node that will be one


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


def templates_of(ops: Iterable[Original], definitions: Mapping[str, NodeDef]) -> List[Template]:
    """The templates of some ops; ``definitions``: those of the ops, by name."""
    templates = []
    for op in ops:
        node, name = v1.NodeDef(), op.name
        node.CopyFrom(definitions[name])
        templates.append(Template(op, name, node, edges_of(node), forget_own(node)))
        del node.input[:]
    return templates


def forget_own(node: NodeDef) -> List[bytes]:
    """Remove the attributes of an original that do not hold for its clone; returns the ``_class`` entries."""
    if "_output_shapes" in node.attr:  # shapes are inferred again, because an input may be smaller than the original's
        del node.attr["_output_shapes"]
    return take_colocation(node)
