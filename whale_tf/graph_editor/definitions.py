"""A graph as NodeDefs, with the nodes to add and the edges to move. It edits nothing."""
from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from whale_tf._tf_compat import FunctionDef, GraphDef, NodeDef, tf, v1


class Definitions(NamedTuple):
    """Attributes:
    graph: the graph.
    originals: definition of each of its ops, by name.
    export: the GraphDef from which they were read, for its library of functions and its versions.
    added: new nodes, by name, in order; those of ``additions``.
    changed: definitions, with their new inputs, of ops of the graph whose edges are to move.
    given: shapes of tensors that the graph does not have.
    additions: new nodes, and new functions for its library; None: there are none.
    """

    graph: tf.Graph
    originals: Mapping[str, NodeDef]
    export: GraphDef
    added: Mapping[str, NodeDef] = {}
    changed: Mapping[str, NodeDef] = {}
    given: Mapping[str, Sequence[Optional[int]]] = {}
    additions: Optional[GraphDef] = None

    @property
    def functions(self) -> Sequence[FunctionDef]:
        """New functions for its library."""
        return () if self.additions is None else self.additions.library.function

    @property
    def library(self) -> List[FunctionDef]:
        """All functions that nodes may call."""
        return [*self.export.library.function, *self.functions]

    def node(self, name: str) -> NodeDef:
        """The future definition of an op, whether in the graph or new; KeyError: there is none."""
        for table in (self.added, self.changed):
            if name in table:
                return table[name]
        return self.originals[name]

    def graph_def(self) -> GraphDef:
        """A copy of the graph as it will be."""
        if not self.added and not self.changed:
            copy = v1.GraphDef()
            copy.CopyFrom(self.export)
            return copy
        nodes = [self.changed.get(node.name, node) for node in self.export.node]
        whole = v1.GraphDef(node=[*nodes, *self.added.values()], library=self.export.library, versions=self.export.versions)
        whole.library.function.extend(self.functions)
        return whole


def definitions_of(graph: tf.Graph, given: Optional[Mapping[str, Sequence[Optional[int]]]] = None) -> Definitions:
    """The graph as it is now; ``given``: see :class:`Definitions`."""
    export = graph.as_graph_def()
    originals: Dict[str, NodeDef] = {node.name: node for node in export.node}
    return Definitions(graph, originals, export, given=given or {})
