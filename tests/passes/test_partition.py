"""Parts of a step for processes: what each runs, what crosses, and whether a sender hears that its messages have arrived."""
from __future__ import annotations

import random
from typing import Dict, List, Set, Tuple

import pytest

from whale_tf.passes.partition import Crossing, Node, begun_before, partition, unanswered, where_values_are

BATCH, FIRST, SECOND, LOSS, GRADIENT, UPDATE, OTHER_UPDATE, RESULT = range(8)
PIPELINE = [
    Node(None),  # the mini-batch, which both processes read
    Node(0, ((BATCH, 0),)),
    Node(1, ((FIRST, 0), (BATCH, 1))),
    Node(1, ((SECOND, 0),)),
    Node(1, ((LOSS, 0),)),
    Node(0, ((GRADIENT, 0), (FIRST, 0))),
    Node(1, ((GRADIENT, 1),)),
    Node(None, ((LOSS, 0),), (UPDATE, OTHER_UPDATE)),
]


def test_pipeline() -> None:
    found = partition(PIPELINE, [RESULT, UPDATE, OTHER_UPDATE], range(2))
    assert found.runs == [{0, 1}, {0}, {1}, {1}, {1}, {0}, {1}, {0, 1}]
    assert found.crossings == [Crossing((FIRST, 0), 0, 1), Crossing((LOSS, 0), 1, 0), Crossing((GRADIENT, 0), 1, 0)]
    assert unanswered(PIPELINE, found) == [(1, 0)]  # process 0 hears with the loss that its activation has arrived


def test_updates_follow_from_all_processes_and_what_the_forward_pass_writes_does_not() -> None:
    nodes = [*PIPELINE, Node(0, ((FIRST, 0),)), Node(0, ((BATCH, 0),), (UPDATE, OTHER_UPDATE))]
    average, waits = range(len(PIPELINE), len(nodes))
    assert begun_before(nodes, [UPDATE, OTHER_UPDATE, average, waits]) == {
        UPDATE: {0, 1}, OTHER_UPDATE: {0, 1}, average: {0}, waits: {0, 1}}
    assert begun_before(nodes, [UPDATE, waits], [UPDATE]) == {UPDATE: {0}, waits: {0}}
    assert begun_before([Node(0, ((1, 0), (2, 0))), Node(None, ((0, 0),)), Node(1)], [0]) == {0: {0, 1}}  # a loop


def test_common_nodes_run_where_they_are_needed() -> None:
    nodes = [Node(None), Node(None, ((0, 0),)), Node(1, ((1, 0),)), Node(None)]
    found = partition(nodes, [2, 3], range(3))
    assert found.runs == [{1}, {1}, {1}, {0, 1, 2}] and found.crossings == []


def test_wait_for_another_process_makes_it_run() -> None:
    nodes = [Node(1), Node(None, (), (0,))]
    found = partition(nodes, [1], range(2))
    assert found.runs == [{1}, {0, 1}] and found.crossings == []


def test_each_value_travels_once_to_each_reader() -> None:
    nodes = [Node(0), *(Node(rank, ((0, 0),)) for rank in (0, 1, 1, 2)), Node(None, ((0, 0),))]
    found = partition(nodes, list(range(1, 6)), range(3))
    assert found.crossings == [Crossing((0, 0), 0, 1), Crossing((0, 0), 0, 2)]
    assert unanswered(nodes, found) == [(0, 1), (0, 2)]


def test_values_that_cannot_travel() -> None:
    """A text is made by whoever reads it, and a loop's list is read where the loop is."""
    text, split, hashed, loop, stacked, result, print_list = range(7)
    nodes = [Node(None), Node(0, ((text, 0),)), Node(1, ((split, 0),)), Node(0), Node(None, ((loop, 0),)),
             Node(None, ((stacked, 0), (loop, 1))), Node(None, ((loop, 0),))]
    stay, have_effects = {(text, 0), (split, 0), (loop, 0)}, {text, loop, result, print_list}
    found = where_values_are(nodes, stay.__contains__, have_effects.__contains__)
    assert [node.owner for node in found] == [None, None, 1, 0, 0, None, None]
    assert [node._replace(owner=None) for node in found] == [node._replace(owner=None) for node in nodes]


@pytest.mark.parametrize("seed", range(20))
def test_parts_compute_what_the_whole_computes(seed: int) -> None:
    """Generated graphs: every process alone, with what it receives, has the value of every node that it runs."""
    draw, count = random.Random(seed), 3
    nodes: List[Node] = []
    for index in range(40):
        before = [(draw.randrange(index), 0) for _ in range(min(index, draw.randint(0, 3)))]
        nodes.append(Node(draw.choice([None, 0, 1, 2]), tuple(before)))
    effects = draw.sample(range(40), 6)
    expected = [0] * 40
    for index, node in enumerate(nodes):
        expected[index] = hash((index, tuple(expected[before] for before, _ in node.inputs)))
    found = partition(nodes, effects, range(count))
    values: List[Dict[int, int]] = [{} for _ in range(count)]
    for index, node in enumerate(nodes):  # in order, so that a value arrives before it is read
        for rank in found.runs[index]:
            assert node.owner in (None, rank)
            values[rank][index] = hash((index, tuple(values[rank][before] for before, _ in node.inputs)))
        for crossing in found.crossings:
            if crossing.output[0] == index:
                assert crossing.sender == node.owner
                values[crossing.receiver][index] = values[crossing.sender][index]
    needed: Set[Tuple[int, int]] = {(index, rank) for index in effects for rank in range(count)
                                    if nodes[index].owner in (None, rank)}
    assert all(values[rank][index] == expected[index] for index, rank in needed)
    assert all((index, rank) in needed or any((index, 0) in nodes[user].inputs and rank in found.runs[user] for user in range(40))
               or any(crossing.output[0] == index and crossing.sender == rank for crossing in found.crossings)
               for index in range(40) for rank in found.runs[index])  # nothing runs in vain
