"""A mesh whose first dimension is data parallelism, and whose second dimension divides everything except the examples.

The executor runs meshes with two dimensions in this form: model replicas take parts of the mini-batch and sum their gradients,
and each of them is one TaskGraph whose ops are divided over its devices.
"""

from __future__ import annotations

from typing import Dict, List, Mapping

from whale_tf.ir.graph import OpGraph, Shape
from whale_tf.ir.parts import even_sizes
from whale_tf.patterns.moves import largest_share
from whale_tf.patterns.spread import Spread, shard
from whale_tf.planner.rhino.local_shapes import LocalShapes
from whale_tf.planner.rhino.mesh import Axis
from whale_tf.planner.rhino.problem import MeshProblem


def replica_shapes(shapes: LocalShapes, batch: Mapping[int, int], replicas: int) -> LocalShapes:
    """Shapes of one model replica.

    Args:
        batch: tensor -> its dimension that counts examples.
    """
    made: Dict[int, Spread] = {}
    for tensor, dim in batch.items():
        shape = shapes.stored(tensor)
        size = shape[dim] if shape is not None and dim < len(shape) else None
        if size is not None and size >= replicas:
            made[tensor] = shard(dim, even_sizes(size, replicas))
    return shapes.divided(made, {})


def replica_graph(graph: OpGraph, batch: Mapping[int, int], replicas: int) -> OpGraph:
    """The ops with the shapes of one model replica."""
    local = replica_shapes(LocalShapes(graph), batch, replicas)
    shapes: Dict[int, Shape] = {tensor: local.stored(tensor) for tensor in batch}
    return graph.with_shapes(shapes)


def add_replica_sums(problem: MeshProblem, replicas: Axis) -> None:
    """Adds to every gradient's layout the cost of summing a device's part over the model replicas."""
    extra: Dict[int, List[int]] = {}
    for tensor in sorted(problem.scope.gradients):
        relay = problem.relays.get(tensor)
        if relay is not None:
            extra[relay] = [replicas.sum(problem.bytes(tensor) * largest_share(layout)) for layout in problem.relayed[tensor]]
    problem.costs = problem.costs.adjusted(extra)
