"""Divides the nodes of a step over the processes that run it, each its own part, and lists the values that cross.

A node on a device belongs to the process that has the device.  All other nodes (input pipelines, step counters, learning
rates, metrics) are *common*: each process that needs one runs it.  So only the values of nodes that belong to a process travel,
each once to every other process that reads it::

    process 0    batch ──> stage 0 ──┐                                            ┌──> mean of losses ──> result
                                     ║ activations                           loss ║
    process 1    batch               └──> stage 1 ──> loss ──┬────────────────────┴──> mean of losses ──> result
                                                             └──> gradients ══> process 0

A node that waits for one of another process waits instead for what that one follows from in the node's own process: for nodes,
and for messages with their values (:func:`before_wait`).
"""

from __future__ import annotations

from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

Output = Tuple[int, int]  # (node, number of its output)


class Node(NamedTuple):
    """Attributes:
    owner: the process to which it belongs; None: it is common.
    inputs: the outputs of other nodes that it reads.
    waits: nodes for which it waits.
    """

    owner: Optional[int]
    inputs: Tuple[Output, ...] = ()
    waits: Tuple[int, ...] = ()


class Crossing(NamedTuple):
    """A value that one process sends to another."""

    output: Output
    sender: int
    receiver: int


class Partition(NamedTuple):
    """Attributes:
    runs: the processes that run each node.
    crossings: in an order that is the same in all processes.
    """

    runs: Sequence[Set[int]]
    crossings: Sequence[Crossing]


def partition(nodes: Sequence[Node], effects: Sequence[int], processes: Iterable[int]) -> Partition:
    """See the module's docstring.

    Args:
        effects: nodes that must run: in the process to which they belong or, if they are common, in each.
        processes: numbers of those that run the step.
    """
    runs: List[Set[int]] = [set() for _ in nodes]
    pending: List[Tuple[int, int]] = []  # (node, process)

    def need(index: int, rank: int) -> None:
        owner = nodes[index].owner
        runner = rank if owner is None else owner
        if runner not in runs[index]:
            runs[index].add(runner)
            pending.append((index, runner))

    crossings: Set[Crossing] = set()
    for index in effects:
        for rank in processes:
            need(index, rank)
    while pending:
        index, rank = pending.pop()
        node = nodes[index]
        for output in node.inputs:
            need(output[0], rank)
            owner = nodes[output[0]].owner
            if owner is not None and owner != rank:
                crossings.add(Crossing(output, owner, rank))
        for wait in node.waits:
            need(wait, rank)
    return Partition(runs, sorted(crossings))


def where_values_are(nodes: Sequence[Node], cannot_travel: Callable[[Output], bool],
                     has_effect: Callable[[int], bool]) -> List[Node]:
    """The nodes, of which none reads a value of another process that cannot travel, if that can be had.

    Each process that reads such a value computes it itself, so its node becomes common.  If that has an effect, like a loop,
    common nodes that read the value follow it::

        as written     text ──> split (0) ══> hash (1)              loop (0) ══> list as a tensor (each) ──> result (each)
        then           text ──> split (1) ──> hash (1)              loop (0) ──> list as a tensor (0) ═════> result (each)

    Args:
        has_effect: whether a node does more than compute values from others.
    """
    found = list(nodes)
    pending = list(range(len(found)))
    while pending:
        node = found[pending.pop()]
        for output in node.inputs:
            owner = found[output[0]].owner
            if owner is not None and owner != node.owner and cannot_travel(output) and not has_effect(output[0]):
                found[output[0]] = found[output[0]]._replace(owner=None)
                pending.append(output[0])
    readers: Dict[int, List[int]] = {}
    for index, node in enumerate(found):
        for before, _ in node.inputs:
            readers.setdefault(before, []).append(index)
    pending = [index for index, node in enumerate(found) if node.owner is not None and has_effect(index)]
    while pending:
        maker = pending.pop()
        for index in readers.get(maker, ()):
            node = found[index]
            if node.owner is None and not has_effect(index) and any(
                    output[0] == maker and cannot_travel(output) for output in node.inputs):
                found[index] = node._replace(owner=found[maker].owner)
                pending.append(index)
    return found


