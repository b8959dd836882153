"""Sums that processes compute together."""
from __future__ import annotations

from typing import List, Sequence, Set, Tuple

from whale_tf.passes.partition import Node, partition
from whale_tf.passes.sums import find_sums


def sums(nodes: Sequence[Node], adds: Set[int], processes: int = 2) -> List[Tuple[List[int], int]]:
    """Of each sum the processes that add something, and how many messages remain."""
    found = partition(nodes, range(len(nodes)), range(processes))
    together, crossings = find_sums(nodes, found, adds.__contains__)
    return [(sorted(one.operands), len(crossings)) for one in together]


def reads(owner: object, *inputs: int, waits: Sequence[int] = ()) -> Node:
    return Node(owner, tuple((index, 0) for index in inputs), tuple(waits))  # type: ignore[arg-type]


def test_each_process_reads_the_sum() -> None:
    assert sums([reads(0), reads(1), reads(0, 0, 1), reads(0, 2), reads(1, 2)], {2}) == [([0, 1], 0)]
    assert sums([reads(0), reads(1), reads(0, 0, 1), reads(None, 2)], {2}) == [([0, 1], 0)]  # a result that all have


def test_each_process_computes_the_sum() -> None:
    both = [reads(0), reads(1), reads(0, 0, 1), reads(1, 1, 0), reads(0, 2), reads(1, 3)]
    assert sums(both, {2, 3}) == [([0, 1], 0)]
    assert sums([*both[:-1], reads(1, 3, 2)], {2, 3}) == [([0, 1], 0)]  # and reads the other one's, too


def test_sums_of_many_processes() -> None:
    parts = [reads(rank) for rank in range(4)]
    assert sums([*parts, reads(2, 0, 1, 2, 3), *(reads(rank, 4) for rank in range(4))], {4}, 4) == [([0, 1, 2, 3], 0)]
    assert sums([*parts, reads(2, 0, 1, 2, 3), *(reads(rank, 4) for rank in range(3))], {4}, 4) == []  # one does not need it
    assert sums([*parts, reads(2, 0, 1, 2), *(reads(rank, 4) for rank in range(4))], {4}, 4) == []  # one adds nothing


def test_other_uses_need_messages() -> None:
    """What else is read has to cross, and what others wait for has to be there by itself."""
    nodes = [reads(0), reads(1), reads(0, 0, 1), reads(0, 2), reads(1, 2)]
    assert sums([*nodes, reads(0, 1)], {2}) == []
    assert sums([*nodes, reads(0, 0)], {2}) == [([0, 1], 0)]  # its own
    assert sums([*nodes, reads(0, 3, waits=[2])], {2}) == []
    assert sums(nodes, set()) == []


def test_sums_of_sums_are_messages() -> None:
    nodes = [reads(0), reads(1), reads(0, 0, 1), reads(1, 1), reads(1, 2), reads(0, 2, 3), reads(1, 5)]
    assert sums(nodes, {2, 5}) == [([0, 1], 2)]


def test_operands_of_one_process_are_added_first() -> None:
    assert sums([reads(0), reads(1), reads(0), reads(0, 0, 1, 2), reads(1, 3)], {3}) == []
    assert sums([reads(0), reads(None), reads(0, 0, 1), reads(1, 2)], {2}) == []  # each has the other one
