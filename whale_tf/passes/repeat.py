"""Chooses what a process computes again rather than receive it from another one.

A cheap op often takes less time than a message with its result.  So each value that a process needs is received, or computed from
values that are there, or from others that are received: whatever costs least.  What two processes contribute to and both need is
computed by both.  Then each receives the other's contribution at once, and not the result after one more message::

    as written     batch ──> one_hot (0) ══> product (1)            part (1) ══> sum (0) ──> root (0) ══> product (1)
    then           batch ──> one_hot (1) ──> product (1)            part (0) ══> sum (1) ──> root (1) ──> product (1)

Prices are in bytes of messages.
"""

from __future__ import annotations

from typing import AbstractSet, Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Set

import networkx as nx

from whale_tf.ir.walk import reached
from whale_tf.passes.partition import Node, Output

MESSAGE = 1e5  # what a message costs beside its bytes: a tenth of a millisecond at 1 GB/s
LATE = 1.5  # how much more it costs if its value follows from one that its receiver has to send first
WORK = 1 / 64  # of computing a byte, which the sender does anyway
MOST_VALUES = 8  # from which a node may follow


Needs = Dict[int, FrozenSet[Output]]


class Nodes(NamedTuple):
    """Attributes:
    all: as they are.
    is_cheap: whether any process may run a node.
    joins: whether a node adds up its operands, or puts them together.
    size: bytes of a value.
    """

    all: Sequence[Node]
    is_cheap: Callable[[int], bool]
    joins: Callable[[int], bool]
    size: Callable[[Output], float]


def find_repeats(nodes: Nodes, readers: Iterable[int], rank: int) -> List[int]:
    """The nodes of other processes that process ``rank`` runs, too, each after those that it reads.

    Args:
        readers: the nodes whose operands may change.
    """
    return _Repeats(nodes, rank).find([index for index in readers if nodes.all[index].owner == rank])


class _Repeats:
    """What one process runs.

    Attributes:
        received: what it receives.
        runs: nodes that it runs.
        late: nodes that follow from a value of this process and one of others.
        deepest: cheap node -> what it follows from by way of cheap nodes.
        best: cheap node that costs less to run than to receive -> what is received for that.
    """

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self._nodes, self._rank = nodes, rank
        self.received: Set[Output] = set()
        self.runs: Set[int] = set()
        self.late: Set[int] = set()
        self.deepest: Needs = {}
        self.best: Needs = {}

    def find(self, readers: Iterable[int]) -> List[int]:
        wanted: Dict[int, Set[Output]] = {}
        for output in (output for index in readers for output in self._elsewhere(index)):
            wanted.setdefault(output[0], set()).add(output)
        self.received |= {output for index in wanted if not self._nodes.is_cheap(index) for output in wanted[index]}
        order = self._in_order([index for index in wanted if self._nodes.is_cheap(index)])
        for index in order:
            self._decide(index, wanted.get(index, set()))
        return [index for index in order if index in self.runs]

    def _elsewhere(self, index: int) -> List[Output]:
        """What a node reads that the process does not have."""
        return [output for output in self._nodes.all[index].inputs if self._nodes.all[output[0]].owner not in (None, self._rank)
                and output[0] not in self.runs and output not in self.received]

    def _in_order(self, starts: Iterable[int]) -> List[int]:
        """Cheap nodes and those before them, each after those that it reads."""
        def before(index: int) -> List[int]:
            return [output[0] for output in self._elsewhere(index) if self._nodes.is_cheap(output[0])]

        graph = nx.DiGraph()
        graph.add_nodes_from(sorted(reached(starts, before)))
        graph.add_edges_from((one, index) for index in list(graph) for one in before(index))
        return list(nx.lexicographical_topological_sort(graph))

    def _decide(self, index: int, wanted: AbstractSet[Output]) -> None:
        values = self._elsewhere(index)
        if any(output[0] in self.late for output in values) or (self._nodes.joins(index) and any(
                self._nodes.all[output[0]].owner == self._rank for output in self._nodes.all[index].inputs)):
            self.late.add(index)
        found = [frozenset().union(*(known.get(output[0], [output]) for output in values)) - self.received
                 for known in (self.deepest, self.best)]
        deepest, best = found
        receive = sum(map(self._price, wanted or [(index, 0)]))
        if not wanted:
            if len(deepest) <= MOST_VALUES:
                self.deepest[index] = deepest
            if self._cost(best) + WORK * self._nodes.size((index, 0)) < receive:
                self.best[index] = best
            return
        ways = []
        for needs, known in zip(found, (self.deepest, self.best)):
            runs = reached([index], lambda one: [output[0] for output in self._elsewhere(one) if output[0] in known])
            ways.append((self._cost(needs) + WORK * sum(self._nodes.size((one, 0)) for one in runs), needs, runs))
        cost, needs, runs = min(ways, key=lambda way: way[0])
        if cost < receive:
            self.received |= needs
            self.runs |= runs
        else:
            self.received |= wanted

    def _cost(self, values: Iterable[Output]) -> float:
        return sum(map(self._price, values))

    def _price(self, output: Output) -> float:
        """Of receiving a value."""
        return (MESSAGE + self._nodes.size(output)) * (LATE if output[0] in self.late else 1)
