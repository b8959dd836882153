"""Chooses where sections begin and end: the tensors that cross their border are a minimum cut, in bytes.

The analysis begins a section as late as its algebra allows, and ends it as early as it allows.  Ops that are bound by memory, not
by arithmetic, may join the section if that makes the transferred tensors smaller, in either direction::

    z [b, w] ──> tile [b, B w] ──┬──> section              z [b, w] ──┬──> section: tile, transpose, ...
             └─> transpose ──────┘

A tensor counts once, regardless of its number of readers on the other side.  An op that joins runs on one device instead of all,
which counts as a part of the bytes that it reads and writes.
"""

from __future__ import annotations

from typing import FrozenSet, Hashable, List, Optional, Set, Tuple

import networkx as nx

from whale_tf.ir.batch_axis import EXTENT
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region, inseparable
from whale_tf.ir.traits import Cost, Gives, Role, VariableUse, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.outline import UNSENT
from whale_tf.profiler.op_cost import tensor_bytes

CLONES, SECTIONS = "clones", "sections"
SENT = 10  # bytes that a device reads or writes in the time of one transferred byte
SIZES = (Gives.SIZES, Gives.LIKE)  # read no elements
LIGHT = (Cost.FREE, Cost.MOVE, Cost.RESULT, Cost.OPERAND, Cost.ADDS, Cost.SPARSE)  # bound by memory


class Border:
    """The border of a region's sections.

    Args:
        sizes: the region's graph with all sizes, including those of mini-batches.
    """

    def __init__(self, region: Region, sizes: OpGraph) -> None:
        self._region, self._graph, self._sizes = region, region.graph, sizes

    def crossing(self) -> int:
        """Bytes of the tensors that cross, in both directions."""
        sections, graph = self._region.sections, self._graph
        tensors = {t for op in self._region.batch_level for t in graph.ops[op].outputs}.union(self._region.batch.sources)
        return sum(self._bytes(t) for t in tensors
                   if any((user in sections) != (graph.tensors[t].op in sections) for user in self._users(t)))

    def joining(self) -> List[FrozenSet[int]]:
        """The ops that join sections: the fewest ops with which the fewest bytes cross.  A second choice has only ops of the
        forward pass, because a gradient of all examples takes the ops that follow from it along."""
        movable = self._movable()
        network = nx.DiGraph()
        network.add_nodes_from((CLONES, SECTIONS))
        network.add_edges_from((CLONES, op, {"capacity": self._work(op)}) for op in movable)
        tensors = {t for op in movable for t in (*self._graph.ops[op].inputs, *self._graph.ops[op].outputs)}

        def node(op: int) -> Hashable:
            return op if op in movable else SECTIONS if op in self._region.sections else CLONES

        for tensor in tensors:
            producer, users = self._graph.tensors[tensor].op, self._users(tensor)
            if producer in self._region.batch_level or tensor in self._region.batch.sources:
                network.add_edge(node(producer), ("there", tensor), capacity=SENT * self._bytes(tensor))
                network.add_edge(("back", tensor), node(producer), capacity=SENT * self._bytes(tensor))
                network.add_edges_from((("there", tensor), node(user)) for user in users)
                network.add_edges_from((node(user), ("back", tensor)) for user in users)
        _, (_, joined) = nx.minimum_cut(network, CLONES, SECTIONS)
        found = frozenset(movable.intersection(joined))
        forward = frozenset(op for op in found if self._graph.ops[op].phase is Phase.FORWARD)
        return [each for each in dict.fromkeys((found, forward)) if each]

    def improves(self, other: Border) -> bool:
        """Whether fewer bytes cross than under another analysis, and nothing else is worse."""
        return self.crossing() < other.crossing() and all(mine <= its for mine, its in zip(self._costs(), other._costs()))

    def _costs(self) -> Tuple[int, ...]:
        """The drawbacks of an analysis: unknown or inexact tensors; backward ops that run ahead of the schedule, so that their
        inputs are held; and ops bound by arithmetic that follow from sections alone, so that one device runs them for all."""
        region = self._region
        ahead = [traits(self._graph.ops[index].type) for index in region.early & region.late]
        alone = [traits(self._graph.ops[index].type) for index in region.sections]
        return (len(region.batch.unknown), len(region.batch.inexact), sum(row.gives not in SIZES for row in ahead),
                sum(row.cost not in LIGHT for row in alone))

    def _movable(self) -> Set[int]:
        """Cloned ops that may join a section: all ops between them and the section may join it too."""
        region, graph = self._region, self._graph
        fixed = set(region.batch.own_seed).union(*inseparable(region))
        may_join = {index for index in region.batch_level - region.sections - fixed if self._may_join(index)}

        def near(index: int) -> Set[int]:
            op = graph.ops[index]
            return may_join & {graph.tensors[t].op for t in op.inputs}.union(*(self._users(t) for t in op.outputs))

        return reached(region.sections, near) - region.sections

    def _may_join(self, index: int) -> bool:
        op, batch = self._graph.ops[index], self._region.batch
        row, tensors = traits(op.type), (*op.inputs, *op.outputs)
        if row.role is not Role.COMPUTE or row.state is not VariableUse.NONE or row.cost not in LIGHT or op.control_inputs:
            return False
        types = {self._graph.tensors[t].dtype for t in tensors}
        if any(self._price(t) is None for t in tensors) or not types.isdisjoint({*UNSENT, "string"}) or any(
                name.endswith("_ref") for name in types):
            return False
        return bool(op.outputs) and all(t not in batch.unknown and batch.layout(t).is_sharded for t in op.outputs)

    def _work(self, index: int) -> int:
        op = self._graph.ops[index]
        if traits(op.type).cost is Cost.FREE:
            return 0
        return sum(tensor_bytes(self._sizes, tensor) for tensor in {*op.inputs, *op.outputs})

    def _users(self, tensor: int) -> Set[int]:
        """Batch-level ops that read a tensor's elements."""
        return {user for user, _ in self._graph.consumers(tensor)
                if user in self._region.batch_level and traits(self._graph.ops[user].type).gives not in SIZES}

    def _bytes(self, tensor: int) -> int:
        return self._price(tensor) or 0

    def _price(self, tensor: int) -> Optional[int]:
        """Bytes of a tensor; None if not known.  Sizes that depend on the batch are those of the whole mini-batch."""
        batch = self._region.batch
        if tensor not in batch.unknown and batch.layouts.get(tensor) is EXTENT:
            return 0
        shape = self._sizes.tensors[tensor].shape
        return None if shape is None or None in shape else tensor_bytes(self._sizes, tensor)
