"""Which values of a step cover the mini-batches of all processes, and which only this process' own.

Ops outside the region run once in each process.  Values that are written to variables must be equal in all processes, so they
are computed from values over all processes: sums, or gathered rows.  The results of a tf.function must be equal too.  Each
process counts metrics on its own rows, because the counts are smaller than the rows::

    rows ──> are they right? ──> sum over own rows ──> sum over processes ──> AssignAdd(metric)
    loss over all processes ──────────────────────────────────────────────> result

Keras 2 adds by AssignAdd, Keras 3 by ``metric.assign(metric + sum)``.  The increment must be a plain sum over rows, which the
analysis of the batch axis decides; for anything else (a mean, in a metric of the user's own) rows are gathered.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, FrozenSet, Iterable, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.batch_axis import EXTENT, EXTREMES, BatchAxis, Options, analyse
from whale_tf.ir.batch_axis.blocks import REPLICATED_0
from whale_tf.ir.extents import Size
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.layout import Layout
from whale_tf.ir.region import Region
from whale_tf.ir.traits import READS, traits
from whale_tf.ir.walk import reached
from whale_tf.ir.writes import is_write

Use = Tuple[int, int]  # op number, input position
SUMS = "sums_over_processes"  # attribute of a function's variable: its value is the sum of the increments of all processes


class Across(NamedTuple):
    """Attributes:
    uses: operands of ops outside the region whose values cover all processes.
    added: operands that are added to a variable and were counted by this process on its own rows.
    decisive: ops outside the region from which values are computed that must be equal in all processes.
    twice: the decisive ops that also run on this process' own rows, for counts and for results with rows.
    own: inputs with rows of which ops outside the region read this process' own.
    """

    uses: FrozenSet[Use] = frozenset()
    added: Tuple[Use, ...] = ()
    decisive: FrozenSet[int] = frozenset()
    twice: Tuple[int, ...] = ()
    own: FrozenSet[int] = frozenset()


def of_session(region: Region) -> Across:
    """For Sessions: everything that leads to a variable.  If that reads rows that clones compute (predictions), it also reads
    inputs with rows (labels) of all processes."""
    graph, decisive = region.graph, leading_to_writes(region.graph)
    uses = {use: tensor for tensor, users in region.leaving().items() for use in users if use[0] in decisive}
    if any(is_of_rows(region.batch.layout(tensor)) for tensor in uses.values()):
        sides = _Function(region, batch_size(graph, region.batch.sources))
        uses.update({(index, position): tensor for index in decisive & sides.outside
                     for position, tensor in enumerate(graph.ops[index].inputs)
                     if graph.producer(tensor).phase is Phase.INPUT and sides.has_rows(tensor)})
    return Across(frozenset(uses))


def of_function(region: Region, sources: Mapping[int, int], results: Sequence[int], shares_batch: bool) -> Across:
    """For a step with these results, as a tf.function has them.

    Args:
        sources: batch inputs -> their batch dimension.
        shares_batch: the processes divide one mini-batch, so each returns all rows of results.
    """
    return _Function(region, batch_size(region.graph, sources), sources).across(results, shares_batch)


def batch_size(graph: OpGraph, sources: Iterable[int]) -> Optional[int]:
    """The mini-batch's static size; None if it is known only at run time."""
    sizes = {shape[0] for shape in (graph.tensors[tensor].shape for tensor in sources) if shape}
    return sizes.pop() if len(sizes) == 1 else None


def is_of_rows(layout: Layout) -> bool:
    """Whether each process has its own value: rows of the batch, or their number."""
    return layout.is_sharded or layout.kind == EXTENT.kind


def leading_to_writes(graph: OpGraph) -> Set[int]:
    """Ops from which a variable's new value is computed."""
    return reached((op.id for op in graph.ops if is_write(op)),
                   lambda index: (graph.tensors[tensor].op for tensor in graph.ops[index].inputs))


