"""``epl.add_to_collection``: how the values of a tensor in all clones become what ``Session.run`` returns.

Without a collection a fetched tensor has the local script's value, whatever the plan.  In a collection it has EPL's::

    GLOBAL_MEAN_OBJECTS, GLOBAL_SUM_OBJECTS     the mean or sum of the values of all micro-batches, replicas and processes
    GLOBAL_CONCAT_OBJECTS                       their values one after the other along the first dimension
    LOCAL_MEAN_OBJECTS, ...                     the same over the micro-batches of this process's first replica
"""

from __future__ import annotations

from typing import Any, Dict, List

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.annotations import annotations_of
from whale_tf.errors import AnnotationError
from whale_tf.runtime.active import require


class GraphKeys:
    """Names of the collections."""

    GLOBAL_CONCAT_OBJECTS = "global_concat_objects"
    GLOBAL_MEAN_OBJECTS = "global_mean_objects"
    GLOBAL_SUM_OBJECTS = "global_sum_objects"
    LOCAL_CONCAT_OBJECTS = "local_concat_objects"
    LOCAL_MEAN_OBJECTS = "local_mean_objects"
    LOCAL_SUM_OBJECTS = "local_sum_objects"
    ALL_COLLECTION_KEYS = [GLOBAL_CONCAT_OBJECTS, GLOBAL_MEAN_OBJECTS, GLOBAL_SUM_OBJECTS, LOCAL_CONCAT_OBJECTS,
                           LOCAL_MEAN_OBJECTS, LOCAL_SUM_OBJECTS]


def add_to_collection(tensor: Any, graph_key: str) -> None:
    """Puts a tensor, or each of a list, into a collection.

    Raises:
        AnnotationError: no such collection, no tensor of a graph, or a tensor that is in another collection, from which EPL would
            silently remove it.
    """
    require("epl.add_to_collection")
    if graph_key not in GraphKeys.ALL_COLLECTION_KEYS:
        raise AnnotationError(f"epl.add_to_collection was given the collection {graph_key!r}, expected one of epl.GraphKeys: "
                              f"{', '.join(GraphKeys.ALL_COLLECTION_KEYS)}")
    for each in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
        if not isinstance(each, tf.Tensor) or not hasattr(each, "graph"):
            raise AnnotationError(f"epl.add_to_collection was given {each!r}, expected a tensor of a graph, or a list of them")
        kept = annotations_of(each.graph).collected
        if kept.setdefault(each.name, graph_key) != graph_key:
            raise AnnotationError(f"tensor {each.name!r} is in the collection {kept[each.name]!r}, and is now put into "
                                  f"{graph_key!r}; leave one of both out, since a fetch has one value")


def get_collection(graph_key: str) -> List[Any]:
    """The tensors of a collection, in the order in which they were added, of the current graph."""
    graph = v1.get_default_graph()
    return [graph.get_tensor_by_name(name) for name, key in annotations_of(graph).collected.items() if key == graph_key]


def get_all_collections() -> Dict[str, List[Any]]:
    """All collections that are not empty."""
    found = {key: get_collection(key) for key in GraphKeys.ALL_COLLECTION_KEYS}
    return {key: tensors for key, tensors in found.items() if tensors}
