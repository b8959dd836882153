"""Which inputs carry the batch."""
from __future__ import annotations

import collections
from typing import Callable, Container, Dict, List, Optional, Sequence, Set

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis.analysis import analyse
from whale_tf.ir.batch_axis.result import BatchAxis, Slice
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import replicated

NONE = replicated()
Analyse = Callable[[Dict[int, int]], BatchAxis]


def find_batch_axis(graph: OpGraph, candidates: Sequence[int], scope: Optional[Container[int]] = None) -> BatchAxis:
    """The batch axis from the inputs divided along it (its ``sources``), always along their dimension 0.

    An input is a batch input if its first dimension has unknown size or, where all sizes are known, the size most common
    among the inputs.  An input that would make some op impossible to divide, and of which no divided op needs single rows,
    is no batch input after all (class weights, a fed table), unless variables are applied to each of its rows.  Scalars never
    are.

    Args:
        candidates: input tensors (placeholders, iterator outputs), in order.
        scope: as for ``analyse``.

    Raises:
        UnsupportedOpError: an input of unknown rank, by name.
    """
    def run(sources: Dict[int, int]) -> BatchAxis:
        return analyse(graph, sources, scope)

    axis = run(dict.fromkeys(_with_batch_dimension(graph, candidates), 0))
    while axis.unknown and len(axis.sources) > 1:
        better = _with_one_less(graph, axis, run)
        if better is None:
            break
        axis = better
    return axis


def _with_batch_dimension(graph: OpGraph, candidates: Sequence[int]) -> List[int]:
    ranked = []
    for tensor in candidates:
        shape = graph.tensors[tensor].shape
        if shape is None:
            raise UnsupportedOpError(
                f"the rank of input {graph.tensor_name(tensor)!r} is not known, so its batch dimension is not known "
                f"either; give its shape, for "
                f"example {graph.producer(tensor).name}.set_shape([None, ...])")
        if shape:
            ranked.append((tensor, shape[0]))
    if any(size is None for _, size in ranked):
        return [tensor for tensor, size in ranked if size is None]
    if not ranked:
        return []
    counts = collections.Counter(size for _, size in ranked)
    most = max(counts.values())
    batch = next(size for _, size in ranked if counts[size] == most)
    return [tensor for tensor, size in ranked if size == batch]


def _with_one_less(graph: OpGraph, axis: BatchAxis, run: Analyse) -> Optional[BatchAxis]:
    """The axis without one source that is better left undivided; None if there is no such source."""
    causes = _causes(axis)
    for tensor in axis.sources:
        rest = run({t: d for t, d in axis.sources.items() if t != tensor})
        if _causes(rest) < causes and not _is_sliced(graph, rest, tensor) and not _feeds_model(graph, axis, rest):
            return rest
    return None


def _causes(axis: BatchAxis) -> Set[int]:
    """Ops that cannot be divided."""
    return {unknown.op for unknown in axis.unknown.values()}


def _feeds_model(graph: OpGraph, axis: BatchAxis, rest: BatchAxis) -> bool:
    """Whether an op applies a variable to each example in ``axis``, and to none in ``rest``."""
    for op in graph.ops:
        if any(axis.layouts.get(t, NONE).is_sharded and not rest.layouts.get(t, NONE).is_sharded for t in op.outputs) and any(
                axis.depends_on_variables(t) and t not in axis.layouts and not axis.conversions.get((op.id, position))
                for position, t in enumerate(op.inputs)):
            return True
    return False


def _is_sliced(graph: OpGraph, axis: BatchAxis, tensor: int) -> bool:
    """Whether a divided op takes rows of a tensor computed from the given one."""
    reached: Set[int] = {tensor}
    stack = [tensor]
    while stack:
        for op, _ in graph.consumers(stack.pop()):
            for result in graph.ops[op].outputs:
                if result not in reached:
                    reached.add(result)
                    stack.append(result)
    return any(isinstance(step, Slice) and graph.ops[op].inputs[position] in reached
               for (op, position), steps in axis.conversions.items() for step in steps)
