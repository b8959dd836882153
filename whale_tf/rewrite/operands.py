"""What each clone reads: its part of the inputs, its neighbours' activations, its own copy of the variables.

``Operands.of(op, position, clone)`` is the name of the tensor that input ``position`` of ``op`` reads in a clone; asking
stages whatever is missing: slices of the mini-batch, bridges between TaskGraphs, conversions of the batch axis.
Everything is staged once and shared.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import Conversion, Offset, Reduce, Scale, Slice, Whole
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.layout import Layout
from whale_tf.rewrite.context import ORIGINAL, Clone, Context, Copy
from whale_tf.rewrite.division import Division, Number, Shares, running
from whale_tf.rewrite.inputs import Inputs


class Operands:
    """See the module's docstring."""

    def __init__(
        self,
        context: Context,
        nodes: Nodes,
        division: Division,
        inputs: Inputs,
        variable_copies: Dict[Tuple[int, Copy], str],
    ) -> None:
        self.context = context
        self.nodes = nodes
        self.division = division
        self.inputs = inputs
        self.variable_copies = variable_copies
        self._bridges: Dict[Tuple[int, int, Clone], str] = {}
        self._converted: Dict[Tuple, str] = {}

    # --------------------------------------------------------------------------------------------------- resolution
    def of(self, op: Op, position: int, place: Union[Clone, Copy]) -> str:
        """Name of the tensor that input ``position`` of ``op`` reads in a clone (batch level) or copy (step level)."""
        tensor = op.inputs[position]
        home = self.context.home(op)
        name = self.value(tensor, home, place)
        if isinstance(place, Clone):
            constant = self.context.region.batch.localise.get((op.id, position))
            if constant:
                return self._localised(op, position, place)
            for conversion in self.context.region.batch.conversions.get((op.id, position), ()):
                name = self._convert(name, tensor, conversion, home, place, op)
            if (op.id, position) in self.context.rescaled:
                name = self._times_model_replicas(name, tensor, home, place)
        return name

    def value(self, tensor: int, task_graph: int, place: Union[Clone, Copy]) -> str:
        """Name of a tensor as a clone or copy of ``task_graph`` sees it."""
        context = self.context
        producer = context.graph.producer(tensor)
        if tensor in self.inputs.sources and isinstance(place, Clone):
            return self.inputs.part(tensor, task_graph, place)
        if producer.phase is Phase.INPUT or not context.region.contains(producer):
            copy = Copy(place.g, place[-1])
            if (producer.id, copy) in self.variable_copies:
                return self.variable_copies[(producer.id, copy)]
            return self.inputs.whole(tensor, place.g)
        home = context.home(producer)
        if producer.id in context.region.batch.shared:
            return context.tensor_in(tensor, ORIGINAL)
        if producer.id not in context.region.batch_level:
            copy = self._neighbour(home, task_graph, place)
            if (producer.id, copy) in self.variable_copies:
                return self.variable_copies[(producer.id, copy)]
            return context.tensor_in(tensor, copy)
        if not isinstance(place, Clone):
            raise AssertionError(
                "step-level op reads batch-level tensor {!r}".format(context.graph.tensor_name(tensor))
            )
        if home == task_graph or self._same_division(home, task_graph):
            return context.tensor_in(tensor, place)
        return self.bridge(tensor, home, task_graph, place)

    def _neighbour(self, home: int, task_graph: int, place: Union[Clone, Copy]) -> Copy:
        """The copy of TaskGraph ``home`` that a place of ``task_graph`` reads from."""
        count = self.context.plan.task_graphs[home].device_count
        return Copy(place.g, place[-1] if home == task_graph else place[-1] % count)

    def _same_division(self, a: int, b: int) -> bool:
        one, other = self.context.plan.task_graphs[a], self.context.plan.task_graphs[b]
        return self._cuts(a) == self._cuts(b) and one.device_count == other.device_count

    def _cuts(self, task_graph: int) -> List[float]:
        task = self.context.plan.task_graphs[task_graph]
        totals = running(task.slices, task.device_count)
        return [total / float(totals[-1]) for total in totals]

    # ------------------------------------------------------------------------------------------------------ bridges
    def bridge(self, tensor: int, producer: int, consumer: int, place: Clone) -> str:
        """A tensor of TaskGraph ``producer`` as replica ``place.r`` of ``consumer`` needs it (DAPPLE Fig. 9).

        ::

            2 replicas -> 1       concat            1 -> 2     split            2 -> 3     split-concat
            p0 ─┐                                   ┌─> c0                      p0 ──┬─> c0
            p1 ─┴─> c0                          p0 ─┴─> c1                      p0 p1┴─> c1   p1 ──> c2
        """
        key = (tensor, consumer, place)
        if key not in self._bridges:
            layout = self.context.region.batch.layout(tensor)
            scope = self.context.name(
                "bridge",
                self.context.scope(place).rpartition("/")[2],
                "t{}".format(consumer),
                self.context.flat(tensor),
            )
            if layout.is_sharded:
                self._bridges[key] = self._bridge_sharded(tensor, layout, producer, consumer, place, scope)
            elif layout.is_partial:
                self._bridges[key] = self._bridge_partial(tensor, layout, producer, consumer, place, scope)
            else:
                count = self.context.plan.task_graphs[producer].device_count
                piece = place._replace(r=place.r % count)
                self._bridges[key] = self._rescale(
                    self.context.tensor_in(tensor, piece), tensor, layout.power, producer, piece, consumer, place, scope
                )
        return self._bridges[key]

    def _bridge_sharded(
        self, tensor: int, layout: Layout, producer: int, consumer: int, place: Clone, scope: str
    ) -> str:
        context, nodes = self.context, self.nodes
        cuts, own = self._cuts(producer), self._cuts(consumer)
        low, high = own[place.r], own[place.r + 1]
        pieces = [place._replace(r=r) for r in range(len(cuts) - 1) if cuts[r] < high and cuts[r + 1] > low]
        device, dtype = context.device(consumer, place), context.dtype(tensor)
        names = [context.tensor_in(tensor, piece) for piece in pieces]
        if layout.power:
            names = [
                self._rescale(name, tensor, layout.power, producer, piece, consumer, place, "{}/{}".format(scope, i))
                for i, (name, piece) in enumerate(zip(names, pieces))
            ]
        covers = cuts[pieces[0].r] == low and cuts[pieces[-1].r + 1] == high
        blocks = layout.blocks
        if covers and (blocks is None or len(blocks) == 1):
            return nodes.concat(names, layout.dim, scope + "/concat", dtype, device)
        if blocks is None:
            raise UnsupportedOpError(
                "tensor {!r} crosses from TaskGraph {!r} to {!r} with different replicas, and how its dimension {} follows "
                "from the batch size is not known; use equal replica counts, or a static shape".format(
                    context.graph.tensor_name(tensor),
                    context.plan.task_graphs[producer].name,
                    context.plan.task_graphs[consumer].name,
                    layout.dim,
                )
            )
        parts = []
        for index, block in enumerate(blocks):
            where = "{}/block{}".format(scope, index)
            in_block = [
                self._block(tensor, layout, index, producer, piece, name, "{}_{}".format(where, number))
                for number, (name, piece) in enumerate(zip(names, pieces))
            ]
            joined = nodes.concat(in_block, layout.dim, where + "/concat", dtype, device)
            if not covers:
                begin = self._minus(
                    self._start(tensor, consumer, place), self._start(tensor, producer, pieces[0]), where
                )
                size = self._size(tensor, consumer, place)
                joined = nodes.slice_dim(
                    joined,
                    layout.dim,
                    self._rank(tensor),
                    self._times(begin, block, where + "/begin_of"),
                    self._times(size, block, where + "/size_of"),
                    where + "/slice",
                    dtype,
                    device if len(in_block) > 1 else context.device(producer, pieces[0]),
                )
            parts.append(joined)
        return nodes.concat(parts, layout.dim, scope + "/join", dtype, device)

    def join_blocks(
        self, tensor: int, layout: Layout, home: int, pieces: Sequence[Tuple[Clone, str]], scope: str, device: str
    ) -> str:
        """Clones' values of a sharded tensor as the whole: block by block, each block from all clones."""
        assert layout.blocks is not None
        parts = [
            self._block(tensor, layout, index, home, clone, name, "{}/block{}_{}".format(scope, index, number))
            for index in range(len(layout.blocks))
            for number, (clone, name) in enumerate(pieces)
        ]
        return self.nodes.concat(parts, layout.dim, scope, self.context.dtype(tensor), device)

    def _block(
        self, tensor: int, layout: Layout, index: int, task_graph: int, clone: Clone, name: str, scope: str
    ) -> str:
        """Block ``index`` of a clone's value of a sharded tensor."""
        assert layout.blocks is not None
        if len(layout.blocks) == 1:
            return name
        size = self._size(tensor, task_graph, clone)
        return self.nodes.slice_dim(
            name,
            layout.dim,
            self._rank(tensor),
            self._times(size, sum(layout.blocks[:index]), scope + "/from"),
            self._times(size, layout.blocks[index], scope + "/size_of"),
            scope,
            self.context.dtype(tensor),
            self.context.device(task_graph, clone),
        )

    def _bridge_partial(
        self, tensor: int, layout: Layout, producer: int, consumer: int, place: Clone, scope: str
    ) -> str:
        """Sum over the producer's replicas, divided again.

        ``v'_j = V w_j^(1-k) / sum_j' w_j'`` makes ``sum_j w_j^k v'_j = V``.
        """
        context, nodes = self.context, self.nodes
        dtype, device = context.dtype(tensor), context.device(consumer, place)
        count = context.plan.task_graphs[producer].device_count
        terms = []
        for r in range(count):
            piece = place._replace(r=r)
            terms.append(
                self.scale(
                    context.tensor_in(tensor, piece), tensor, layout.power, producer, piece, "{}/{}".format(scope, r)
                )
            )
        total = nodes.add_n(terms, scope + "/sum", dtype, device)
        peers = [place._replace(r=r) for r in range(context.plan.task_graphs[consumer].device_count)]
        share = self._fraction(tensor, consumer, place, peers, dtype, scope)
        total = nodes.binary("Mul", total, share, scope + "/share", dtype, device)
        return self.scale(total, tensor, -layout.power, consumer, place, scope + "/back")

    def _fraction(
        self, tensor: int, task_graph: int, place: Clone, peers: Sequence[Clone], dtype: tf.DType, scope: str
    ) -> str:
        """``w_j / sum(w of peers)`` as the name of a scalar."""
        weights = [self.weight(tensor, task_graph, peer, dtype) for peer in peers]
        own = weights[peers.index(place)]
        device = self.context.host
        numbers = [weight for weight in weights if not isinstance(weight, str)]
        if len(numbers) == len(weights):
            return self.nodes.const(own / sum(numbers), scope + "/fraction", dtype, device)  # type: ignore[operator]
        total = self.nodes.add_n([str(weight) for weight in weights], scope + "/weights", dtype, device)
        return self.nodes.binary("RealDiv", str(own), total, scope + "/fraction", dtype, device)

    # -------------------------------------------------------------------------------------------------- conversions
    def _convert(
        self,
        name: str,
        tensor: int,
        conversion: Conversion,
        task_graph: int,
        place: Clone,
        op: Op,
    ) -> str:
        key = (name, conversion, task_graph, place)
        if key not in self._converted:
            scope = "{}/{}_{}".format(
                self.context.scope(place), type(conversion).__name__.lower(), self.context.flat(tensor)
            )
            if isinstance(conversion, Scale):
                done = self.scale(name, tensor, conversion.power, task_graph, place, scope, self._source_of_op(op))
            elif isinstance(conversion, Slice):
                done = self._slice(name, tensor, conversion, task_graph, place, scope, op)
            elif isinstance(conversion, Whole):
                done = self._whole_extent(tensor, conversion, task_graph, place, scope, op)
            elif isinstance(conversion, Offset):
                done = self._offset(name, tensor, conversion, task_graph, place, scope, op)
            else:
                done = self.reduced(tensor, conversion)
            self._converted[key] = done
        return self._converted[key]

    def scale(
        self, name: str, tensor: int, power: int, task_graph: int, place: Clone, scope: str, source: Optional[int] = None
    ) -> str:
        """``w^power`` times a tensor."""
        if power == 0:
            return name
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        weight = self.weight(tensor, task_graph, place, dtype, source)
        if not isinstance(weight, str):
            if weight == 1.0:
                return name
            factor = self.nodes.const(weight**power, scope + "/weight", dtype, device)
        else:
            factor = weight
            if power != 1:
                exponent = self.nodes.const(power, scope + "/power", dtype, device)
                factor = self.nodes.binary("Pow", weight, exponent, scope + "/weight_power", dtype, device)
        # the constant waits for the tensor's frame or branch where there is one
        return self.nodes.binary("Mul", name, factor, scope + "/scaled", dtype, device)

    def _rescale(
        self, name: str, tensor: int, power: int, producer: int, piece: Clone, consumer: int, place: Clone, scope: str
    ) -> str:
        """From a value relative to one clone's weight to one relative to another's."""
        if power == 0:
            return name
        name = self.scale(name, tensor, power, producer, piece, scope + "/from")
        return self.scale(name, tensor, -power, consumer, place, scope + "/to")

    def _slice(
        self, name: str, tensor: int, conversion: Slice, task_graph: int, place: Clone, scope: str, op: Op
    ) -> str:
        """This clone's rows of a tensor that was computed for the whole mini-batch."""
        share, position = self._share_of_op(op, task_graph, place)
        size, start = share.sizes[position], share.starts[position]
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        rank, parts, before = self._rank(tensor), [], 0
        for index, block in enumerate(conversion.blocks):
            where = "{}/block{}".format(scope, index)
            begin = self._times(start, block, where + "/start")
            if before:
                begin = self._plus(begin, self._times(share.total, before, where + "/offset"), where)
            parts.append(
                self.nodes.slice_dim(
                    name,
                    conversion.dim,
                    rank,
                    begin,
                    self._times(size, block, where + "/size_of"),
                    where,
                    dtype,
                    device,
                )
            )
            before += block
        return self.nodes.concat(parts, conversion.dim, scope, dtype, device)

    def _offset(
        self, name: str, tensor: int, conversion: Offset, task_graph: int, place: Clone, scope: str, op: Op
    ) -> str:
        """Positions within the clone's examples as positions within the mini-batch."""
        share, position = self._share_of_op(op, task_graph, place)
        start = share.starts[position]
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        if not isinstance(start, str):
            shift = self.nodes.const(np.array(conversion.coefficient) * start, scope + "/shift", dtype, device)
        else:
            begin = self.nodes.cast(start, scope + "/start", tf.int32, dtype, device)
            coefficient = self.nodes.const(conversion.coefficient, scope + "/coefficient", dtype, device)
            shift = self.nodes.binary("Mul", coefficient, begin, scope + "/shift", dtype, device)
        return self.nodes.binary("Add", name, shift, scope, dtype, device)

    def _whole_extent(self, tensor: int, conversion: Whole, task_graph: int, place: Clone, scope: str, op: Op) -> str:
        """A clone's extent as the whole batch's: ``c0 + c1 B``."""
        dtype, device = self.context.dtype(tensor), self.context.device(task_graph, place)
        shape = self.context.graph.tensors[tensor].shape
        share, _ = self._share_of_op(op, task_graph, place)
        constant = np.array([c0 for c0, _ in conversion.components]).reshape(shape)
        slope = np.array([c1 for _, c1 in conversion.components]).reshape(shape)
        replicas = self.context.plan.num_model_replicas if self.division.own else 1
        if not isinstance(share.total, str):
            return self.nodes.const(constant + slope * share.total * replicas, scope, dtype, device)
        source = self._source_of_op(op)
        totals = [self.inputs.shares(source, task_graph, g).total for g in range(replicas)]
        batch = self.nodes.add_n([str(total) for total in totals], scope + "/batch", tf.int32, self.context.host)
        scalar = self.nodes.const([], scope + "/scalar", tf.int32, device)
        batch = self.nodes.add("Reshape", scope + "/scalar_batch", [batch, scalar], device, T=tf.int32, Tshape=tf.int32)
        batch = self.nodes.cast(batch, scope + "/cast", tf.int32, dtype, device)
        grown = self.nodes.binary("Mul", self.nodes.const(slope, scope + "/slope", dtype, device), batch, scope + "/grown",
                                  dtype, device)
        return self.nodes.binary("Add", grown, self.nodes.const(constant, scope + "/constant", dtype, device), scope, dtype,
                                 device)

    def reduced(self, tensor: int, conversion: Reduce) -> str:
        """The whole batch's value of a partial tensor: the weighted sum (or max, ...) over all clones of its TaskGraph."""
        home = self.context.home(self.context.graph.producer(tensor))
        scope = self.context.name("reduce_" + conversion.kind, self.context.flat(tensor))
        key = (tensor, conversion)
        if key not in self._converted:
            dtype, device = self.context.dtype(tensor), self.context.device(home, Copy(0, 0))
            terms = [
                self.scale(
                    self.context.tensor_in(tensor, clone),
                    tensor,
                    conversion.power,
                    home,
                    clone,
                    "{}/{}".format(scope, i),
                )
                for i, clone in enumerate(self.context.clones(home))
            ]
            self._converted[key] = self.combine(conversion.kind, terms, scope, dtype, device)
        return self._converted[key]

    def combine(self, kind: str, terms: Sequence[str], scope: str, dtype: tf.DType, device: str) -> str:
        """``sum``, ``max``, ``min``, ``prod``, ``any`` or ``all`` of tensors of one shape."""
        if kind == "sum":
            return self.nodes.add_n(terms, scope, dtype, device)
        op_type = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "any": "LogicalOr", "all": "LogicalAnd"}[kind]
        total = terms[0]
        for index, term in enumerate(terms[1:]):
            where = "{}/{}".format(scope, index)
            if dtype == tf.bool:
                total = self.nodes.add(op_type, where, [total, term], device)
            else:
                total = self.nodes.binary(op_type, total, term, where, dtype, device)
        return total

    def _localised(self, op: Op, position: int, place: Clone) -> str:
        """A shape operand with the static batch size baked in, rewritten for this clone's examples."""
        home = self.context.home(op)
        share, index = self._share_of_op(op, home, place)
        size = share.sizes[index]
        scope = "{}/local_{}_{}".format(self.context.scope(place), op.name, position)
        dtype, device = self.context.dtype(op.inputs[position]), self.context.device(home, place)
        components = self.context.region.batch.localise[(op.id, position)].components
        value = self.context.graph.producer(op.inputs[position]).value
        if isinstance(size, str) or (value is None and None in components):
            raise UnsupportedOpError(
                "op {!r} has the batch size baked into a constant, but the batch size of the input is only known at run time; "
                "give the input a static batch size, or build the shape from tf.shape".format(op.name)
            )
        old = [None] * len(components) if value is None else np.asarray(value).reshape(-1).tolist()
        new = [c[0] + c[1] * size if c is not None else kept for c, kept in zip(components, old)]
        shape = self.context.graph.tensors[op.inputs[position]].shape
        return self.nodes.const(np.reshape(np.array(new), shape), scope, dtype, device)

    def _times_model_replicas(self, name: str, tensor: int, home: int, place: Clone) -> str:
        dtype, device = self.context.dtype(tensor), self.context.device(home, place)
        key = (name, "model replicas", home, place)
        if key not in self._converted:
            scope = "{}/times_model_replicas_{}".format(self.context.scope(place), self.context.flat(tensor))
            count = self.nodes.const(self.context.plan.num_model_replicas, scope + "/count", dtype, device)
            self._converted[key] = self.nodes.binary("Mul", name, count, scope, dtype, device)
        return self._converted[key]

    # ------------------------------------------------------------------------------------------------------ numbers
    def weight(
        self, tensor: int, task_graph: int, place: Clone, dtype: tf.DType, source: Optional[int] = None
    ) -> Union[float, str]:
        """``w_i``, from an input that the tensor (or the op that reads it: ``source``) depends on anyway."""
        if source is None:
            source = self.context.region.batch.source_of[tensor]
        return self.division.weight(source, task_graph, place, dtype, self.inputs.names(source))

    def _share_of_op(self, op: Op, task_graph: int, place: Clone) -> Tuple[Shares, int]:
        """Shares of the mini-batch that an op's operands or results follow, and the clone's position in them."""
        source = self._source_of_op(op)
        return self.inputs.shares(source, task_graph, place.g), self.division.position(task_graph, place)

    def _source_of_op(self, op: Op) -> int:
        known = self.context.region.batch.source_of
        return next((known[t] for t in op.outputs + op.inputs if t in known), next(iter(self.inputs.sources)))

    def _share(self, tensor: int, task_graph: int, place: Clone) -> Tuple[Number, Number]:
        source = self.context.region.batch.source_of[tensor]
        share = self.inputs.shares(source, task_graph, place.g)
        position = self.division.position(task_graph, place)
        return share.sizes[position], share.starts[position]

    def _size(self, tensor: int, task_graph: int, place: Clone) -> Number:
        return self._share(tensor, task_graph, place)[0]

    def _start(self, tensor: int, task_graph: int, place: Clone) -> Number:
        return self._share(tensor, task_graph, place)[1]

    def _times(self, value: Number, factor: int, scope: str) -> Number:
        return self._arithmetic("Mul", value, factor, scope + "/times")

    def _plus(self, a: Number, b: Number, scope: str) -> Number:
        return self._arithmetic("Add", a, b, scope + "/plus")

    def _minus(self, a: Number, b: Number, scope: str) -> Number:
        return self._arithmetic("Sub", a, b, scope + "/minus")

    def _arithmetic(self, op_type: str, a: Number, b: Number, scope: str) -> Number:
        if not isinstance(a, str) and not isinstance(b, str):
            return {"Mul": a * b, "Add": a + b, "Sub": a - b}[op_type]
        if op_type == "Mul" and b == 1:
            return a
        names = [
            x if isinstance(x, str) else self.nodes.const(x, scope + "/const", tf.int32, self.context.host)
            for x in (a, b)
        ]
        return self.nodes.binary(op_type, names[0], names[1], scope, tf.int32, self.context.host)

    def _rank(self, tensor: int) -> int:
        shape: Optional[Tuple] = self.context.graph.tensors[tensor].shape
        if shape is None:
            raise UnsupportedOpError(
                "tensor {!r} has to be divided over clones, but its rank is not known; set its shape "
                "with tf.ensure_shape".format(self.context.graph.tensor_name(tensor))
            )
        return len(shape)
