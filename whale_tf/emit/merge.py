"""Back from clones to the local script's tensors: sums, weighted means and concatenations."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Sequence, Tuple

import numpy as np

from whale_tf.communicators import Communicator, Member
from whale_tf.emit.context import ORIGINAL, Clone, Context, Copy, group_by_copy
from whale_tf.emit.convert import Converter
from whale_tf.emit.order import Order
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import EXTENT, EXTREMES
from whale_tf.ir.layout import Layout


class Merge:
    """Merged values of batch-level tensors; each is staged once.

    Args:
        buckets: gradients that travel together.
        compressed: gradients that travel as float16.
    """

    def __init__(
        self,
        context: Context,
        nodes: Nodes,
        converter: Converter,
        order: Order,
        communicator: Communicator,
        buckets: Sequence[Sequence[int]] = (),
        compressed: FrozenSet[int] = frozenset(),
    ) -> None:
        self._context = context
        self._nodes = nodes
        self._converter = converter
        self._order = order
        self._communicator = communicator
        self._whole: Dict[int, str] = {}
        self._everywhere: Dict[Tuple[int, int], Dict[Copy, str]] = {}
        self._sums: Dict[int, Dict[Copy, str]] = {}
        self._across: Dict[int, str] = {}
        self._compressed = compressed
        self._bucket_of = {tensor: bucket for bucket in buckets for tensor in bucket}

    @property
    def is_larger(self) -> bool:
        """Merged values have more rows than the graph's static shapes say: model replicas or processes take mini-batches of
        their own."""
        return self._converter.division.mini_batches > 1 and self._converter.division.batch is not None

    def whole(self, tensor: int) -> str:
        """What the local script would have computed on this process' mini-batches, on the first device of the tensor's
        TaskGraph."""
        if tensor not in self._whole:
            context = self._context
            home = context.home(context.graph.producer(tensor))
            scope = context.name("merged", context.flat(tensor))
            dtype, device = context.dtype(tensor), context.device(home, Copy(0, 0), self._context.shard_of(tensor))
            layout = context.region.batch.layout(tensor)
            clones = list(context.clones(home))
            if layout.is_partial:
                sums = self._accumulated(tensor, home)
                value = self._nodes.add_n(list(sums.values()), scope, dtype, device)
                value = self._converter.of_this_process(value, tensor, layout.power, scope, device)
            elif layout.is_sharded:
                value = self._concatenated(tensor, layout, home, clones, scope, device)
            elif layout.kind in EXTREMES:
                value = self._converter.combine(
                    layout.kind, [context.tensor_in(tensor, clone) for clone in clones], scope, dtype, device
                )
            elif layout.kind == EXTENT.kind:
                value = self._extent(tensor, home, clones, scope, device)
            else:
                value = self._converter.scale(
                    context.tensor_in(tensor, clones[0]), tensor, layout.power, home, clones[0], scope
                )
            self._whole[tensor] = self._nodes.identity(value, scope + "/value", dtype, device)
        return self._whole[tensor]

    def part(self, tensor: int) -> str:
        """What this process adds to the sum over all processes of a partial tensor."""
        home = self._context.home(self._context.graph.producer(tensor))
        scope, dtype = self._context.name("part", self._context.flat(tensor)), self._context.dtype(tensor)
        values = list(self._accumulated(tensor, home).values())
        return self._nodes.add_n(values, scope, dtype, self._context.device(home, ORIGINAL))

    def of_all_processes(self, tensor: int) -> str:
        """What the local script would have computed on the mini-batches of all processes, on the first device of the
        tensor's TaskGraph.  Every run of it waits for the other processes."""
        if self._communicator.processes == 1:
            return self.whole(tensor)
        if tensor not in self._across:
            self._across[tensor] = self._of_all_processes(tensor)
        return self._across[tensor]

    def _of_all_processes(self, tensor: int) -> str:
        context = self._context
        home = context.home(context.graph.producer(tensor))
        layout = context.region.batch.layout(tensor)
        if layout.is_partial:
            return self.everywhere(tensor, home)[ORIGINAL]
        scope, dtype = context.name("processes", context.flat(tensor)), context.dtype(tensor)
        here = Member(self.whole(tensor), context.device(home, ORIGINAL))
        if layout.is_sharded:
            equal = self._converter.division.batch is not None
            return self._communicator.gather_across(
                here, layout.dim, self._converter.rank(tensor), scope, dtype, equal
            )
        if layout.kind in EXTREMES:
            return self._communicator.across(here, layout.kind, scope, dtype)
        if layout.kind == EXTENT.kind:
            total = self._communicator.across(here, "sum", scope + "/sum", dtype)
            return self._less_surplus(total, tensor, self._communicator.processes - 1, scope, here.device)
        return here.value

    def everywhere(self, tensor: int, task_graph: int) -> Dict[Copy, str]:
        """The merged value on every copy of ``task_graph`` (whose variables it updates)."""
        key = (tensor, task_graph)
        if key not in self._everywhere:
            self._everywhere[key] = self._merged_everywhere(tensor, task_graph)
        return self._everywhere[key]

    def _merged_everywhere(self, tensor: int, task_graph: int) -> Dict[Copy, str]:
        context = self._context
        home = context.home(context.graph.producer(tensor))
        layout = context.region.batch.layout(tensor)
        copies = context.copies(task_graph)
        alone = self._communicator.processes == 1
        if len(copies) == 1 and home == task_graph and alone:
            return {copies[0]: self.whole(tensor)}
        scope, dtype = context.name("sync", context.flat(tensor)), context.dtype(tensor)
        if layout.is_partial and home == task_graph:
            if tensor in self._bucket_of:
                return self._merged_bucket(self._bucket_of[tensor], home)[tensor]
            members, fp16 = self._members(tensor, home), tensor in self._compressed
            return dict(zip(copies, self._communicator.all_reduce(members, scope, dtype, fp16)))
        if layout.is_sharded and alone:
            clones = list(context.clones(home))
            return {
                copy: self._concatenated(
                    tensor,
                    layout,
                    home,
                    clones,
                    "{}/{}_{}".format(scope, *copy),
                    context.device(task_graph, copy, self._context.shard_of(tensor)),
                )
                for copy in copies
            }
        return dict.fromkeys(copies, self.of_all_processes(tensor))

    def _merged_bucket(self, bucket: Sequence[int], home: int) -> Dict[int, Dict[Copy, str]]:
        """Gradients that travel together."""
        context = self._context
        sums = self._communicator.all_reduce_together(
            [self._members(tensor, home) for tensor in bucket],
            [context.name("sync", context.flat(tensor)) for tensor in bucket],
            [context.static_shape(tensor) for tensor in bucket],
            context.dtype(bucket[0]),
            self._compressed.issuperset(bucket),
        )
        merged = {tensor: dict(zip(context.copies(home), values)) for tensor, values in zip(bucket, sums)}
        self._everywhere.update({(tensor, home): values for tensor, values in merged.items()})
        return merged

    def _members(self, tensor: int, home: int) -> List[Member]:
        accumulated = self._accumulated(tensor, home)
        shard = self._context.shard_of(tensor)
        return [Member(value, self._context.device(home, copy, shard)) for copy, value in accumulated.items()]

    def _accumulated(self, tensor: int, home: int) -> Dict[Copy, str]:
        """Weighted sums over micro-batches, one for each copy: a chain of additions, so that each micro-batch's gradient
        is freed as soon as it is added."""
        if tensor not in self._sums:
            self._sums[tensor] = {
                copy: self._chain(tensor, home, copy, clones)
                for copy, clones in group_by_copy(list(self._context.clones(home))).items()
            }
        return self._sums[tensor]

    def _chain(self, tensor: int, home: int, copy: Copy, clones: List[Clone]) -> str:
        context = self._context
        power = context.region.batch.layout(tensor).power
        scope = f"{context.scope(copy)}/accumulate/{context.flat(tensor)}"
        dtype, device = context.dtype(tensor), context.device(home, copy, self._context.shard_of(tensor))
        even = self._converter.division.is_even
        total = ""
        for clone in self._order.in_backward_order(home, clones):
            value = context.tensor_in(tensor, clone)
            if not even:
                value = self._converter.scale(value, tensor, power, home, clone, f"{scope}/{clone.m}")
            if total:
                value = self._nodes.binary("Add", total, value, f"{scope}/{clone.m}", dtype, device)
                if self._context.graph.producer(tensor).id in self._context.region.late:
                    self._order.finish_with(home, clone, value)
            total = value
        return self._converter.scale(total, tensor, power, home, clones[0], scope) if even else total

    def _extent(self, tensor: int, home: int, clones: List[Clone], scope: str, device: str) -> str:
        """``c0 + c1 B`` from the clones' ``c0 + c1 b_i``: their sum less ``n - 1`` times ``c0``."""
        context = self._context
        names = [context.tensor_in(tensor, clone) for clone in clones]
        total = self._nodes.add_n(names, scope + "/sum", context.dtype(tensor), device)
        return self._less_surplus(total, tensor, len(clones) - 1, scope, device)

    def _less_surplus(self, total: str, tensor: int, count: int, scope: str, device: str) -> str:
        """A sum of extents less ``count`` times their constant part."""
        context, nodes = self._context, self._nodes
        dtype = context.dtype(tensor)
        components = context.region.batch.affine(tensor)
        if components is None:
            raise UnsupportedOpError(
                f"{context.graph.tensor_name(tensor)!r} depends on the batch size in a way that clones cannot be "
                f"merged in; compute it outside the "
                "model"
            )
        constant = np.array([c0 for c0, _ in components]).reshape(context.static_shape(tensor))
        surplus = nodes.const(constant * count, scope + "/surplus", dtype, device)
        return nodes.binary("Sub", total, surplus, scope, dtype, device)

    def _concatenated(
        self, tensor: int, layout: Layout, home: int, clones: List[Clone], scope: str, device: str
    ) -> str:
        context, nodes = self._context, self._nodes
        dtype = context.dtype(tensor)
        values = [
            self._converter.scale(
                context.tensor_in(tensor, clone), tensor, layout.power, home, clone, f"{scope}/{i}"
            )
            for i, clone in enumerate(clones)
        ]
        if layout.blocks is None or len(layout.blocks) == 1 or len(values) == 1:
            return nodes.concat(values, layout.dim, scope, dtype, device)
        return self._converter.join_blocks(tensor, layout, home, list(zip(clones, values)), scope, device)
