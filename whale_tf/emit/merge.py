"""From clones back to the local script's tensors: sums, weighted means and concatenations.

The program's calls say what is added up, synchronised and merged.  Other tensors are merged when a user fetches them.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

import numpy as np

from whale_tf.communicators import Communicator, Member
from whale_tf.emit.context import ORIGINAL, Clone, Context, Copy
from whale_tf.emit.convert import Converter, Piece
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import EXTENT, EXTREMES
from whale_tf.ir.layout import Layout
from whale_tf.passes.collect import chains
from whale_tf.passes.schedule import backward_order
from whale_tf.program import ACCUMULATE, MERGE, SYNCHRONISE


class Merge:
    """Merged values of batch-level tensors; each is staged once.

    Attributes:
        compressed: gradients that are sent to other processes as float16.
    """

    def __init__(self, context: Context, nodes: Nodes, converter: Converter, communicator: Communicator,
                 compressed: FrozenSet[int] = frozenset()) -> None:
        self._context, self._nodes, self._converter, self._communicator = context, nodes, converter, communicator
        self._whole: Dict[int, str] = {}
        self._running: Dict[Tuple[int, Copy], str] = {}
        self._sums: Dict[int, Dict[Copy, str]] = {}
        self._everywhere: Dict[Tuple[int, int], Dict[Copy, str]] = {}
        self.compressed = compressed

    def of(self, context: Context) -> Merge:
        """Merged values of the tensors that are exported under the names of another context."""
        return Merge(context, self._nodes, self._converter, self._communicator)

    def stage(self) -> None:
        """Stages what the program's calls add up, synchronise and merge."""
        program = self._context.program
        for call in program.calls:
            body = program.bodies[call.body]
            if body.step == ACCUMULATE:
                for tensor in body.inputs if body.home is None else ():
                    self._add(tensor, call.clone, Copy(call.clone.g, call.clone.r))
            elif body.step == SYNCHRONISE:
                self._synchronise(body.task_graph, body.inputs)
            elif body.step == MERGE:
                for tensor in body.inputs:
                    self.whole(tensor)

    def for_update(self, tensor: int, task_graph: int, copy: Copy) -> str:
        """The merged value that the update of a TaskGraph's copy reads."""
        found = self._everywhere.get((tensor, task_graph))
        return self.of_all_processes(tensor) if found is None else found[copy]

    @property
    def is_larger(self) -> bool:
        """Whether merged values have more rows than the graph's static shapes say, because model replicas or processes take their
        own mini-batches."""
        return self._converter.division.mini_batches > 1 and self._converter.division.batch is not None

    def staged(self) -> Dict[str, Tuple[int, bool]]:
        """Name of a merged value -> its tensor, and whether it covers the mini-batches of all processes."""
        found = {name: (tensor, False) for tensor, name in self._whole.items()}
        found.update((name, (tensor, True)) for (tensor, _), values in self._everywhere.items() for name in values.values())
        return found

    def whole(self, tensor: int) -> str:
        """What the local script would have computed from this process's mini-batches, on the first device of the tensor's
        TaskGraph."""
        if self._context.is_in_place:
            return self._context.graph.tensor_name(tensor)
        if tensor not in self._whole:
            context = self._context
            home = context.home(context.graph.producer(tensor))
            scope = context.name("merged", context.flat(tensor))
            dtype, device = context.dtype(tensor), context.merged_on(tensor)
            layout = context.region.batch.layout(tensor)
            clones, others = list(context.clones(home)), []  # type: List[Clone], List[str]
            if layout.is_partial:
                sums = self._accumulated(tensor, home)
                value = self._nodes.add_n(list(sums.values()), scope, dtype, device)
                value = self._converter.of_this_process(value, tensor, layout.power, scope, device)
            elif layout.is_sharded:
                value = self._concatenated(tensor, layout, home, scope, device)
            elif layout.kind in EXTREMES:
                values = [context.tensor_in(tensor, clone) for clone in clones]
                value = self._converter.combine(layout.kind, values, scope, dtype, device)
            elif layout.kind == EXTENT.kind:
                value = self._extent(tensor, clones, scope, device)
            else:
                value = context.tensor_in(tensor, clones[0])
                value = self._converter.scale(value, tensor, layout.power, home, clones[0], scope)
                # an update must not write a variable that another clone has yet to read
                others = list(dict.fromkeys(context.op_in(context.graph.producer(tensor), clone) for clone in clones[1:]))
            self._whole[tensor] = self._nodes.identity(value, scope + "/value", dtype, device, others)
        return self._whole[tensor]

    def part(self, tensor: int) -> str:
        """What this process contributes to the sum of a partial tensor over all processes."""
        home = self._context.home(self._context.graph.producer(tensor))
        scope, dtype = self._context.name("part", self._context.flat(tensor)), self._context.dtype(tensor)
        values = list(self._accumulated(tensor, home).values())
        return self._nodes.add_n(values, scope, dtype, self._context.device(home, ORIGINAL))

    def of_all_processes(self, tensor: int) -> str:
        """What the local script would have computed from the mini-batches of all processes, on the first device of the tensor's
        TaskGraph.  Every run of it waits for the other processes."""
        if self._communicator.processes == 1:
            return self.whole(tensor)
        home = self._context.home(self._context.graph.producer(tensor))
        if (tensor, home) not in self._everywhere:
            self._synchronise(home, [tensor])
        return self._everywhere[tensor, home][ORIGINAL]

    def _synchronise(self, task_graph: int, tensors: Sequence[int]) -> None:
        """Stages values over all copies and processes, on every copy of a TaskGraph."""
        context = self._context
        first, copies = tensors[0], context.copies(task_graph)
        if context.owners.gradients.keys() >= set(tensors):
            if (first, task_graph) in self._everywhere:
                return  # done by the first micro-batch's call
            for tensor, total in zip(tensors, self._at_owner(task_graph, tensors)):
                self._everywhere[tensor, task_graph] = dict.fromkeys(copies, total)
            return
        names = [context.name("sync", context.flat(tensor)) for tensor in tensors]
        layout, dtype = context.region.batch.layout(first), context.dtype(first)
        members = [self._members(tensor, task_graph) for tensor in tensors] if layout.is_partial else []
        if len(tensors) > 1:
            shapes = [context.static_shape(tensor) for tensor in tensors]
            sums = self._communicator.all_reduce_together(members, names, shapes, dtype, self.compressed.issuperset(tensors))
            found = [dict(zip(copies, values)) for values in sums]
        elif layout.is_partial:
            fp16 = first in self.compressed
            found = [dict(zip(copies, self._communicator.all_reduce(members[0], names[0], dtype, fp16)))]
        elif layout.is_sharded and self._communicator.processes == 1:
            home, shard = context.home(context.graph.producer(first)), context.shard_of(first)
            found = [{copy: self._concatenated(first, layout, home, f"{names[0]}/{copy.g}_{copy.r}",
                                               context.device(task_graph, copy, shard)) for copy in copies}]
        else:
            found = [dict.fromkeys(copies, self._across(first, layout))]
        self._everywhere.update({(tensor, task_graph): values for tensor, values in zip(tensors, found)})

    def _at_owner(self, task_graph: int, tensors: Sequence[int]) -> List[str]:
        """Sums each micro-batch's gradients over replicas and processes immediately; only a variable's owner adds up these sums::

            micro-batch 0    all replicas ──> sum over processes ──┐
            micro-batch 1    all replicas ──> sum over processes ──┴─> Add      in another process: dropped

        Returns:
            The sums; in other processes, tensors that exist when all micro-batches have been summed.
        """
        context, owners, dtype = self._context, self._context.owners, self._context.dtype(tensors[0])
        fp16, totals = self.compressed.issuperset(tensors), {}  # type: bool, Dict[int, List[str]]
        clones = chains(context.plan, task_graph, 0)[0]
        for m in dict.fromkeys(clone.m for clone in clones):
            members = [[Member(self._of_micro_batch(tensor, [clone for clone in clones if clone.m == m], m == clones[0].m),
                               context.merged_on(tensor))] for tensor in tensors]
            names = [context.name("sync", context.flat(tensor), str(m)) for tensor in tensors]
            if len(tensors) > 1:
                shapes = [context.static_shape(tensor) for tensor in tensors]
                found = self._communicator.all_reduce_together(members, names, shapes, dtype, fp16)
            else:
                found = [self._communicator.all_reduce(members[0], names[0], dtype, fp16)]
            for tensor, (total,) in zip(tensors, found):
                totals.setdefault(tensor, []).append(total)
        results = []
        for tensor in tensors:
            device, scope = context.merged_on(tensor), context.name("sync", context.flat(tensor), "all")
            total, *others = totals[tensor]
            if owners.is_own(owners.gradients[tensor]):
                for number, other in enumerate(others):
                    total = self._nodes.binary("Add", total, other, f"{scope}/{number}", dtype, device)
                if self._converter.division.is_even:
                    power = context.region.batch.layout(tensor).power
                    total = self._converter.scale(total, tensor, power, task_graph, clones[0], scope, device=device)
            else:
                total = self._nodes.identity(total, scope, dtype, device, others)
            results.append(total)
        return results

    def _of_micro_batch(self, tensor: int, clones: Sequence[Clone], is_first: bool) -> str:
        """The sum of a gradient over the replicas; the ops that add a value have the names for which the schedule waits."""
        context, dtype, device = self._context, self._context.dtype(tensor), self._context.merged_on(tensor)
        value = self._weighted(tensor, clones[0])
        if not is_first:
            name = context.sum_name(tensor, Copy(clones[0].g, clones[0].r), clones[0].m)
            value = self._nodes.identity(value, name, dtype, device)
        for clone in clones[1:]:
            name = context.sum_name(tensor, Copy(clone.g, clone.r), clone.m)
            value = self._nodes.binary("Add", value, self._weighted(tensor, clone), name, dtype, device)
        return value

    def _across(self, tensor: int, layout: Layout) -> str:
        """The value over all processes of a tensor that is not a sum, on the first device of its TaskGraph."""
        context = self._context
        home = context.home(context.graph.producer(tensor))
        scope, dtype = context.name("processes", context.flat(tensor)), context.dtype(tensor)
        device, equal = context.device(home, ORIGINAL), self._converter.division.batch is not None
        if layout.is_sharded and layout.blocks is not None and len(layout.blocks) > 1:
            pieces = self._pieces(tensor, layout, home, scope)
            return self._converter.examples(tensor, layout, home, pieces, scope, device, equal)
        here = Member(self.whole(tensor), device)
        if layout.is_sharded:
            lengths = None if equal else self._converter.rows_of_each_process(tensor, layout)
            return self._converter.gathered(here, tensor, layout.dim, scope, equal, lengths)
        if layout.kind in EXTREMES:
            return self._communicator.across(here, layout.kind, scope, dtype)
        if layout.kind == EXTENT.kind:
            total = self._communicator.across(here, "sum", scope + "/sum", dtype)
            return self._less_surplus(total, here.value, tensor, self._communicator.processes - 1, scope, here.device)
        return here.value

    def _members(self, tensor: int, home: int) -> List[Member]:
        accumulated = self._accumulated(tensor, home)
        shard = self._context.shard_of(tensor)
        return [Member(value, self._context.device(home, copy, shard)) for copy, value in accumulated.items()]

    def _accumulated(self, tensor: int, home: int) -> Dict[Copy, str]:
        """Weighted sums over micro-batches, one for each replica."""
        if tensor not in self._sums:
            found = {}
            for chain in chains(self._context.plan, home, self._chained_at(tensor)):
                copy = Copy(chain[0].g, chain[0].r)
                if (tensor, copy) not in self._running:
                    for clone in chain:
                        self._add(tensor, clone, copy)
                found[copy] = self._summed(tensor, home, copy, chain)
            self._sums[tensor] = found
        return self._sums[tensor]

    def _chained_at(self, tensor: int) -> Optional[int]:
        """The home that adds up all clones' values of a gradient as they arrive."""
        plan = self._context.plan
        return self._context.homes.tensors.get(tensor) if plan.adds_at_home and plan.num_micro_batch > 1 else None

    def _summed(self, tensor: int, home: int, copy: Copy, clones: List[Clone]) -> str:
        total = self._running[tensor, copy]
        if not self._converter.division.is_even:
            return total
        power, device = self._context.region.batch.layout(tensor).power, self._sum_device(tensor, copy)
        return self._converter.scale(total, tensor, power, home, clones[0], self._context.sum_name(tensor, copy), device=device)

    def _add(self, tensor: int, clone: Clone, copy: Copy) -> None:
        """Adds a clone's value to the sum of those before: a chain, so that each value is freed as soon as it is added."""
        context = self._context
        if (tensor, copy) not in self._running:
            first = Clone(copy.g, backward_order(context.plan, context.home(context.graph.producer(tensor)))[0], copy.r)
            self._running[tensor, copy] = self._weighted(tensor, first)
            if clone == first:
                return
        name = context.sum_name(tensor, Copy(clone.g, clone.r), clone.m)
        terms = self._running[tensor, copy], self._weighted(tensor, clone)
        device = self._sum_device(tensor, copy)
        self._running[tensor, copy] = self._nodes.binary("Add", *terms, name, context.dtype(tensor), device)

    def _sum_device(self, tensor: int, copy: Copy) -> str:
        context = self._context
        if self._chained_at(tensor) is not None:
            return context.merged_on(tensor)
        return context.device(context.home(context.graph.producer(tensor)), copy, context.shard_of(tensor))

    def _weighted(self, tensor: int, clone: Clone) -> str:
        value = self._context.tensor_in(tensor, clone)
        if self._converter.division.is_even:
            return value
        home, power = self._context.home(self._context.graph.producer(tensor)), self._context.region.batch.layout(tensor).power
        scope = self._context.sum_name(tensor, Copy(clone.g, clone.r))
        return self._converter.scale(value, tensor, power, home, clone, f"{scope}/{clone.m}")

    def _extent(self, tensor: int, clones: List[Clone], scope: str, device: str) -> str:
        """``c0 + c1 B`` from the clones' ``c0 + c1 b_i``: their sum minus ``n - 1`` times ``c0``."""
        context = self._context
        names = [context.tensor_in(tensor, clone) for clone in clones]
        total = self._nodes.add_n(names, scope + "/sum", context.dtype(tensor), device)
        return self._less_surplus(total, names[0], tensor, len(clones) - 1, scope, device)

    def _less_surplus(self, total: str, one: str, tensor: int, count: int, scope: str, device: str) -> str:
        """A sum of extents minus ``count`` times their constant part; ``one``, one of the extents, supplies what is not known
        here."""
        context, nodes = self._context, self._nodes
        dtype = context.dtype(tensor)
        parts = context.region.batch.surplus(tensor)
        if parts is None:
            raise UnsupportedOpError(
                f"{context.graph.tensor_name(tensor)!r} depends on the batch size in a way that prevents merging the clones' "
                "values; compute it outside the model")
        shape = context.static_shape(tensor)
        constant = np.array([0 if part is None else part for part in parts]).reshape(shape)
        surplus = nodes.const(constant * count, scope + "/surplus", dtype, device)
        if None in parts:
            equal = np.array([count * (part is None) for part in parts]).reshape(shape)
            name = nodes.const(equal, scope + "/equal", dtype, device)
            more = nodes.binary("Mul", name, one, scope + "/of_one", dtype, device)
            surplus = nodes.binary("Add", surplus, more, scope + "/more", dtype, device)
        return nodes.binary("Sub", total, surplus, scope, dtype, device)

    def _concatenated(self, tensor: int, layout: Layout, home: int, scope: str, device: str) -> str:
        return self._converter.concatenated(tensor, layout, home, self._pieces(tensor, layout, home, scope), scope, device)

    def _pieces(self, tensor: int, layout: Layout, home: int, scope: str) -> List[Piece]:
        """What each clone has of a sharded tensor."""
        context, offset = self._context, self._context.region.batch.offsets.get(tensor, 0)
        pieces = [(clone, context.tensor_in(tensor, clone)) for clone in context.clones(home)]
        return self._converter.comparable(tensor, home, pieces, layout.power, offset, scope)
