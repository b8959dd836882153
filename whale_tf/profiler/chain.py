"""A captured graph as a chain of segments; the model can be cut into pipeline stages between any two of them.

The forward ops are put in a topological order, so any contiguous run of them is convex.  Ops that depend on both a variable
and an example keep their place in creation order.  All others (reads of variables, constants, masks and labels computed from
inputs) move to just before their first reader, so that no cut sends a value that could be computed after it::

    script       labels  mask | layer 0 | layer 1 | loss            mask is read by layer 1, labels by the loss
    chain        layer 0 | mask layer 1 | labels loss

Loops, and all ops that use the same tensor array, stay in one segment.  Backward ops follow their forward ops.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from whale_tf.errors import PlanError
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import Region, inseparable
from whale_tf.ir.traits import SAME_BUFFER, SHAPE_ONLY, VARIABLES
from whale_tf.ir.units import lists
from whale_tf.ir.walk import reached
from whale_tf.profiler.op_cost import OpCost, tensor_bytes


class Chain(NamedTuple):
    """One row per segment; FLOPs and bytes are for the whole mini-batch.

    Attributes:
        graph: the ops.
        ops: numbers of the segment's forward ops; the last one names the segment.
        backward: numbers of all its other ops.
        forward_flops, backward_flops: FLOPs of contractions, which are limited by arithmetic.
        traffic_bytes: bytes read and written by all other ops, forward and backward.
        launches: number of ops that run a kernel, forward and backward.
        parameter_bytes: bytes of variables whose first reader is in this segment.
        activation_bytes: bytes computed here and read by backward ops.
        crossing_bytes: bytes computed here or before and read by later forward ops.
        batch: examples in the mini-batch.
        state_bytes: the whole model's optimizer state, without parameters and gradients.
    """

    graph: OpGraph
    ops: Tuple[Tuple[int, ...], ...]
    backward: Tuple[Tuple[int, ...], ...]
    forward_flops: np.ndarray
    backward_flops: np.ndarray
    traffic_bytes: np.ndarray
    launches: np.ndarray
    parameter_bytes: np.ndarray
    activation_bytes: np.ndarray
    crossing_bytes: np.ndarray
    batch: int
    state_bytes: int = 0

    @property
    def size(self) -> int:
        """Number of segments."""
        return len(self.ops)

    def merged(self, starts: Sequence[int]) -> Chain:
        """The chain with only the cuts before segments ``starts`` (sorted, from 0)."""
        ends = [*starts[1:], self.size]
        return self.grouped([range(a, b) for a, b in zip(starts, ends)], self.crossing_bytes[np.array(ends) - 1])

    def grouped(self, rows: Sequence[Sequence[int]], crossing_bytes: np.ndarray) -> Chain:
        """The chain with one segment for each row of segments, after which ``crossing_bytes`` cross."""

        def total(values: np.ndarray) -> np.ndarray:
            return np.array([values[list(row)].sum() for row in rows])

        def joined(ops: Sequence[Tuple[int, ...]]) -> Tuple[Tuple[int, ...], ...]:
            return tuple(tuple(op for segment in row for op in ops[segment]) for row in rows)

        return Chain(
            self.graph, joined(self.ops), joined(self.backward), total(self.forward_flops), total(self.backward_flops),
            total(self.traffic_bytes), total(self.launches), total(self.parameter_bytes), total(self.activation_bytes),
            crossing_bytes, self.batch, self.state_bytes)

    def name(self, segment: int) -> str:
        return self.graph.ops[self.ops[segment][-1]].name


def chain_of(region: Region, costs: Sequence[OpCost], parameter_bytes: Mapping[int, int], batch: int) -> Chain:
    """The chain of a graph's parallel region.

    Args:
        costs: costs of every op of the graph, with static shapes.
        parameter_bytes: size of each trainable variable (or of the constant that replaces one), by its op.
        batch: examples in the mini-batch for which the shapes hold.

    If no op depends on both an example and a variable, the chain is a single segment.

    Raises:
        PlanError: the graph has no forward ops.
    """
    order, starts = linear_order(region, frozenset(parameter_bytes))
    if not order:
        raise PlanError("the model has no forward ops, so there is nothing to divide into stages")
    starts = starts or [0]
    ends = starts[1:] + [len(order)]
    segments = tuple(tuple(order[a:b]) for a, b in zip(starts, ends))
    place = {op: number for number, segment in enumerate(segments) for op in segment}
    _place_rest(region, place, len(segments))
    rows = {name: np.zeros(len(segments)) for name in ("forward", "backward", "traffic", "launches", "parameters")}
    early = set(order)
    backward: List[List[int]] = [[] for _ in segments]
    for index in region.ops:
        cost, row = costs[index], place[index]
        if index not in early:
            backward[row].append(index)
        if cost.is_contraction:
            rows["forward" if index in early else "backward"][row] += cost.flops
        else:
            rows["traffic"][row] += cost.bytes
        rows["launches"][row] += cost.flops > 0 or cost.bytes > 0
        rows["parameters"][row] += parameter_bytes.get(index, 0)
    return Chain(
        region.graph, segments, tuple(map(tuple, backward)), rows["forward"], rows["backward"], rows["traffic"],
        rows["launches"], rows["parameters"], _activations(region, place, len(segments)),
        _crossings(region, early, place, len(segments)), batch)


def needed_by_updates(graph: OpGraph) -> Set[int]:
    """Ops that some variable update waits for; no other ops of the backward pass run."""
    return reached((op.id for op in graph.ops if op.phase is Phase.APPLY),
                   lambda index: (graph.tensors[t].op for t in graph.ops[index].inputs))


def linear_order(region: Region, parameters: FrozenSet[int] = frozenset()) -> Tuple[List[int], List[int]]:
    """The forward ops (except those computed from a gradient) in chain order, and the places where segments start.

    Args:
        parameters: additional ops that count as variables.
    """
    graph = region.graph
    forward = [i for i in region.ops if graph.ops[i].phase is Phase.FORWARD and i not in region.late]
    units = [unit & set(forward) for unit in inseparable(region) + lists(graph, [graph.ops[i] for i in forward])]
    anchored = _anchored(region, forward, units, parameters)
    keys = _keys(graph, forward, anchored)
    order = sorted(forward, key=lambda i: (keys[i], i in anchored, i))
    position = {op: number for number, op in enumerate(order)}
    allowed = {0} | {position[op] + 1 for op in order if op in anchored}
    for unit in units:
        places = [position[op] for op in unit]
        if places:
            allowed -= set(range(min(places) + 1, max(places) + 1))
    last = max((position[op] for op in anchored), default=-1)
    return order, sorted(place for place in allowed if place <= last)


def _anchored(region: Region, forward: Sequence[int], units: Sequence[Set[int]], parameters: FrozenSet[int]) -> Set[int]:
    """Ops that depend on both an example and a variable; each unit is included as a whole or not at all."""
    graph = region.graph
    needs_variable: Set[int] = set()
    for index in forward:
        op = graph.ops[index]
        if op.type in VARIABLES or index in parameters or any(p in needs_variable for p in graph.predecessors(op)):
            needs_variable.add(index)
    anchored = needs_variable & region.batch_level
    for unit in units:
        if not anchored.isdisjoint(unit):
            anchored |= unit
    return anchored


def _keys(graph: OpGraph, forward: Sequence[int], anchored: Set[int]) -> Dict[int, int]:
    """The anchored op that determines each op's place: itself, or its first reader; the end if there is none."""
    members = set(forward)
    keys: Dict[int, int] = {}
    first_reader: Dict[int, int] = {}
    for index in reversed(forward):
        keys[index] = index if index in anchored else first_reader.get(index, len(graph.ops))
        for source in graph.predecessors(graph.ops[index]):
            if source in members and source < index:
                first_reader[source] = min(first_reader.get(source, keys[index]), keys[index])
    return keys


