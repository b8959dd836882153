"""Ops of version 1 control flow that belong together: loops, conditions, and all ops that use one stack or tensor array."""

from __future__ import annotations

from typing import Callable, Container, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.traits import CONTAINERS, ENTERS, EXITS, FLOW, MERGES, SWITCHES, Role, types_of
from whale_tf.ir.walk import Node

HANDLES = ("resource", "string_ref", "string")
GATE_ATTR = "_whale_gate"  # on the Switch that decides about all writes of a step; only control edges lead from it to them
_HANDLE_MOVES = types_of(*FLOW, Role.CONTAINER_GRADIENT) | {"Identity"}


def frames(graph: OpGraph) -> Dict[int, Tuple[str, ...]]:
    """The v1 while-loop frames of each op inside a loop, outermost first.

    An ``Enter`` belongs to the loop that it enters, an ``Exit`` to the loop that it leaves.  One pass suffices: producers precede
    their consumers except on the back edges of ``NextIteration``, and every op of a loop is reached from an ``Enter``.
    """
    result: Dict[int, Tuple[str, ...]] = {}
    if not graph.has_any(ENTERS):
        return result
    for op in graph.ops:
        frame: Tuple[str, ...] = ()
        for source in graph.predecessors(op):
            before = frame_of_outputs(graph.ops[source], result)
            if len(before) > len(frame):
                frame = before
        if op.type in ENTERS:
            frame += (str(op.attrs["frame_name"]),)
        if frame:
            result[op.id] = frame
    return result


def frame_of_outputs(op: Op, frames_of: Mapping[int, Tuple[str, ...]]) -> Tuple[str, ...]:
    """The frames of an op's results: those of the op, except for an ``Exit``."""
    frame = frames_of.get(op.id, ())
    return frame[:-1] if op.type in EXITS else frame


def loops_of(region: Sequence[Op], frames_of: Mapping[int, Tuple[str, ...]]) -> List[Set[int]]:
    """The region's ops of every while loop; nested loops belong to the outermost."""
    loops: Dict[str, Set[int]] = {}
    for op in region:
        if op.id in frames_of:
            loops.setdefault(frames_of[op.id][0], set()).add(op.id)
    return list(loops.values())


def containers(graph: OpGraph, region: Sequence[Op]) -> List[Set[int]]:
    """Sets of ops that use the same stack or tensor array."""
    if not graph.has_any(CONTAINERS):
        return []
    users: Dict[int, Set[int]] = {}
    made_by: Dict[int, int] = {}  # handle -> op that created the stack or array
    for op in region:
        if op.type in CONTAINERS:
            made_by[op.outputs[0]] = op.id
            users[op.id] = {op.id}
            continue
        maker = next((made_by[t] for t in op.inputs if t in made_by), None)
        if maker is not None:
            users[maker].add(op.id)
            if op.type in _HANDLE_MOVES:
                made_by.update({t: maker for t in op.outputs if graph.tensors[t].dtype in HANDLES})
    return list(users.values())


def lists(graph: OpGraph, region: Sequence[Op]) -> List[Set[int]]:
    """Sets of ops that pass on the same list of tensors, a value of type variant, which other processes and GPUs cannot get."""
    unit_of: Dict[int, Set[int]] = {}
    members = {op.id for op in region}
    for op in region:
        makers = {graph.tensors[t].op for t in op.inputs if graph.tensors[t].dtype == "variant"}.intersection(members)
        if makers:
            unit = {op.id}.union(*(unit_of.get(maker, {maker}) for maker in makers))
            unit_of.update(dict.fromkeys(unit, unit))
    return list({id(unit): unit for unit in unit_of.values()}.values())


def conditions(graph: OpGraph, forward: Sequence[Op]) -> List[Set[int]]:
    """Forward ops of each v1 condition outside loops; nested conditions belong to the outermost."""
    if not graph.has_any(SWITCHES):
        return []
    in_loop = frames(graph)
    unit_of: Dict[int, Set[int]] = {}
    for op in forward:
        if op.id in in_loop:
            continue
        units = [unit_of[source] for source in graph.predecessors(op)
                 if source in unit_of and graph.ops[source].type not in MERGES]
        if units or op.type in SWITCHES:
            unit = set.union({op.id}, *units)
            unit_of.update(dict.fromkeys(unit, unit))
    return list({id(unit): unit for unit in unit_of.values()}.values())


def may_miss(graph: OpGraph) -> Set[int]:
    """Ops in branches of v1 conditions.  If a branch is not taken, they have no results, and nothing runs that waits for one."""
    if not graph.has_any(SWITCHES):
        return set()
    return in_branches(range(len(graph.ops)), lambda index: graph.predecessors(graph.ops[index]),
                       lambda index: graph.ops[index].type, frames(graph))


def in_branches(ops: Iterable[Node], before: Callable[[Node], Iterable[Node]], type_of: Callable[[Node], str],
                in_loop: Container[Node]) -> Set[Node]:
    """:func:`may_miss` of any representation of a graph.

    Args:
        ops: in any order.
        before: what an op reads and waits for.
        in_loop: the ops of v1 loops, whose own Switches and Merges run in every step.
    """
    users: Dict[Node, List[Node]] = {}
    pending: List[Node] = []
    for op in ops:
        if type_of(op) in SWITCHES and op not in in_loop:
            pending.append(op)
        for source in before(op):
            users.setdefault(source, []).append(op)
    depth: Dict[Node, int] = {}  # number of conditions inside which an op's results are
    while pending:
        op = pending.pop()
        inside = max((depth.get(source, 0) for source in before(op)), default=0)
        if op not in in_loop:
            inside += (type_of(op) in SWITCHES) - (type_of(op) in MERGES and inside > 0)
        if inside > depth.get(op, 0):
            depth[op] = inside
            pending += users.get(op, ())
    return set(depth)


def bound(graph: OpGraph, ops: Sequence[Op]) -> FrozenSet[int]:
    """Ops that cannot be separated from their version 1 loop or condition, or from the users of the same stack or tensor array:
    a copy of such an op alone would be outside the loop's frame, or would run although its branch is not taken.  A copy of a
    write waits for the gate of all writes like the original."""
    in_loop = frames(graph)
    found = set().union(*loops_of(ops, in_loop), *containers(graph, ops))
    depth: Dict[int, int] = {}  # number of conditions inside which an op's results are
    for op in ops if graph.has_any(SWITCHES) else ():
        if op.id in in_loop:
            continue
        inside = max((depth.get(source, 0) for source in graph.predecessors(op)), default=0)
        if op.type in SWITCHES and GATE_ATTR not in op.attrs:
            inside += 1
        if inside:
            found.add(op.id)
            depth[op.id] = inside - 1 if op.type in MERGES else inside
    return frozenset(found)


def whole_loops(graph: OpGraph, scope: Optional[Container[int]]) -> List[Set[int]]:
    """Ops of loops together with all users of the same stacks and tensor arrays, and thus with the loops' gradients; and the ops
    that fill and read a tensor array without any loop."""
    ops = [op for op in graph.ops if scope is None or op.id in scope]
    unit_of: Dict[int, Set[int]] = {}
    for members in loops_of(ops, frames(graph)) + containers(graph, ops):
        unit = members.union(*(unit_of[index] for index in members if index in unit_of))
        unit_of.update(dict.fromkeys(unit, unit))
    return list({id(unit): unit for unit in unit_of.values()}.values())
