"""Ops of a ``split`` TaskGraph that every device runs for its own examples (the pattern ``batch``).

An op that is divided along no other dimension is computed once, on the TaskGraph's first device.  If a ``replicate`` TaskGraph
shares the devices, as in Whale's Example 5, each device has its own examples, and such an op should run where they are.  These
ops become a ``replicate`` TaskGraph next to the ``split`` one, with transfers between them like between any others::

    replicate      split / batch                split                                  split / batch      replicate
    tokens b_i ──> dispatched [E, b_i, C, H] ──> all-to-all ──> experts E_i [.., B, ..] ──> all-to-all ──> combined b_i ──> ...
"""

from __future__ import annotations

from typing import Collection, Dict, List, Optional, Set

from whale_tf.errors import ConfigError
from whale_tf.ir.batch_axis import EXTENT
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import MOVES, RANDOM, VARIABLES
from whale_tf.patterns.spread import EVERYWHERE
from whale_tf.planner.sharding.assignment import Assignment
from whale_tf.planner.sharding.problem import BATCH, ShardingProblem


def batch_ops(problem: ShardingProblem, assignment: Assignment, region: Region,
              listed: Optional[Collection[str]] = None) -> Dict[int, Set[int]]:
    """Split TaskGraph -> its ops that every device runs for its own examples.

    Args:
        region: the region of the same graph, before anything is divided.
        listed: names of the forward ops for which a plan asks for this; None means all possible ones.
    """
    found = {}
    for number, split in problem.splits.items():
        if split.by_batch:
            ops = _Finder(problem, assignment, region, number, listed).run()
            if ops:
                found[number] = ops
    return found


def with_batch(problem: ShardingProblem, assignment: Assignment, region: Region, found: Dict[int, Set[int]]) -> Assignment:
    """The assignment with corrected choices, since an op may have to be computed once after all.

    Args:
        found: the result of :func:`batch_ops`.

    Raises:
        ConfigError: the user forces the pattern ``batch`` on one of these.
    """
    inside = {op for ops in found.values() for op in ops}
    choices = []
    for choice in assignment.choices:
        if choice.pattern == BATCH and problem.graph.op(choice.op).id not in inside:
            why = "it follows from the whole batch's values, or how it depends on the batch size is not known"
            if choice.is_forced:
                raise ConfigError(f"patterns.force asks for pattern {BATCH!r} of {choice.op!r}, which a device cannot "
                                  f"compute for its own examples: {why}")
            choice = choice._replace(pattern="once", reason="; ".join(filter(None, (choice.reason, why))))
        choices.append(choice)
    alone: Dict[int, List[str]] = {}
    for number in problem.splits:
        alone[number] = [op.name for op in problem.forward_ops(number)
                         if op.id in region.batch_level and op.id not in inside and op.id not in assignment.strategies]
    return assignment._replace(choices=choices, alone={number: tuple(names) for number, names in alone.items()})


class _Finder:
    def __init__(self, problem: ShardingProblem, assignment: Assignment, region: Region, number: int,
                 listed: Optional[Collection[str]]) -> None:
        self.problem, self.assignment, self.region, self.number, self.listed = problem, assignment, region, number, listed
        self.graph = problem.graph
        self.inexact = {item.op for item in region.batch.inexact}
        self.members = [op for op in self.graph.ops if problem.task_graph[op.id] == number and op.id in region.batch_level]
        self.found: Set[int] = set()

    def run(self) -> Set[int]:
        self.found = {op.id for op in self.members if self._can(op)}
        for op in reversed(self.members):
            if op.id in self.found and self._moves_for_all(op):
                self.found.discard(op.id)
        self._leave_out()
        return self._with_constants()

    def _with_constants(self) -> Set[int]:
        """Adds constants and other values without examples that only these ops read: each device has its own."""
        inside = set(self.found)
        for op in reversed(self.graph.ops):
            users = [user for t in op.outputs for user, _ in self.graph.consumers(t)]
            if (self._in_split(op) and op.id not in self.region.batch_level and users and inside.issuperset(users)
                    and op.type not in RANDOM and not self.problem.is_read(op) and self._can(op)):
                inside.add(op.id)
        return inside

    def _can(self, op: Op) -> bool:
        """Whether the op is computed whole, and its shares make up the whole."""
        if op.id in self.assignment.strategies or op.type in VARIABLES or op.id in self.inexact or op.id in self.problem.bound:
            return False
        if self.listed is not None:
            forward = op if op.phase is Phase.FORWARD or op.forward < 0 else self.graph.ops[op.forward]
            if forward.phase is Phase.FORWARD and forward.name not in self.listed and self._in_split(forward):
                return False
        return all(t not in self.region.batch.unknown for t in op.inputs + op.outputs)

    def _in_split(self, op: Op) -> bool:
        return self.problem.task_graph[op.id] == self.number

    def _moves_for_all(self, op: Op) -> bool:
        """Whether an op only moves elements for divided ops that need all of them.  Its operand is then sent to every device and
        moved there, together with other uses of the operand."""
        users = [(self.graph.ops[user], position) for t in op.outputs for user, position in self.graph.consumers(t)]
        return op.type in MOVES and bool(users) and all(self._needs_all(user, position) for user, position in users)

    def _needs_all(self, user: Op, position: int) -> bool:
        strategy = self.assignment.strategies.get(user.id)
        if strategy is not None:
            return strategy.needs[position].kind == EVERYWHERE
        return position == 0 and self._in_split(user) and user.id not in self.found and user.type in MOVES

    def _leave_out(self) -> None:
        """Ops with operands or results that would have to cross but cannot."""
        pending = sorted(self.found)
        while pending:
            op = self.graph.ops[pending.pop()]
            edges = [(t, self.graph.tensors[t].op) for t in op.inputs]
            edges += [(t, user) for t in op.outputs for user, _ in self.graph.consumers(t)
                      if self.region.contains(self.graph.ops[user])]
            if op.id in self.found and any(other not in self.found and not self._crosses(t) for t, other in edges):
                self.found.discard(op.id)
                pending.extend(other for _, other in edges if other in self.found)

    def _crosses(self, tensor: int) -> bool:
        """Whether shares of a tensor can be made from the whole, and vice versa."""
        if self.graph.tensors[tensor].op not in self.region.batch_level:
            return True
        if self.graph.tensors[tensor].dtype in ("resource", "variant") or tensor in self.region.batch.unknown:
            return False
        layout = self.region.batch.layout(tensor)
        if layout.kind == EXTENT.kind:
            return self.region.batch.counted(tensor) is not None
        return not layout.is_sharded or layout.blocks is not None
