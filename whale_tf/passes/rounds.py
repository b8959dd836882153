"""Decides in how many rounds several processes run the nodes of a condition or call, each process those of its own variables.

A node that takes a process's variables belongs to that process, and so does what follows from this process's variables alone.
What changes variables that every process has is run by every process.  All other nodes are *common*: whoever reads one runs it.
A value of another process arrives between two rounds::

    process 0    squares of g0 ──┐  ║           ┌──> norm ──> w0 -= g0 / norm
                                 ╠══╬══> both   │
    process 1    squares of g1 ──┘  ║           └──> norm ──> w1 -= g1 / norm
                                    ║
                 round 0            ║           round 1

In each round, what every process runs comes after what each runs for itself.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.walk import reached

EVERY = -1  # in place of the number of a process
Copy = Tuple[int, int]  # (node, process that runs it, or EVERY)
NO_ROUNDS: Mapping[int, int] = MappingProxyType({})


class CyclicError(Exception):
    """Nodes that follow from themselves, such as those of a loop."""


class Node(NamedTuple):
    """Attributes:
    owner: the process that runs it; EVERY: each does, because it writes what each has; None: it is common.
    inputs: the nodes that it reads.
    waits: the nodes for which it waits.
    variables: those that every process has and the node takes.
    has_state: it reads or writes something, or is not the same each time.
    """

    owner: Optional[int]
    inputs: Tuple[int, ...] = ()
    waits: Tuple[int, ...] = ()
    variables: FrozenSet[str] = frozenset()
    has_state: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether each reader has its own, in whatever round."""
        return self.owner is None and not (self.inputs or self.waits or self.has_state)


class Rounds(NamedTuple):
    """Attributes:
    owners: of all nodes, also of those that follow from one process's variables.
    rounds: copy of a node -> the round in which it runs; without constants.
    waits: copy of a node -> the nodes for which it waits, of which the same process has copies.
    """

    owners: Sequence[Optional[int]]
    rounds: Dict[Copy, int]
    waits: Dict[Copy, Sequence[int]]

    def copy(self, index: int, reader: int) -> Copy:
        """The copy of a node that a process (or every process) reads."""
        owner = self.owners[index]
        return index, reader if owner is None else owner


def find_rounds(nodes: Sequence[Node], wanted: Sequence[int], earliest: Mapping[int, int] = NO_ROUNDS) -> Rounds:
    """See the module's docstring.

    Args:
        wanted: nodes with an owner that must run, as early as they can.
        earliest: node -> the first round in which it may run, if that is not round 0.

    Raises:
        CyclicError: there is no order.
    """
    order = _in_order(nodes)
    found = Rounds(_owners(nodes, order), {}, {})

    def before(copy: Copy) -> List[Copy]:
        index, runner = copy
        if copy not in found.waits:
            found.waits[copy] = _waits(nodes, found.owners, nodes[index].waits, runner)
        return [found.copy(one, runner) for one in nodes[index].inputs] + [(one, runner) for one in found.waits[copy]]

    needed = reached([found.copy(index, EVERY) for index in wanted], before)
    copies: Dict[int, List[int]] = {}
    for index, runner in sorted(needed):
        copies.setdefault(index, []).append(runner)
    written = _around_writes(nodes)
    followers: Dict[Copy, List[Tuple[Copy, bool]]] = {}  # what comes after a copy, and whether it does not read it
    for index in order:
        for runner in copies.get(index, ()) if not nodes[index].is_constant else ():
            earlier = [(copy, False) for copy in before((index, runner)) if not nodes[copy[0]].is_constant]
            earlier += [((one, other), True) for one in written.get(index, ()) for other in copies.get(one, ())
                        if runner == EVERY or other in (EVERY, runner)]  # processes only read what every process writes
            found.rounds[index, runner] = max(
                [earliest.get(index, 0), *(found.rounds[copy] + (runner not in (EVERY, copy[1])) for copy, _ in earlier)])
            for copy, is_order in earlier:
                followers.setdefault(copy, []).append(((index, runner), is_order))
    fixed = set(wanted)
    for index in reversed(order):
        for runner in copies.get(index, ()) if index not in fixed else ():
            those = followers.get((index, runner), ())
            # what is not sent runs in the round in which it is read first, so that less is handed on
            if those and all(is_order or copy[1] == runner for copy, is_order in those):
                found.rounds[index, runner] = min(found.rounds[copy] for copy, _ in those)
    return found


def _in_order(nodes: Sequence[Node]) -> List[int]:
    """The nodes, each behind what it reads and waits for."""
    left = [len({*node.inputs, *node.waits}) for node in nodes]
    readers: Dict[int, List[int]] = {}
    for index, node in enumerate(nodes):
        for before in {*node.inputs, *node.waits}:
            readers.setdefault(before, []).append(index)
    found = [index for index, count in enumerate(left) if not count]
    for index in found:  # grows while we walk
        for reader in readers.get(index, ()):
            left[reader] -= 1
            if not left[reader]:
                found.append(reader)
    if len(found) < len(nodes):
        raise CyclicError
    return found


def _owners(nodes: Sequence[Node], order: Sequence[int]) -> List[Optional[int]]:
    """Of what follows from the variables of one process alone, this process."""
    behind: Dict[int, Set[int]] = {}
    found = [node.owner for node in nodes]
    for index in order:
        behind[index] = {owner for before in nodes[index].inputs for owner in behind[before]}
        owner = nodes[index].owner
        if owner is not None:
            behind[index] = {owner} - {EVERY}
        elif len(behind[index]) == 1:
            found[index] = next(iter(behind[index]))
    return found


def _waits(nodes: Sequence[Node], owners: Sequence[Optional[int]], waits: Iterable[int], runner: int) -> List[int]:
    """What a process waits for instead of nodes, some of which others run: of these, for its own nodes before them."""
    found = {index for index in waits if owners[index] in (None, runner)}
    behind = reached(set(waits) - found, lambda index: () if owners[index] == runner else (
        *nodes[index].inputs, *nodes[index].waits))
    return sorted(found | {index for index in behind if owners[index] == runner})


def _around_writes(nodes: Sequence[Node]) -> Dict[int, List[int]]:
    """Node -> nodes that come before it because one of the two writes a variable that every process has and both take."""
    writes = [index for index, node in enumerate(nodes) if node.owner == EVERY and node.variables]
    readers: Dict[int, List[int]] = {}
    for index, node in enumerate(nodes) if writes else ():
        for before in (*node.inputs, *node.waits):
            readers.setdefault(before, []).append(index)
    found: Dict[int, List[int]] = {}
    for write in writes:
        taken = nodes[write].variables
        for before in sorted(reached([write], lambda index: (*nodes[index].inputs, *nodes[index].waits)) - {write}):
            if taken & nodes[before].variables:
                found.setdefault(write, []).append(before)
        for after in sorted(reached([write], lambda index: readers.get(index, ())) - {write}):
            if taken & nodes[after].variables:
                found.setdefault(after, []).append(write)
    return found
