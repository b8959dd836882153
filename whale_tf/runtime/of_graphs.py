"""What is known of graphs, kept by the graphs themselves.

A value of a ``WeakKeyDictionary`` that refers to its key keeps it alive, and what was done to a graph refers to that graph: no
function would ever be freed, nor the variables that it has captured.
"""
from __future__ import annotations

import weakref
from typing import Iterator, MutableMapping, TypeVar

from whale_tf._tf_compat import tf

_T = TypeVar("_T")
_KEPT = "_whale_tf"  # attribute of a graph: table -> value


class OfGraphs(MutableMapping[tf.Graph, _T]):
    """Values by graph, in the order in which the graphs got theirs.  They go with the graph, or with this table."""

    def __init__(self) -> None:
        self._graphs: MutableMapping[tf.Graph, None] = weakref.WeakKeyDictionary()

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __getitem__(self, graph: tf.Graph) -> _T:
        if graph not in self._graphs:
            raise KeyError(graph)
        value: _T = getattr(graph, _KEPT)[self]
        return value

    def __setitem__(self, graph: tf.Graph, value: _T) -> None:
        if not hasattr(graph, _KEPT):
            setattr(graph, _KEPT, weakref.WeakKeyDictionary())
        getattr(graph, _KEPT)[self] = value
        self._graphs[graph] = None

    def __delitem__(self, graph: tf.Graph) -> None:
        del self._graphs[graph]
        del getattr(graph, _KEPT)[self]

    def __iter__(self) -> Iterator[tf.Graph]:
        return iter(list(self._graphs))

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, graph: object) -> bool:
        return graph in self._graphs
