"""Ops outside of the clones that a static batch size makes wrong, where they read the mini-batches of all model replicas.

Such ops (a metric, a summary) read merged rows.  If model replicas or micro-batches take their own mini-batches, these are more
rows than the script's graph says, and TensorFlow has put the number of rows of one into constants::

    rows of 2 mini-batches ──> Abs ──> Sum ──┬─> sum / count          twice the mean: count is that of one mini-batch
    ones [4, 3] (a Const) ───────────> Sum ──┘
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Optional, Set, Tuple

import numpy as np

from whale_tf.emit.context import Context
from whale_tf.emit.inputs import Inputs
from whale_tf.errors import InexactWarning, UnsupportedOpError
from whale_tf.ir.graph import Op, Phase, elements_of
from whale_tf.ir.traits import traits, types_where
from whale_tf.ir.walk import reached

SCALES = types_where(lambda row: row.rule == "elementwise.quotient" or row.value in ("multiply", "floor_divide"))
SHAPES = types_where(lambda row: row.rule in ("shape.reshape", "shape.broadcast_to"))  # their result's shape is an operand


class Sized(NamedTuple):
    """An op that reads rows of several mini-batches beside what is made for the rows of one.

    Attributes:
        is_certain: it is made for their number, and is not just a number that may be anything.
    """

    op: Op
    fixed: Op
    is_certain: bool


def check_size(context: Context, inputs: Inputs, index: int) -> None:
    """Warns if a fetched op may follow from the static size of one mini-batch.

    Raises:
        UnsupportedOpError: it does.
    """
    found = sized_by_one(context, inputs, index)
    if found is None:
        return
    text = (f"{context.graph.ops[index].name!r} is computed from the rows of {inputs.division.mini_batches} mini-batches, those "
            f"of all model replicas, but op {found.op.name!r} ({found.op.type}) reads {found.fixed.name!r}")
    fix = "leave the batch size open (drop_remainder=False), or set io.nested_batch to 'divide'"
    if found.is_certain:
        raise UnsupportedOpError(f"{text}, which is made for the {inputs.division.batch} rows of one; {fix}")
    warnings.warn(f"{text}, {found.fixed.value}, which may be a number of rows of one; if so, {fix}", InexactWarning)


def sized_by_one(context: Context, inputs: Inputs, index: int) -> Optional[Sized]:
    """Whether what a fetch outside of the clones computes follows from the static size of one mini-batch.

    Args:
        index: the fetched op.
    """
    graph, region, batch = context.graph, context.region, inputs.division.batch
    if not batch or not _is_outside(context, graph.ops[index]):
        return None
    outside = reached([index], lambda number: (
        before for before in graph.predecessors(graph.ops[number]) if _is_outside(context, graph.ops[before])))
    entering = inputs.leaving()
    follow: Set[int] = set()  # ops that follow from rows
    rows: Set[int] = set()  # tensors whose first dimension still counts them
    counts: Set[int] = set()  # numbers of their elements, according to the graph
    for op in (graph.ops[number] for number in sorted({index, *outside})):
        if not _is_outside(context, op):
            continue
        for tensor in op.inputs:
            if tensor in entering or region.contains(graph.producer(tensor)) and region.batch.layout(tensor).is_sharded:
                rows.add(tensor)
        own = [tensor in rows or graph.tensors[tensor].op in follow for tensor in op.inputs]
        if not any(own):
            continue
        follow.add(op.id)
        of_rows = [graph.tensors[tensor].shape for tensor in op.inputs if tensor in rows]
        counts.update(elements_of(shape) for shape in of_rows)
        is_elementwise = traits(op.type).rule.startswith("elementwise") and bool(of_rows)
        if is_elementwise:
            rows.update(tensor for tensor in op.outputs if len(graph.tensors[tensor].shape or ()) == len(of_rows[0] or ()))
        for tensor, follows in zip(op.inputs, own):
            fixed, shape = graph.producer(tensor), graph.tensors[tensor].shape
            if follows or not _is_outside(context, fixed):
                continue
            if is_elementwise and shape and batch > 1 and shape[0] == batch and len(shape) == len(of_rows[0] or ()):
                return Sized(op, fixed, True)  # it has an element for each row of one mini-batch
            if op.type in SHAPES and of_rows and fixed.value is not None and batch > 1 and batch in fixed.value.ravel()[:1]:
                return Sized(op, fixed, True)
            found = _count(context, fixed, batch, counts) if op.type in SCALES and shape == () else None
            if found is not None:
                return Sized(op, *found)
    return None


def _count(context: Context, number: Op, batch: int, counts: Set[int]) -> Optional[Tuple[Op, bool]]:
    """What makes a number the count of rows, or of their elements, and whether that is certain: it adds up ones, or it is cast
    from the size of a tensor."""
    graph = context.graph
    behind = reached([number.id], lambda each: (graph.tensors[tensor].op for tensor in graph.ops[each].inputs))
    for op in (graph.ops[each] for each in sorted({number.id, *behind})):
        shape = graph.tensors[op.outputs[0]].shape if op.outputs else None
        is_ones = traits(op.type).generates or (
            op.value is not None and op.value.dtype.kind in "fb" and bool(np.all(op.value == 1)))
        if shape and shape[0] == batch and is_ones:
            return op, True
        if op.value is not None and op.value.size == 1 and op.value.dtype.kind in "iuf" and batch > 1:
            value = float(op.value)
            if value >= batch and value % batch == 0:
                return op, op is not number and op.value.dtype.kind in "iu" and value in counts
    return None


def _is_outside(context: Context, op: Op) -> bool:
    return not context.region.contains(op) and op.phase not in (Phase.INPUT, Phase.APPLY)
