"""Bridges between TaskGraphs that divide a micro-batch differently, lowered to ops (for the recipes see whale_tf/bridges)."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.bridges import Cuts, crossing, cuts
from whale_tf.emit.context import Clone
from whale_tf.emit.convert import Converter
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import EXTENT, EXTREMES, Offset, negative
from whale_tf.ir.layout import Layout, batch_of, rows_each
from whale_tf.program import Call


class Bridges:
    """Stages transfers between TaskGraphs, each once."""

    def __init__(self, converter: Converter) -> None:
        self._converter = converter
        self.context = converter.context
        self.nodes = converter.nodes
        self._bridges: Dict[Tuple[int, int, Clone, int], str] = {}

    def bridge(self, call: Call, tensor: int, shard: int = 0) -> str:
        """A tensor in the form that the clone of a bridge's call needs.

        Each device of a ``split`` consumer (``shard``) gathers the examples itself instead of taking them from the first device.
        """
        context = self.context
        layout, consumer = context.region.batch.layout(tensor), context.program.bodies[call.body].task_graph
        shard = shard if layout.is_sharded else 0
        key = (tensor, consumer, call.clone, shard)
        if key not in self._bridges:
            scope = context.name("bridge", context.scope(call.clone).rpartition("/")[2],
                                 f"t{consumer}" + (f"_{shard}" if shard else ""), context.flat(tensor))
            sources = [number for taken, numbers in call.takes if taken == tensor for number in numbers]
            pieces = [context.program.calls[number].clone for number in sources]
            self._bridges[key] = self._staged(tensor, layout, pieces, consumer, call.clone, shard, scope)
        return self._bridges[key]

    def _staged(self, tensor: int, layout: Layout, pieces: List[Clone], consumer: int, place: Clone, shard: int,
                scope: str) -> str:
        context, producer = self.context, self.context.home(self.context.graph.producer(tensor))
        if layout.is_sharded:
            whole = self._bridge_sharded(tensor, layout, producer, pieces, consumer, place, shard, scope)
            back = Offset(negative(context.region.batch.offsets.get(tensor, 0)))
            return self._converter.offset(
                whole, tensor, back, consumer, place, scope + "/positions", context.graph.producer(tensor))
        if layout.is_partial:
            return self._bridge_partial(tensor, layout, producer, pieces, consumer, place, scope)
        if layout.kind == EXTENT.kind:
            return self._converter.extent(tensor, consumer, place, scope)
        names = [context.tensor_in(tensor, piece) for piece in pieces]
        if layout.kind in EXTREMES:
            return self._converter.combine(layout.kind, names, scope, context.dtype(tensor), context.device(consumer, place))
        name = self._converter.scale(names[0], tensor, layout.power, producer, pieces[0], scope + "/from")
        return self._converter.scale(name, tensor, -layout.power, consumer, place, scope + "/to")

    def _bridge_sharded(self, tensor: int, layout: Layout, producer: int, pieces: List[Clone], consumer: int, place: Clone,
                        shard: int, scope: str) -> str:
        context, nodes = self.context, self.nodes
        covers = crossing(self._cuts(producer), self._cuts(consumer), place.r).covers
        device, dtype = context.device(consumer, place, shard), context.dtype(tensor)
        offset = context.region.batch.offsets.get(tensor, 0)  # positions travel as those in the mini-batch
        values = [(piece, context.tensor_in(tensor, piece)) for piece in pieces]
        values = self._converter.comparable(tensor, producer, values, layout.power, offset, scope)
        names = [self._converter.scale(name, tensor, -layout.power, consumer, place, f"{scope}/{i}/to")
                 for i, (_, name) in enumerate(values)]
        blocks = layout.blocks
        if covers and (blocks is None or len(blocks) == 1):
            return nodes.concat(names, layout.dim, scope + "/concat", dtype, device)
        if blocks is None:
            raise UnsupportedOpError(
                f"tensor {context.graph.tensor_name(tensor)!r} goes from TaskGraph "
                f"{context.plan.task_graphs[producer].name!r} to {context.plan.task_graphs[consumer].name!r}, which has other "
                f"replicas, and whale_tf does not know how its dimension {layout.dim} follows from the batch size; use equal "
                "replica counts, or a static shape"
            )
        parts = []
        for index, block in enumerate(blocks):
            where = f"{scope}/block{index}"
            in_block = [self._converter.block(tensor, layout, index, producer, piece, name, f"{where}_{number}")
                        for number, (name, piece) in enumerate(zip(names, pieces))]
            joined = nodes.concat(in_block, layout.dim, where + "/concat", dtype, device)
            if not covers:
                batch = batch_of(block)
                begin = self._converter.minus(self._converter.start(tensor, consumer, place, batch),
                                              self._converter.start(tensor, producer, pieces[0], batch), where)
                size = self._converter.size(tensor, consumer, place, batch)
                examples = self._converter.size(tensor, producer, pieces[0], batch)
                for number, piece in enumerate(pieces[1:]):
                    more = self._converter.size(tensor, producer, piece, batch)
                    examples = self._converter.plus(examples, more, f"{where}/examples{number}")
                rows = self._converter.rows_each(rows_each(block), joined, tensor, layout.dim, examples, where, device)
                begin = self._converter.times(begin, rows, where + "/begin_of")
                size = self._converter.times(size, rows, where + "/size_of")
                at = device if len(in_block) > 1 else context.device(producer, pieces[0], context.shard_of(tensor))
                joined = nodes.slice_dim(
                    joined, layout.dim, self._converter.rank(tensor), begin, size, where + "/slice", dtype, at)
            parts.append(joined)
        return nodes.concat(parts, layout.dim, scope + "/join", dtype, device)

    def _bridge_partial(self, tensor: int, layout: Layout, producer: int, pieces: List[Clone], consumer: int, place: Clone,
                        scope: str) -> str:
        """The sum over the producer's replicas, divided again.

        ``v'_j = V w_j^(1-k) / sum_j' w_j'`` makes ``sum_j w_j^k v'_j = V``.
        """
        context, nodes = self.context, self.nodes
        dtype, device = context.dtype(tensor), context.device(consumer, place)
        terms = []
        for piece in pieces:
            name = context.tensor_in(tensor, piece)
            terms.append(self._converter.scale(name, tensor, layout.power, producer, piece, f"{scope}/{piece.r}"))
        total = nodes.add_n(terms, scope + "/sum", dtype, device)
        peers = [place._replace(r=r) for r in range(context.plan.task_graphs[consumer].replica_count)]
        share = self._fraction(tensor, consumer, place, peers, dtype, scope)
        total = nodes.binary("Mul", total, share, scope + "/share", dtype, device)
        return self._converter.scale(total, tensor, -layout.power, consumer, place, scope + "/back")

    def _fraction(self, tensor: int, task_graph: int, place: Clone, peers: Sequence[Clone], dtype: tf.DType, scope: str) -> str:
        """``w_j / sum(w of peers)`` as the name of a scalar."""
        weights = [self._converter.weight([tensor], task_graph, peer, dtype) for peer in peers]
        own = weights[peers.index(place)]
        device = self.context.host
        numbers = [weight for weight in weights if not isinstance(weight, str)]
        if len(numbers) == len(weights):
            return self.nodes.const(own / sum(numbers), scope + "/fraction", dtype, device)  # type: ignore[operator]
        total = self.nodes.add_n([str(weight) for weight in weights], scope + "/weights", dtype, device)
        return self.nodes.binary("RealDiv", str(own), total, scope + "/fraction", dtype, device)

    def _cuts(self, task_graph: int) -> Cuts:
        task = self.context.plan.task_graphs[task_graph]
        return cuts(task.replica_count, task.batch_slices)
