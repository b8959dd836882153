"""Chooses what a process computes again rather than receive it from another one.

A cheap op often takes less time than a message with its result.  So each value that a process needs is received, or computed from
values that are there, or from others that are received: whatever costs least.  What two processes contribute to and both need is
computed by both.  Then each receives the other's contribution at once, and not the result after one more message::

    as written     batch ──> one_hot (0) ══> product (1)            part (1) ══> sum (0) ──> root (0) ══> product (1)
    then           batch ──> one_hot (1) ──> product (1)            part (0) ══> sum (1) ──> root (1) ──> product (1)

The least that a process pays for all it needs, in bytes of messages, is a minimum cut: of a value that is needed, either the
message is paid, or the work of its op, and then what that op reads is needed, too::

    start ──> sum ──(its message)──> run ──(work)──> end
                                      └──────> part ──(its message)──> end
"""

from __future__ import annotations

from typing import Callable, Iterable, List, NamedTuple, Sequence, Set, Union

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from whale_tf.ir.walk import reached
from whale_tf.passes.partition import Node, Output
from whale_tf.passes.sums import adds_one_of_each

MESSAGE = 1e5  # what a message costs beside its bytes: a tenth of a millisecond at 1 GB/s
LATE = 1.5  # how much more it costs if its value follows from one that its receiver has to send first
WORK = 1 / 64  # of computing a byte, which the sender does anyway
_START, _END = "start", "end"


class Nodes(NamedTuple):
    """Attributes:
    all: as they are.
    is_cheap: whether any process may run a node.
    joins: whether a node adds up its operands, or puts them together.
    size: bytes of a value.
    adds_up: whether a node is a sum that processes can compute together (:mod:`whale_tf.passes.sums`).
    """

    all: Sequence[Node]
    is_cheap: Callable[[int], bool]
    joins: Callable[[int], bool]
    size: Callable[[Output], float]
    adds_up: Callable[[int], bool] = lambda index: False


def find_repeats(nodes: Nodes, readers: Iterable[int], rank: int) -> List[int]:
    """The nodes of other processes that process ``rank`` runs, too, each after those that it reads.

    Args:
        readers: the nodes whose operands may change.
    """
    def elsewhere(index: int) -> List[Output]:
        """What a node reads that the process does not have."""
        return [output for output in nodes.all[index].inputs if nodes.all[output[0]].owner not in (None, rank)]

    wanted = list(dict.fromkeys(output for index in readers if nodes.all[index].owner == rank for output in elsewhere(index)))
    order = _in_order([index for index, _ in wanted if nodes.is_cheap(index)], lambda index: [
        output[0] for output in elsewhere(index) if nodes.is_cheap(output[0])])
    late: Set[int] = set()  # they follow from a value of this process and one of others
    for index in order:
        joins = nodes.joins(index) and any(nodes.all[output[0]].owner == rank for output in nodes.all[index].inputs)
        if joins or any(output[0] in late for output in elsewhere(index)):
            late.add(index)
    later = late - {index for index in late if nodes.adds_up(index) and adds_one_of_each(nodes.all, index)}
    graph, cheap = nx.DiGraph(), set(order)
    graph.add_nodes_from([_START, _END])

    def need(vertex: Union[int, str], output: Output) -> None:
        graph.add_edge(vertex, output)
        message = round((MESSAGE + nodes.size(output)) * (LATE if output[0] in later else 1))  # sums of integers are exact
        graph.add_edge(output, output[0] if output[0] in cheap else _END, capacity=message)

    for output in wanted:
        need(_START, output)
    for index in order:
        graph.add_edge(index, _END, capacity=round(WORK * nodes.size((index, 0))))
        for output in elsewhere(index):
            need(index, output)
    flows = boykov_kolmogorov(graph, _START, _END)
    needed = reached([_START], lambda vertex: [to for to, edge in flows[vertex].items() if edge["flow"] < edge["capacity"]])
    return [index for index in order if index in needed]


def _in_order(starts: Iterable[int], before: Callable[[int], List[int]]) -> List[int]:
    """Nodes and those before them, each after those that it reads."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(reached(starts, before)))
    graph.add_edges_from((one, index) for index in list(graph) for one in before(index))
    return list(nx.lexicographical_topological_sort(graph))
