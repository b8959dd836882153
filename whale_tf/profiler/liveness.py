"""Memory of a TaskGraph while it runs: tensors live from their creation to their last reader.

The ops of one micro-batch are simulated in graph order, forward then backward, adding up the live tensors::

    forward   a  b  c            a and c are read by the backward pass: kept
    alive     a ab  ac  ...      the peak is the largest sum

With ``K`` micro-batches in flight, ``K - 1`` of them hold their kept tensors while one reaches its peak.  With several
micro-batches, the sum of the gradients is always live.  An op may write its result over an operand of the same size that
has no later reader.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Set

from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import OVERWRITES, SHAPE_ONLY
from whale_tf.profiler.chain import buffer_of
from whale_tf.profiler.op_cost import tensor_bytes


class MicroBatchMemory(NamedTuple):
    """Bytes of one micro-batch in one TaskGraph on one replica.

    Attributes:
        kept: bytes held from its forward to its backward pass.
        forward_peak, backward_peak: most bytes live during each pass, including kept ones.
        gradients: bytes of the gradients of the TaskGraph's variables.
    """

    kept: float
    forward_peak: float
    backward_peak: float
    gradients: float

    def peak(self, in_flight: int, micro_batches: int, share: float = 1.0) -> float:
        """Most bytes live at a time, with ``in_flight`` of ``micro_batches`` between their passes.

        Args:
            share: size of the replica's part of a micro-batch, relative to an equal one.
        """
        held = (min(in_flight, micro_batches) - 1) * self.kept
        sums = self.gradients if micro_batches > 1 else 0.0
        return share * (max(self.forward_peak, self.backward_peak) + held) + sums


def micro_batch_memory(
    region: Region, gradients: Set[int], task_graph: int, micro_batches: int = 1, replicas: int = 1
) -> MicroBatchMemory:
    """The memory of one TaskGraph.

    Args:
        region: its graph has the static shapes of a whole mini-batch.
        gradients: tensors that hold gradients of variables.
        micro_batches, replicas: the mini-batch is divided by both.
    """
    needed = _needed(region, gradients)
    return _Play(region, gradients, needed, task_graph, micro_batches, micro_batches * replicas).run()


def _needed(region: Region, gradients: Set[int]) -> Set[int]:
    """Ops whose results reach a variable update; TensorFlow's optimizer drops those that are needed only by control edges (the
    gradients of constants and inputs)."""
    graph = region.graph
    used = [tensor for tensor, uses in region.leaving().items() if any(graph.ops[op].phase is Phase.APPLY for op, _ in uses)]
    stack = [graph.tensors[tensor].op for tensor in [*gradients, *used]]
    found: Set[int] = set()
    while stack:
        index = stack.pop()
        if index not in found:
            found.add(index)
            stack.extend(graph.tensors[tensor].op for tensor in graph.ops[index].inputs)
    return found


class _Play:
    """Simulates one micro-batch of one TaskGraph."""

    def __init__(
        self, region: Region, gradients: Set[int], needed: Set[int], task_graph: int, micro_batches: int, parts: int
    ) -> None:
        self.region, self.graph, self.parts = region, region.graph, parts
        self.gradients = {t for t in gradients if region.task_graph[region.graph.tensors[t].op] == task_graph}
        self.held = self.gradients if micro_batches == 1 else set()  # with several, each is added to its sum at once
        live = region.batch_level & needed
        members = [i for i in region.ops if region.task_graph[i] == task_graph and i in live]
        self.forward = [i for i in members if i not in region.late]
        self.backward = [i for i in members if i in region.late]
        self.order = self.forward + self.backward
        self.last_use = self._last_uses()
        self.alive: Dict[int, float] = {}

    def _last_uses(self) -> Dict[int, int]:
        """Position of each buffer's last reader in the order."""
        found: Dict[int, int] = {}
        for place, index in enumerate(self.order):
            op = self.graph.ops[index]
            if op.type not in SHAPE_ONLY:
                for tensor in op.inputs:
                    found[buffer_of(self.graph, tensor)] = place
        return found

    def run(self) -> MicroBatchMemory:
        forward = self._pass(self.forward, 0)
        kept = sum(self.alive.values())
        backward = self._pass(self.backward, len(self.forward))
        return MicroBatchMemory(kept, forward, backward, sum(float(tensor_bytes(self.graph, t)) for t in self.gradients))

    def _pass(self, ops: Sequence[int], start: int) -> float:
        peak = 0.0
        for place, index in enumerate(ops, start):
            op = self.graph.ops[index]
            self._receive(op)
            self._make(op, place)
            peak = max(peak, sum(self.alive.values()))
            self._free(op, place)
        return peak

    def _receive(self, op: Op) -> None:
        """Tensors from other TaskGraphs are copied here when they are first read."""
        home = self.region.task_graph
        for tensor in op.inputs:
            producer = self.graph.tensors[tensor].op
            if producer in self.region.batch_level and home[producer] != home[op.id]:
                self._allocate(buffer_of(self.graph, tensor))

    def _make(self, op: Op, place: int) -> None:
        for tensor in op.outputs:
            if buffer_of(self.graph, tensor) == tensor:
                source = self._replaced(op, tensor, place)
                if source is not None:
                    del self.alive[source]
                self._allocate(tensor)

    def _replaced(self, op: Op, tensor: int, place: int) -> Optional[int]:
        """The operand whose memory the result reuses."""
        if op.type in OVERWRITES:
            for operand in op.inputs:
                source = buffer_of(self.graph, operand)
                if source in self.alive and self.last_use.get(source) == place and self.alive[source] == self._size(tensor):
                    return source
        return None

    def _allocate(self, tensor: int) -> None:
        if self.graph.tensors[tensor].dtype not in ("resource", "variant"):
            self.alive.setdefault(tensor, self._size(tensor))

    def _size(self, tensor: int) -> float:
        size = float(tensor_bytes(self.graph, tensor))
        return size / self.parts if self.region.batch.layout(tensor).is_sharded else size

    def _free(self, op: Op, place: int) -> None:
        for tensor in [*op.inputs, *op.outputs]:
            source = buffer_of(self.graph, tensor)
            if self.last_use.get(source, place) <= place and source not in self.held:
                self.alive.pop(source, None)
