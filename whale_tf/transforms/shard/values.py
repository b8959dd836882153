"""The parts of divided tensors, and the communication that turns one spread into another.

::

    shard -> once         ConcatV2 on the first device          partial -> once         AddN on the first device
    shard -> everywhere   ConcatV2 on every device              partial -> shard        Slice on every device, AddN where needed
    once -> shard         Slice on the first device             shard -> another shard  Slice on every device, ConcatV2

At the border of a ``replicate`` TaskGraph, ``once`` means: in parts of the batch, on all its devices.  So each replica slices the
TaskGraph's tensors where it computes them, and a ``split`` part gathers its slice over the batch.  If a ``replicate`` TaskGraph
reads a whole tensor, each replica puts it together there, from its own examples of the parts.  Whale fuses the bridge's gather
and the partition after it (section 3.2.3); here they are never separate: both directions are an all-to-all, and ``partial`` terms
are a reduce-scatter over the batch, so no device has the whole.
"""

from __future__ import annotations

from typing import Callable, Collection, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op, Phase, Shape
from whale_tf.ir.rules import View
from whale_tf.patterns.spread import EACH, EVERYWHERE, Spread, everywhere, once
from whale_tf.transforms.shard.tags import TaggedStage


class Value(NamedTuple):
    """Names of a tensor's parts, one for each device; for ``once`` a single name."""

    spread: Spread
    names: Tuple[str, ...]
    task_graph: int


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
        self._made: Dict[Tuple[int, Spread, int], List[str]] = {}
        self._gathered: Dict[Tuple[int, int, bool], str] = {}
        self.shapes: Dict[str, Shape] = {}  # of slices, by name
        self.table: Dict[int, Value] = {}

    def made(self) -> Iterator[Tuple[int, Spread, Sequence[str]]]:
        """(tensor, spread, names) of everything that was made."""
        for tensor, value in self.table.items():
            yield tensor, value.spread, value.names
        for (tensor, spread, _), names in self._made.items():
            yield tensor, spread, names
        for (tensor, _, _), name in self._gathered.items():
            yield tensor, once, [name]

    def put(self, tensor: int, spread: Spread, names: List[str], task_graph: int) -> None:
        self.table[tensor] = Value(spread, tuple(names), task_graph)

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
            value = Value(once, (self.whole(tensor),), task_graph)
        if value.spread == need or value.spread.kind == EACH:
            return list(value.names)
        if value.spread == once and need.kind == EVERYWHERE and self.moved_again(tensor, task_graph):
            return self._moved_everywhere(tensor, value.names[0], task_graph)
        if value.spread == once and not need.is_shard:
            return [value.names[0]] * (count if need.kind == EVERYWHERE else 1)
        return self._converted(tensor, value, need, task_graph, self._maker(tensor, task_graph) if need.is_shard else task_graph)

    def _maker(self, tensor: int, task_graph: int) -> int:
        """The ``replicate`` TaskGraph that computes a tensor, else ``task_graph``."""
        home = self._task_graph[self._graph.tensors[tensor].op]
        return home if tensor not in self.table and home in self._replicated else task_graph

    def _converted(self, tensor: int, value: Value, need: Spread, task_graph: int, where: int) -> List[str]:
        """Args:
        where: the TaskGraph that the conversion belongs to."""
        key = (tensor, need, where if need == once else task_graph)
        if key not in self._made:
            self._made[key] = self._convert(tensor, value, need, task_graph, where)
        return self._made[key]

    def _moved_everywhere(self, tensor: int, first: str, task_graph: int) -> List[str]:
        key = (tensor, everywhere, task_graph)
        if key not in self._made:
            op = self._graph.producer(tensor)
            operands = self.parts(op.inputs[0], everywhere, task_graph)
            self._made[key] = [first] + [self.move_again(op, i, operands[i]) for i in range(1, self._counts[task_graph])]
        return self._made[key]

    def _convert(self, tensor: int, value: Value, need: Spread, task_graph: int, where: int) -> List[str]:
        stage = self._stages[where]
        before = stage.is_backward, stage.controls
        stage.is_backward, stage.controls = self._graph.producer(tensor).phase is Phase.BACKWARD, ()
        try:
            return self._staged(tensor, value, need, task_graph, where)
        finally:
            stage.is_backward, stage.controls = before

    def _staged(self, tensor: int, value: Value, need: Spread, task_graph: int, where: int) -> List[str]:
        nodes, have, count = self._nodes[where], value.spread, self._counts[task_graph]
        dtype = tf.as_dtype(self._graph.tensors[tensor].dtype).base_dtype
        flat = self._graph.tensor_name(tensor).replace(":", "_")
        scope = "{}/{}/{}".format(self._root, "whole" if not need.is_shard else f"dim{need.dim}", flat)
        if need.is_shard:
            if have == once:
                return [self._slice(tensor, value.names[0], need.dim, need.starts[i], need.sizes[i],
                                    f"{scope}/part{i}", "0", nodes) for i in range(count)]
            # all slices first: a device that runs ops in this order then sends its slices before it waits for others
            pieces = [self._pieces(tensor, value, need, i, f"{scope}/part{i}", nodes) for i in range(count)]
            if have.is_partial:
                return [nodes.add_n(pieces[i], f"{scope}/sum{i}", dtype, str(i)) for i in range(count)]
            return [nodes.concat(pieces[i], have.dim, f"{scope}/part{i}", dtype, str(i)) for i in range(count)]
        if have.is_partial:
            total = nodes.add_n(list(value.names), scope + "/sum", dtype, "0")
            return [total] * (count if need.kind == EVERYWHERE else 1)
        if need.kind == EVERYWHERE:
            return [nodes.concat(list(value.names), have.dim, f"{scope}/concat{i}", dtype, str(i)) for i in range(count)]
        return [nodes.concat(list(value.names), have.dim, scope + "/concat", dtype, "0")]

    def _pieces(self, tensor: int, value: Value, need: Spread, i: int, scope: str, nodes: Nodes) -> List[str]:
        """What device ``i`` gets from each device under another division; for terms of a sum, its part of each term."""
        have, pieces = value.spread, []
        for j, name in enumerate(value.names):
            if have.is_partial or have.dim != need.dim:
                begin, size = need.starts[i], need.sizes[i]
            else:
                begin = max(need.starts[i], have.starts[j])
                size = min(need.starts[i] + need.sizes[i], have.starts[j] + have.sizes[j]) - begin
                begin -= have.starts[j]
            if size > 0:
                pieces.append(self._slice(tensor, name, need.dim, begin, size, f"{scope}/from{j}", str(j), nodes))
        return pieces

    def _slice(self, tensor: int, name: str, dim: int, begin: int, size: int, scope: str, device: str, nodes: Nodes) -> str:
        shape, dtype = self._view.shape(tensor), tf.as_dtype(self._graph.tensors[tensor].dtype).base_dtype
        assert shape is not None, "a tensor is divided along a dimension that its op's rule knows"
        sliced = nodes.slice_dim(name, dim, len(shape), begin, size, scope, dtype, device)
        self.shapes[sliced + ":0"] = (*shape[:dim], size, *shape[dim + 1:])
        return sliced
