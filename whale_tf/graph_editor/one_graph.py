"""Check that the ops and tensors of one call belong to the same graph."""
from __future__ import annotations

from typing import Iterable, Union

from whale_tf._tf_compat import tf
from whale_tf.errors import GraphEditError


def check_one_graph(things: Iterable[Union[tf.Operation, tf.Tensor]]) -> None:
    """Refuse ops and tensors of different graphs.

    Raises:
      GraphEditError: the message names the first one that is not in the graph of those before it.
    """
    things = list(things)
    for thing in things[1:]:
        first = things[0]
        if thing.graph is not first.graph:
            look_up = "get_operation_by_name" if isinstance(thing, tf.Operation) else "get_tensor_by_name"
            raise GraphEditError(
                f"{thing.name!r} is not in the graph of {first.name!r}; take it from that graph: "
                f"graph.{look_up}({thing.name!r})")
