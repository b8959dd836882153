"""``epl.profiler.profiler``: floating-point operations and bytes of the current graph, before it is divided."""

from __future__ import annotations

from typing import Dict

from whale_tf._tf_compat import v1
from whale_tf.epl.profiler import local_graph
from whale_tf.profiler.op_cost import op_costs, tensor_bytes


def profile_flops(is_shape_unknown: bool = True) -> Dict[str, int]:
    """Floating-point operations of each op by name; a multiply-add is two.

    Args:
        is_shape_unknown: as in EPL; shapes are always inferred, and sizes that stay open count as 1.
    """
    graph = local_graph(v1.get_default_graph())
    return {op.name: int(cost.flops) for op, cost in zip(graph.ops, op_costs(graph, 1)) if cost.flops}


def profile_memory(is_shape_unknown: bool = True) -> Dict[str, int]:
    """Bytes of each tensor of known shape by name.  (EPL counts four bytes for an element of any type.)"""
    graph = local_graph(v1.get_default_graph())
    sizes = ((graph.tensor_name(index), tensor_bytes(graph, index)) for index in range(len(graph.tensors)))
    return {name: size for name, size in sizes if size}
