"""Which ops of a step compute in a type with half the bytes (mixed precision).

Op types are low, inferred, neutral, high, or fixed (:mod:`whale_tf.ir.traits.precision`).  Inferred and neutral ones follow
from their neighbours, in the forward and the backward pass alike, in this order (TensorFlow's ``auto_mixed_precision.cc``)::

    1  high ──> inferred ──> neutral ──> inferred        after a high op: float32, up to the last inferred or high op reached
    2  low ──> inferred ──> neutral ──> low              between low ops: low
    3  neutral ── low ── neutral                         next to low ops: low

Ops that need the size of a tensor that low ops read take it from the low version, so that the other one need not be sent.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Set, Tuple

from whale_tf.ir.graph import OpGraph
from whale_tf.ir.traits import traits
from whale_tf.ir.traits.row import Gives, Precision
from whale_tf.ir.walk import reached


class Typed(NamedTuple):
    """The inputs and outputs of an op, by position, whose type is its attribute ``attr``."""

    attr: str
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]


def low_ops(graph: OpGraph, typed: Mapping[int, Typed], has_kernel: Callable[[str], bool]) -> Set[int]:
    """The ops that compute in the low type.

    Args:
        typed: candidates, all float32.
        has_kernel: whether devices can compute an op type in the low type.
    """
    kind = {op: traits(graph.ops[op].type).precision for op in typed}
    kind = {op: precision if has_kernel(graph.ops[op].type) else Precision.HIGH for op, precision in kind.items()}
    readers: Dict[int, List[int]] = {op: [] for op in typed}
    sources: Dict[int, List[int]] = {op: [] for op in typed}
    for op, ends in typed.items():
        for output in ends.outputs:
            for reader, position in graph.consumers(graph.ops[op].outputs[output]):
                if reader in typed and position in typed[reader].inputs:
                    readers[op].append(reader)
                    sources[reader].append(op)

    def of(*kinds: Precision) -> Set[int]:
        return {op for op, precision in kind.items() if precision in kinds}

    low, high, neutral = of(Precision.LOW), of(Precision.HIGH), of(Precision.NEUTRAL)
    follows = neutral | of(Precision.INFERRED)
    before = _reached(of(Precision.HIGH, Precision.INFERRED), neutral, sources)
    high = _reached(high, before - low, readers)
    behind = _reached(low, follows - high, readers)
    low = _reached(low, (behind & follows) - high, sources)
    both = {op: readers[op] + sources[op] for op in typed}
    low = _reached(low, neutral - high, both)
    return low.union(op for op in typed if traits(graph.ops[op].type).gives is Gives.SIZES and any(
        reader in low and position in typed[reader].inputs
        for tensor in graph.ops[op].inputs for reader, position in graph.consumers(tensor)))


def _reached(starts: Iterable[int], through: Set[int], edges: Mapping[int, List[int]]) -> Set[int]:
    """``starts``, and everything reached from them along edges into ``through``."""
    return reached(starts, lambda op: through.intersection(edges[op]))
