"""The parts of divided tensors, and the communication that turns one spread into another.

::

    shard -> once         ConcatV2 on the first device          partial -> once         AddN on the first device
    shard -> everywhere   ConcatV2 on every device              partial -> shard        Split on every device, AddN where needed
    once -> shard         Split on the first device             shard -> another shard  Split on every device, ConcatV2

Slices take the place of a Split if a part needs some elements alone (the same dimension in other parts, tiles), or if these are
no floating-point numbers, for some of which TensorFlow's Split has no kernel on GPUs.  Tiles are converted like shards, of both
of their dimensions.  Tiles that several model replicas keep are put together in each of them, again for the backward pass.

At the border of a ``replicate`` TaskGraph, ``once`` means: in parts of the batch, on all its devices.  So each replica slices the
TaskGraph's tensors where it computes them, and a ``split`` part gathers its slice over the batch.  If a ``replicate`` TaskGraph
reads a whole tensor, each replica puts it together there, from its own examples of the parts.  Whale fuses the bridge's gather
and the partition after it (section 3.2.3); here they are never separate: both directions are an all-to-all, and ``partial`` terms
are a reduce-scatter over the batch, so no device has the whole.
"""

from __future__ import annotations

import itertools
from typing import Callable, Collection, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.edges import tensor_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op, Phase, Shape
from whale_tf.ir.rules import View
from whale_tf.patterns.spread import EACH, EVERYWHERE, Range, Spread, Tile, assembled, everywhere, once
from whale_tf.transforms.shard.tags import TaggedStage


class ShardedValue(NamedTuple):
    """Names of a tensor's parts, one for each device; for ``once`` a single name."""

    spread: Spread
    names: Tuple[str, ...]
    task_graph: int


Piece = Tuple[Tuple[Range, ...], str]  # ranges within a tensor, and the name of these elements


def put_together(nodes: Nodes, names: Sequence[str], spread: Spread, scope: str, dtype: tf.DType, device: str) -> str:
    """Stages the whole of a divided tensor, from parts of these names."""
    return joined(nodes, [(part.ranges, name) for part, name in zip(spread.parts, names)], scope, dtype, device)


def joined(nodes: Nodes, pieces: Sequence[Piece], scope: str, dtype: tf.DType, device: str) -> str:
    """Stages what pieces form; the last op is named ``scope``."""
    rows, dims = itertools.count(), [one.dim for one in pieces[0][0]]

    def concat(values: List[str], dim: int) -> str:
        return nodes.concat(values, dim, scope if dim == dims[0] else f"{scope}/dim{dim}_{next(rows)}", dtype, device)
    return assembled(pieces, concat)


class _Joins(NamedTuple):
    """Attributes:
    is_gathered: whether several model replicas keep the parts, so that each puts them together.
    again: whether backward ops read the result, and others read another one.
    """

    stage: TaggedStage
    nodes: Nodes
    dtype: tf.DType
    is_gathered: bool
    again: bool

    def join(self, pieces: Sequence[Piece], scope: str, device: str) -> str:
        stage = self.stage
        before = stage.is_gathering, stage.is_backward
        stage.is_gathering, stage.is_backward = self.is_gathered, self.again or stage.is_backward
        try:
            return joined(self.nodes, pieces, scope, self.dtype, device)
        finally:
            stage.is_gathering, stage.is_backward = before


