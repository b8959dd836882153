"""Which of the region's ops a run needs if it makes only some of the step's updates.

A script may have several train ops, each with its own inputs, and run them one by one (a GAN's generator needs no images).  Each
run then feeds only what its own updates need.  The schedule's order must not make an op wait for one that such a run does not
need::

    images ──> real ──> loss of the discriminator ──> its update       a run of the generator's update alone
    noise  ──> fake ──┴──> loss of the generator  ──> its update       is fed noise, and computes nothing from images
"""

from __future__ import annotations

import itertools
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from whale_tf.ir.graph import CALL_ATTR, Op, OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import NEXT_ITERATIONS, Role, traits
from whale_tf.ir.writes import is_write


class Demand(NamedTuple):
    """Sets of updates and of inputs are bits of integers.

    Attributes:
        updates: op of the region -> the groups of updates that need it.  The updates of a group follow from the same gradient
            calls and need the same inputs.
        inputs: op of the region -> the inputs that it needs.
        of_group: the inputs that each group needs.
        beside: op of the region that no update needs -> the groups whose runs have its inputs, and need all ops behind it.
    """

    updates: Mapping[int, int] = {}
    inputs: Mapping[int, int] = {}
    of_group: Sequence[int] = ()
    beside: Mapping[int, int] = {}

    def of(self, ops: Sequence[int]) -> int:
        """The groups that need any of the ops.  An op that none needs may be fetched beside each of them."""
        found = 0
        for op in ops:
            found |= self.updates.get(op, 0) or self.every
        return found

    @property
    def every(self) -> int:
        """All groups."""
        return (1 << len(self.of_group)) - 1

    def implies(self, groups: int, op: int) -> bool:
        """Whether every run of one of these groups of updates needs an op.  An op that no update needs counts if it makes no
        further one run, which may have to wait for what the run is not fed."""
        return not groups & ~(self.updates.get(op, 0) or self.beside.get(op, self.every))

    def follows(self, op: int, later: int) -> bool:
        """Whether every run that needs an op for its updates needs a later one, too."""
        return not self.updates.get(op, 0) & ~self.updates.get(later, 0)

    @property
    def is_single(self) -> bool:
        """Whether all updates need all ops' inputs."""
        return all(not needed & ~own for needed in self.inputs.values() for own in self.of_group)


def find_demand(region: Region) -> Demand:
    """Follows inputs and gradient calls forward to the updates, and the updates back to the region's ops.  A tf.function runs all
    its ops whenever it is called."""
    if region.in_function:
        return Demand()
    graph, bits = region.graph, itertools.count()
    behind = _behind(graph, [1 << next(bits) if _is_input(op) else 0 for op in graph.ops])
    calls = _behind(graph, [1 << op.attrs[CALL_ATTR] if CALL_ATTR in op.attrs else 0 for op in graph.ops])
    groups: Dict[Tuple[int, int], int] = {}
    updates = [0] * len(graph.ops)
    for op in graph.ops:
        if op.phase is Phase.APPLY and calls[op.id] and is_write(op):
            updates[op.id] = 1 << groups.setdefault((calls[op.id], behind[op.id]), len(groups))
    changed = True
    while changed:  # a second round only for the back edges of while loops
        changed = False
        for op in reversed(graph.ops):
            for before in graph.predecessors(op):
                if updates[op.id] & ~updates[before]:
                    updates[before] |= updates[op.id]
                    changed = True
        changed = changed and graph.has_any(NEXT_ITERATIONS)
    of_group, beside = tuple(needed for _, needed in groups), {}  # type: Tuple[int, ...], Dict[int, int]
    for index in region.ops:
        if not updates[index]:
            beside[index] = sum(1 << group for group, own in enumerate(of_group) if not behind[index] & ~own)
            for source in graph.predecessors(graph.ops[index]):
                if region.contains(graph.ops[source]):
                    beside[index] &= updates[source] or beside.get(source, -1)  # -1: a back edge
    return Demand({op: updates[op] for op in region.ops}, {op: behind[op] for op in region.ops}, of_group, beside)


def _is_input(op: Op) -> bool:
    """Whether an op must be fed, or gives something else whenever it runs."""
    role = traits(op.type).role
    return role in (Role.PULL, Role.HOST, Role.RANDOM) or (role is Role.PLACEHOLDER and not op.inputs)


def _behind(graph: OpGraph, own: Sequence[int]) -> List[int]:
    """For every op, its own bits and those of all ops that it waits for."""
    found, changed = list(own), True
    while changed:  # a second round only for the back edges of while loops
        changed = False
        for op in graph.ops:
            bits = found[op.id]
            for before in graph.predecessors(op):
                bits |= found[before]
            changed = changed or bits != found[op.id]
            found[op.id] = bits
        changed = changed and graph.has_any(NEXT_ITERATIONS)
    return found
