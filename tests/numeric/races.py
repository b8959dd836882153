"""Reads and writes of one variable that a run leaves in any order: what such a run returns depends on chance.

A numeric test sees a race only when it is lost, so the order is read off the graph: of every read and write of a variable that a
run reaches, one must follow from the other.  A reference variable is read by whatever takes its value, since an Identity of it
does not copy.  Where both are the local script's own, it is its own affair.
"""
from __future__ import annotations

import contextlib
from typing import Any, Container, Dict, Iterator, List, Sequence, Set, Tuple

import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as session_lib

from whale_tf.runtime.active import current

OWN = "whale"  # name scope of what a rewrite adds
WRITES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "Apply", "SparseApply", "Scatter")
INITIAL = ("VarIsInitializedOp", "DestroyResourceOp", "IsVariableInitialized")
REFERENCES = ("Variable", "VariableV2")


def unordered(fetches: Sequence[tf.Operation]) -> List[str]:
    """Each race of a run that reaches ``fetches``: the names of read and write."""
    ops = _in_order(fetches)
    users: Dict[tf.Operation, List[tf.Operation]] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                users.setdefault(_source(tensor), []).append(op)
    place = {op: number for number, op in enumerate(ops)}
    users.update({op: _users_of_reference(op, place) for op in ops if op.type in REFERENCES})
    written = {source: [op for op in found if op.type.startswith(WRITES)] for source, found in users.items()}
    if not any(written.values()):
        return []
    before: Dict[tf.Operation, int] = {}  # of each op, bits of all that comes before it
    for op in ops:
        bits = 0
        for earlier in _predecessors(op):
            bits |= before.get(earlier, 0) | 1 << place[earlier]
        before[op] = bits
    found = []
    for source, writes in written.items():
        for write in writes:
            for read in users[source]:
                if read.type.startswith(WRITES) or read.type in INITIAL or not _is_value(read):
                    continue
                are_ours = any(op.name.startswith(OWN) for op in (read, write))
                if are_ours and not (before[write] >> place[read] & 1 or before[read] >> place[write] & 1):
                    found.append(f"{read.name} ({read.type}) and {write.name} ({write.type}) of {source.name}")
    return found


def _users_of_reference(variable: tf.Operation, reached: Container[tf.Operation]) -> List[tf.Operation]:
    """The ops that take a reference variable or an Identity of it."""
    aliases, found = [variable.outputs[0]], []
    for alias in aliases:  # grows while we walk
        for user in alias.consumers():
            if user in reached and user.type in ("Identity", "Switch", "RefSwitch", "Enter"):
                aliases += user.outputs
            elif user in reached:
                found.append(user)
    return found


def _is_value(op: tf.Operation) -> bool:
    """Whether an op returns anything but the handle that it takes."""
    return any(tensor.dtype != tf.resource for tensor in op.outputs)


def _source(tensor: tf.Tensor) -> tf.Operation:
    """The op that made a handle."""
    while tensor.op.type in ("Identity", "Enter", "Switch", "RefSwitch"):
        tensor = tensor.op.inputs[0]
    return tensor.op


def _predecessors(op: tf.Operation) -> List[tf.Operation]:
    """What an op waits for.  The back edges of a loop are left out; its results follow from its last round instead."""
    found = [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    if op.type == "QueueDequeueV2":
        found += _sent_before(op)
    if op.type == "Merge":
        return [earlier for earlier in found if earlier.type != "NextIteration"]
    if op.type == "Exit":
        merge = op.inputs[0].op.inputs[0].op
        return found + [tensor.op for tensor in merge.inputs if tensor.op.type == "NextIteration"]
    return found


def _sent_before(receive: tf.Operation) -> List[tf.Operation]:
    """What this process has sent to others before it receives a value."""
    state = current()
    fetches = None if state is None else state.fetches.get(receive.graph)
    if fetches is None or fetches.parts is None:
        return []
    return [receive.graph.get_operation_by_name(name) for name in fetches.parts.part.sent_before(receive.name)]


def _in_order(fetches: Sequence[tf.Operation]) -> List[tf.Operation]:
    """What a run reaches, each op behind all that it waits for."""
    seen: Set[tf.Operation] = set()
    ordered: List[tf.Operation] = []
    stack: List[Tuple[tf.Operation, bool]] = [(op, False) for op in fetches]
    while stack:
        op, is_done = stack.pop()
        if is_done:
            ordered.append(op)
        elif op not in seen:
            seen.add(op)
            stack.append((op, True))
            stack.extend((earlier, False) for earlier in _predecessors(op))
    return ordered


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Every run of a Session within is checked once.

    Raises:
        AssertionError: a run may read a variable before or after it is written.
    """
    original, seen = session_lib.BaseSession._run, set()  # type: Any, Set[Any]

    def checked(session: Any, handle: Any, fetches: Any, *arguments: Any, **keywords: Any) -> Any:
        ops = [getattr(fetch, "op", fetch) for fetch in tf.nest.flatten(fetches)]
        ops = [op for op in ops if isinstance(op, tf.Operation)]
        key = tuple(op.name for op in ops)
        if key not in seen:
            seen.add(key)
            found = unordered(ops)
            assert not found, "a run may read these before or after the write:\n  " + "\n  ".join(found[:10])
        return original(session, handle, fetches, *arguments, **keywords)

    session_lib.BaseSession._run = checked
    try:
        yield
    finally:
        session_lib.BaseSession._run = original