def _place_rest(region: Region, place: Dict[int, int], count: int) -> None:
    """Assign segments to backward ops, and to forward ops after a gradient, by the same rule as TaskGraphs."""
    graph = region.graph
    for index in region.ops:
        op = graph.ops[index]
        if index in place:
            continue
        if op.forward in place:
            place[index] = place[op.forward]
            continue
        sources = [p for p in graph.predecessors(op) if p in place]
        late = [place[p] for p in sources if p in region.late]
        place[index] = min(late) if late else max([place[p] for p in sources], default=count - 1)


def buffer_of(graph: OpGraph, tensor: int) -> int:
    """The tensor whose buffer this one shares."""
    op = graph.producer(tensor)
    while op.type in SAME_BUFFER and op.inputs:
        tensor = op.inputs[0]
        op = graph.producer(tensor)
    return tensor


def shares_buffer(op: Op) -> bool:
    """Whether an op's first result is in its first operand's buffer."""
    return op.type in SAME_BUFFER and bool(op.inputs and op.outputs)


def _activations(region: Region, place: Mapping[int, int], count: int) -> np.ndarray:
    """Bytes of each segment's tensors that backward ops read."""
    graph = region.graph
    kept = {buffer_of(graph, tensor) for index in region.late if graph.ops[index].type not in SHAPE_ONLY
            for tensor in graph.ops[index].inputs}
    sizes = np.zeros(count)
    for tensor in kept:
        producer = graph.tensors[tensor].op
        if producer in region.batch_level and producer not in region.late and producer in place:
            sizes[place[producer]] += tensor_bytes(graph, tensor)
    return sizes


def _crossings(region: Region, early: Set[int], place: Mapping[int, int], count: int) -> np.ndarray:
    """Bytes that cross after each segment: tensors of the batch computed there or before and read by later forward ops."""
    graph = region.graph
    steps = np.zeros(count + 1)
    for index in early & region.batch_level:
        for tensor in graph.ops[index].outputs:
            readers = [place[op] for op, _ in graph.consumers(tensor) if op in early]
            if readers and max(readers) > place[index]:
                size = tensor_bytes(graph, tensor)
                steps[place[index]] += size
                steps[max(readers)] -= size
    return np.cumsum(steps)[:count]


def signature(op: Op, graph: OpGraph) -> Tuple[object, ...]:
    """Key for matching ops of repeated blocks: type and shapes."""
    return (op.type,) + tuple(graph.tensors[tensor].shape for tensor in op.outputs)
