"""Selects the ops and variables of a graph for the strategy problem."""

from __future__ import annotations

from typing import AbstractSet, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set

from whale_tf.ir.graph import TRAINED, OpGraph, Phase
from whale_tf.ir.traits import READS, VARIABLES, Role, types_of
from whale_tf.ir.units import bound
from whale_tf.profiler.chain import needed_by_updates

_IGNORED = types_of(Role.NO_OP, Role.CONSTANT, Role.PLACEHOLDER)


class Scope(NamedTuple):
    """Attributes:
    ops: ops to decide, in topological order, without the plain reads of variables, which are the variables themselves.
    variables: variable ops.
    roots: tensor -> the variable's tensor to which it refers, or whose plain value it is.
    whole: variables that cannot be divided.
    gradients: tensors that are settled before anything reads them: terms of a sum are added up first.
    bound: ops of loops and conditions without bodies of their own, which run once.
    """

    ops: Sequence[int]
    variables: Sequence[int]
    roots: Dict[int, int]
    whole: FrozenSet[int] = frozenset()
    gradients: FrozenSet[int] = frozenset()
    bound: FrozenSet[int] = frozenset()

    def is_handle(self, graph: OpGraph, tensor: int) -> bool:
        """Whether a tensor is a variable itself (a reference or a resource), not its value."""
        dtype = graph.tensors[tensor].dtype
        return tensor in self.roots and (dtype == "resource" or dtype.endswith("_ref"))


def find_scope(graph: OpGraph, divisible: Optional[AbstractSet[int]] = None, gradients: AbstractSet[int] = frozenset()) -> Scope:
    """Forward ops that not only unneeded ones read, and the backward and update ops that some update needs; all computed ops of a
    graph that trains nothing.

    Args:
        divisible: variables that may be stored in shards; None means all.
        gradients: see :class:`Scope`.
    """
    phases = TRAINED if any(op.phase is Phase.APPLY for op in graph.ops) else TRAINED + (Phase.OTHER,)
    needed = needed_by_updates(graph)
    roots: Dict[int, int] = {}
    ops: List[int] = []
    variables: List[int] = []
    for op in graph.ops:
        if op.type in VARIABLES:
            if op.phase in TRAINED or op.phase is Phase.OTHER:
                variables.append(op.id)
            roots[op.outputs[0]] = op.outputs[0]
        elif op.type in READS and op.inputs and op.inputs[0] in roots:
            roots[op.outputs[0]] = roots[op.inputs[0]]
        elif op.phase in phases and op.type not in _IGNORED and (op.phase is Phase.FORWARD or op.id in needed or not needed):
            ops.append(op.id)
    unread = _unread(graph, ops, needed)
    ops = [op for op in ops if op not in unread]
    used = {graph.tensors[roots[t]].op for op in ops for t in graph.ops[op].inputs if t in roots}
    members = [variable for variable in variables if variable in used]
    return Scope(ops, members, roots, frozenset() if divisible is None else frozenset(members) - divisible,
                 frozenset(gradients), bound(graph, [graph.ops[op] for op in ops]))


def _unread(graph: OpGraph, ops: Sequence[int], needed: AbstractSet[int]) -> Set[int]:
    """Forward ops that only backward ops read that no update needs, such as those that bring a divided weight together for the
    gradient of the model's input.  Such ops do not run."""
    loose = {op for op in ops if graph.ops[op].phase is Phase.FORWARD and op not in needed} if needed else set()
    readers: Dict[int, Set[int]] = {op: set() for op in loose}
    for reader in graph.ops if loose else ():
        for source in [graph.tensors[t].op for t in reader.inputs] + list(reader.control_inputs):
            if source in readers:
                readers[source].add(reader.id)
    found: Set[int] = set()
    for op in sorted(loose, reverse=True):
        if readers[op] and all(reader in found or (graph.ops[reader].phase is Phase.BACKWARD and reader not in needed)
                               for reader in readers[op]):
            found.add(op)
    return found
