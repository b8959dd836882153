"""Where an op reads the examples of two inputs that are taken for equally many.

The analysis finds out from an op that combines two inputs one by one that they have equally many examples, and uses this in every
op that follows both.  So wherever they meet, their numbers have to be compared when the step runs::

    x ──> matmul ──> prediction ──┐
                                  ├── sub ──> square ──> ...      sub: x and y meet; square follows from sub
    y ────────────────────────────┘
"""
from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, Tuple

from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.traits import CALLS, CONDITIONALS, FLOW, WHILES, traits

Pair = Tuple[int, int]  # two inputs, in the order of the mini-batch's inputs
FUNCTIONAL = WHILES | CONDITIONALS | CALLS
_NOTHING: FrozenSet[Pair] = frozenset()


def meetings(graph: OpGraph, batch: BatchAxis, ops: Iterable[int]) -> Dict[int, Tuple[Pair, ...]]:
    """Op -> pairs of inputs that meet there for the first time; ops that follow from it are not listed again.  No result of a
    functional op follows from all of its inputs: TensorFlow may write the body in its place.  Ops that only pass values on, as
    those of loops of version 1 do, are not listed.

    Args:
        ops: those that are divided, in graph order.
    """
    batch_of = {source: name for name, sources in batch.batches.items() for source in sources}
    if all(len(sources) < 2 for sources in batch.batches.values()):
        return {}
    found: Dict[int, Tuple[Pair, ...]] = {}
    compared: Dict[int, FrozenSet[Pair]] = {}  # op -> pairs that meet in it or before it
    for index in ops:
        op = graph.ops[index]
        before = _NOTHING
        for tensor in op.inputs if op.type not in FUNCTIONAL else ():
            more = compared.get(graph.tensors[tensor].op, _NOTHING)
            before = before if more <= before else before | more
        is_flow = traits(op.type).role in FLOW  # a loop's Merge would wait for an iteration that waits for it
        new = [] if is_flow else [
            pair for pair in _pairs(batch, batch_of, op) if not _follows(pair, before) and not _is_static(batch, pair)]
        if new:
            found[index] = tuple(new)
        if op.type not in FUNCTIONAL:
            compared[index] = before.union(new) if new else before
    return found


def _pairs(batch: BatchAxis, batch_of: Dict[int, str], op: Op) -> List[Pair]:
    firsts: Dict[str, int] = {}
    pairs: Dict[Pair, None] = {}
    for tensor in op.inputs:
        for source in batch.sources_of.get(tensor, ()):
            if source in batch_of:
                first = firsts.setdefault(batch_of[source], source)
                if first != source:
                    pairs[min(first, source), max(first, source)] = None
    return list(pairs)


def _follows(pair: Pair, known: FrozenSet[Pair]) -> bool:
    """Whether two inputs are equally long if those of the known pairs are."""
    if not known or pair in known:
        return pair in known
    reached, stack = {pair[0]}, [pair[0]]
    while stack:
        one = stack.pop()
        for a, b in known:
            other = b if a == one else a if b == one else one
            if other not in reached:
                reached.add(other)
                stack.append(other)
    return pair[1] in reached


def _is_static(batch: BatchAxis, pair: Pair) -> bool:
    """Whether both numbers of examples are known before the step runs."""
    shapes = [batch.graph.tensors[source].shape for source in pair]
    return all(shape is not None and shape[batch.sources[source]] is not None for shape, source in zip(shapes, pair))
