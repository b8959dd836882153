"""Rounds in which processes run the nodes of a condition: what each runs, when, and in which order."""
from __future__ import annotations

import random
from typing import Dict, List, Tuple

import pytest

from whale_tf.passes.rounds import EVERY, CyclicError, Node, find_rounds

COUNT = frozenset(["count"])


def test_one_round_if_processes_need_nothing_of_each_other() -> None:
    nodes = [Node(None, variables=COUNT, has_state=True), *(Node(rank, (0,), has_state=True) for rank in range(2)),
             Node(EVERY, (), (0,), COUNT, True)]
    found = find_rounds(nodes, [1, 2, 3])
    assert found.rounds == {(0, 0): 0, (0, 1): 0, (0, EVERY): 0, (1, 0): 0, (2, 1): 0, (3, EVERY): 0}


def test_global_norm() -> None:
    """Each process sums the squares of its own; the norm of all is computed by whoever needs it, in the next round."""
    nodes = [Node(0, has_state=True), Node(None, (0,)), Node(1, has_state=True), Node(None, (2,)), Node(None, (1, 3)),
             Node(0, (4, 0), has_state=True), Node(1, (4,), has_state=True), Node(None)]
    found = find_rounds(nodes, [5, 6])
    assert found.owners[1] == 0 and found.owners[3] == 1 and found.owners[4] is None
    assert found.rounds == {(0, 0): 0, (1, 0): 0, (2, 1): 0, (3, 1): 0, (4, 0): 1, (4, 1): 1, (5, 0): 1, (6, 1): 1}


def test_what_is_read_late_is_computed_late() -> None:
    nodes = [Node(1, has_state=True), Node(0, has_state=True), Node(None, (1,)), Node(None, (2,)),
             Node(0, (0, 3), has_state=True)]
    assert find_rounds(nodes, [4]).rounds == {(0, 1): 0, (1, 0): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1}


def test_reads_and_writes_of_what_every_process_has() -> None:
    """A process that reads a counter after its increment does so in another round, also if an op of another one is between."""
    write, between = Node(EVERY, (), (), COUNT, True), Node(1, (), (0,), has_state=True)
    read = Node(None, (), (1,), COUNT, True)
    found = find_rounds([write, between, read, Node(0, (2,), has_state=True)], [0, 1, 3])
    assert found.rounds == {(0, EVERY): 0, (1, 1): 0, (2, 0): 1, (3, 0): 1}
    first, follows = Node(None, (), (), COUNT, True), Node(0, (0, 3), has_state=True)  # a read before the increment, handed on
    found = find_rounds([first, Node(EVERY, (), (0,), COUNT, True), follows, Node(1, has_state=True)], [1, 2])
    assert found.rounds == {(0, 0): 0, (0, EVERY): 0, (1, EVERY): 0, (3, 1): 0, (2, 0): 1}


def test_wait_by_way_of_another_process() -> None:
    nodes = [Node(0, has_state=True), Node(1, (), (0,), has_state=True), Node(0, (), (1,), has_state=True)]
    found = find_rounds(nodes, [0, 1, 2])
    assert set(found.rounds.values()) == {0}  # nothing is read
    assert found.waits[2, 0] == [0] and not found.waits[1, 1]


def test_loop_has_no_order() -> None:
    with pytest.raises(CyclicError):
        find_rounds([Node(0, (1,)), Node(None, (0,))], [0])


@pytest.mark.parametrize("seed", range(20))
def test_rounds_compute_what_the_whole_computes(seed: int) -> None:
    """Generated bodies, run piece by piece: a variable for each process and one that all have, which are read and written."""
    draw = random.Random(seed)
    nodes: List[Node] = []
    kinds: List[str] = []
    touched: Dict[str, List[int]] = {}
    for index in range(30):
        inputs = tuple(draw.randrange(index) for _ in range(min(index, draw.randint(0, 2))))
        variable, kind = draw.choice(["0", "1", "all"]), draw.choice(["add", "add", "read", "write"])
        waits: Tuple[int, ...] = ()
        if kind == "add":
            nodes.append(Node(None, inputs))
        else:
            waits = tuple(touched.get(variable, ()))  # as in functions: one after the other
            touched.setdefault(variable, []).append(index)
            owner = int(variable) if variable != "all" else EVERY if kind == "write" else None
            nodes.append(Node(owner, inputs, waits, COUNT if variable == "all" else frozenset(), True))
        kinds.append(kind + variable if kind != "add" else kind)
    effects = [index for index, kind in enumerate(kinds) if kind.startswith("write")]
    if not effects:
        return
    expected = _run(nodes, kinds, [(index, -2) for index in range(30)], [{"0": 1, "1": 2, "all": 3}] * 3, [])
    found = find_rounds(nodes, effects)
    order = sorted(found.rounds, key=lambda copy: (found.rounds[copy], copy[1] == EVERY, copy))
    states = [{"0": 1, "all": 3}, {"1": 2, "all": 3}]
    values = _run(nodes, kinds, order, states, found.owners)
    for index in effects:
        for runner in {runner for one, runner in found.rounds if one == index}:
            assert values[index, runner] == expected[index, -2]
    whole = {"0": 1, "1": 2, "all": 3}
    _run(nodes, kinds, [(index, -2) for index in range(30)], [whole] * 3, [])
    assert states == [{"0": whole["0"], "all": whole["all"]}, {"1": whole["1"], "all": whole["all"]}]


def _run(nodes: List[Node], kinds: List[str], order: List[Tuple[int, int]], states: List[Dict[str, int]],
         owners: object) -> Dict[Tuple[int, int], int]:
    """Values of copies of nodes, run in this order.  Runner -2 is one process that has everything; of what every process runs,
    the first one's value is kept, and all write it."""
    found: Dict[Tuple[int, int], int] = {}
    for index, runner in order:
        node, kind, taken = nodes[index], kinds[index], []
        for one in node.inputs:
            if runner == -2:
                copy = one, -2
            else:
                owner = owners[one]  # type: ignore[index]
                copy = one, runner if owner is None else owner
            taken.append(1 if copy not in found and nodes[one].is_constant else found[copy])
        value = (1 + sum((place + 1) * one for place, one in enumerate(taken))) % 1009
        if kind.startswith("read"):
            held = {-2: 0, EVERY: 0}.get(runner, runner)
            value = (value + states[held][kind[4:]]) % 1009
        if kind.startswith("write"):
            for state in states if runner == EVERY else [states[{-2: 0}.get(runner, runner)]]:
                if kind[5:] in state:
                    state[kind[5:]] = (state[kind[5:]] * 3 + value) % 1009
        found[index, runner] = value
    return found
