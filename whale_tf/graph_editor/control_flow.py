"""Loops and conditionals: frames of version 1 control flow, bodies of functional control flow.

Version 1 loops are ordinary ops between Enter and Exit. The executor tells loops apart by the string ``frame_name`` of
their Enter ops, so two loops with the same name would be mixed up::

                          frame "loop"                           outer frame
    x ──> Enter ──> Merge ──> Switch ──> Exit ─────────────────────> y
                      ^         │
                      │         └─> body ops ──> NextIteration ─┐
                      └─────────────────────────────────────────┘

A functional loop or conditional (While, If, Case, PartitionedCall) is one op that names functions in the graph's
library. To run a changed body, stage a copy of the function (``FunctionCopy``) and let the op's clone call the copy::

    before   clone of "loop": While(body="body_7")
    after    edit.add_function(copy.finish("body_7_half"))
             edit.clone([loop], "copy", edit=lambda node, op: call_functions(node, {"body_7": "body_7_half"}))
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from whale_tf._tf_compat import FunctionDef, NodeDef, tf
from whale_tf.errors import GraphEditError, did_you_mean
from whale_tf.graph_editor.select import successors
from whale_tf.ir.traits import ENTERS, EXITS, HANDLES_OF_CONTAINERS
from whale_tf.ir.walk import reached


@dataclass(frozen=True)
class Frame:
    """The ops of one version 1 while loop.

    Attributes:
      name: the ``frame_name`` of its Enter ops.
      parent: name of the frame around it; None for an outermost loop.
      ops: ops that run in this frame, including its own Enter and Exit ops, but not those of loops inside it.
    """

    name: str
    parent: Optional[str]
    ops: Tuple[tf.Operation, ...]


def frame_name(enter: tf.Operation) -> str:
    """The frame that an Enter op enters."""
    return enter.get_attr("frame_name").decode()


def frames(graph: tf.Graph) -> Dict[str, Frame]:
    """All frames of a graph by name. No control-flow contexts are needed, so clones and imported loops are found too.

    Cost: one look at the type of every op, and a walk over the ops inside loops.
    """
    enters = [op for op in graph.get_operations() if op.type in ENTERS]
    members: Dict[str, Dict[tf.Operation, None]] = {}
    parents: Dict[str, Optional[str]] = {}
    work: Deque[tf.Operation] = deque()
    for enter in enters:
        members.setdefault(frame_name(enter), {})[enter] = None
    frame_of = {enter: frame_name(enter) for enter in enters}
    waiting_exits: Dict[str, List[tf.Operation]] = {}

    def reach(op: tf.Operation, name: str) -> None:
        if op.type in ENTERS:  # enters its own frame from this one
            inner = frame_of[op]
            if parents.setdefault(inner, name) == name:
                work.extend(waiting_exits.pop(inner, []))
        elif op not in frame_of:
            frame_of[op] = name
            members[name][op] = None
            work.append(op)

    work.extend(enters)
    while work:
        op = work.popleft()
        name: Optional[str] = frame_of[op]
        if op.type in EXITS:
            if name not in parents:  # its consumers run in the parent, which may be found later
                waiting_exits.setdefault(str(name), []).append(op)
                continue
            name = parents[str(name)]
        if name is not None:
            for consumer in successors(op):
                reach(consumer, name)
    return {name: Frame(name, parents.get(name), tuple(ops)) for name, ops in members.items()}


def whole_loops(graph: tf.Graph) -> List[Set[tf.Operation]]:
    """The ops of each outermost loop with those inside it, and of all loops, and what is around them, that use the same stack or
    tensor array: its handle is good in one process only."""
    found, beside = frames(graph), {}  # type: Dict[str, Frame], Dict[tf.Operation, List[tf.Operation]]

    def link(one: tf.Operation, other: tf.Operation) -> None:
        beside.setdefault(one, []).append(other)
        beside.setdefault(other, []).append(one)

    for frame in found.values():
        for op in (*frame.ops, *(found[frame.parent].ops[:1] if frame.parent is not None else ())):
            link(frame.ops[0], op)
    for op in graph.get_operations() if found else ():
        if op.type in HANDLES_OF_CONTAINERS:
            for tensor in op.outputs:
                for user in tensor.consumers() if tensor.dtype == tf.resource else ():
                    link(op, user)
    groups, seen = [], set()  # type: List[Set[tf.Operation]], Set[tf.Operation]
    for frame in found.values():
        if frame.ops[0] not in seen:
            groups.append(reached([frame.ops[0]], beside.__getitem__))
            seen |= groups[-1]
    return groups


def frame_of_ops(graph: tf.Graph) -> Dict[tf.Operation, Frame]:
    """The frame of each op that is in one."""
    return {op: frame for frame in frames(graph).values() for op in frame.ops}


def is_inside(op: tf.Operation, frame: Frame) -> bool:
    """Whether what an op of a frame reads comes from an iteration, of this loop or of one around it."""
    return op.type not in ENTERS or frame.parent is not None


def check_whole_loops(loops: Mapping[str, Frame], names: Set[str],
                      reads: Callable[[tf.Operation, tf.Operation], bool]) -> None:
    """Refuse a set of op names that contains the entrance of a v1 loop but not everything that its loop ops read.

    A clone of such a set would have ops that read from two different frames and never run.

    Args:
      reads: whether an op will read, or wait for, another one that it does now.

    Raises:
      GraphEditError: the message names the loop and the missing ops.
    """
    for frame in loops.values():
        if not any(op.type in ENTERS and op.name in names for op in frame.ops):
            continue
        for op in frame.ops:
            if op.name in names or op.type in EXITS:
                continue
            readers = [consumer.name for consumer in successors(op) if consumer.name in names and reads(consumer, op)]
            if readers:
                raise GraphEditError(
                    f"the set to clone cuts through the while loop {frame.name!r}: {op.name!r} is outside the set and is read "
                    f"inside it by {readers[0]!r}; add the loop's other ops (control_flow.frames(graph)[{frame.name!r}].ops)")


def fresh_frame_names(enters: Iterable[NodeDef], taken: Set[str]) -> None:
    """Give the loops of one clone their own frame names, and add these to ``taken``.

    All Enter nodes of a frame get the same new name.
    """
    renamed: Dict[bytes, bytes] = {}
    for node in enters:
        old = node.attr["frame_name"].s
        if old not in renamed:
            count = 1
            while f"{old.decode()}_{count}" in taken:
                count += 1
            new = f"{old.decode()}_{count}"
            taken.add(new)
            renamed[old] = new.encode()
        node.attr["frame_name"].s = renamed[old]


# ------------------------------------------------------------------------------------------------------------ functions
def function_names(node: NodeDef) -> Dict[str, str]:
    """The functions that a node calls, by attribute: ``{"cond": "loop_cond_3", "body": "loop_body_4"}`` for a While.

    Attributes with a list of functions (Case's ``branches``) yield ``{"branches[0]": ..., "branches[1]": ...}``.
    """
    names = {}
    for key, value in node.attr.items():
        if value.HasField("func"):
            names[key] = value.func.name
        for position, function in enumerate(value.list.func):
            names[f"{key}[{position}]"] = function.name
    return names


def call_functions(node: NodeDef, renamed: Mapping[str, str]) -> None:
    """Let a NodeDef call other functions: ``renamed`` maps old names of functions to new ones.

    Use it in ``StagedEdit.clone(..., edit=...)``, or on the nodes of a ``FunctionCopy`` for nested bodies.
    """
    for value in node.attr.values():
        if value.HasField("func"):
            value.func.name = renamed.get(value.func.name, value.func.name)
        for function in value.list.func:
            function.name = renamed.get(function.name, function.name)


def forget_output_shapes(node: NodeDef) -> None:
    """Empty the ``output_shapes`` of a functional loop or conditional.

    A clone with another batch size then need not have the original's static shapes: TensorFlow takes a While's from its
    inputs, and an If's become unknown.
    """
    for key in ("output_shapes", "_output_shapes"):
        if key in node.attr:
            del node.attr[key].list.shape[:]


def function_def(graph: tf.Graph, name: str) -> FunctionDef:
    """A copy of the FunctionDef ``name`` in the graph's library.

    Raises:
      GraphEditError: the library has no such function.
    """
    function = graph._get_function(name)
    if function is None:
        known = list(graph._functions)
        raise GraphEditError(f"the graph's library has no function {name!r}; it has {len(known)} "
                             f"functions.{did_you_mean(name, known)}")
    copy = type(function.definition)()
    copy.CopyFrom(function.definition)
    return copy
