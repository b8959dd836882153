"""Names that new ops of a graph cannot have."""
from __future__ import annotations

import weakref
from typing import Callable, MutableMapping, Sequence, Set, Tuple

from whale_tf._tf_compat import eager_context, tf

_KNOWN: MutableMapping[tf.Graph, Tuple[int, Set[str]]] = weakref.WeakKeyDictionary()


def names_taken(graph: tf.Graph) -> Set[str]:
    """Names of the graph's ops and of their scopes: TensorFlow renames imported ops that use either.  The names found in a graph
    are kept, because ops are never removed; the next call adds to them."""
    count, taken = _KNOWN.get(graph, (0, set()))
    operations = graph.get_operations()
    for op in operations[count:]:
        name = op.name
        while name and name not in taken:
            taken.add(name)
            name = name.rpartition("/")[0]
    _KNOWN[graph] = len(operations), taken
    return taken


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """``name``, or the first of ``name_1``, ``name_2``, ... that is not taken."""
    found, count = name, 0
    while is_taken(found):
        count += 1
        found = f"{name}_{count}"
    return found


def function_exists(graph: tf.Graph, name: str) -> bool:
    """Whether a function's name is taken in the graph's library; for the graph of a tf.function, among all functions that
    TensorFlow knows, because these share one library."""
    return bool(graph._is_function(name) or (graph.building_function and eager_context().has_function(name)))


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, for messages."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
