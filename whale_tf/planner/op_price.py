"""Seconds of an op's part on one device.  The search minimises the same prices with which plans are played."""

from __future__ import annotations

from typing import Dict, Sequence

import numpy as np

from whale_tf.cluster.devices import Device
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.sizes import nominal_shapes
from whale_tf.patterns.strategy import NOMINAL_SIZE, Sizes
from whale_tf.planner.scope import Scope
from whale_tf.profiler.op_cost import OpCost, op_costs
from whale_tf.profiler.op_time import op_seconds


class OpPrices:
    """Costs of a graph's ops; a number that is not known, such as that of the examples, counts as ``NOMINAL_SIZE``."""

    def __init__(self, graph: OpGraph, scope: Scope) -> None:
        self.graph, self.scope = graph, scope
        self._costs = op_costs(graph, NOMINAL_SIZE)
        self._view, self._nominal = Sizes(graph), nominal_shapes(graph, NOMINAL_SIZE)
        self._bytes: Dict[int, float] = {}

    def bytes(self, tensor: int) -> float:
        """Bytes of a whole tensor, or of the variable behind a handle."""
        if tensor not in self._bytes:
            size = float(item_bytes(self.graph.tensors[tensor].dtype))
            for dim in self._nominal.get(tensor) or self._view.stored(tensor) or ():
                size *= NOMINAL_SIZE if dim is None else dim
            self._bytes[tensor] = size
        return self._bytes[tensor]

    def seconds(self, op: Op, share: float, shares: Sequence[float], device: Device) -> float:
        """Args:
        share: the device's share of the op's arithmetic.
        shares: its share of each operand and result.
        """
        cost, tensors = self._costs[op.id], op.inputs + op.outputs
        sizes = [self.bytes(t) * part for t, part in zip(tensors, shares)]
        total = sum(map(self.bytes, tensors))
        moved = cost.bytes * sum(sizes) / total if total else cost.bytes
        read = sum(size for t, size in zip(tensors, sizes) if t in self.scope.roots or t in self.scope.gradients)
        dtype = self.graph.tensors[op.outputs[0]].dtype.replace("_ref", "") if op.outputs else "float32"
        return op_seconds(OpCost(cost.flops * share, moved, cost.is_contraction), device, dtype, read)


def item_bytes(dtype: str) -> int:
    """Bytes of one element (4 for a resource, which refers to floats if its size is used at all)."""
    name = dtype.replace("_ref", "")
    if name == "bfloat16":
        return 2
    try:
        return int(np.dtype(name).itemsize) or 1
    except TypeError:
        return 4
