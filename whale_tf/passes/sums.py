"""Finds the sums that processes compute together: each adds a value of its own, and each reads the result.

One collective takes the place of the messages with the operands and of those with the result::

    process 0    part ──┬─> AddN ──> ...              process 0    part ──> CollectiveReduce ──> ...
                        ║    ^            becomes                                ║
    process 1    part ══╧════╝ (or AddN here, too)    process 1    part ──> CollectiveReduce ──> ...
"""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Set, Tuple

from whale_tf.passes.partition import Crossing, Node, Output, Partition


class Sum(NamedTuple):
    """Attributes:
    output: the result, in the process that computes it for others.
    operands: process -> what it adds.
    nodes: all that compute the sum, each in another process.
    """

    output: Output
    operands: Mapping[int, Output]
    nodes: FrozenSet[int]


def adds_one_of_each(nodes: Sequence[Node], index: int) -> bool:
    """Whether the operands of a sum are of different processes."""
    owners = {nodes[output[0]].owner for output in nodes[index].inputs}
    return len(owners) == len(nodes[index].inputs) > 1 and None not in owners and nodes[index].owner in owners


def find_sums(nodes: Sequence[Node], found: Partition, is_sum: Callable[[int], bool]) -> Tuple[List[Sum], List[Crossing]]:
    """See the module's docstring.

    Args:
        is_sum: whether a node adds up its operands, in any order.

    Returns:
        The sums, and the values that still cross in messages.
    """
    readers: Dict[Tuple[Output, int], Set[int]] = {}
    waited: Set[int] = set()
    alike: Dict[FrozenSet[Output], Dict[int, int]] = {}  # operands -> process -> the node that adds them up there
    for index, node in enumerate(nodes):
        if found.runs[index]:
            waited.update(node.waits)
            for output in node.inputs:
                for rank in found.runs[index]:
                    readers.setdefault((output, rank), set()).add(index)
            if node.owner is not None and is_sum(index) and adds_one_of_each(nodes, index):
                alike.setdefault(frozenset(node.inputs), {}).setdefault(node.owner, index)
    crossings = dict.fromkeys(found.crossings)
    sums: List[Sum] = []
    taken: Set[int] = set()  # nodes of sums and of their operands: none is both
    for operands, adders in alike.items():
        members = {owner: output for output in operands for owner in [nodes[output[0]].owner] if owner is not None}
        results = {(index, 0) for index in adders.values()}
        ours = [crossing for crossing in crossings if crossing.output in operands | results]
        has_result = {*adders, *(crossing.receiver for crossing in ours if crossing.output in results)}
        is_only_use = all(readers[crossing.output, crossing.receiver] <= set(adders.values()) for crossing in ours
                          if crossing.output in operands)
        part = {index for index, _ in operands | results}
        if has_result == members.keys() and is_only_use and waited.isdisjoint(adders.values()) and taken.isdisjoint(part):
            sums.append(Sum(min(results), members, frozenset(adders.values())))
            taken |= part
            for crossing in ours:
                del crossings[crossing]
    return sums, list(crossings)
