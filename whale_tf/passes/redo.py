"""Chooses the forward ops that a backward pass repeats, so that fewer bytes live from forward to backward.

The tensors kept instead are a minimum cut, in bytes::

    x ──> half ──> product        wanted by the backward pass: half, sum, product
    └───> sum ───────┘            kept: x, sum                 repeated: half, product

A repeated op waits for the gradient with which its first reader combines it.  Otherwise all of them would run as soon as they
can, and their results would live as long as the tensors that were not kept.
"""

from __future__ import annotations

from typing import AbstractSet, Callable, Dict, Iterable, List, Sequence, Set, Tuple

import networkx as nx

from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.region import Region
from whale_tf.ir.traits import Buffer, traits
from whale_tf.profiler.op_cost import tensor_bytes

SOURCE, SINK = "source", "sink"


class Redo:
    """The ops that a backward pass repeats.

    Args:
        may: whether an op may be repeated.
        work: the cost of that, in bytes that must be saved.
        kept: tensors that are kept in any case.
        local: operands (op, position) that an op does not read when it is repeated.
    """

    def __init__(self, region: Region, may: Callable[[Op], bool], work: Callable[[Op], int],
                 kept: AbstractSet[int] = frozenset(), local: AbstractSet[Tuple[int, int]] = frozenset()) -> None:
        self._region, self._graph = region, region.graph
        self._sizes = one_example(region.graph)
        self._may, self._work, self._kept, self._local = may, work, kept, local

    def ops(self, wanted: Iterable[int]) -> Set[int]:
        """The ops to repeat; backward ops read their tensors ``wanted``."""
        redone: Set[int] = set()
        for network in self._networks([tensor for tensor in wanted if tensor not in self._kept]):
            _, (_, behind) = nx.minimum_cut(network, SOURCE, SINK)
            redone |= {key for kind, key in (node for node in behind if node != SINK) if kind == "op"}
        return redone

    def _networks(self, wanted: Sequence[int]) -> List[nx.DiGraph]:
        """The parts that are connected only by ops that are not repeated.

        A tensor on the source's side is computed in the forward pass only.  A cut edge ``op -> tensor`` is a tensor that is
        kept, and a cut edge ``source -> op`` is an op that is repeated.
        """
        whole, known = nx.Graph(), {}  # type: nx.Graph, Dict[int, bool]
        stack, edges = list(wanted), []  # type: List[int], List[Tuple]
        seen: Set[int] = set()
        while stack:
            tensor = stack.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            record = self._graph.tensors[tensor]
            op, node = self._graph.ops[record.op], ("tensor", tensor)
            if tensor in self._kept or not self._may(op):
                edges.append((SOURCE, node, self._price(tensor)))
                continue
            edges.append((("op", op.id), node, self._price(tensor)))
            if op.id not in known:
                known[op.id] = True
                edges.append((SOURCE, ("op", op.id), self._work(op)))
                for position, source in enumerate(op.inputs):
                    if (op.id, position) not in self._local:
                        edges.append((("tensor", source), ("op", op.id), None))
                        stack.append(source)
        edges += [(("tensor", tensor), SINK, None) for tensor in wanted]
        whole.add_edges_from((a, b) for a, b, _ in edges if a != SOURCE and b != SINK)
        part_of = {node: number for number, part in enumerate(nx.connected_components(whole)) for node in part}
        networks: Dict[int, nx.DiGraph] = {}
        for a, b, capacity in edges:
            number = part_of.get(b if a == SOURCE else a)
            if number is not None:  # otherwise there is nothing to choose
                network = networks.setdefault(number, nx.DiGraph())
                network.add_edge(a, b, **({} if capacity is None else {"capacity": capacity}))
        return list(networks.values())

    def _price(self, tensor: int) -> int:
        """Bytes that keeping a tensor costs.  Tensors that all micro-batches share are kept anyway."""
        if tensor in self._kept:
            return 0
        producer = self._graph.producer(tensor)
        batch = self._region.batch
        if producer.id not in self._region.batch_level and (
                tensor not in batch.layouts or not batch.layout(tensor).is_sharded):
            return 0
        while traits(producer.type).buffer is Buffer.SAME and producer.inputs:
            tensor = producer.inputs[0]
            producer = self._graph.producer(tensor)
        return max(tensor_bytes(self._sizes, tensor), 1)


def one_example(graph: OpGraph) -> OpGraph:
    """The graph with 1 for every size that it leaves open."""
    return graph.with_shapes({
        t: tuple(1 if size is None else size for size in record.shape)
        for t, record in enumerate(graph.tensors) if record.shape is not None and None in record.shape})


def first_readers(graph: OpGraph, redone: AbstractSet[int], own: AbstractSet[int]) -> Dict[int, int]:
    """Repeated op -> the first op in graph order, among ``own``, the backward ops, that needs it."""
    first: Dict[int, int] = {}
    for index in sorted(redone, reverse=True):
        readers = [user for t in graph.ops[index].outputs for user, _ in graph.consumers(t)]
        first[index] = min(first.get(user, user) for user in readers if user in redone or user in own)
    return first


def waits(graph: OpGraph, redone: AbstractSet[int], own: AbstractSet[int]) -> Dict[int, int]:
    """Repeated op -> op among ``own`` for which it waits.

    Its first reader in graph order also reads a gradient.  No op from which this gradient is computed reads the repeated op,
    since that reader would come before the first one.
    """
    found: Dict[int, int] = {}
    for index, reader in first_readers(graph, redone, own).items():
        before = [p for p in graph.predecessors(graph.ops[reader]) if p in own]
        if before:
            found[index] = max(before)
    return found


def in_order(graph: OpGraph, redone: AbstractSet[int], own: AbstractSet[int]) -> List[int]:
    """The ops of a backward pass in an order in which they can run: a repeated op comes right before its first reader."""
    first = first_readers(graph, redone, own)
    return sorted([*first, *own], key=lambda index: (first.get(index, index), index not in first, index))