class Before(NamedTuple):
    """Attributes:
    outputs: what a process has sent, with its receivers.
    nodes: its nodes for which others have waited.
    """

    outputs: Set[Tuple[Output, int]]
    nodes: Set[int]


def before_wait(nodes: Sequence[Node], wait: int, rank: int, gates: Collection[int] = ()) -> Before:
    """What comes in process ``rank`` before a node of another one, by way of whichever others.

    Args:
        gates: common nodes that stand for all before them, because a run may leave that out.
    """
    found = Before(set(), set())
    owner = nodes[wait].owner
    assert owner is not None and owner != rank
    seen, stack = {(wait, owner)}, [(wait, owner)]
    while stack:
        index, runner = stack.pop()
        befores = [(output[0], output) for output in nodes[index].inputs]  # type: List[Tuple[int, Optional[Output]]]
        befores += [(one, None) for one in nodes[index].waits]
        for before, output in befores:
            owner = nodes[before].owner
            if before in gates or (owner == rank and output is None):
                found.nodes.add(before)
            elif owner == rank and output is not None:
                found.outputs.add((output, runner))
            elif (before, runner if owner is None else owner) not in seen:
                seen.add((before, runner if owner is None else owner))
                stack.append((before, runner if owner is None else owner))
    return found


def begun_before(nodes: Sequence[Node], starts: Iterable[int], ends: Collection[int] = ()) -> Dict[int, Set[int]]:
    """For each of some nodes that belong to processes: those processes that must have begun the step before the node can run,
    because it follows from what they compute.

    Args:
        ends: nodes that may run before what they read or wait for.
    """
    found: Dict[Tuple[int, int], Set[int]] = {}  # (node, its runner) -> processes

    def befores(index: int, runner: int) -> List[Tuple[int, int]]:
        if index in ends:
            return []
        owners = [(output[0], nodes[output[0]].owner) for output in nodes[index].inputs]
        owners += [(wait, nodes[wait].owner) for wait in nodes[index].waits if nodes[wait].owner in (None, runner)]
        return [(before, runner if owner is None else owner) for before, owner in owners]

    result = {}
    for start in starts:
        owner = nodes[start].owner
        assert owner is not None
        stack = [(start, owner)]
        while stack:
            pair = stack[-1]
            if pair not in found:
                found[pair] = {pair[1]}
                stack += [before for before in befores(*pair) if before not in found]
            else:  # a second time, behind all before it
                found[pair].update(*(found[before] for before in befores(*stack.pop())))
        result[start] = found[start, owner]
    return result


def unanswered(nodes: Sequence[Node], found: Partition) -> List[Tuple[int, int]]:
    """Pairs (sender, receiver) of processes such that the sender could finish a step before the receiver has what it was sent: no
    value that comes back follows from everything that was sent."""
    pairs: Dict[Tuple[int, int], List[Crossing]] = {}
    for crossing in found.crossings:
        pairs.setdefault((crossing.sender, crossing.receiver), []).append(crossing)
    answered = set()
    for (sender, receiver), back in pairs.items():
        sent = {crossing.output for crossing in pairs.get((receiver, sender), ())}
        if sent and any(sent <= _received(nodes, crossing.output[0], sender) for crossing in back):
            answered.add((receiver, sender))
    return sorted(set(pairs) - answered)


def _received(nodes: Sequence[Node], index: int, rank: int) -> Set[Output]:
    """What a process must have received before it runs a node."""
    found: Set[Output] = set()
    seen, stack = {index}, [index]
    while stack:
        node = nodes[stack.pop()]
        befores = list(node.waits)
        for output in node.inputs:
            if nodes[output[0]].owner in (None, rank):
                befores.append(output[0])
            else:
                found.add(output)
        for before in befores:
            if before not in seen and nodes[before].owner in (None, rank):
                seen.add(before)
                stack.append(before)
    return found
