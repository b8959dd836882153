"""Bridges between TaskGraphs of equal and different replica counts, lowered to ops (the recipes: whale_tf/bridges)."""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.bridges import Cuts, crossing, cuts
from whale_tf.emit.context import Clone
from whale_tf.emit.convert import Converter
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import EXTENT, EXTREMES
from whale_tf.ir.layout import Layout


class Bridges:
    """Stages what crosses from one TaskGraph to another; each crossing is staged once."""

    def __init__(self, converter: Converter) -> None:
        self._converter = converter
        self.context = converter.context
        self.nodes = converter.nodes
        self._bridges: Dict[Tuple[int, int, Clone, int], str] = {}

    def same_division(self, a: int, b: int) -> bool:
        """Whether two TaskGraphs cut a micro-batch at the same places, so that tensors cross one to one."""
        return self._cuts(a) == self._cuts(b)

    def bridge(self, tensor: int, producer: int, consumer: int, place: Clone, shard: int = 0) -> str:
        """A tensor of TaskGraph ``producer`` as replica ``place.r`` of ``consumer`` needs it.

        Every device of a ``split`` consumer (``shard``) gathers the examples itself, rather than from its first device.
        """
        layout = self.context.region.batch.layout(tensor)
        shard = shard if layout.is_sharded else 0
        key = (tensor, consumer, place, shard)
        if key not in self._bridges:
            scope = self.context.name(
                "bridge",
                self.context.scope(place).rpartition("/")[2],
                f"t{consumer}" + (f"_{shard}" if shard else ""),
                self.context.flat(tensor),
            )
            if layout.is_sharded:
                self._bridges[key] = self._bridge_sharded(tensor, layout, producer, consumer, place, shard, scope)
            elif layout.is_partial:
                self._bridges[key] = self._bridge_partial(tensor, layout, producer, consumer, place, scope)
            elif layout.kind == EXTENT.kind:
                self._bridges[key] = self._converter.extent(tensor, consumer, place, scope)
            elif layout.kind in EXTREMES:
                count = self.context.plan.task_graphs[producer].replica_count
                terms = [self.context.tensor_in(tensor, place._replace(r=r)) for r in range(count)]
                self._bridges[key] = self._converter.combine(
                    layout.kind, terms, scope, self.context.dtype(tensor), self.context.device(consumer, place)
                )
            else:
                count = self.context.plan.task_graphs[producer].replica_count
                piece = place._replace(r=place.r % count)
                self._bridges[key] = self._rescale(
                    self.context.tensor_in(tensor, piece), tensor, layout.power, producer, piece, consumer, place, scope
                )
        return self._bridges[key]

    def _bridge_sharded(
        self, tensor: int, layout: Layout, producer: int, consumer: int, place: Clone, shard: int, scope: str
    ) -> str:
        context, nodes = self.context, self.nodes
        producers, covers = crossing(self._cuts(producer), self._cuts(consumer), place.r)
        pieces = [place._replace(r=r) for r in producers]
        device, dtype = context.device(consumer, place, shard), context.dtype(tensor)
        names = [context.tensor_in(tensor, piece) for piece in pieces]
        if layout.power:
            names = [
                self._rescale(name, tensor, layout.power, producer, piece, consumer, place, f"{scope}/{i}")
                for i, (name, piece) in enumerate(zip(names, pieces))
            ]
        blocks = layout.blocks
        if covers and (blocks is None or len(blocks) == 1):
            return nodes.concat(names, layout.dim, scope + "/concat", dtype, device)
        if blocks is None:
            raise UnsupportedOpError(
                f"tensor {context.graph.tensor_name(tensor)!r} crosses from TaskGraph "
                f"{context.plan.task_graphs[producer].name!r} to {context.plan.task_graphs[consumer].name!r} with "
                f"different replicas, and how its dimension {layout.dim} follows "
                "from the batch size is not known; use equal replica counts, or a static shape"
            )
        parts = []
        for index, block in enumerate(blocks):
            where = f"{scope}/block{index}"
            in_block = [
                self._converter.block(tensor, layout, index, producer, piece, name, f"{where}_{number}")
                for number, (name, piece) in enumerate(zip(names, pieces))
            ]
            joined = nodes.concat(in_block, layout.dim, where + "/concat", dtype, device)
            if not covers:
                begin = self._converter.minus(
                    self._converter.start(tensor, consumer, place), self._converter.start(tensor, producer, pieces[0]), where
                )
                size = self._converter.size(tensor, consumer, place)
                joined = nodes.slice_dim(
                    joined,
                    layout.dim,
                    self._converter.rank(tensor),
                    self._converter.times(begin, block, where + "/begin_of"),
                    self._converter.times(size, block, where + "/size_of"),
                    where + "/slice",
                    dtype,
                    device if len(in_block) > 1 else context.device(producer, pieces[0], context.shard_of(tensor)),
                )
            parts.append(joined)
        return nodes.concat(parts, layout.dim, scope + "/join", dtype, device)

    def _bridge_partial(
        self, tensor: int, layout: Layout, producer: int, consumer: int, place: Clone, scope: str
    ) -> str:
        """Sum over the producer's replicas, divided again.

        ``v'_j = V w_j^(1-k) / sum_j' w_j'`` makes ``sum_j w_j^k v'_j = V``.
        """
        context, nodes = self.context, self.nodes
        dtype, device = context.dtype(tensor), context.device(consumer, place)
        count = context.plan.task_graphs[producer].replica_count
        terms = []
        for r in range(count):
            piece = place._replace(r=r)
            terms.append(
                self._converter.scale(
                    context.tensor_in(tensor, piece), tensor, layout.power, producer, piece, f"{scope}/{r}"
                )
            )
        total = nodes.add_n(terms, scope + "/sum", dtype, device)
        peers = [place._replace(r=r) for r in range(context.plan.task_graphs[consumer].replica_count)]
        share = self._fraction(tensor, consumer, place, peers, dtype, scope)
        total = nodes.binary("Mul", total, share, scope + "/share", dtype, device)
        return self._converter.scale(total, tensor, -layout.power, consumer, place, scope + "/back")

    def _fraction(
        self, tensor: int, task_graph: int, place: Clone, peers: Sequence[Clone], dtype: tf.DType, scope: str
    ) -> str:
        """``w_j / sum(w of peers)`` as the name of a scalar."""
        weights = [self._converter.weight(tensor, task_graph, peer, dtype) for peer in peers]
        own = weights[peers.index(place)]
        device = self.context.host
        numbers = [weight for weight in weights if not isinstance(weight, str)]
        if len(numbers) == len(weights):
            return self.nodes.const(own / sum(numbers), scope + "/fraction", dtype, device)  # type: ignore[operator]
        total = self.nodes.add_n([str(weight) for weight in weights], scope + "/weights", dtype, device)
        return self.nodes.binary("RealDiv", str(own), total, scope + "/fraction", dtype, device)

    def _rescale(
        self, name: str, tensor: int, power: int, producer: int, piece: Clone, consumer: int, place: Clone, scope: str
    ) -> str:
        """From a value relative to one clone's weight to one relative to another's."""
        if power == 0:
            return name
        name = self._converter.scale(name, tensor, power, producer, piece, scope + "/from")
        return self._converter.scale(name, tensor, -power, consumer, place, scope + "/to")

    def _cuts(self, task_graph: int) -> Cuts:
        task = self.context.plan.task_graphs[task_graph]
        return cuts(task.replica_count, task.batch_slices)
