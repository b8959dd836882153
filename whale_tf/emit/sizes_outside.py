"""Ops outside of the clones that a static batch size makes wrong, where they read the mini-batches of all model replicas.

Such ops (a metric, a summary) read merged rows.  If model replicas or micro-batches take their own mini-batches, these are more
rows than the script's graph says, and TensorFlow has put the number of rows of one into constants::

    rows of 2 mini-batches ──> Abs ──> Sum ──┬─> sum / count          twice the mean: count is that of one mini-batch
    ones [4, 3] (a Const) ───────────> Sum ──┘
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Optional, Set

import numpy as np

from whale_tf.emit.context import Context
from whale_tf.emit.inputs import Inputs
from whale_tf.errors import InexactWarning, UnsupportedOpError
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.traits import types_where
from whale_tf.ir.walk import reached

SCALES = types_where(lambda row: row.rule == "elementwise.quotient" or row.value in ("multiply", "floor_divide"))
SHAPES = types_where(lambda row: row.rule in ("shape.reshape", "shape.broadcast_to"))  # their result's shape is an operand


class Sized(NamedTuple):
    """An op that reads rows of several mini-batches beside what is made for the rows of one.

    Attributes:
        is_certain: this has a dimension of their number, and is not just a number that may be anything.
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
    if not batch or batch < 2 or not _is_outside(context, graph.ops[index]):
        return None
    outside = reached([index], lambda number: (
        before for before in graph.predecessors(graph.ops[number]) if _is_outside(context, graph.ops[before])))
    entering = inputs.leaving()
    rows: Set[int] = set()
    for op in (graph.ops[number] for number in sorted({index, *outside})):
        if not _is_outside(context, op):
            continue
        of_rows = [tensor in entering or graph.tensors[tensor].op in rows or (
            region.contains(graph.producer(tensor)) and region.batch.layout(tensor).is_sharded) for tensor in op.inputs]
        if not any(of_rows):
            continue
        rows.add(op.id)
        for tensor, follows in zip(op.inputs, of_rows):
            producer = graph.producer(tensor)
            if follows or not _is_outside(context, producer):
                continue
            behind = reached([producer.id], lambda number: (graph.tensors[each].op for each in graph.ops[number].inputs))
            for fixed in (graph.ops[number] for number in sorted({producer.id, *behind})):
                if any((graph.tensors[each].shape or (0,))[0] == batch for each in fixed.outputs):
                    return Sized(op, fixed, True)
            if op.type in SHAPES and producer.value is not None and batch in producer.value.ravel()[:1]:
                return Sized(op, producer, True)
            for fixed in (graph.ops[number] for number in sorted({producer.id, *behind})) if op.type in SCALES else ():
                if fixed.value is not None and _is_multiple(fixed.value, batch):  # if it is cast, it counts something
                    return Sized(op, fixed, fixed is not producer and fixed.value.dtype.kind in "iu")
    return None


def _is_outside(context: Context, op: Op) -> bool:
    return not context.region.contains(op) and op.phase not in (Phase.INPUT, Phase.APPLY)


def _is_multiple(value: np.ndarray, batch: int) -> bool:
    return value.size == 1 and value.dtype.kind in "iuf" and float(value) >= batch and float(value) % batch == 0
