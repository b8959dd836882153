"""Validity of an op graph, as a table of rules (tinygrad's ``spec``): each rule states an invariant and finds violations.

The graph is checked before and after each pass, so that an error is found in the pass that made it.
"""
from __future__ import annotations

import os
from typing import Callable, Iterator, List, NamedTuple, Optional, Set, Tuple

from whale_tf.errors import GraphError
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.traits import MERGES, NEXT_ITERATIONS, traits

Offence = Tuple[Optional[Op], str]


class Law(NamedTuple):
    """``check`` yields each op that breaks the law, with a description."""

    name: str
    check: Callable[[OpGraph], Iterator[Offence]]


def _numbered(graph: OpGraph) -> Iterator[Offence]:
    following = 0
    for place, op in enumerate(graph.ops):
        if op.id != place:
            yield op, f"has number {op.id} at place {place}"
        for index, tensor in enumerate(op.outputs):
            if tensor != following + index:
                yield op, f"has outputs {list(op.outputs)}, expected numbers from {following}"
                return
            if tensor >= len(graph.tensors) or graph.tensors[tensor].op != op.id or graph.tensors[tensor].index != index:
                yield op, f"does not own its output {index}"
        following += len(op.outputs)
    if following != len(graph.tensors):
        yield None, f"{len(graph.tensors) - following} tensors belong to no op"


def _named(graph: OpGraph) -> Iterator[Offence]:
    seen: Set[str] = set()
    for op in graph.ops:
        if not op.name or op.name in seen:
            yield op, "has no name" if not op.name else "has the name of another op"
        seen.add(op.name)


def _connected(graph: OpGraph) -> Iterator[Offence]:
    count, tensors = len(graph.ops), len(graph.tensors)
    for op in graph.ops:
        for tensor in op.inputs:
            if not 0 <= tensor < tensors:
                yield op, f"reads tensor {tensor} of {tensors}"
        for control in op.control_inputs:
            if not 0 <= control < count:
                yield op, f"waits for op {control} of {count}"


def _ordered(graph: OpGraph) -> Iterator[Offence]:
    tensors = graph.tensors
    for op in graph.ops:
        before = [tensors[tensor].op for tensor in op.inputs]
        before.extend(op.control_inputs)
        if not before or max(before) < op.id:
            continue
        for source in before:
            if source >= op.id and not (op.type in MERGES
                                        and graph.ops[source].type in NEXT_ITERATIONS):
                yield op, f"comes before {graph.ops[source].name!r}, which it needs"


def _shaped(graph: OpGraph) -> Iterator[Offence]:
    legal: Set[int] = set()  # ids of shapes that have been checked: equal shapes are mostly the same tuple
    for record in graph.tensors:
        shape = record.shape
        if shape is not None and id(shape) not in legal:
            if isinstance(shape, tuple) and all(s is None or (isinstance(s, int) and s >= 0) for s in shape):
                legal.add(id(shape))
            else:
                yield graph.ops[record.op], f"has shape {shape!r}"
        if not record.dtype:
            yield graph.ops[record.op], "has an output without a dtype"


def _constant(graph: OpGraph) -> Iterator[Offence]:
    for op in graph.ops:
        if op.value is None:
            continue
        shape = graph.tensors[op.outputs[0]].shape if op.outputs else None
        if op.type != "Const" or op.inputs:
            yield op, f"has a value but is a {op.type} with {len(op.inputs)} inputs"
        elif shape is not None and tuple(op.value.shape) != shape:
            yield op, f"has a value of shape {tuple(op.value.shape)} but its output has {shape}"


def _arity(graph: OpGraph) -> Iterator[Offence]:
    for op in graph.ops:
        arity = traits(op.type).arity
        if arity is not None and (len(op.inputs), len(op.outputs)) != arity:
            yield op, "has {} inputs and {} outputs, not {} and {}".format(len(op.inputs), len(op.outputs), *arity)
        if op.type in MERGES and (not op.inputs or len(op.outputs) != 2):
            yield op, f"merges {len(op.inputs)} inputs into {len(op.outputs)} outputs"


def _annotated(graph: OpGraph) -> Iterator[Offence]:
    for op in graph.ops:
        if not isinstance(op.phase, Phase):
            yield op, f"has phase {op.phase!r}"
        if op.task_graph < -1:
            yield op, f"has TaskGraph {op.task_graph}"
        if op.forward != -1 and not (0 <= op.forward < len(graph.ops) and op.forward != op.id):
            yield op, f"is the backward op of op {op.forward}"


LAWS: List[Law] = [
    Law("ops and tensors are numbered densely, outputs in order", _numbered),
    Law("names are unique", _named),
    Law("edges end at ops and tensors of the graph", _connected),
    Law("ops come after everything they need, except for the back edges of loops", _ordered),
    Law("shapes are tuples of sizes, dtypes are named", _shaped),
    Law("values belong to constants and have their shape", _constant),
    Law("ops have the numbers of inputs and outputs of their type", _arity),
    Law("phases and annotations are valid", _annotated),
]


def is_asked() -> bool:
    """Whether what passes leave behind is verified: in tests, and in runs with ``WHALE_VERIFY=1``."""
    return os.environ.get("WHALE_VERIFY") == "1"


def verify_pass(graph: OpGraph, where: str) -> None:
    """:func:`verify` after a pass over ops, if that is asked for."""
    if is_asked():
        verify(graph, where)


def verify(graph: OpGraph, where: str = "") -> None:
    """Check every law, including in function bodies.

    Args:
        where: who built the graph, for the message.

    Raises:
        GraphError: a law is broken; the message names the law, the op and the finding.
    """
    _verify(graph, where, set())


def _verify(graph: OpGraph, where: str, seen: Set[int]) -> None:
    if id(graph) in seen:
        return
    seen.add(id(graph))
    for law in LAWS:
        for op, found in law.check(graph):
            raise GraphError("{}illegal op graph: {} {}, but {}".format(
                where + ": " if where else "", f"{op.name!r} (a {op.type})" if op is not None else "it", found,
                law.name))
    for op in graph.ops:
        for name, body in (op.body or {}).items():
            _verify(body, "{}{} of {!r}".format(where + ", " if where else "", name, op.name), seen)