class _Function:
    def __init__(self, region: Region, batch: Optional[int], sources: Mapping[int, int] = MappingProxyType({})) -> None:
        self.region, self.graph, self.batch, self.sources = region, region.graph, batch, sources
        self.axes: Dict[bool, BatchAxis] = {}
        self.outside = {op.id for op in self.graph.ops if not region.contains(op) and op.phase is not Phase.INPUT}
        self.from_rows: Set[int] = set()  # ops outside that are computed from single examples or from their number
        for index in sorted(self.outside):
            if any(self.is_own(t) or self.graph.tensors[t].op in self.from_rows for t in self.graph.ops[index].inputs):
                self.from_rows.add(index)

    def is_own(self, tensor: int) -> bool:
        """Whether a tensor of the region or of the input side depends on single examples of this process."""
        producer = self.graph.producer(tensor)
        if producer.phase is Phase.INPUT:
            return self.has_rows(tensor)
        if producer.id not in self.region.batch_level:
            return False
        return is_of_rows(self.region.batch.layout(tensor))

    def has_rows(self, tensor: int) -> bool:
        """Whether the first dimension is the batch: it has the batch's size, and is not known to be another one, as that of a sum
        over the batch is."""
        shape, producer = self.graph.tensors[tensor].shape, self.graph.tensors[tensor].op
        if not shape or shape[0] != self.batch:
            return False
        if producer in self.region.batch_level:
            return self.region.batch.layouts.get(tensor, REPLICATED_0).is_sharded
        if producer not in self.outside:
            return True
        layout = self.axis(True).layouts.get(tensor, REPLICATED_0)
        return producer in self.from_rows and not (layout.is_partial or layout.kind in EXTREMES)

    def axis(self, has_all_inputs: bool) -> BatchAxis:
        """The batch axis of the ops outside.

        Args:
            has_all_inputs: it begins at inputs with rows that no clone reads, too.
        """
        if has_all_inputs not in self.axes:
            rows = {t: self.region.batch.layout(t) for t in self.region.leaving() if self.is_own(t)}
            stated = {self.graph.tensor_name(t): layout for t, layout in rows.items() if layout.is_sharded}
            inputs = {t: 0 for index in self.from_rows for t in self.graph.ops[index].inputs
                      if self.graph.producer(t).phase is Phase.INPUT and self.has_rows(t)} if has_all_inputs else {}
            self.axes[has_all_inputs] = analyse(self.graph, {**inputs, **self.sources}, self.outside, Options(stated=stated))
        return self.axes[has_all_inputs]

    def across(self, results: Sequence[int], shares_batch: bool) -> Across:
        writes = [index for index in self.outside if is_write(self.graph.ops[index])]
        added: Dict[int, Use] = {}  # write -> what it adds
        for index in sorted(self.from_rows.intersection(writes)):
            use = self._counted(self.graph.ops[index])
            if use is not None:
                added[index] = use
        common = [self.graph.tensors[t].op for t in results if shares_batch or not self.has_rows(t)]
        decisive = self._behind([*common, *(index for index in writes if index not in added)])
        rows = [] if shares_batch else [self.graph.tensors[t].op for t in results if self.has_rows(t)]
        own = self._behind([*added, *rows])
        used = decisive | own
        uses = {(index, position) for index in used for position, tensor in enumerate(self.graph.ops[index].inputs)
                if self._enters(tensor) and (index in decisive or not self.is_own(tensor))}
        twice = tuple(sorted(decisive & own & self.from_rows))
        inputs = {tensor for index in own for tensor in self.graph.ops[index].inputs
                  if self.graph.producer(tensor).phase is Phase.INPUT and self.has_rows(tensor)}
        return Across(frozenset(uses), tuple(added[index] for index in sorted(added)), frozenset(decisive), twice,
                      frozenset(inputs))

    def _counted(self, write: Op) -> Optional[Use]:
        """The operand that a write adds to a variable, if it is a sum over this process' own rows."""
        handle = write.inputs[0]
        if not self.graph.producer(handle).attrs.get(SUMS):
            return None
        use: Optional[Use] = (write.id, 1) if traits(write.type).adds else None
        if use is None and len(write.inputs) > 1:
            use = self._added_before(self.graph.producer(write.inputs[1]), handle)
        if use is None:
            return None
        tensor = self.graph.ops[use[0]].inputs[use[1]]
        return use if self._is_sum(tensor) and not self._reads(tensor, handle) else None

    def _added_before(self, op: Op, handle: int) -> Optional[Use]:
        """The ``sum`` in ``variable.assign(variable + sum)``, if nothing but the write reads ``variable + sum``."""
        if traits(op.type).value != "add" or op.id not in self.outside or len(self.graph.consumers(op.outputs[0])) != 1:
            return None
        for position, tensor in enumerate(op.inputs):
            read = self.graph.producer(tensor)
            if read.type in READS and read.inputs[0] == handle:
                return op.id, 1 - position
        return None

    def _is_sum(self, tensor: int) -> bool:
        """Whether the values of all processes add up to the value over all rows."""
        axis = self.axis(False)
        layout = axis.layouts.get(tensor, REPLICATED_0)
        if layout.kind == EXTENT.kind:
            return all(isinstance(size, Size) and not size.constant for size in axis.counted(tensor) or [1])
        if layout.is_replicated:
            return layout.power == -1  # a clone has its share of the whole
        return layout.is_partial and layout.power == 0

    def _reads(self, tensor: int, handle: int) -> bool:
        """Whether a value follows from a variable or from the number of a clone's rows."""
        behind = self._behind([self.graph.tensors[tensor].op])
        entering = {t for index in behind for t in self.graph.ops[index].inputs}
        return handle in entering or any(
            self.region.batch.layout(t).kind == EXTENT.kind for t in entering
            if self.graph.tensors[t].op in self.region.batch_level)

    def _enters(self, tensor: int) -> bool:
        producer = self.graph.producer(tensor)
        return producer.id in self.region.batch_level or (producer.phase is Phase.INPUT and self.has_rows(tensor))

    def _behind(self, roots: Iterable[int]) -> Set[int]:
        """The roots, and the ops outside the region from which they are computed."""
        return reached(self.outside.intersection(roots), lambda index: self.outside.intersection(
            self.graph.tensors[t].op for t in self.graph.ops[index].inputs))