class Values:
    """Tensors that are no longer the local script's own, and conversions, each staged once.

    Args:
        stages: of every split TaskGraph; ``nodes`` stage there.
        counts: number of devices of every split TaskGraph.
        task_graph: TaskGraph of every op.
        replicated: numbers of the ``replicate`` TaskGraphs.
        moved_again: whether a tensor that is computed once is rearranged by an op that every device can repeat.
        move_again: ``(op, device, name of the operand there)``: repeats it, and returns the result's name.
    """

    def __init__(self, view: View, stages: Dict[int, TaggedStage], nodes: Dict[int, Nodes], counts: Dict[int, int],
                 task_graph: Sequence[int], replicated: Collection[int], root: str,
                 moved_again: Callable[[int, int], bool], move_again: Callable[[Op, int, str], str]) -> None:
        self._graph, self._view = view.graph, view
        self._task_graph, self._replicated = task_graph, replicated
        self.moved_again, self.move_again = moved_again, move_again
        self._stages, self._nodes, self._counts, self._root = stages, nodes, counts, root
        self._made: Dict[Tuple[int, Spread, int, bool], List[str]] = {}
        self._gathered: Dict[Tuple[int, int, bool], str] = {}
        self.shapes: Dict[str, Shape] = {}  # of slices, by name
        self.table: Dict[int, ShardedValue] = {}

    def made(self) -> Iterator[Tuple[int, Spread, Sequence[str]]]:
        """(tensor, spread, names) of everything that was made."""
        for tensor, value in self.table.items():
            yield tensor, value.spread, value.names
        for (tensor, spread, _, _), names in self._made.items():
            yield tensor, spread, names
        for (tensor, _, _), name in self._gathered.items():
            yield tensor, once, [name]

    def put(self, tensor: int, spread: Spread, names: List[str], task_graph: int) -> None:
        self.table[tensor] = ShardedValue(spread, tuple(names), task_graph)

    def whole(self, tensor: int, reader: Optional[int] = None) -> str:
        """The whole tensor, on the first device of the TaskGraph that has it, or in each replica of the one that reads it."""
        value = self.table.get(tensor)
        if value is None:
            return self._graph.tensor_name(tensor)
        if reader is None or reader not in self._replicated or value.spread == once or value.spread.kind == EACH:
            return self.parts(tensor, once, value.task_graph)[0]
        return self._converted(tensor, value, once, value.task_graph, reader)[0]

    def gathered(self, tensor: int, reader: int, is_backward: bool) -> str:
        """The whole of a sharded tensor for the forward or the backward ops of one TaskGraph, each of whose calls puts it
        together."""
        key = (tensor, reader, is_backward)
        if key not in self._gathered:
            stage, value = self._stages[reader], self.table[tensor]
            dtype = tf.as_dtype(self._graph.tensors[tensor].dtype).base_dtype
            scope = "{}/gathered{}/t{}/{}".format(
                self._root, "_again" if is_backward else "", reader, self._graph.tensor_name(tensor).replace(":", "_"))
            stage.is_backward, stage.is_gathering = is_backward, True
            self._gathered[key] = self._nodes[reader].concat(value.names, value.spread.dim, scope, dtype, "0")
            stage.is_backward, stage.is_gathering = False, False
        return self._gathered[key]

    def parts(self, tensor: int, need: Spread, task_graph: int) -> List[str]:
        """Names of a tensor's parts for the devices of a TaskGraph, spread as needed."""
        value = self.table.get(tensor)
        count = self._counts[task_graph]
        if value is None or (value.task_graph != task_graph and value.spread != once):
            value = ShardedValue(once, (self.whole(tensor),), task_graph)
        if value.spread == need or value.spread.kind == EACH:
            return list(value.names)
        if value.spread == once and need.kind == EVERYWHERE and self.moved_again(tensor, task_graph):
            return self._moved_everywhere(tensor, value.names[0], task_graph)
        if value.spread == once and not need.is_divided:
            return [value.names[0]] * (count if need.kind == EVERYWHERE else 1)
        where = self._maker(tensor, task_graph) if need.is_divided else task_graph
        return self._converted(tensor, value, need, task_graph, where)

    def _maker(self, tensor: int, task_graph: int) -> int:
        """The ``replicate`` TaskGraph that computes a tensor, else ``task_graph``."""
        own = self._task_graph[self._graph.tensors[tensor].op]
        return own if tensor not in self.table and own in self._replicated else task_graph

    def _converted(self, tensor: int, value: ShardedValue, need: Spread, task_graph: int, where: int) -> List[str]:
        """Args:
        where: the TaskGraph that the conversion belongs to."""
        is_gathered = any(part.replica for part in value.spread.tiles) and self._graph.producer(tensor).phase is Phase.FORWARD
        again = is_gathered and self._stages[where].is_backward
        key = (tensor, need, where if need == once else task_graph, again)
        if key not in self._made:
            stage, nodes = self._stages[where], self._nodes[where]
            before = stage.is_backward, stage.controls
            stage.is_backward, stage.controls = self._graph.producer(tensor).phase is Phase.BACKWARD, ()
            try:
                flat = self._graph.tensor_name(tensor).replace(":", "_")
                kind = f"dim{need.dim}" if need.is_shard else "tiles" if need.is_tiles else "whole"
                scope = f"{self._root}/{kind}{'_again' if again else ''}/{flat}"
                joins = _Joins(stage, nodes, tf.as_dtype(self._graph.tensors[tensor].dtype).base_dtype, is_gathered, again)
                self._made[key] = self._staged(tensor, value, need, self._counts[task_graph], scope, joins)
            finally:
                stage.is_backward, stage.controls = before
        return self._made[key]

    def _moved_everywhere(self, tensor: int, first: str, task_graph: int) -> List[str]:
        key = (tensor, everywhere, task_graph, False)
        if key not in self._made:
            op = self._graph.producer(tensor)
            operands = self.parts(op.inputs[0], everywhere, task_graph)
            self._made[key] = [first] + [self.move_again(op, i, operands[i]) for i in range(1, self._counts[task_graph])]
        return self._made[key]

    def _staged(self, tensor: int, value: ShardedValue, need: Spread, count: int, scope: str, joins: _Joins) -> List[str]:
        nodes, have, dtype = joins.nodes, value.spread, joins.dtype
        if need.is_divided:
            is_cut = need.is_shard and dtype.is_floating  # each source has something for every part
            if have == once and is_cut:
                return self._split(tensor, value.names[0], Tile(0), need, scope, joins)
            if have == once:
                return [self._slice(tensor, value.names[0], part.ranges, part.ranges, f"{scope}/part{i}", "0", joins)
                        for i, part in enumerate(need.parts)]
            # all slices first: a device that runs ops in this order then sends its slices before it waits for others
            if is_cut and (have.is_partial or (have.is_shard and have.dim != need.dim)):
                pieces = self._split_pieces(tensor, value, need, count, scope, joins)
            else:
                pieces = [self._pieces(tensor, value, part, count, f"{scope}/part{i}", joins)
                          for i, part in enumerate(need.parts)]
            if have.is_partial:
                return [nodes.add_n([name for _, name in pieces[i]], f"{scope}/sum{i}", dtype, str(part.device))
                        for i, part in enumerate(need.parts)]
            return [joins.join(pieces[i], f"{scope}/part{i}", str(part.device)) for i, part in enumerate(need.parts)]
        if have.is_partial:
            total = nodes.add_n(list(value.names), scope + "/sum", dtype, "0")
            return [total] * (count if need.kind == EVERYWHERE else 1)
        whole = [(part.ranges, name) for part, name in zip(have.parts, value.names)]
        if need.kind == EVERYWHERE:
            return [joins.join(whole, f"{scope}/concat{i}", str(i)) for i in range(count)]
        return [joins.join(whole, scope + "/concat", "0")]

    def _pieces(self, tensor: int, value: ShardedValue, need: Tile, count: int, scope: str, joins: _Joins) -> List[Piece]:
        """What a part under another division gets from each part; of terms of a sum, its part of each term."""
        sources = [Tile(j) for j in range(count)] if value.spread.is_partial else value.spread.parts
        pieces = []
        for j, (source, name) in enumerate(zip(sources, value.names)):
            common = need.common(source)
            if common is not None:
                own = source.inside(common)
                pieces.append((common, self._slice(tensor, name, own, common, f"{scope}/from{j}", str(source.device), joins)
                               if own else name))
        return pieces

    def _split_pieces(self, tensor: int, value: ShardedValue, need: Spread, count: int, scope: str,
                      joins: _Joins) -> List[List[Piece]]:
        """What each part along a dimension gets from each source, all of which have the whole dimension."""
        sources = [Tile(j) for j in range(count)] if value.spread.is_partial else value.spread.parts
        cut = [self._split(tensor, name, source, need, f"{scope}/from{j}", joins)
               for j, (source, name) in enumerate(zip(sources, value.names))]
        return [[(part.common(source) or (), names[i]) for source, names in zip(sources, cut)]
                for i, part in enumerate(need.parts)]

    def _split(self, tensor: int, name: str, source: Tile, need: Spread, scope: str, joins: _Joins) -> List[str]:
        """All parts along a dimension.

        Args:
            name: of the tensor, or of its part ``source``, which has the whole dimension.
        """
        shape = self._view.shape(tensor)
        assert shape is not None, "a tensor is divided along a dimension that its op's rule knows"
        names = joins.nodes.split(name, need.sizes, len(need.sizes), need.dim, scope, joins.dtype, str(source.device))
        for part, size in zip(names, need.sizes):
            sizes = {need.dim: size, **{one.dim: one.size for one in source.ranges}}
            self.shapes[tensor_name(part)] = tuple(sizes.get(dim, whole) for dim, whole in enumerate(shape))
        return names

    def _slice(self, tensor: int, name: str, ranges: Sequence[Range], common: Sequence[Range], scope: str, device: str,
               joins: _Joins) -> str:
        """Some elements of a tensor, or of a part of it.

        Args:
            ranges: within the part.
            common: within the tensor.
        """
        shape = self._view.shape(tensor)
        assert shape is not None, "a tensor is divided along a dimension that its op's rule knows"
        own = {one.dim: (one.start, one.size) for one in ranges}
        sliced = joins.nodes.slice_ranges(name, own, len(shape), scope, joins.dtype, device)
        sizes = {one.dim: one.size for one in common}
        self.shapes[sliced + ":0"] = tuple(sizes.get(dim, size) for dim, size in enumerate(shape))
        return sliced
