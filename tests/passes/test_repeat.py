"""What processes compute again in place of messages."""
from __future__ import annotations

import itertools
import random
from typing import Dict, List, Sequence, Set, Tuple

import pytest

from whale_tf.passes.partition import Crossing, Node, partition
from whale_tf.passes.repeat import LATE, MESSAGE, WORK, Nodes, find_repeats

LARGE, SMALL = 4e6, 4e3


def repeats(nodes: Sequence[Node], rank: int, cheap: Set[int], joins: Set[int] = frozenset(),  # type: ignore[assignment]
            sizes: Sequence[float] = ()) -> List[int]:
    known = Nodes(nodes, cheap.__contains__, joins.__contains__, lambda output: sizes[output[0]] if sizes else SMALL)
    return find_repeats(known, range(len(nodes)), rank)


def reads(owner: object, *inputs: int) -> Node:
    return Node(owner, tuple((index, 0) for index in inputs))  # type: ignore[arg-type]


def test_what_follows_from_common_values_is_computed_by_its_readers() -> None:
    nodes = [reads(None), reads(0), reads(0, 0, 1), reads(0, 2), reads(1, 3), reads(1, 2)]
    assert repeats(nodes, 1, {1, 2, 3}) == [1, 2, 3]
    assert repeats(nodes, 1, {1, 2}) == [1, 2]  # 3 is received, 5 reads 2
    assert repeats(nodes, 0, {1, 2, 3}) == []


def test_sum_of_two_processes_is_computed_by_both() -> None:
    part, other, total, root, reader = range(5)
    nodes = [reads(0), reads(1), reads(0, part, other), reads(0, total), reads(1, root)]
    assert repeats(nodes, 1, {total, root}, {total}) == [total, root]
    assert repeats(nodes, 1, {total, root}, {total}, [LARGE, LARGE, LARGE, SMALL, LARGE]) == []  # the root is a smaller message


def test_sums_of_many_processes_stay_with_one() -> None:
    nodes = [*(reads(rank) for rank in range(8)), reads(0, *range(8)), *(reads(rank, 8) for rank in range(8))]
    assert all(repeats(nodes, rank, {8}, {8}) == [] for rank in range(8))


def test_boundaries_of_stages_stay() -> None:
    """Moving the activation to the next stage would save no message."""
    batch, product, activation, following, loss = range(5)
    nodes = [reads(None), reads(0, batch), reads(0, product), reads(1, activation), reads(1, following, batch)]
    assert repeats(nodes, 1, {activation}) == []


def test_what_grows_is_sent_before_it_does() -> None:
    value, mask, reader = range(3)
    nodes = [reads(0), reads(0, value), reads(1, mask)]
    assert repeats(nodes, 1, {mask}, sizes=[SMALL, LARGE, LARGE]) == [mask]
    assert repeats(nodes, 1, {mask}, sizes=[LARGE, SMALL, LARGE]) == []


def test_values_that_are_received_anyway_are_used() -> None:
    nodes = [reads(0), reads(0, 0), reads(0, 0, 1), reads(1, 0), reads(1, 2)]
    assert repeats(nodes, 1, {1, 2}) == [1, 2]


def test_sums_of_many_processes_in_a_collective() -> None:
    """Each reads the sum as soon as process 0 does, and computes the root again rather than wait for one more message."""
    nodes = [*(reads(rank) for rank in range(4)), reads(0, *range(4)), reads(0, 4), *(reads(rank, 5) for rank in range(4))]
    together = Nodes(nodes, {4, 5}.__contains__, {4}.__contains__, lambda output: SMALL, {4}.__contains__)
    assert all(find_repeats(together, range(len(nodes)), rank) == [5] for rank in range(1, 4))
    assert all(repeats(nodes, rank, {4, 5}, {4}) == [] for rank in range(1, 4))


@pytest.mark.parametrize("seed", range(30))
def test_nothing_costs_less(seed: int) -> None:
    """No other set of nodes would make the process pay less for messages and work."""
    rng = random.Random(seed)
    nodes: List[Node] = []
    for index in range(14):
        nodes.append(reads(rng.choice([0, 0, 1]), *sorted(rng.sample(range(index), min(index, rng.randrange(4))))))
    cheap = [index for index, node in enumerate(nodes) if node.owner == 0 and rng.random() < 0.8]
    sizes = [rng.choice([SMALL, LARGE]) for _ in nodes]

    def cost(runs: Set[int]) -> int:
        read = {one for index, node in enumerate(nodes) if node.owner == 1 or index in runs for one, _ in node.inputs}
        messages = [MESSAGE + sizes[one] for one in read - runs if nodes[one].owner == 0]
        return sum(map(round, messages)) + sum(round(WORK * sizes[one]) for one in runs)

    least = min(cost(set(runs)) for count in range(len(cheap) + 1) for runs in itertools.combinations(cheap, count))
    assert cost(set(repeats(nodes, 1, set(cheap), sizes=sizes))) == least


@pytest.mark.parametrize("seed", range(30))
def test_random_steps(seed: int) -> None:
    """Each process can run what it repeats, and what it receives costs no more, but for values that come sooner."""
    rng = random.Random(seed)
    count, ranks = 40, range(rng.choice([2, 3]))
    nodes: List[Node] = []
    for index in range(count):
        before = sorted(rng.sample(range(index), min(index, rng.randrange(4))))
        is_common = all(nodes[one].owner is None for one in before) and rng.random() < 0.5
        nodes.append(reads(None if is_common else rng.choice(ranks), *before))
    sizes = [rng.choice([SMALL, LARGE]) for _ in nodes]
    cheap = {index for index in range(count) if nodes[index].owner is not None and rng.random() < 0.7}
    joins = {index for index in cheap if rng.random() < 0.5}
    repeated = [(rank, index) for rank in ranks for index in repeats(nodes, rank, cheap, joins, sizes)]
    places: Dict[Tuple[int, int], int] = {copy: count + number for number, copy in enumerate(repeated)}

    def here(rank: object, inputs: Sequence[Tuple[int, int]]) -> Tuple[Tuple[int, int], ...]:
        return tuple((places.get((rank, index), index), output) for index, output in inputs)  # type: ignore[call-overload]

    after = [node._replace(inputs=here(node.owner, node.inputs)) for node in nodes]
    after += [Node(rank, here(rank, nodes[index].inputs)) for rank, index in repeated]
    sizes += [sizes[index] for _, index in repeated]
    for (rank, index), place in places.items():
        assert all(before < place for before, _ in after[place].inputs), "each after those that it reads"
        assert nodes[index].owner not in (None, rank) and index in cheap

    def received(found: Sequence[Crossing], rank: int) -> float:
        return sum(MESSAGE + sizes[crossing.output[0]] for crossing in found if crossing.receiver == rank)

    was, now = (partition(each, range(count), ranks) for each in (nodes, after))
    for rank in ranks:
        assert received(now.crossings, rank) <= LATE * received(was.crossings, rank)
