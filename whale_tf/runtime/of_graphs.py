"""What is known of graphs, kept by the graphs themselves.

A value of a ``WeakKeyDictionary`` that refers to its key keeps it alive, and what was done to a graph refers to that graph: no
function would ever be freed, nor the variables that it has captured.
"""
from __future__ import annotations

import weakref
from typing import Dict, Iterator, MutableMapping, TypeVar

from whale_tf._tf_compat import tf

_T = TypeVar("_T")
_KEPT = "_whale_tf"  # attribute of a graph: table -> value


class OfGraphs(MutableMapping[tf.Graph, _T]):
    """Values by graph, in the order in which the graphs got theirs.

    They go with the graph, or with this table; the last one goes with the next.  TensorFlow empties the graph of a function that
    is gone, which then has no value unless it is the last one.
    """

    def __init__(self) -> None:
        self._graphs: MutableMapping[tf.Graph, None] = weakref.WeakKeyDictionary()
        self._last: Dict[tf.Graph, _T] = {}

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __getitem__(self, graph: tf.Graph) -> _T:
        if graph in self._last:
            return self._last[graph]
        value: _T = getattr(graph, _KEPT, {})[self]
        return value

    def __setitem__(self, graph: tf.Graph, value: _T) -> None:
        if not hasattr(graph, _KEPT):
            setattr(graph, _KEPT, weakref.WeakKeyDictionary())
        getattr(graph, _KEPT)[self] = value
        self._graphs[graph], self._last = None, {graph: value}

    def __delitem__(self, graph: tf.Graph) -> None:
        del self._graphs[graph]
        self._last.pop(graph, None)
        getattr(graph, _KEPT, {}).pop(self, None)

    def __iter__(self) -> Iterator[tf.Graph]:
        return iter([graph for graph in self._graphs if hasattr(graph, _KEPT)])

    def __len__(self) -> int:
        return len(list(iter(self)))
