"""Bridges between TaskGraphs that divide a micro-batch differently, as primitives (which parts a consumer reads: see
:mod:`whale_tf.bridges`)."""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

from whale_tf.bridges import crossing
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import EXTENT, EXTREMES, negative
from whale_tf.ir.layout import Layout, is_grouped
from whale_tf.passes.lowering.primitive import CUT, EXTENT_OF, SHARE, TENSOR, Cut, Primitive, name_of
from whale_tf.passes.lowering.values import Values
from whale_tf.passes.replicate import cuts_of, device_at, pieces_of
from whale_tf.program import Clone


class Bridges:
    """Lowers bridges, each once."""

    def __init__(self, values: Values) -> None:
        self._values, self._step, self._plan = values, values.step, values.plan
        self._graph, self._batch = values.step.graph, values.step.region.batch
        self._bridged: Dict[Tuple[int, int, Clone, int], Primitive] = {}

    def bridged(self, tensor: int, consumer: int, clone: Clone, shard: int = 0) -> Primitive:
        """A tensor in the form that a clone of another TaskGraph reads.  Each device of a ``split`` consumer (``shard``) gathers
        the examples itself instead of taking them from the first device."""
        layout = self._values.layout(tensor)
        key = tensor, consumer, clone, shard if layout.is_sharded else 0
        if key not in self._bridged:
            self._bridged[key] = self._bridge(tensor, layout, consumer, clone, key[3])
        return self._bridged[key]

    def _bridge(self, tensor: int, layout: Layout, consumer: int, clone: Clone, shard: int) -> Primitive:
        plan, producer = self._plan, self._step.task_graph_of(tensor)
        device = device_at(plan, consumer, clone, shard)
        scope = f"bridge/{name_of(clone)}/t{consumer}" + (f"_{shard}" if shard else "") + f"/{TENSOR}"
        if layout.kind == EXTENT.kind:
            if self._batch.counted(tensor) is None:
                raise self._refusal(tensor, consumer, "how it follows from the batch size")
            return Primitive(EXTENT_OF, tensor, device, (), scope, clone, consumer)
        pieces = pieces_of(self._step, plan, tensor, consumer, clone)
        if layout.is_sharded:
            return self._bridge_rows(tensor, layout, pieces, consumer, clone, device, scope)
        if layout.kind in EXTREMES:
            return self._values.reduced(layout.kind, [self._values.value(tensor, piece) for piece in pieces], device, scope)
        if layout.is_partial:
            # the sum over the producer's replicas, divided again: v'_j = V w_j^(1-k) / sum_j' w_j' makes sum_j w_j^k v'_j = V
            terms = [self._values.scaled(self._values.value(tensor, piece), layout.power, piece, producer, f"{scope}/{piece.r}")
                     for piece in pieces]
            total = self._values.added(terms, device, scope + "/sum")
            value = Primitive(SHARE, tensor, device, (total,), scope, clone, consumer)
            return self._values.scaled(value, -layout.power, clone, consumer, scope + "/back")
        value = self._values.scaled(self._values.value(tensor, pieces[0]), layout.power, pieces[0], producer, scope + "/from")
        return self._values.scaled(value, -layout.power, clone, consumer, scope + "/to", device)

    def _bridge_rows(self, tensor: int, layout: Layout, pieces: Sequence[Clone], consumer: int, clone: Clone, device: int,
                     scope: str) -> Primitive:
        producer, blocks = self._step.task_graph_of(tensor), layout.blocks
        if is_grouped(blocks):  # replicas have elements of their own rows in the input's order, which rows need not follow
            raise self._refusal(tensor, consumer, "which of its rows belong to whose examples")
        offset = self._batch.offsets.get(tensor, 0)  # positions travel as those in the mini-batch
        values = self._values.comparable(tensor, pieces, layout.power, offset, scope)
        covers = crossing(cuts_of(self._plan, producer), cuts_of(self._plan, consumer), clone.r).covers
        if covers and (blocks is None or len(blocks) == 1):
            value = self._values.concatenated(tensor, values, device, scope + "/concat")
        elif blocks is None:
            raise self._refusal(tensor, consumer, f"how its dimension {layout.dim} follows from the batch size")
        else:
            parts = []
            for index in range(len(blocks)):
                where = f"{scope}/block{index}"
                own = self._values.blocks(tensor, values, index, where)
                rows = self._values.concatenated(tensor, own, device, where + "/concat")
                if not covers:
                    at = device if len(values) > 1 else values[0].device  # cut off where it is; several are put together first
                    rows = Primitive(CUT, tensor, at, (rows,), where, clone, consumer, Cut(index, tuple(pieces), producer))
                parts.append(rows)
            value = self._values.concatenated(tensor, parts, device, scope + "/join")
        value = self._values.scaled(value, -layout.power, clone, consumer, scope + "/to", device)
        return self._values.shifted(value, negative(offset), clone, consumer, scope + "/positions", device)

    def _refusal(self, tensor: int, consumer: int, unknown: str) -> UnsupportedOpError:
        producer = self._step.task_graph_of(tensor)
        return UnsupportedOpError(
            f"tensor {self._graph.tensor_name(tensor)!r} goes from TaskGraph {self._plan.task_graphs[producer].name!r} to "
            f"{self._plan.task_graphs[consumer].name!r}, which has other replicas, and whale_tf does not know {unknown}; use "
            "equal replica counts, a static shape, or the same annotation for both")
